"""Which form of the mixing operator is cheaper, dense or stacked? Measures both and fits the rule that picks one.

One thread, CPU time, both forms taking turns, medians. Prints every case with what the rule picks, then the constants
that would have lost the least time over the sweep, to be put into timm_ssog/ops/eager.py.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import markdown_table
import torch
from runs import claimed, write_results
from tqdm import tqdm
from turns import cpu_clock, take_turns, timer

from timm_ssog.ops import eager

GRIDS = ((7, 7), (10, 10), (12, 12), (14, 14), (16, 16), (20, 20), (24, 24), (7, 14), (8, 32), (24, 10))
BATCHES = (1, 4, 16, 64)
HEAD_DIMS = (16, 64)
COMPONENTS = (1, 2, 4, 8)
MOST_VALUES = 1 << 20
"""Values per head above which a larger batch only makes the sweep longer."""

HEADS = 6
"""As many as the small model has: whether heads are mixed together or one by one depends on their number."""

SAMPLE_SECONDS = 2e-3
"""Least time between two readings of the clock; shorter calls are repeated."""

FORMS = {"dense": math.inf, "stacked": 0.0}
"""The two forms, each with a `eager.STACKED_COST` that makes the rule pick it always."""


@contextmanager
def weights(stacked_cost: float, build_cost: float) -> Iterator[None]:
    """Let `eager.prefers_dense` weigh with other constants, in tenths as its own, for a while."""
    before = eager.STACKED_COST, eager.BUILD_COST
    # whole numbers in the package, for symbolic sizes; any number will do here
    eager.STACKED_COST, eager.BUILD_COST = stacked_cost, build_cost  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        eager.STACKED_COST, eager.BUILD_COST = before


def measure(grid: tuple[int, int], batch: int, head_dim: int, components: int, rounds: int) -> list[dict[str, Any]]:
    """Time both forms on one case, forward and backward separately, because the rule decides them separately.

    Returns:
        A record for each of the two passes, with the milliseconds of either form.
    """
    height, width = grid
    inputs = (
        torch.randn(batch, height, width, HEADS, head_dim, requires_grad=True),
        torch.rand(HEADS, components, height, height, requires_grad=True),
        torch.rand(HEADS, components, width, width, requires_grad=True),
    )
    output = eager.mix(*inputs)
    grad = torch.randn(batch, height, width, HEADS, head_dim)

    def forward() -> Any:
        with torch.no_grad():
            return eager.mix(*inputs)

    def backward() -> Any:
        return torch.autograd.grad(output, inputs, grad, retain_graph=True)

    records = []
    for name, run in (("forward", forward), ("backward", backward)):
        calls = {form: partial(in_form, run, stacked_cost) for form, stacked_cost in FORMS.items()}
        # CPU time: with one thread it leaves out what else the machine is doing
        samples = take_turns(calls, timer=timer(cpu_clock), turns=rounds, sample_seconds=SAMPLE_SECONDS)
        records.append(
            {
                "pass": name,
                "grid": list(grid),
                "batch": batch,
                "head_dim": head_dim,
                "components": components,
                **{form: statistics.median(values) for form, values in samples.items()},
            }
        )
    return records


def in_form(run: Callable[[], Any], stacked_cost: float) -> None:
    """Make a call with the constants that pick one form."""
    with weights(stacked_cost, 0.0):
        run()


def picks_dense(record: dict[str, Any]) -> bool:
    """What the rule picks on a case, with the constants as they are."""
    height, width = record["grid"]
    backward = record["pass"] == "backward"
    return eager.prefers_dense(
        record["batch"], height, width, record["head_dim"], record["components"], backward=backward
    )


def regret(records: list[dict[str, Any]], stacked_cost: float, build_cost: float) -> float:
    """Share of time lost against always taking the better form; every case counts the same, small grids too."""
    with weights(stacked_cost, build_cost):
        lost = [
            record["dense" if picks_dense(record) else "stacked"] / min(record["dense"], record["stacked"]) - 1
            for record in records
        ]
    return statistics.mean(lost)


def fit(records: list[dict[str, Any]]) -> tuple[float, float]:
    """The constants of least regret, the middle ones where several do equally well.

    Returns:
        STACKED_COST and BUILD_COST.
    """
    candidates = [(5 * 1.05**i, 5 * 1.15**j) for i, j in itertools.product(range(56), range(44))]
    regrets = {candidate: regret(records, *candidate) for candidate in candidates}
    least = min(regrets.values())
    best = [candidate for candidate in candidates if regrets[candidate] <= least * (1 + 1e-9)]
    stacked_cost, build_cost = (statistics.geometric_mean(values) for values in zip(*best, strict=True))
    return min(best, key=lambda one: abs(math.log(one[0] / stacked_cost)) + abs(math.log(one[1] / build_cost)))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown table of all cases; picks that lost time are marked by how much."""
    rows = []
    for record in records:
        pick = "dense" if picks_dense(record) else "stacked"
        lost = record[pick] / min(record["dense"], record["stacked"]) - 1
        case = [f"{record['grid'][0]} x {record['grid'][1]}", record["batch"], record["head_dim"], record["components"]]
        times = (f"{record[form]:.3f}" for form in FORMS)
        rows.append([record["pass"], *case, *times, pick, f"{lost:.0%}" if lost else ""])
    header = ["pass", "grid", "batch", "head_dim", "components", *(f"{form}, ms" for form in FORMS), "rule", "loses"]
    return markdown_table.table(header, rows)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="samples of every case and form (default: 7)")
    parser.add_argument("--output", type=Path, help="also write the measurements into this JSON file")
    parser.add_argument("--quick", action="store_true", help="a few small cases, to see that it runs")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    with claimed(options.output) if options.output else nullcontext():
        sweep(options)


def sweep(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = list(itertools.product(GRIDS, BATCHES, HEAD_DIMS, COMPONENTS))
    cases = [case for case in cases if math.prod(case[0]) * math.prod(case[1:3]) <= MOST_VALUES]
    if options.quick:
        cases = list(itertools.product(((4, 4), (10, 12)), (1, 4), (16,), (2,)))
    # the longest first: the time left is not underestimated
    cases.sort(key=lambda case: -(math.prod(case[0]) ** 2) * math.prod(case[1:3]))
    records = []
    for case in tqdm(cases, unit="case"):
        records += measure(*case, rounds=options.rounds)
    records.sort(key=lambda record: [record["pass"] == "backward", *record["grid"], record["batch"]])
    print(table(records))
    if options.output:
        write_results(options.output, {"rounds": options.rounds, "heads": HEADS}, records)
    shipped = eager.STACKED_COST, eager.BUILD_COST
    choices = {
        "shipped": shipped,
        "fitted": fit(records),
        "always dense": (math.inf, 0.0),
        "always stacked": (0.0, 0.0),
    }
    rows = []
    for name, constants in choices.items():
        shares = [regret(records, *constants)]
        shares += [
            regret([record for record in records if record["pass"] == part], *constants)
            for part in ("forward", "backward")
        ]
        rows.append([name, *(f"{constant:.1f}" for constant in constants), *(f"{share:.1%}" for share in shares)])
    header = ["constants", "STACKED_COST", "BUILD_COST", "time lost, mean of all cases", "forward", "backward"]
    print(f"\n{markdown_table.table(header, rows)}")


if __name__ == "__main__":
    main()
