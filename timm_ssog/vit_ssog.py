"""Vision Transformer with separable Gaussian token mixing (SSoG) in place of self-attention.

Source: 'Beyond Quadratic Attention: Separable Gaussian Operators for ODE Vision Transformers' (arXiv preprint).
The operator is defined in `timm_ssog.ops`, the block in `timm_ssog.layers`.
"""

import math
import numbers
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.fx
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    LayerNorm,
    LayerType,
    PatchEmbed,
    calculate_drop_path_rates,
    drop_path,
    global_pool_nlc,
    resample_abs_pos_embed_nhwc,
    resample_patch_embed,
    trunc_normal_,
)
from timm.models import (
    build_model_with_cfg,
    checkpoint,
    generate_default_cfgs,
    named_apply,
    register_model,
    register_notrace_function,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.jit import Final

from timm_ssog.depth import TABLEAUS, advance
from timm_ssog.digest import check_digests, without_digests
from timm_ssog.errors import require_bool, require_choice, require_count, require_positive_int
from timm_ssog.flow import FLOW_PENALTIES, pull_on_backward, step_penalty
from timm_ssog.layers import (
    MIXERS,
    AttentionMixer,
    Block,
    IdentityMixer,
    SeparableMixer,
    grid_of_digits,
    kernels_ahead,
    shared_kernels,
)
from timm_ssog.ode import (
    ADAPTIVE_SOLVERS,
    PER_SAMPLE_SOLVERS,
    SolveTrace,
    solve_adaptive,
    solve_fixed_adjoint,
    solve_per_sample,
)
from timm_ssog.ops.capture import is_captured
from timm_ssog.sublayers import act_class, norm_class, warn_of_other_layers

__all__ = ["LoopedVitSsog", "OdeVitSsog", "VitSsog"]  # register_model adds each entrypoint

# called, not traced, by a plain torch.fx tracer (torchvision's) as by timm's own: they branch on sizes and dtypes
torch.fx.wrap("check_image")
torch.fx.wrap("as_state")
torch.fx.wrap("pull_on_backward")
torch.fx.wrap("resample_abs_pos_embed_nhwc")

GRIDS = ("mixer.reference_grid", "mixer._extra_state")
"""Ends of the names under which checkpoints keep reference grids: older ones, and those of today."""

GLOBAL_POOLS = ("", "avg", "avgmax", "max")

STEM = r"^pos_embed|patch_embed|norm_pre"
"""Parameters in front of all depth, for layer decay."""


@register_notrace_function
def check_image(x: Tensor, in_chans: int, patch_height: int, patch_width: int, pad: bool) -> Tensor:
    """Return a batch of images unchanged, or raise a ValueError that says what the model takes and what came."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"Expected images (batch, {in_chans}, height, width), got shape {list(x.shape)}.")
    if not x.is_floating_point():
        raise ValueError(
            f"Expected images of floating point, normalised as the model's configuration says, got {x.dtype}."
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


@register_notrace_function
def as_state(x: Tensor) -> Tensor:
    """Tokens as the state of a looped or continuous model: in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


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
        pre_norm: bool = False,
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
            pre_norm: Normalise the tokens (LayerNorm, whatever ``norm_layer`` is) before the first block.
            fc_norm: Move the final norm behind the pooling.
            dynamic_img_size: Take any multiple of the patch size at call time.
            dynamic_img_pad: Take any size at call time, padded to a multiple of the patch size.
            drop_rate: Dropout rate before the head.
            pos_drop_rate: Dropout rate after the position embedding.
            proj_drop_rate: Dropout rate in mixers and MLPs.
            drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.
            norm_layer: Normalisation, LayerNorm by default; ``"centrenorm"`` makes Lipschitz certificates informative.
            act_layer: Activation of the MLPs, GELU by default.
        """
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        require_choice("mixer", mixer, MIXERS)
        require_choice("pos_embed", pos_embed, ("learn", "none", ""))
        require_bool("pre_norm", pre_norm)
        require_positive_int("depth", depth)
        depth = int(depth)  # of numpy, say: timm wants Python's
        require_positive_int("embed_dim", embed_dim)
        require_positive_int("in_chans", in_chans)
        require_count("num_classes", num_classes)
        _require_hidden(mlp_ratio, embed_dim)
        for name, switch in (
            ("fc_norm", fc_norm),
            ("dynamic_img_size", dynamic_img_size),
            ("dynamic_img_pad", dynamic_img_pad),
        ):
            require_bool(name, switch)
        _require_dtype(dtype)
        for name, rate in (
            ("drop_rate", drop_rate),
            ("pos_drop_rate", pos_drop_rate),
            ("proj_drop_rate", proj_drop_rate),
        ):
            _require_rate(name, rate)
        _require_rate("drop_path_rate", drop_path_rate)
        _require_no_prefix(class_token, reg_tokens)
        _require_pool(global_pool)
        image, patch = _pair("img_size", img_size), _pair("patch_size", patch_size)
        grid_size = (image[0] // patch[0], image[1] // patch[1])
        if min(grid_size) < 1:
            raise ValueError(
                f"img_size must be at least one patch of {patch[0]} x {patch[1]}, got {image[0]} x {image[1]}."
            )
        norm: Any = norm_class(norm_layer, embed_dim)
        act: Any = act_class(act_layer)

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(
            img_size=image,
            patch_size=patch,  # type: ignore[arg-type]  (timm takes a pair)
            in_chans=in_chans,
            embed_dim=embed_dim,
            output_fmt="NHWC",
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        self.pos_embed = nn.Parameter(torch.empty(1, *grid_size, embed_dim, **dd)) if pos_embed == "learn" else None
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.norm_pre = LayerNorm(embed_dim, **dd) if pre_norm else nn.Identity()

        if mixer == "ssog":
            mixer_layer: Any = partial(
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
                    act_layer=act,
                    norm_layer=norm,
                    **dd,
                )
                for rate in _drop_path_rates(drop_path_rate, depth)
            ]
        )
        self._set_steps([{"module": f"blocks.{index}"} for index in range(depth)])

        self.norm = nn.Identity() if fc_norm else norm(embed_dim, **dd)
        self.fc_norm = norm(embed_dim, **dd) if fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()

        self.register_load_state_dict_pre_hook(_require_sound)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            needs_reset: Also reset modules that initialise themselves at construction; False right after it.
        """
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        named_apply(partial(_init_weights, needs_reset=needs_reset), self)

    @torch.jit.ignore()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as torch does.

        Raises:
            RuntimeError: as torch's, and if the weights are those of a model of the other ``pre_norm``.
        """
        theirs, ours = "norm_pre.weight" in state_dict, not isinstance(self.norm_pre, nn.Identity)
        # torch doesn't tell its hooks whether a load is strict
        if strict and theirs != ours and "patch_embed.proj.weight" in state_dict:
            raise RuntimeError(
                f"The weights come from a model with{'' if theirs else 'out'} norm_pre, the norm before depth, and "
                f"this has pre_norm={ours}: create it with pre_norm={theirs}."
            )
        return super().load_state_dict(state_dict, strict, assign)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are positions and scales, not weights."""
        kernel_parameters = ("mixer.offset", "mixer.width", "mixer.amplitude")
        names = {name for name, _ in self.named_parameters() if name.endswith(kernel_parameters)}
        return names | {"pos_embed"}

    @torch.jit.ignore()
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer decay."""
        return {"stem": STEM, "blocks": [(r"^blocks\.(\d+)", None), (r"^norm\.", (99999,))]}

    @torch.jit.ignore()
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for the backward pass and compute the rest anew."""
        self.grad_checkpointing = enable

    @torch.jit.ignore()
    def get_classifier(self) -> nn.Module:
        """The classifier head."""
        return self.head

    @torch.jit.ignore()
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one, and the pooling where given.

        Raises:
            ValueError: if the pooling is unknown, or the number of classes is none.
        """
        require_count("num_classes", num_classes)
        if global_pool is not None:
            _require_pool(global_pool)
        weight = self.patch_embed.proj.weight
        head = (
            nn.Linear(self.embed_dim, num_classes, device=weight.device, dtype=weight.dtype)
            if num_classes > 0
            else nn.Identity()
        )
        self.head = head.train(self.training)
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool

    @torch.jit.ignore()
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
        image = _pair("img_size", img_size) if img_size is not None else _pair("img_size", self.patch_embed.img_size)
        patch = (
            _pair("patch_size", patch_size)
            if patch_size is not None
            else _pair("patch_size", self.patch_embed.patch_size)
        )
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
        pad = self.patch_embed.dynamic_img_pad
        x = check_image(x, self.in_chans, patch_height, patch_width, pad)  # type: ignore[arg-type]
        # the blocks keep the memory layout of their input: without the copy all of them would run on strided tokens
        x = self.patch_embed(x).contiguous()
        if self.pos_embed is not None:
            _, height, width, _ = x.shape
            x = x + resample_abs_pos_embed_nhwc(self.pos_embed, [height, width])
        return self.norm_pre(self.pos_drop(x))

    @torch.jit.ignore()
    def _set_steps(self, steps: list[dict[str, Any]]) -> None:
        """Describe the steps of depth, each of which can be tapped for features."""
        self.num_steps = len(steps)
        shared = {"num_chs": self.embed_dim, "reduction": self.patch_embed.feat_ratio()}
        self.feature_info = [{**step, **shared} for step in steps]

    @torch.jit.ignore()
    def _truncate(self, steps: int) -> None:
        """Drop all depth behind the first ``steps`` steps."""
        self.blocks = self.blocks[:steps]
        self._set_steps([{"module": f"blocks.{index}"} for index in range(steps)])

    def _evolve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor]]:
        """Run the first ``stop`` steps of depth on tokens; return the last state and those behind ``taps``."""
        states: list[Tensor] = []
        ahead: list[tuple[Tensor, Tensor] | None] = []
        for index, block in enumerate(self.blocks):
            if index < stop:
                if torch.jit.is_scripting():
                    x = block(x)
                elif self.grad_checkpointing:
                    x = checkpoint(block, x)
                else:
                    ahead = ahead or kernels_ahead(list(self.blocks)[index:stop], x)
                    kernels = ahead.pop(0)
                    x = block(x) if kernels is None else block(x, kernels)
                if index in taps:
                    states.append(x)
        return x, states

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
        """Features after the final norm, and the tokens behind each chosen step of depth: a block, a loop or a time.

        Args:
            x: Images (batch, in_chans, height, width).
            indices: The last n steps if an int, these steps if a list, all if None.
            return_prefix_tokens: There are none; accepted as in timm's other transformers.
            norm: Apply the final norm to the intermediates too.
            stop_early: Do not go deeper than the last step asked for.
            output_fmt: ``"NCHW"`` or ``"NLC"``.
            intermediates_only: Return only the intermediates.
            output_dict: Return a dict with ``image_features`` and ``image_intermediates``.

        Returns:
            (features, intermediates), with features (batch, tokens, embed_dim).

        Raises:
            ValueError: if the output format is unknown.
        """
        require_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        take_indices, max_index = feature_take_indices(self.num_steps, indices)
        x, states = self._evolve(self._embed(x), take_indices, max_index + 1 if stop_early else self.num_steps)
        intermediates = []
        for state in states:
            taken = state.flatten(1, 2)
            taken = self.norm(taken) if norm else taken
            intermediates.append(
                taken.reshape(state.shape).permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else taken
            )
        if intermediates_only and not output_dict:
            return intermediates
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": intermediates}
            if not intermediates_only:
                result["image_features"] = self.norm(x.flatten(1, 2))
            return result
        return self.norm(x.flatten(1, 2)), intermediates

    @torch.jit.ignore()
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
        take_indices, max_index = feature_take_indices(self.num_steps, indices)
        self._truncate(max_index + 1)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take_indices

    @torch.jit.ignore()
    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] | tuple[int, ...] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Tensor]:
        """Tokens behind the chosen steps, in DINO's interface; `forward_intermediates` says more."""
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
        none: list[int] = []
        x, _ = self._evolve(self._embed(x), none, self.num_steps)
        return self.norm(x.flatten(1, 2))

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


class LoopedVitSsog(VitSsog):
    """The same ``depth`` blocks applied ``loops`` times over, ``depth x loops`` in all (DESIGN.md, section 2).

    One block looped L times is Euler's method with step 1 on the continuous model, bit for bit: the two share their
    checkpoints. Feature taps are loops. A forward hook on a block fires once per loop and sees what the block adds.

    Raises:
        ValueError: as `VitSsog`, and if ``loops`` is below one or ``input_injection`` unknown.
    """

    def __init__(
        self,
        depth: int = 1,
        loops: int = 12,
        loop_norms: bool = False,
        loop_embed: bool = False,
        input_injection: str = "none",
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            depth: Distinct blocks.
            loops: Times that they are repeated.
            loop_norms: Give every loop norms of its own (a learned scale and shift behind the shared ones, zero at
                first; MiniViT, arXiv 2204.07154, found shared norms to be what destabilises shared blocks).
            loop_embed: Add a learned embedding to the tokens before every loop, zero at first.
            input_injection: ``"add"`` adds the embedded image to the tokens before every loop, ``"none"`` does not.
            drop_path_rate: Stochastic depth rate of the last loop, rising linearly from 0.
            **kwargs: Arguments of `VitSsog`.
        """
        require_positive_int("loops", loops)
        _require_rate("drop_path_rate", drop_path_rate)
        require_choice("input_injection", input_injection, ("none", "add"))
        require_bool("loop_norms", loop_norms)
        require_bool("loop_embed", loop_embed)
        super().__init__(depth=depth, device=device, dtype=dtype, **kwargs)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.inject_input = input_injection == "add"
        self.drop_path_rate = drop_path_rate
        self.trained_loops = loops
        self.loop_modulation = nn.Parameter(torch.zeros(loops, depth, 4, self.embed_dim, **dd)) if loop_norms else None
        self.loop_embed = nn.Parameter(torch.zeros(loops, self.embed_dim, **dd)) if loop_embed else None
        self.set_loops(loops)

    @torch.jit.ignore()
    def set_loops(self, loops: int) -> None:
        """Change the number of loops of a model, without touching its weights.

        Fewer loops are the first ones. Loops beyond those the model was built with use the norms and the embedding of
        the last of those, where it has any.

        Raises:
            ValueError: if ``loops`` is below one.
        """
        require_positive_int("loops", loops)
        loops = int(loops)
        self.drop_path_rates = _drop_path_rates(self.drop_path_rate, loops)
        self._set_steps(
            [{"module": f"blocks.{len(self.blocks) - 1}@loop{loop + 1}", "loop": loop + 1} for loop in range(loops)]
        )

    @property
    def loops(self) -> int:
        """Times that the blocks are repeated."""
        return self.num_steps

    @torch.jit.ignore()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights; see `VitSsog.init_weights`."""
        super().init_weights(needs_reset)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("loop_"):
                nn.init.zeros_(parameter)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are positions and scales, not weights."""
        own = {name for name, _ in self.named_parameters(recurse=False) if name.startswith("loop_")}
        return super().no_weight_decay() | own

    @torch.jit.ignore()
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer decay."""
        return {
            "stem": STEM,
            "blocks": [(r"^blocks\.(\d+)", None), (r"^loop_", (0,)), (r"^norm\.", (99999,))],
        }

    @torch.jit.ignore()
    def _truncate(self, steps: int) -> None:
        self.set_loops(steps)
        self.trained_loops = min(steps, self.trained_loops)
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name.startswith("loop_"):
                kept = parameter.detach()[: self.trained_loops].clone()
                setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))

    def _evolve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor]]:
        _, height, width, _ = x.shape
        dtype = x.dtype
        first = as_state(x)
        state = first
        states: list[Tensor] = []
        kernels: list[tuple[Tensor, Tensor] | None] = []
        for block in self.blocks:
            if torch.jit.is_scripting():
                kernels.append(block.mixer.kernels(height, width))
            else:
                kernels.append(shared_kernels(block, x))
        for loop in range(stop):
            trained = min(loop, self.trained_loops - 1)
            if self.loop_embed is not None:
                state = state + self.loop_embed[trained]
            if self.inject_input:
                state = state + first
            state = self._apply_blocks(state, kernels, trained, self.drop_path_rates[loop], dtype)
            if loop in taps:
                states.append(state.to(dtype))
        return state.to(dtype), states

    def _apply_blocks(
        self,
        state: Tensor,
        kernels: list[tuple[Tensor, Tensor] | None],
        trained_loop: int,
        drop_path_rate: float,
        dtype: torch.dtype,
    ) -> Tensor:
        for index, block in enumerate(self.blocks):
            modulation = self.loop_modulation[trained_loop, index] if self.loop_modulation is not None else None
            if self.grad_checkpointing and not torch.jit.is_scripting():
                delta = checkpoint(block, state.to(dtype), kernels[index], modulation, False)
            else:
                delta = block(state.to(dtype), kernels[index], modulation, False)
            if self.training and drop_path_rate > 0.0:
                delta = drop_path(delta, drop_path_rate, self.training)
            state = advance(state, [delta], [1.0], 1.0)
        return state


