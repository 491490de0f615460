"""The definition of the separable mixing operator: the oracle that every faster path is compared with."""

import torch
from torch import Tensor


def dense_operator(row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The N x N matrix of each head, ``sum_m kron(row_kernels[m], column_kernels[m])``.

    Args:
        row_kernels: (heads, components, height, height), amplitudes folded in.
        column_kernels: (heads, components, width, width).

    Returns:
        (heads, height * width, height * width), tokens in row-major order.
    """
    heads, _, height, _ = row_kernels.shape
    tokens = height * column_kernels.shape[-1]
    return torch.einsum("hmik,hmjl->hijkl", row_kernels, column_kernels).reshape(heads, tokens, tokens)


def separable_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """Mix values with the dense operator of each head, in one contraction over all N tokens.

    Shapes as in `timm_ssog.separable_mix`. Costs O(N^2): for tests and small grids.
    """
    operator = dense_operator(row_kernels, column_kernels).to(values.dtype)
    tokens = values.flatten(1, 2)
    return torch.einsum("hnk,bkhd->bnhd", operator, tokens).reshape(values.shape)
