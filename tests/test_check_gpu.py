"""The GPU check: a small version of it on the CPU, and how it judges results."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import LAB

check_gpu: Any = importlib.import_module("check_gpu")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has releases for Linux only")
def test_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "results" / "check.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TIMM_SSOG_"))}
    done = subprocess.run(
        [
            *(sys.executable, str(LAB / "check_gpu.py"), "--device", "cpu", "--quick", "--minutes", "60"),
            *("--output", str(output)),
        ],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(output.read_text())
    assert output.with_suffix(".md").read_text() == done.stdout
    assert not list(output.parent.glob("*.part"))
    assert len(results["errors"]) == len(check_gpu.QUICK_SHAPES) * len(check_gpu.DTYPES)
    assert all(record["right"] and len(record["fused"]) == 4 for record in results["errors"])
    assert "is skipped" not in done.stderr
    assert "does not run" not in done.stderr
    for record in results["operator"]:
        assert record["us"].keys() == {"fused", "eager", "compiled einsum", "attention"}
        assert all(microseconds > 0 for microseconds in record["us"].values())
    models = {(record["model"], record["training"]) for record in results["models"]}
    assert models == {(name, training) for name in check_gpu.MODELS for training in (False, True)}
    for record in results["models"]:
        assert record["images/s"].keys() == set(check_gpu.VARIANTS)
        assert record["speedup over ssog"] == 1
    assert all(figure > 0 for figure in results["ceilings"].values())
    assert results["left_out"] == results["targets"] == []


def results() -> dict[str, Any]:
    errors = [{"shape": [1], "dtype": "float32", "fused": [1.0], "eager": [0.1], "right": False}]
    operator = [
        {
            "grid": 64,
            "batch": 1,
            "part": "forward, graph",
            "us": {"fused": 2.0},
            "speedup over": {"compiled einsum": 2.5},
        }
    ]
    models = [
        {
            "model": "vit_ssog_small_ode",
            "px": 1024,
            "batch": 1,
            "training": False,
            "speedup over twin": 2.75,
            "images/s": {"ssog": 2.0, "twin": 1.0},
            "peak MiB": {"ssog": 30.0, "twin": 40.0, "unfused": None},
        }
    ]
    found = {"machine": {"device": "a card", "versions": {}, "date": "today"}, "errors": errors, "ceilings": {}}
    return found | {"operator": operator, "models": models, "left_out": ["something"], "targets": []}


def test_targets_are_judged_where_measured() -> None:
    verdicts = {verdict["target"]: verdict["met"] for verdict in check_gpu.judge(results())}
    assert verdicts == {
        "operator at 64 x 64, speedup over compiled einsum": False,
        "vit_ssog_small_ode at 1024 px, speedup over its twin": True,
        "vit_ssog_small_ode at 1024 px, peak memory saved against twin": True,
    }


def test_report_says_what_is_wrong_and_what_is_missing() -> None:
    found = results()
    found["targets"] = check_gpu.judge(found)
    report = check_gpu.report(found)
    assert "Right in 0 of 1 cases" in report
    assert "WRONG" in report
    assert "MISSED: operator at 64 x 64" in report
    assert "Not measured for lack of time: something." in report


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="with the interpreter it can run")
def test_refuses_a_device_without_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failure:
        check_gpu.main(["--device", "cpu"])
    assert failure.value.code == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
