"""Explicit Runge-Kutta methods as Butcher tableaus, and the sum that all their stages are made of.

Plain PyTorch: a solver built from these compiles with fullgraph, exports and scripts, unlike torchdiffeq's own
fixed-step loop.
"""

from typing import NamedTuple

import torch
from timm.models import register_notrace_function
from torch import Tensor


@register_notrace_function
def as_state(x: Tensor) -> Tensor:
    """Tokens as the state of a looped or continuous model: at least float32."""
    return x if x.dtype == torch.float64 else x.float()


class Tableau(NamedTuple):
    """A fixed-step method for an autonomous velocity: a row of coefficients per stage, and those of the step itself."""

    stages: list[list[float]]
    step: list[float]
    order: int


TABLEAUS = {
    "euler": Tableau([[]], [1.0], 1),
    "midpoint": Tableau([[], [1 / 2]], [0.0, 1.0], 2),
    "heun": Tableau([[], [1.0]], [1 / 2, 1 / 2], 2),
    # the 3/8 rule, as torchdiffeq's rk4
    "rk4": Tableau([[], [1 / 3], [-1 / 3, 1.0], [1.0, -1.0, 1.0]], [1 / 8, 3 / 8, 3 / 8, 1 / 8], 4),
}


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
    # Heun's method with Euler's inside; the third stage only passes the velocity on
    "adaptive_heun": EmbeddedPair([[], [1.0], [1 / 2, 1 / 2]], [-1 / 2, 1 / 2, 0.0], 2),
}


def advance(state: Tensor, slopes: list[Tensor], weights: list[float], step: float) -> Tensor:
    """Move the state along a weighted sum of slopes, ``state + step * sum(w * slope)``.

    The sum is added term by term, so that one slope with weight one and step one gives exactly ``state + slope``: the
    looped model and Euler's method agree bit for bit.

    Args:
        state: State, float32 or wider.
        slopes: One per weight, of the state's shape.
        weights: One per slope.
        step: Step size, in units of depth.
    """
    for slope, weight in zip(slopes, weights):  # noqa: B905  (TorchScript has no strict)
        if weight != 0.0:
            state = torch.add(state, slope, alpha=step * weight)
    return state
