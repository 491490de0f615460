"""How fast is SSoG, and how much memory does it take? Nine models against their twins, the ceiling and timm's own ViT.

Three sizes in three depth settings: SSoG, its attention twin with fused and with unfused attention, the ceiling
(nothing mixed) and, where depth is discrete, timm's own ViT. The models of a cell (a measure, a size, a setting and an
image size) take turns; ratios are medians of the ratios within a turn. Results go into a JSON file after each cell, and
a second call resumes where the first one stopped; tables and a figure are written beside it.
"""

import argparse
import contextlib
import itertools
import platform
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import bench_memory
import bench_report
import timm
import torch
from bench_speed import (
    BLOCKS,
    MODELS,
    PATCH,
    SETTINGS,
    SIZES,
    count,
    measure_mixing,
    measure_models,
    models_of,
)
from runs import OUTPUT, claimed, results_of, write_results
from tqdm import tqdm
from turns import LEAST_TURNS, cpu_clock, wall_clock

from timm_ssog.files import replace_file

MEASURES = ("inference", "training", "mixing", "inference memory", "training memory", "cost")
"""Times of a forward pass, of a training step and of mixing alone; peak memory of both; parameters and FLOPs."""

IMAGE_SIZES = (224, 384, 512, 768, 1024)

QUICK: dict[str, Any] = {
    "measures": ["inference", "training", "inference memory", "cost"],
    "sizes": ["tiny"],
    "settings": ["discrete"],
    "models": ["ssog", "twin", "ceiling"],
    "img_sizes": [64, 112],
    "batch_size": 1,
    "seconds": 0.0,
}
"""What ``--quick`` does unless told otherwise."""

PACE = {"cpu": 4e10, "cuda": 2e13}
"""Floating-point operations per second that the first estimate of the time left starts from."""

PROCESS_SECONDS = 8.0
"""Likewise, for starting the process that a memory figure needs."""


class Cell(NamedTuple):
    """What is measured in one go."""

    measure: str
    size: str
    setting: str
    img_size: int


def batch_size(img_size: int, pixels_of: int = 4) -> int:
    """Images of about as many pixels in all as ``pixels_of`` of 224 px, at least one."""
    return max(1, round(pixels_of * (224 / img_size) ** 2))


def cells(options: argparse.Namespace) -> list[Cell]:
    """All cells that the options ask for; an interruption leaves whole sizes and settings."""
    wanted = itertools.product(options.measures, options.sizes, options.settings, options.img_sizes)
    # what mixes the tokens is the same in every depth setting
    anywhere = next(iter(SETTINGS))
    named = [Cell(*cell)._replace(setting=anywhere if cell[0] == "mixing" else cell[2]) for cell in wanted]
    return [cell for cell in dict.fromkeys(named) if models_of(cell.setting, tuple(options.models))]


def is_done(record: dict[str, Any], cell: Cell, options: argparse.Namespace) -> bool:
    """Whether a record answers what is asked of a cell: all the models, and at least as many seconds of timing."""
    same = tuple(record[field] for field in Cell._fields) == cell
    models = set(models_of(cell.setting, tuple(options.models)))
    long_enough = "ms" not in record or record["seconds"] >= options.seconds
    return same and models <= set(record["models"]) and long_enough


def expected_seconds(cell: Cell, options: argparse.Namespace) -> float:
    """A guess at how long a cell takes, for the time left; the progress bar corrects its error."""
    if cell.measure == "cost":
        return 2.0
    dim, _ = SIZES[cell.size]
    models = models_of(cell.setting, tuple(options.models))
    dense = sum(model not in ("ssog", "ceiling") for model in models)
    tokens = batch_size(cell.img_size, options.batch_size) * (cell.img_size / PATCH) ** 2
    mixing = dense * 4 * (cell.img_size / PATCH) ** 2 * dim
    flops = tokens * (mixing if cell.measure == "mixing" else BLOCKS * (len(models) * 24 * dim**2 + mixing))
    if "training" in cell.measure:
        flops *= 3
    if "memory" in cell.measure:
        return len(models) * PROCESS_SECONDS + 4 * flops / PACE[options.device.type]
    return max(options.seconds, (LEAST_TURNS + 1) * flops / PACE[options.device.type])


