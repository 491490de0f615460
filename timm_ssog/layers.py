"""Token mixers over a grid (SSoG, its dense attention twin, the identity) and the pre-norm block around them.

Tokens travel as (batch, height, width, channels), so the grid is always known and never guessed.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, trunc_normal_, use_fused_attn
from timm.models import register_notrace_function
from torch import Tensor, nn
from torch.jit import Final

from timm_ssog.errors import require_choice, require_number, require_positive_int
from timm_ssog.ops.dispatch import separable_mix
from timm_ssog.ops.gaussian import stretched_kernels

AMPLITUDES = ("signed", "convex")
KERNEL_COORDS = ("relative", "cells")

WIDTH_MIN = 0.25
"""Narrowest standard deviation of a component, in cells of the reference grid."""

WIDEST = 1e4
"""Widest initial standard deviation or offset, in cells: within the range of float16."""

AHEAD_BYTES = 1 << 20
"""Most bytes of kernels, in float32, that are built before the blocks that use them."""


@torch.fx.wrap  # the looped and continuous models call it before any module of this file is traced
@register_notrace_function
def mixing_kernels(
    offset: Tensor,
    width: Tensor,
    amplitude: Tensor,
    reference_grid: tuple[int, int],
    grid_height: int,
    grid_width: int,
    width_min: float = WIDTH_MIN,
    *,
    convex: bool,
    relative: bool,
) -> tuple[Tensor, Tensor]:
    """Row and column kernels of one mixer or several on one grid, amplitudes folded into the rows; float32 or wider.

    Args:
        offset: (..., heads, components, 2), displacement (y, x) in cells of the reference grid.
        width: (..., heads, components, 2), unconstrained; the standard deviation is ``softplus(width) + width_min``.
        amplitude: (..., heads, components), weights, or their logits where ``convex``.
        reference_grid: The grid (height, width) in whose cells offset and width are measured.
        grid_height: Height of the current grid, in cells.
        grid_width: Its width.
        width_min: Narrowest standard deviation, in cells of the reference grid.
        convex: Whether the amplitudes are the softmax of logits.
        relative: Whether kernels stretch with the grid; otherwise their reach stays fixed in cells.

    Returns:
        (..., heads, components, height, height) and (..., heads, components, width, width).
    """
    if offset.dtype != torch.float64:
        offset, width, amplitude = offset.float(), width.float(), amplitude.float()
    sigma = F.softplus(width) + width_min
    if relative:
        # divided on the device: in a graph for any size, no size passes through a Python float
        stretch_height = grid_height / torch.full_like(offset[..., :1, 0, 0], float(reference_grid[0]))
        stretch_width = grid_width / torch.full_like(offset[..., :1, 0, 0], float(reference_grid[1]))
    else:
        stretch_height = stretch_width = torch.ones_like(offset[..., :1, 0, 0])
    weight = amplitude.softmax(-1) if convex else amplitude
    rows = stretched_kernels(offset[..., 0], sigma[..., 0], grid_height, stretch_height)
    columns = stretched_kernels(offset[..., 1], sigma[..., 1], grid_width, stretch_width)
    return rows * weight[..., None, None], columns


register_notrace_function(separable_mix)
torch.fx.wrap("separable_mix")  # for plain torch.fx tracers, such as torchvision's


def grid_digits(grid: Sequence[float]) -> Tensor:
    """A grid (height, width) as checkpoints keep it: (2, 3), the hexadecimal digits of its sides, in floats.

    Code that averages, casts or interpolates checkpoints treats all tensors as weights. Digits are small whole numbers:
    every dtype holds them exactly, and an average that is slightly off still rounds to them.
    """
    digits = [[round(side) // 256, round(side) // 16 % 16, round(side) % 16] for side in grid]
    return torch.tensor(digits, dtype=torch.float32, device="cpu")


def grid_of_digits(digits: Tensor) -> tuple[int, int]:
    """The grid (height, width) that `grid_digits` stand for, exact or averaged."""
    height, width = (int(256 * a + 16 * b + c) for a, b, c in digits.double().round().tolist())
    return height, width


def _read_reference_grid(mixer: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Accept the two integers of older checkpoints; warn of kernels that come without their reference grid."""
    old, new = prefix + "reference_grid", prefix + "_extra_state"
    if old in state_dict:
        grid = state_dict.pop(old)
        state_dict[new] = grid.new_empty(2, 3) if grid.is_meta else grid_digits(grid.tolist())
    elif new not in state_dict and prefix + "offset" in state_dict:
        grid: Any = mixer.reference_grid
        warnings.warn(
            f"The checkpoint has kernels ({prefix}offset) but not their reference grid ({new}), so this model's own is "
            f"used: {grid[0]} x {grid[1]} tokens. If the checkpoint was trained at another image size, create the "
            f"model with that img_size, load, and call set_input_size afterwards.",
            stacklevel=2,
        )


