"""``python -m timm_ssog``: the launcher and ``info``."""

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

import timm_ssog
from timm_ssog.__main__ import main
from timm_ssog.ops.dispatch import select_implementation

SCRIPT = """
    import json, multiprocessing, os, sys, threading

    def facts():
        main = sys.modules["__main__"]
        return {
            "argv": sys.argv,
            "path": sys.path[0],
            "file": __file__,
            "spec": __spec__,
            "main": facts is main.facts,
            "loader": type(__loader__).__name__,
        }

    def late():
        threading.main_thread().join()
        print(json.dumps(facts is sys.modules["__main__"].facts))

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            spawned = pool.apply(facts)
        models = "timm" in sys.modules and sys.modules["timm"].list_models("vit_ssog*")
        print(json.dumps({"facts": facts(), "spawned": spawned, "models": models}))
        threading.Thread(target=late).start()
    """


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter, with the hook's switches as they are by default."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_AUTOLOAD")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_script_finds_itself_as_under_plain_python(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "train.py"
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    link.symlink_to(folder / "train.py")
    arguments = ("train.py", "--model", "vit_ssog_tiny", "-h", "info")
    plain = run_python(*arguments, cwd=tmp_path)
    launched = run_python("-m", "timm_ssog", *arguments, cwd=tmp_path, TIMM_SSOG_AUTOLOAD="0")
    assert launched.returncode == 0, launched.stderr
    expected, expected_late = map(json.loads, plain.stdout.splitlines())
    got, got_late = map(json.loads, launched.stdout.splitlines())
    assert expected_late
    assert expected["facts"]["path"] == str(folder.resolve())
    assert "vit_ssog_tiny" in got.pop("models")
    assert expected.pop("models") is False
    assert got == expected
    assert got_late == expected_late


def test_script_beside_another_timm_is_told_and_keeps_its_exit_status(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "timm").mkdir(parents=True)
    (clone / "timm" / "__init__.py").touch()
    (clone / "train.py").write_text("raise SystemExit(7)\n")
    result = run_python("-m", "timm_ssog", "clone/train.py", cwd=tmp_path)
    assert result.returncode == 7
    assert f"would import timm from {clone.resolve() / 'timm'}" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m timm_ssog SCRIPT")
    assert "info" in printed


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["inof"], ["expected", "'inof'", "Did you mean 'info'?"]),
        (["no/such/train.py", "--model", "x"], ["expected", "'no/such/train.py'", os.getcwd(), "--help"]),
        (["."], ["expected", "'.'"]),
        (["info", "--verbose"], ["no arguments", "'--verbose'"]),
    ],
)
def test_wrong_arguments(arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert all(part in captured.err for part in parts), captured.err


def test_info(tmp_path: Path) -> None:
    result = run_python("-m", "timm_ssog", "info", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = {line[:16].strip(): line[16:] for line in result.stdout.splitlines()}
    assert lines["torch"] == torch.__version__
    assert lines["timm-ssog"] == metadata.version("timm-ssog")
    assert {"python", "timm", "torchdiffeq", "triton"} <= lines.keys()
    assert {"vit_ssog_tiny", "vit_ssog_small", "vit_ssog_base"} <= set(lines["models"].split(", "))
    assert lines["mixing on cpu"] == ": ".join(select_implementation(torch.device("cpu")))
    assert ("mixing on cuda" in lines) == torch.cuda.is_available()
    assert lines["discovery hook"].startswith("active")


def test_version_is_the_installed_one_or_unknown(tmp_path: Path) -> None:
    assert timm_ssog.__version__ == metadata.version("timm-ssog")
    code = """
        from importlib import metadata

        def missing(name):
            raise metadata.PackageNotFoundError(name)

        import timm  # before, as torch and torchvision ask for versions too
        import timm_ssog
        import importlib
        metadata.version = missing
        importlib.reload(timm_ssog)
        print(timm_ssog.__version__)
        """
    result = run_python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert result.stdout.split() == ["0+unknown"], result.stderr


@pytest.mark.parametrize("switch", ["TIMM_SSOG_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_info_names_the_switch_that_is_off(
    switch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(switch, "0")
    assert main(["info"]) == 0
    assert f"off: {switch}=0" in capsys.readouterr().out


def test_info_tells_a_missing_hook_and_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.delitem(sys.modules, "timm_ssog_autoload", raising=False)
    monkeypatch.setattr(metadata, "version", missing)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "missing: no entry point found" in printed
    assert "timm-ssog       not installed" in printed


def test_scripts_and_info_do_not_need_the_hub():
    code = "import sys, timm_ssog.__main__; sys.exit(any(name.startswith('timm_ssog.hub') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
