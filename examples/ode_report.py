"""Is it an ODE? Solve a trained continuous model with other solvers and steps, and see how its predictions change.

Takes a folder that `make demo` or timm saved with a classifier of digits; by default the continuous model of the demo.
Prints the report, the solve and the certificate, and writes ode_report.json and trajectory.png into that folder,
in place of earlier ones.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from digits import CLASSES, digit_loader, digits
from loading import load_folder
from refusing import refuse, refusing, require, require_place
from torch import Tensor

import timm_ssog
from timm_ssog.analysis import ode_report, trajectory
from timm_ssog.errors import require_positive_int

OUTPUT = Path(__file__).parents[1] / "output"


MEASURED = 16
"""Images at most to measure local Lipschitz constants at, which takes longer than the rest."""


def load_continuous(folder: Path) -> Any:
    """A saved continuous classifier of digits."""
    model = load_folder(folder).eval()
    if not isinstance(model, timm_ssog.OdeVitSsog):
        refuse(
            f"Expected a continuous model (vit_ssog_*_ode), got {type(model).__name__} in {folder}: only its depth is "
            f"a solve. Name another folder."
        )
    if (model.in_chans, model.num_classes) != (1, CLASSES):
        refuse(
            f"Expected a classifier of digits, with 1 channel and {CLASSES} classes, got {model.in_chans} and "
            f"{model.num_classes} in {folder}: name another folder."
        )
    return model


def report(model: timm_ssog.OdeVitSsog, images: Tensor, labels: Tensor, folder: Path) -> None:
    """Print the report, the solve and the certificate, and write the report and the trajectory to a folder."""
    result = ode_report(model, images, labels)
    print(f"{result}\n")
    print(f"The solve itself: {timm_ssog.trace_solve(model, images)}\n")
    print(timm_ssog.certify(model, images.shape[-1]))
    sample = images[:MEASURED]
    constants = timm_ssog.local_lipschitz(model, sample).values()
    measured = torch.cat([constant.flatten() for constant in constants])
    print(
        f"  measured at {len(sample)} images along their trajectories: {measured.min():.3g} to {measured.max():.3g}\n"
    )
    (folder / "ode_report.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    print(f"wrote {folder / 'ode_report.json'}")
    trajectory(model, images).savefig(folder / "trajectory.png", dpi=150)
    print(f"wrote {folder / 'trajectory.png'}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=OUTPUT / "ssog-continuous", help="folder of the model")
    parser.add_argument("--images", type=int, default=200, help="test images to use (default: 200)")
    options = parser.parse_args(argv)
    require(parser, options, require_positive_int, "images")
    available = len(digits("test")[1])
    if options.images > available:
        parser.error(f"--images must be at most {available}, the digits to test on, got {options.images}")
    torch.set_num_threads(1)
    model = load_continuous(options.model)
    require_place("The report", options.model)
    size = model.patch_embed.img_size[0]
    images, labels = next(iter(digit_loader("test", size, batch_size=options.images)))
    with refusing(f"report on {options.model}", "Name the folder of another model."):
        report(model, images, labels, options.model)


if __name__ == "__main__":
    main()
