"""The parts of a trained attention model that an SSoG model takes over exactly, and those folded into it."""

import copy
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from timm_ssog.conversion.teachers import Teacher, attention_of, value_bias
from timm_ssog.layers import SeparableMixer
from timm_ssog.vit_ssog import VitSsog


def student_options(teacher: Teacher) -> dict[str, Any]:
    """The options with which `timm.create_model` builds a student with the teacher's shape, grid and classes."""
    model, block = teacher.model, teacher.blocks[0]
    patch_embed = model.patch_embed
    width = patch_embed.proj.out_channels
    options = {
        "img_size": list(teacher.image_size),
        "patch_size": list(patch_embed.patch_size),
        "in_chans": patch_embed.proj.in_channels,
        "num_classes": model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        "embed_dim": width,
        "depth": len(teacher.blocks),
        "num_heads": teacher.heads,
        "mlp_ratio": block.mlp.fc1.out_features / width,
        "fc_norm": not isinstance(model.fc_norm, nn.Identity),
        "global_pool": model.global_pool if model.global_pool in ("avg", "avgmax", "max") else "avg",
    }
    if model.pos_embed is None:
        options["pos_embed"] = "none"
    options["pre_norm"] = _has_pre_norm(model)  # always: continuous models have another default
    return options


def check_pair(student: VitSsog, teacher: Teacher, blocks: list[int]) -> list[str]:
    """Raise unless the student can take over the teacher's weights.

    Args:
        student: The student.
        teacher: The teacher.
        blocks: The teacher's block for each block of the student.

    Returns:
        One sentence for everything that is taken over only in part.

    Raises:
        ValueError: names what differs, and the option that makes it fit.
    """
    model = teacher.model
    wanted = student_options(teacher)
    first: Any = student.blocks[0]
    mixer = first.mixer
    if not all(isinstance(block.mixer, SeparableMixer) for block in student.blocks):
        raise ValueError(f"The student must mix by SSoG, got {type(mixer).__name__}: create it with mixer='ssog'.")
    for option, theirs, ours in (
        ("embed_dim", wanted["embed_dim"], student.embed_dim),
        ("num_heads", wanted["num_heads"], mixer.num_heads),
        ("in_chans", wanted["in_chans"], student.in_chans),
        ("mlp_ratio", wanted["mlp_ratio"], first.mlp.fc1.out_features / student.embed_dim),
        ("fc_norm", wanted["fc_norm"], not isinstance(student.fc_norm, nn.Identity)),
    ):
        if theirs != ours:
            raise ValueError(
                f"The teacher has {option}={theirs}, the student {option}={ours}: create the student with "
                f"{option}={theirs}, or take another teacher."
            )
    if model.global_pool in ("avg", "avgmax", "max") and model.global_pool != student.global_pool:
        raise ValueError(
            f"The teacher has global_pool={model.global_pool!r}, the student {student.global_pool!r}: create the "
            f"student with global_pool={model.global_pool!r}."
        )
    if model.pos_embed is not None and student.pos_embed is None:
        raise ValueError("The teacher has a position embedding, the student none: create it with pos_embed='learn'.")
    if _has_pre_norm(model) and not _has_pre_norm(student):
        raise ValueError(
            "The teacher has a norm before its blocks (pre_norm), the student none: create it with pre_norm=True, "
            "or take another teacher."
        )
    notes = []
    if _has_pre_norm(student) and not _has_pre_norm(model):
        raise ValueError(
            "The student has a norm before its blocks (pre_norm), the teacher none: create it with pre_norm=False."
        )
    if model.global_pool == "token" or getattr(model, "pool_include_prefix", False):
        notes.append(
            "The teacher's head reads its class token, the student's the mean of its patch tokens: without a refit or "
            "training its logits are off."
        )
    if wanted["num_classes"] and wanted["num_classes"] != student.num_classes:
        notes.append(
            f"The teacher has {wanted['num_classes']} classes and the student {student.num_classes}: its head stays as "
            f"it was."
        )
    elif not wanted["num_classes"] and student.num_classes:
        notes.append("The teacher has no head: the student's stays as it was.")
    _check_functions(student, teacher, blocks)
    return notes


def has_same_head(student: VitSsog, teacher: Teacher) -> bool:
    """Whether both have a classifier for the same number of classes."""
    heads = student.head, teacher.model.head
    return all(isinstance(head, nn.Linear) for head in heads) and heads[0].out_features == heads[1].out_features


