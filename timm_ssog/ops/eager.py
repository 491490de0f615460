"""The separable mixing operator as batched matrix products, on any device and in any floating dtype.

Two forms. *Stacked* holds the components of a head in one matrix and needs two products,

    T[(i, m), (l, d)] = A[(i, m), k] V[k, (l, d)]          Y[i][j, d] = B[j, (m, l)] T[i][(m, l), d]

where the row order (i, m) makes every T[i] a ready (m, l) x d matrix: no copy between the products. *Dense* builds the
N x N operator of each head and needs one. `prefers_dense` says which is cheaper; only small grids are dense.
"""

from typing import Any

import torch
from torch import Tensor

from timm_ssog.ops.naive import dense_operator

# Weights of the cost rule, fitted by examples/mixing_cost.py: a multiply-add of the stacked form takes as long as this
# many of the dense form (small products, an intermediate M times the input) ...
STACKED_COST = 2.0
# ... and so many per component and entry go into building the dense operator, whatever the batch.
BUILD_COST = 12.0


def prefers_dense(batch: int, height: int, width: int, head_dim: int, components: int, backward: bool = False) -> bool:
    """Whether the dense form is expected to beat the stacked one, by weighted multiply-adds per token and head.

    Forward, the dense form takes N columns and the stacked one M (H + W); backward (two dense products against five
    stacked ones of half the size each) 2 N against 2.5 M (H + W). A column is one entry of the batch and head.
    """
    tokens = height * width
    columns = batch * head_dim
    dense_products, stacked_products = (2.0, 2.5) if backward else (1.0, 1.0)
    dense = tokens * (dense_products * columns + BUILD_COST * components)
    return dense < stacked_products * STACKED_COST * components * (height + width) * columns


def mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """Mix values, saving for the backward pass nothing but the three inputs; shapes as in `timm_ssog.separable_mix`."""
    inputs = (values, row_kernels, column_kernels)
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return stacked_mix(*inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Mix.apply(*inputs) if torch.compiler.is_compiling() else _DifferentiableMix.apply(*inputs)
    return _forward(*inputs)


def stacked_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The stacked form for all heads at once, in plain operators that scripting and export understand."""
    batch, height, width, heads, head_dim = values.shape
    planes = _planes(values).reshape(heads, batch, height, width * head_dim)
    mixed = torch.matmul(_row_stack(row_kernels, values.dtype), planes)
    mixed = mixed.reshape(heads, batch, height, row_kernels.shape[1] * width, head_dim)
    return torch.matmul(_column_stack(column_kernels, values.dtype), mixed).permute(1, 2, 3, 0, 4)


def stacked_mix_backward(
    grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `stacked_mix`, with both M-fold intermediates (of V and of the gradient) made anew."""
    batch, height, width, heads, head_dim = values.shape
    components = row_kernels.shape[1]
    row_stack, column_stack = _row_stack(row_kernels, values.dtype), _column_stack(column_kernels, values.dtype)
    planes = _planes(values).reshape(heads, batch, height, width * head_dim)
    grad_planes = _planes(grad)

    grad_mixed = torch.matmul(column_stack.mT, grad_planes)
    grad_mixed = grad_mixed.reshape(heads, batch, height * components, width * head_dim)
    grad_values = torch.matmul(row_stack.mT, grad_mixed).reshape(heads, batch, height, width, head_dim)
    grad_rows = torch.matmul(grad_mixed, planes.mT).sum(1)

    mixed = torch.matmul(row_stack, planes).reshape(heads, batch * height, components * width, head_dim)
    grad_rows_of_columns = grad_planes.permute(0, 3, 1, 2, 4).reshape(heads, width, -1)
    grad_columns = torch.matmul(grad_rows_of_columns, mixed.transpose(1, 2).reshape(heads, components * width, -1).mT)
    return (
        grad_values.permute(1, 2, 3, 0, 4),
        grad_rows.reshape(heads, height, components, height).transpose(1, 2).to(row_kernels.dtype),
        grad_columns.reshape(heads, width, components, width).transpose(1, 2).to(column_kernels.dtype),
    )


def dense_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The dense form: one product a head with its N x N operator."""
    operator = dense_operator(row_kernels, column_kernels).to(values.dtype)
    return _from_columns(torch.matmul(operator, _to_columns(values)), values)


def dense_mix_backward(
    grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `dense_mix`, with the operator built anew."""
    height, width, heads = values.shape[1:4]
    operator = dense_operator(row_kernels, column_kernels).to(values.dtype)
    grad_columns = _to_columns(grad)
    grad_values = _from_columns(torch.matmul(operator.mT, grad_columns), values)
    grad_operator = torch.matmul(grad_columns, _to_columns(values).mT).to(row_kernels.dtype)
    # (heads, rows i k, columns j l): the operator is a sum of M products of two such flattened kernels
    grad_operator = grad_operator.reshape(heads, height, width, height, width).transpose(2, 3)
    grad_operator = grad_operator.reshape(heads, height * height, width * width)
    grad_rows = torch.matmul(column_kernels.flatten(2), grad_operator.mT).reshape(row_kernels.shape)
    grad_columns = torch.matmul(row_kernels.flatten(2), grad_operator).reshape(column_kernels.shape)
    return grad_values, grad_rows, grad_columns


def _row_stack(row_kernels: Tensor, dtype: torch.dtype) -> Tensor:
    heads, components, height, _ = row_kernels.shape
    return row_kernels.to(dtype).transpose(1, 2).reshape(heads, 1, height * components, height)


def _column_stack(column_kernels: Tensor, dtype: torch.dtype) -> Tensor:
    heads, components, width, _ = column_kernels.shape
    return column_kernels.to(dtype).transpose(1, 2).reshape(heads, 1, 1, width, components * width)


def _planes(values: Tensor) -> Tensor:
    return values.permute(3, 0, 1, 2, 4)


def _to_columns(values: Tensor) -> Tensor:
    batch, height, width, heads, head_dim = values.shape
    return values.permute(3, 1, 2, 0, 4).reshape(heads, height * width, batch * head_dim)


def _from_columns(columns: Tensor, like: Tensor) -> Tensor:
    batch, height, width, heads, head_dim = like.shape
    return columns.reshape(heads, height, width, batch, head_dim).permute(3, 1, 2, 0, 4)


def _is_dense(values: Tensor, row_kernels: Tensor, backward: bool) -> bool:
    batch, height, width, _, head_dim = values.shape
    return prefers_dense(batch, height, width, head_dim, row_kernels.shape[1], backward)


def _head_groups(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Values (heads in dimension 3) and kernels (heads in dimension 0), a head at a time on the CPU, else all together.

    On the CPU the M-fold intermediate of one head stays in the cache and its kernels broadcast without a copy;
    elsewhere few large launches win.
    """
    if tensors[0].device.type != "cpu":
        return [tensors]
    split = [tensor.split(1, 3 if tensor.dim() == 5 else 0) for tensor in tensors]
    return list(zip(*split, strict=True))


def _forward(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    if _is_dense(values, row_kernels, backward=False):
        return dense_mix(values, row_kernels, column_kernels)
    return torch.cat([stacked_mix(*group) for group in _head_groups(values, row_kernels, column_kernels)], 3)


def _backward(grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> tuple[Tensor, ...]:
    if _is_dense(values, row_kernels, backward=True):
        return dense_mix_backward(grad, values, row_kernels, column_kernels)
    groups = _head_groups(grad, values, row_kernels, column_kernels)
    of_values, of_rows, of_columns = zip(*(stacked_mix_backward(*group) for group in groups), strict=True)
    return torch.cat(of_values, 3), torch.cat(of_rows), torch.cat(of_columns)


class _Mix(torch.autograd.Function):
    """Saves the three inputs only: plain autograd would keep the M-fold intermediate of every block."""

    @staticmethod
    def forward(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
        return _forward(values, row_kernels, column_kernels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return _backward(grad, *ctx.saved_tensors)


class _DifferentiableMix(_Mix):
    """The same with vmap and forward-mode rules, which torch.compile does not accept on a custom function."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        # linear in each of its arguments: one term for each that has a tangent
        inputs = ctx.saved_tensors
        terms = [
            _forward(*inputs[:index], tangent, *inputs[index + 1 :])
            for index, tangent in enumerate(tangents)
            if tangent is not None
        ]
        return sum(terms[1:], terms[0])
