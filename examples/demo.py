"""Train SSoG and its dense attention twin on real digits with timm's own parts; then reload, enlarge and draw them.

Discrete, looped and continuous models, each with its twin. Everything runs on the CPU and goes to output/: models, and
images of kernels and accuracies.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from digits import digit_loader
from refusing import needing, refuse, require_place
from scoring import accuracy
from timm.models import save_for_hf
from timm.utils import random_seed
from torch import Tensor
from training import MODEL, RECIPE, create_model, train

from timm_ssog import OdeVitSsog, VitSsog
from timm_ssog.analysis import kernel_atlas, ode_report

with needing("the packages of the demo", "pip install -e '.[demo]'"):
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure
    from tqdm import tqdm

EPOCHS = 4
SIZE = 32
"""Side of the training images, for a grid of 8 x 8 patches of 4 pixels: minutes on two cores."""

SIZES = (SIZE, SIZE * 3 // 2, SIZE * 2)
OUTPUT = Path(__file__).parents[1] / "output"

INPUT: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": 4,
    "pretrained_cfg_overlay": {**MODEL["pretrained_cfg_overlay"], "input_size": (1, SIZE, SIZE)},
}

MIXERS = {"SSoG": "ssog", "attention": "attention"}
DEPTHS: dict[str, dict[str, Any]] = {
    "discrete": {"name": "vit_ssog_tiny", "depth": 4},
    "looped": {"name": "vit_ssog_tiny_looped", "depth": 1, "loops": 4},
    "continuous": {"name": "vit_ssog_tiny_ode", "depth": 1, "horizon": 4.0, "solver": "midpoint", "solver_steps": 2},
}
"""Columns of the comparison, of equal cost: four blocks, one block four times, four evaluations of it as a velocity."""

COLOURS = {"SSoG": "#1b6ca8", "attention": "#c8553d"}


def train_and_save(mixer: str, depth: str, folder: Path, epochs: int, limit: int | None) -> VitSsog:
    """Train one model behind a progress bar and save it as timm saves models for the Hub.

    Args:
        mixer: A name in `MIXERS`.
        depth: A name in `DEPTHS`.
        folder: Folder for config.json and model.safetensors.
        epochs: Passes over the training images.
        limit: Number of training images to use; all if None.

    Returns:
        The trained model.
    """
    random_seed(0)
    model = create_model(**INPUT, **DEPTHS[depth], mixer=MIXERS[mixer])
    loader = digit_loader("train", SIZE, batch_size=RECIPE["batch_size"], limit=limit)
    with tqdm(total=epochs * len(loader), desc=f"{mixer}, {depth}".ljust(20), unit="step") as bar:

        def show(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
            bar.update()

        train(model, loader, epochs, on_step=show)
    arguments = {**MODEL, **INPUT, **DEPTHS[depth], "mixer": MIXERS[mixer]}
    for key in ("name", "pretrained_cfg_overlay"):
        del arguments[key]
    save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    return model


def reload(folder: Path, **changes: Any) -> VitSsog:
    """Load a saved model through timm, with changed options."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **changes)
    return model.eval()  # type: ignore[return-value]


@torch.inference_mode()
def logits(model: VitSsog, images: Tensor) -> Tensor:
    """The model's logits for a batch of images, in evaluation mode."""
    return model.eval()(images)


def resolution_curves(name: str, folder: Path, limit: int | None) -> Iterator[tuple[str, list[float]]]:
    """Yield the accuracy of a saved model at each of `SIZES`; for SSoG with both types of kernel coordinates."""
    variants: dict[str, dict[str, str]] = {name: {}}
    if MIXERS[name] == "ssog":
        variants = {
            f"{name}, kernels relative to the image": {"kernel_coords": "relative"},
            f"{name}, kernels in cells": {"kernel_coords": "cells"},
        }
    for label, changes in variants.items():
        model = reload(folder, **changes)
        yield label, [accuracy(model, digit_loader("test", size, limit=limit)) for size in SIZES]


