"""What do kernels that listen to the content cost? Every steering and attention against fixed kernels, one mixer each.

One thread, CPU time, all taking turns, medians: forward without gradients, and a training step.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import above  # noqa: F401
import markdown_table
import torch
from runs import OUTPUT, claimed, provenance, write_results
from torch import Tensor, nn
from turns import cpu_clock, take_turns, timer

from timm_ssog.hybrid import STEERED
from timm_ssog.layers import AttentionMixer

CASES = ((14, 1), (14, 8), (32, 1), (64, 1))
"""Tokens along each side, and images."""

WIDTH, HEADS = 384, 6


def measure(side: int, images: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of every mixer on one grid."""
    mixers: dict[str, nn.Module] = {kind: cls(WIDTH, HEADS, (side, side)) for kind, cls in STEERED.items()}
    for mixer in mixers.values():
        mixer.load_state_dict(mixers["none"].state_dict(), strict=False)
    mixers["attention"] = AttentionMixer(WIDTH, HEADS)
    x = torch.randn(images, side, side, WIDTH)

    def forward(mixer: nn.Module) -> Tensor:
        with torch.inference_mode():
            return mixer(x)

    def step(mixer: nn.Module) -> None:
        mixer.zero_grad()
        mixer(x).sum().backward()

    record: dict[str, Any] = {"side": side, "images": images}
    for name, call in (("forward", forward), ("training", step)):
        calls = {kind: lambda mixer=mixer, call=call: call(mixer) for kind, mixer in mixers.items()}
        times = take_turns(calls, timer=timer(cpu_clock), seconds=seconds)
        record[name] = {kind: statistics.median(values) for kind, values in times.items()}
    return record


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: time over that of fixed kernels, forward / training."""
    kinds = [kind for kind in runs[0]["forward"] if kind != "none"]
    rows = []
    for run in runs:
        ratios = [[run[name][kind] / run[name]["none"] for name in ("forward", "training")] for kind in kinds]
        cells = [" / ".join(f"{ratio:.2f}" for ratio in of_kind) for of_kind in ratios]
        rows.append([f"{run['side']} x {run['side']}", run["images"], *cells])
    return markdown_table.table(["grid", "images", *kinds], rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT / "steering.json", help="results file")
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long each comparison takes")
    parser.add_argument("--quick", action="store_true", help="one small grid, to see that it runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = {"width": WIDTH, "heads": HEADS, "threads": 1, "clock": "CPU time"}
    with claimed(options.output):
        runs = []
        for side, images in ((4, 1),) if options.quick else CASES:
            runs.append({**measure(side, images, 0.0 if options.quick else options.seconds), **provenance()})
            write_results(options.output, recipe, runs)
    print(f"{table(runs)}\n\nEvery run: {options.output}")


if __name__ == "__main__":
    main()
