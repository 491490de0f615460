"""Checks of a model's arguments and of its input."""

import math
import numbers
import operator
from typing import Any

import torch
from timm.models import register_notrace_function
from torch import Tensor

from timm_ssog.errors import require_bool, require_choice, require_positive_int, require_rate

GLOBAL_POOLS = ("", "avg", "avgmax", "max")


@register_notrace_function
def check_image(x: Tensor, in_chans: int, patch_height: int, patch_width: int, pad: bool) -> Tensor:
    """Return a batch of images unchanged, or raise a ValueError that says what the model expects and what came."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"Expected images (batch, {in_chans}, height, width), got shape {list(x.shape)}.")
    if not x.is_floating_point():
        raise ValueError(
            f"Expected floating-point images, normalised as the model's configuration says, got {x.dtype}."
        )
    height, width = x.shape[2], x.shape[3]
    if not pad and (height < patch_height or width < patch_width):
        raise ValueError(
            f"Images of {height} x {width} are smaller than a patch of {patch_height} x {patch_width}: resize them, or "
            f"create the model with dynamic_img_pad=True or a smaller patch_size."
        )
    if not pad and (height % patch_height != 0 or width % patch_width != 0):
        raise ValueError(
            f"Image height and width must be multiples of the patch size {patch_height} x {patch_width}, got {height} "
            f"x {width}: resize them, or create the model with dynamic_img_pad=True."
        )
    return x


def pair(name: str, size: Any) -> tuple[int, int]:
    """A size as a pair (height, width) of integers of at least 1."""
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an integer or a pair (height, width), got {size!r}.")
    for length in pair:
        require_positive_int(name, length)
    return operator.index(pair[0]), operator.index(pair[1])


def require_patches(img_size: Any, patch_size: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Image and patch size as pairs (height, width); raise if they are not, or if the image has no whole patch."""
    image, patch = pair("img_size", img_size), pair("patch_size", patch_size)
    if image[0] < patch[0] or image[1] < patch[1]:
        raise ValueError(
            f"img_size must be at least one patch of {patch[0]} x {patch[1]}, got {image[0]} x {image[1]}."
        )
    return image, patch


def require_bools(**switches: Any) -> None:
    """Raise unless each switch, by name, is True or False."""
    for name, switch in switches.items():
        require_bool(name, switch)


def require_rates(**rates: Any) -> None:
    """Raise unless each rate, by name, is at least 0 and below 1."""
    for name, rate in rates.items():
        require_rate(name, rate)


def require_hidden(mlp_ratio: Any, embed_dim: int) -> None:
    """Raise unless the MLP gets at least one hidden channel."""
    hidden = float(mlp_ratio) * embed_dim if isinstance(mlp_ratio, numbers.Real) else 0.0
    if not 1 <= hidden < math.inf:
        raise ValueError(
            f"mlp_ratio must be a finite number that gives the MLP at least one hidden channel, got {mlp_ratio!r} with "
            f"embed_dim={embed_dim}."
        )


def require_dtype(dtype: Any) -> None:
    """Raise unless models support the dtype."""
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, float64, bfloat16 or float16, got {dtype!r}.")


def require_pool(global_pool: str) -> None:
    """Raise unless the models support the pooling."""
    if global_pool in ("token", "map"):
        raise ValueError(
            f"global_pool={global_pool!r} is not available: vit_ssog has neither a class token nor attention pooling. "
            f"It mixes over the token grid. Use one of {', '.join(map(repr, GLOBAL_POOLS))}."
        )
    require_choice("global_pool", global_pool, GLOBAL_POOLS)


def require_no_prefix(class_token: bool, reg_tokens: int) -> None:
    """Raise if prefix tokens are asked for."""
    if class_token or reg_tokens:
        raise ValueError(
            f"vit_ssog mixes over the token grid, where prefix tokens have no place, got class_token={class_token} and "
            f"reg_tokens={reg_tokens}. Omit them; global_pool='avg' pools over the grid."
        )


def require_no_dropout(proj_drop_rate: float) -> None:
    """Raise if a velocity would contain dropout."""
    if proj_drop_rate:
        raise ValueError(
            f"A continuous model has no dropout in its velocity, got proj_drop_rate={proj_drop_rate}: every solver "
            f"stage would see another velocity and no solver could converge. Use drop_path_rate, whose mask all stages "
            f"of a step share."
        )


def require_no_noise(drop_path_rate: float, jitter: bool, solver: str, adjoint: bool) -> None:
    """Raise if the velocity of a solve would change from stage to stage."""
    if drop_path_rate or jitter:
        raise ValueError(
            f"drop_path and jitter need a fixed-step solver without the adjoint, got drop_path_rate={drop_path_rate} "
            f"and jitter={jitter} with solver={solver!r} and adjoint={adjoint}: they act on the steps of such a "
            f"solver; an adaptive one would see its velocity change from stage to stage and accept no step. Set "
            f"drop_path_rate=0 and jitter=False, or solver='rk4' and adjoint=False."
        )
