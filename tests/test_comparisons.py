"""The experiments over seeds: the solvers and the matched comparison, tiny from end to end, and their tables."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm.task", reason="the examples train with timm.task, which this timm lacks")
digits: Any = importlib.import_module("digits")
matched: Any = importlib.import_module("matched")
solvers: Any = importlib.import_module("solvers")


def test_tiny_comparison_of_solvers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(solvers, "FINE_STEPS", 6)
    output = tmp_path / "solvers.json"
    solvers.main(["--quick", "--seeds", "1", "--only", "euler x 12", "--output", str(output)])
    (run,) = json.loads(output.read_text())["runs"]
    assert run["options"]["solver_steps"] == 12
    assert 0 <= run["flips"] <= 100
    assert run["drift"] > 0
    printed = capsys.readouterr().out
    assert f"| euler x 12 | 1 | {run['accuracy']:.1f} ± - | {run['exact_accuracy']:.1f} ± - |" in printed


def test_solvers_are_compared_at_one_cost():
    from timm_ssog.runge_kutta import TABLEAUS

    for options in solvers.SOLVERS.values():
        assert options["solver_steps"] * len(TABLEAUS[options["solver"]].stages) == 12


def test_tiny_matched_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "matched.json"
    only = ["looped, tiny, SSoG", "looped, tiny, attention"]
    matched.main(["--quick", "--seeds", "1", "--only", *only, "--output", str(output)])
    ours, twin = json.loads(output.read_text())["runs"]
    assert list(ours["zero_shot"]) == ["relative", "cells"]
    assert list(twin["zero_shot"]) == ["attention"]
    assert ours["accuracy"] == ours["zero_shot"]["relative"]["1"] == ours["zero_shot"]["cells"]["1"]
    assert ours["parameters"] < twin["parameters"]
    printed = capsys.readouterr().out
    assert f"| looped | tiny | 1 | {ours['parameters']:,} (-" in printed
    assert f"{ours['accuracy'] - twin['accuracy']:+.1f} ± - |" in printed


def test_matched_comparison_on_a_timm_dataset(tmp_path: Path):
    images, labels = digits.digits("test")
    for split, chosen in (("train", slice(0, 20)), ("validation", slice(20, 30))):
        for index, (image, label) in enumerate(zip(images[chosen], labels[chosen], strict=True)):
            folder = tmp_path / "data" / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.repeat(image[..., None], 3, -1)).save(folder / f"{index}.png")
    output = tmp_path / "results.json"
    command = ["--dataset", "folder", "--data-dir", str(tmp_path / "data"), "--num-classes", "10", "--workers", "0"]
    command += ["--img-size", "32", "--epochs", "1", "--seeds", "1", "--amp", "--output", str(output)]
    command += ["--batch-size", "10"]
    matched.main([*command, "--only", "continuous, tiny, SSoG"])
    content = json.loads(output.read_text())
    (run,) = content["runs"]
    assert content["recipe"]["dataset"] == "folder"
    assert content["recipe"]["img_size"] == 32
    assert run["parameters"] > 500_000  # the registered size
    assert set(run["zero_shot"]["relative"]) == {"1", "1.5", "2", "3"}
    with pytest.raises(ValueError, match="is batch_size above the number of images"):
        matched.main([*command[:-2], "--batch-size", "30", "--only", "looped, tiny, SSoG", "--output", f"{output}2"])
    with pytest.raises(SystemExit, match=r"another recipe \(epochs\)"):
        matched.main([*command, "--only", "continuous, tiny, SSoG", "--epochs", "2"])

    shutil.rmtree(tmp_path / "data" / "validation")
    with pytest.raises(SystemExit, match="must hold images to test on"):
        matched.main([*command, "--only", "looped, tiny, SSoG", "--output", f"{output}3"])


def record(depth: str, width: str, mixer: str, seed: int, accuracy: float) -> dict[str, Any]:
    tested = {f"{scale:g}": accuracy - scale for scale in matched.SCALES}
    kernels = ("relative", "cells") if mixer == "SSoG" else ("attention",)
    return {
        "setting": f"{depth}, {width}, {mixer}",
        "seed": seed,
        "accuracy": accuracy,
        "parameters": 90 if mixer == "SSoG" else 100,
        "zero_shot": dict.fromkeys(kernels, tested),
    }


def test_differences_are_paired_by_seed_and_judged_by_their_own_spread():
    # the seeds differ by far more than the mixers do
    runs = [record("looped", "tiny", "SSoG", seed, 10.0 * seed + 7) for seed in range(3)]
    runs += [record("looped", "tiny", "attention", seed, 10.0 * seed + (0, 1, 2)[seed]) for seed in range(3)]
    assert matched.paired(runs, "looped") == [7, 6, 5]
    mean, margin = matched.gain([7, 6, 5])
    assert (mean, margin) == (pytest.approx(6), pytest.approx(2 / 3**0.5))
    table = matched.table(runs)
    assert "| looped | tiny | 3 | 90 (-10.0%) | 100 | 17.0 ± 10.0 | 11.0 ± 11.0 | +6.0 ± 1.2 |" in table
    assert "Looped: +6.0 ± 1.2 points over all widths and seeds. SSoG is ahead by more than two" in table
    assert "5.4 on CIFAR-100, is reached here." in table
    assert "| looped, SSoG, kernels cells | 16.0 | 15.5 | 15.0 | 14.0 |" in table
    assert "| looped, twin | 10.0 |" in table
    assert "discrete" not in table

    even = [record("discrete", "base", mixer, seed, 50.0 + seed) for seed in range(3) for mixer in matched.MIXERS]
    assert "Discrete: +0.0 ± 0.0" in matched.table(even)
    assert "SSoG is not ahead" in matched.table(even)
    assert "2.2 on CIFAR-100, is not reached here." in matched.table(even)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--img-size", "-2"], "--img-size must be at least 1, got -2"),
        (["--quick", "--dataset", "torch/cifar100"], "--quick is for the digits"),
        (["--img-size", "64"], "--img-size goes with --dataset"),
        (["--dataset", "folder", "--img-size", "48"], "--img-size must be a multiple of 32, got 48"),
        (["--dataset", "folder", "--workers", "-1"], "--workers must be at least 0, got -1"),
        (["--device", "abacus"], "--device abacus cannot be used"),
    ],
)
def test_matched_refuses_what_it_cannot_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        matched.main(arguments)
    assert message in capsys.readouterr().err
