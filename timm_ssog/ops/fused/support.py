"""Where the fused path can run, found without importing Triton where it cannot."""

import functools
import importlib.util
import os

import torch
from torch.autograd import forward_ad

from timm_ssog.ops.fused import tables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU too; read once, as Triton itself does."""

SWITCH = "TIMM_SSOG_FUSED"
"""Environment variable that turns the fused path off where it is ``0``, ``false``, ``off`` or ``no``."""

LEAST_CAPABILITY = (8, 0)
"""bfloat16 on tensor cores, and asynchronous copies."""

LEAST_SHARED_MEMORY = max(row.shared_bytes for row in (*tables.MIX, *tables.GRADIENT))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on tensors of a device, or None if they can."""
    if dtype not in DTYPES:
        return f"the kernels compute in float32, bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    return _device_obstacle(device.type, device.index)


def forget() -> None:
    """Forget which devices can run the kernels, so that switches and devices are looked at again."""
    _device_obstacle.cache_clear()


def transform_obstacle() -> str | None:
    """Why the operators do not support the current kind of differentiation, or None if they do."""
    # torch silently drops tangents at a custom operator, and its reverse-mode transforms refuse one. While torch
    # compiles, both stacks are those of the traced code, and guarded: the answer may become a constant.
    if forward_ad._current_level >= 0:
        return "a custom operator has no forward-mode derivative"
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key().name != "Vmap" for interpreter in stack):
        return "torch.func's derivatives do not pass through a custom operator"
    return None


def triton_obstacle() -> str | None:
    """Why Triton cannot be used, or None if it is installed."""
    try:
        found = importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError) as error:  # from a finder that refuses, or a module without a spec
        return f"Triton cannot be imported ({error})"
    return None if found else "Triton is not installed"


def precision(dtype: torch.dtype) -> str:
    """How the kernels multiply: float32 like torch's own products, by the newer of the two names of that switch."""
    if dtype != torch.float32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    as_tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if as_tf32 else "ieee"


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on a device, as far as torch can tell."""
    if device.type != "cuda":
        return tables.ANY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY)


@functools.cache
def _device_obstacle(kind: str, index: int | None) -> str | None:
    switch = os.environ.get(SWITCH, "")
    if switch.lower() in ("0", "false", "off", "no"):
        return f"{SWITCH}={switch} turns it off"
    missing = triton_obstacle()
    if missing:
        return missing
    if INTERPRETED and kind in ("cpu", "cuda"):
        return None
    if kind == "cpu":
        return "on the CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before the process starts"
    if kind != "cuda":
        return f"there is no kernel for {kind!r} devices"
    if torch.version.hip is not None:
        return "the kernels are built for CUDA, and this is a ROCm build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"the kernels need compute capability {least}, this device has {found}"
    available = shared_memory(device)
    if available < LEAST_SHARED_MEMORY:
        return f"the kernels need {LEAST_SHARED_MEMORY} bytes of shared memory, this device has {available}"
    try:
        import timm_ssog.ops.fused.kernels  # noqa: F401
    except Exception as error:  # a build of Triton for another Python, torch or system
        return f"Triton cannot be imported ({error})"
    return None