class OdeVitSsog(VitSsog):
    """Continuous depth: ``dx/dt = delta(x)``, from the embedded image at t = 0 to t = ``horizon``.

    With several blocks the velocity is piecewise constant in t, each block in force for an equal part (DESIGN.md,
    section 3). The state is kept in float32, the velocity runs in the model's or autocast's dtype. Feature taps are the
    ends of ``solver_steps`` equal intervals, whatever the solver. A forward hook on a block fires once per solver stage
    and sees the velocity.

    Raises:
        ValueError: as `VitSsog`, and if a solver setting is unknown, out of range or does not go with another.
    """

    stages: list[list[float]]
    weights: list[float]
    solver: str
    rtol: float
    atol: float
    adjoint: bool
    per_sample: bool
    max_evaluations: int

    def __init__(
        self,
        depth: int = 1,
        horizon: float = 12.0,
        solver: str = "midpoint",
        solver_steps: int = 6,
        rtol: float = 1e-3,
        atol: float = 1e-3,
        adjoint: bool = False,
        per_sample: bool = False,
        max_evaluations: int = 1000,
        jitter: bool = False,
        flow_penalty: str = "none",
        flow_weight: float = 1.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            depth: Distinct blocks.
            horizon: End of the time interval; a horizon of 12 is as deep as 12 blocks.
            solver: A fixed-step method (``"euler"``, ``"midpoint"``, ``"heun"``, ``"rk4"``) or an adaptive one
                (``"dopri5"``, ``"dopri8"``, ``"bosh3"``, ``"fehlberg2"``, ``"adaptive_heun"``).
            solver_steps: Steps of a fixed-step method over the horizon; for adaptive ones just the feature taps.
            rtol: Relative tolerance of an adaptive method.
            atol: Absolute tolerance of an adaptive method.
            adjoint: Backpropagate by the adjoint equation, in memory that does not grow with the steps, but for a flow
                penalty's one state and the terms of its mean squares for each of ``solver_steps`` intervals.
            per_sample: Step every image by itself, so that no prediction depends on batch-mates, as it never does with
                a fixed-step method.
            max_evaluations: Evaluations of the velocity after which an adaptive solve gives up.
            jitter: In training, shift the step grid by a random part of a step, so that it can't be memorised.
            flow_penalty: What training minimises beside the loss, so that the model becomes the flow of its equation
                (`timm_ssog.flow`): ``"error"``, ``"kinetic"``, ``"both"`` or ``"none"``.
            flow_weight: How strongly, relative to the gradient of the loss; 0 for not at all.
            proj_drop_rate: Only 0 is possible; here so that asking for dropout says why.
            drop_path_rate: Stochastic depth rate of the last step, rising linearly from 0 (fixed-step only).
            **kwargs: Arguments of `VitSsog`.
        """
        if proj_drop_rate:
            raise ValueError(
                f"A continuous model has no dropout in its velocity, got proj_drop_rate={proj_drop_rate}: every solver "
                f"stage would see another velocity and no solver could converge. Use drop_path_rate, whose mask is "
                f"shared by the stages of a step."
            )
        _require_rate("drop_path_rate", drop_path_rate)
        if not isinstance(horizon, (int, float)) or not 0 < horizon < math.inf:
            raise ValueError(f"horizon must be positive and finite, got {horizon!r}.")
        require_bool("jitter", jitter)
        _check_solver(solver, solver_steps, rtol, atol, adjoint, per_sample, max_evaluations)
        if solver in ADAPTIVE_SOLVERS or adjoint:
            _require_no_noise(drop_path_rate, jitter, solver, adjoint)
        require_choice("flow_penalty", flow_penalty, FLOW_PENALTIES)
        if not isinstance(flow_weight, (int, float)) or not 0 <= flow_weight < math.inf:
            raise ValueError(f"flow_weight must be 0 or more, and finite, got {flow_weight!r}.")
        super().__init__(depth=depth, **kwargs)
        self.flow_penalty = flow_penalty
        self.flow_weight = float(flow_weight)
        self.horizon = float(horizon)
        self.block_span = self.horizon / depth
        self.drop_path_rate = drop_path_rate
        self.jitter = jitter
        self.set_solver(solver, solver_steps, rtol, atol, adjoint, per_sample, max_evaluations)

    @torch.jit.ignore()
    def set_solver(
        self,
        solver: str | None = None,
        solver_steps: int | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        adjoint: bool | None = None,
        per_sample: bool | None = None,
        max_evaluations: int | None = None,
    ) -> None:
        """Change how the model is solved, without touching its weights; what is left out stays as it is.

        Arguments as those of the class.

        Raises:
            ValueError: as the class; the settings are then left as they were.
        """
        settings = {
            "solver": self.solver if solver is None else solver,
            "solver_steps": self.num_steps if solver_steps is None else solver_steps,
            "rtol": self.rtol if rtol is None else rtol,
            "atol": self.atol if atol is None else atol,
            "adjoint": self.adjoint if adjoint is None else adjoint,
            "per_sample": self.per_sample if per_sample is None else per_sample,
            "max_evaluations": self.max_evaluations if max_evaluations is None else max_evaluations,
        }
        _check_solver(**settings)
        steps = int(settings.pop("solver_steps"))
        is_fixed_step = settings["solver"] in TABLEAUS
        steps_per_block = steps * self.block_span / self.horizon
        if is_fixed_step and len(self.blocks) > 1 and abs(steps_per_block - round(steps_per_block)) > 1e-6:
            raise ValueError(
                f"solver_steps must give every one of the {len(self.blocks)} blocks a whole number of steps, got "
                f"{steps}: use a multiple of {len(self.blocks)}."
            )
        for name, value in settings.items():
            setattr(self, name, value)
        self.is_fixed_step = is_fixed_step
        self.stages, self.weights, _ = TABLEAUS[self.solver if is_fixed_step else "euler"]
        self.step_size = self.horizon / steps
        self.steps_per_block = steps if len(self.blocks) == 1 else max(round(steps_per_block), 1)
        self.drop_path_rates = _drop_path_rates(self.drop_path_rate, steps)
        self._set_steps([self._describe_step(index) for index in range(steps)])

    @torch.jit.ignore()
    def _block_at(self, step: int) -> int:
        """Index of the block in force when a step begins."""
        return min(int(step * self.step_size / self.block_span + 1e-6), len(self.blocks) - 1)

    @torch.jit.ignore()
    def _describe_step(self, index: int) -> dict[str, Any]:
        return {"module": f"blocks.{self._block_at(index)}@step{index + 1}", "time": (index + 1) * self.step_size}

    @torch.jit.ignore()
    def _truncate(self, steps: int) -> None:
        self.horizon = steps * self.step_size
        self.blocks = self.blocks[: math.ceil(self.horizon / self.block_span - 1e-6)]
        self.drop_path_rates = self.drop_path_rates[:steps]
        self._set_steps([self._describe_step(index) for index in range(steps)])

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, height, width) to logits (batch, num_classes).

        In training, the gradient of whatever loss is made of the logits carries that of the flow penalty.
        """
        if self.training and self.flow_weight > 0.0 and self.flow_penalty != "none" and torch.is_grad_enabled():
            if torch.jit.is_scripting():
                raise RuntimeError("A scripted model can't train with a flow penalty: create it with flow_weight=0.")
            if not is_captured():
                logits, penalties = self.forward_with_penalty(x)
                return pull_on_backward(logits, penalties, self.flow_weight)
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore()
    def forward_with_penalty(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the flow penalty with its gradient, whose mean a loop of one's own adds to its loss.

        Other than in `forward`, the gradient of the logits does not carry the penalty: nothing is counted twice, and
        ``flow_weight`` is not applied.

        Args:
            x: Images (batch, in_chans, height, width).

        Returns:
            (logits, penalties), with logits (batch, num_classes) and penalties (batch,).

        Raises:
            ValueError: if the model has no flow penalty, or its solver no error to penalise.
        """
        if self.flow_penalty == "none":
            raise ValueError("The model has no flow penalty: create it with flow_penalty='error', 'kinetic' or 'both'.")
        terms: list[Tensor] = []
        none: list[int] = []
        state, _ = self._integrate(self._embed(x), none, self.num_steps, terms)
        if not terms:
            raise ValueError(
                f"flow_penalty='error' needs two steps per block with solver={self.solver!r}, which has one velocity a "
                f"step, got solver_steps={self.num_steps} for {len(self.blocks)} blocks: use flow_penalty='kinetic', "
                f"solver='midpoint' or more steps."
            )
        return self.forward_head(self.norm(state.flatten(1, 2))), torch.stack(terms).sum(0)

    def _evolve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor]]:
        return self._integrate(x, taps, stop, None)

    def _integrate(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Evolve, and collect the penalty (batch,) of every step where a list is given for it."""
        error, kinetic = self.flow_penalty != "kinetic", self.flow_penalty != "error"
        if not torch.jit.is_scripting():
            # without gradients there is nothing to take by the adjoint, and the plain loop is the same solve
            if (self.adjoint and torch.is_grad_enabled()) or not self.is_fixed_step:
                return self._solve(x, taps, stop, penalties)
        elif not self.is_fixed_step:
            raise RuntimeError("An adaptive solver can't be scripted: set_solver('rk4') or another fixed-step method.")
        _, height, width, _ = x.shape
        dtype = x.dtype
        state = as_state(x)
        states: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            kernels: tuple[Tensor, Tensor] | None = None
            if torch.jit.is_scripting():
                kernels = block.mixer.kernels(height, width)
            else:
                kernels = shared_kernels(block, x)
            first = index * self.steps_per_block
            steps = min(self.steps_per_block, stop - first)
            phase: Tensor | None = None
            if self.jitter and self.training and steps > 0:
                phase = torch.rand([1], device=state.device)  # the first step is cut short, and one more ends the grid
                steps += 1
            before: Tensor | None = None
            for step in range(steps):
                number = first + min(step, self.steps_per_block - 1)
                speed = self._random_speed(state, self.drop_path_rates[number], phase, step == 0, step == steps - 1)
                slopes: list[Tensor] = []
                full: list[Tensor] = []
                start = state
                for stage in self.stages:
                    at = advance(state, slopes, stage, self.step_size).to(dtype)
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        slope = checkpoint(block, at, kernels, None, False)
                    else:
                        slope = block(at, kernels, None, False)
                    full.append(slope)
                    slopes.append(slope if speed is None else slope * speed)
                state = advance(state, slopes, self.weights, self.step_size)
                if penalties is not None and not torch.jit.is_scripting():
                    term = step_penalty(start, full, self.weights, self.step_size, before, error, kinetic)
                    before = full[0]
                    if term is not None:
                        penalties.append(term)
                if number in taps and (phase is None or step < steps - 1):
                    states.append(state.to(dtype))
        return state.to(dtype), states

    def _random_speed(
        self, state: Tensor, drop_path_rate: float, phase: Tensor | None, is_first: bool, is_last: bool
    ) -> Tensor | None:
        """What training multiplies all slopes of a step by: its share of a jittered grid and its stochastic depth."""
        speed: Tensor | None = None
        if phase is not None:
            if is_first:
                speed = phase
            elif is_last:
                speed = 1 - phase
        if self.training and drop_path_rate > 0.0:
            kept = drop_path(torch.ones([state.shape[0], 1, 1, 1], device=state.device), drop_path_rate, True)
            speed = kept if speed is None else speed * kept
        return speed

    @torch.jit.unused
    def _solve(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        every = list(range(stop)) if penalties is not None else taps
        state, states, _ = self._solve_traced(x, every, stop)
        if penalties is not None:
            self._penalise_taps([as_state(x), *states[:-1]], x.dtype, penalties)
            states = [states[step] for step in taps]
        return state, states

    @torch.jit.unused
    def _penalise_taps(self, states: list[Tensor], dtype: torch.dtype, penalties: list[Tensor]) -> None:
        """Collect penalties from one velocity at the start of each feature interval, for solves that show no stages."""
        error, kinetic = self.flow_penalty != "kinetic", self.flow_penalty != "error"
        for index, block in enumerate(self.blocks):
            kernels = shared_kernels(block, states[0])
            before: Tensor | None = None
            for step, state in enumerate(states):
                if self._block_at(step) == index:
                    if self.adjoint or self.grad_checkpointing:
                        slope = checkpoint(block, state.to(dtype), kernels, None, False)
                    else:
                        slope = block(state.to(dtype), kernels, None, False)
                    wide = as_state(state)
                    term = step_penalty(wide, [slope], [1.0], self.step_size, before, error, kinetic)
                    before = slope
                    if term is not None:
                        penalties.append(term)

    @torch.jit.unused
    def _solve_traced(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor], list[SolveTrace]]:
        """Solve by `timm_ssog.ode`, one block's part of the horizon after the other."""
        if self.training:
            _require_no_noise(self.drop_path_rate, self.jitter, self.solver, self.adjoint)
        dtype = x.dtype
        state = as_state(x)
        states, traces = [], []
        for index, block in enumerate(self.blocks):
            start, last = index * self.block_span, min((index + 1) * self.block_span, stop * self.step_size)
            slack = 1e-6 * self.step_size
            if last <= start + slack:
                break
            # an adaptive solve lands on all times, so that taps don't change it; a fixed grid needs none but the taps
            wanted = taps if self.is_fixed_step else range(stop)
            ends = [step for step in wanted if start + slack < (step + 1) * self.step_size < last - slack]
            times = [start, *((step + 1) * self.step_size for step in ends), last]
            solved, trace = self._solve_block(block, state, shared_kernels(block, x), times, dtype)  # type: ignore[arg-type]
            traces.append(trace)
            state = solved[-1]
            at = dict(zip(ends, solved, strict=False))
            step = round(last / self.step_size)
            if abs(step * self.step_size - last) < slack:  # else the block ends between two taps
                at[step - 1] = state
            states.extend(tensor.to(dtype) for step, tensor in sorted(at.items()) if step in taps)
        return state.to(dtype), states, traces

    @torch.jit.unused
    def _solve_block(
        self, block: Block, state: Tensor, kernels: tuple[Tensor, Tensor] | None, times: list[float], dtype: torch.dtype
    ) -> tuple[list[Tensor], SolveTrace]:
        def velocity(at: Tensor) -> Tensor:
            if self.grad_checkpointing:
                slope = checkpoint(block, at.to(dtype), kernels, None, False)
            else:
                slope = block(at.to(dtype), kernels, None, False)
            return slope.to(at.dtype)

        parameters = None
        if self.adjoint and torch.is_grad_enabled():
            # the kernels are functions of these three: passing both would count their gradient twice
            behind_kernels = () if kernels is None else ("mixer.offset", "mixer.width", "mixer.amplitude")
            weights = [p for name, p in block.named_parameters() if not name.endswith(behind_kernels)]
            parameters = [p for p in (*weights, *(kernels or ())) if p.requires_grad]
        if self.is_fixed_step:
            return solve_fixed_adjoint(velocity, state, times, self.solver, self.step_size, parameters or [])
        tolerances = (self.solver, self.rtol, self.atol, self.max_evaluations)
        if self.per_sample:
            # one call for all images pays on a GPU only, and costs the last bits of their independence
            return solve_per_sample(velocity, state, times, *tolerances, together=state.device.type != "cpu")
        return solve_adaptive(velocity, state, times, *tolerances, parameters=parameters)


def _check_solver(
    solver: str,
    solver_steps: int,
    rtol: float,
    atol: float,
    adjoint: bool,
    per_sample: bool,
    max_evaluations: int,
) -> None:
    require_choice("solver", solver, (*TABLEAUS, *ADAPTIVE_SOLVERS))
    require_positive_int("solver_steps", solver_steps)
    require_positive_int("max_evaluations", max_evaluations)
    require_bool("adjoint", adjoint)
    require_bool("per_sample", per_sample)
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {tolerance!r}.")
    if solver in TABLEAUS or not per_sample:
        return
    if solver not in PER_SAMPLE_SOLVERS:
        raise ValueError(
            f"per_sample needs one of the adaptive solvers {', '.join(map(repr, PER_SAMPLE_SOLVERS))} or a fixed-step "
            f"one, got {solver!r}."
        )
    if adjoint:
        raise ValueError(
            "adjoint and per_sample don't go together: the adjoint equation of a batch has one clock, per_sample has "
            "one an image. Choose one of them."
        )


def _require_no_noise(drop_path_rate: float, jitter: bool, solver: str, adjoint: bool) -> None:
    if drop_path_rate or jitter:
        raise ValueError(
            f"drop_path and jitter need a fixed-step solver without the adjoint, got drop_path_rate={drop_path_rate} "
            f"and jitter={jitter} with solver={solver!r} and adjoint={adjoint}: they act on the steps of such a "
            f"solver; an adaptive one would see its velocity change from stage to stage and accept no step. Set "
            f"drop_path_rate=0 and jitter=False, or solver='rk4' and adjoint=False."
        )


def _pair(name: str, size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an integer or a pair (height, width), got {size!r}.")
    for length in pair:
        require_positive_int(name, length)
    return operator.index(pair[0]), operator.index(pair[1])


def _require_rate(name: str, rate: float) -> None:
    if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {rate!r}.")


def _require_hidden(mlp_ratio: Any, embed_dim: int) -> None:
    hidden = float(mlp_ratio) * embed_dim if isinstance(mlp_ratio, numbers.Real) else 0.0
    if not 1 <= hidden < math.inf:
        raise ValueError(
            f"mlp_ratio must be a finite number that gives the MLP a hidden channel at least, got {mlp_ratio!r} with "
            f"embed_dim={embed_dim}."
        )


def _require_dtype(dtype: Any) -> None:
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, float64, bfloat16 or float16, got {dtype!r}.")


def _drop_path_rates(rate: float, steps: int) -> list[float]:
    """Stochastic depth rates that rise linearly from 0 to ``rate``."""
    return [float(step_rate) for step_rate in calculate_drop_path_rates(rate, steps)]  # type: ignore[arg-type]


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


def _require_sound(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    floating = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    for name, tensor in state_dict.items():
        if isinstance(name, str) and name.startswith(prefix) and name.endswith(GRIDS):
            _require_grid(name, tensor)
        if not isinstance(name, str) or not name.startswith(prefix) or not torch.is_tensor(tensor) or tensor.is_meta:
            continue
        if not tensor.is_floating_point() and name[len(prefix) :] in floating:
            raise ValueError(
                f"{name} of the checkpoint must be of floating point, got {tensor.dtype}; the model was left as it "
                f"was. Weights that were quantised have to be scaled back first."
            )
        if tensor.is_floating_point() and tensor.itemsize == 1:
            tensor = tensor.float()  # float8 has no test for NaN
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{name} of the checkpoint holds {bad} values of {tensor.numel()} that are NaN or infinite; the model "
                f"was left as it was. The training run diverged: take an earlier checkpoint."
            )


def _require_grid(name: str, tensor: Any) -> None:
    grid: Any = tensor
    if torch.is_tensor(tensor) and tensor.is_meta:
        return  # which loads nothing
    if torch.is_tensor(tensor) and not tensor.is_complex() and tensor.dtype != torch.bool:
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            return  # which is said of any tensor
        grid = grid_of_digits(tensor) if tensor.shape == (2, 3) else tuple(tensor.flatten().tolist())
        if len(grid) == 2 and min(grid) >= 1:
            return
    elif torch.is_tensor(tensor):
        grid = f"a tensor of {tensor.dtype} on {tensor.device}"
    raise ValueError(
        f"{name} of the checkpoint must be the grid (height, width) that its kernels are measured on, got {grid}; the "
        f"model was left as it was. The file is damaged: take another copy."
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


def _require_tensors(state_dict: Any) -> None:
    bad = state_dict
    if isinstance(state_dict, Mapping):
        wrong = [name for name, tensor in state_dict.items() if not (isinstance(name, str) and torch.is_tensor(tensor))]
        if not wrong:
            return
        bad = f"{type(state_dict[wrong[0]]).__name__} under {wrong[0]!r}"
    else:
        bad = type(state_dict).__name__
    raise ValueError(f"Expected a checkpoint of tensors by name, got {bad}: it is not one of a model alone.")


def _unseen_by_shape(model: VitSsog) -> dict[str, Any]:
    """Options under which the same tensors are another function, and which nobody changes but by retraining."""
    block: Any = model.blocks[0]
    options: dict[str, Any] = {"norm_layer": block.norm1, "act_layer": block.mlp.act}
    if isinstance(block.mixer, SeparableMixer):
        options["amplitude"] = "convex" if block.mixer.convex else "signed"
    if isinstance(model, LoopedVitSsog):
        options["input_injection"] = "add" if model.inject_input else "none"
    return options


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VitSsog) -> dict[str, Tensor]:
    """Fit a checkpoint to the model: unwrap it, and resample patch and position embeddings of another size.

    Warns where it was published with options under which its weights are another function.

    Raises:
        ValueError: if it was published with a digest and has another, or is no mapping of names to tensors.
    """
    for key in ("model", "state_dict"):
        if isinstance(state_dict, Mapping):
            state_dict = state_dict.get(key, state_dict)
    _require_tensors(state_dict)
    config: Any = getattr(model, "pretrained_cfg", {})
    published = getattr(model, "pretrained_model_args", {})
    check_digests(state_dict, config, published)
    warn_of_other_layers(published, _unseen_by_shape(model), model.embed_dim)
    out = {}
    for name, tensor in state_dict.items():
        # what no resampling can mend is for load_state_dict to refuse
        if name == "patch_embed.proj.weight" and tensor.dim() == 4 and tensor.numel() > 0:
            if tensor.shape[-2:] != model.patch_embed.proj.weight.shape[-2:]:
                size = list(_pair("patch_size", model.patch_embed.patch_size))
                tensor = resample_patch_embed(tensor, size, verbose=True)
        elif name == "pos_embed" and model.pos_embed is not None and tensor.dim() == 4 and tensor.numel() > 0:
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


# A published checkpoint is one more row: `python -m timm_ssog push` prints it, with the commit it verified and the
# digest of its weights. timm offers a row's weights wherever it lists pretrained models, so each must be there.
default_cfgs = generate_default_cfgs(
    {
        "vit_ssog_tiny.untrained": _cfg(),
        "vit_ssog_small.untrained": _cfg(),
        "vit_ssog_base.untrained": _cfg(),
        "vit_ssog_tiny_looped.untrained": _cfg(),
        "vit_ssog_small_looped.untrained": _cfg(),
        "vit_ssog_base_looped.untrained": _cfg(),
        "vit_ssog_tiny_ode.untrained": _cfg(),
        "vit_ssog_small_ode.untrained": _cfg(),
        "vit_ssog_base_ode.untrained": _cfg(),
    }
)


def _create_vit_ssog(
    variant: str, pretrained: bool = False, model_cls: type[VitSsog] = VitSsog, **kwargs: Any
) -> VitSsog:
    out_indices = kwargs.pop("out_indices", 3)
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
    # the digests are of the published weights; kept, they would be saved with those that the model gets in training
    for module in (model, getattr(model, "model", None)):  # with features_only, the wrapper and what it wraps
        if isinstance(module, nn.Module) and isinstance(config := getattr(module, "pretrained_cfg", None), dict):
            without_digests(config)
    return model


# A looped model starts as the continuous one does, whose checkpoints it shares. Why these: examples/lab/flow.py.
LOOPED_ARGS: dict[str, Any] = {"depth": 1, "loops": 12, "pre_norm": True}
ODE_ARGS: dict[str, Any] = {
    "depth": 1,
    "horizon": 12.0,
    "pre_norm": True,
    "flow_penalty": "both",
    "flow_weight": 1.0,
}


@register_model
def vit_ssog_tiny(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 192 with 3 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create_vit_ssog("vit_ssog_tiny", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_ssog_small(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 384 with 6 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create_vit_ssog("vit_ssog_small", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_ssog_base(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """Twelve blocks of width 768 with 12 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create_vit_ssog("vit_ssog_base", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_ssog_tiny_looped(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block, looped twelve times, of width 192 with 3 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, **LOOPED_ARGS}
    return _create_vit_ssog("vit_ssog_tiny_looped", pretrained, model_cls=LoopedVitSsog, **dict(model_args, **kwargs))


@register_model
def vit_ssog_small_looped(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block, looped twelve times, of width 384 with 6 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 384, "num_heads": 6, **LOOPED_ARGS}
    return _create_vit_ssog("vit_ssog_small_looped", pretrained, model_cls=LoopedVitSsog, **dict(model_args, **kwargs))


@register_model
def vit_ssog_base_looped(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block, looped twelve times, of width 768 with 12 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 768, "num_heads": 12, **LOOPED_ARGS}
    return _create_vit_ssog("vit_ssog_base_looped", pretrained, model_cls=LoopedVitSsog, **dict(model_args, **kwargs))


@register_model
def vit_ssog_tiny_ode(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block as a velocity over a horizon of twelve, of width 192 with 3 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, **ODE_ARGS}
    return _create_vit_ssog("vit_ssog_tiny_ode", pretrained, model_cls=OdeVitSsog, **dict(model_args, **kwargs))


@register_model
def vit_ssog_small_ode(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block as a velocity over a horizon of twelve, of width 384 with 6 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 384, "num_heads": 6, **ODE_ARGS}
    return _create_vit_ssog("vit_ssog_small_ode", pretrained, model_cls=OdeVitSsog, **dict(model_args, **kwargs))


@register_model
def vit_ssog_base_ode(pretrained: bool = False, **kwargs: Any) -> VitSsog:
    """One block as a velocity over a horizon of twelve, of width 768 with 12 heads, patch 16."""
    model_args: dict[str, Any] = {"embed_dim": 768, "num_heads": 12, **ODE_ARGS}
    return _create_vit_ssog("vit_ssog_base_ode", pretrained, model_cls=OdeVitSsog, **dict(model_args, **kwargs))
