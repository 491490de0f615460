"""How fast is SSoG, and how much memory does it train in? Against its attention twin, the ceiling and timm's own ViT.

Inference: all models of a size take turns on the same images, so that whatever else the machine does hits all of them;
times are medians, ratios are medians of the ratios within a turn. Training: one step in a fresh process per model.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import timm_ssog  # noqa: F401 - registers the models

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "SSoG": ("vit_ssog_{}", {}),
    "twin": ("vit_ssog_{}", {"mixer": "attention"}),
    "ceiling": ("vit_ssog_{}", {"mixer": "identity"}),
    "timm ViT": ("vit_{}_patch16_224", {"dynamic_img_size": True}),
}
"""Name and options of the models that take turns; ratios are to the ceiling (nothing mixed) and to the twin."""

TRAINED = ("SSoG", "twin")
"""Models whose training step is measured."""

IMAGE_SIZES = (224, 1024)
TRAINING = {"img_size": 224, "batch": 8}
QUICK_IMAGE_SIZES = (32, 64)
QUICK_TRAINING = {"img_size": 32, "batch": 2}

TARGETS: list[dict[str, Any]] = [
    {"img_size": 224, "ratio": "to_ceiling", "least": 0.80, "aim": 0.92},
    {"img_size": 1024, "ratio": "to_ceiling", "least": 0.80, "aim": 0.88},
    {"img_size": 1024, "ratio": "to_twin", "least": 2.5, "aim": 2.9},
]
"""What the small SSoG model must reach on one CPU thread; a training step must not need more memory than the twin's."""

LEAST_TURNS, MOST_TURNS = 5, 100

TRAINING_WEIGHT = 0.3
"""Share of the time of an inference measurement that a training step is expected to take, for the time left."""

RESULTS = Path(__file__).parent / "results" / "benchmark.json"
QUICK_RESULTS = Path(__file__).parents[1] / "output" / "benchmark-quick.json"


def batch_size(img_size: int) -> int:
    """Images of about as many pixels in all as four of 224 px, at least one."""
    return max(1, round(4 * (224 / img_size) ** 2))


def create(model: str, size: str) -> nn.Module:
    """Build one of `MODELS` in a size, attention with the fused kernel."""
    set_fused_attn(True)
    name, options = MODELS[model]
    return timm.create_model(name.format(size), **options)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_inference(
    size: str, img_size: int, batch: int, device: torch.device, seconds: float, advance: Callable[[float], Any]
) -> list[dict[str, Any]]:
    """Let all models of a size take turns for some seconds.

    Args:
        size: ``"tiny"``, ``"small"`` or ``"base"``.
        img_size: Height and width of the images.
        batch: Images at once.
        device: Where to run.
        seconds: About how long; there are at least `LEAST_TURNS` and at most `MOST_TURNS`.
        advance: Is told after every turn which share of all turns it was.

    Returns:
        A record for each model.
    """
    models = {name: create(name, size).to(device).eval() for name in MODELS}
    images = torch.randn(batch, 3, img_size, img_size, device=device)

    def turn() -> dict[str, float]:
        times = {}
        for name, model in models.items():
            synchronize(device)
            start = time.perf_counter()
            model(images)
            synchronize(device)
            times[name] = time.perf_counter() - start
        return times

    with torch.inference_mode():
        turn()  # the first one warms up: lazy initialisation would spoil the estimate that the second one gives
        count = min(MOST_TURNS, max(LEAST_TURNS, int(seconds / sum(turn().values()))))
        turns = []
        for _ in range(count):
            turns.append(turn())
            advance(1 / count)

    records = []
    for name, model in models.items():
        ratios = {
            f"to_{other}": statistics.median(times[other] / times[name] for times in turns)
            for other in ("ceiling", "twin")
        }
        records.append(
            {
                "model": name,
                "size": size,
                "img_size": img_size,
                "batch": batch,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "ms": 1e3 * statistics.median(times[name] for times in turns),
                "turns": count,
                **ratios,
            }
        )
    return records


