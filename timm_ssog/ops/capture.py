"""Whether code runs in order to be captured in a graph that leaves this process."""

import torch


@torch.jit.unused
def is_captured() -> bool:
    """Whether torch.export, torch.onnx.export or torch.jit.trace is running, and not torch.compile."""
    # up to torch 2.11 is_exporting() is also true during compilation; only the flag behind it is not
    exporting = torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)
    return exporting or torch.jit.is_tracing()
