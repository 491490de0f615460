"""The discovery hook, each time in a fresh interpreter: with the real torch and timm, and with stand-ins for both.

The stand-ins produce orders, failures and races that the real packages can't, at no import cost.
"""

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import timm

import timm_ssog_autoload

MODELS = {"vit_ssog_tiny", "vit_ssog_small", "vit_ssog_base"}

LIST_MODELS = "import timm; print(*timm.list_models('vit_ssog*'))"

STAND_INS = {
    "torch/__init__.py": "import timm_ssog_autoload\ntimm_ssog_autoload.install()\n",
    "timm/__init__.py": "from . import layers\nfrom .models import create_model\n",
    "timm/layers.py": "import torch\n",
    "timm/models/__init__.py": "from ._registry import names\n\ndef create_model():\n    return names\n",
    "timm/models/_registry.py": "names = []\n",
    "timm_ssog/__init__.py": "import torch\nfrom timm.models import create_model, names\nnames.append('ssog')\n",
}


FAILS_UNLESS_WORKS_IS_SET = """
import os
if "WORKS" not in os.environ:
    raise ZeroDivisionError
"""


def run_python(code: str, cwd: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with the hook's switches as they are by default."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_AUTOLOAD")}
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_stand_ins(code: str, root: Path, changes: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run code with stand-ins for torch, timm and timm_ssog, some of their files changed."""
    for name, text in {**STAND_INS, **(changes or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return run_python(code, root, PYTHONPATH=str(root))


def assert_silent(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    assert "Overwriting" not in result.stderr
    assert "timm_ssog" not in result.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, timm",
        "import timm, torch",
        "import timm.models",
        "from timm.models import create_model",
        "import timm_ssog",
    ],
)
def test_models_registered_once_in_any_import_order(imports: str, tmp_path: Path) -> None:
    result = run_python(
        f"""
        {imports}
        import sys
        from importlib.machinery import ModuleSpec, SourceFileLoader
        finders, loaded = [type(finder).__module__ for finder in sys.meta_path], "timm_ssog" in sys.modules
        assert loaded and "timm_ssog_autoload" not in finders, (loaded, finders)
        import timm, timm_ssog
        models = timm.models
        assert type(timm) is type(sys) and type(models.__spec__) is ModuleSpec
        assert models.__loader__ is models.__spec__.loader and type(models.__loader__) is SourceFileLoader
        print(*timm.list_models("vit_ssog*"))
        """,
        tmp_path,
        "-Walways",
    )
    assert_silent(result)
    assert set(result.stdout.split()) >= MODELS


def test_importing_torch_alone_imports_nothing_more(tmp_path: Path) -> None:
    names = ["torch", "timm_ssog_autoload", "timm_ssog", "timm"]
    result = run_python(f"import torch, sys; print(*[name for name in {names} if name in sys.modules])", tmp_path)
    assert_silent(result)
    assert result.stdout.split() == ["torch", "timm_ssog_autoload"]


def test_spawned_process_has_the_models(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing

        def build():
            import timm
            print(type(timm.create_model("vit_ssog_tiny", device="meta")).__name__)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=build)
            process.start()
            process.join()
            raise SystemExit(process.exitcode)
        """)
    )
    result = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path)
    assert_silent(result)
    assert result.stdout.split() == ["VitSsog"]


