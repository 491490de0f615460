"""The separable mixing operator as Triton kernels, forward and backward: one pass over the values, no M-fold copy.

`support` says where it runs; `operators` registers it with torch; `tables` holds every static choice, and `tuning`
measures alternatives on request; only `kernels` imports Triton.
"""

import functools
import logging

import torch
from torch import Tensor

from timm_ssog.ops.fused import support

_log = logging.getLogger(__name__)


@torch.compiler.assume_constant_result
def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors on a device cannot take the fused path now, or None if they can."""
    reason = support.device_obstacle(device, dtype) or support.transform_obstacle()
    if reason is None:
        # not earlier: registering operators takes longer than importing the rest of this package
        import timm_ssog.ops.fused.operators  # noqa: F401
    return reason


@torch.compiler.assume_constant_result
def logged_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for a choice left to this package: a reason is logged the first time it decides."""
    reason = obstacle(device, dtype)
    if reason:
        _log_once(reason)
    return reason


def forget() -> None:
    """Forget which devices can run the kernels and which reasons were logged; the next call finds out again."""
    support.forget()
    _log_once.cache_clear()


def mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    """The mix, if there is no `obstacle`, differentiable to any order; shapes as in `timm_ssog.separable_mix`."""
    return torch.ops.timm_ssog.fused_mix(values, row_kernels, column_kernels)


@functools.cache
def _log_once(reason: str) -> None:
    _log.warning("separable_mix runs as batched matrix products, not in the fused kernel: %s.", reason)
