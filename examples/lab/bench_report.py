"""What the cells of benchmark.py say: tables, targets and a figure."""

import math
import statistics
from typing import TYPE_CHECKING, Any

import markdown_table
from bench_speed import PATCH, SETTINGS, SIZES
from markdown_table import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = list[dict[str, Any]]

LABELS = {
    "ssog": "SSoG",
    "twin": "twin",
    "unfused": "twin, unfused",
    "timm": "timm's ViT",
    "ceiling": "ceiling",
}

FIGURE = {
    "inference": "inference, images/s",
    "inference memory": "peak memory at inference, MiB",
    "mixing": "mixing alone, ms per image and block",
}
"""The measures that the figure shows, and what each is called there."""

SPEED_TARGETS: list[dict[str, Any]] = [
    {"measure": "inference", "img_sizes": (224, 384), "to": "ceiling", "least": dict.fromkeys(SIZES, 0.92)},
    {"measure": "inference", "img_sizes": (1024,), "to": "ceiling", "least": dict.fromkeys(SIZES, 0.88)},
    {"measure": "training", "img_sizes": (224,), "to": "ceiling", "least": dict.fromkeys(SIZES, 0.80)},
    {"measure": "inference", "img_sizes": (224,), "to": "twin", "least": dict.fromkeys(SIZES, 1.1)},
    {"measure": "inference", "img_sizes": (1024,), "to": "twin", "least": {"tiny": 3.5, "small": 2.9, "base": 2.1}},
]
"""Required ratio of SSoG's throughput to another model's."""

TARGET_CONDITIONS = {"device": "cpu", "threads": 1, "precision": "float32"}

MOST_GROWTH = 1.6
"""Limit of SSoG's exponent of growth: 1.5 by the count of operations, and 0.1 for everything else."""

MEMORY_TARGETS: list[dict[str, Any]] = [
    {"settings": tuple(SETTINGS), "to": "twin", "most": 1.0},
    {"settings": ("ode",), "to": "unfused", "most": 0.4},
]
"""Required ratio of SSoG's peak memory at inference at 1024 px to another model's."""


def ratios(record: dict[str, Any], other: str) -> list[float]:
    """Ratios of SSoG's throughput to another model's, in every turn that both took; empty if one is missing."""
    ours, theirs = (record["ms"].get(model, []) for model in ("ssog", other))
    return [b / a for a, b in zip(ours, theirs, strict=False)]


def speed_up(record: dict[str, Any], other: str) -> float | None:
    """The median of the ratios within a turn; None if a model is missing."""
    return statistics.median(found) if (found := ratios(record, other)) else None


def throughput(record: dict[str, Any], model: str) -> float | None:
    """Images per second, by the median turn; None if the model was not measured."""
    times = record["ms"].get(model)
    return 1e3 * record["batch"] / statistics.median(times) if times else None


def memory_share(record: dict[str, Any], other: str, figure: str) -> float | None:
    """Ratio of SSoG's ``peak`` or ``process_peak`` to another model's; None if one is missing."""
    ours, theirs = (record["bytes"].get(model) for model in ("ssog", other))
    if not ours or not theirs or not ours[figure] or not theirs[figure]:
        return None
    return ours[figure] / theirs[figure]


def growth(records: Records, size: str, model: str) -> float | None:
    """Exponent of the tokens with which the time of mixing one image grows: the slope of a line fitted to logarithms.

    None where there are fewer than three image sizes.
    """
    points = []
    for record in select(records, "mixing", size):
        times = record["ms"].get(model)
        if times:
            tokens = (record["img_size"] / PATCH) ** 2
            points.append((math.log(tokens), math.log(statistics.median(times) / record["batch"])))
    if len({x for x, _ in points}) < 3:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def select(records: Records, measure: str, size: str | None = None, setting: str | None = None) -> Records:
    """The records of a measure, in the order of sizes, settings and image sizes."""
    chosen = [
        record
        for record in records
        if record["measure"] == measure and size in (None, record["size"]) and setting in (None, record["setting"])
    ]
    order = list(SIZES), list(SETTINGS)
    return sorted(
        chosen, key=lambda one: (order[0].index(one["size"]), order[1].index(one["setting"]), one["img_size"])
    )


