"""Axis kernels: one Gaussian along one axis of the token grid, as a row-stochastic matrix."""

import torch
from torch import Tensor


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
        offset: (...) displacement of the component's centre, in cells of the reference grid.
        width: (...) standard deviation, in cells of the reference grid, positive.
        length: Cells along the axis.
        reference_length: Cells along the axis of the reference grid; ``length`` itself if omitted, so no stretch.

    Returns:
        (..., length, length), each row non-negative and summing to one.

    Raises:
        ValueError: if the shapes differ or a length is below one.
    """
    if offset.shape != width.shape:
        raise ValueError(f"offset and width must have one shape, got {tuple(offset.shape)} and {tuple(width.shape)}.")
    reference_length = length if reference_length is None else reference_length
    if length < 1 or not reference_length > 0:
        raise ValueError(
            f"An axis needs at least one cell, got length={length} and reference_length={reference_length}."
        )
    dtype = torch.promote_types(offset.dtype, torch.float32)
    centre, spread = (tensor.to(dtype)[..., None, None] / reference_length for tensor in (offset, width))
    return gaussian_rows(centre, spread, length, length)


def gaussian_rows(centre: Tensor, spread: Tensor, length: int, unit: int) -> Tensor:
    """Axis kernels whose lengths are measured in units of ``unit`` cells; see `axis_kernels`.

    Args:
        centre: (..., 1, 1) displacement of the component's centre, float32 or wider.
        spread: (..., 1, 1) standard deviation, positive.
        length: Cells along the axis.
        unit: Cells in the unit that both are measured in: 1, or ``length`` for shares of the axis.

    Returns:
        (..., length, length), each row non-negative and summing to one.
    """
    cells = torch.arange(length, device=centre.device, dtype=centre.dtype)
    z = ((cells - cells[:, None]) / unit - centre) / spread
    return torch.softmax(z * z * -0.5, dim=-1)