def measure_training(model: str, size: str, img_size: int, batch: int, device: str) -> dict[str, Any]:
    """Memory of one training step (AdamW), after a first one that set up gradients and optimizer; for a fresh process.

    Returns:
        A record with, in bytes: ``standing``, the tensors that are there between two steps; ``peak``, the most tensors
        at any time of the step, these included; ``saved``, what forward keeps for backward; and ``process_peak``, the
        resident memory of the whole process, which counts libraries and their workspaces too (None where the system
        cannot tell).
    """
    on = torch.device(device)
    network = create(model, size).to(on).train()
    optimizer = torch.optim.AdamW(network.parameters())
    images = torch.randn(batch, 3, img_size, img_size, device=on)
    labels = torch.randint(network.num_classes, (batch,), device=on)  # type: ignore[arg-type]

    def step() -> None:
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = saved_bytes(network, images, labels)
    optimizer.zero_grad()

    process_peak = None
    if on.type == "cuda":
        standing = torch.cuda.memory_allocated(on)
        torch.cuda.reset_peak_memory_stats(on)
        step()
        peak = torch.cuda.max_memory_allocated(on)
    else:
        state = [value for values in optimizer.state.values() for value in values.values()]
        tensors = [*network.parameters(), *network.buffers(), *state, images, labels]
        standing = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        if reset_process_peak():
            step()
            process_peak = process_peak_bytes()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        peak = standing + peak_allocated(profiler)
    return {
        "model": model,
        "size": size,
        "img_size": img_size,
        "batch": batch,
        "standing": standing,
        "peak": peak,
        "saved": saved,
        "process_peak": process_peak,
    }


def saved_bytes(network: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once, parameters and images left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*network.parameters(), images]}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(network(images), labels)
    loss.backward()
    return sum(storages.values())


def peak_allocated(profiler: profile) -> int:
    """The most bytes of tensors that were alive at once, of those allocated while the profiler ran.

    The allocator reports to the profiler, so this is exact: neither the system's allocator nor its load matters.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def reset_process_peak() -> bool:
    """Let the system forget this process's peak of resident memory; whether it can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return process_peak_bytes() > 0
    return False


def process_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_training_apart(task: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run `measure_training` in a process of its own.

    Raises:
        SystemExit: if it fails, with what it said.
    """
    # with a fixed threshold glibc hands large blocks back as soon as they are free: the peak is that of the step
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    command = [sys.executable, str(Path(__file__).resolve()), "--training-task", json.dumps(task)]
    command += ["--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"Measuring the training step of {task} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """What the figures depend on beside the code."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "timm_ssog": package_version(),
        },
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": threads,
    }