def judge(records: Records) -> list[dict[str, Any]]:
    """Every target that the records can answer.

    Returns:
        For each the ``target`` in words, ``where`` it was measured, the figure ``reached``, the ``bound``, and whether
        it is ``met``.
    """
    verdicts = []

    def add(target: str, record: dict[str, Any], reached: float | None, bound: float, least: bool) -> None:
        if reached is not None:
            where = f"{record['size']}, {record['setting']}"
            met = reached >= bound if least else reached <= bound
            verdicts.append({"target": target, "where": where, "reached": reached, "bound": bound, "met": met})

    for target in SPEED_TARGETS:
        for record in select(records, target["measure"]):
            if record["img_size"] in target["img_sizes"]:
                bound = target["least"][record["size"]]
                of = f", {record['size']}" if len(set(target["least"].values())) > 1 else ""
                name = f"{target['measure']} at {record['img_size']} px{of}: throughput to {LABELS[target['to']]}"
                add(f"{name}, ≥", record, speed_up(record, target["to"]), bound, least=True)
    for target in MEMORY_TARGETS:
        for record in select(records, "inference memory"):
            if record["img_size"] == 1024 and record["setting"] in target["settings"]:
                for figure, name in (("peak", "tensors"), ("process_peak", "whole process")):
                    words = f"peak memory at 1024 px, {name}: to {LABELS[target['to']]}, ≤"
                    add(words, record, memory_share(record, target["to"], figure), target["most"], least=False)
    for size in SIZES:
        record = {"size": size, "setting": "mixing alone"}
        add(
            "time of mixing, exponent of the tokens, ≤", record, growth(records, size, "ssog"), MOST_GROWTH, least=False
        )
    return verdicts


def tables(conditions: dict[str, Any], records: Records) -> dict[str, str]:
    """Markdown tables by name, of those measures that there are records of; targets only where they were set."""
    as_set = all(conditions.get(name) == value for name, value in TARGET_CONDITIONS.items())
    found = {
        "inference": speed_table(select(records, "inference"), "inference"),
        "training": speed_table(select(records, "training"), "training step"),
        "inference memory": memory_table(select(records, "inference memory"), "peak at inference, MiB"),
        "training memory": memory_table(select(records, "training memory"), "peak in a training step, MiB"),
        "growth": growth_table(records),
        "cost": cost_table(select(records, "cost")),
        "targets": targets_table(judge(records)) if as_set else "",
    }
    return {name: text for name, text in found.items() if text}


def summary(conditions: dict[str, Any], records: Records) -> dict[str, str]:
    """The tables as in `tables`, without the image sizes between the smallest and the largest and without `cost`."""
    sizes = {record["img_size"] for record in records}
    ends = [record for record in records if record["img_size"] in (min(sizes), max(sizes))]
    whole = tables(conditions, records)
    short = tables(conditions, ends)
    return {name: whole[name] if name in ("growth", "targets") else short[name] for name in whole if name != "cost"}


def speed_table(records: Records, title: str) -> str:
    if not records:
        return ""
    rows = []
    for record in records:
        speed = number(throughput(record, "ssog"), ".2f")
        others = [spread(ratios(record, other), ".2f") for other in ("twin", "unfused", "timm")]
        rows.append([*cell(record), speed, spread(ratios(record, "ceiling"), ".0%"), *others, turns(record)])
    figures = ["images/s", "to ceiling", "to twin", "to twin, unfused", "to timm's ViT", "turns"]
    return markdown_table.table([title, "px", "batch", *figures], rows)


def cell(record: dict[str, Any]) -> list[Any]:
    """What a row says of where it was measured."""
    return [f"{record['size']}, {record['setting']}", record["img_size"], record["batch"]]


def turns(record: dict[str, Any]) -> str:
    """How many turns there were, and how many of them all models took."""
    counts = sorted({len(times) for times in record["ms"].values()}) or [0]
    return f"{counts[-1]}" if len(counts) == 1 else f"{counts[-1]} ({counts[0]})"


def memory_table(records: Records, title: str) -> str:
    if not records:
        return ""
    rows = []
    for record in records:
        figures = []
        for model in LABELS:
            found = record["bytes"].get(model)
            text = "does not fit" if model in record["bytes"] else "-"
            if found:
                whole = f" ({found['process_peak'] / 2**20:.0f})" if found["process_peak"] else ""
                text = f"{found['peak'] / 2**20:.0f}{whole}"
            figures.append(text)
        shares = [number(memory_share(record, other, "peak"), ".0%") for other in ("twin", "unfused")]
        rows.append([*cell(record), *figures, *shares])
    return markdown_table.table([title, "px", "batch", *LABELS.values(), "to twin", "to twin, unfused"], rows)


