"""The separable mixing operator as batched matrix products, on any device and in any floating dtype.

Two forms. *Stacked* holds the components of a head in one matrix and needs two products,

    T[(i, m), (l, d)] = A[(i, m), k] V[k, (l, d)]          Y[i][j, d] = B[j, (m, l)] T[i][(m, l), d]

where the row order (i, m) makes every T[i] a ready (m, l) x d matrix: no copy between the products. *Dense* builds the
N x N operator of each head and needs one product. `prefers_dense` says which is cheaper; only small grids are dense.
"""

from typing import Any

import torch
from torch import Tensor

from timm_ssog.ops.capture import is_captured

# Weights of the cost rule, in tenths, from CPU timings that examples/lab/mixing_cost.py repeats and refits. A
# multiply-add of the stacked form takes as long as this many of the dense form (small products, an intermediate M times
# the input).
STACKED_COST = 25
# Building the dense operator takes as long as this many per component and entry, whatever the batch.
BUILD_COST = 250

# On the CPU the stacked form takes heads one by one, so that the M-fold intermediate of each stays in the cache. If the
# intermediate of all heads has at most this many bytes, one product for all is faster, for tiny models twice as fast.
CACHE_BYTES = 3 << 19


def prefers_dense(batch: int, height: int, width: int, head_dim: int, components: int, backward: bool = False) -> bool:
    """Whether the dense form is expected to beat the stacked one, by weighted multiply-adds per token and head.

    Forward, the dense form takes N columns and the stacked one M (H + W); backward (two dense products against five
    stacked ones of half the size each) 2 N against 2.5 M (H + W). A column is one entry of the batch and head. The rule
    uses integers, because torch.compile can't take symbolic sizes through floats within an autograd function.
    """
    tokens = height * width
    columns = batch * head_dim
    dense_halves, stacked_halves = (4, 5) if backward else (2, 2)
    dense = tokens * (10 * dense_halves * columns + 2 * BUILD_COST * components)
    return dense < stacked_halves * STACKED_COST * components * (height + width) * columns


def mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """Mix values, saving only the three inputs for the backward pass; shapes as in `timm_ssog.separable_mix`."""
    inputs = (values, row_kernels, column_kernels)
    if is_captured():
        return _exportable_mix(*inputs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Mix.apply(*inputs) if torch.compiler.is_compiling() else _DifferentiableMix.apply(*inputs)
    return _forward(*inputs)


def stacked_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The stacked form for all heads at once, in standard operators that scripting and export understand."""
    row_stack, column_stack = _stacks(row_kernels, column_kernels, values.dtype)
    return _stacked(_planes(values), row_stack, column_stack).permute(1, 2, 3, 0, 4)


def _exportable_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The stacked form with its row kernels copied for every image.

    If they were broadcast over a batch of one, the graph would hold for that batch only: to lay out the broadcast
    operand, torch asks whether the batch is one.
    """
    row_stack, column_stack = _stacks(row_kernels, column_kernels, values.dtype)
    row_stack = row_stack.repeat(1, values.shape[0], 1, 1)
    return _stacked(_planes(values), row_stack, column_stack).permute(1, 2, 3, 0, 4)


def stacked_mix_backward(
    grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `stacked_mix`, with both M-fold intermediates (of V and of the gradient) computed again."""
    row_stack, column_stack = _stacks(row_kernels, column_kernels, values.dtype)
    of_planes, of_rows, of_columns = _stacked_backward(_planes(grad), _planes(values), row_stack, column_stack)
    return of_planes.permute(1, 2, 3, 0, 4), _unstack(of_rows, row_kernels), _unstack(of_columns, column_kernels)


def dense_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The dense form: one product per head, with its N x N operator."""
    operator = _dense_operator(row_kernels, column_kernels).to(values.dtype)
    return _apply(operator, values)


def dense_mix_backward(
    grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `dense_mix`, with the operator built again."""
    height, width, heads = values.shape[1:4]
    operator = _dense_operator(row_kernels, column_kernels).to(values.dtype)
    grad_values = _apply(operator.mT, grad)
    grad_operator = torch.matmul(_to_columns(grad), _to_columns(values).mT)
    # (heads, rows i k, columns j l): the operator is a sum of M products of two such flattened kernels
    grad_operator = grad_operator.to(row_kernels.dtype).reshape(heads, height, width, height, width).transpose(2, 3)
    grad_operator = grad_operator.reshape(heads, height * height, width * width)
    grad_rows = torch.matmul(column_kernels.flatten(2), grad_operator.mT).reshape(row_kernels.shape)
    grad_columns = torch.matmul(row_kernels.flatten(2), grad_operator).reshape(column_kernels.shape)
    return grad_values, grad_rows, grad_columns


def _dense_operator(row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The sum of Kronecker products (heads, N, N), as one product of all components' flattened kernels."""
    heads, _, height, _ = row_kernels.shape
    width = column_kernels.shape[-1]
    operator = torch.matmul(row_kernels.flatten(2).mT, column_kernels.flatten(2))
    operator = operator.reshape(heads, height, height, width, width).transpose(2, 3)
    return operator.reshape(heads, height * width, height * width)


def _stacks(row_kernels: Tensor, column_kernels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrices A (heads, 1, height * components, height) and B (heads, 1, 1, width, components * width)."""
    heads, components, height, _ = row_kernels.shape
    width = column_kernels.shape[2]
    row_stack = row_kernels.to(dtype).transpose(1, 2).reshape(heads, 1, height * components, height)
    return row_stack, column_kernels.to(dtype).transpose(1, 2).reshape(heads, 1, 1, width, components * width)


def _unstack(stack: Tensor, like: Tensor) -> Tensor:
    heads, components, length, _ = like.shape
    return stack.reshape(heads, length, components, length).transpose(1, 2).to(like.dtype)


def _stacked(planes: Tensor, row_stack: Tensor, column_stack: Tensor) -> Tensor:
    """Mix planes (heads, batch, height, width, head_dim); FLOP counters count first operands of full shape."""
    heads, batch, height, width, head_dim = planes.shape
    row_stack = row_stack.expand(heads, batch, row_stack.shape[2], height)
    mixed = torch.matmul(row_stack, planes.reshape(heads, batch, height, width * head_dim))
    mixed = mixed.reshape(heads, batch * height, column_stack.shape[-1], head_dim)
    column_stack = column_stack[:, 0].expand(heads, batch * height, width, column_stack.shape[-1])
    return torch.matmul(column_stack, mixed).reshape(heads, batch, height, width, head_dim)


def _stacked_backward(
    grad: Tensor, planes: Tensor, row_stack: Tensor, column_stack: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `_stacked` with respect to the planes and both stacks."""
    heads, batch, height, width, head_dim = planes.shape
    rows = planes.reshape(heads, batch, height, width * head_dim)

    grad_mixed = torch.matmul(column_stack.mT, grad).reshape(heads, batch, row_stack.shape[-2], width * head_dim)
    grad_planes = torch.matmul(row_stack.mT, grad_mixed).reshape(planes.shape)
    grad_row_stack = torch.matmul(grad_mixed, rows.mT).sum(1)

    mixed = torch.matmul(row_stack, rows).reshape(heads, batch, height, column_stack.shape[-1], head_dim)
    grad_column_stacks = torch.matmul(grad, mixed.mT)
    return grad_planes, grad_row_stack, grad_column_stacks.reshape(heads, -1, width, column_stack.shape[-1]).sum(1)


def _stacked_by_head(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """Mix one head at a time: its M-fold intermediate stays in the cache, its kernels broadcast without a copy."""
    row_stack, column_stack = _stacks(row_kernels, column_kernels, values.dtype)
    heads = zip(_planes(values).split(1), row_stack.split(1), column_stack.split(1), strict=True)
    return torch.cat([_stacked(*head).permute(1, 2, 3, 0, 4) for head in heads], 3)


def _stacked_backward_by_head(
    grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (_planes(grad), _planes(values), *_stacks(row_kernels, column_kernels, values.dtype))
    heads = zip(*(tensor.split(1) for tensor in inputs), strict=True)
    of_planes, of_rows, of_columns = zip(*(_stacked_backward(*head) for head in heads), strict=True)
    return (
        torch.cat([planes.permute(1, 2, 3, 0, 4) for planes in of_planes], 3),
        _unstack(torch.cat(of_rows), row_kernels),
        _unstack(torch.cat(of_columns), column_kernels),
    )


def _apply(operator: Tensor, values: Tensor) -> Tensor:
    """Multiply the tokens of each head by its N x N matrix; on the CPU head by head, which reads them in place."""
    batch, height, width, heads, head_dim = values.shape
    if values.device.type == "cpu":
        tokens = values.reshape(batch, height * width, heads, head_dim).unbind(2)
        mixed = [torch.matmul(head, columns) for head, columns in zip(operator.unbind(), tokens, strict=True)]
        return torch.stack(mixed, 2).reshape(values.shape)
    columns = torch.matmul(operator, _to_columns(values))
    return columns.reshape(heads, height, width, batch, head_dim).permute(3, 1, 2, 0, 4)


def _planes(values: Tensor) -> Tensor:
    return values.permute(3, 0, 1, 2, 4)


def _to_columns(values: Tensor) -> Tensor:
    batch, height, width, heads, head_dim = values.shape
    return values.permute(3, 1, 2, 0, 4).reshape(heads, height * width, batch * head_dim)


def _is_dense(values: Tensor, row_kernels: Tensor, backward: bool) -> bool:
    batch, height, width, _, head_dim = values.shape
    return prefers_dense(batch, height, width, head_dim, row_kernels.shape[1], backward)


def _takes_heads_apart(values: Tensor, row_kernels: Tensor) -> bool:
    intermediate = values.numel() * row_kernels.shape[1] * values.element_size()
    return values.device.type == "cpu" and intermediate > CACHE_BYTES


def _forward(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    if _is_dense(values, row_kernels, backward=False):
        return dense_mix(values, row_kernels, column_kernels)
    form = _stacked_by_head if _takes_heads_apart(values, row_kernels) else stacked_mix
    return form(values, row_kernels, column_kernels)


def _backward(grad: Tensor, values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> tuple[Tensor, ...]:
    if _is_dense(values, row_kernels, backward=True):
        return dense_mix_backward(grad, values, row_kernels, column_kernels)
    form = _stacked_backward_by_head if _takes_heads_apart(values, row_kernels) else stacked_mix_backward
    return form(grad, values, row_kernels, column_kernels)


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