def package_version() -> str:
    try:
        return metadata.version("timm-ssog")
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets that these results can answer, with the figure reached and whether it is enough."""
    verdicts = []
    ours = [record for record in results["inference"] if (record["model"], record["size"]) == ("SSoG", "small")]
    for target in TARGETS:
        for record in ours:
            if record["img_size"] == target["img_size"] and record["batch"] == batch_size(target["img_size"]):
                reached = record[target["ratio"]]
                verdicts.append({**target, "reached": reached, "met": reached >= target["least"]})
    steps = {record["model"]: record for record in results["training"] if record["size"] == "small"}
    if set(TRAINED) <= set(steps):
        for figure in ("peak", "process_peak"):
            if steps["SSoG"][figure] is not None:
                reached = steps["SSoG"][figure] / steps["twin"][figure]
                verdicts.append(
                    {"img_size": steps["SSoG"]["img_size"], "ratio": f"training {figure}", "reached": reached}
                    | {"most": 1.0, "met": reached <= 1.0}
                )
    return verdicts


def report(results: dict[str, Any]) -> str:
    """Markdown tables of the results, and what they say about the targets."""
    where = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    on = where["cpu"] if where["device"] == "cpu" else f"{where['device']} ({where['cpu']})"
    lines = [f"{on}, {where['threads']} thread(s), float32; {versions}; {where['date']}.", ""]
    lines += [
        "| inference | px | batch | parameters | ms | throughput to ceiling | to twin | turns |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in results["inference"]:
        lines.append(
            f"| {record['size']}, {record['model']} | {record['img_size']} | {record['batch']} "
            f"| {record['parameters'] / 1e6:.2f} M | {record['ms']:.1f} | {record['to_ceiling']:.1%} "
            f"| {record['to_twin']:.2f} | {record['turns']} |"
        )
    if results["training"]:
        lines += [
            "",
            "| training step, MiB | px | batch | standing | peak | saved for backward | peak of the process |",
            "|---|---|---|---|---|---|---|",
        ]
    for record in results["training"]:
        figures = (record[key] for key in ("standing", "peak", "saved", "process_peak"))
        lines.append(
            f"| {record['size']}, {record['model']} | {record['img_size']} | {record['batch']} | "
            + " | ".join("-" if figure is None else f"{figure / 2**20:.0f}" for figure in figures)
            + " |"
        )
    for verdict in results["targets"]:
        bound = f"at least {verdict['least']}, aim {verdict['aim']}" if "least" in verdict else "at most 1"
        lines += [
            "",
            f"{'Met' if verdict['met'] else 'MISSED'}: small at {verdict['img_size']} px, "
            f"{verdict['ratio'].replace('_', ' ')}: {verdict['reached']:.3f} ({bound}).",
        ]
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Write a file at once, so that an interruption leaves either the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    os.replace(partial, path)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "small", "base"), help="sizes (default: small)")
    parser.add_argument("--img-sizes", nargs="+", type=int, metavar="PX", help="image sizes (default: 224 1024)")
    parser.add_argument("--batch-size", type=int, help="images at once (default: 4 at 224 px, fewer above, more below)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
    parser.add_argument("--seconds", type=float, help="time for each size and image size (default: 90)")
    parser.add_argument("--output", type=Path, help="JSON file; a .md goes beside it (default: examples/results)")
    parser.add_argument("--quick", action="store_true", help="tiny images, to see that it runs; not for results")
    parser.add_argument("--training-task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.models = options.models or ["tiny" if options.quick else "small"]
    if options.batch_size is None and options.quick:
        options.batch_size = 2
    options.img_sizes = options.img_sizes or (QUICK_IMAGE_SIZES if options.quick else IMAGE_SIZES)
    if options.seconds is None:
        options.seconds = 0 if options.quick else 90
    for name, value in (("threads", options.threads), ("batch-size", options.batch_size)):
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    for img_size in options.img_sizes:
        if img_size < 16 or img_size % 16:
            parser.error(f"--img-sizes must be multiples of the patch size 16, got {img_size}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.training_task:
        print(json.dumps(measure_training(**options.training_task)))
        return
    device = torch.device(options.device)
    output = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    training = QUICK_TRAINING if options.quick else TRAINING
    results: dict[str, Any] = {"machine": machine(device, options.threads), "inference": [], "training": []}

    tasks = [(size, img_size) for size in options.models for img_size in options.img_sizes]
    trained = [(size, model) for size in options.models for model in TRAINED]
    with tqdm(
        total=len(tasks) + TRAINING_WEIGHT * len(trained),
        smoothing=0,
        bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left",
    ) as bar:
        for size, img_size in tasks:
            bar.set_description(f"{size}, {img_size} px")
            batch = options.batch_size or batch_size(img_size)
            results["inference"] += measure_inference(size, img_size, batch, device, options.seconds, bar.update)
        for size, model in trained:
            bar.set_description(f"{size}, training the {model}")
            task = {"model": model, "size": size, **training, "device": options.device}
            results["training"].append(measure_training_apart(task, options.threads))
            bar.update(TRAINING_WEIGHT)
    results["targets"] = judge(results)
    print(report(results))
    write(output, json.dumps(results, indent=1) + "\n")
    write(output.with_suffix(".md"), report(results) + "\n")


if __name__ == "__main__":
    main()