def growth_table(records: Records) -> str:
    sizes = [size for size in SIZES if growth(records, size, "ssog") is not None]
    if not sizes:
        return ""
    models = ("ssog", "twin", "unfused")
    rows = [[size, *(number(growth(records, size, model), ".2f") for model in models)] for size in sizes]
    header = ["time of mixing, exponent of the tokens", "SSoG", "attention, fused", "attention, unfused"]
    return markdown_table.table(header, rows)


def cost_table(records: Records) -> str:
    if not records:
        return ""
    models = [model for model in LABELS if model != "unfused"]
    rows = []
    for record in records:
        counts = [record["counts"].get(model) for model in models]
        figures = [f"{one['parameters'] / 1e6:.2f} M ({one['flops'] / 1e9:.1f})" if one else "-" for one in counts]
        rows.append([f"{record['size']}, {record['setting']}", record["img_size"], *figures])
    return markdown_table.table(["parameters (GFLOPs)", "px", *(LABELS[model] for model in models)], rows)


def targets_table(verdicts: list[dict[str, Any]]) -> str:
    """A row for each target and bound: how often it is met, the range reached, and where it is missed."""
    if not verdicts:
        return ""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict["target"], verdict["bound"]), []).append(verdict)
    rows = []
    for (target, bound), group in groups.items():
        reached = [verdict["reached"] for verdict in group]
        missed = [f"{verdict['where']} ({verdict['reached']:.4f})" for verdict in group if not verdict["met"]]
        met = f"{len(group) - len(missed)} of {len(group)}"
        rows.append([target, f"{bound:.2f}", f"{min(reached):.2f} to {max(reached):.2f}", met, "; ".join(missed)])
    return markdown_table.table(["target", "", "reached", "met", "missed"], rows)


def spread(values: list[float], form: str) -> str:
    """The median and, in brackets, the least and the greatest of several values; a dash if there are none."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def setup(conditions: dict[str, Any], records: Records) -> str:
    """A sentence on where and when the records were taken."""
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    on = conditions["cpu"] if conditions["device"] == "cpu" else f"{conditions['device']} ({conditions['cpu']})"
    dates = sorted({record["date"][:10] for record in records}) or ["no records"]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    how = f"{conditions['threads']} thread(s), {conditions['precision']}, {conditions['clock']}"
    return f"{on}, {how}; {versions}; {when}."


def report(conditions: dict[str, Any], records: Records) -> str:
    """All tables with what is needed to read them, in Markdown."""
    return "\n\n".join(
        [
            setup(conditions, records),
            "The twin has dense attention and everything else equal; the ceiling mixes nothing. Throughput is SSoG's; "
            "ratios to another model are the median, smallest and largest ratio within a turn. All models took the "
            "turns in brackets, SSoG and the ceiling took all turns. Memory is the peak of all tensors (and of the "
            "whole process).",
            *tables(conditions, records).values(),
        ]
    )


def figure(records: Records) -> "Figure":
    """Throughput, peak memory at inference and the time of mixing against image size, a row for each size."""
    from matplotlib.figure import Figure

    sizes = [size for size in SIZES if any(record["size"] == size for record in records)]
    drawing = Figure(figsize=(13, 3.6 * max(1, len(sizes))), layout="constrained")
    axes = drawing.subplots(max(1, len(sizes)), 3, squeeze=False)
    for row, size in zip(axes, sizes, strict=False):
        for axis, (measure, title) in zip(row, FIGURE.items(), strict=True):
            shown = select(records, measure, size)
            # depth settings compute the same: the first that was measured stands for all
            setting = next((one for one in SETTINGS if any(record["setting"] == one for record in shown)), "")
            shown = [record for record in shown if record["setting"] == setting]
            if not shown:
                axis.set_axis_off()
                continue
            axis.set(xscale="log", yscale="log", xlabel="image size, px")
            axis.set_title(f"{size}, {setting}: {title}" if measure != "mixing" else f"{size}: {title}")
            for model, label in LABELS.items():
                points = [(record["img_size"], value) for record in shown if (value := _height(record, model))]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            pixels = sorted({record["img_size"] for record in shown})
            axis.set_xticks(pixels, [str(one) for one in pixels])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
    return drawing


def _height(record: dict[str, Any], model: str) -> float | None:
    if record["measure"] == "inference":
        return throughput(record, model)
    if record["measure"] == "mixing":
        times = record["ms"].get(model)
        return statistics.median(times) / record["batch"] if times else None
    found = record["bytes"].get(model)
    return found["peak"] / 2**20 if found else None
