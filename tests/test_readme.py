"""Every block of the README runs as it stands."""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
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
    """Every file of the package is in what was installed, those that are not Python too."""
    package = ROOT / "timm_ssog"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {Path("py.typed"), Path("hub/template.md")} <= files
    assert {path for path in files if not (installed / path).is_file()} == set()


@pytest.mark.parametrize("code", blocks("bash"))
def test_bash_blocks_run(code, tmp_path):
    scripts = Path(sys.executable).parent
    if "pip install" in code:
        # into an environment of its own, without the gigabytes of its dependencies
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


def test_the_readme_is_read_in_one_go():
    assert len(README.read_text().splitlines()) <= 180


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    for folder in (ROOT / "examples", ROOT / "examples" / "lab"):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


def runs(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def words(page: Path) -> str:
    return " ".join(page.read_text().split())


def mean(values: Iterable[float]) -> str:
    return f"{statistics.mean(values):.1f}"


def test_tables_of_the_page_of_results_are_those_of_the_results(example):
    results_tables = example("results_tables")
    tables = results_tables.tables()
    assert {"ablation", "benchmark targets", "exported_speed", "flow", "matched"} <= {
        name for name, _ in results_tables.REGION.findall(PAGE.read_text())
    }
    assert results_tables.fill(PAGE.read_text(), tables) == PAGE.read_text()


def test_benchmark_report_is_that_of_the_results(example):
    content = json.loads((RESULTS / "benchmark.json").read_text())
    report = example("bench_report").report(content["recipe"], content["runs"])
    assert (RESULTS / "benchmark.md").read_text() == report + "\n"


def test_speed_in_the_table_was_measured(example):
    records = [run for run in runs("benchmark") if run.get("img_size") == 1024]
    [cell] = example("bench_report").select(records, "inference", "small", "discrete")
    speed_up = example("bench_report").speed_up
    text = README.read_text()
    slower = f"{speed_up(cell, 'twin'):.2f}x slower | {speed_up(cell, 'timm'):.2f}x slower |"
    assert f"| throughput at 1024 px, PyTorch, one CPU thread | 1 | {slower}" in text
    exported = example("exported_speed")
    [record] = [run for run in runs("exported_speed") if (run["size"], run["img_size"]) == ("small", 1024)]
    for runtime in ("ONNX Runtime", "OpenVINO"):
        twin, vit = (exported.speed_up(record, runtime, other) for other in ("twin", "timm"))
        assert f"exported to {runtime} | 1 | {twin:.2f}x slower | {vit:.2f}x slower |" in text


def test_accuracy_in_the_table_was_measured():
    def discrete(mixer: str, coords: str, scale: str) -> str:
        settings = [run for run in runs("matched") if re.fullmatch(f"discrete, .*, {mixer}", run["setting"])]
        assert len(settings) == 9
        return mean(run["zero_shot"][coords][scale] for run in settings)

    text = README.read_text()
    for scale in ("1", "2"):
        assert f"| {discrete('SSoG', 'relative', scale)} | {discrete('attention', 'attention', scale)} | - |" in text


def test_parameters_in_the_tables_were_counted():
    def millions(name: str, **options: Any) -> str:
        with torch.device("meta"):
            return f"{sum(p.numel() for p in timm.create_model(name, **options).parameters()) / 1e6:.1f} M"

    text = README.read_text()
    counts = [millions("vit_ssog_small"), millions("vit_ssog_small", mixer="attention")]
    assert f"| {' | '.join([*counts, millions('vit_small_patch16_224')])} |" in text
    sizes = " | ".join(millions(f"vit_ssog_{size}") for size in ("tiny", "small", "base"))
    assert f"| `vit_ssog_<size>`: 12 blocks | {sizes} |" in text


def test_what_is_said_of_the_digits_checkpoint_was_measured():
    rows = json.loads((ROOT / "hub_cards" / "vit_ssog_tiny.mnist5k" / "run" / "results.json").read_text())
    top1 = {row["img_size"]: row["top1"] for row in rows}
    said = f"{top1[32]} % of the 1,000 test images right at 32 px, and {top1[96]} % when they are enlarged to 96 px"
    assert said in words(README)


def test_what_is_said_of_the_matched_comparison_was_measured(example):
    matched = example("matched")
    gains = {
        (depth, width): matched.paired(runs("matched"), depth, width)
        for depth in matched.DEPTHS
        for width in matched.WIDTHS
    }
    assert {len(differences) for differences in gains.values()} == {3}
    unclear = {
        cell
        for cell, differences in gains.items()
        if not 0 < matched.gain(differences)[1] < matched.gain(differences)[0]
    }
    text = words(PAGE)
    assert "In the narrowest shared blocks one of the three seeds does not learn" in text
    assert "in all other cells SSoG is ahead by more than two standard errors" in text
    longer = json.loads((RESULTS / "matched-16-epochs.json").read_text())
    ours, twin = (run["accuracy"] for run in longer["runs"])
    assert longer["recipe"]["epochs"] == 16
    assert f"the small discrete models come to {ours} and {twin} %" in text
    assert f"the gap of the small models falls to {ours} against {twin} (one seed)" in words(README)
    assert unclear == {("looped", "tiny"), ("continuous", "tiny")}
    assert [sum(difference < 0 for difference in gains[cell]) for cell in unclear] == [1, 1]


def test_what_is_said_of_the_bounds_was_counted():
    cost = [run for run in runs("benchmark") if run["measure"] == "cost" and run["img_size"] == 1024]
    counts = {run["size"]: run["counts"] for run in cost}
    shares = [counts[size]["ceiling"]["flops"] / counts[size]["ssog"]["flops"] for size in ("tiny", "small", "base")]
    tiny, small, base = (round(100 * share) for share in shares)
    assert f"no more than {tiny}, {small} and {base} % of the ceiling can be kept" in words(PAGE)
    tiny, small, base = (4 * (64 + 64) / width for width in (192, 384, 768))
    assert f"{tiny:.1f} for tiny, {small:.1f} for small and {base:.1f} for base at 1024 px" in words(PAGE)


def test_what_is_said_of_the_flow_was_measured():
    before = [run for run in runs("solvers") if run["setting"] == "midpoint x 6"]
    after = [run for run in runs("flow") if run["setting"] == "as registered"]
    assert {run["seed"] for run in before} == {run["seed"] for run in after} == {0, 1, 2}
    flips, accuracy = (mean(run[name] for run in before) for name in ("flips", "accuracy"))
    assert f"solved exactly, {flips} % of its predictions on digits change" in words(README)
    assert f"{flips} % of the predictions differed (`solvers.json`, same setting, top-1 {accuracy} ± " in words(PAGE)
    cost = mean(run["accuracy"] - run["half"]["accuracy"] for run in after)
    change = mean(run["flips"] for run in after)
    assert f"{change} % change, and half the evaluations cost {cost} points" in words(README)