def measure(cell: Cell, options: argparse.Namespace, advance: Any) -> dict[str, Any]:
    """Measure a cell.

    Returns:
        Its record: the cell, the batch, ``models`` and ``seconds`` as asked for, and by model ``ms`` of each turn,
        ``bytes`` or ``counts``. A model that does not fit into memory is None in ``bytes``, and missing in ``ms``.
    """
    batch = batch_size(cell.img_size, options.batch_size)
    models = models_of(cell.setting, tuple(options.models))
    record: dict[str, Any] = {**cell._asdict(), "batch": batch, "models": models, "seconds": options.seconds}
    clock = cpu_clock if options.device.type == "cpu" and options.threads == 1 else wall_clock
    common: dict[str, Any] = {
        "batch": batch,
        "models": models,
        "device": options.device,
        "bf16": options.bf16,
        "clock": clock,
        "seconds": options.seconds,
        "advance": advance,
    }
    if cell.measure in ("inference", "training"):
        training = cell.measure == "training"
        record["ms"] = measure_models(cell.size, cell.setting, cell.img_size, training=training, **common)
    elif cell.measure == "mixing":
        record["ms"] = measure_mixing(cell.size, cell.img_size, **common)
    elif cell.measure == "cost":
        record["counts"] = {model: count(model, cell.size, cell.setting, cell.img_size) for model in models}
    else:
        record["bytes"] = {}
        for model in models:
            task = {
                "model": model,
                "size": cell.size,
                "setting": cell.setting,
                "img_size": cell.img_size,
                "batch": batch,
                "training": cell.measure == "training memory",
                "device": str(options.device),
                "bf16": options.bf16,
                "threads": options.threads,
            }
            record["bytes"][model] = bench_memory.measure_apart(task)
            advance(1 / len(models))
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return record


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on besides the code: cells measured under other conditions are not mixed in."""
    device = options.device
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "timm_ssog": package_version(),
        },
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": options.threads,
        "precision": "bfloat16" if options.bf16 else "float32",
        "images of 224 px at once": options.batch_size,
        "clock": "cpu time" if device.type == "cpu" and options.threads == 1 else "wall clock",
    }


def package_version() -> str:
    try:
        return metadata.version("timm-ssog")
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("measures", MEASURES), ("sizes", SIZES), ("settings", SETTINGS), ("models", MODELS)):
        parser.add_argument(f"--{name}", nargs="+", choices=tuple(choices), help="default: all")
    parser.add_argument("--img-sizes", nargs="+", type=int, metavar="PX", help="default: 224 384 512 768 1024")
    parser.add_argument(
        "--batch-size",
        type=int,
        help="images of 224 px at once, in other sizes as many as have their pixels (default: 4; 128 on a GPU)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast) instead of float32")
    parser.add_argument("--seconds", type=float, help="time for each cell, at least three turns (default: 60)")
    parser.add_argument("--output", type=Path, help="JSON file; .md and .png go beside it (default: in output/)")
    parser.add_argument(
        "--quick", action="store_true", help="a minute's look at the tiny model on tiny images; not for results"
    )
    options = parser.parse_args(argv)

    try:
        options.device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device must be cpu, cuda or cuda:<index>, got {options.device}")
    if options.device.type not in PACE:
        parser.error(f"--device must be cpu, cuda or cuda:<index>, got {options.device}")
    if options.device.type == "cuda" and (options.device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {options.device} is not there: torch sees {torch.cuda.device_count()} GPUs")
    defaults: dict[str, Any] = {
        "measures": MEASURES,
        "sizes": tuple(SIZES),
        "settings": tuple(SETTINGS),
        "models": MODELS,
        "img_sizes": IMAGE_SIZES,
        "batch_size": 4 if options.device.type == "cpu" else 128,
        "seconds": 60.0,
        "output": OUTPUT / f"benchmark{'-quick' if options.quick else ''}.json",
    }
    options.anew = options.quick and not options.output
    for name, value in {**defaults, **(QUICK if options.quick else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("threads", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.seconds < float("inf"):
        parser.error(f"--seconds must be 0 or more, got {options.seconds}")
    if options.output.suffix != ".json":
        parser.error(f"--output must end in .json, as the report goes beside it, got {options.output}")
    if not cells(options):
        parser.error(f"nothing to measure: no setting of {' '.join(options.settings)} has {' '.join(options.models)}")
    for img_size in options.img_sizes:
        if img_size < PATCH or img_size % PATCH:
            parser.error(f"--img-sizes must be multiples of the patch size {PATCH}, got {img_size}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if find_spec("matplotlib") is None:
        raise SystemExit("The figure needs matplotlib: pip install '.[demo]'")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    where = conditions(options)
    with claimed(options.output):
        records = measure_missing(options, where)
        text = bench_report.report(where, records)
        replace_file(options.output.with_suffix(".md"), text + "\n")
        bench_report.figure(records).savefig(options.output.with_suffix(".png"), dpi=120)
    print(text)


def measure_missing(options: argparse.Namespace, where: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the cells that the results file has no answer to, and write it after each.

    Returns:
        All its records.
    """
    fields = (*Cell._fields, "batch", "models", "seconds")
    records = [] if options.anew else results_of(options.output, where, fields)
    left = [cell for cell in cells(options) if not any(is_done(record, cell, options) for record in records)]
    weights = {cell: expected_seconds(cell, options) for cell in left}
    try:
        with tqdm(
            total=sum(weights.values()),
            smoothing=0,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left",
        ) as bar:
            for cell in left:
                bar.set_description(f"{cell.measure}: {cell.size}, {cell.setting}, {cell.img_size} px")
                before = bar.n
                record = measure(cell, options, lambda share, weight=weights[cell]: bar.update(share * weight))
                bar.update(before + weights[cell] - bar.n)
                replaced = (one for one in records if tuple(one[field] for field in Cell._fields) != cell)
                records = [*replaced, record]
                write_results(options.output, where, records)
    except KeyboardInterrupt:
        raise SystemExit(
            f"\nInterrupted. {len(records)} cells are in {options.output}; the same command resumes from there."
        ) from None
    return records


if __name__ == "__main__":
    main()
