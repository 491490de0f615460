"""Speed of deployed models: SSoG, its attention twin and timm's ViT in PyTorch, ONNX Runtime and OpenVINO, in turns.

One image per call, one thread, float32 everywhere. Each model is exported to ONNX from one example image, and must give
the same logits as in PyTorch. Results go into a JSON file after each cell (a size and an image size), and a second call
resumes where the first one stopped. OpenVINO is skipped if it is not installed (`pip install openvino`).
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_report
import markdown_table
import onnxruntime
import torch
from bench_speed import PATCH, SIZES, create
from benchmark import cpu_name
from runs import OUTPUT, claimed, provenance, results_of, write_results
from torch import Tensor
from tqdm import tqdm
from turns import cpu_clock, take_turns, timer

try:
    import openvino  # type: ignore[reportMissingImports]
except ImportError:
    openvino = None

MODELS = ("ssog", "twin", "timm")
RUNTIMES = ("PyTorch", "ONNX Runtime", *(["OpenVINO"] if openvino is not None else []))
"""Those that are installed."""

IMAGE_SIZES = (224, 512, 1024)

MOST_ERROR = 1e-3
"""Of exported logits, over the largest of PyTorch's."""


def recipe() -> dict[str, Any]:
    """What all cells of a results file share."""
    return {
        "models": list(MODELS),
        "batch": 1,
        "threads": 1,
        "precision": "float32",
        "clock": "cpu time",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def runners(network: torch.nn.Module, path: Path, images: Tensor) -> dict[str, Callable[[], Any]]:
    """One call per runtime that computes the logits of the images on one thread, in float32."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    name, array = session.get_inputs()[0].name, images.numpy()
    calls: dict[str, Callable[[], Any]] = {
        "PyTorch": torch.inference_mode()(partial(network, images)),
        "ONNX Runtime": lambda: session.run(None, {name: array})[0],
    }
    if openvino is not None:
        settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        calls["OpenVINO"] = lambda: compiled(array)[0]
    return calls


def check_answers(answers: dict[str, Any]) -> None:
    """Refuse to time runtimes whose logits are not PyTorch's.

    Raises:
        SystemExit: if the logits of one differ.
    """
    exact = torch.as_tensor(answers["PyTorch"])
    for runtime, logits in answers.items():
        error = float((torch.as_tensor(logits) - exact).abs().max() / exact.abs().max())
        if not error <= MOST_ERROR:
            raise SystemExit(
                f"Expected the logits of {runtime} within {MOST_ERROR:g} of PyTorch's, got {error:.2g}: times of wrong "
                "results are meaningless. Export with another release of the runtime or of torch."
            )


def measure(
    size: str, img_size: int, seconds: float, advance: Callable[[float], Any] = lambda _: None
) -> dict[str, Any]:
    """Export the models of a size and let them take turns in all runtimes.

    Args:
        size: ``"tiny"``, ``"small"`` or ``"base"``.
        img_size: Size of the images, one per call.
        seconds: About how long the turns take, three at least.
        advance: Told after every turn which share of all turns it was.

    Returns:
        The record of the cell: milliseconds of every turn, by runtime and model, and the machine's load.
    """
    torch.set_num_threads(1)
    images = torch.randn(1, 3, img_size, img_size, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            network = create(model, size, "discrete").eval()
            path = Path(folder) / f"{model}.onnx"
            torch.onnx.export(network, (images,), str(path), dynamo=True, verbose=False)
            of_model = runners(network, path, images)
            check_answers({runtime: call() for runtime, call in of_model.items()})
            calls |= {f"{runtime}/{model}": call for runtime, call in of_model.items()}
        taken = take_turns(calls, timer=timer(cpu_clock), seconds=seconds, advance=advance)
    times: dict[str, dict[str, list[float]]] = {runtime: {} for runtime in RUNTIMES}
    for name, turns in taken.items():
        runtime, model = name.split("/")
        times[runtime][model] = turns
    versions = {"onnxruntime": onnxruntime.__version__}
    if openvino is not None:
        versions["openvino"] = openvino.__version__.partition("-")[0]
    record = {"size": size, "img_size": img_size, "seconds": seconds, "milliseconds": times}
    where = provenance()
    # of all processes, this one among them, in the minutes before the end: above 1, others shared the machine
    return {**record, "load": round(os.getloadavg()[1], 1), **where, "versions": {**where["versions"], **versions}}


def is_done(record: dict[str, Any], size: str, img_size: int, seconds: float) -> bool:
    """Whether a record answers what is asked of a cell: in all runtimes there are, for at least as long."""
    same = (record["size"], record["img_size"]) == (size, img_size)
    return same and set(RUNTIMES) <= set(record["milliseconds"]) and record["seconds"] >= seconds


def measure_missing(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cells that the results file has no answer to, and write it after each.

    Returns:
        All its records.
    """
    found = results_of(options.output, recipe(), ("size", "img_size", "seconds", "milliseconds"))
    wanted = [(size, img_size) for size in options.sizes for img_size in options.img_sizes]
    left = [cell for cell in wanted if not any(is_done(record, *cell, options.seconds) for record in found)]
    try:
        form = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
        with tqdm(total=len(wanted), initial=len(wanted) - len(left), smoothing=0, bar_format=form) as bar:
            for size, img_size in left:
                bar.set_description(f"{size}, {img_size} px")
                record = measure(size, img_size, options.seconds, bar.update)
                found = [one for one in found if (one["size"], one["img_size"]) != (size, img_size)] + [record]
                write_results(options.output, recipe(), found)
    except KeyboardInterrupt:
        raise SystemExit(
            f"\nInterrupted. {len(found)} cells are in {options.output}; the same command resumes from there."
        ) from None
    return found


def speed_up(record: dict[str, Any], runtime: str, other: str) -> float | None:
    """Ratio of SSoG's throughput to another model's: the median of the ratios within a turn."""
    return bench_report.speed_up({"ms": record["milliseconds"][runtime]}, other)


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown table of all cells, by size, image size and runtime."""
    rows = []
    for record in sorted(runs, key=lambda one: (list(SIZES).index(one["size"]), one["img_size"])):
        for runtime, times in record["milliseconds"].items():
            ours = times.get("ssog", [])
            speed = markdown_table.number(statistics.median(ours) if ours else None, ".0f")
            ratios = (bench_report.ratios({"ms": times}, other) for other in MODELS[1:])
            spreads = (bench_report.spread(found, ".2f") for found in ratios)
            rows.append([record["size"], record["img_size"], runtime, speed, *spreads, len(ours)])
    return markdown_table.table(
        ["model", "px", "runtime", "SSoG, ms per image", "to twin", "to timm's ViT", "turns"], rows
    )


def setup(conditions: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """Sentences on where and when the cells were measured, and on what else the machine did."""
    versions = {name: version for record in runs for name, version in record["versions"].items()}
    where = bench_report.setup({**conditions, "device": "cpu", "versions": versions}, runs)
    loads = [record["load"] for record in runs]
    cores = conditions["cores"]
    return f"{where} The load of the {cores} cores was {min(loads)} to {max(loads)}, this script included."


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="default: all three")
    parser.add_argument(
        "--img-sizes", nargs="+", type=int, default=list(IMAGE_SIZES), metavar="PX", help="default: 224 512 1024"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for the turns of each cell, at least three (default: 60)"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT / "exported_speed.json", help="results file")
    options = parser.parse_args(argv)
    for img_size in options.img_sizes:
        if img_size < PATCH or img_size % PATCH:
            parser.error(f"--img-sizes must be multiples of the patch size {PATCH}, got {img_size}")
    if not 0 <= options.seconds < float("inf"):
        parser.error(f"--seconds must be 0 or more, got {options.seconds}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if openvino is None:
        print("OpenVINO is skipped, because it is not installed: pip install openvino", file=sys.stderr)
    with claimed(options.output):
        runs = measure_missing(options)
    print(f"{setup(recipe(), runs)}\n\n{table(runs)}\n\nEvery turn: {options.output}")


if __name__ == "__main__":
    main()
