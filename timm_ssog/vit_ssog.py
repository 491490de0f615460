"""Vision Transformer with separable Gaussian token mixing (SSoG) in place of self-attention.

Source: 'Beyond Quadratic Attention: Separable Gaussian Operators for ODE Vision Transformers' (arXiv preprint).
The operator is defined in `timm_ssog.ops`, the block in `timm_ssog.layers`.
"""

from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    LayerNorm,
    LayerType,
    PatchEmbed,
    calculate_drop_path_rates,
    get_act_layer,
    get_norm_layer,
    global_pool_nlc,
    resample_abs_pos_embed_nhwc,
    resample_patch_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.models import (
    build_model_with_cfg,
    checkpoint,
    checkpoint_seq,
    generate_default_cfgs,
    named_apply,
    register_model,
    register_notrace_function,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.jit import Final

from timm_ssog.errors import require_choice, require_positive_int
from timm_ssog.layers import MIXERS, AttentionMixer, Block, IdentityMixer, SeparableMixer

__all__ = ["VitSsog"]  # register_model adds each entrypoint

GLOBAL_POOLS = ("", "avg", "avgmax", "max")


@register_notrace_function
def check_image(x: Tensor, in_chans: int, patch_height: int, patch_width: int, pad: bool) -> Tensor:
    """Return a batch of images unchanged, or raise a ValueError that says what the model takes and what came."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"Expected images (batch, {in_chans}, height, width), got shape {list(x.shape)}.")
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


class VitSsog(nn.Module):
    """Vision Transformer whose tokens mix by separable sums of Gaussians, or by one of the twins it is compared with.

    Any image size and aspect ratio works at call time. There is no class token: SSoG mixes over the grid, and the head
    pools over it.

    Raises:
        ValueError: if an option is unknown or out of range, or a class or register token is asked for.
    """

    dynamic_img_size: Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        mixer: str = "ssog",
        num_components: int = 4,
        amplitude: str = "signed",
        kernel_coords: str = "relative",
        init_width: float = 0.72,
        init_offset: float = 2.0,
        class_token: bool = False,
        reg_tokens: int = 0,
        pos_embed: str = "learn",
        fc_norm: bool = False,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: LayerType | None = None,
        act_layer: LayerType | None = None,
        device=None,
        dtype=None,
    ) -> None:
        """Build the model.

        Args:
            img_size: Image size that the position embedding and the kernels' reference grid are laid out for.
            patch_size: Patch size.
            in_chans: Input channels.
            num_classes: Classes; 0 for no head.
            global_pool: ``"avg"``, ``"avgmax"``, ``"max"`` or ``""`` for unpooled tokens.
            embed_dim: Channels of a token.
            depth: Blocks.
            num_heads: Heads, each with its own kernels.
            mlp_ratio: Hidden channels of the MLP over ``embed_dim``.
            mixer: ``"ssog"``, its dense twin ``"attention"``, or ``"identity"`` (nothing mixed: the speed ceiling).
            num_components: Gaussians a head.
            amplitude: ``"signed"`` (free weights) or ``"convex"`` (softmax of logits).
            kernel_coords: ``"relative"`` (kernels stretch with the grid) or ``"cells"`` (their reach stays in cells).
            init_width: Initial standard deviation of the Gaussians, in cells.
            init_offset: Standard deviation of their initial offsets, in cells.
            class_token: Only False is possible; here so that asking for one says why.
            reg_tokens: Likewise, only 0.
            pos_embed: ``"learn"`` or ``"none"``.
            fc_norm: Move the final norm behind the pooling.
            dynamic_img_size: Take any multiple of the patch size at call time.
            dynamic_img_pad: Take any size at call time, padded to a multiple of the patch size.
            drop_rate: Dropout rate before the head.
            pos_drop_rate: Dropout rate after the position embedding.
            proj_drop_rate: Dropout rate in mixers and MLPs.
            drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.
            norm_layer: Normalisation, LayerNorm by default.
            act_layer: Activation of the MLPs, GELU by default.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        require_choice("mixer", mixer, MIXERS)
        require_choice("pos_embed", pos_embed, ("learn", "none", ""))
        require_positive_int("depth", depth)
        _require_no_prefix(class_token, reg_tokens)
        _require_pool(global_pool)
        image, patch = to_2tuple(img_size), to_2tuple(patch_size)
        grid_size = (image[0] // patch[0], image[1] // patch[1])
        if min(grid_size) < 1:
            raise ValueError(
                f"img_size must be at least one patch of {patch[0]} x {patch[1]}, got {image[0]} x {image[1]}."
            )
        norm_layer = get_norm_layer(norm_layer) or LayerNorm
        act_layer = get_act_layer(act_layer) or nn.GELU

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            output_fmt="NHWC",
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        self.pos_embed = nn.Parameter(torch.empty(1, *grid_size, embed_dim, **dd)) if pos_embed == "learn" else None
        self.pos_drop = nn.Dropout(pos_drop_rate)

        if mixer == "ssog":
            mixer_layer = partial(
                SeparableMixer,
                num_heads=num_heads,
                grid_size=grid_size,
                num_components=num_components,
                amplitude=amplitude,
                kernel_coords=kernel_coords,
                init_width=init_width,
                init_offset=init_offset,
            )
        elif mixer == "attention":
            mixer_layer = partial(AttentionMixer, num_heads=num_heads)
        else:
            mixer_layer = IdentityMixer
        self.blocks = nn.Sequential(
            *[
                Block(
                    mixer_layer(embed_dim, proj_drop=proj_drop_rate, **dd),
                    embed_dim,
                    mlp_ratio=mlp_ratio,
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    act_layer=act_layer,
                    norm_layer=norm_layer,
                    **dd,
                )
                for rate in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{index}", "num_chs": embed_dim, "reduction": reduction} for index in range(depth)
        ]

        self.norm = nn.Identity() if fc_norm else norm_layer(embed_dim, **dd)
        self.fc_norm = norm_layer(embed_dim, **dd) if fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()

        self.register_load_state_dict_pre_hook(_require_finite)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            needs_reset: Also reset modules that initialise themselves at construction; False right after it.
        """
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        named_apply(partial(_init_weights, needs_reset=needs_reset), self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are positions and scales, not weights."""
        kernel_parameters = ("mixer.offset", "mixer.width", "mixer.amplitude")
        names = {name for name, _ in self.named_parameters() if name.endswith(kernel_parameters)}
        return names | {"pos_embed"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer decay."""
        return {"stem": r"^pos_embed|patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for the backward pass and compute the rest anew."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The classifier head."""
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one, and the pooling where given.

        Raises:
            ValueError: if the pooling is unknown.
        """
        if global_pool is not None:
            _require_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        weight = self.patch_embed.proj.weight
        self.head = (
            nn.Linear(self.embed_dim, num_classes, device=weight.device, dtype=weight.dtype)
            if num_classes > 0
            else nn.Identity()
        )
        self.head.train(self.training)

    @torch.jit.ignore
    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Lay the model out for another image or patch size, resampling the position and patch embeddings.

        The kernels' reference grid stays: with ``kernel_coords="relative"`` they stretch to the new grid.

        Args:
            img_size: New image size; the current one if omitted.
            patch_size: New patch size; the current one if omitted.

        Raises:
            ValueError: if the image is smaller than a patch.
        """
        image = to_2tuple(img_size) if img_size is not None else self.patch_embed.img_size
        patch = to_2tuple(patch_size) if patch_size is not None else self.patch_embed.patch_size
        if image[0] < patch[0] or image[1] < patch[1]:
            raise ValueError(
                f"img_size must be at least one patch of {patch[0]} x {patch[1]}, got {image[0]} x {image[1]}."
            )
        frozen = [name for name, parameter in self.patch_embed.named_parameters() if not parameter.requires_grad]
        self.patch_embed.set_input_size(img_size=image, patch_size=patch)
        for name, parameter in self.patch_embed.named_parameters():
            parameter.requires_grad_(name not in frozen)
        if self.pos_embed is not None:
            self.pos_embed = nn.Parameter(
                resample_abs_pos_embed_nhwc(self.pos_embed.detach(), list(self.patch_embed.grid_size), verbose=True),
                requires_grad=self.pos_embed.requires_grad,
            )
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        _record_input_size(self, image, patch_size)

    def _embed(self, x: Tensor) -> Tensor:
        patch_height, patch_width = self.patch_embed.patch_size
        x = check_image(x, self.in_chans, patch_height, patch_width, self.patch_embed.dynamic_img_pad)
        # the blocks keep the memory layout of their input: without the copy all of them would run on strided tokens
        x = self.patch_embed(x).contiguous()
        if self.pos_embed is not None:
            _, height, width, _ = x.shape
            x = x + resample_abs_pos_embed_nhwc(self.pos_embed, (height, width))
        return self.pos_drop(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict[str, Any]:
        """Features after the final norm, and the tokens behind each chosen block.

        Args:
            x: Images (batch, in_chans, height, width).
            indices: The last n blocks if an int, these blocks if a list, all if None.
            return_prefix_tokens: There are none; accepted as in timm's other transformers.
            norm: Apply the final norm to the intermediates too.
            stop_early: Do not run blocks behind the last one asked for.
            output_fmt: ``"NCHW"`` or ``"NLC"``.
            intermediates_only: Return only the intermediates.
            output_dict: Return a dict with ``image_features`` and ``image_intermediates``.

        Returns:
            (features, intermediates), with features (batch, tokens, embed_dim).

        Raises:
            ValueError: if the output format is unknown.
        """
        require_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        x = self._embed(x)
        blocks = self.blocks[: max_index + 1] if stop_early else self.blocks
        intermediates = []
        for index, block in enumerate(blocks):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if index in take_indices:
                taken = self.norm(x) if norm else x
                intermediates.append(
                    taken.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else taken.flatten(1, 2)
                )
        if intermediates_only and not output_dict:
            return intermediates
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": intermediates}
            if not intermediates_only:
                result["image_features"] = self.norm(x).flatten(1, 2)
            return result
        return self.norm(x).flatten(1, 2), intermediates

    @torch.jit.ignore
    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what is not needed for the chosen intermediates.

        Returns:
            Indices of the blocks taken.
        """
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max_index + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take_indices

    @torch.jit.ignore
    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] | tuple[int, ...] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Tensor]:
        """Tokens behind the chosen blocks, in DINO's interface; `forward_intermediates` says more."""
        return self.forward_intermediates(  # type: ignore[return-value]
            x,
            n if isinstance(n, int) else list(n),
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images to tokens (batch, tokens, embed_dim) behind the final norm."""
        x = self._embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self.norm(x).flatten(1, 2)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool tokens (batch, tokens, embed_dim) as the model or ``pool_type`` says."""
        return global_pool_nlc(x, pool_type=self.global_pool if pool_type is None else pool_type, num_prefix_tokens=0)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens to logits, or to what the classifier sees."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, height, width) to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))


def _require_pool(global_pool: str) -> None:
    if global_pool in ("token", "map"):
        raise ValueError(
            f"global_pool={global_pool!r} is not to be had: vit_ssog has no class token and no attention pooling, it "
            f"mixes over the token grid. Use one of {', '.join(map(repr, GLOBAL_POOLS))}."
        )
    require_choice("global_pool", global_pool, GLOBAL_POOLS)


def _require_no_prefix(class_token: bool, reg_tokens: int) -> None:
    if class_token or reg_tokens:
        raise ValueError(
            f"vit_ssog mixes over the token grid and has no place for prefix tokens, got class_token={class_token} and "
            f"reg_tokens={reg_tokens}. Leave them out; global_pool='avg' pools over the grid."
        )


def _require_finite(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, tensor in state_dict.items():
        if not name.startswith(prefix) or not torch.is_tensor(tensor) or tensor.is_meta:
            continue
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{name} of the checkpoint holds {bad} values of {tensor.numel()} that are NaN or infinite; the model "
                f"was left as it was. The training run diverged: take an earlier checkpoint."
            )


def _init_weights(module: nn.Module, name: str = "", needs_reset: bool = True) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset and hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


def _record_input_size(model: nn.Module, img_size: tuple[int, int], patch_size: int | tuple[int, int] | None) -> None:
    """Note a changed input size for timm's Hub export, where timm keeps such notes (from 1.0.30 on)."""
    try:
        from timm.models._input import update_model_input_size
    except ImportError:
        return
    update_model_input_size(model, img_size, patch_size=patch_size)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VitSsog) -> dict[str, Tensor]:
    """Fit a checkpoint to the model: unwrap it, and resample patch and position embeddings of another size."""
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    out = {}
    for name, tensor in state_dict.items():
        if name == "patch_embed.proj.weight" and tensor.shape[-2:] != model.patch_embed.proj.weight.shape[-2:]:
            tensor = resample_patch_embed(tensor, list(model.patch_embed.patch_size), verbose=True)
        elif name == "pos_embed" and model.pos_embed is not None and tensor.dim() == 4:
            tensor = resample_abs_pos_embed_nhwc(tensor, list(model.pos_embed.shape[1:3]), verbose=True)
        out[name] = tensor
    return out


def _cfg(url: str = "", **kwargs: Any) -> dict[str, Any]:
    return {
        "url": url,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "vit_ssog_tiny.untrained": _cfg(),
        "vit_ssog_small.untrained": _cfg(),
        "vit_ssog_base.untrained": _cfg(),
    }
)


def _create_vit_ssog(variant: str, pretrained: bool = False, **kwargs: Any) -> VitSsog:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        VitSsog,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def vit_ssog_tiny(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 192 with 3 heads, patch 16."""
    model_args = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create_vit_ssog("vit_ssog_tiny", pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def vit_ssog_small(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 384 with 6 heads, patch 16."""
    model_args = {"embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create_vit_ssog("vit_ssog_small", pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def vit_ssog_base(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 768 with 12 heads, patch 16."""
    model_args = {"embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create_vit_ssog("vit_ssog_base", pretrained=pretrained, **dict(model_args, **kwargs))
