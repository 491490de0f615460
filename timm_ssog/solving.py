"""Solves of a continuous model by `timm_ssog.ode`, one block after the other."""

from collections.abc import Sequence

import torch
from timm.layers import calculate_drop_path_rates, drop_path
from timm.models import checkpoint
from torch import Tensor, nn

from timm_ssog.flow import step_penalty
from timm_ssog.layers import shared_kernels
from timm_ssog.ode import Solver, SolveTrace, TimeGrid, solve_adaptive, solve_fixed_adjoint, solve_per_sample


def random_speed(
    state: Tensor, drop_path_rate: float, phase: Tensor | None, *, is_first: bool, is_last: bool
) -> Tensor | None:
    """The factor of all slopes of a training step: its share of a jittered grid and its stochastic depth."""
    speed: Tensor | None = None
    if phase is not None:
        if is_first:
            speed = phase
        elif is_last:
            speed = 1 - phase
    if drop_path_rate > 0.0:
        kept = drop_path(torch.ones([state.shape[0], 1, 1, 1], device=state.device), drop_path_rate, True)
        speed = kept if speed is None else speed * kept
    return speed


def solve_blocks(
    blocks: Sequence[nn.Module],
    state: Tensor,
    taps: Sequence[int],
    *,
    grid: TimeGrid,
    solver: Solver,
    dtype: torch.dtype,
    grad_checkpointing: bool,
) -> tuple[Tensor, list[Tensor], list[SolveTrace]]:
    """Solve to the end of a grid of feature times.

    Args:
        blocks: The velocities.
        state: State at time 0, (batch, height, width, channels).
        taps: Steps of the grid at whose ends the states are wanted.
        grid: Feature times, and when each block is in force.
        solver: How to solve; with fixed steps, the gradient is that of the adjoint equation.
        dtype: Dtype that the velocities run in.
        grad_checkpointing: Whether to keep only the states where velocities are taken, and compute the rest again.

    Returns:
        The last state, those at the taps, and the trace of each block in force.
    """
    states, traces = [], []
    for index, block in enumerate(blocks[: grid.blocks]):
        start, last = grid.in_force(index)
        inside = grid.ends_inside(index)
        # an adaptive solve lands on all times, so that taps don't change it; a fixed grid needs none but the taps
        steps = [step for step in inside if step in taps] if solver.is_fixed_step else inside
        times = [start, *map(grid.end, steps), last]
        solved, trace = _solve_block(block, state, times, grid.step_size, solver, dtype, grad_checkpointing)
        traces.append(trace)
        state = solved[-1]
        at = dict(zip(steps, solved, strict=False))
        if (step := grid.ending_at(last)) is not None:  # else the block ends between two taps
            at[step] = state
        states.extend(tensor for step, tensor in sorted(at.items()) if step in taps)
    return state, states, traces


def _solve_block(
    block: nn.Module,
    state: Tensor,
    times: list[float],
    step_size: float,
    solver: Solver,
    dtype: torch.dtype,
    grad_checkpointing: bool,
) -> tuple[list[Tensor], SolveTrace]:
    kernels = shared_kernels(block, state)

    def velocity(at: Tensor) -> Tensor:
        if grad_checkpointing:
            slope = checkpoint(block, at.to(dtype), kernels, residual=False)
        else:
            slope = block(at.to(dtype), kernels, residual=False)
        return slope.to(at.dtype)

    parameters = None
    if solver.adjoint and torch.is_grad_enabled():
        # the kernels are functions of these three: passing both would count their gradient twice
        behind_kernels = () if kernels is None else ("mixer.offset", "mixer.width", "mixer.amplitude")
        weights = [p for name, p in block.named_parameters() if not name.endswith(behind_kernels)]
        parameters = [p for p in (*weights, *(kernels or ())) if p.requires_grad]
    if solver.is_fixed_step:
        return solve_fixed_adjoint(velocity, state, times, solver, step_size=step_size, parameters=parameters or [])
    if solver.per_sample:
        # one call for all images pays off on a GPU only, and costs the last bits of their independence
        return solve_per_sample(velocity, state, times, solver, together=state.device.type != "cpu")
    return solve_adaptive(velocity, state, times, solver, parameters=parameters)


def drop_path_rates(rate: float, steps: int) -> list[float]:
    """Stochastic depth rates that rise linearly from 0 to ``rate``."""
    return [float(step_rate) for step_rate in calculate_drop_path_rates(rate, steps)]  # type: ignore[arg-type]


def require_terms(terms: Sequence[Tensor], steps: int, blocks: int) -> None:
    """Raise if there was nothing to penalise."""
    if not terms:
        raise ValueError(
            f"flow_penalty='error' needs two steps per block where a step has one velocity (a loop, solver='euler'), "
            f"got {steps} for {blocks} blocks: use flow_penalty='kinetic' or more steps; a continuous model also takes "
            f"solver='midpoint'."
        )


def tap_penalties(
    blocks: Sequence[nn.Module],
    states: Sequence[Tensor],
    *,
    grid: TimeGrid,
    penalty: str,
    dtype: torch.dtype,
    grad_checkpointing: bool,
) -> list[Tensor]:
    """Flow penalties (batch,) of feature intervals, for solves that show no stages, from the velocity at each start.

    Args:
        blocks: The velocities.
        states: States at the start of each interval.
        grid: Grid of the intervals.
        penalty: Which one, a name in `timm_ssog.flow.FLOW_PENALTIES`.
        dtype: Dtype that the velocities run in.
        grad_checkpointing: As in `solve_blocks`.
    """
    penalties = []
    for index, block in enumerate(blocks):
        kernels = shared_kernels(block, states[0])
        before: Tensor | None = None
        for step, state in enumerate(states):
            if grid.block_at(step) != index:
                continue
            if grad_checkpointing:
                slope = checkpoint(block, state.to(dtype), kernels, residual=False)
            else:
                slope = block(state.to(dtype), kernels, residual=False)
            wide = state if state.dtype == torch.float64 else state.float()
            term = step_penalty(wide, [slope], weights=[1.0], step=grid.step_size, before=before, penalty=penalty)
            before = slope
            if term is not None:
                penalties.append(term)
    return penalties
