"""Speed of exported models: SSoG, its attention twin and timm's ViT in ONNX Runtime and OpenVINO, in turns.

Each model is exported to ONNX from one example image and runs on one thread. OpenVINO is left out where it is not
installed (`pip install openvino`).
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from bench_speed import create, take_turns, wall_clock
from benchmark import cpu_name
from runs import OUTPUT, claimed, provenance, write_results

try:
    import openvino  # type: ignore[reportMissingImports]
except ImportError:
    openvino = None

MODELS = ("ssog", "twin", "timm")


def runners(path: Path, images: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """A call per runtime that answers the images, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    name, array = session.get_inputs()[0].name, images.numpy()
    calls: dict[str, Callable[[], Any]] = {"ONNX Runtime": lambda: session.run(None, {name: array})}
    if openvino is not None:
        core = openvino.Core()
        compiled = core.compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})
        calls["OpenVINO"] = lambda: compiled(array)
    return calls


def measure(size: str, img_size: int, seconds: float) -> dict[str, Any]:
    """Export the models of a size and let them take turns.

    Args:
        size: ``"tiny"``, ``"small"`` or ``"base"``.
        img_size: Of the images, one a call.
        seconds: About how long the turns take.

    Returns:
        The record of the run: milliseconds of every turn, by runtime and model.
    """
    torch.set_num_threads(1)
    images = torch.randn(1, 3, img_size, img_size, generator=torch.Generator().manual_seed(0))
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, Callable[[], Any]] = {}
        for model in MODELS:
            network = create(model, size, "discrete").eval()
            path = Path(folder) / f"{model}.onnx"
            torch.onnx.export(network, (images,), str(path), dynamo=True, verbose=False)
            calls |= {f"{runtime}/{model}": call for runtime, call in runners(path, images).items()}
        for call in calls.values():
            call()
        for name, turns in take_turns(
            calls, device=torch.device("cpu"), clock=wall_clock, seconds=seconds, advance=lambda _: None
        ).items():
            runtime, model = name.split("/")
            times.setdefault(runtime, {})[model] = turns
    return {"size": size, "img_size": img_size, "milliseconds": times, "cpu": cpu_name(), **provenance()}


def speed_up(record: dict[str, Any], runtime: str, other: str) -> float:
    """How many times the other model's throughput SSoG has: the median of the ratios within a turn."""
    times = record["milliseconds"][runtime]
    return statistics.median(theirs / ours for theirs, ours in zip(times[other], times["ssog"], strict=True))


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown table of all runs."""
    lines = ["| exported model | px | runtime | ms per image | to twin | to timm's ViT | turns |", "|---" * 7 + "|"]
    for record in runs:
        for runtime, times in record["milliseconds"].items():
            ours = statistics.median(times["ssog"])
            ratios = " | ".join(f"{speed_up(record, runtime, other):.2f}x" for other in ("twin", "timm"))
            cells = (
                f"{record['size']} | {record['img_size']} | {runtime} | {ours:.0f} | {ratios} | {len(times['ssog'])}"
            )
            lines.append(f"| {cells} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "small", "base"), default=["small"])
    parser.add_argument("--img-sizes", nargs="+", type=int, default=[1024])
    parser.add_argument("--seconds", type=float, default=180, help="for the turns of each pair (default: 180)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "exported_speed.json")
    options = parser.parse_args(argv)
    with claimed(options.output):
        runs = []
        for size in options.sizes:
            for img_size in options.img_sizes:
                runs.append(measure(size, img_size, options.seconds))
                write_results(options.output, {"models": MODELS, "threads": 1}, runs)
    print(f"{table(runs)}\n\nEvery turn: {options.output}")


if __name__ == "__main__":
    main()
