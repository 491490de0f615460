"""The public mixing operator: checks its arguments and picks the implementation that will run."""

import torch
from torch import Tensor

from timm_ssog.errors import require_choice
from timm_ssog.ops import eager, naive

IMPLEMENTATIONS = ("auto", "naive", "eager")


def separable_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, implementation: str = "auto") -> Tensor:
    """Mix values over a token grid with a sum of separable kernels: ``Y = sum_m rows[m] @ V @ columns[m].T`` per head.

    Differentiable in all three arguments; amplitudes belong into the row kernels. Runs in the dtype of the values, or
    in autocast's where that is on. Cost O(M N (H + W)) multiply-adds per channel (DESIGN.md, section 1).

    Args:
        values: (batch, height, width, heads, head_dim), floating.
        row_kernels: (heads, components, height, height), indexed (query row, source row).
        column_kernels: (heads, components, width, width), indexed (query column, source column).
        implementation: ``"auto"``, ``"naive"`` (the definition, O(N^2)) or ``"eager"`` (batched matrix products).

    Returns:
        (batch, height, width, heads, head_dim).

    Raises:
        ValueError: if shapes, dtypes or devices do not fit, or the implementation is unknown.
    """
    _check(values, row_kernels, column_kernels)
    if torch.jit.is_scripting():
        return eager.stacked_mix(values, row_kernels, column_kernels)
    else:
        return _run(values, row_kernels, column_kernels, implementation)


def select_implementation(device: torch.device) -> tuple[str, str]:
    """The implementation that ``"auto"`` takes on a device, and why.

    Returns:
        Its name and the reason in words.
    """
    return "eager", f"batched matrix products run on every device; no fused kernel is built for {device.type!r} yet"


@torch.jit.unused
def _run(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, implementation: str) -> Tensor:
    require_choice("implementation", implementation, IMPLEMENTATIONS)
    device = values.device.type
    if values.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        values = values.to(torch.get_autocast_dtype(device))
    if implementation == "naive":
        return naive.separable_mix(values, row_kernels, column_kernels)
    return eager.mix(values, row_kernels, column_kernels)


def _check(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> None:
    if values.dim() != 5 or not values.is_floating_point():
        raise ValueError(
            f"values must be a floating tensor (batch, height, width, heads, head_dim), got {values.dtype} of shape "
            f"{list(values.shape)}."
        )
    _check_kernels("row_kernels", "height", row_kernels, values, values.shape[1])
    _check_kernels("column_kernels", "width", column_kernels, values, values.shape[2])
    if row_kernels.shape[1] != column_kernels.shape[1]:
        raise ValueError(
            f"row_kernels and column_kernels must have the same number of components, got {row_kernels.shape[1]} and "
            f"{column_kernels.shape[1]}."
        )


def _check_kernels(name: str, axis: str, kernels: Tensor, values: Tensor, length: int) -> None:
    if kernels.dim() != 4 or kernels.shape[0] != values.shape[3] or kernels.shape[1] < 1:
        raise ValueError(
            f"{name} must be (heads, components, {axis}, {axis}) with {values.shape[3]} heads and at least one "
            f"component, got shape {list(kernels.shape)}."
        )
    if kernels.shape[2] != length or kernels.shape[3] != length:
        raise ValueError(
            f"{name} must be square of the values' {axis} {length}, got shape {list(kernels.shape)}; build them for "
            f"this grid with timm_ssog.axis_kernels."
        )
    if not kernels.is_floating_point() or kernels.device != values.device:
        raise ValueError(
            f"{name} must be floating and on the values' device {values.device}, got {kernels.dtype} on "
            f"{kernels.device}."
        )