def _has_pre_norm(model: Any) -> bool:
    return not isinstance(getattr(model, "norm_pre", nn.Identity()), nn.Identity)


@torch.no_grad()
def _check_functions(student: VitSsog, teacher: Teacher, blocks: list[int]) -> None:
    """Compare norms and activations by what they do: the same function has many names."""
    points = torch.linspace(-4, 4, student.embed_dim)
    points = torch.stack([points, points.square() - 3])
    for ours, index in zip(student.blocks, blocks, strict=True):
        theirs = teacher.blocks[index]
        pairs = [("act_layer", ours.mlp.act, theirs.mlp.act), ("norm_layer", ours.norm1, theirs.norm1)]
        for option, module, other in pairs:
            if dict(module.named_parameters()).keys() == dict(other.named_parameters()).keys():
                at = [_neutral(each)(points) for each in (module, other)]
                if torch.allclose(at[0], at[1], rtol=1e-3, atol=1e-3):
                    continue
            raise ValueError(
                f"The teacher's {option} is {type(other).__name__}, the student's {type(module).__name__}, which does "
                f"something else: create the student with the teacher's {option}."
            )


def _neutral(module: nn.Module) -> nn.Module:
    """A copy on the CPU in float32 with scale one and shift zero."""
    module = copy.deepcopy(module).cpu().float()
    for name, parameter in module.named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return module


@torch.no_grad()
def copied_state(student: VitSsog, teacher: Teacher, blocks: list[int]) -> dict[str, Tensor]:
    """The student's state with everything that the teacher's weights determine exactly; kernels stay as they are.

    Values are the last third of qkv. Their bias passes through maps whose rows sum to one, so it goes through ``proj``
    into the bias of ``proj``; layer scales go into the layers before them; prefix tokens, q and k are dropped.

    Args:
        student: The student, set up for the teacher's image and patch size; not changed.
        teacher: The teacher.
        blocks: The teacher's block for each block of the student.

    Returns:
        A complete state dict, in the student's dtype.
    """
    model = teacher.model
    state = {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}

    def put(name: str, tensor: Tensor | None) -> None:
        if name in state:
            state[name] = torch.zeros_like(state[name]) if tensor is None else tensor.detach().to(state[name])

    def put_module(name: str, module: Any) -> None:
        for part in ("weight", "bias"):
            put(f"{name}.{part}", getattr(module, part, None))

    put_module("patch_embed.proj", model.patch_embed.proj)
    put("pos_embed", _grid_positions(teacher))
    for name in ("norm", "fc_norm", "norm_pre"):
        if not isinstance(getattr(model, name, nn.Identity()), nn.Identity):
            put_module(name, getattr(model, name))
    if has_same_head(student, teacher):
        put_module("head", model.head)
    for number, index in enumerate(blocks):
        block, name = teacher.blocks[index], f"blocks.{number}"
        attention = attention_of(block)
        put_module(f"{name}.norm1", block.norm1)
        put_module(f"{name}.norm2", block.norm2)
        put_module(f"{name}.mlp.fc1", block.mlp.fc1)
        put(f"{name}.mixer.value.weight", attention.qkv.weight.chunk(3)[2])
        proj, shift = attention.proj.weight.double(), _bias_of(attention.proj)
        of_values = value_bias(attention)
        if of_values is not None:
            shift = shift + proj @ of_values.double()
        for layer, scale, weight, bias in (
            (f"{name}.mixer.proj", "ls1", proj, shift),
            (f"{name}.mlp.fc2", "ls2", block.mlp.fc2.weight.double(), _bias_of(block.mlp.fc2)),
        ):
            gain = getattr(block, scale, None)
            if isinstance(gain, LayerScale):
                weight, bias = gain.gamma.double()[:, None] * weight, gain.gamma.double() * bias
            put(f"{layer}.weight", weight)
            put(f"{layer}.bias", bias)
    return state


def _bias_of(layer: nn.Linear) -> Tensor:
    if layer.bias is not None:
        return layer.bias.double()
    return layer.weight.new_zeros(layer.out_features, dtype=torch.float64)


def _grid_positions(teacher: Teacher) -> Tensor | None:
    """The position embedding of the patch tokens, (1, height, width, channels)."""
    positions = teacher.model.pos_embed
    if positions is None or positions.dim() == 4:
        return positions
    count = teacher.grid[0] * teacher.grid[1]
    return positions[:, -count:].unflatten(1, teacher.grid)
