"""Axis kernels: one Gaussian along one axis of the token grid, as a row-stochastic matrix."""

import torch
from torch import Tensor

FARTHEST = 1e6
"""Largest offset, in cells: beyond it float32 no longer tells one cell from the next, and far beyond it overflows."""

NARROWEST = 1e-3
"""Smallest width of `axis_kernels`, in cells: below it the nearest cell has all weight, near zero floats overflow."""


def axis_kernels(
    offset: Tensor,
    width: Tensor,
    length: int,
    reference_length: float | None = None,
) -> Tensor:
    """Kernels of Gaussian components along an axis: entry (i, j) is the weight with which cell i looks at cell j.

    Row i is the softmax over j of ``-((j - i) / s - offset)^2 / (2 width^2)`` with the stretch
    ``s = length / reference_length`` (DESIGN.md, section 1). Built in float32, or in float64 for float64 parameters.

    Args:
        offset: (...) displacement of the component's centre, in cells of the reference grid, up to `FARTHEST`.
        width: (...) standard deviation, in cells of the reference grid, at least `NARROWEST`.
        length: Cells along the axis.
        reference_length: Cells along the axis of the reference grid; ``length`` itself if omitted, so no stretch.

    Returns:
        (..., length, length), each row non-negative and summing to one.

    Raises:
        ValueError: if the shapes differ or a length is below one.
    """
    if offset.shape != width.shape:
        raise ValueError(
            f"offset and width must have the same shape, got {tuple(offset.shape)} and {tuple(width.shape)}."
        )
    reference_length = length if reference_length is None else reference_length
    if length < 1 or not reference_length > 0:
        raise ValueError(
            f"An axis needs at least one cell, got length={length} and reference_length={reference_length}."
        )
    dtype = torch.promote_types(offset.dtype, torch.float32)
    stretch = torch.full((), length / reference_length, device=offset.device, dtype=dtype)
    width = width.to(dtype).clamp_min(NARROWEST)
    return stretched_kernels(offset[..., None], width[..., None], length, stretch)[..., 0, :, :]


def stretched_kernels(
    offset: Tensor, width: Tensor, length: int, stretch: Tensor, farthest: float = FARTHEST
) -> Tensor:
    """Axis kernels for a stretch in a tensor, so that nothing waits for the device; see `axis_kernels`.

    Args:
        offset: (..., components).
        width: (..., components).
        length: Cells along the axis.
        stretch: Broadcasts with (...): a scalar, or one per mixer, for example.
        farthest: Offsets are clamped to this distance.

    Returns:
        (..., components, length, length), in memory (..., length, components, length): there the components of a row
        lie side by side, as `timm_ssog.ops.eager` multiplies them.
    """
    if offset.dtype != torch.float64:
        offset, width = offset.float(), width.float()
    cells = torch.arange(length, device=offset.device, dtype=offset.dtype)
    displacement = (cells - cells[:, None])[:, None] / stretch.to(offset.dtype)[..., None, None, None]
    z = (displacement - offset.clamp(-farthest, farthest)[..., None, :, None]) / width[..., None, :, None]
    return torch.softmax(-0.5 * z * z, dim=-1).transpose(-3, -2)
