"""Adaptive solves with one clock per sample."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from timm_ssog.errors import SolveError, require_choice
from timm_ssog.ode.problem import (
    TOO_MANY,
    no_step,
    nothing_to_solve,
    require_finite,
    require_problem,
    smallest_step,
)
from timm_ssog.ode.solver import PER_SAMPLE_SOLVERS, Solver
from timm_ssog.ode.trace import SolveTrace
from timm_ssog.runge_kutta import PAIRS, EmbeddedPair, advance

SAFETY, SHRINK, GROWTH = 0.9, 0.2, 5.0
"""Safety factor and bounds of the change of a step (Hairer, Nørsett, Wanner, Solving ODEs I, equation II.4.13)."""


@torch.compiler.disable
def solve_per_sample(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: Solver,
    *,
    keep_states: bool = False,
    together: bool = False,
) -> tuple[list[Tensor], SolveTrace]:
    """Solve with every sample on its own clock: its own steps and errors, and nothing that depends on its batch-mates.

    Step control as in Hairer, Nørsett, Wanner, Solving ODEs I, section II.4: local extrapolation, equation II.4.13
    with the root mean square over the sample, no growth right after a rejection, and their choice of the first step.
    Steps land on the requested times. Samples that have reached the last one cost nothing more. Differentiable by
    backpropagation through the accepted steps, whose sizes count as constants.

    A sample's result is the same alone and in any batch, bit for bit: the velocity sees one sample at a time, in memory
    of its own, and step sizes are computed one by one. In one call for all samples, the rounding of the velocity's
    matrix products depends on their number, and error estimates close to rounding carry that into the step sizes.

    Args:
        velocity: Maps the states of any of the samples to their derivatives.
        x: State at ``times[0]``.
        times: Increasing.
        solver: With a method from `PER_SAMPLE_SOLVERS`; ``max_evaluations`` holds for each sample.
        keep_states: Whether the trace holds the states at all steps.
        together: Evaluate the velocity for all samples in one call: for a GPU, since a CPU hardly gains. In float32 the
            results then depend on the batch by about 1e-6 of the state, and rarely by a step, a part of the tolerance.

    Returns:
        The states at ``times[1:]``, and the trace, with one count per sample.

    Raises:
        ValueError: if an argument is unknown, out of range or of the wrong dtype.
        SolveError: if a sample meets NaN or infinity, needs a step below `SMALLEST_STEP` or uses up its evaluations,
            and if the solve is traced or exported.
    """
    require_choice("solver", solver.solver, PER_SAMPLE_SOLVERS)
    times = require_problem(x, times)
    pair = PAIRS[solver.solver]
    stages = len(pair.stages) - 1
    log = _Log(len(x), keep_states)
    if not x.numel():
        return nothing_to_solve(x, times, log.trace())

    stops = torch.tensor(times[1:], dtype=torch.float64)
    least = smallest_step(times)
    apply = _apply_together if together else _apply_one_by_one
    trial = partial(_trial, velocity, solver, pair)
    landed_slots: list[Tensor] = []
    landed_states: list[Tensor] = []
    slope, first = apply(partial(_start, velocity, solver, pair.order), x)
    log.evaluations += 2
    on_way = _OnWay.at(times[0], x, slope, first.to("cpu", torch.float64))

    while len(on_way.samples):
        spent = log.evaluations[on_way.samples] + stages > solver.max_evaluations
        _require_steps(on_way, spent, least, solver.max_evaluations, log)
        remaining = stops[on_way.target] - on_way.clock
        # a hundredth longer rather than followed by a tiny step, as in Hairer's codes
        lands = 1.01 * on_way.step >= remaining
        taken = torch.where(lands, remaining, on_way.step)
        length = taken.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))
        reached, end_slope, ratio = apply(trial, on_way.state, on_way.slope, length)
        ratio = ratio.to("cpu", torch.float64)
        accept = ratio <= 1  # False for NaN

        rows = accept.nonzero().squeeze(1)
        rows_there = rows.to(x.device)
        if accept.all():
            on_way.state, on_way.slope = reached, end_slope
        elif len(rows):
            if reached.requires_grad and not ratio.isfinite().all():
                # A rejected trial has gradient zero, but zero times infinity is NaN in the gradient of the weights:
                # the others take their step again, without it. That is not counted, as the solution did not cause it.
                kept = [tensor.index_select(0, rows_there) for tensor in (on_way.state, on_way.slope, length)]
                reached, end_slope, _ = apply(trial, *kept)
            else:
                reached, end_slope = reached.index_select(0, rows_there), end_slope.index_select(0, rows_there)
            on_way.state = on_way.state.index_copy(0, rows_there, reached)
            on_way.slope = on_way.slope.index_copy(0, rows_there, end_slope)

        ends = torch.where(lands, stops[on_way.target], on_way.clock + taken)
        on_way.clock = torch.where(accept, ends, on_way.clock)
        on_way.step = _next_steps(on_way.step, taken, ratio, on_way.just_rejected, pair.order)
        on_way.just_rejected, on_way.finite = ~accept, ratio.isfinite()
        log.add(on_way, stages, accept, ratio, reached)

        landed = (lands & accept).nonzero().squeeze(1)
        if len(landed):
            landed_slots.append(on_way.target[landed] * len(x) + on_way.samples[landed])
            landed_states.append(on_way.state.index_select(0, landed.to(x.device)))
            on_way.target[landed] += 1
            rest = (on_way.target < len(stops)).nonzero().squeeze(1)
            if len(rest) < len(on_way.samples):
                on_way = on_way.only(rest)

    order = torch.cat(landed_slots).argsort().to(x.device)
    solution = torch.cat(landed_states).index_select(0, order).reshape(len(stops), *x.shape)
    require_finite(solution, times[1:], int(log.evaluations.max()))
    return list(solution.unbind(0)), log.trace()


@dataclass
class _OnWay:
    """The samples that have not reached the last time, one per row; all but state and slope are on the CPU."""

    samples: Tensor  # their places in the batch
    state: Tensor
    slope: Tensor  # velocity at the state
    clock: Tensor  # time reached
    target: Tensor  # index of the next requested time
    step: Tensor  # to be tried next
    just_rejected: Tensor
    finite: Tensor  # whether the last error estimate was

    @classmethod
    def at(cls, time: float, state: Tensor, slope: Tensor, step: Tensor) -> "_OnWay":
        """All samples at the initial time."""
        samples = torch.arange(len(state))
        rejected = torch.zeros(len(state), dtype=torch.bool)
        clock = torch.full_like(step, time)
        return cls(samples, state, slope, clock, torch.zeros_like(samples), step, rejected, step.isfinite())

    def only(self, rows: Tensor) -> "_OnWay":
        """The samples in the given rows."""
        there = rows.to(self.state.device)
        kept = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name not in ON_DEVICE}
        return _OnWay(**kept, **{name: getattr(self, name).index_select(0, there) for name in ON_DEVICE})


ON_DEVICE = ("state", "slope")


class _Log:
    """What every sample of the batch has done."""

    def __init__(self, batch: int, keep_states: bool) -> None:
        self.evaluations, self.accepted, self.rejected = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
        self.errors = torch.zeros(batch, dtype=torch.float64)
        self.times: list[list[float]] = [[] for _ in range(batch)]
        self.states: list[list[Tensor]] | None = [[] for _ in range(batch)] if keep_states else None

    def add(self, on_way: _OnWay, evaluations: int, accept: Tensor, ratio: Tensor, reached: Tensor) -> None:
        """Record one try of every sample on its way, and the states that the accepted ones reached."""
        self.evaluations[on_way.samples] += evaluations
        self.accepted[on_way.samples] += accept
        self.rejected[on_way.samples] += ~accept
        samples = on_way.samples[accept]
        self.errors[samples] = torch.maximum(self.errors[samples], ratio[accept])
        for row, (sample, end) in enumerate(zip(samples.tolist(), on_way.clock[accept].tolist(), strict=True)):
            self.times[sample].append(end)
            if self.states is not None:
                self.states[sample].append(reached[row].detach())

    def trace(self) -> SolveTrace:
        """Everything recorded, as a trace."""
        return SolveTrace(self.evaluations, self.accepted, self.rejected, self.times, self.errors, self.states)


def _require_steps(on_way: _OnWay, spent: Tensor, least: float, most: int, log: _Log) -> None:
    """Raise if a sample's next step is too small, or it has no evaluations left for one."""
    stuck = ~(on_way.step > least)
    if not (stuck | spent).any():
        return
    row = int((stuck | spent).int().argmax())
    sample = int(on_way.samples[row])
    problem, remedy = f"max_evaluations={most} are not enough", TOO_MANY
    if stuck[row]:
        problem, remedy = no_step(float(on_way.step[row]) if on_way.finite[row] else math.nan)
    raise SolveError(f"{problem} (sample {sample})", float(on_way.clock[row]), int(log.evaluations[sample]), remedy)


