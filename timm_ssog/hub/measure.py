"""Measurements of an exported model: size, arithmetic, evaluations of its solver, certificate."""

import copy
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import timm_ssog
from timm_ssog import LoopedVitSsog, OdeVitSsog, VitSsog
from timm_ssog.certificates import Certificate, certify
from timm_ssog.runge_kutta import TABLEAUS

SCALES = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the image size for which the arithmetic is counted."""


def measure(model: VitSsog, input_size: tuple[int, int, int]) -> dict[str, Any]:
    """Measure a model in eval mode, as far as that needs no data.

    Args:
        model: The model.
        input_size: (channels, height, width) of the images it was trained for.

    Returns:
        JSON: ``parameters``, ``gmacs`` (`multiply_adds`, in billions) at multiples of the size, its loops or
        solver, and versions.
    """
    channels, height, width = input_size
    measured: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gmacs": {},
        "depth": "discrete",
        "blocks": len(model.blocks),
        "versions": {"torch": torch.__version__.partition("+")[0], "timm": timm.__version__},
    }
    for scale in SCALES:
        size = _patches(model, height, scale, axis=0), _patches(model, width, scale, axis=1)
        measured["gmacs"][f"{size[0]}x{size[1]}"] = multiply_adds(model, (channels, *size)) / 1e9
    if isinstance(model, LoopedVitSsog):
        measured |= {"depth": "looped", "loops": model.loops}
    if isinstance(model, OdeVitSsog):
        measured |= {"depth": "continuous", "horizon": model.horizon, "solver": _solver(model, input_size)}
    return measured


def multiply_adds(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Multiply-adds of matrix products and convolutions for one image, by torch's FlopCounterMode.

    Args:
        model: Any model of images; it is left as it is.
        input_size: (channels, height, width).
    """
    # if no step depends on the image, shapes are enough to count, and no arithmetic is done
    device = "cpu" if isinstance(model, OdeVitSsog) and not model.is_fixed_step else "meta"
    # not torch.no_grad(), under which the counter fails on modules that take a view of a parameter
    model = copy.deepcopy(model).requires_grad_(False).to(device)
    # attention is counted by its definition: the counter does not know what the fused kernels of a CPU do
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(_noise(1, input_size).to(device))
    return counter.get_total_flops() // 2


def certificate(model: VitSsog, input_size: tuple[int, int, int]) -> Certificate:
    """The certificate of a model on the grid of its own image size."""
    _, height, width = input_size
    return certify(model, (_patches(model, height, 1.0, axis=0), _patches(model, width, 1.0, axis=1)))


def _patches(model: VitSsog, length: int, scale: float, axis: int) -> int:
    """An image side times a scale, rounded up to a whole number of patches, in pixels."""
    patch: Any = model.patch_embed.patch_size[axis]
    return -(-round(length * scale) // patch) * patch


@torch.no_grad()
def _solver(model: OdeVitSsog, input_size: tuple[int, int, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": model.solver, "fixed_step": model.solver in TABLEAUS}
    if settings["fixed_step"]:
        settings["steps"] = model.num_steps
    else:
        settings |= {"rtol": model.rtol, "atol": model.atol, "per_sample": model.per_sample}
    evaluations = timm_ssog.trace_solve(model, _noise(8, input_size)).evaluations
    counts = evaluations.tolist() if isinstance(evaluations, torch.Tensor) else [int(evaluations)]
    return {**settings, "evaluations": [min(counts), max(counts)]}


def _noise(images: int, input_size: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(images, *input_size, generator=torch.Generator().manual_seed(0))
