"""Whether code runs to be captured in a graph that leaves this process."""

import torch


@torch.jit.unused
def is_captured() -> bool:
    """Whether this is a run of torch.export, torch.onnx.export or torch.jit.trace, and not one of torch.compile."""
    # up to torch 2.11 is_exporting() is true in compilation as well, and only the flag behind it is not
    exporting = torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)
    return exporting or torch.jit.is_tracing()
