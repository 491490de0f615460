"""Mixing whose kernels listen to the content: amplitudes per query, or offsets and widths per token.

With V the values of a head, i and j the row and the column of the query, k and l those of the source,

    amplitudes   T_m[i, l] = sum over k of A_m[i, k] V[k, l]
                 Y[i, j] = sum over m, l of w[i, j, m] B_m[j, l] T_m[i, l]
    shifts       T_m[i, l] = sum over k of A_m(i, l)[i, k] V[k, l]
                 Y[i, j] = sum over m, l of B_m(i, j)[j, l] T_m[i, l]

where A_m(i, l) is the row kernel that token (i, l) asks for, and B_m(i, j) the column kernel that token (i, j) asks
for: two products, as with fixed kernels. All tokens' kernels would fill N (H + W) floats per component, so they are
built for a few rows of a few images at a time, which stay in the cache, and built again in the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from timm_ssog.ops.capture import is_captured
from timm_ssog.ops.fused.support import transform_obstacle

# Floats of kernels along one axis that are built at a time, from CPU timings at 14 x 14 to 64 x 64 tokens (one level-2
# cache): of several images and heads, or of a few rows of one.
TOGETHER = 1 << 17
ROWS_TOGETHER = 1 << 18
ELSEWHERE = 1 << 26
"""The same on other devices, where it is the number of launches that counts."""

Mix = Callable[..., Tensor]


def amplitude_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, weights: Tensor) -> Tensor:
    """Mix values with fixed kernels whose components every query weighs for itself.

    Args:
        values: (batch, height, width, heads, head_dim).
        row_kernels: (heads, components, height, height), without amplitudes.
        column_kernels: (heads, components, width, width).
        weights: (batch, height, width, heads, components).

    Returns:
        (batch, height, width, heads, head_dim).
    """
    batch, height, width, heads, head_dim = values.shape
    tensors = [
        values.permute(3, 0, 1, 2, 4).reshape(heads * batch, height, width, head_dim),
        row_kernels.transpose(1, 2)[:, None].repeat(1, batch, 1, 1, 1).flatten(0, 1),
        column_kernels.transpose(1, 2)[:, None].repeat(1, batch, 1, 1, 1).flatten(0, 1),
        weights.permute(3, 0, 1, 2, 4).flatten(0, 1),
    ]
    if torch.jit.is_scripting():
        mixed = _weighted(tensors[0], tensors[1], tensors[2], tensors[3])
    else:
        mixed = _in_chunks(_weighted, tensors, [None, 1, None, 1], width * row_kernels.shape[1] * max(width, height))
    return mixed.reshape(heads, batch, height, width, head_dim).permute(1, 2, 3, 0, 4)


def shift_mix(
    values: Tensor, offsets: list[Tensor], sigmas: list[Tensor], amplitude: Tensor, stretches: list[Tensor]
) -> Tensor:
    """Mix values with Gaussians whose offsets and widths every token chooses.

    Args:
        values: (batch, height, width, heads, head_dim).
        offsets: Along y and x, (batch, height, width, heads, components), in cells of the reference grid.
        sigmas: As the offsets, standard deviations in the same cells.
        amplitude: (heads, components).
        stretches: Along y and x, cells of the grid over cells of the reference grid, scalars.

    Returns:
        (batch, height, width, heads, head_dim).
    """
    batch, height, width, heads, head_dim = values.shape
    # the logit of a source at a displacement D is -(slope D - start)^2; here the columns of the row kernels come first
    slopes = [0.5**0.5 / (sigma * stretch) for sigma, stretch in zip(sigmas, stretches)]  # noqa: B905  TorchScript
    starts = [0.5**0.5 * offset / sigma for offset, sigma in zip(offsets, sigmas)]  # noqa: B905
    rows, columns = torch.arange(height, device=values.device), torch.arange(width, device=values.device)
    tensors = [
        values.permute(3, 0, 2, 1, 4).reshape(heads * batch, width, height, head_dim),
        slopes[0].permute(3, 0, 2, 1, 4).flatten(0, 1),
        starts[0].permute(3, 0, 2, 1, 4).flatten(0, 1),
        slopes[1].permute(3, 0, 1, 2, 4).flatten(0, 1),
        starts[1].permute(3, 0, 1, 2, 4).flatten(0, 1),
        amplitude[:, None].repeat(1, batch, 1).flatten(0, 1)[:, None, None],
        (rows - rows[:, None]).to(slopes[0].dtype)[None],
        (columns - columns[:, None]).to(slopes[0].dtype)[None],
    ]
    if torch.jit.is_scripting():
        mixed = _shifted(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6], tensors[7])
    else:
        floats_per_row = width * amplitude.shape[1] * max(width, height)
        mixed = _in_chunks(_shifted, tensors, [None, 2, 2, 1, 1, None, 1, None], floats_per_row)
    return mixed.reshape(heads, batch, height, width, head_dim).permute(1, 2, 3, 0, 4)


def _weighted(planes: Tensor, row_kernels: Tensor, column_kernels: Tensor, weights: Tensor) -> Tensor:
    """Planes (planes, height, width, head_dim), one per head and image, to the same for some rows.

    Args:
        planes: The values.
        row_kernels: (planes, rows, components, height).
        column_kernels: (planes, width, components, width).
        weights: (planes, rows, width, components).
    """
    count, rows, width, components = weights.shape
    mixed = torch.matmul(row_kernels.to(planes.dtype).flatten(1, 2), planes.flatten(2, 3))
    mixed = mixed.reshape(count, rows, components * width, planes.shape[3])
    weighted = (column_kernels[:, None] * weights[..., None]).to(planes.dtype)
    return torch.matmul(weighted.flatten(3, 4), mixed)


def _shifted(
    planes: Tensor,
    row_slope: Tensor,
    row_start: Tensor,
    column_slope: Tensor,
    column_start: Tensor,
    amplitude: Tensor,
    row_displacement: Tensor,
    column_displacement: Tensor,
) -> Tensor:
    """Planes (planes, width, height, head_dim), one per head and image, to (planes, rows, width, head_dim).

    Args:
        planes: The values, columns first.
        row_slope: (planes, width, rows, components), as is ``row_start``.
        row_start: Of the row kernels.
        column_slope: (planes, rows, width, components), as is ``column_start``.
        column_start: Of the column kernels.
        amplitude: (planes, 1, 1, components).
        row_displacement: (1, rows, height).
        column_displacement: (1, width, width).
    """
    count, width, rows, components = row_slope.shape
    row_kernels = _gaussians(row_slope, row_start, row_displacement)
    row_kernels = (row_kernels * amplitude[..., None]).to(planes.dtype)
    column_kernels = _gaussians(column_slope, column_start, column_displacement).to(planes.dtype)
    mixed = torch.matmul(row_kernels.flatten(2, 3), planes)
    mixed = mixed.reshape(count, width, rows, components, planes.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return torch.matmul(column_kernels.flatten(3, 4), mixed)


def _gaussians(slope: Tensor, start: Tensor, displacement: Tensor) -> Tensor:
    """Kernels (..., cells, components, sources), given slopes (..., cells, components) and (..., cells, sources)."""
    slope, start = slope.contiguous()[..., None], start.contiguous()[..., None]  # where they are small
    z = torch.addcmul(-start, displacement[..., None, :], slope)
    return torch.softmax(torch.addcmul(z.new_zeros(()), z, z, value=-1.0), -1)


@torch.jit.unused
def _in_chunks(mix: Mix, tensors: list[Tensor], rows_in: Sequence[int | None], floats_per_row: int) -> Tensor:
    """Mix a few planes, or a few rows of one, at a time, and keep only the inputs for the backward pass.

    Args:
        mix: The function.
        tensors: Its arguments, each for all planes or with a first dimension of one.
        rows_in: In which of their dimensions the rows of the output lie; None where all of them need all of it.
        floats_per_row: Size of the kernels of one row.
    """
    if is_captured():
        return mix(*tensors)
    if torch.compiler.is_compiling():  # sizes may be symbols
        return _recomputed(mix, *tensors)
    rows = next(tensor.shape[dim] for tensor, dim in zip(tensors, rows_in, strict=True) if dim is not None)
    together, rows_together = (TOGETHER, ROWS_TOGETHER) if tensors[0].device.type == "cpu" else (ELSEWHERE, ELSEWHERE)
    planes = max(1, together // max(1, rows * floats_per_row))
    step = rows if planes > 1 else max(1, rows_together // max(1, floats_per_row))
    whole = []
    for some in _split(tensors, [0] * len(tensors), planes):
        chunks = [_recomputed(mix, *chunk) for chunk in _split(some, rows_in, step)]
        whole.append(torch.cat(chunks, 1) if len(chunks) > 1 else chunks[0])
    return torch.cat(whole) if len(whole) > 1 else whole[0]


def _split(tensors: Sequence[Tensor], dims: Sequence[int | None], step: int) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of that many entries along a dimension of each tensor; all of those that have only one, or None."""
    sizes = [1 if dim is None else tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
    if max(sizes) <= step:
        return iter([tuple(tensors)])
    pieces = [
        repeat(tensor) if dim is None or size == 1 else tensor.split(step, dim)
        for tensor, dim, size in zip(tensors, dims, sizes, strict=True)
    ]
    return zip(*pieces, strict=False)


def _recomputed(mix: Mix, *tensors: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return mix(*tensors)
    if not torch.compiler.is_compiling() and transform_obstacle():
        return mix(*tensors)  # torch.func's derivatives accept no checkpoint
    return checkpoint(mix, *tensors, use_reentrant=False, preserve_rng_state=False)
