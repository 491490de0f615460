"""The models that are compared, and their times, taken in turns."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn
from torch.nn import functional as F
from turns import take_turns, timer

import timm_ssog
from timm_ssog.hub.measure import multiply_adds

SETTINGS = {"discrete": "", "looped": "_looped", "ode": "_ode"}
"""The depth settings, and what each adds to a model's name."""

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
"""Width and heads of the sizes; each has twelve blocks, loops or evaluations, and patches of 16 px."""

MODELS = ("ssog", "twin", "unfused", "ceiling", "timm")
"""SSoG; its attention twin with the fused kernel and without; nothing mixed; timm's own ViT (discrete only)."""

BLOCKS, PATCH = 12, 16

FILL = 0.8
"""Share of the free memory that the scores of the unfused twin may take; it is skipped if they need more."""


def models_of(setting: str, wanted: tuple[str, ...] = MODELS) -> tuple[str, ...]:
    """Those of the wanted models that a depth setting has."""
    return tuple(model for model in wanted if model != "timm" or setting == "discrete")


def create(model: str, size: str, setting: str, device: torch.device | str = "cpu") -> nn.Module:
    """Build one of `MODELS`."""
    set_fused_attn(model != "unfused")  # timm's attention and ours look at it when they are built
    try:
        with torch.device(device):
            if model == "timm":
                return timm.create_model(f"vit_{size}_patch16_224", dynamic_img_size=True)
            mixer = {"ssog": "ssog", "ceiling": "identity"}.get(model, "attention")
            return timm.create_model(f"vit_ssog_{size}{SETTINGS[setting]}", mixer=mixer)
    finally:
        set_fused_attn(True)


def precision(device: torch.device, bf16: bool) -> Any:
    """The context to compute in: bfloat16 by autocast, as timm's ``--amp --amp-dtype bfloat16``, or float32."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()


def training_step(network: nn.Module, bf16: bool) -> Callable[[Tensor, Tensor], None]:
    """A function that takes one step of AdamW on images and labels."""
    optimizer = torch.optim.AdamW(network.parameters())

    def step(images: Tensor, labels: Tensor) -> None:
        with precision(images.device, bf16):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def score_bytes(size: str, img_size: int, batch: int, training: bool) -> int:
    """About what the unfused twin needs for its scores and their softmax, in float32; all blocks' in training."""
    tokens = (img_size // PATCH) ** 2
    return 2 * 4 * batch * SIZES[size][1] * tokens**2 * (BLOCKS if training else 1)


def free_bytes(device: torch.device) -> float:
    """Available memory, infinite if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return float("inf")


def measure_models(
    size: str,
    setting: str,
    img_size: int,
    *,
    batch: int,
    training: bool,
    models: tuple[str, ...],
    device: torch.device,
    bf16: bool,
    clock: Callable[[], float],
    seconds: float,
    advance: Callable[[float], Any],
) -> dict[str, list[float]]:
    """Time a forward pass or a training step of the models of a size and depth setting; see `take_turns`."""
    images = torch.randn(batch, 3, img_size, img_size, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    networks = {}
    for model in models_of(setting, models):
        if model == "unfused" and score_bytes(size, img_size, batch, training) > FILL * free_bytes(device):
            continue
        networks[model] = create(model, size, setting, device).train(training)

    # a first call sets up what is set up once; a corner of a large image is enough for that
    corner = images[:, :, :224, :224]
    calls: dict[str, Callable[[], Any]] = {}
    if training:
        for model, network in networks.items():
            step = training_step(network, bf16)
            step(corner, labels)
            calls[model] = partial(step, images, labels)
        return take_turns(calls, timer=timer(clock, device), seconds=seconds, advance=advance)
    # one autocast around all calls keeps the cast weights, as weights in bfloat16 would stay what they are
    with torch.inference_mode(), precision(device, bf16):
        for model, network in networks.items():
            network(corner)
            calls[model] = partial(network, images)
        return take_turns(calls, timer=timer(clock, device), seconds=seconds, advance=advance)


def measure_mixing(
    size: str,
    img_size: int,
    *,
    batch: int,
    models: tuple[str, ...],
    device: torch.device,
    bf16: bool,
    clock: Callable[[], float],
    seconds: float,
    advance: Callable[[float], Any],
) -> dict[str, list[float]]:
    """Time what mixes the tokens of one block, without the projections around it; see `take_turns`.

    SSoG's share includes building its kernels, which a looped or continuous model does once for all its evaluations.
    """
    dim, heads = SIZES[size]
    grid = img_size // PATCH
    dtype = torch.bfloat16 if bf16 else torch.float32
    mixer = create("ssog", size, "discrete", device).blocks[0].mixer  # type: ignore[index]
    values = torch.randn(batch, grid, grid, heads, dim // heads, device=device, dtype=dtype)
    qkv = torch.randn(batch, grid * grid, 3, heads, dim // heads, device=device, dtype=dtype)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)

    calls: dict[str, Callable[[], Any]] = {
        "ssog": lambda: timm_ssog.separable_mix(values, *mixer.kernels(grid, grid)),
        "twin": lambda: F.scaled_dot_product_attention(q, k, v),
        "unfused": lambda: (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v,
    }
    calls = {name: call for name, call in calls.items() if name in models}
    if score_bytes(size, img_size, batch, training=False) > FILL * free_bytes(device):
        calls.pop("unfused", None)
    with torch.inference_mode():
        for call in calls.values():
            call()
        return take_turns(calls, timer=timer(clock, device), seconds=seconds, advance=advance)


def count(model: str, size: str, setting: str, img_size: int) -> dict[str, int]:
    """Parameters of a model, and floating-point operations of a forward pass on one image (2 for a multiply-add)."""
    network = create(model, size, setting, "meta").eval()
    operations = 2 * multiply_adds(network, (3, img_size, img_size))
    return {"parameters": sum(p.numel() for p in network.parameters()), "flops": operations}
