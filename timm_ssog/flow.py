"""The flow penalty: training adds it so that a continuous model becomes the flow of its equation, not a set of steps.

A looped model is Euler's method with step 1, so the same penalty makes its loops small and even.

Per step of size h from a state x, with the velocity k at its stages,

- *error*: Euler's error in the step, ``e = h (sum of b k - k_1)``, which every method of order two or higher provides.
  With one velocity per step (Euler, loops, adaptive solvers, the adjoint) it is ``h / 2`` times the change of that
  velocity from one step to the next, the same to leading order;
- *kinetic*: the whole step, ``e = h sum of b k`` (Finlay et al., How to train your neural ODE, 2020).

The penalty is the sum over steps, and the mean over samples, of ``mean(e^2) / mean(x^2)``, both means over tokens and
channels. *Both* is the sum of the two, the kinetic part by `KINETIC_SHARE`.
"""

from typing import Any

import torch
from timm.models import register_notrace_function
from torch import Tensor
from torch.nn import functional as F

from timm_ssog.runge_kutta import advance

KINETIC_SHARE = 0.05
"""What the kinetic part counts beside the error: without it more predictions differ, with more of it fewer evaluations
cost more accuracy (examples/lab/flow.py)."""

FLOW_PENALTIES = {"none": (0.0, 0.0), "error": (1.0, 0.0), "kinetic": (0.0, 1.0), "both": (1.0, KINETIC_SHARE)}
"""Weights of the error and of the kinetic part."""

LEAST_LENGTH = 0.1
"""Length of a cross-entropy's gradient below which the pull on a sample fades with the gradient of its loss."""

SMALLEST_SQUARE = 1e-12
"""Smallest mean square that a state counts with: a penalty relative to zero would be NaN."""


def step_penalty(
    state: Tensor,
    slopes: list[Tensor],
    *,
    weights: list[float],
    step: float,
    before: Tensor | None,
    penalty: str,
    after: Tensor | None = None,
) -> Tensor | None:
    """The penalty of one step for each sample, (batch,), or None where there is nothing to measure yet.

    Args:
        state: State at the start of the step, (batch, ...).
        slopes: Velocities at its stages.
        weights: Weights of the slopes in the step.
        step: Its size.
        before: With a single stage, the velocity of the previous step; None in the first step.
        penalty: A name in `FLOW_PENALTIES`.
        after: State at the end of the step, if it is known; backward keeps no second copy of it.
    """
    error_weight, kinetic_weight = FLOW_PENALTIES[penalty]
    if after is None:
        after = advance(state, slopes, weights, step)
    terms: list[Tensor] = []
    if error_weight and len(slopes) > 1:
        euler = advance(state, slopes[:1], [1.0], step)
        terms.append(error_weight * _mean_square_distance(after, euler))
    elif error_weight and before is not None:
        terms.append((error_weight * step**2 / 4) * _mean_square_distance(slopes[0].to(state.dtype), before))
    if kinetic_weight:
        terms.append(kinetic_weight * _mean_square_distance(after, state))
    if not terms:
        return None
    return torch.stack(terms).sum(0) / state.square().flatten(1).mean(1).clamp_min(SMALLEST_SQUARE)


def _mean_square_distance(x: Tensor, y: Tensor) -> Tensor:
    # backward keeps both, not their difference: states are kept anyway
    return F.mse_loss(x, y.to(x.dtype), reduction="none").flatten(1).mean(1)


class _Pull(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, penalty: Tensor, weight: float) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        given, penalty, ctx.weight = inputs
        ctx.save_for_backward(given)
        ctx.dtype = penalty.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (given,) = ctx.saved_tensors
        pulls = _pulls(given.detach().to(ctx.dtype).flatten(1), gradient.detach().to(ctx.dtype).flatten(1))
        return gradient, ctx.weight * pulls, None


def _pulls(logits: Tensor, gradient: Tensor) -> Tensor:
    """By what the penalty of each sample is multiplied, (batch,), given logits and gradient (batch, classes)."""
    if logits.shape[1] == 1:  # of one class against its complement
        expected = logits.sigmoid() - (gradient < 0).to(logits.dtype)
    else:  # the label is where the loss wants more
        expected = logits.softmax(1).scatter_add(1, gradient.argmin(1, keepdim=True), -torch.ones_like(logits[:, :1]))
    return gradient.norm(dim=1) / expected.norm(dim=1).clamp_min(LEAST_LENGTH)


@register_notrace_function
def pull_on_backward(output: Tensor, penalty: Tensor, weight: float) -> Tensor:
    """Return the output unchanged; in backward, also minimise the penalty, along with any loss of the output.

    With the mean cross-entropy as the loss, the gradient is that of ``loss + weight * penalty.mean()``. Any factor of
    the loss also multiplies the penalty, so that their balance stays: the scale of a GradScaler, the share of a batch
    in accumulated gradients, the number of processes. The factor is read off each sample: it is the length of the
    loss's gradient with respect to the sample's output, over the length that cross-entropy gives there, or over
    `LEAST_LENGTH` if that is larger. For other losses this is an estimate. Once a sample is learned, its pull fades.

    Args:
        output: (batch, ...), logits.
        penalty: (batch,).
        weight: Strength of the penalty.
    """
    return _Pull.apply(output, penalty, weight)  # type: ignore[return-value]
