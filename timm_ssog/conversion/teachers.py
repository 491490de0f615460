"""Teachers of `timm_ssog.warm_start`: their parts, how their blocks compute, and what is refused by name."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, LayerScale, Mlp, PatchEmbed
from timm.models.vision_transformer import Block as VitBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from timm_ssog.layers import AttentionMixer
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

MAP_BYTES = 1 << 26
"""Most bytes of attention maps held at once."""

_REFUSED_BLOCKS = {
    "ParallelScalingBlock": "parallel blocks (attention and MLP side by side)",
    "DiffParallelScalingBlock": "parallel blocks (attention and MLP side by side)",
    "ParallelThingsBlock": "parallel blocks (several attentions or MLPs side by side)",
    "ResPostBlock": "post-norm blocks",
}
_REFUSED_ATTENTION = {"AttentionRope": "rotary positions", "DiffAttention": "differential attention"}
_REFUSED_MLPS: dict[str, str] = dict.fromkeys(("GluMlp", "SwiGLU", "SwiGLUPacked", "GatedMlp"), "a gated MLP")


@dataclass(frozen=True)
class Teacher:
    """An attention model, seen as embedding, pre-norm blocks, pooling and head.

    Attributes:
        model: The model.
        prefix: Tokens before the grid: class and register tokens.
        grid: Tokens (height, width).
        image_size: Image size (height, width), in pixels.
        heads: Heads of every block.
    """

    model: Any
    prefix: int
    grid: tuple[int, int]
    image_size: tuple[int, int]
    heads: int

    @property
    def blocks(self) -> list[Any]:
        """The blocks, first to last."""
        return list(self.model.blocks)

    def embed(self, images: Tensor) -> Tensor:
        """Map images to tokens (batch, prefix + height * width, channels), as the first block gets them."""
        model = self.model
        if isinstance(model, VitSsog):
            return model.embed(images).flatten(1, 2)
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))

    def finish(self, tokens: Tensor) -> Tensor:
        """Map tokens after the last block to logits."""
        return self.model.forward_head(self.model.norm(tokens))

    def patches(self, tokens: Tensor) -> Tensor:
        """The tokens of the grid, (batch, height, width, channels)."""
        return tokens[:, self.prefix :].unflatten(1, self.grid)


@dataclass(frozen=True)
class Attended:
    """One block's attention over a batch: maps, values and mixed values, head by head, without the values' bias.

    Attributes:
        maps: (batch, heads, tokens, tokens), rows summing to one.
        values: (batch, heads, tokens, head_dim).
        mixed: The product of both.
    """

    maps: Tensor
    values: Tensor
    mixed: Tensor


def attention_of(block: Any) -> Any:
    """The attention of a block, timm's or that of our twin."""
    return block.mixer if hasattr(block, "mixer") else block.attn


def value_bias(attention: Any) -> Tensor | None:
    """The last third of the bias of q, k and v; None if there is none."""
    return None if attention.qkv.bias is None else attention.qkv.bias.chunk(3)[2]


