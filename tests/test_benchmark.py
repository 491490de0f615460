"""The benchmark and the cost sweep run from end to end, and the rule that picks a form of the operator is sane."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from timm_ssog.ops import eager

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

pytest.importorskip("tqdm")
benchmark: Any = importlib.import_module("benchmark")
mixing_cost: Any = importlib.import_module("mixing_cost")


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "results" / "benchmark.json"
    printed = run_example("benchmark.py", "--quick", "--img-sizes", "32", "--output", str(output))
    results = json.loads(output.read_text())
    assert output.with_suffix(".md").read_text() == printed
    assert not list(output.parent.glob("*.part"))

    assert set(results["machine"]) == {"date", "versions", "cpu", "device", "threads"}
    assert results["machine"]["versions"]["torch"] == torch.__version__
    assert results["machine"]["threads"] == 1

    inference = {record["model"]: record for record in results["inference"]}
    assert list(inference) == list(benchmark.MODELS)
    for record in inference.values():
        assert (record["size"], record["img_size"], record["batch"]) == ("tiny", 32, 2)
        assert record["ms"] > 0
        assert record["turns"] >= benchmark.LEAST_TURNS
    assert inference["ceiling"]["to_ceiling"] == inference["twin"]["to_twin"] == 1
    assert inference["ceiling"]["parameters"] < inference["SSoG"]["parameters"] < inference["twin"]["parameters"]

    training = {record["model"]: record for record in results["training"]}
    assert list(training) == list(benchmark.TRAINED)
    for name, record in training.items():
        parameters = inference[name]["parameters"]
        # weights and two moments between the steps; at the peak gradients, too, or what forward saved
        assert 3 * 4 * parameters <= record["standing"] < 3.2 * 4 * parameters
        assert record["peak"] > record["standing"] + max(record["saved"], 4 * parameters)
        assert record["saved"] > 0
        if sys.platform == "linux":
            assert record["process_peak"] is None or record["process_peak"] > record["peak"]
    assert results["targets"] == [], "targets are for the small model"


def test_targets_are_judged() -> None:
    ours = {"model": "SSoG", "size": "small", "to_ceiling": 0.9, "to_twin": 2.0}
    inference = [{**ours, "img_size": size, "batch": benchmark.batch_size(size)} for size in (224, 1024)]
    training = [
        {"model": name, "size": "small", "img_size": 224, "peak": peak, "process_peak": None}
        for name, peak in (("SSoG", 3), ("twin", 2))
    ]
    verdicts = benchmark.judge({"inference": inference, "training": training})
    met = {(verdict["img_size"], verdict["ratio"]): verdict["met"] for verdict in verdicts}
    assert met == {
        (224, "to_ceiling"): True,
        (1024, "to_ceiling"): True,
        (1024, "to_twin"): False,
        (224, "training peak"): False,
    }


def test_saved_bytes_count_every_storage_once() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5, bias=False), torch.nn.Tanh())
    images, labels = torch.randn(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)
    # tanh keeps its output, the loss its log-softmax, the labels and the weight of all of them; the images are not ours
    log_softmax, output, total_weight = 4 * 5 * 4, 4 * 5 * 4, 4
    assert benchmark.saved_bytes(network, images, labels) == log_softmax + output + labels.nbytes + total_weight


def test_batches_hold_the_pixels_of_four_images_of_224() -> None:
    assert [benchmark.batch_size(size) for size in (112, 224, 512, 1024)] == [16, 4, 1, 1]


@pytest.mark.parametrize("arguments", [["--img-sizes", "100"], ["--threads", "0"], ["--models", "huge"]])
def test_benchmark_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failure:
        benchmark.main(arguments)
    assert failure.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_mixing_cost_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    printed = run_example("mixing_cost.py", "--quick", "--rounds", "1", "--output", str(output))
    records = json.loads(output.read_text())
    assert {record["pass"] for record in records} == {"forward", "backward"}
    assert all(record["dense"] > 0 and record["stacked"] > 0 for record in records)
    assert "| fitted |" in printed


def test_fit_finds_constants_without_regret() -> None:
    stacked_cost, build_cost = eager.STACKED_COST, eager.BUILD_COST
    records = [
        {"pass": "forward", "grid": [size, size], "batch": batch, "head_dim": 64, "components": 4}
        for size in (7, 14, 20, 32)
        for batch in (1, 8, 64)
    ]
    with mixing_cost.weights(3.0, 20.0):
        for record in records:
            dense = mixing_cost.picks_dense(record)
            record.update(dense=1.0 if dense else 2.0, stacked=2.0 if dense else 1.0)
    assert mixing_cost.regret(records, 0.0, 0.0) > 0
    assert mixing_cost.regret(records, *mixing_cost.fit(records)) == 0
    assert stacked_cost == eager.STACKED_COST
    assert build_cost == eager.BUILD_COST


@pytest.mark.parametrize("backward", [False, True])
def test_small_grids_are_dense_and_large_ones_stacked(backward: bool) -> None:
    for batch in (4, 64):
        assert eager.prefers_dense(batch, 7, 7, 64, 4, backward=backward)
    for batch in (1, 64):
        assert not eager.prefers_dense(batch, 32, 32, 64, 4, backward=backward)
