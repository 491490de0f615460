"""The recipes are what timm's train.py understands, and each builds every model and its twin."""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.auto_augment import rand_augment_transform
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2

yaml: Any = pytest.importorskip("yaml")

RECIPES = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))
NAMES = [f"vit_ssog_{size}{depth}" for size in ("tiny", "small", "base") for depth in ("", "_looped", "_ode")]

# train.py's parser silently accepts any key of a YAML: the options it knows are compared with the result
PARSE = """
import json, runpy, sys
parts = runpy.run_path(sys.argv.pop(1), run_name="train")
known = {action.dest: action.default for action in parts["parser"]._actions}
args, _ = parts["_parse_args"]()
types = {action.dest: action.type.__name__ for action in parts["parser"]._actions if action.type in (int, float, str)}
print(json.dumps({"args": vars(args), "known": sorted(known), "types": types}))
"""


def recipe(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def parsed(path: Path, *arguments: str) -> dict[str, Any]:
    """The options that train.py, in the clone named by TIMM_CLONE, reads from a recipe and further arguments."""
    clone = os.environ.get("TIMM_CLONE")
    if not clone:
        # its parser is not in a package, and fetched code stays out of this repository
        pytest.skip("TIMM_CLONE names no clone of timm's repository")
    script = Path(clone) / "train.py"
    command = [sys.executable, "-c", PARSE, str(script), "-c", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_there_are_recipes() -> None:
    assert [path.name for path in RECIPES] == ["cifar100.yaml", "imagenet1k.yaml", "warm_start.yaml"]
    assert "UNTESTED" in RECIPES[1].read_text().splitlines()[0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_train_parses(path: Path) -> None:
    result = parsed(path, "--model", "vit_ssog_tiny_ode", "--model-kwargs", "mixer=attention", "--data-dir", "images")
    content = {**recipe(path), "model": "vit_ssog_tiny_ode"}
    assert set(content) <= set(result["known"]), "train.py would ignore what it doesn't know"
    assert {key: result["args"][key] for key in content} == content, "as it stands, the command line aside"
    assert result["args"]["model_kwargs"] == {"mixer": "attention"}
    for key, value in content.items():
        for one in value if isinstance(value, list) else [value]:
            expected = {"int": int, "float": (int, float), "str": str}.get(result["types"].get(key, ""), object)
            assert isinstance(one, expected), f"{key}: {one!r} is no {result['types'].get(key)}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_augments_within_what_pillow_accepts(path: Path) -> None:
    random.seed(0)
    np.random.seed(0)
    image = Image.new("RGB", (2, 2))
    operations = rand_augment_transform(recipe(path)["aa"], {"img_mean": (124, 116, 104)}).ops
    assert "PosterizeIncreasing" in {operation.name for operation in operations}
    for operation in operations:
        for _ in range(1000):  # with a magnitude of 10, one call in 90 of posterize fails
            operation(image)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_builds_every_model_and_twin(path: Path) -> None:
    content = recipe(path)
    assert content["model"] in NAMES
    for name, mixer in itertools.product(NAMES, ("ssog", "attention")):
        # one block, or one loop: fewer modules to build, the same options
        with torch.device("meta"):
            model: Any = timm.create_model(
                name, num_classes=content["num_classes"], drop_path_rate=content["drop_path"], mixer=mixer, depth=1
            )
        assert model.head.out_features == content["num_classes"]
        data = resolve_data_config(content, model=model)
        assert data["input_size"] == (3, content["img_size"], content["img_size"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_timm_takes_optimizer_schedule_and_augmentation(path: Path) -> None:
    """timm accepts the values that train.py passes on, on a model small enough to build."""
    content = recipe(path)
    model = timm.create_model("vit_ssog_tiny", embed_dim=24, depth=1, num_heads=1, num_classes=content["num_classes"])
    options = argparse.Namespace(**content, lr=content["lr_base"], momentum=0.9)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=options))
    assert type(optimizer).__name__ == "AdamW"
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        sched=content["sched"],
        num_epochs=content["epochs"],
        warmup_epochs=content["warmup_epochs"],
        warmup_lr=content["warmup_lr"],
        min_lr=content["min_lr"],
        step_on_epochs=False,
        updates_per_epoch=10,
    )
    assert scheduler is not None
    assert epochs == content["epochs"]
    scheduler.step_update(10 * content["warmup_epochs"])
    peak = optimizer.param_groups[0]["lr"]
    assert 0.9 * content["lr_base"] < peak <= content["lr_base"]

    transform = create_transform(
        content["img_size"],
        is_training=True,
        scale=content.get("scale"),
        color_jitter=content["color_jitter"],
        auto_augment=content["aa"],
        interpolation=content["train_interpolation"],
        re_prob=content["reprob"],
        mean=content.get("mean", (0.5, 0.5, 0.5)),
        std=content.get("std", (0.5, 0.5, 0.5)),
    )
    image: Any = transform(Image.new("RGB", (32, 32), (200, 10, 30)))  # type: ignore[operator]
    assert image.shape == (3, content["img_size"], content["img_size"])
