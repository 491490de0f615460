"""Does the fused kernel give the right answer on this GPU, and how fast are it and the models? One command, 8 minutes.

Downloads nothing. In this order, so that what matters most is there if the time runs out: errors of output and
gradients against float64; ceilings of the card; the operator against eager, compiled einsum and attention, taking
turns; the models against their attention twins. Writes JSON and a Markdown table; exits with 1 if a result is wrong.
``--device cpu --quick`` runs a small version under Triton's interpreter, to see that the script works.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when the kernels are imported

import timm
import torch
from markdown_table import number, table
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torch.nn import functional as F
from turns import Call, Timer, take_turns, timer, wall_clock

import timm_ssog
from timm_ssog.files import replace_file
from timm_ssog.ops import fused

# height, width, components, head_dim, batch, heads
SHAPES = (
    *[(h, w, 4, 64, 2, 3) for h, w in ((1, 1), (1, 9), (7, 13), (14, 14), (16, 16), (24, 24), (32, 32), (37, 64))],
    *[(14, 14, m, d, 3, 2) for m, d in ((1, 16), (2, 32), (3, 48), (8, 64), (5, 24))],
    *[(40, 33, m, 16, 2, 2) for m in (1, 2, 3, 8)],
    (64, 64, 4, 64, 2, 2),
    (48, 48, 2, 64, 2, 2),
    (128, 128, 4, 32, 1, 2),
    (128, 20, 2, 16, 1, 2),
    (5, 200, 3, 16, 2, 1),
    (200, 5, 4, 16, 2, 1),
    (160, 144, 4, 16, 1, 1),
)
QUICK_SHAPES = ((1, 5, 3, 16, 2, 1), (18, 2, 2, 16, 1, 1))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FLOOR = 8
"""Roundings of the largest entry that an error may have, whatever eager's is."""

GRIDS = (14, 24, 32, 48, 64, 128)
OPERATOR = {"components": 4, "head_dim": 64, "heads": 6}
"""The operator is timed as in the small models."""

QUICK_GRIDS = (3,)
QUICK_OPERATOR = {"components": 2, "head_dim": 16, "heads": 1}

MODELS = [f"vit_ssog_{size}{depth}" for depth in ("", "_ode", "_looped") for size in ("small", "tiny", "base")]
IMAGE_SIZES = (1024, 224, 512, 384, 768)
"""Most telling first."""

VARIANTS = ("ssog", "twin", "unfused")
"""The model, its twin with fused attention and the twin with plain attention."""

SAMPLE_SECONDS = 2e-3
"""Least time between two readings of the clock: shorter calls are repeated."""

RESULTS = Path(__file__).parents[1] / "results" / "check_gpu.json"
QUICK_RESULTS = Path(__file__).parents[2] / "output" / "check_gpu-quick.json"


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Values, and float32 kernels as a mixer builds them; all need gradients."""
    height, width, components, head_dim, batch, heads = shape
    offset = torch.randn(2, heads, components, device=device) * 2
    sigma = torch.rand(2, heads, components, device=device) * 2 + 0.25
    amplitude = torch.randn(heads, components, 1, 1, device=device)
    rows = timm_ssog.axis_kernels(offset[0], sigma[0], height) * amplitude
    columns = timm_ssog.axis_kernels(offset[1], sigma[1], width)
    values = torch.randn(batch, height, width, heads, head_dim, device=device).to(dtype)
    return [tensor.detach().requires_grad_() for tensor in (values, rows, columns)]


def with_gradients(inputs: Iterable[Tensor], implementation: str, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = timm_ssog.separable_mix(*leaves, implementation=implementation)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def check(shapes: Iterable[tuple[int, ...]], device: torch.device) -> list[dict[str, Any]]:
    """Errors of fused and eager against float64, relative to the largest entry; a record for each shape and dtype.

    A result is right if its error is at most twice eager's, or a few roundings. Memory is NaN until it is written.
    """
    records = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    for shape, dtype in itertools.product(shapes, DTYPES):
        inputs = make_inputs(shape, dtype, device)
        grad = torch.randn(inputs[0].shape, device=device).to(dtype)
        exact = with_gradients([tensor.double() for tensor in inputs], "eager", grad)
        record: dict[str, Any] = {"shape": shape, "dtype": name_of(dtype)}
        for path in ("fused", "eager"):
            try:
                outputs = with_gradients(inputs, path, grad)
                record[path] = [relative_error(*pair) for pair in zip(outputs, exact, strict=True)]
            except Exception as error:  # an illegal access spoils the process, but what came before is written
                record[path], record["failure"] = None, f"{path}: {type(error).__name__}: {error}"
        eps = torch.finfo(dtype).eps
        record["right"] = "failure" not in record and all(
            ours <= max(2 * theirs, FLOOR * eps) for ours, theirs in zip(record["fused"], record["eager"], strict=True)
        )
        if record["right"]:
            again = with_gradients(inputs, "fused", grad)
            record["right"] = record["repeatable"] = all(
                torch.equal(*pair) for pair in zip(again, with_gradients(inputs, "fused", grad), strict=True)
            )
        records.append(record)
    torch.use_deterministic_algorithms(False)
    return records


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).abs().max() / exact.abs().max())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seconds_per_call(call: Call, repeats: int) -> float:
    """Seconds of each of several calls on the card, by its own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def timer_of(device: torch.device) -> Timer:
    return seconds_per_call if device.type == "cuda" else timer(wall_clock)