def draw_resolution(curves: dict[str, list[float]]) -> Figure:
    """Draw accuracy against the resolution of the test images."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for label, values in curves.items():
        colour = COLOURS[label.partition(",")[0]]
        style = "--" if label.endswith("cells") else "-"
        axis.plot(SIZES, values, style, marker="o", color=colour, label=label)
    axis.set_xticks(SIZES, [f"{size} px\n({size / SIZE:g}x)" for size in SIZES])
    axis.set_ylim(0, 100)
    axis.set(
        title=f"Trained at {SIZE} px, tested on enlarged images without further training",
        xlabel="side of the test images",
        ylabel="top-1 accuracy, %",
    )
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="best")
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(title: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    """Print a table whose columns are as wide as they need to be."""
    first = max(map(len, [title, *rows]))
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows.values(), strict=True)]
    for name, cells in {title: columns, **rows}.items():
        print("  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]))
    print()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for everything (default: output)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one epoch over 50 images, to see that it runs; not for results",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    output: Path = options.output
    if output.exists() and not output.is_dir():
        refuse(f"--output must be a folder, and {output} is a file.")
    require_place("--output", output)
    mpl.use("agg")
    torch.set_num_threads(1)  # models of this size gain nothing from more, and lose much on a busy machine
    epochs, limit = (1, 50) if options.quick else (EPOCHS, None)
    start = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)

    images = next(iter(digit_loader("test", SIZE, batch_size=100)))[0]
    comparison: dict[str, list[str]] = {mixer: [] for mixer in MIXERS}
    curves: dict[str, list[float]] = {}
    files: dict[str, Path] = {}
    reloads = []
    verdict = ""
    for depth in DEPTHS:
        for mixer in MIXERS:
            name = f"{MIXERS[mixer]}-{depth}"
            folder = files[f"model {name}"] = output / name
            begin = time.perf_counter()
            model = train_and_save(mixer, depth, folder, epochs, limit)
            seconds = time.perf_counter() - begin
            if not torch.equal(logits(model, images), logits(reload(folder), images)):
                refuse(f"The model reloaded from {folder} gives other logits than the saved one.")
            reloads.append(name)
            if depth == "discrete":
                of_model = dict(resolution_curves(mixer, folder, limit))
                curves.update(of_model)
                top1 = next(iter(of_model.values()))[0]
            else:
                top1 = accuracy(model, digit_loader("test", SIZE, limit=limit))
            if isinstance(model, OdeVitSsog) and MIXERS[mixer] == "ssog":
                seen, labels = next(iter(digit_loader("test", SIZE, batch_size=limit or 500)))
                verdict = ode_report(model, seen, labels, steps=(model.num_steps,), solvers=(model.solver,)).verdict
            parameters = sum(parameter.numel() for parameter in model.parameters())
            comparison[mixer].append(f"{top1:.1f} %, {parameters:,}, {seconds:.0f} s")
            if MIXERS[mixer] == "ssog":
                path = files[f"kernels {depth}"] = output / f"kernels-{depth}.png"
                save_figure(kernel_atlas(model, SIZE), path)
    files["resolution"] = output / "resolution.png"
    save_figure(draw_resolution(curves), files["resolution"])

    print_table("top-1, parameters, training time", list(DEPTHS), comparison)
    rows = {label: [f"{value:.1f} %" for value in values] for label, values in curves.items()}
    print_table(f"discrete, trained at {SIZE} px, tested at", [f"{size} px" for size in SIZES], rows)
    print(f"SSoG, continuous. {verdict}\n")
    print(f"Saved and reloaded with identical logits (torch.equal): {', '.join(reloads)}.\n")
    for what, path in files.items():
        print(f"{what.ljust(max(map(len, files)))}  {path}")
    print(f"\nDone in {(time.perf_counter() - start) / 60:.1f} min.", file=sys.stderr)


if __name__ == "__main__":
    main()
