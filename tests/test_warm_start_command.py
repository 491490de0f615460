"""``python -m timm_ssog warm-start``: from a teacher's folder and images to a folder that timm loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from timm_ssog.__main__ import main
from timm_ssog.conversion import kernel_fit
from timm_ssog.hub import warm_starting

MEAN, STD = (0.3, 0.4, 0.6), (0.2, 0.3, 0.4)
SHAPE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_fit, "MAP_STEPS", 5)
    monkeypatch.setattr(kernel_fit, "VALUE_STEPS", 5)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A teacher in a folder, with its own normalisation."""
    options = {**SHAPE, "global_pool": "avg", "class_token": False}
    config = {"mean": MEAN, "std": STD, "input_size": (3, 32, 32), "crop_pct": 1.0, "license": "mit"}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, pretrained_cfg_overlay=config, **options)
    names = {"label_names": ["a", "b", "c"]}
    model.pretrained_cfg.update(names)  # type: ignore[union-attr]
    save_for_hf(model, str(tmp_path / "teacher"), model_args=options, safe_serialization=True)
    return f"local-dir:{tmp_path / 'teacher'}"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        for label in "abc":
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(5):
                pixels = torch.randint(256, (40, 36, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return tmp_path / "images"


def command(teacher: str, out: Path, images: Path, *more: str) -> int:
    return main(["warm-start", teacher, str(out), "--data-dir", str(images), "--workers", "0", *more])


def test_folder_is_the_converted_model(teacher, images, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(teacher, out, images, "--refit", "--align", "--val-split", "validation", "--images", "12") == 0
    printed = capsys.readouterr()
    assert "top-1: student" in printed.out
    assert "fitting kernels of block 2 of 2" in printed.err
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "warm_start.json"}
    report = json.loads((out / "warm_start.json").read_text())
    assert report["teacher"] == teacher
    assert report["model"] == "vit_ssog_small"
    assert report["images"] == 12
    assert report["refitted"]
    assert report["aligned"] == 1

    student: Any = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert type(student).__name__ == "VitSsog"
    assert tuple(student.pretrained_cfg["mean"]) == MEAN
    assert tuple(student.pretrained_cfg["std"]) == STD
    assert student.pretrained_cfg["license"] == "mit"
    assert student(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    notes = json.loads((out / "config.json").read_text())["pretrained_cfg"]["notes"]
    assert any(note.startswith("weights sha256") for note in notes)
    # a second call replaces the first
    assert command(teacher, out, images, "--model", "vit_ssog_tiny_looped") == 0
    looped: Any = timm.create_model(f"local-dir:{out}", pretrained=True)
    assert len(looped.blocks) == 1
    assert looped.loops == 12


def test_teacher_and_student_see_the_same_pixels_in_distillation(teacher, images, tmp_path):
    """timm's task takes the student's normalisation from its pretrained_cfg, whatever the loader does."""
    from timm.task import LogitDistillationTask

    out = tmp_path / "out"
    assert command(teacher, out, images) == 0
    student: Any = timm.create_model(f"local-dir:{out}", pretrained=True)
    task: Any = LogitDistillationTask(student, teacher, criterion=torch.nn.CrossEntropyLoss(), verbose=False)
    pixels = torch.randn(2, 3, 32, 32)
    assert task.teacher.normalize_input(pixels, task.student_mean, task.student_std) is pixels
    # the trap: train.py --mean changes the loader's normalisation and not this one
    other = timm.create_model("vit_ssog_tiny", num_classes=3, **SHAPE)
    task = LogitDistillationTask(other, teacher, criterion=torch.nn.CrossEntropyLoss(), verbose=False)
    assert not torch.allclose(task.teacher.normalize_input(pixels, task.student_mean, task.student_std), pixels)


def test_new_classes_get_a_new_head(teacher, images, tmp_path):
    out = tmp_path / "out"
    assert command(teacher, out, images, "--num-classes", "7") == 0
    assert timm.create_model(f"local-dir:{out}", pretrained=True)(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "0"], "images must be an integer of at least 1"),
        (["--model", "resnet18"], "must be one of the vit_ssog models"),
        (["--model", "vit_ssog_tiny_ode", "--refit"], "use align_epochs"),
        (["--data-dir", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input_is_an_error_and_writes_nothing(teacher, images, tmp_path, capsys, arguments, message):
    assert command(teacher, tmp_path / "out", images, *arguments) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"teacher", "images"}


def test_teacher_without_weights_is_an_error(images, tmp_path, capsys):
    assert command("vit_ssog_tiny", tmp_path / "out", images) == 2
    assert "No pretrained weights exist" in capsys.readouterr().err


def test_a_folder_of_other_things_is_left_alone(teacher, images, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    assert command(teacher, out, images) == 2
    assert "not an earlier conversion" in capsys.readouterr().err
    assert (out / "thesis.tex").read_text() == "years"


def test_failure_leaves_the_old_folder(teacher, images, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert command(teacher, out, images) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(warm_starting, "write_json", fail)
    assert command(teacher, out, images, "--seed", "3") == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"teacher", "images", "out"}
