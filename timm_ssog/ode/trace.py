"""What a solve did, for one clock per batch or one per sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SolveTrace:
    """What a solve did.

    After a per-sample solve, the counts are int64 tensors (batch,) on the CPU, ``error_estimate`` is a float64 tensor,
    and ``times`` and ``states`` hold one list per sample.

    Attributes:
        evaluations: Evaluations of the velocity in the forward solve.
        accepted: Steps taken.
        rejected: Steps whose error was above the tolerance, and that were tried again with a smaller size.
        times: Times at which the accepted steps end.
        error_estimate: Largest local error of an accepted step over its tolerance, at most 1. For a fixed-step method,
            which has no such estimate, the error of the whole solve as estimated by `timm_ssog.trace_solve`, or None.
        states: States at ``times``, without gradient; None unless asked for.
    """

    evaluations: int | Tensor
    accepted: int | Tensor
    rejected: int | Tensor
    times: list[float] | list[list[float]]
    error_estimate: float | Tensor | None
    states: list[Tensor] | list[list[Tensor]] | None

    def __str__(self) -> str:
        error = "none" if self.error_estimate is None else _spread(self.error_estimate)
        samples = f"{self.evaluations.numel()} samples, each: " if isinstance(self.evaluations, Tensor) else ""
        return (
            f"{samples}{_spread(self.evaluations)} evaluations of the velocity, {_spread(self.accepted)} steps "
            f"accepted, {_spread(self.rejected)} rejected, error estimate {error}"
        )


def _spread(count: float | Tensor) -> str:
    if not isinstance(count, Tensor):
        return f"{count:.3g}" if isinstance(count, float) else str(count)
    if not count.numel():
        return "no"
    low, high = count.min().item(), count.max().item()
    return _spread(low) if low == high else f"{_spread(low)} to {_spread(high)}"


def join_traces(traces: Sequence[SolveTrace]) -> SolveTrace:
    """Join the traces of consecutive solves, such as those of a model's blocks, into one.

    Args:
        traces: In order of time; all per batch or all per sample, all with states or all without.
    """
    first, *others = traces
    for trace in others:
        first = SolveTrace(
            evaluations=first.evaluations + trace.evaluations,
            accepted=first.accepted + trace.accepted,
            rejected=first.rejected + trace.rejected,
            times=_join(first.times, trace.times),
            error_estimate=_larger(first.error_estimate, trace.error_estimate),
            states=None if first.states is None or trace.states is None else _join(first.states, trace.states),
        )
    return first


def _join(before: list[Any], after: list[Any]) -> list[Any]:
    if before and isinstance(before[0], list):
        return [a + b for a, b in zip(before, after, strict=True)]
    return before + after


def _larger(a: float | Tensor | None, b: float | Tensor | None) -> float | Tensor | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    return None if a is None or b is None else max(a, b)