def says_so(name: str, error: Exception) -> bool:
    """Skip what fails, whatever the reason."""
    print(f"  {name} does not run: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return True


def as_graph(run: Call, device: torch.device) -> Call:
    """The same work as one CUDA graph, which removes the time of the launches; the call itself elsewhere."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def einsum_mix(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    rows, columns = rows.to(values.dtype), columns.to(values.dtype)
    return torch.einsum("hmjl,bilhmd->bijhd", columns, torch.einsum("hmik,bklhd->bilhmd", rows, values))


def time_operator(
    grid: int, batch: int, components: int, head_dim: int, heads: int, device: torch.device, turns: int
) -> list[dict[str, Any]]:
    """Forward, as calls and as a CUDA graph, and forward with backward, of all contenders on one square grid."""
    inputs = make_inputs((grid, grid, components, head_dim, batch, heads), torch.bfloat16, device)
    shape = (batch, heads, grid * grid, head_dim)
    attended = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    torch.compiler.reset()
    compiled = torch.compile(einsum_mix, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager")
    contenders: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "fused": (lambda *inputs: timm_ssog.separable_mix(*inputs, implementation="fused"), inputs),
        "eager": (lambda *inputs: timm_ssog.separable_mix(*inputs, implementation="eager"), inputs),
        "compiled einsum": (compiled, inputs),
        "attention": (F.scaled_dot_product_attention, attended),
    }

    def forward(function: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
        def run() -> None:
            with torch.no_grad():
                function(*tensors)

        return run

    def step(function: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
        grad = torch.randn_like(function(*tensors))
        return lambda: torch.autograd.grad(function(*tensors), tensors, grad)

    flops = 4 * components * grid**3 * heads * head_dim * batch
    records = []
    for part in ("forward", "forward, graph", "forward and backward"):
        runs: dict[str, Call] = {}
        for name, contender in contenders.items():
            try:
                run = (step if "backward" in part else forward)(*contender)
                runs[name] = as_graph(run, device) if "graph" in part else run
            except Exception as error:
                print(f"  {part}, {name} is skipped: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        samples = take_turns(runs, timer=timer_of(device), turns=turns, sample_seconds=SAMPLE_SECONDS, drops=says_so)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        record: dict[str, Any] = {"grid": grid, "batch": batch, "part": part}
        record["us"] = {name: 1e3 * ms for name, ms in medians.items()}
        if "fused" in samples:
            record["speedup over"] = {
                name: statistics.median(t / f for t, f in zip(times, samples["fused"], strict=True))
                for name, times in samples.items()
                if name != "fused"
            }
            if "backward" not in part:
                record["fused TFLOP/s"] = flops / medians["fused"] / 1e9
                record["fused GB/s"] = 4 * inputs[0].numel() / medians["fused"] / 1e6
        records.append(record)
    return records


def ceilings(device: torch.device, quick: bool) -> dict[str, float]:
    """What the card copies, in GB/s read and written, and multiplies, in TFLOP/s."""
    numbers, size = (1 << 16, 64) if quick else (1 << 29, 8192)
    source = torch.randn(numbers, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    found = {"copy GB/s": 2 * source.nbytes / best(lambda: target.copy_(source), device) / 1e9}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        found[f"matmul {name_of(dtype)} TFLOP/s"] = 2 * size**3 / best(lambda a=left, b=right: a @ b, device) / 1e12
    return found


def best(run: Call, device: torch.device) -> float:
    run()
    return min(timer_of(device)(run, 3) for _ in range(5))


def create(name: str, variant: str, device: torch.device, quick: bool) -> nn.Module:
    set_fused_attn(variant != "unfused")
    options: dict[str, Any] = {"num_classes": 100, "mixer": "ssog" if variant == "ssog" else "attention"}
    if quick:
        options |= {"img_size": 32, "embed_dim": 32, "num_heads": 2}
    return timm.create_model(name, **options).to(device)


def model_step(model: nn.Module, images: Tensor, training: bool) -> Call:
    device = images.device.type
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def infer() -> None:
        with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
            model(images)

    def train() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        model.zero_grad()

    model.train(training)
    return train if training else infer


def measure_models(
    name: str, img_size: int, training: bool, device: torch.device, quick: bool, turns: int
) -> dict[str, Any]:
    """Peak memory of each variant alone on the card, then images per second in turns."""
    batch = 1 if quick else max(1, round((16 if training else 64) * (224 / img_size) ** 2))
    if "base" in name and not quick:
        batch = max(1, batch // 2)
    images = torch.randn(batch, 3, img_size, img_size, device=device)
    record: dict[str, Any] = {"model": name, "px": img_size, "batch": batch, "training": training}
    record["peak MiB"], record["images/s"] = {}, {}
    models: dict[str, nn.Module] = {}
    for variant in VARIANTS:
        model = create(name, variant, device, quick)
        try:
            release(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            model_step(model, images, training)()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                record["peak MiB"][variant] = torch.cuda.max_memory_allocated(device) / 2**20
            models[variant] = model.cpu()
        except torch.cuda.OutOfMemoryError:
            record["peak MiB"][variant] = None
        del model
        release(device)
    runs = {variant: model_step(model.to(device), images, training) for variant, model in models.items()}
    samples = take_turns(runs, timer=timer_of(device), turns=turns, sample_seconds=SAMPLE_SECONDS, drops=says_so)
    for variant, times in samples.items():
        record["images/s"][variant] = 1e3 * batch / statistics.median(times)
        record[f"speedup over {variant}"] = statistics.median(
            t / own for t, own in zip(times, samples.get("ssog", times), strict=True)
        )
    return record


def release(device: torch.device) -> None:
    """Give unused memory back to the card."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, Any]:
    where: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
    }
    for name in ("timm-ssog", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            where["versions"][name] = metadata.version(name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        where |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / 2**30, 1),
        }
        where["versions"]["cuda"] = torch.version.cuda
    return where


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for an H200, with what was reached; only those that were measured."""
    verdicts = []

    def add(what: str, reached: float, least: float) -> None:
        verdicts.append({"target": what, "reached": reached, "least": least, "met": reached >= least})

    for record in results["operator"]:
        speedup = record.get("speedup over", {}).get("compiled einsum")
        if record["part"] == "forward, graph" and 14 <= record["grid"] <= 64 and speedup:
            add(f"operator at {record['grid']} x {record['grid']}, speedup over compiled einsum", speedup, 3.0)
    for record in results["models"]:
        if record["px"] != 1024 or record["training"]:
            continue
        least = {"vit_ssog_small": 2.0, "vit_ssog_small_ode": 2.5}.get(record["model"])
        if least and "speedup over twin" in record:
            add(f"{record['model']} at 1024 px, speedup over its twin", record["speedup over twin"], least)
        peaks = record["peak MiB"]
        for variant, least in (("twin", 0.0), ("unfused", 0.6)):
            if peaks.get("ssog") and peaks.get(variant):
                saved = 1 - peaks["ssog"] / peaks[variant]
                add(f"{record['model']} at 1024 px, peak memory saved against {variant}", saved, least)
    return verdicts


def report(results: dict[str, Any]) -> str:
    """Markdown of everything in the results."""
    where = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [f"{where['device']}; {versions}; bfloat16 unless said otherwise; {where['date']}.", ""]
    wrong = [record for record in results["errors"] if not record["right"]]
    lines.append(
        f"Right in {len(results['errors']) - len(wrong)} of {len(results['errors'])} cases of shape and dtype."
    )
    lines += [f"WRONG: {json.dumps(record)}" for record in wrong]
    lines += ["", *(f"{name}: {figure:,.2f}" for name, figure in results["ceilings"].items())]
    contenders = ("fused", "eager", "compiled einsum", "attention")
    rows = []
    for record in results["operator"]:
        figures = (number(record["us"].get(name), ".1f") for name in contenders)
        rows.append([record["part"], record["grid"], record["batch"], *figures])
    if rows:
        lines += ["", table(["operator, us", "grid", "batch", *contenders], rows)]
    rows = []
    for record in results["models"]:
        name = f"{record['model']}, {'training' if record['training'] else 'inference'}"
        figures = [number(record[key].get(variant), ".4g") for key in ("images/s", "peak MiB") for variant in VARIANTS]
        rows.append([name, record["px"], record["batch"], *figures])
    if rows:
        header = ["model", "px", "batch", "images/s", *VARIANTS[1:], "MiB", *VARIANTS[1:]]
        lines += ["", table(header, rows)]
    for verdict in results["targets"]:
        met = "Met" if verdict["met"] else "MISSED"
        lines.append(f"\n{met}: {verdict['target']}: {verdict['reached']:.2f} (at least {verdict['least']}).")
    if results["left_out"]:
        lines += ["", f"Not measured for lack of time: {', '.join(results['left_out'])}."]
    return "\n".join(lines)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the JSON and, beside it, the Markdown, each at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = ((path, json.dumps(results, indent=1)), (path.with_suffix(".md"), report(results)))
    for target, text in texts:
        replace_file(target, text + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:<index> or cpu (default: cuda)")
    parser.add_argument("--minutes", type=float, default=7.5, help="no new measurement after this time (default: 7.5)")
    parser.add_argument("--output", type=Path, help="JSON file; a .md goes beside it (default: examples/results)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; not for results")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    obstacle = fused.obstacle(torch.device(options.device), torch.float32)
    if obstacle:
        parser.error(f"the fused kernels cannot run on --device {options.device}: {obstacle}")
    return options


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    options = arguments(argv)
    device, quick = torch.device(options.device), options.quick
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    output = options.output or (QUICK_RESULTS if quick else RESULTS)
    results: dict[str, Any] = {"machine": machine(device), "errors": [], "ceilings": {}, "operator": [], "models": []}
    results |= {"targets": [], "left_out": []}

    def in_time(what: str) -> bool:
        gone = (time.monotonic() - begin) / 60
        if gone > options.minutes:
            results["left_out"].append(what)
            return False
        print(f"{gone:4.1f} of {options.minutes} min: {what}", file=sys.stderr)
        return True

    in_time("errors against float64")
    results["errors"] = check(QUICK_SHAPES if quick else SHAPES, device)
    write(output, results)
    in_time("ceilings")
    results["ceilings"] = ceilings(device, quick)
    turns = 1 if quick else 7
    for grid in QUICK_GRIDS if quick else GRIDS:
        if in_time(f"operator at {grid} x {grid}"):
            batch = 1 if quick else 64 if grid <= 64 else 8
            sizes = QUICK_OPERATOR if quick else OPERATOR
            results["operator"] += time_operator(grid, batch, **sizes, device=device, turns=turns)
            release(device)
    write(output, results)
    image_sizes = (32,) if quick else IMAGE_SIZES
    for img_size, training, name in itertools.product(image_sizes, (False, True), MODELS):
        if in_time(f"{name} at {img_size} px, {'training' if training else 'inference'}"):
            results["models"].append(measure_models(name, img_size, training, device, quick, 1 if quick else 3))
            release(device)
    results["targets"] = judge(results)
    write(output, results)
    print(report(results))
    return 0 if all(record["right"] for record in results["errors"]) else 1


if __name__ == "__main__":
    sys.exit(main())
