"""SSoG mixers whose kernels listen to the content of the tokens, as a linear map of each token says.

The map starts at zero, and then every steered mixer is the fixed one: a checkpoint with fixed kernels loads into it and
trains on. Content steers where a token looks; it does not find a token by its content, as attention does.
"""

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import Tensor, nn

from timm_ssog.layers import WIDTH_MIN, SeparableMixer, mixing_kernels
from timm_ssog.ops.dispatch import separable_mix
from timm_ssog.ops.gaussian import FARTHEST
from timm_ssog.ops.steered import amplitude_mix, shift_mix

REACH = 2.0
"""Cells of the reference grid by which a token moves an offset at most; it also scales a width by half to twice."""

register_notrace_function(amplitude_mix)
register_notrace_function(shift_mix)
for _name in ("amplitude_mix", "shift_mix", "separable_mix", "mixing_kernels", "moved_kernels", "grid_stretches"):
    torch.fx.wrap(_name)  # for plain torch.fx tracers, name by name in each module that calls them


class SteeredMixer(SeparableMixer):
    """A `SeparableMixer` with a linear map ``steer`` from each token to ``per_component`` numbers per component.

    With ``per_component = 0`` it is one number per head.
    """

    per_component: int

    def __init__(self, dim: int, num_heads: int, grid_size: tuple[int, int], device=None, dtype=None, **kernels: Any):
        super().__init__(dim, num_heads, grid_size, device=device, dtype=dtype, **kernels)
        self.num_components = self.amplitude.shape[1]
        each = self.per_component * self.num_components or 1
        self.steer = nn.Linear(dim, num_heads * each, device=device, dtype=dtype)
        nn.init.zeros_(self.steer.weight)
        nn.init.zeros_(self.steer.bias)
        self.register_load_state_dict_pre_hook(_start_unsteered)

    def split(self, x: Tensor) -> Tensor:
        """Values (batch, height, width, heads, head_dim) of tokens."""
        batch, height, width, _ = x.shape
        return self.value(x).reshape(batch, height, width, self.num_heads, self.head_dim)

    def join(self, mixed: Tensor) -> Tensor:
        """Project mixed values."""
        return self.proj_drop(self.proj(mixed.flatten(3)))


def _start_unsteered(mixer: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Read the kernels of a fixed mixer as those of a steered one whose map is zero."""
    if prefix + "offset" in state_dict:
        for name, parameter in mixer.steer.named_parameters():  # type: ignore[union-attr]
            state_dict.setdefault(f"{prefix}steer.{name}", torch.zeros_like(parameter))


class ValueSteeredMixer(SteeredMixer):
    """Every token scales its own values, per head, by a factor from 0 to 2."""

    steering = "value"
    lends_kernels = True
    per_component = 0

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Mix tokens (batch, height, width, dim), with the given kernels or those of their grid."""
        if kernels is None:
            kernels = self.kernels(x.shape[1], x.shape[2])
        values = self.split(x) * (2 * self.steer(x).sigmoid())[..., None]
        return self.join(separable_mix(values, kernels[0], kernels[1]))


class AmplitudeSteeredMixer(SteeredMixer):
    """Every query adds up to one, in either direction, to the amplitude of each component (or its logit)."""

    steering = "amplitude"
    lends_kernels = True
    per_component = 1

    def kernels(self, grid_height: int, grid_width: int) -> tuple[Tensor, Tensor]:
        """The row and column kernels on a grid, without amplitudes; see `timm_ssog.layers.mixing_kernels`."""
        return mixing_kernels(
            self.offset,
            self.width,
            torch.ones_like(self.amplitude),
            self.reference_grid,
            grid_height,
            grid_width,
            convex=False,
            relative=self.relative,
        )

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Mix tokens (batch, height, width, dim), with the given kernels or those of their grid."""
        if kernels is None:
            kernels = self.kernels(x.shape[1], x.shape[2])
        weights = self.steer(x).to(kernels[0].dtype).unflatten(-1, (self.num_heads, self.num_components)).tanh()
        weights = weights + self.amplitude
        weights = weights.softmax(-1) if self.convex else weights
        return self.join(amplitude_mix(self.split(x), kernels[0], kernels[1], weights))


class ShiftSteeredMixer(SteeredMixer):
    """Every token moves the offsets of its kernels by up to `REACH` cells, and scales their widths by 1/2 to 2.

    The first product takes the row kernels of the tokens that it passes through, the second the column kernels of the
    query (`timm_ssog.ops.steered`).
    """

    steering = "shift"
    lends_kernels = False
    per_component = 4

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Mix tokens (batch, height, width, dim); kernels that the content does not know are of no use."""
        offsets, sigmas, amplitude = moved_kernels(
            self.steer(x), self.offset, self.width, self.amplitude, convex=self.convex
        )
        stretches = grid_stretches(self.offset, self.reference_grid, x.shape[1], x.shape[2], relative=self.relative)
        return self.join(shift_mix(self.split(x), offsets, sigmas, amplitude, stretches))


@register_notrace_function
def moved_kernels(
    moves: Tensor,
    offset: Tensor,
    width: Tensor,
    amplitude: Tensor,
    reach: float = REACH,
    farthest: float = FARTHEST,
    width_min: float = WIDTH_MIN,
    *,
    convex: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Offsets and standard deviations that tokens ask for, each along y and x, and the amplitudes; float32 or wider.

    Args:
        moves: (batch, height, width, 4 * heads * components), unbounded: of both offsets, then of both widths.
        offset: (heads, components, 2), as are the widths; see `timm_ssog.layers.mixing_kernels`.
        width: Likewise.
        amplitude: (heads, components).
        reach: Cells by which an offset moves at most.
        farthest: Offsets are clamped to this distance before.
        width_min: Narrowest standard deviation before it is scaled.
        convex: Whether the amplitudes are the softmax of logits.
    """
    if offset.dtype != torch.float64:
        offset, width, amplitude = offset.float(), width.float(), amplitude.float()
    heads, components = amplitude.shape
    y, x, tall, wide = [move.unflatten(-1, (heads, components)) for move in moves.to(offset.dtype).tanh().chunk(4, -1)]
    centre, sigma = offset.clamp(-farthest, farthest), F.softplus(width) + width_min
    offsets = [centre[..., 0] + reach * y, centre[..., 1] + reach * x]
    sigmas = [sigma[..., 0] * tall.exp2(), sigma[..., 1] * wide.exp2()]
    return offsets, sigmas, amplitude.softmax(-1) if convex else amplitude


@register_notrace_function
def grid_stretches(
    offset: Tensor, reference_grid: tuple[int, int], grid_height: int, grid_width: int, *, relative: bool
) -> list[Tensor]:
    """Cells of a grid over cells of the reference grid, along y and x, as scalars beside the offsets."""
    one = torch.ones_like(offset[0, 0, 0], dtype=torch.float64 if offset.dtype == torch.float64 else torch.float32)
    if not relative:
        return [one, one]
    # divided on the device: in a graph for any size, no size passes through a Python float
    return [grid_height / (one * float(reference_grid[0])), grid_width / (one * float(reference_grid[1]))]
