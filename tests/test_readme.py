"""The code in the README runs as it stands, and the figures in its tables are those of the results."""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "examples" / "results"
PAGE = RESULTS / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(README.read_text()) if kind == language]


def test_every_block_is_of_a_kind_that_is_run():
    assert {kind for kind, _ in BLOCK.findall(README.read_text())} == {"python", "bash"}
    assert README.read_text().count("```") == 2 * len(BLOCK.findall(README.read_text()))


def test_python_blocks_run_one_after_the_other(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "evaluations" in result.stdout
    assert "finite, hence a unique solution" in result.stdout


def assert_whole(installed: Path) -> None:
    """Every file of the package is installed, including those that are not Python."""
    package = ROOT / "timm_ssog"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {Path("py.typed"), Path("hub/template.md")} <= files
    assert {path for path in files if not (installed / path).is_file()} == set()


@pytest.mark.parametrize("code", blocks("bash"))
def test_bash_blocks_run(code, tmp_path):
    scripts = Path(sys.executable).parent
    if "pip install" in code:
        # into its own environment, without the gigabytes of its dependencies
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
        scripts = tmp_path / "venv" / "bin"
    environment = {**os.environ, "PIP_NO_DEPS": "1", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    if "pip install" in code:
        installed = {path.name for path in (tmp_path / "venv").glob("lib/python3*/site-packages/*")}
        assert {"timm_ssog", "timm_ssog_autoload.py"} <= installed
        assert_whole(next((tmp_path / "venv").glob("lib/python3*/site-packages/timm_ssog")))
    else:
        assert "vit_ssog_small_ode" in result.stdout


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 180


def runs(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def figures() -> list[list[str]]:
    """The rows of the README's tables, each without its first cell."""
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in README.read_text().splitlines() if "|" in line]


def mean(values: Iterable[float]) -> str:
    return f"{statistics.mean(values):.1f}"


def test_tables_of_the_page_of_results_are_those_of_the_results():
    results_tables = importlib.import_module("results_tables")
    tables = results_tables.tables()
    assert {"ablation", "benchmark targets", "exported_speed", "flow", "matched"} <= {
        name for name, _ in results_tables.REGION.findall(PAGE.read_text())
    }
    assert results_tables.fill(PAGE.read_text(), tables) == PAGE.read_text()


def test_benchmark_report_is_that_of_the_results():
    content = json.loads((RESULTS / "benchmark.json").read_text())
    report = importlib.import_module("bench_report").report(content["recipe"], content["runs"])
    assert (RESULTS / "benchmark.md").read_text() == report + "\n"


def slower(*ratios: float) -> list[str]:
    """A row that gives SSoG 1 and says how many times slower each other model is."""
    return ["1", *(f"{ratio:.2f}x slower" for ratio in ratios)]


def test_speed_in_the_table_was_measured():
    exported = importlib.import_module("exported_speed")
    [record] = [run for run in runs("exported_speed") if (run["size"], run["img_size"]) == ("small", 1024)]
    for runtime in ("PyTorch", "ONNX Runtime", "OpenVINO"):
        assert slower(*(exported.speed_up(record, runtime, other) for other in ("twin", "timm"))) in figures()


def test_accuracy_in_the_table_was_measured():
    def discrete(mixer: str, coords: str, scale: str) -> str:
        settings = [run for run in runs("matched") if re.fullmatch(f"discrete, .*, {mixer}", run["setting"])]
        assert len(settings) == 9
        return mean(run["zero_shot"][coords][scale] for run in settings)

    for scale in ("1", "2"):
        assert [discrete("SSoG", "relative", scale), discrete("attention", "attention", scale), "-"] in figures()


def test_accuracy_on_photographs_was_measured():
    def top1(setting: str) -> str:
        found = [run["accuracy"] for run in runs("photographs") if run["setting"] == setting]
        assert len(found) == 3
        return mean(found)

    assert [top1("default"), top1("attention"), "-"] in figures()
    converted = runs("warm-start-cifar10")
    both, scratch = (
        mean(run["accuracy"] for run in converted if run["setting"] == of) for of in ("both@1", "scratch@8")
    )
    text = " ".join(README.read_text().split())
    assert f"reaches {both} %; from scratch that takes eight epochs ({scratch} %)" in text


def test_changed_predictions_and_the_cost_of_half_the_evaluations_were_measured():
    def registered(name: str) -> tuple[str, str]:
        found = [run for run in runs(name) if run["setting"] == "as registered"]
        assert len(found) == 3
        cost = mean(run["accuracy"] - run["half"]["accuracy"] for run in found)
        return mean(run["flips"] for run in found), cost

    (few, few_cost), (many, many_cost) = registered("flow"), registered("flow-16-epochs")
    assert (
        f"After four epochs {few} % of the predictions then change, after 16 epochs {many} %; halving the evaluations "
        f"costs {few_cost} and {many_cost} points"
    ) in " ".join(README.read_text().split())
    loops = runs("flow-loops")
    top1 = [mean(run["accuracy"] for run in loops if run["setting"] == of) for of in ("loops", "loops, unit start")]
    assert "Looped models have it too ({} instead of {} % on digits).".format(*top1) in README.read_text()


def test_parameters_in_the_tables_were_counted():
    def millions(name: str, **options: Any) -> str:
        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(name, **options).parameters()) / 1e6
        return f"{count:.1f} M" if count >= 1 else f"{count:.2f} M"

    twin = millions("vit_ssog_small", mixer="attention")
    assert [millions("vit_ssog_small"), twin, millions("vit_small_patch16_224")] in figures()
    for depth in ("", "_looped", "_ode"):
        assert [millions(f"vit_ssog_{size}{depth}") for size in ("tiny", "small", "base")] in figures()
