"""Checks that all solves share: of the problem they get, the steps they take and the states they reach."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from timm_ssog.errors import SolveError
from timm_ssog.ode.trace import SolveTrace
from timm_ssog.ops.capture import is_captured

SMALLEST_STEP = 1e-14
"""Step size below which a solve gives up, as a fraction of the largest time: the rounding of a float64 clock."""

NOT_FINITE = (
    "Check the input and the weights for NaN and huge values, lower the learning rate or clip gradients, and run the "
    "velocity in bfloat16 or float32 rather than float16."
)
TOO_STIFF = (
    "The velocity is too stiff or too rough for these tolerances: raise rtol and atol, or use a fixed-step solver. If "
    "the velocity runs in float16 or bfloat16, keep them above its rounding (1e-3, 1e-2)."
)
TOO_MANY = "Raise max_evaluations or the tolerances, or use a fixed-step solver, whose cost is known."


def nothing_to_solve(x: Tensor, times: list[float], trace: SolveTrace) -> tuple[list[Tensor], SolveTrace]:
    """The result of a solve for a batch without samples."""
    return [x for _ in times[1:]], trace


def clock(times: list[float], device: torch.device) -> Tensor:
    """Times as torchdiffeq wants them."""
    # MPS has no float64
    return torch.tensor(times, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def smallest_step(times: list[float]) -> float:
    """Step size below which a solve over these times gives up."""
    return SMALLEST_STEP * max(abs(times[0]), abs(times[-1]))


def no_step(size: float) -> tuple[str, str]:
    """The problem and the remedy for a step that is NaN or below the smallest."""
    if math.isnan(size):
        return "The state or its velocity became NaN or infinite", NOT_FINITE
    return f"The step size fell to {size:.3g}", TOO_STIFF


def require_problem(x: Tensor, times: Sequence[float]) -> list[float]:
    """The times as a list of floats; raise if they or the initial state are not fit for a solve."""
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
            "It chooses its steps as it runs. Use a fixed-step solver without adjoint.",
        )
    require_finite(x.unsqueeze(0), listed, 0)
    return listed


def require_finite(states: Tensor, times: list[float], evaluations: int) -> None:
    """Raise unless the states (times, batch, ...) are finite, naming the first time at which they are not."""
    if states.isfinite().all():
        return
    finite = states.detach().isfinite().reshape(len(states), states.shape[1], -1).all(2).cpu()
    index = int(finite.all(1).int().argmin())
    bad = (~finite[index]).nonzero().squeeze(1).tolist()
    named = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
    problem = f"The state has NaN or infinity in {len(bad)} of {states.shape[1]} samples ({named})"
    raise SolveError(problem, times[index], evaluations, NOT_FINITE)
