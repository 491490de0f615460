"""The two custom operators of the fused path, differentiable to any order, and how they launch their kernels.

The mix is trilinear, and so closed under differentiation: its derivative with respect to the values is a mix with
transposed kernels; those with respect to the kernels are one operator, used for columns and, with the grid transposed,
for rows; and the derivatives of that operator are mixes and the operator itself. The layouts are those of the
projections around the mixer: strided values are read in place, the output is contiguous.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from timm_ssog.ops.fused import support, tables, tuning

PROGRAMS = 528
"""About how many programs share a kernel gradient: four on each of 132 multiprocessors. The same for all devices, so
that the split, and with it the rounding, does not depend on the card."""

CHUNK_BYTES = 32 << 20
"""Bytes of the M-fold mix that the products hold at a time: it stays in the second-level cache of a large card."""


@torch.library.custom_op("timm_ssog::fused_mix", mutates_args=())
def fused_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """``Y = sum_m rows[m] V columns[m]^T`` per head, in the dtype of the values; shapes as in `separable_mix`."""
    _require_support(values)
    output = values.new_empty(values.shape)
    if output.numel() == 0:
        return output
    values = _readable(values)
    rows = _packed(row_kernels, values.dtype)
    columns = _packed(column_kernels.mT, values.dtype)

    def launch(tile: tables.Tile) -> Tensor:
        _launch_mix(values, rows, columns, output, tile)
        return output

    problem = _problem(values, rows)
    return tuning.fastest("mix", problem, tables.mix_tile(*problem), launch, values)


@torch.library.custom_op("timm_ssog::fused_column_gradient", mutates_args=())
def fused_column_gradient(grad: Tensor, values: Tensor, row_kernels: Tensor) -> Tensor:
    """Gradient of the column kernels, ``sum G[i, j, c] rows[m, i, k] V[k, l, c]`` over images and channels.

    Deterministic: no atomic addition, and a split of the sum that depends on shapes only.

    Args:
        grad: (batch, height, width, heads, head_dim), the incoming gradient.
        values: The same shape.
        row_kernels: (heads, components, height, height).

    Returns:
        (heads, components, width, width), float32.
    """
    _require_support(values)
    width = values.shape[2]
    if values.numel() == 0:
        return values.new_zeros((*row_kernels.shape[:2], width, width), dtype=torch.float32)
    grad, values = _readable(grad.to(values.dtype)), _readable(values)
    rows = _packed(row_kernels, values.dtype)

    def launch(tile: tables.Tile | None) -> Tensor:
        if tile is None:
            return _column_gradient_by_products(grad, values, row_kernels)
        return _launch_column_gradient(grad, values, rows, tile)

    problem = _problem(values, rows)
    return tuning.fastest("gradient", problem, tables.gradient_tile(*problem), launch, values)


def _mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    return torch.ops.timm_ssog.fused_mix(values, row_kernels, column_kernels)


def _column_gradient(grad: Tensor, values: Tensor, row_kernels: Tensor, like: Tensor) -> Tensor:
    return torch.ops.timm_ssog.fused_column_gradient(grad, values, row_kernels).to(like.dtype)


def _row_gradient(grad: Tensor, values: Tensor, column_kernels: Tensor, like: Tensor) -> Tensor:
    return _column_gradient(grad.transpose(1, 2), values.transpose(1, 2), column_kernels, like)


@fused_mix.register_fake
def _(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    return values.new_empty(values.shape)


@fused_column_gradient.register_fake
def _(grad: Tensor, values: Tensor, row_kernels: Tensor) -> Tensor:
    width = values.shape[2]
    return values.new_empty((row_kernels.shape[0], row_kernels.shape[1], width, width), dtype=torch.float32)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mix_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, rows, columns = ctx.saved_tensors
    by_values, by_rows, by_columns = ctx.needs_input_grad
    return (
        _mix(grad, rows.mT, columns.mT) if by_values else None,
        _row_gradient(grad, values, columns, like=rows) if by_rows else None,
        _column_gradient(grad, values, rows, like=columns) if by_columns else None,
    )


def _column_gradient_backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    grad, values, rows = ctx.saved_tensors
    by_grad, by_values, by_rows = ctx.needs_input_grad
    return (
        _mix(values, rows, cotangent) if by_grad else None,
        _mix(grad, rows.mT, cotangent.mT) if by_values else None,
        _row_gradient(grad, values, cotangent, like=rows) if by_rows else None,
    )


fused_mix.register_autograd(_mix_backward, setup_context=_save_inputs)
fused_column_gradient.register_autograd(_column_gradient_backward, setup_context=_save_inputs)


@fused_mix.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], values: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, int]:
    if in_dims[1] is None and in_dims[2] is None:
        copies = values.movedim(in_dims[0], 0)  # type: ignore[arg-type]  (one of the three is mapped)
        return _mix(copies.flatten(0, 1), rows, columns).unflatten(0, copies.shape[:2]), 0
    values, rows, columns = _as_heads(info.batch_size, in_dims, (values, rows, columns), (-2, 0, 0))
    return _mix(values, rows, columns).unflatten(3, (info.batch_size, -1)), 3


@fused_column_gradient.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], grad: Tensor, values: Tensor, rows: Tensor) -> tuple[Tensor, int]:
    grad, values, rows = _as_heads(info.batch_size, in_dims, (grad, values, rows), (-2, -2, 0))
    output = torch.ops.timm_ssog.fused_column_gradient(grad, values, rows)
    return output.unflatten(0, (info.batch_size, -1)), 0


def _as_heads(
    copies: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor], head_axes: Sequence[int]
) -> list[Tensor]:
    """The copies that vmap asks for as additional heads, in the tensors' head axes."""
    folded = []
    for dim, tensor, axis in zip(in_dims, tensors, head_axes, strict=True):
        mapped = tensor.expand(copies, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        axis = axis % (mapped.dim() - 1)
        folded.append(mapped.movedim(0, axis).flatten(axis, axis + 1))
    return folded


@register_flop_formula(torch.ops.timm_ssog.fused_mix)
def _(values: Sequence[int], rows: Sequence[int], *_: Any, **__: Any) -> int:
    return _flops(values, rows)


@register_flop_formula(torch.ops.timm_ssog.fused_column_gradient)
def _(grad: Sequence[int], values: Sequence[int], rows: Sequence[int], *_: Any, **__: Any) -> int:
    return _flops(values, rows)


def _flops(values: Sequence[int], rows: Sequence[int]) -> int:
    """2 M N (H + W) C for every image: two products, each with an M-fold operand or result."""
    _, height, width, _, _ = values
    return 2 * rows[1] * math.prod(values) * (height + width)


def _readable(values: Tensor) -> Tensor:
    """The tensor itself, or a copy if its channels are not adjacent, the only layout that the kernels cannot read."""
    return values if values.stride(-1) == 1 else values.contiguous()


def _packed(kernels: Tensor, dtype: torch.dtype) -> Tensor:
    """Kernels as a contiguous operand, the last axis padded with zeros to a multiple of 16, for aligned loads."""
    length = kernels.shape[-1]
    pitch = -(-length // 16) * 16
    if pitch == length and kernels.dtype == dtype and kernels.is_contiguous():
        return kernels
    make = kernels.new_empty if pitch == length else kernels.new_zeros
    packed = make((*kernels.shape[:-1], pitch), dtype=dtype)
    packed[..., :length].copy_(kernels)
    return packed


def _problem(values: Tensor, rows: Tensor) -> tuple[int, int, int, int, int]:
    """The keys of the tables: bytes per item, longest axis, components, head_dim, shared memory."""
    _, height, width, _, head_dim = values.shape
    available = support.shared_memory(values.device)
    return values.element_size(), max(height, width), rows.shape[1], head_dim, available


def _is_wide(*tensors: Tensor) -> bool:
    """Whether an offset within an image, or within the kernels of a head, needs more than 31 bits."""
    spans = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        for tensor in tensors
    )
    return max(spans) >= 1 << 31


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the tensors' device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _require_support(values: Tensor) -> None:
    obstacle = support.device_obstacle(values.device, values.dtype)
    if obstacle:
        raise ValueError(f"The fused kernels cannot run: {obstacle}. Use timm_ssog.separable_mix, which falls back.")


def _launch_mix(values: Tensor, rows: Tensor, columns: Tensor, output: Tensor, tile: tables.Tile) -> None:
    from timm_ssog.ops.fused.kernels import mix_kernel

    batch, height, width, heads, head_dim = values.shape
    blocks = -(-head_dim // tile.channels) * -(-height // tile.rows) * -(-width // tile.extent)
    with _on(values.device):
        mix_kernel[(batch * heads * blocks,)](
            values,
            rows,
            columns,
            output,
            *values.stride()[:4],
            height,
            width,
            heads,
            head_dim,
            rows.shape[1],
            rows.shape[3],
            columns.shape[3],
            GROUP=tile.group,
            ROWS=tile.rows,
            CHUNK=tile.chunk,
            CHANNELS=tile.channels,
            EXTENT=tile.extent,
            DEPTH=tile.depth,
            WHOLE=max(height, width) <= tile.depth,
            WIDE=_is_wide(values, output, rows, columns),
            PRECISION=support.precision(values.dtype),
            UPCAST=support.INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _launch_column_gradient(grad: Tensor, values: Tensor, rows: Tensor, tile: tables.Tile) -> Tensor:
    from timm_ssog.ops.fused.kernels import column_gradient_kernel

    batch, height, width, heads, head_dim = values.shape
    components = rows.shape[1]
    owners = heads * -(-components // tile.group) * -(-width // tile.chunk)
    work = batch * -(-head_dim // tile.channels) * -(-height // tile.rows)
    splits = min(work, -(-PROGRAMS // owners))
    partial = values.new_empty((splits, heads, components, width, width), dtype=torch.float32)
    with _on(values.device):
        column_gradient_kernel[(splits * owners,)](
            grad,
            values,
            rows,
            partial,
            *grad.stride()[:4],
            *values.stride()[:4],
            batch,
            height,
            width,
            heads,
            head_dim,
            components,
            rows.shape[3],
            splits,
            GROUP=tile.group,
            ROWS=tile.rows,
            CHUNK=tile.chunk,
            CHANNELS=tile.channels,
            EXTENT=tile.extent,
            WIDE=_is_wide(grad, values, rows),
            PRECISION=support.precision(values.dtype),
            UPCAST=support.INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return partial.sum(0)


def _column_gradient_by_products(grad: Tensor, values: Tensor, row_kernels: Tensor) -> Tensor:
    """The gradient as two batched matrix products for a few images at a time, summed in float32.

    T[i, (m, l), (b, c)] of a source row's products is, with its rows ordered (i, m), already the second operand.
    """
    _, height, width, heads, _ = values.shape
    components = row_kernels.shape[1]
    stack = row_kernels.to(values.dtype).transpose(1, 2).reshape(heads, height * components, height)
    image_bytes = components * values[0].numel() * values.element_size()
    images = max(1, CHUNK_BYTES // image_bytes)
    total = values.new_zeros((heads, width, components * width), dtype=torch.float32)
    # autocast would round float32 products if backward is called under it
    with torch.autocast(values.device.type, enabled=False):
        for some_values, some_grad in zip(values.split(images), grad.split(images), strict=True):
            sources = some_values.permute(3, 1, 2, 0, 4).reshape(heads, height, -1)
            mixed = torch.matmul(stack, sources).reshape(heads, height, components * width, -1)
            queries = some_grad.permute(3, 1, 2, 0, 4).reshape(heads, height, width, -1)
            total += torch.matmul(queries, mixed.mT).sum(1, dtype=torch.float32)
    return total.reshape(heads, width, components, width).transpose(1, 2).contiguous()
