"""Is it an ODE? Solve a trained continuous model with other solvers and steps, and see how its predictions change.

Takes a folder that `make demo` or timm saved with a classifier of digits; by default the continuous model of the demo.
Prints the report, the solve and the certificate, and writes ode_report.json and trajectory.png into that folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from digits import digit_loader

import timm_ssog
from timm_ssog.analysis import ode_report, trajectory

OUTPUT = Path(__file__).parents[1] / "output"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=OUTPUT / "ssog-continuous", help="folder of the model")
    parser.add_argument("--images", type=int, default=200, help="test images to use (default: 200)")
    options = parser.parse_args(argv)
    if options.images < 1:
        parser.error(f"--images must be at least 1, got {options.images}")
    if not (options.model / "config.json").exists():
        raise SystemExit(f"{options.model} holds no model (config.json): run `make demo` first, or name its folder.")
    torch.set_num_threads(1)
    model: Any = timm.create_model(f"local-dir:{options.model}", pretrained=True).eval()
    size = model.patch_embed.img_size[0]
    images, labels = next(iter(digit_loader("test", size, batch_size=options.images)))

    report = ode_report(model, images, labels)
    print(f"{report}\n")
    print(f"The solve itself: {timm_ssog.trace_solve(model, images)}\n")
    print(timm_ssog.certify(model, size))
    measured = torch.cat([constants.flatten() for constants in timm_ssog.local_lipschitz(model, images[:16]).values()])
    print(f"  measured at 16 images along their trajectories: {measured.min():.3g} to {measured.max():.3g}\n")
    (options.model / "ode_report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    trajectory(model, images).savefig(options.model / "trajectory.png", dpi=150)
    print(f"report      {options.model / 'ode_report.json'}\ntrajectory  {options.model / 'trajectory.png'}")


if __name__ == "__main__":
    main()
