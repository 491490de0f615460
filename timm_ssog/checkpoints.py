"""Reading checkpoints: their tensors are fitted to the model, and refused if they are damaged."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed_nhwc, resample_patch_embed
from torch import Tensor, nn

from timm_ssog.arguments import pair
from timm_ssog.digest import check_digests
from timm_ssog.layers import first_separable, grid_of_digits
from timm_ssog.sublayers import warn_of_other_layers

GRIDS = ("mixer.reference_grid", "mixer._extra_state")
"""Endings of the names under which checkpoints keep reference grids: the older one and the current one."""


def require_sound(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Raise if a checkpoint holds tensors of the wrong kind or without meaning; a hook before loading."""
    floating = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    for name, tensor in state_dict.items():
        if isinstance(name, str) and name.startswith(prefix) and name.endswith(GRIDS):
            _require_grid(name, tensor)
        if not isinstance(name, str) or not name.startswith(prefix) or not torch.is_tensor(tensor) or tensor.is_meta:
            continue
        if not tensor.is_floating_point() and name[len(prefix) :] in floating:
            raise ValueError(
                f"{name} of the checkpoint must have a floating-point dtype, got {tensor.dtype}; the model was left as "
                f"it was. Dequantise quantised weights first."
            )
        if tensor.is_floating_point() and tensor.itemsize == 1:
            tensor = tensor.float()  # float8 has no test for NaN
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{name} of the checkpoint is NaN or infinite in {bad} of {tensor.numel()} values; the model was "
                f"left as it was. The training run diverged: take an earlier checkpoint."
            )


def _require_grid(name: str, tensor: Any) -> None:
    grid: Any = tensor
    if torch.is_tensor(tensor) and tensor.is_meta:
        return  # loads nothing
    if torch.is_tensor(tensor) and not tensor.is_complex() and tensor.dtype != torch.bool:
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            return  # another check reports that for any tensor
        grid = grid_of_digits(tensor) if tensor.shape == (2, 3) else tuple(tensor.flatten().tolist())
        if len(grid) == 2 and min(grid) >= 1:
            return
    elif torch.is_tensor(tensor):
        grid = f"a tensor of {tensor.dtype} on {tensor.device}"
    raise ValueError(
        f"{name} of the checkpoint must be the reference grid (height, width) of its kernels, got {grid}; the model "
        f"was left as it was. The file is damaged: take another copy."
    )


def _require_tensors(state_dict: Any) -> None:
    bad = state_dict
    if isinstance(state_dict, Mapping):
        wrong = [name for name, tensor in state_dict.items() if not (isinstance(name, str) and torch.is_tensor(tensor))]
        if not wrong:
            return
        bad = f"{type(state_dict[wrong[0]]).__name__} under {wrong[0]!r}"
    else:
        bad = type(state_dict).__name__
    raise ValueError(f"Expected a checkpoint of named tensors, got {bad}: it does not hold a model alone.")


def _unseen_by_shape(model: Any) -> dict[str, Any]:
    """Options that change what the same tensors compute, and that only retraining can change."""
    block: Any = model.blocks[0]
    options: dict[str, Any] = {"norm_layer": block.norm1, "act_layer": block.mlp.act}
    if mixer := first_separable(model.blocks):
        options |= {"amplitude": "convex" if mixer.convex else "signed", "steering": mixer.steering}
    if hasattr(model, "inject_input"):
        options["input_injection"] = "add" if model.inject_input else "none"
    return options


def require_same_norm(state_dict: Mapping[str, Any], *, pre_norm: bool) -> None:
    """Raise if a whole checkpoint comes from a model with the other ``pre_norm``."""
    theirs = "norm_pre.weight" in state_dict
    if theirs != pre_norm and "patch_embed.proj.weight" in state_dict:
        raise RuntimeError(
            f"The weights come from a model with{'' if theirs else 'out'} norm_pre, the norm before depth, and this "
            f"model has pre_norm={pre_norm}: create it with pre_norm={theirs}."
        )


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Fit a checkpoint to the model: unwrap it, and resample patch and position embeddings of another size.

    Warns if it was published with options under which its weights compute something else.

    Raises:
        ValueError: if its digest is not the published one, or it is not a mapping of names to tensors.
    """
    for key in ("model", "state_dict"):
        if isinstance(state_dict, Mapping):
            state_dict = state_dict.get(key, state_dict)
    _require_tensors(state_dict)
    config: Any = getattr(model, "pretrained_cfg", {})
    published = getattr(model, "pretrained_model_args", {})
    check_digests(state_dict, config, published)
    built = _unseen_by_shape(model)
    if published and published.get("steering", "none") == "none":
        built.pop("steering", None)  # a steered model continues a fixed one
    warn_of_other_layers(published, built, model.embed_dim)
    out = {}
    for name, tensor in state_dict.items():
        # load_state_dict refuses what resampling can't fix
        if name == "patch_embed.proj.weight" and tensor.dim() == 4 and tensor.numel() > 0:
            if tensor.shape[-2:] != model.patch_embed.proj.weight.shape[-2:]:
                size = list(pair("patch_size", model.patch_embed.patch_size))
                tensor = resample_patch_embed(tensor, size, verbose=True)
        elif name == "pos_embed" and model.pos_embed is not None and tensor.dim() == 4 and tensor.numel() > 0:
            tensor = resample_abs_pos_embed_nhwc(tensor, list(model.pos_embed.shape[1:3]), verbose=True)
        out[name] = tensor
    return out
