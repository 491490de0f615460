"""Adaptive solves of dx/dt = velocity(x), per batch or per sample, and the adjoint; the only importer of torchdiffeq.

The state is a batch of tensors (batch, ...) in float32 or float64, time is counted in units of depth. Every solve
returns the states at the requested times and a `SolveTrace`. All of it runs eagerly: inside a compiled model each solve
is one graph break.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from timm_ssog.depth import TABLEAUS, advance
from timm_ssog.errors import SolveError, require_choice, require_positive_int
from timm_ssog.ops.capture import is_captured

ADAPTIVE_SOLVERS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")

SMALLEST_STEP = 1e-14
"""Step below which a solve gives up, as a part of the largest time: the rounding of a float64 clock."""

SAFETY, SHRINK, GROWTH = 0.9, 0.2, 5.0
"""Safety factor and bounds of the change of a step (Hairer, Nørsett, Wanner, Solving ODEs I, equation II.4.13)."""

NOT_FINITE = (
    "Check the input and the weights for NaN and huge values, lower the learning rate or clip gradients, and run the "
    "velocity in bfloat16 or float32 rather than float16."
)
TOO_STIFF = (
    "The velocity is too stiff or too rough for these tolerances: raise rtol and atol, or use a fixed-step solver. Of "
    "a velocity in float16 or bfloat16, don't ask for less than its rounding (1e-3, 1e-2)."
)
TOO_MANY = "Raise max_evaluations or the tolerances, or use a fixed-step solver, whose cost is known."


class EmbeddedPair(NamedTuple):
    """An explicit Runge-Kutta pair whose last stage is the velocity at the end of the step, the next step's first.

    The last row of ``stages`` therefore holds the weights of the solution; ``error`` holds those of its difference from
    the solution of lower order.
    """

    stages: list[list[float]]
    error: list[float]
    order: int


PAIRS = {
    # Dormand and Prince 5(4): Hairer, Nørsett, Wanner, Solving ODEs I, table II.5.2
    "dopri5": EmbeddedPair(
        [
            [],
            [1 / 5],
            [3 / 40, 9 / 40],
            [44 / 45, -56 / 15, 32 / 9],
            [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
            [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
            [35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
        ],
        [71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40],
        5,
    ),
    # Bogacki and Shampine 3(2), A 3(2) pair of Runge-Kutta formulas, 1989
    "bosh3": EmbeddedPair(
        [[], [1 / 2], [0.0, 3 / 4], [2 / 9, 1 / 3, 4 / 9]],
        [-5 / 72, 1 / 12, 1 / 9, -1 / 8],
        3,
    ),
    # Heun's method with Euler's inside; the third stage only hands the velocity on
    "adaptive_heun": EmbeddedPair([[], [1.0], [1 / 2, 1 / 2]], [-1 / 2, 1 / 2, 0.0], 2),
}

PER_SAMPLE_SOLVERS = tuple(PAIRS)

_Edge = tuple[Any, int]  # a node of the autograd graph, and which of its outputs


@dataclass(frozen=True)
class SolveTrace:
    """What a solve did.

    After a per-sample solve the counts are int64 tensors (batch,) on the CPU, ``error_estimate`` is a float64 one, and
    ``times`` and ``states`` hold one list per sample.

    Attributes:
        evaluations: Evaluations of the velocity in the forward solve.
        accepted: Steps taken.
        rejected: Steps whose error was above the tolerance, tried again with a smaller one.
        times: Where the accepted steps end.
        error_estimate: Largest local error of an accepted step over its tolerance, at most 1. Of a fixed-step method,
            which makes none itself, the error of the whole solve as `timm_ssog.trace_solve` estimates it, or None.
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
    """The trace of consecutive solves as that of one, such as those of the blocks of a model.

    Args:
        traces: In the order of time; all per batch or all per sample, all with states or all without.
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


@torch.compiler.disable
def solve_adaptive(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: str,
    rtol: float,
    atol: float,
    max_evaluations: int,
    parameters: Sequence[Tensor] | None = None,
    keep_states: bool = False,
) -> tuple[list[Tensor], SolveTrace]:
    """Solve with one step size for the whole batch, by torchdiffeq; steps land on the requested times.

    Differentiable, by backpropagation through the steps or, given ``parameters``, by the adjoint equation, solved with
    the same method and tolerances in memory that does not grow with the number of steps (Chen et al., Neural ordinary
    differential equations, 2018).

    Args:
        velocity: Maps a state to its derivative.
        x: State at ``times[0]``.
        times: Increasing.
        solver: One of `ADAPTIVE_SOLVERS`.
        rtol: Relative tolerance of the local error.
        atol: Absolute tolerance of the local error.
        max_evaluations: Evaluations of the velocity after which to give up; for each interval's adjoint again.
        parameters: All tensors the velocity depends on beside the state, leaves or not; none may be computed from
            another of them.
        keep_states: Whether the trace holds the states at all steps.

    Returns:
        The states at ``times[1:]``, and the trace.

    Raises:
        ValueError: if an argument is unknown, out of range or of the wrong dtype, or ``parameters`` lacks a tensor the
            velocity depends on or holds one twice.
        SolveError: if the solve, or in ``backward`` that of the adjoint, meets NaN or infinity, needs a step below
            `SMALLEST_STEP` or uses up its evaluations, and if it is traced or exported.
    """
    require_choice("solver", solver, ADAPTIVE_SOLVERS)
    _require_tolerances(rtol, atol, max_evaluations)
    times = _require_problem(x, times)
    if not x.numel():
        return _nothing_to_solve(x, times, SolveTrace(0, 0, 0, [], 0.0, [] if keep_states else None))
    from torchdiffeq import odeint, odeint_adjoint  # here, for it imports scipy in half a second

    watch = _Watch(velocity, times, max_evaluations, keep_states)
    settings: dict[str, Any] = {"rtol": rtol, "atol": atol, "method": solver}
    wanted: tuple[Tensor, ...] = ()
    if parameters is not None:
        wanted = _require_separate(parameters)
        watch.evaluate = _adjoint_velocity(velocity, x.device.type, wanted)
    # One interval after the other: torchdiffeq lands on the last of the times it is given, but may step over others,
    # or up to them but for a rounding error.
    states = [x]
    for start, end in pairwise(times):
        ends = _clock([start, end], x.device)
        options = {"step_t": ends, "norm": watch.norm, "first_step": watch.step, "dtype": ends.dtype}
        if parameters is None:
            solution = cast(Tensor, odeint(watch, states[-1], ends, options=options, **settings))
        else:
            backward = {"step_t": ends, "norm": _largest_rms, "dtype": ends.dtype}
            adjoint = {"adjoint_options": backward, "adjoint_params": wanted}
            solution = cast(Tensor, odeint_adjoint(watch, states[-1], ends, options=options, **adjoint, **settings))
            if solution.requires_grad:
                solution.register_hook(_refuse_double_backward)
                solution.register_hook(partial(watch.start_backward, end))
        _require_finite(solution, [start, end], watch.evaluations)
        states.append(solution[1])
    return states[1:], watch.trace(states[-1])


@torch.compiler.disable
def solve_fixed_adjoint(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: str,
    step_size: float,
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor], SolveTrace]:
    """Solve by a fixed-step method whose gradient is the adjoint equation's, solved on the same steps backwards.

    The gradient is that of the ODE, not of the steps: it differs from backpropagation through them by the error of the
    method.

    Args:
        velocity: As in `solve_adaptive`.
        x: State at ``times[0]``.
        times: Increasing.
        solver: One of `timm_ssog.depth.TABLEAUS`.
        step_size: Longest step; every interval of ``times`` is cut into equal ones.
        parameters: As in `solve_adaptive`.

    Returns:
        The states at ``times[1:]``, and the trace.

    Raises:
        ValueError: as `solve_adaptive`.
        SolveError: if the solve meets NaN or infinity, and if it is traced or exported.
    """
    require_choice("solver", solver, tuple(TABLEAUS))
    _require_positive("step_size", step_size)
    times = _require_problem(x, times)
    if not x.numel():
        return _nothing_to_solve(x, times, SolveTrace(0, 0, 0, [], None, None))
    from torchdiffeq import odeint_adjoint  # here, for it imports scipy in half a second

    wanted = _require_separate(parameters)
    evaluate = _adjoint_velocity(velocity, x.device.type, wanted)
    # torchdiffeq asks for a grid over all times, then in backward for one over each interval, from its end
    settings: dict[str, Any] = {"method": "heun2" if solver == "heun" else solver, "adjoint_params": wanted}
    options = {"grid_constructor": lambda _, __, ends: ends.new_tensor(_grid(ends.tolist(), step_size))}
    clock = _clock(times, x.device)
    solution = cast(Tensor, odeint_adjoint(lambda _, state: evaluate(state), x, clock, options=options, **settings))
    if solution.requires_grad:
        solution.register_hook(_refuse_double_backward)
    steps = _grid(times, step_size)[1:]
    evaluations = len(TABLEAUS[solver].stages) * len(steps)
    _require_finite(solution, times, evaluations)
    return list(solution[1:].unbind(0)), SolveTrace(evaluations, len(steps), 0, steps, None, None)


@torch.compiler.disable
def solve_per_sample(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: str,
    rtol: float,
    atol: float,
    max_evaluations: int,
    keep_states: bool = False,
    together: bool = False,
) -> tuple[list[Tensor], SolveTrace]:
    """Solve with every sample on its own clock: own steps, own errors, nothing that depends on its batch-mates.

    The step control is Hairer, Nørsett, Wanner, Solving ODEs I, section II.4: local extrapolation, equation II.4.13
    with the root mean square over the sample, no growth right after a rejection, and their choice of the first step.
    Steps land on the requested times. Samples that reached the last one cost nothing further. Differentiable by
    backpropagation through the accepted steps, whose sizes count as constants.

    A sample's result is the same alone and in any batch, to the bit: the velocity sees one sample at a time, in memory
    of its own, and its step sizes are computed number by number. In one call for all, the rounding of the velocity's
    matrix products depends on their number, and error estimates close to rounding carry that into the step sizes.

    Args:
        velocity: Maps the states of any of the samples to their derivatives.
        x: State at ``times[0]``.
        times: Increasing.
        solver: One of `PER_SAMPLE_SOLVERS`.
        rtol: Relative tolerance of the local error.
        atol: Absolute tolerance of the local error.
        max_evaluations: Evaluations of the velocity after which to give up, for any one sample.
        keep_states: Whether the trace holds the states at all steps.
        together: Evaluate the velocity for all samples in one call: for a GPU, as a CPU hardly gains. In float32 the
            results then depend on the batch by some 1e-6 of the state, and rarely by a step, a part of the tolerance.

    Returns:
        The states at ``times[1:]``, and the trace, with one count per sample.

    Raises:
        ValueError: if an argument is unknown, out of range or of the wrong dtype.
        SolveError: if a sample meets NaN or infinity, needs a step below `SMALLEST_STEP` or uses up its evaluations,
            and if the solve is traced or exported.
    """
    require_choice("solver", solver, PER_SAMPLE_SOLVERS)
    _require_tolerances(rtol, atol, max_evaluations)
    times = _require_problem(x, times)
    batch = len(x)
    pair = PAIRS[solver]
    stages = len(pair.stages) - 1
    evaluations, accepted, rejected = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
    errors = torch.zeros(batch, dtype=torch.float64)
    history: list[tuple[Tensor, Tensor, Tensor | None]] = []
    if not x.numel():
        return _nothing_to_solve(x, times, _per_sample_trace(evaluations, accepted, rejected, errors, [], keep_states))

    stops = torch.tensor(times[1:], dtype=torch.float64)
    smallest_step = _smallest_step(times)
    apply = _apply_together if together else _apply_one_by_one
    trial = partial(_trial, velocity, rtol, atol, pair)
    landed_slots: list[Tensor] = []
    landed_states: list[Tensor] = []

    # from here on everything is about the samples still on their way, in this order
    samples = torch.arange(batch)
    state = x
    slope, first = apply(partial(_start, velocity, rtol, atol, pair.order), x)
    step = first.to("cpu", torch.float64)
    evaluations += 2
    finite = step.isfinite()
    clock = torch.full_like(step, times[0])
    target = torch.zeros_like(samples)
    just_rejected = torch.zeros(batch, dtype=torch.bool)

    while len(samples):
        stuck = ~(step > smallest_step)
        spent = evaluations[samples] + stages > max_evaluations
        if (stuck | spent).any():
            row = int((stuck | spent).int().argmax())
            sample = int(samples[row])
            problem, remedy = f"max_evaluations={max_evaluations} are not enough", TOO_MANY
            if stuck[row]:
                problem, remedy = _no_step(float(step[row]) if finite[row] else math.nan)
            raise SolveError(f"{problem} (sample {sample})", float(clock[row]), int(evaluations[sample]), remedy)

        remaining = stops[target] - clock
        # a hundredth longer rather than a tiny step afterwards, as in Hairer's codes
        lands = 1.01 * step >= remaining
        taken = torch.where(lands, remaining, step)
        length = taken.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))
        reached, end_slope, ratio = apply(trial, state, slope, length)
        ratio = ratio.to("cpu", torch.float64)
        accept = ratio <= 1  # False for NaN

        rows = accept.nonzero().squeeze(1)
        rows_there = rows.to(x.device)
        if accept.all():
            state, slope = reached, end_slope
        elif len(rows):
            if reached.requires_grad and not ratio.isfinite().all():
                # A rejected trial has gradient zero, but zero times infinity is NaN in the gradient of the weights:
                # the others take their step again, without it. Not counted, for it is not the solution's doing.
                kept = [tensor.index_select(0, rows_there) for tensor in (state, slope, length)]
                reached, end_slope, _ = apply(trial, *kept)
            else:
                reached, end_slope = reached.index_select(0, rows_there), end_slope.index_select(0, rows_there)
            state = state.index_copy(0, rows_there, reached)
            slope = slope.index_copy(0, rows_there, end_slope)

        evaluations[samples] += stages
        accepted[samples] += accept
        rejected[samples] += ~accept
        errors[samples[rows]] = torch.maximum(errors[samples[rows]], ratio[rows])
        clock = torch.where(accept, torch.where(lands, stops[target], clock + taken), clock)
        if len(rows):
            history.append((samples[rows], clock[rows], reached.detach() if keep_states else None))

        step = _next_steps(step, taken, ratio, just_rejected, pair.order)
        just_rejected = ~accept
        finite = ratio.isfinite()

        landed = (lands & accept).nonzero().squeeze(1)
        if len(landed):
            landed_slots.append(target[landed] * batch + samples[landed])
            landed_states.append(state.index_select(0, landed.to(x.device)))
            target[landed] += 1
            on_way = (target < len(stops)).nonzero().squeeze(1)
            if len(on_way) < len(samples):
                there = on_way.to(x.device)
                state, slope = state.index_select(0, there), slope.index_select(0, there)
                samples, clock, target = samples[on_way], clock[on_way], target[on_way]
                step, just_rejected, finite = step[on_way], just_rejected[on_way], finite[on_way]

    order = torch.cat(landed_slots).argsort().to(x.device)
    solution = torch.cat(landed_states).index_select(0, order).reshape(len(stops), *x.shape)
    _require_finite(solution, times[1:], int(evaluations.max()))
    trace = _per_sample_trace(evaluations, accepted, rejected, errors, history, keep_states)
    return list(solution.unbind(0)), trace


class _Watch:
    """The velocity and callbacks that torchdiffeq calls: counts, and stops what would fail an assertion there."""

    def __init__(
        self,
        velocity: Callable[[Tensor], Tensor],
        times: list[float],
        max_evaluations: int,
        keep_states: bool,
    ) -> None:
        self.evaluate = velocity
        self.horizon = times[-1]
        self.smallest_step = _smallest_step(times)
        self.max_evaluations = max_evaluations
        self.keep_states = keep_states
        self.where = ""
        self.time = times[0]
        self.step: float | None = None
        self.evaluations = 0
        self.rejected = 0
        self.error: Tensor | None = None
        self.largest_error = 0.0
        self.starts: list[float] = []
        self.states: list[Tensor] = []

    def __call__(self, _: Tensor, x: Tensor) -> Tensor:
        if self.evaluations >= self.max_evaluations:
            problem = f"max_evaluations={self.max_evaluations} are used up{self.where}"
            raise SolveError(problem, self.time, self.evaluations, TOO_MANY)
        self.evaluations += 1
        return self.evaluate(x).to(x.dtype)

    def norm(self, scaled: Tensor) -> Tensor:
        """Root mean square over the batch, without gradient: step sizes are no function of the parameters."""
        self.error = _largest_rms([scaled])
        return self.error

    def callback_step(self, start: Tensor, state: Tensor | tuple[Tensor, ...], step: Tensor) -> None:
        self.time = float(start)
        self.step = float(step)
        tensors = (state,) if isinstance(state, Tensor) else state
        if not all(tensor.isfinite().all() for tensor in tensors):
            self.step = 0.0
        if not self.step > max(self.smallest_step, torch.finfo(step.dtype).eps * abs(self.time)):
            # torchdiffeq makes a step of zero of one that is NaN
            problem, remedy = _no_step(self.step or math.nan)
            raise SolveError(problem + self.where, self.time, self.evaluations, remedy)

    def callback_accept_step(self, start: Tensor, state: Tensor, _: Tensor) -> None:
        self.starts.append(float(start))
        if self.error is not None:
            self.largest_error = max(self.largest_error, float(self.error))
        if self.keep_states:
            self.states.append(state.detach())

    def callback_reject_step(self, *_: Tensor) -> None:
        self.rejected += 1

    def start_backward(self, end: float, _: Tensor) -> None:
        self.where = " in the adjoint solve"
        self.time = end
        self.evaluations = 0

    callback_step_adjoint = callback_step

    def trace(self, end: Tensor) -> SolveTrace:
        """What the forward solve did, given the state at its end."""
        states = [*self.states[1:], end.detach()] if self.keep_states else None
        times = [*self.starts[1:], self.horizon]
        return SolveTrace(self.evaluations, len(times), self.rejected, times, self.largest_error, states)


def _refuse_double_backward(_: Tensor) -> None:
    # on in backward only where a graph of it is asked for, of which torchdiffeq's adjoint would silently lack its part
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The gradient of an adjoint solve can't be differentiated again: solve with adjoint=False, or take the "
            "gradient without create_graph."
        )


def _upstream(tensor: Tensor, stops: set[_Edge]) -> Iterator[_Edge]:
    """The edges of the autograd graph that a tensor's gradient flows through, its own first, never beyond ``stops``."""
    pending = [_edge(tensor)]
    seen = set(stops)
    while pending:
        edge = pending.pop()
        if edge[0] is not None and edge not in seen:
            seen.add(edge)
            yield edge
            pending.extend(edge[0].next_functions)


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _require_separate(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parameters that want a gradient, unless one is computed from another: its gradient would count twice."""
    wanted = tuple(parameter for parameter in parameters if parameter.requires_grad)
    edges = {_edge(parameter) for parameter in wanted}
    if len(edges) < len(wanted):
        raise ValueError("parameters of an adjoint solve must hold every tensor once.")
    for parameter in wanted:
        own = _edge(parameter)
        if any(edge in edges and edge != own for edge in _upstream(parameter, set())):
            raise ValueError(
                f"parameters of an adjoint solve must not hold both a tensor and what it is computed from, such as the "
                f"kernels and their offsets: the gradient would count twice. Leave out what the tensor of shape "
                f"{tuple(parameter.shape)} is computed from."
            )
    return wanted


def _require_declared(slope: Tensor, declared: set[_Edge]) -> None:
    """Raise if the velocity depends on a leaf that the adjoint solve would give no gradient, and silently so."""
    if not slope.requires_grad:
        return
    for node, _ in _upstream(slope, declared):
        if hasattr(node, "variable"):
            raise ValueError(
                f"parameters of an adjoint solve must hold everything the velocity depends on, or it gets no gradient: "
                f"a tensor of shape {tuple(node.variable.shape)} is missing. Parameters that a wrapper such as FSDP2 "
                f"brings only while a module runs can't be given beforehand: set adjoint=False there."
            )


def _adjoint_velocity(
    velocity: Callable[[Tensor], Tensor], device_type: str, wanted: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """The velocity of an adjoint solve: under today's autocast in backward too, and tested once for its parameters."""
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    untested = torch.is_grad_enabled()

    def evaluate(x: Tensor) -> Tensor:
        nonlocal untested
        # weights cast and cached without gradient in the forward solve would later be used where one is wanted
        with torch.autocast(device_type, dtype=dtype, enabled=autocast, cache_enabled=False):
            if not untested:
                return velocity(x).to(x.dtype)
            untested = False
            with torch.enable_grad():
                slope = velocity(x.detach()).to(x.dtype)
                _require_declared(slope, {_edge(parameter) for parameter in wanted})
            return slope.detach()

    return evaluate


def _apply_together(function: Callable[..., tuple[Tensor, ...]], *batches: Tensor) -> tuple[Tensor, ...]:
    return function(*batches)


def _apply_one_by_one(function: Callable[..., tuple[Tensor, ...]], *batches: Tensor) -> tuple[Tensor, ...]:
    # copies, for they begin where the allocator aligns them: libraries round by the alignment of what they read, too
    singles = zip(*([single.clone() for single in batch.split(1)] for batch in batches), strict=True)
    return tuple(map(torch.cat, zip(*(function(*single) for single in singles), strict=True)))


def _trial(
    velocity: Callable[[Tensor], Tensor],
    rtol: float,
    atol: float,
    pair: EmbeddedPair,
    state: Tensor,
    slope: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of every sample: the state and the velocity at its end, and its error over the tolerance (samples,).

    Args:
        velocity: As in `solve_per_sample`.
        rtol: Likewise.
        atol: Likewise.
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
        ratio = _rms(error / (atol + rtol * torch.maximum(state.abs(), reached.abs())))
    return reached, slopes[-1], ratio


def _weighted(slopes: list[Tensor], weights: list[float]) -> Tensor:
    return advance(slopes[0] * weights[0], slopes[1:], weights[1:], 1.0)


def _start(
    velocity: Callable[[Tensor], Tensor], rtol: float, atol: float, order: int, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The velocity at the initial state, and a first step size for every sample (samples,); two evaluations.

    A step in which Euler's method and a guess at the second derivative see an error of a hundredth of the tolerance
    (Hairer, Nørsett, Wanner, Solving ODEs I, section II.4, "starting step size").
    """
    slope = velocity(state).to(state.dtype)
    with torch.no_grad():
        tolerance = atol + rtol * state.abs()
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
        step: (samples,), what was to be tried.
        taken: (samples,), what was tried: less where it landed on a requested time.
        ratio: (samples,), its error over the tolerance.
        just_rejected: (samples,), whether the try before this one was rejected too, so that growth must wait.
        order: Of the method.
    """
    # number by number: the rounding of a vectorised power depends on the place of the number in the vector
    change = torch.tensor([_change(error, order) for error in ratio.tolist()], dtype=step.dtype)
    change = torch.where(just_rejected, change.clamp(max=1.0), change)
    # a step cut short to land says little about the next
    return torch.where((ratio <= 1) & (taken < step), torch.maximum(step, taken * change), taken * change)


def _change(ratio: float, order: int) -> float:
    """What an error over the tolerance multiplies a step by, unless a rejection forbids it to grow."""
    if math.isnan(ratio):
        return SHRINK
    return min(max(SAFETY * max(ratio, sys.float_info.min) ** (-1 / order), SHRINK), GROWTH)


def _rms(tensor: Tensor) -> Tensor:
    """Root mean square over each sample."""
    return tensor.reshape(len(tensor), -1).square().mean(1).sqrt()


def _largest_rms(tensors: Sequence[Tensor]) -> Tensor:
    """The largest of the tensors' root mean squares, NaN if one is; without gradient."""
    return torch.stack([tensor.detach().square().mean().sqrt() for tensor in tensors if tensor.numel()]).amax()


def _per_sample_trace(
    evaluations: Tensor,
    accepted: Tensor,
    rejected: Tensor,
    errors: Tensor,
    history: list[tuple[Tensor, Tensor, Tensor | None]],
    keep_states: bool,
) -> SolveTrace:
    """The trace of a per-sample solve, from its steps: samples, end times and states of those accepted together."""
    times: list[list[float]] = [[] for _ in evaluations]
    states: list[list[Tensor]] = [[] for _ in evaluations]
    for samples, ends, reached in history:
        for row, (sample, end) in enumerate(zip(samples.tolist(), ends.tolist(), strict=True)):
            times[sample].append(end)
            if reached is not None:
                states[sample].append(reached[row])
    return SolveTrace(evaluations, accepted, rejected, times, errors, states if keep_states else None)


def _nothing_to_solve(x: Tensor, times: list[float], trace: SolveTrace) -> tuple[list[Tensor], SolveTrace]:
    return [x for _ in times[1:]], trace


def _grid(times: list[float], step_size: float) -> list[float]:
    """Times, and between them the ends of the fewest equal steps no longer than ``step_size``; in either direction."""
    grid = times[:1]
    for start, end in pairwise(times):
        steps = max(math.ceil(abs(end - start) / step_size - 1e-6), 1)
        grid += [start + (end - start) * (step / steps) for step in range(1, steps)]
        grid.append(end)
    return grid


def _clock(times: list[float], device: torch.device) -> Tensor:
    # MPS has no float64
    return torch.tensor(times, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def _smallest_step(times: list[float]) -> float:
    return SMALLEST_STEP * max(abs(times[0]), abs(times[-1]))


def _no_step(size: float) -> tuple[str, str]:
    """What is wrong, and the remedy, where a step is NaN or below the smallest."""
    if math.isnan(size):
        return "The state or its velocity became NaN or infinite", NOT_FINITE
    return f"The step size fell to {size:.3g}", TOO_STIFF


def _require_problem(x: Tensor, times: Sequence[float]) -> list[float]:
    """The times as a list of floats, unless they or the initial state are not fit for a solve."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"The state of a solve must be float32 or float64, got {x.dtype}: small steps would be lost to rounding. "
            f"Keep it in float32, as the models do, and let autocast run only the velocity in {x.dtype}."
        )
    listed = [float(time) for time in times]
    if len(listed) < 2 or not all(map(math.isfinite, listed)) or any(b <= a for a, b in pairwise(listed)):
        raise ValueError(f"times must be at least two finite numbers, each above the one before, got {listed}.")
    if is_captured():
        raise SolveError(
            "A solve by torchdiffeq or per sample can't be traced or exported",
            listed[0],
            0,
            "It decides on its steps as it runs. Use a fixed-step solver without adjoint.",
        )
    _require_finite(x.unsqueeze(0), listed, 0)
    return listed


def _require_finite(states: Tensor, times: list[float], evaluations: int) -> None:
    """Raise unless the states (times, batch, ...) are finite, naming the first time at which they are not."""
    if states.isfinite().all():
        return
    finite = states.detach().isfinite().reshape(len(states), states.shape[1], -1).all(2).cpu()
    index = int(finite.all(1).int().argmin())
    bad = (~finite[index]).nonzero().squeeze(1).tolist()
    named = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
    problem = f"The state has NaN or infinity in {len(bad)} of {states.shape[1]} samples ({named})"
    raise SolveError(problem, times[index], evaluations, NOT_FINITE)


def _require_tolerances(rtol: float, atol: float, max_evaluations: int) -> None:
    _require_positive("rtol", rtol)
    _require_positive("atol", atol)
    require_positive_int("max_evaluations", max_evaluations)


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
