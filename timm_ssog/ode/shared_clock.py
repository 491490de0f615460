"""Adaptive solves with one step size for the whole batch, by torchdiffeq."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from timm_ssog.errors import SolveError, require_choice
from timm_ssog.ode.adjoint import adjoint_velocity, refuse_double_backward, require_separate
from timm_ssog.ode.problem import (
    TOO_MANY,
    clock,
    no_step,
    nothing_to_solve,
    require_finite,
    require_problem,
    smallest_step,
)
from timm_ssog.ode.solver import ADAPTIVE_SOLVERS, Solver
from timm_ssog.ode.trace import SolveTrace


@torch.compiler.disable
def solve_adaptive(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: Solver,
    *,
    parameters: Sequence[Tensor] | None = None,
    keep_states: bool = False,
) -> tuple[list[Tensor], SolveTrace]:
    """Solve with torchdiffeq and one step size for the whole batch; steps land on the requested times.

    Differentiable by backpropagation through the steps or, given ``parameters``, by the adjoint equation, which is
    solved with the same method and tolerances in memory that does not grow with the number of steps (Chen et al.,
    Neural ordinary differential equations, 2018).

    Args:
        velocity: Maps a state to its derivative.
        x: State at ``times[0]``.
        times: Increasing.
        solver: An adaptive one; each interval's adjoint may use ``max_evaluations`` again.
        parameters: All tensors the velocity depends on besides the state, leaves or not; none may be computed from
            another.
        keep_states: Whether the trace holds the states at all steps.

    Returns:
        The states at ``times[1:]``, and the trace.

    Raises:
        ValueError: if an argument is unknown, out of range or of the wrong dtype, or ``parameters`` lacks a tensor the
            velocity depends on or holds one twice.
        SolveError: if the solve, or in ``backward`` that of the adjoint, meets NaN or infinity, needs a step below
            `SMALLEST_STEP` or uses up its evaluations, and if it is traced or exported.
    """
    require_choice("solver", solver.solver, ADAPTIVE_SOLVERS)
    times = require_problem(x, times)
    if not x.numel():
        return nothing_to_solve(x, times, SolveTrace(0, 0, 0, [], 0.0, [] if keep_states else None))
    from torchdiffeq import odeint, odeint_adjoint  # here, because it imports scipy, which takes half a second

    watch = _Watch(velocity, times, solver.max_evaluations, keep_states)
    settings: dict[str, Any] = {"rtol": solver.rtol, "atol": solver.atol, "method": solver.solver}
    wanted: tuple[Tensor, ...] = ()
    if parameters is not None:
        wanted = require_separate(parameters)
        watch.evaluate = adjoint_velocity(velocity, x.device.type, wanted)
    # Interval by interval: torchdiffeq lands on the last of the times it is given, but may step over others, or stop a
    # rounding error short of them.
    states = [x]
    for start, end in pairwise(times):
        ends = clock([start, end], x.device)
        options = {"step_t": ends, "norm": watch.norm, "first_step": watch.step, "dtype": ends.dtype}
        if parameters is None:
            solution = cast(Tensor, odeint(watch, states[-1], ends, options=options, **settings))
        else:
            backward = {"step_t": ends, "norm": _largest_rms, "dtype": ends.dtype}
            adjoint = {"adjoint_options": backward, "adjoint_params": wanted}
            solution = cast(Tensor, odeint_adjoint(watch, states[-1], ends, options=options, **adjoint, **settings))
            if solution.requires_grad:
                solution.register_hook(refuse_double_backward)
                solution.register_hook(partial(watch.start_backward, end))
        require_finite(solution, [start, end], watch.evaluations)
        states.append(solution[1])
    return states[1:], watch.trace(states[-1])


class _Watch:
    """The velocity and callbacks for torchdiffeq: counts, and stops before one of its assertions fails."""

    def __init__(
        self,
        velocity: Callable[[Tensor], Tensor],
        times: list[float],
        max_evaluations: int,
        keep_states: bool,
    ) -> None:
        self.evaluate = velocity
        self.horizon = times[-1]
        self.smallest_step = smallest_step(times)
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
        """Root mean square over the batch, without gradient: step sizes do not depend on the parameters."""
        self.error = _largest_rms([scaled])
        return self.error

    def callback_step(self, start: Tensor, state: Tensor | tuple[Tensor, ...], step: Tensor) -> None:
        self.time = float(start)
        self.step = float(step)
        tensors = (state,) if isinstance(state, Tensor) else state
        if not all(tensor.isfinite().all() for tensor in tensors):
            self.step = 0.0
        if not self.step > max(self.smallest_step, torch.finfo(step.dtype).eps * abs(self.time)):
            # torchdiffeq turns a step that is NaN into one of zero
            problem, remedy = no_step(self.step or math.nan)
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


def _largest_rms(tensors: Sequence[Tensor]) -> Tensor:
    """The largest root mean square among the tensors, NaN if any is NaN; without gradient."""
    return torch.stack([tensor.detach().square().mean().sqrt() for tensor in tensors if tensor.numel()]).amax()
