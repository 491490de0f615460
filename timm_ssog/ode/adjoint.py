"""The adjoint equation: what it needs of a velocity and its parameters, and fixed steps solved by it."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from timm_ssog.errors import require_choice, require_positive
from timm_ssog.ode.problem import clock, nothing_to_solve, require_finite, require_problem
from timm_ssog.ode.solver import Solver
from timm_ssog.ode.trace import SolveTrace
from timm_ssog.runge_kutta import TABLEAUS

_Edge = tuple[Any, int]  # a node of the autograd graph, and which of its outputs


@torch.compiler.disable
def solve_fixed_adjoint(
    velocity: Callable[[Tensor], Tensor],
    x: Tensor,
    times: Sequence[float],
    solver: Solver,
    *,
    step_size: float,
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor], SolveTrace]:
    """Solve by a fixed-step method, with the gradient of the adjoint equation, solved backwards on the same steps.

    The gradient is that of the ODE, not of the steps: it differs from backpropagation through them by the error of the
    method.

    Args:
        velocity: As in `solve_adaptive`.
        x: State at ``times[0]``.
        times: Increasing.
        solver: A fixed-step one.
        step_size: Longest step; every interval of ``times`` is divided into equal steps.
        parameters: As in `solve_adaptive`.

    Returns:
        The states at ``times[1:]``, and the trace.

    Raises:
        ValueError: as `solve_adaptive`.
        SolveError: if the solve meets NaN or infinity, and if it is traced or exported.
    """
    require_choice("solver", solver.solver, tuple(TABLEAUS))
    require_positive("step_size", step_size)
    times = require_problem(x, times)
    if not x.numel():
        return nothing_to_solve(x, times, SolveTrace(0, 0, 0, [], None, None))
    from torchdiffeq import odeint_adjoint  # here, because it imports scipy, which takes half a second

    wanted = require_separate(parameters)
    evaluate = adjoint_velocity(velocity, x.device.type, wanted)
    # torchdiffeq asks for a grid over all times, then in backward for one over each interval, from its end
    settings: dict[str, Any] = {"method": {"heun": "heun2"}.get(solver.solver, solver.solver), "adjoint_params": wanted}
    options = {"grid_constructor": lambda _, __, of: of.new_tensor(_grid(of.tolist(), step_size))}
    ends = clock(times, x.device)
    solution = cast(Tensor, odeint_adjoint(lambda _, state: evaluate(state), x, ends, options=options, **settings))
    if solution.requires_grad:
        solution.register_hook(refuse_double_backward)
    steps = _grid(times, step_size)[1:]
    evaluations = len(solver.tableau.stages) * len(steps)
    require_finite(solution, times, evaluations)
    return list(solution[1:].unbind(0)), SolveTrace(evaluations, len(steps), 0, steps, None, None)


def refuse_double_backward(_: Tensor) -> None:
    """Raise if the gradient of an adjoint solve is to be differentiated again; a hook on its solution."""
    # in backward, gradients are on only if a graph is asked for, which would silently lack the adjoint
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The gradient of an adjoint solve can't be differentiated again: solve with adjoint=False, or take the "
            "gradient without create_graph."
        )


def _upstream(tensor: Tensor, stops: set[_Edge]) -> Iterator[_Edge]:
    """The edges of the autograd graph that a tensor's gradient flows through, its own first, up to ``stops``."""
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


def require_separate(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parameters that need a gradient; raise if one is computed from another: its gradient would count twice."""
    wanted = tuple(parameter for parameter in parameters if parameter.requires_grad)
    edges = {_edge(parameter) for parameter in wanted}
    if len(edges) < len(wanted):
        raise ValueError("parameters of an adjoint solve must hold every tensor only once.")
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
    """Raise if the velocity depends on a leaf that the adjoint solve would silently give no gradient."""
    if not slope.requires_grad:
        return
    for node, _ in _upstream(slope, declared):
        if hasattr(node, "variable"):
            raise ValueError(
                f"parameters of an adjoint solve must hold everything the velocity depends on, or it gets no gradient: "
                f"a tensor of shape {tuple(node.variable.shape)} is missing. Parameters that a wrapper such as FSDP2 "
                f"provides only while a module runs can't be given beforehand: set adjoint=False."
            )


def adjoint_velocity(
    velocity: Callable[[Tensor], Tensor], device_type: str, wanted: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """The velocity of an adjoint solve, in backward under the same autocast; its parameters are tested once."""
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    untested = torch.is_grad_enabled()

    def evaluate(x: Tensor) -> Tensor:
        nonlocal untested
        # weights cast and cached without gradient in the forward solve would be used again where one is needed
        with torch.autocast(device_type, dtype=dtype, enabled=autocast, cache_enabled=False):
            if not untested:
                return velocity(x).to(x.dtype)
            untested = False
            with torch.enable_grad():
                slope = velocity(x.detach()).to(x.dtype)
                _require_declared(slope, {_edge(parameter) for parameter in wanted})
            return slope.detach()

    return evaluate


def _grid(times: list[float], step_size: float) -> list[float]:
    """Times, with the ends of the fewest equal steps of at most ``step_size`` in between; in either direction."""
    grid = times[:1]
    for start, end in pairwise(times):
        steps = max(math.ceil(abs(end - start) / step_size - 1e-6), 1)
        grid += [start + (end - start) * (step / steps) for step in range(1, steps)]
        grid.append(end)
    return grid