@pytest.mark.parametrize("switch", ["TIMM_SSOG_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_opting_out_leaves_the_explicit_import(switch: str, tmp_path: Path) -> None:
    result = run_python(f"{LIST_MODELS}\nimport timm_ssog\n{LIST_MODELS}", tmp_path, "-Walways", **{switch: "0"})
    assert_silent(result)
    before, after = result.stdout.split("\n", 1)
    assert not before
    assert set(after.split()) >= MODELS


def test_failing_plugin_warns_and_leaves_timm_working(tmp_path: Path) -> None:
    (tmp_path / "timm_ssog.py").write_text("raise OSError('no such kernel')\n")
    result = run_python("import timm; print(timm.is_model('vit_tiny_patch16_224'))", tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]
    assert result.stderr.count("RuntimeWarning") == 1
    assert "OSError: no such kernel" in result.stderr
    assert "TIMM_SSOG_AUTOLOAD=0" in result.stderr


def test_folder_that_hides_an_editable_install_warns(tmp_path: Path) -> None:
    (tmp_path / "timm_ssog").mkdir()
    # before everything else on the path, as the directory of a script is; the real package is found later, if at all
    code = "import sys, timm; print(timm.is_model('vit_tiny_patch16_224'), timm.is_model('vit_ssog_tiny'))"
    result = run_python(code, tmp_path, PYTHONPATH=str(tmp_path))
    if result.stdout.split() == ["True", "True"]:
        pytest.skip("this package is installed so that no folder can hide it")
    assert result.stdout.split() == ["True", "False"], result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    assert f"{tmp_path / 'timm_ssog'} is a folder without __init__.py" in result.stderr


def test_failing_plugin_is_not_tried_again(tmp_path: Path) -> None:
    result = run_stand_ins(
        "import timm, importlib, torch; importlib.reload(timm.models); import timm.models; print(timm.create_model())",
        tmp_path,
        {"timm_ssog/__init__.py": "print('tried'); raise OSError('no such kernel')"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["tried", "[]"]
    assert result.stderr.count("RuntimeWarning") == 1


def test_failing_import_of_timm_keeps_its_error_and_may_be_retried(tmp_path: Path) -> None:
    result = run_stand_ins(
        """
        import os, sys
        try:
            import timm
        except ZeroDivisionError as error:
            print("failed", "timm_ssog" in sys.modules)
        os.environ["WORKS"] = "1"
        import timm
        print(timm.create_model())
        """,
        tmp_path,
        {"timm/models/__init__.py": STAND_INS["timm/models/__init__.py"] + FAILS_UNLESS_WORKS_IS_SET},
    )
    assert_silent(result)
    assert result.stdout.splitlines() == ["failed False", "['ssog']"]


@pytest.mark.parametrize("fails_at_first", [False, True])
def test_torch_imported_by_timm_models_itself(fails_at_first: bool, tmp_path: Path) -> None:
    models = f"import torch, sys\nassert 'timm_ssog' not in sys.modules\n{STAND_INS['timm/models/__init__.py']}"
    result = run_stand_ins(
        """
        import os, sys
        try:
            import timm
        except ZeroDivisionError:
            os.environ["WORKS"] = "1"
            import timm
        print(timm.create_model(), type(timm) is type(sys))
        print(any(type(finder).__module__ == "timm_ssog_autoload" for finder in sys.meta_path))
        """,
        tmp_path,
        {
            "timm/__init__.py": "from .models import create_model\n",
            "timm/models/__init__.py": models + FAILS_UNLESS_WORKS_IS_SET * fails_at_first,
        },
    )
    assert_silent(result)
    assert result.stdout.split() == ["['ssog']", "True", "False"]


@pytest.mark.parametrize("again", [False, True])
def test_installing_where_timm_is_already_imported(again: bool, tmp_path: Path) -> None:
    result = run_stand_ins(
        f"""
        import timm, timm_ssog_autoload, sys
        for _ in range({1 + again}):
            timm_ssog_autoload.install()
        print(timm.create_model(), any(type(f).__module__ == "timm_ssog_autoload" for f in sys.meta_path))
        """,
        tmp_path,
        {"torch/__init__.py": ""},
    )
    assert_silent(result)
    assert result.stdout.split() == ["['ssog']", "False"]


def test_installing_twice_adds_one_finder(tmp_path: Path) -> None:
    result = run_stand_ins(
        """
        import torch, timm_ssog_autoload, sys
        timm_ssog_autoload.install()
        print(sum(type(f).__module__ == "timm_ssog_autoload" for f in sys.meta_path))
        """,
        tmp_path,
    )
    assert_silent(result)
    assert result.stdout.split() == ["1"]


def test_reloading_timm_models(tmp_path: Path) -> None:
    result = run_stand_ins(
        "import timm.models, importlib; importlib.reload(timm.models); print(timm.models.create_model())", tmp_path
    )
    assert_silent(result)
    assert result.stdout.split() == ["['ssog']"]


def test_loader_answers_like_the_real_one_before_the_import() -> None:
    spec = timm_ssog_autoload._Finder().find_spec("timm.models", timm.__path__)
    assert spec is not None
    real, loader = timm.models.__loader__, copy.copy(spec.loader)
    assert isinstance(real, SourceFileLoader)
    assert isinstance(loader, timm_ssog_autoload._Loader)
    assert loader.is_package("timm.models")
    assert loader.get_source("timm.models") == real.get_source("timm.models")
    assert loader.get_code("timm.models") == real.get_code("timm.models")
    assert loader.get_resource_reader("timm.models").is_resource("__init__.py")
    assert not hasattr(loader, "no_such_attribute")


def test_threads_importing_timm_all_find_the_models(tmp_path: Path) -> None:
    result = run_stand_ins(
        """
        import threading
        found, start = [], threading.Barrier(8)

        def create():
            start.wait()
            from timm.models import create_model
            found.append(list(create_model()))

        threads = [threading.Thread(target=create) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(found == [["ssog"]] * 8)
        """,
        tmp_path,
        {"timm_ssog/__init__.py": f"import time; time.sleep(0.2)\n{STAND_INS['timm_ssog/__init__.py']}"},
    )
    assert_silent(result)
    assert result.stdout.split() == ["True"]


def test_threads_importing_timm_and_the_plugin_crosswise(tmp_path: Path) -> None:
    pause = "import time; time.sleep(0.3)\n"
    result = run_stand_ins(
        """
        import importlib, threading, torch
        names, start = ["timm", "timm_ssog"], threading.Barrier(2)

        def load(name):
            start.wait()
            importlib.import_module(name)

        threads = [threading.Thread(target=load, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        import timm
        print(timm.create_model())
        """,
        tmp_path,
        {
            "timm_ssog/__init__.py": f"{pause}{STAND_INS['timm_ssog/__init__.py']}",
            "timm/models/__init__.py": f"{STAND_INS['timm/models/__init__.py']}\n{pause}",
        },
    )
    assert_silent(result)
    assert result.stdout.split() == ["['ssog']"]


def test_installing_does_next_to_nothing(tmp_path: Path) -> None:
    """Every `import torch` pays for it: no import, no file, and few calls."""
    result = run_python(
        """
        import sys, timm_ssog_autoload
        loaded, calls, opened = set(sys.modules), [], []
        sys.addaudithook(lambda event, arguments: opened.append(event) if event in ("open", "import") else None)
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        timm_ssog_autoload.install()
        sys.setprofile(None)
        assert type(sys.meta_path.pop(0)).__module__ == "timm_ssog_autoload"
        print(len(set(sys.modules) - loaded), len(opened), len(calls))
        """,
        tmp_path,
    )
    assert_silent(result)
    modules, files, calls = map(int, result.stdout.split())
    assert modules == files == 0
    assert calls < 200


@pytest.mark.parametrize(
    ("value", "is_on"), [("", True), ("1", True), ("true", True), ("False", False), ("off", False)]
)
def test_values_of_the_switch(value: str, is_on: bool, tmp_path: Path) -> None:
    code = """
    import sys, timm_ssog_autoload
    timm_ssog_autoload.install()
    print(any(type(finder).__module__ == "timm_ssog_autoload" for finder in sys.meta_path))
    """
    result = run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", TIMM_SSOG_AUTOLOAD=value)
    assert result.stdout.split() == [str(is_on)], result.stderr
