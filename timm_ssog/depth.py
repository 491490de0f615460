"""Explicit fixed-step methods as Butcher tableaus, and the one sum that all of their stages are made of.

Plain PyTorch: what is built from these compiles with fullgraph, exports and scripts, which torchdiffeq's own fixed-step
loop does not.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tableau(NamedTuple):
    """An explicit Runge-Kutta method for an autonomous velocity: a row of coefficients per stage, and the weights."""

    stages: list[list[float]]
    weights: list[float]
    order: int


TABLEAUS = {
    "euler": Tableau([[]], [1.0], 1),
    "midpoint": Tableau([[], [1 / 2]], [0.0, 1.0], 2),
    "heun": Tableau([[], [1.0]], [1 / 2, 1 / 2], 2),
    # the 3/8 rule, as torchdiffeq's rk4
    "rk4": Tableau([[], [1 / 3], [-1 / 3, 1.0], [1.0, -1.0, 1.0]], [1 / 8, 3 / 8, 3 / 8, 1 / 8], 4),
}


def advance(state: Tensor, slopes: list[Tensor], weights: list[float], step: float) -> Tensor:
    """The state moved along a weighted sum of slopes, ``state + step * sum(w * slope)``.

    Added term by term, so that one slope of weight one and step one gives exactly ``state + slope``: the looped model
    and Euler's method agree bit for bit.

    Args:
        state: State, float32 or wider.
        slopes: As many as there are weights, of the state's shape.
        weights: One per slope.
        step: Step size, in units of depth.
    """
    for slope, weight in zip(slopes, weights):  # noqa: B905  (TorchScript knows no strict)
        if weight != 0.0:
            state = torch.add(state, slope, alpha=step * weight)
    return state
