"""Which parameterisation should be the default? An ablation on real digits, one factor at a time, over several seeds.

Every setting and the dense attention twin get the same recipe. Results go into a JSON file after each run, and a
second call resumes where the first one stopped.
"""

import time
from functools import partial
from typing import Any

import above  # noqa: F401
import markdown_table
import torch
from digits import IMAGE_SIZE, Digits, digit_loader
from runs import (
    decimal,
    mean_spread,
    parse_counts,
    plus_minus,
    provenance,
    results_file,
    run_all,
    run_options,
)
from scoring import accuracy
from timm.utils import random_seed
from torch.nn import functional as F
from training import MODEL, RECIPE, create_model, train

# spelt out, so that the results keep their meaning when the package's defaults change
DEFAULT: dict[str, Any] = {
    "mixer": "ssog",
    "amplitude": "signed",
    "init_width": 0.72,
    "init_offset": 2.0,
    "num_components": 4,
    "num_heads": 4,
    "learning_rate": RECIPE["learning_rate"],
}

CHANGES: dict[str, dict[str, Any]] = {
    "default": {},
    "attention twin": {"mixer": "attention"},
    "convex amplitudes": {"amplitude": "convex"},
    "width 0.4": {"init_width": 0.4},
    "width 1.2": {"init_width": 1.2},
    "width 2": {"init_width": 2.0},
    "offset 0.5": {"init_offset": 0.5},
    "offset 1": {"init_offset": 1.0},
    "offset 3": {"init_offset": 3.0},
    "1 component": {"num_components": 1},
    "2 components": {"num_components": 2},
    "8 components": {"num_components": 8},
    "2 heads": {"num_heads": 2},
    "8 heads": {"num_heads": 8},
}
"""What each setting changes about the default."""

ZERO_SHOT = ("default", "attention twin")
"""Settings that are also tested, without further training, on enlarged images."""