def _apply_together(function: Callable[..., tuple[Tensor, ...]], *batches: Tensor) -> tuple[Tensor, ...]:
    return function(*batches)


def _apply_one_by_one(function: Callable[..., tuple[Tensor, ...]], *batches: Tensor) -> tuple[Tensor, ...]:
    # copies, because they begin where the allocator aligns them: the rounding of libraries also depends on alignment
    singles = zip(*([single.clone() for single in batch.split(1)] for batch in batches), strict=True)
    return tuple(map(torch.cat, zip(*(function(*single) for single in singles), strict=True)))


def _trial(
    velocity: Callable[[Tensor], Tensor],
    solver: Solver,
    pair: EmbeddedPair,
    state: Tensor,
    slope: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of every sample: the state and the velocity at its end, and its error over the tolerance (samples,).

    Args:
        velocity: As in `solve_per_sample`.
        solver: As in `solve_per_sample`.
        pair: The method.
        state: (samples, ...).
        slope: Velocity at the state.
        length: Step sizes (samples, 1, ...), of as many dimensions as the state.
    """
    slopes = [slope]
    reached = state
    for row in pair.stages[1:]:
        reached = torch.addcmul(state, length, _weighted(slopes, row))
        slopes.append(velocity(reached).to(state.dtype))
    with torch.no_grad():
        error = length * _weighted(slopes, pair.error)
        ratio = _rms(error / (solver.atol + solver.rtol * torch.maximum(state.abs(), reached.abs())))
    return reached, slopes[-1], ratio


def _weighted(slopes: list[Tensor], weights: list[float]) -> Tensor:
    return advance(slopes[0] * weights[0], slopes[1:], weights[1:], 1.0)


def _start(velocity: Callable[[Tensor], Tensor], solver: Solver, order: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """The velocity at the initial state, and a first step size for every sample (samples,); two evaluations.

    A step for which Euler's method and a guess at the second derivative see an error of a hundredth of the tolerance
    (Hairer, Nørsett, Wanner, Solving ODEs I, section II.4, "starting step size").
    """
    slope = velocity(state).to(state.dtype)
    with torch.no_grad():
        tolerance = solver.atol + solver.rtol * state.abs()
        size, speed = _rms(state / tolerance), _rms(slope / tolerance)
        guess = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
        probe = torch.addcmul(state, guess.reshape(-1, *[1] * (state.dim() - 1)), slope)
        bend = _rms((velocity(probe).to(state.dtype) - slope) / tolerance) / guess
        steepest = torch.maximum(speed, bend)
        step = torch.where(steepest <= 1e-15, (guess * 1e-3).clamp(min=1e-6), (0.01 / steepest) ** (1 / order))
    return slope, torch.minimum(100 * guess, step)


def _next_steps(step: Tensor, taken: Tensor, ratio: Tensor, just_rejected: Tensor, order: int) -> Tensor:
    """Step sizes to try next (Hairer, Nørsett, Wanner, Solving ODEs I, equation II.4.13).

    Args:
        step: (samples,), step size that was planned.
        taken: (samples,), step size that was tried: smaller where it landed on a requested time.
        ratio: (samples,), its error over the tolerance.
        just_rejected: (samples,), whether the previous try was rejected too, so that growth must wait.
        order: Order of the method.
    """
    # one by one: the rounding of a vectorised power depends on a number's position in the vector
    change = torch.tensor([_change(error, order) for error in ratio.tolist()], dtype=step.dtype)
    change = torch.where(just_rejected, change.clamp(max=1.0), change)
    # a step cut short to land says little about the next
    return torch.where((ratio <= 1) & (taken < step), torch.maximum(step, taken * change), taken * change)


def _change(ratio: float, order: int) -> float:
    """The factor for the next step after an error over the tolerance, unless a rejection forbids growth."""
    if math.isnan(ratio):
        return SHRINK
    return min(max(SAFETY * max(ratio, sys.float_info.min) ** (-1 / order), SHRINK), GROWTH)


def _rms(tensor: Tensor) -> Tensor:
    """Root mean square over each sample."""
    return tensor.reshape(len(tensor), -1).square().mean(1).sqrt()
