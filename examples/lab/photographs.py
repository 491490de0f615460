"""What helps on photographs? CIFAR-10 as an image folder: one factor at a time, three depths, against the twin.

Every setting gets the same recipe and the same images, except *x4*, which trains four times as long. Beside the
accuracy at the size of training stands that on enlarged images, without further training. A second call resumes where
the first one stopped.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import above  # noqa: F401
import markdown_table
import timm
import torch
from runs import decimal, mean_spread, parse_counts, plus_minus, provenance, results_file, run_all, run_options
from safetensors.torch import save_file
from scoring import accuracy
from small_images import SIZE, TestBatches, TrainingBatches, cifar_images
from starts import set_linear_std
from timm.utils import random_seed
from training import RECIPE, train

SHAPE: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": 4,
    "in_chans": 3,
    "num_classes": 10,
    "embed_dim": 96,
    "num_heads": 6,
    "mlp_ratio": 2.0,
}
DISCRETE: dict[str, Any] = {"name": "vit_ssog_tiny", "depth": 6}
WIDE: dict[str, Any] = {**DISCRETE, "embed_dim": 192, "num_heads": 3}
LOOPED: dict[str, Any] = {"name": "vit_ssog_tiny_looped", "depth": 1, "loops": 12}
CONTINUOUS: dict[str, Any] = {"name": "vit_ssog_tiny_ode", "depth": 1, "horizon": 12.0}
VIT: dict[str, Any] = {"name": "vit_tiny_patch16_224", "depth": 6}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": DISCRETE,
    "weights of 0.02": {**DISCRETE, "std": 0.02},
    "centring norm": {**DISCRETE, "norm_layer": "centrenorm"},
    "unit start": {**DISCRETE, "pre_norm": True},
    "2 components": {**DISCRETE, "num_components": 2},
    "8 components": {**DISCRETE, "num_components": 8},
    "3 heads": {**DISCRETE, "num_heads": 3},
    "12 heads": {**DISCRETE, "num_heads": 12},
    "offset 1": {**DISCRETE, "init_offset": 1.0},
    "value": {**DISCRETE, "steering": "value"},
    "amplitude": {**DISCRETE, "steering": "amplitude"},
    "shift": {**DISCRETE, "steering": "shift"},
    "shift, weights of 0.02": {**DISCRETE, "steering": "shift", "std": 0.02},
    "hybrid": {**DISCRETE, "mixer": "ssog*4+attention*2"},
    "attention": {**DISCRETE, "mixer": "attention"},
    "attention, weights of 0.02": {**DISCRETE, "mixer": "attention", "std": 0.02},
    "attention x4": {**DISCRETE, "mixer": "attention", "times": 4},
    "timm's ViT": {**VIT, "class_token": False, "global_pool": "avg"},
    "width 192": WIDE,
    "width 192, weights of 0.02": {**WIDE, "std": 0.02},
    "looped": LOOPED,
    "looped, attention": {**LOOPED, "mixer": "attention"},
    "continuous": CONTINUOUS,
    "continuous, attention": {**CONTINUOUS, "mixer": "attention"},
}
"""What each setting is. Ours are ``std``, of the initial linear weights, and ``times``, a factor of the epochs."""

TWINS = {"default": "attention", "looped": "looped, attention", "continuous": "continuous, attention"}
"""Settings, and the attention twin that each is compared with."""

EPOCHS = 10
PER_CLASS = 1000
TEST_PER_CLASS = 1000
PHOTOGRAPHS_RECIPE: dict[str, Any] = {**RECIPE, "batch_size": 50, "learning_rate": 2e-3}
ZERO_SHOT = (SIZE * 3 // 2, SIZE * 2)


def build(setting: str) -> tuple[torch.nn.Module, int]:
    """The model of a setting, and by what the epochs are multiplied."""
    options = {**SHAPE, **SETTINGS[setting]}
    name, times, std = options.pop("name"), options.pop("times", 1), options.pop("std", None)
    model = timm.create_model(name, **options)
    if std is not None:
        set_linear_std(model, std)
    return model, times


def run(setting: str, seed: int, folder: Path, epochs: int, counts: tuple[int, int], keep: Path | None) -> Any:
    """Train and test one setting with one seed.

    Args:
        setting: A name in `SETTINGS`.
        seed: Of the weights, the order of the images and their crops.
        folder: With ``train`` and ``test``, and a folder of images for every class in each.
        epochs: Passes over the training images.
        counts: Images per class to train and to test on.
        keep: Folder for the trained weights; nowhere if None.

    Returns:
        The record of the run, as it goes into the results.
    """
    torch.set_num_threads(1)
    training, test = (
        cifar_images(folder, split, count) for split, count in zip(("train", "test"), counts, strict=True)
    )
    random_seed(seed)
    model, times = build(setting)
    batches = TrainingBatches(training, PHOTOGRAPHS_RECIPE["batch_size"], seed)
    start = time.process_time()
    train(model, batches, times * epochs, PHOTOGRAPHS_RECIPE)
    seconds = time.process_time() - start
    record = {
        "setting": setting,
        "options": SETTINGS[setting],
        "seed": seed,
        "accuracy": accuracy(model, TestBatches(test)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_seconds": round(seconds, 1),
        **provenance(),
    }
    if "timm" not in setting:
        record["zero_shot"] = {str(size): accuracy(model, TestBatches(test, size)) for size in ZERO_SHOT}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), keep / f"{setting.replace(' ', '-')}-{seed}.safetensors")
    return record


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row per setting, and what separates each depth from its twin."""
    rows = []
    for setting in SETTINGS:
        of_setting = [record for record in runs if record["setting"] == setting]
        if of_setting:
            enlarged = [
                plus_minus([record["zero_shot"][str(size)] for record in of_setting])
                if "zero_shot" in of_setting[0]
                else "-"
                for size in ZERO_SHOT
            ]
            top1 = plus_minus([record["accuracy"] for record in of_setting])
            rows.append([setting, len(of_setting), top1, *enlarged, f"{of_setting[0]['parameters']:,}"])
    sizes = [f"at {size} px" for size in ZERO_SHOT]
    drawn = [markdown_table.table(["setting", "seeds", f"top-1 at {SIZE} px", *sizes, "parameters"], rows)]
    for setting, twin in TWINS.items():
        ours, theirs = ([record["accuracy"] for record in runs if record["setting"] == of] for of in (setting, twin))
        if len(ours) > 1 and len(theirs) > 1:
            (mean, spread), (other, other_spread) = mean_spread(ours), mean_spread(theirs)
            error = (spread**2 / len(ours) + other_spread**2 / len(theirs)) ** 0.5
            drawn.append(f"{setting} - {twin}: {mean - other:+.1f} ± {decimal(2 * error)} (two standard errors).")
    return "\n\n".join(drawn)


def main(argv: list[str] | None = None) -> None:
    parser = run_options(__doc__, SETTINGS)
    parser.add_argument("images", type=Path, help="folder with train and test, and a folder per class in each")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    parser.add_argument("--per-class", type=int, default=PER_CLASS, help=f"to train on (default: {PER_CLASS})")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the trained weights there")
    options = parse_counts(parser, argv, ("seeds", "jobs", "epochs", "per_class"))
    epochs, counts = (1, (5, 5)) if options.quick else (options.epochs, (options.per_class, TEST_PER_CLASS))
    output = results_file(options, "photographs")
    recipe = {
        "images": "CIFAR-10, JPEG",
        "train_per_class": counts[0],
        "test_per_class": counts[1],
        "epochs": epochs,
        **PHOTOGRAPHS_RECIPE,
        **SHAPE,
    }
    measured = partial(run, folder=options.images, epochs=epochs, counts=counts, keep=options.keep)
    runs = run_all(output, recipe, list(options.only or SETTINGS), seeds=options.seeds, run=measured, jobs=options.jobs)
    print(f"{table(runs)}\n\nEvery run: {output}")


if __name__ == "__main__":
    main()
