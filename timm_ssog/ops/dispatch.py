"""The public mixing operator: checks its arguments and picks the implementation that will run."""

import torch
from torch import Tensor

from timm_ssog.errors import require_choice
from timm_ssog.ops import eager, fused, naive
from timm_ssog.ops.capture import is_captured

IMPLEMENTATIONS = ("auto", "naive", "eager", "fused")


def separable_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, implementation: str = "auto") -> Tensor:
    """Mix values over a token grid with a sum of separable kernels: ``Y = sum_m rows[m] @ V @ columns[m].T`` per head.

    Differentiable in all three arguments; amplitudes belong in the row kernels. Runs in the dtype of the values, or
    in autocast's if that is on. Costs O(M N (H + W)) multiply-adds per channel (DESIGN.md, section 1).

    Args:
        values: (batch, height, width, heads, head_dim), floating point.
        row_kernels: (heads, components, height, height), indexed (query row, source row).
        column_kernels: (heads, components, width, width), indexed (query column, source column).
        implementation: ``"naive"`` (the definition, O(N^2)), ``"eager"`` (batched matrix products), ``"fused"`` (Triton
            kernels, on CUDA; with ``TRITON_INTERPRET=1`` on the CPU too) or ``"auto"``: fused on CUDA where it can
            run, else eager. Exported and traced models, forward-mode derivatives and those of ``torch.func`` use
            eager.

    Returns:
        (batch, height, width, heads, head_dim).

    Raises:
        ValueError: if shapes, dtypes or devices do not fit, the implementation is unknown, or it is ``"fused"`` and
            cannot run; the message says why.
    """
    _check(values, row_kernels, column_kernels)
    if torch.jit.is_scripting():
        return eager.stacked_mix(values, row_kernels, column_kernels)
    else:
        return _run(values, row_kernels, column_kernels, implementation)


def select_implementation(device: torch.device) -> tuple[str, str]:
    """The implementation that ``"auto"`` takes for float32 on a device, and why.

    Returns:
        Its name and the reason in words.
    """
    if device.type == "cpu":
        return "eager", "batched matrix products, the fastest path on the cpu"
    obstacle = fused.obstacle(device, torch.float32)
    if obstacle:
        return "eager", f"batched matrix products; not fused, because {obstacle}"
    return "fused", "Triton kernels, forward and backward"


@torch.jit.unused
def _run(values: Tensor, row_kernels: Tensor, column_kernels: Tensor, implementation: str) -> Tensor:
    require_choice("implementation", implementation, IMPLEMENTATIONS)
    device = values.device.type
    # in torch 2.7, asking whether a device type has autocast at all breaks the graph
    has_autocast = device != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(device)
    if values.dtype != torch.float64 and has_autocast and torch.is_autocast_enabled(device):
        values = values.to(torch.get_autocast_dtype(device))
    inputs = (values, row_kernels, column_kernels)
    if implementation == "naive":
        return naive.separable_mix(*inputs)
    if implementation == "fused":
        _require_fused(values)
        return fused.mix(*inputs)
    return fused.mix(*inputs) if implementation == "auto" and _prefers_fused(values) else eager.mix(*inputs)


def _prefers_fused(values: Tensor) -> bool:
    """Whether ``"auto"`` takes the fused kernels: on a GPU that can run them, for everything they support."""
    # a graph that leaves this process must not need this package, let alone a kernel for one type of device
    if values.device.type in ("cpu", "meta") or is_captured():
        return False
    return fused.logged_obstacle(values.device, values.dtype) is None


def _require_fused(values: Tensor) -> None:
    obstacle = fused.obstacle(values.device, values.dtype)
    if obstacle:
        raise ValueError(
            f"implementation='fused' cannot run on {values.dtype} values on {values.device}: {obstacle}. Use 'auto', "
            f"which takes the fused kernels where they can run."
        )


def _check(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> None:
    if values.dim() != 5 or not values.is_floating_point():
        raise ValueError(
            f"values must be a floating-point tensor (batch, height, width, heads, head_dim), got {values.dtype} of "
            f"shape {list(values.shape)}."
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
            f"{name} must be square, of the values' {axis} {length}, got shape {list(kernels.shape)}; build them for "
            f"this grid with timm_ssog.axis_kernels."
        )
    if not kernels.is_floating_point() or kernels.device != values.device:
        raise ValueError(
            f"{name} must have a floating-point dtype and be on the values' device {values.device}, got "
            f"{kernels.dtype} on {kernels.device}."
        )