EPOCHS = 3
ZERO_SHOT_SIZES = (IMAGE_SIZE * 3 // 2, IMAGE_SIZE * 2)


def run(setting: str, seed: int, epochs: int, limit: int | None) -> dict[str, Any]:
    """Train and test one setting with one seed.

    Args:
        setting: A name in `CHANGES`.
        seed: Of the weights, the order of the images and their shifts.
        epochs: Passes over the training images.
        limit: Use only so many training and test images; all if None.

    Returns:
        The record of the run, as it goes into the results.
    """
    torch.set_num_threads(1)
    random_seed(seed)
    options = {**DEFAULT, **CHANGES[setting]}
    learning_rate = options.pop("learning_rate")
    model = create_model(**options)
    loader = digit_loader("train", batch_size=RECIPE["batch_size"], limit=limit)
    start = time.perf_counter()
    train(model, loader, epochs, {**RECIPE, "learning_rate": learning_rate})
    seconds = time.perf_counter() - start
    record = {
        "setting": setting,
        "options": {**DEFAULT, **CHANGES[setting]},
        "seed": seed,
        "accuracy": accuracy(model, digit_loader("test", limit=limit)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_seconds": round(seconds, 1),
        **provenance(),
    }
    if setting in ZERO_SHOT:
        record["zero_shot"] = {}
        for coords in ("relative", "cells") if options["mixer"] == "ssog" else ("",):
            resized = create_model(**options, kernel_coords=coords) if coords else model
            resized.load_state_dict(model.state_dict())
            record["zero_shot"][coords or "attention"] = {
                str(size): accuracy(resized, digit_loader("test", size, limit=limit)) for size in ZERO_SHOT_SIZES
            }
    return record


def difference(runs: list[dict[str, Any]], setting: str) -> tuple[float, float]:
    """Mean accuracy of a setting minus that of the default, and two standard errors of this difference."""
    values = [run["accuracy"] for run in runs if run["setting"] == setting]
    base_values = [run["accuracy"] for run in runs if run["setting"] == "default"]
    (mean, spread), (base, base_spread) = mean_spread(values), mean_spread(base_values)
    return mean - base, 2 * (spread**2 / len(values) + base_spread**2 / len(base_values)) ** 0.5


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown tables of all settings and of the zero-shot resolutions, and a sentence on what beats the default."""
    settings = [setting for setting in CHANGES if any(run["setting"] == setting for run in runs)]
    rows, better = [], []
    for setting in settings:
        of_setting = [run for run in runs if run["setting"] == setting]
        mean, spread = mean_spread([run["accuracy"] for run in of_setting])
        to_default = "-"
        if setting != "default" and "default" in settings:
            gain, margin = difference(runs, setting)
            to_default = f"{gain:+.1f} ± {decimal(margin)}"
            if gain > margin:
                better.append(f"{setting} ({to_default})")
        parameters = f"{of_setting[0]['parameters']:,}"
        rows.append([setting, len(of_setting), f"{mean:.1f}", decimal(spread), to_default, parameters])
    header = ["setting", "seeds", "top-1", "spread", "to default, ± 2 standard errors", "parameters"]
    verdict = ", ".join(better) if better else "nothing"
    sizes = [str(IMAGE_SIZE), *map(str, ZERO_SHOT_SIZES)]
    resized = []
    for setting in settings:
        of_setting = [run for run in runs if run["setting"] == setting and "zero_shot" in run]
        for kernels in of_setting[0]["zero_shot"] if of_setting else ():
            name = setting if kernels == "attention" else f"{setting}, kernels {kernels}"
            tested = [[run["zero_shot"][kernels].get(size, run["accuracy"]) for run in of_setting] for size in sizes]
            resized.append([name, *map(plus_minus, tested)])
    return "\n\n".join(
        [
            markdown_table.table(header, rows),
            f"Better than the default by more than two standard errors: {verdict}.",
            markdown_table.table(["trained at 28 px, tested at", *(f"{size} px" for size in sizes)], resized),
        ]
    )


def weakest_gradients(grid: int, images: int = 16) -> dict[str, float]:
    """How close to dead the weakest component of a new default model is, on a grid and on real images.

    The gradient of a component's offset or width is taken image by image, its root mean square over the images divided
    by the component's amplitude (a small amplitude is not a dead shape: it has its own gradient).

    Args:
        grid: Tokens along each side.
        images: Test images to take gradients of.

    Returns:
        For ``"offset"`` and ``"width"``, the weakest component of all blocks, heads and axes over the median one.
    """
    random_seed(0)
    size = grid * MODEL["patch_size"]
    options = {key: value for key, value in DEFAULT.items() if key != "learning_rate"}
    model = create_model(**options, img_size=size)
    squares: dict[str, list[torch.Tensor]] = {"offset": [], "width": []}
    for image, label in digit_loader("test", size, batch_size=1, limit=images):
        model.zero_grad()
        F.cross_entropy(model(image), label).backward()
        for name, gradients in squares.items():
            per_block = []
            for block in model.blocks:
                gradient = getattr(block.mixer, name).grad
                per_block.append((gradient / block.mixer.amplitude.detach()[..., None]).square())
            gradients.append(torch.stack(per_block))
    means = {name: torch.stack(gradients).mean(0).sqrt() for name, gradients in squares.items()}
    return {name: float(mean.min() / mean.median()) for name, mean in means.items()}


def main(argv: list[str] | None = None) -> None:
    options = parse_counts(run_options(__doc__, CHANGES), argv)
    epochs, limit = (1, 50) if options.quick else (EPOCHS, None)
    output = results_file(options, "ablation")
    recipe = {
        **RECIPE,
        "epochs": epochs,
        "train_images": len(Digits("train", limit=limit)),
        "test_images": len(Digits("test", limit=limit)),
        **{key: MODEL[key] for key in ("img_size", "patch_size", "embed_dim", "depth", "mlp_ratio")},
    }
    settings = list(options.only or CHANGES)
    runs = run_all(
        output, recipe, settings, seeds=options.seeds, run=partial(run, epochs=epochs, limit=limit), jobs=options.jobs
    )
    print(table(runs))
    for grid in (7,) if options.quick else (7, 64):
        shares = weakest_gradients(grid)
        print(
            f"\nAt initialisation on a {grid} x {grid} grid the weakest component has {shares['offset']:.0%} of the "
            f"median gradient in its offset and {shares['width']:.0%} in its width."
        )
    print(f"\nEvery run: {output}")


if __name__ == "__main__":
    main()
