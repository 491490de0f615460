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


def amplitude_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, weights: Tensor) -> Tensor:
    """The definition of `timm_ssog.ops.steered.amplitude_mix`, in one contraction."""
    return torch.einsum("bijhm,hmik,hmjl,bklhd->bijhd", weights, row_kernels, column_kernels, values)


def shift_mix(
    values: Tensor, offsets: list[Tensor], sigmas: list[Tensor], amplitude: Tensor, stretches: list[Tensor]
) -> Tensor:
    """The definition of `timm_ssog.ops.steered.shift_mix`: the kernels of all tokens, and one contraction."""
    axes = []
    for axis, (offset, sigma, stretch) in enumerate(zip(offsets, sigmas, stretches, strict=True)):
        cells = torch.arange(values.shape[1 + axis], dtype=values.dtype)
        of_query = cells.reshape([-1, 1, 1, 1, 1] if axis == 0 else [-1, 1, 1, 1])
        distance = ((cells - of_query) / stretch - offset[..., None]) / sigma[..., None]
        axes.append(torch.softmax(-0.5 * distance**2, -1))
    return torch.einsum("hm,bilhmk,bijhml,bklhd->bijhd", amplitude, axes[0], axes[1], values)
