"""The flow penalty: training adds it so that a continuous model becomes the flow of its equation, not a set of steps.

Per step of size h from a state x, with the velocity k at its stages,

- *error*: Euler's error in the step, ``e = h (sum of b k - k_1)``, which every method of order two or higher provides.
  With one velocity per step (Euler itself, adaptive solvers, the adjoint) it is ``h / 2`` times the change of that
  velocity from one step to the next, the same to leading order;
- *kinetic*: ``e = h k`` with the step's last velocity (Finlay et al., How to train your neural ODE, 2020).

The penalty is the sum over steps, and the mean over samples, of ``mean(e^2) / mean(x^2)``, both means over tokens and
channels.
"""

from typing import Any

import torch
from timm.models import register_notrace_function
from torch import Tensor

FLOW_PENALTIES = ("none", "error", "kinetic", "both")

SMALLEST_SQUARE = 1e-12
"""Smallest mean square that a state counts with: a penalty relative to zero would be NaN."""


def step_penalty(
    state: Tensor,
    slopes: list[Tensor],
    weights: list[float],
    step: float,
    slope_before: Tensor | None,
    error: bool,
    kinetic: bool,
) -> Tensor | None:
    """The penalty of one step for each sample, (batch,), or None where there is nothing to measure yet.

    Args:
        state: State at the start of the step, (batch, ...).
        slopes: Velocities at its stages.
        weights: Weights of the slopes in the step.
        step: Its size.
        slope_before: With a single stage, the velocity of the previous step; None in the first step.
        error: Whether to penalise the error.
        kinetic: Whether to penalise the speed.
    """
    total: Tensor | None = None
    if error:
        if len(slopes) > 1:
            change = -step * slopes[0].to(state.dtype)
            for slope, weight in zip(slopes, weights, strict=True):
                if weight != 0.0:
                    change = torch.add(change, slope, alpha=step * weight)
            total = change.square().flatten(1).mean(1)
        elif slope_before is not None:
            change = 0.5 * step * (slopes[0].to(state.dtype) - slope_before)
            total = change.square().flatten(1).mean(1)
    if kinetic:
        energy = (step * slopes[-1].to(state.dtype)).square().flatten(1).mean(1)
        total = energy if total is None else total + energy
    if total is None:
        return None
    return total / state.square().flatten(1).mean(1).clamp_min(SMALLEST_SQUARE)


class _Pull(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, penalty: Tensor, weight: float) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, penalty, ctx.weight = inputs
        ctx.dtype = penalty.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        lengths = gradient.detach().to(ctx.dtype).flatten(1).square().sum(1).sqrt()
        return gradient, ctx.weight * lengths, None


@register_notrace_function
def pull_on_backward(output: Tensor, penalty: Tensor, weight: float) -> Tensor:
    """Return the output unchanged; in backward, also minimise the penalty, along with any loss of the output.

    The gradient of a sample's penalty is multiplied by ``weight`` and by the length of the loss's gradient with respect
    to that sample's output. Any factor of the loss also multiplies the penalty, so that their balance stays: the scale
    of a GradScaler, the share of a batch in accumulated gradients, the number of processes. No sample depends on
    another. The pull fades as the loss is minimised.

    Args:
        output: (batch, ...).
        penalty: (batch,).
        weight: Strength of the penalty.
    """
    return _Pull.apply(output, penalty, weight)  # type: ignore[return-value]
