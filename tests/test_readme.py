"""Every block of the README runs as it stands."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
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
    else:
        assert "vit_ssog_small_ode" in result.stdout


@pytest.mark.parametrize("experiment", ["ablation", "flow"])
def test_tables_of_experiments_are_those_of_the_results(experiment, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    runs = json.loads((ROOT / "examples" / "results" / f"{experiment}.json").read_text())["runs"]
    assert importlib.import_module(experiment).table(runs) in README.read_text()


def test_tables_between_comments_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    readme_tables = importlib.import_module("readme_tables")
    tables = readme_tables.tables()
    assert "<!-- table: benchmark targets -->" in README.read_text()
    assert readme_tables.fill(README.read_text(), tables) == README.read_text()


def test_benchmark_report_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    results = ROOT / "examples" / "results" / "benchmark.json"
    content = json.loads(results.read_text())
    report = importlib.import_module("bench_report").report(content["recipe"], content["runs"])
    assert results.with_suffix(".md").read_text() == report + "\n"


def test_what_the_readme_says_of_the_digits_checkpoint_was_measured():
    rows = json.loads((ROOT / "hub_cards" / "vit_ssog_tiny.mnist5k" / "run" / "results.json").read_text())
    top1 = {row["img_size"]: row["top1"] for row in rows}
    text = " ".join(README.read_text().split())
    assert f"it reads {top1[32]} % right, and enlarged to 96 px still {top1[96]} %" in text


def test_what_the_readme_says_of_the_matched_comparison_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    matched = importlib.import_module("matched")
    runs = json.loads((ROOT / "examples" / "results" / "matched.json").read_text())["runs"]
    gains = {(depth, width): matched.paired(runs, depth, width) for depth in matched.DEPTHS for width in matched.WIDTHS}
    assert {len(differences) for differences in gains.values()} == {3}
    unclear = {
        cell
        for cell, differences in gains.items()
        if not 0 < matched.gain(differences)[1] < matched.gain(differences)[0]
    }
    text = " ".join(README.read_text().split())
    assert "In the narrowest shared blocks one of the three seeds does not learn" in text
    assert "in all other cells SSoG is ahead by more than two standard errors" in text
    longer = json.loads((ROOT / "examples" / "results" / "matched-16-epochs.json").read_text())
    ours, twin = (run["accuracy"] for run in longer["runs"])
    assert longer["recipe"]["epochs"] == 16
    assert f"the small discrete models come to {ours} and {twin} %" in text
    assert unclear == {("looped", "tiny"), ("continuous", "tiny")}
    assert [sum(difference < 0 for difference in gains[cell]) for cell in unclear] == [1, 1]


def test_what_the_readme_says_of_the_bounds_was_counted():
    runs = json.loads((ROOT / "examples" / "results" / "benchmark.json").read_text())["runs"]
    counts = {run["size"]: run["counts"] for run in runs if run["measure"] == "cost" and run["img_size"] == 1024}
    shares = [counts[size]["ceiling"]["flops"] / counts[size]["ssog"]["flops"] for size in ("tiny", "small", "base")]
    text = " ".join(README.read_text().split())
    tiny, small, base = (round(100 * share) for share in shares)
    assert f"no more than {tiny}, {small} and {base} % of the ceiling can be kept" in text
    tiny, small, base = (4 * (64 + 64) / width for width in (192, 384, 768))
    assert f"{tiny:.1f} for tiny, {small:.1f} for small and {base:.1f} for base at 1024 px" in text


def test_what_the_readme_says_of_the_flow_was_measured():
    def runs(name: str, setting: str) -> list[dict]:
        content = json.loads((ROOT / "examples" / "results" / f"{name}.json").read_text())
        return [run for run in content["runs"] if run["setting"] == setting]

    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.1f}"

    text = " ".join(README.read_text().split())
    before, after = runs("solvers", "midpoint x 6"), runs("flow", "as registered")
    assert {run["seed"] for run in before} == {run["seed"] for run in after} == {0, 1, 2}
    assert f"solved exactly, {mean([run['flips'] for run in before])} % of its predictions change" in text
    assert f"top-1 {mean([run['accuracy'] for run in before])} ± " in text
    cost = mean([run["accuracy"] - run["half"]["accuracy"] for run in after])
    assert f"Half the evaluations, midpoint x 3, cost {cost} points" in text
