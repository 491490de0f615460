"""The experiments on photographs and on warm starts, tiny from end to end, on images that the test draws."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm.task", reason="the examples train with timm.task, which this timm lacks")
photographs: Any = importlib.import_module("photographs")
warm_start_results: Any = importlib.import_module("warm_start_results")

PER_CLASS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images of each of ten classes, which noise and a brightness of their own tell apart."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(10):
            images = tmp_path / "images" / split / str(label)
            images.mkdir(parents=True)
            for index in range(PER_CLASS):
                pixels = draw.integers(0, 30, (32, 32, 3)) + 20 * label
                Image.fromarray(pixels.astype(np.uint8)).save(images / f"{index}.png")
    return tmp_path / "images"


def test_tiny_comparison_on_photographs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "photographs.json"
    command = [str(folder), "--quick", "--seeds", "1", "--keep", str(tmp_path / "kept"), "--output", str(output)]
    photographs.main([*command, "--only", "default", "attention, weights of 0.02", "timm's ViT"])
    ours, twin, vit = json.loads(output.read_text())["runs"]
    assert ours["parameters"] < twin["parameters"] == vit["parameters"]
    assert set(ours["zero_shot"]) == {"48", "64"}
    assert (tmp_path / "kept" / "default-0.safetensors").is_file()
    assert f"| default | 1 | {ours['accuracy']:.1f} ± - |" in capsys.readouterr().out


def test_photographs_needs_images_of_every_class(folder: Path, tmp_path: Path):
    for image in (folder / "train" / "3").iterdir():
        image.unlink()
    with pytest.raises(SystemExit, match="Expected 5 images of each class"):
        photographs.main([str(folder), "--quick", "--seeds", "1", "--output", str(tmp_path / "photographs.json")])


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_tiny_warm_starts(
    dataset: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warm_start_results, "PER_CLASS", PER_CLASS)
    monkeypatch.setattr(warm_start_results, "train", lambda *_: None)  # a teacher with its initial weights
    output = tmp_path / "warm.json"
    command = ["--dataset", dataset, "--quick", "--seeds", "1", "--teachers", str(tmp_path / "teachers")]
    command += ["--cifar", str(folder), "--output", str(output)]
    warm_start_results.main([*command, "--only", "refit@0", "scratch@32/tenth", "looped-1@4"])
    converted, scratch, looped = json.loads(output.read_text())["runs"]
    assert converted["accuracy"] == converted["converted"]
    assert 0 <= converted["position"] <= 1
    assert (converted["images"], scratch["images"]) == ((50, 6) if dataset == "digits" else (50, 5))
    assert "zero_shot" not in looped
    assert f"| refit@0 | 1 | {converted['accuracy']:.1f} |" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "teachers").iterdir()] == [f"{dataset}-0.safetensors"]