class SeparableMixer(nn.Module):
    """SSoG token mixing: every head sums ``num_components`` separable Gaussians over the grid.

    The kernels do not depend on the input: pass those of `kernels` to share them between calls; if omitted, they are
    built. Parameters ``offset``, ``width`` and ``amplitude`` are those of `mixing_kernels`;
    ``reference_grid`` is saved with them as the module's extra state, so that a checkpoint keeps its scale at any
    resolution. It is not a buffer: nothing averages, casts, shards or offloads it.

    Raises:
        ValueError: if an option is unknown, ``dim`` is not divisible by ``num_heads``, or a count is below one.
    """

    steering = "none"
    lends_kernels = True
    convex: Final[bool]
    relative: Final[bool]
    reference_grid: tuple[int, int]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        num_components: int = 4,
        amplitude: str = "signed",
        kernel_coords: str = "relative",
        init_width: float = 0.72,
        init_offset: float = 2.0,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        """Build the mixer.

        Args:
            dim: Channels.
            num_heads: Heads, each with its own kernels.
            grid_size: Reference grid (height, width), in cells.
            num_components: Gaussians per head.
            amplitude: ``"signed"`` (free weights) or ``"convex"`` (softmax of logits).
            kernel_coords: ``"relative"`` (kernels stretch with the grid) or ``"cells"`` (their reach stays in cells).
            init_width: Initial standard deviation, in cells, above `WIDTH_MIN`.
            init_offset: Standard deviation of the initial offsets, in cells; truncated at half the grid.
            proj_drop: Dropout rate after the output projection.
        """
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        head_dim = _head_dim(dim, num_heads)
        require_positive_int("num_components", num_components, "Every head needs at least one Gaussian.")
        require_choice("amplitude", amplitude, AMPLITUDES)
        require_choice("kernel_coords", kernel_coords, KERNEL_COORDS)
        for name, length, expected, least in (
            ("init_width", init_width, f"above {WIDTH_MIN} cells, the narrowest width", math.nextafter(WIDTH_MIN, 1)),
            ("init_offset", init_offset, "0 or more cells", 0.0),
        ):
            require_number(name, length, f"{expected}, and at most {WIDEST:g}", least, WIDEST)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.convex = amplitude == "convex"
        self.relative = kernel_coords == "relative"
        self.init_width = init_width
        self.init_offset = init_offset
        self.grid_size = grid_size

        self.offset = nn.Parameter(torch.empty(num_heads, num_components, 2, **dd))
        self.width = nn.Parameter(torch.empty(num_heads, num_components, 2, **dd))
        self.amplitude = nn.Parameter(torch.empty(num_heads, num_components, **dd))
        self.value = nn.Linear(dim, dim, bias=False, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_load_state_dict_pre_hook(_read_reference_grid)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the kernels: every component narrow, and within the grid for at least half of the cells."""
        self.reference_grid = self.grid_size
        with torch.no_grad():
            for axis, length in enumerate(self.grid_size):
                reach = (length - 1) / 2
                spread = min(self.init_offset, reach / 2)
                if spread > 0:
                    trunc_normal_(self.offset[..., axis], std=spread, a=-reach, b=reach)
                else:
                    nn.init.zeros_(self.offset[..., axis])
            above = self.init_width - WIDTH_MIN
            nn.init.constant_(self.width, above + math.log(-math.expm1(-above)))  # the inverse of softplus
            nn.init.normal_(self.amplitude, std=0.0 if self.convex else self.amplitude.shape[1] ** -0.5)

    def get_extra_state(self) -> Tensor:
        """The reference grid, as `grid_digits`; torch saves it with the parameters."""
        return grid_digits(self.reference_grid)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the reference grid of a checkpoint; one without values (on meta) has none to take."""
        if not state.is_meta:
            self.reference_grid = grid_of_digits(state)

    def kernels(self, grid_height: int, grid_width: int) -> tuple[Tensor, Tensor]:
        """The row and column kernels on a grid; see `mixing_kernels`."""
        return mixing_kernels(
            self.offset,
            self.width,
            self.amplitude,
            self.reference_grid,
            grid_height,
            grid_width,
            convex=self.convex,
            relative=self.relative,
        )

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Mix tokens (batch, height, width, dim), with the given kernels or those of their grid."""
        batch, height, width, dim = x.shape
        if kernels is None:
            kernels = self.kernels(height, width)
        values = self.value(x).reshape(batch, height, width, self.num_heads, self.head_dim)
        x = separable_mix(values, kernels[0], kernels[1]).reshape(batch, height, width, dim)
        return self.proj_drop(self.proj(x))


def first_separable(blocks: Iterable[nn.Module]) -> SeparableMixer | None:
    """The first SSoG mixer of the blocks, whose options all of them share; None if there is none."""
    mixers = (block.mixer for block in blocks)
    return next((mixer for mixer in mixers if isinstance(mixer, SeparableMixer)), None)


class AttentionMixer(nn.Module):
    """The dense twin: multi-head self-attention over all tokens of the grid, with timm's switch for the fused kernel.

    Raises:
        ValueError: if ``dim`` is not divisible by ``num_heads``.
    """

    fused_attn: Final[bool]

    def __init__(self, dim: int, num_heads: int, proj_drop: float = 0.0, device=None, dtype=None) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = _head_dim(dim, num_heads)
        self.fused_attn = use_fused_attn()
        self.qkv = nn.Linear(dim, 3 * dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def kernels(self, grid_height: int, grid_width: int) -> tuple[Tensor, Tensor] | None:
        """None: attention makes its kernels from the input."""
        return None

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend over tokens (batch, height, width, dim)."""
        batch, height, width, dim = x.shape
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        x = x.transpose(1, 2).reshape(batch, height, width, dim)
        return self.proj_drop(self.proj(x))


class IdentityMixer(nn.Module):
    """Value and output projection with nothing mixed in between: the speed ceiling of any mixer in benchmarks."""

    def __init__(self, dim: int, proj_drop: float = 0.0, device=None, dtype=None) -> None:
        super().__init__()
        self.value = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def kernels(self, grid_height: int, grid_width: int) -> tuple[Tensor, Tensor] | None:
        """None: nothing is mixed."""
        return None

    def forward(self, x: Tensor, kernels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Project each token of (batch, height, width, dim) by itself."""
        return self.proj_drop(self.proj(self.value(x)))


class CentreNorm(nn.Module):
    """Centring norm ``d / (d - 1) * (x - mean) * weight + bias`` over the last of the dimensions, of d channels.

    The norm of LipsFormer (CenterNorm; Qi et al., ICLR 2023): an affine map, so unlike LayerNorm it has a global
    Lipschitz constant of order one. Centring is an orthogonal projection P, and the constant is the spectral
    norm of ``d / (d - 1) * diag(weight) * P``: at most ``d / (d - 1) * max|weight|``, and exactly that wherever two
    channels share the largest ``|weight|``, as they do at initialisation.

    Raises:
        ValueError: if there are fewer than two channels.
    """

    scale: Final[float]

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"CentreNorm needs at least 2 channels, because centring removes one, got dim={dim}.")
        self.scale = dim / (dim - 1)
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Centre every vector of the last dimension."""
        return self.scale * (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class Block(nn.Module):
    """Pre-norm block ``x + delta(x)``: a token mixer and an MLP, each with its own residual."""

    def __init__(
        self,
        mixer: nn.Module,
        dim: int,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        device=None,
        dtype=None,
    ) -> None:
        """Build the block around a mixer.

        Args:
            mixer: Maps tokens (batch, height, width, dim) and optional kernels to tokens.
            dim: Channels.
            mlp_ratio: Hidden channels of the MLP over ``dim``.
            proj_drop: Dropout rate within the MLP.
            drop_path: Stochastic depth rate of both branches.
            act_layer: Activation of the MLP.
            norm_layer: Normalisation before each branch.
        """
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1 = norm_layer(dim, **dd)
        self.mixer = mixer
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop, **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def delta(
        self,
        x: Tensor,
        kernels: tuple[Tensor, Tensor] | None = None,
        modulation: Tensor | None = None,
    ) -> Tensor:
        """What the block adds to its input; the velocity of the continuous model (DESIGN.md, section 2).

        Args:
            x: Tokens (batch, height, width, dim).
            kernels: Kernels of the mixer on this grid, to share them between calls; built if omitted.
            modulation: (4, dim), scale and shift of the first norm's output, then of the second's; a scale of 0 and a
                shift of 0 change nothing. It gives a shared block its own norms in every loop.
        """
        normed = self.norm1(x)
        if modulation is not None:
            normed = normed * (1 + modulation[0]) + modulation[1]
        mixed = self.drop_path1(self.mixer(normed, kernels))
        normed = self.norm2(x + mixed)
        if modulation is not None:
            normed = normed * (1 + modulation[2]) + modulation[3]
        return mixed + self.drop_path2(self.mlp(normed))

    def forward(
        self,
        x: Tensor,
        kernels: tuple[Tensor, Tensor] | None = None,
        modulation: Tensor | None = None,
        residual: bool = True,  # by keyword, though TorchScript can't insist on it
    ) -> Tensor:
        """Apply the block to tokens (batch, height, width, dim); `delta` alone where ``residual`` is False."""
        delta = self.delta(x, kernels, modulation)
        return x + delta if residual else delta


def shared_kernels(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Kernels of a block for all its calls on tokens (batch, height, width, dim), such as loops or solver stages.

    Returns:
        The kernels; None where the block has none, or must build them within its own forward each time.
    """
    if not _lends_parameters(block, x):
        return None
    _, height, width, _ = x.shape
    return block.mixer.kernels(height, width)


def kernels_ahead(blocks: Sequence[nn.Module], x: Tensor) -> list[tuple[Tensor, Tensor] | None]:
    """Kernels of consecutive blocks for tokens (batch, height, width, dim), built together where that is faster.

    On a small grid, it is not the arithmetic of the kernels that takes time, but launching each small operation.
    Without gradients, the first blocks whose kernels fit `AHEAD_BYTES` together therefore share every operation.

    Returns:
        A list for the first of the blocks, at least one. It has None where the block builds its kernels itself: in
        training, in a graph, on a large grid, or when it has been replaced, wrapped or moved.
    """
    alone: list[tuple[Tensor, Tensor] | None] = [None]
    if torch.is_grad_enabled() or not isinstance(x, Tensor) or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return alone
    _, height, width, _ = x.shape
    mixers: list[SeparableMixer] = []
    room = AHEAD_BYTES
    for block in blocks:
        if not _lends_parameters(block, x) or type(block.mixer).kernels is not SeparableMixer.kernels:
            break
        mixer: Any = block.mixer
        room -= mixer.amplitude.numel() * (height * height + width * width) * 4
        if room < 0 or (mixers and _traits(mixer) != _traits(mixers[0])):
            break
        mixers.append(mixer)
    if len(mixers) < 2:
        return alone
    rows, columns = mixing_kernels(
        torch.stack([mixer.offset for mixer in mixers]),
        torch.stack([mixer.width for mixer in mixers]),
        torch.stack([mixer.amplitude for mixer in mixers]),
        mixers[0].reference_grid,
        height,
        width,
        convex=mixers[0].convex,
        relative=mixers[0].relative,
    )
    return list(zip(rows.unbind(), columns.unbind(), strict=True))


def _lends_parameters(block: nn.Module, x: Tensor) -> bool:
    """Whether a block's kernels can be built outside its forward: nothing wraps it, and its parameters are here."""
    # by the very class: that of a wrapped or sharded block derives from it, and has parameters only in its forward
    if type(block) is not Block or not vars(type(block.mixer)).get("lends_kernels", False):
        return False
    if not all(name in block.mixer._parameters for name in ("offset", "width", "amplitude")):
        return False  # computed from others when the mixer is called, as by torch.nn.utils.prune
    offset = block.mixer.offset
    if not isinstance(x, Tensor):  # symbolic tracing: torch.fx takes the module as it is
        return True
    return offset.device == x.device and offset.dim() == 3  # else on another device, or empty until its forward runs


def _traits(mixer: SeparableMixer) -> tuple[Any, ...]:
    """What mixers must have in common to have their kernels built together."""
    return mixer.amplitude.shape, mixer.convex, mixer.relative, mixer.reference_grid


INIT_WIDTH = 768
"""Inputs up to which linear layers start with equal gain: about a half, that of timm's 0.02 at this width."""


def init_weights(module: nn.Module, name: str = "", needs_reset: bool = True) -> None:
    """Initialise a module; with ``needs_reset``, modules that can reset themselves do.

    Linear layers with at least `INIT_WIDTH` inputs start as in timm's ViT, with a standard deviation of 0.02. With
    fewer inputs it grows as their inverse root: 0.02 would almost close the mixers and MLPs of narrow models, and a
    short training would end before they open (examples/lab/photographs.py).
    """
    if isinstance(module, nn.Linear):
        if name.endswith("mixer.steer"):  # a steered mixer starts as a fixed one
            nn.init.zeros_(module.weight)
        else:
            trunc_normal_(module.weight, std=0.02 * max(1.0, INIT_WIDTH / module.in_features) ** 0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset and hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


def _head_dim(dim: int, num_heads: int) -> int:
    require_positive_int("embed_dim", dim)
    require_positive_int("num_heads", num_heads)
    if dim % num_heads:
        raise ValueError(
            f"embed_dim must be divisible by num_heads, got embed_dim={dim} and num_heads={num_heads}; "
            f"embed_dim={dim // num_heads * num_heads or num_heads} or {(dim // num_heads + 1) * num_heads} works."
        )
    return dim // num_heads