def attend(block: Any, tokens: Tensor) -> Attended:
    """Maps and values of a block at tokens (batch, tokens, channels)."""
    attention = attention_of(block)
    batch, count, _ = tokens.shape
    qkv = attention.qkv(block.norm1(tokens)).reshape(batch, count, 3, attention.num_heads, attention.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    bias = value_bias(attention)
    if bias is not None:
        v = v - bias.reshape(attention.num_heads, 1, attention.head_dim)
    if not isinstance(attention, AttentionMixer):
        q, k = attention.q_norm(q), attention.k_norm(k)
    maps = (q * attention.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1)
    return Attended(maps, v, maps @ v)


def after_mixing(block: Any, tokens: Tensor, attended: Attended) -> Tensor:
    """The state between attention and MLP."""
    attention = attention_of(block)
    mixed = attended.mixed.transpose(1, 2).flatten(2)
    bias = value_bias(attention)
    mixed = attention.proj(mixed if bias is None else mixed + bias)
    return tokens + _scaled(block, "ls1", mixed)


def after_mlp(block: Any, state: Tensor) -> Tensor:
    """The state after the block, from that between attention and MLP."""
    return state + _scaled(block, "ls2", block.mlp(block.norm2(state)))


def _scaled(block: Any, name: str, update: Tensor) -> Tensor:
    # not the module, which may be one that scales in place
    scale = getattr(block, name, None)
    return update * scale.gamma if isinstance(scale, LayerScale) else update


def map_chunk(teacher: Teacher) -> int:
    """Images whose attention maps of one block fit `MAP_BYTES`; at least one."""
    tokens = teacher.prefix + teacher.grid[0] * teacher.grid[1]
    return max(1, MAP_BYTES // (4 * teacher.heads * tokens * tokens))


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode for a while."""
    training = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


def read_teacher(model: nn.Module) -> Teacher:
    """Read the parts of a teacher.

    Args:
        model: timm's `VisionTransformer`, or one of this package's discrete models with ``mixer="attention"``.

    Raises:
        ValueError: names the part that SSoG cannot express, or a weight that is NaN or infinite.
    """
    if isinstance(model, VitSsog):
        teacher = _read_twin(model)
    elif isinstance(model, VisionTransformer):
        teacher = _read_vit(model)
    else:
        raise ValueError(_refusal(model))
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"The teacher is on the meta device, without weights ({name}): load it first.")
        if not torch.isfinite(parameter).all():
            bad = int((~torch.isfinite(parameter)).sum())
            raise ValueError(
                f"{name} of the teacher is NaN or infinite in {bad} of {parameter.numel()} values. Take an earlier "
                f"checkpoint of it."
            )
    return teacher


def _refusal(model: nn.Module) -> str:
    names = {type(module).__name__ for module in model.modules()}
    has = []
    if any("Rope" in name or "RotaryEmbedding" in name for name in names):
        has.append("rotary positions")
    if any("RelPos" in name for name in names) or any("relative_position" in n for n, _ in model.named_parameters()):
        has.append("relative positions")
    if names & set(_REFUSED_MLPS):
        has.append("gated MLPs")
    found = f" It has {', '.join(has)}, which fixed kernels cannot express." if has else ""
    return (
        f"Expected timm's VisionTransformer or one of vit_ssog_* with mixer='attention' as the teacher, got "
        f"{type(model).__name__}.{found}"
    )


def _refuse(what: str, why: str) -> ValueError:
    return ValueError(f"This teacher has {what}, which a vit_ssog model cannot express: {why}. Take another teacher.")


def _read_twin(model: VitSsog) -> Teacher:
    if isinstance(model, (LoopedVitSsog, OdeVitSsog)):
        raise ValueError(f"The teacher must be a discrete model, got {type(model).__name__}: its blocks are shared.")
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        if not isinstance(block.mixer, AttentionMixer):
            raise ValueError(
                f"The teacher must mix by attention, got {type(block.mixer).__name__}: create it with "
                f"mixer='attention'. (A model that mixes by SSoG already needs no conversion.)"
            )
    patch_embed: Any = model.patch_embed
    return Teacher(model, 0, patch_embed.grid_size, patch_embed.img_size, blocks[0].mixer.num_heads)


def _read_vit(model: VisionTransformer) -> Teacher:
    if getattr(model, "dist_token", None) is not None:
        raise _refuse("a distillation token", "it has its own head, and there are no prefix tokens here")
    if getattr(model, "attn_pool", None) is not None:
        raise _refuse("attention pooling", "vit_ssog pools over the grid")
    patch_embed: Any = model.patch_embed
    image_size: Any = patch_embed.img_size
    if type(patch_embed) is not PatchEmbed:
        raise _refuse(f"a {type(patch_embed).__name__}", "the patch embedding here is one convolution")
    if not isinstance(patch_embed.norm, nn.Identity):
        raise _refuse("a norm in its patch embedding", "there is none here")
    if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
        raise _refuse("no final norm", "there always is one here")
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        _check_block(block)
    heads = blocks[0].attn.num_heads
    return Teacher(model, model.num_prefix_tokens, patch_embed.grid_size, image_size, heads)


def _check_block(block: Any) -> None:
    kind = type(block).__name__
    if type(block) is not VitBlock:
        raise _refuse(_REFUSED_BLOCKS.get(kind, f"blocks of type {kind}"), "a block here is timm's pre-norm one")
    attention, mlp = block.attn, block.mlp
    kind = type(attention).__name__
    if type(attention) is not Attention:
        raise _refuse(_REFUSED_ATTENTION.get(kind, f"attention of type {kind}"), "only plain attention is supported")
    if getattr(attention, "gate", None) is not None:
        raise _refuse("gated attention", "the gate depends on content, which fixed kernels drop")
    if not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
        raise _refuse("a norm inside its attention", "nothing lies between mixing and projection here")
    if attention.num_heads * attention.head_dim != attention.qkv.in_features:
        raise _refuse(
            f"{attention.num_heads} heads of {attention.head_dim} channels in a width of {attention.qkv.in_features}",
            "the heads share the width here",
        )
    kind = type(mlp).__name__
    if type(mlp) is not Mlp:
        raise _refuse(_REFUSED_MLPS.get(kind, f"an MLP of type {kind}"), "an MLP here is two plain layers")
    if not isinstance(mlp.norm, nn.Identity):
        raise _refuse("a norm inside its MLP", "there is none here")


@torch.no_grad()
def require_as_read(teacher: Teacher, tokens: Tensor) -> None:
    """Raise unless every block of the teacher computes what its parts imply.

    Args:
        teacher: The teacher.
        tokens: (batch, tokens, channels), embedded images; one is enough.

    Raises:
        ValueError: names the block whose own forward differs, or is not finite.
    """
    for index, block in enumerate(teacher.blocks):
        ours = after_mlp(block, after_mixing(block, tokens, attend(block, tokens)))
        if isinstance(teacher.model, VitSsog):
            theirs = block(tokens.unflatten(1, teacher.grid)).flatten(1, 2)
        else:
            theirs = block(tokens)
        if not torch.isfinite(theirs).all():
            raise ValueError(f"Block {index} of the teacher gives NaN or infinite values on these images.")
        spread = float(theirs.float().std())
        if not torch.allclose(ours.float(), theirs.float(), rtol=0, atol=max(0.02 * spread, 1e-6)):
            raise ValueError(
                f"Block {index} of the teacher does not compute what a pre-norm block of its layers would: it was "
                f"changed, or has a hook. Pass the model as timm creates it."
            )
        tokens = theirs
