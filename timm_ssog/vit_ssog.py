"""Vision Transformer with separable Gaussian token mixing (SSoG) in place of self-attention.

Source: 'Beyond Quadratic Attention: Separable Gaussian Operators for ODE Vision Transformers' (arXiv preprint).
The operator is defined in `timm_ssog.ops`, the block in `timm_ssog.layers`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    LayerNorm,
    LayerType,
    PatchEmbed,
    drop_path,
    global_pool_nlc,
    resample_abs_pos_embed_nhwc,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, named_apply, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn
from torch.jit import Final

from timm_ssog.arguments import (
    check_image,
    require_bools,
    require_dtype,
    require_hidden,
    require_no_dropout,
    require_no_noise,
    require_no_prefix,
    require_patches,
    require_pool,
    require_rates,
)
from timm_ssog.checkpoints import checkpoint_filter_fn, require_same_norm, require_sound
from timm_ssog.digest import without_digests
from timm_ssog.errors import (
    require_choice,
    require_count,
    require_number,
    require_positive,
    require_positive_int,
)
from timm_ssog.flow import FLOW_PENALTIES, pull_on_backward, step_penalty
from timm_ssog.hybrid import mixer_layers
from timm_ssog.layers import Block, init_weights, kernels_ahead, shared_kernels
from timm_ssog.ode import SOLVER_OPTIONS, Solver, SolveTrace, TimeGrid
from timm_ssog.ops.capture import is_captured
from timm_ssog.runge_kutta import advance, as_state
from timm_ssog.solving import drop_path_rates, random_speed, require_terms, solve_blocks, tap_penalties
from timm_ssog.sublayers import act_class, norm_class

__all__ = ["LoopedVitSsog", "OdeVitSsog", "VitSsog"]  # register_model adds each entrypoint

# plain torch.fx tracers (torchvision) call these without tracing them, as timm does: they branch on sizes and dtypes
torch.fx.wrap("check_image")
torch.fx.wrap("as_state")
torch.fx.wrap("pull_on_backward")
torch.fx.wrap("resample_abs_pos_embed_nhwc")


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
        mixer: str | Sequence[str] = "ssog",
        steering: str = "none",
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
            mixer: ``"ssog"``, its dense twin ``"attention"``, or ``"identity"`` (mixes nothing: the speed ceiling); or
                for a hybrid a name per block, in short ``"ssog*9+attention*3"``.
            steering: ``"none"``, or how kernels listen to the content: ``"value"``, ``"amplitude"`` or ``"shift"``.
            num_components: Gaussians per head.
            amplitude: ``"signed"`` (free weights) or ``"convex"`` (softmax of logits).
            kernel_coords: ``"relative"`` (kernels stretch with the grid) or ``"cells"`` (their reach stays in cells).
            init_width: Initial standard deviation of the Gaussians, in cells.
            init_offset: Standard deviation of their initial offsets, in cells.
            class_token: Only False is possible; accepted so that the error can say why.
            reg_tokens: Only 0 is possible, likewise.
            pos_embed: ``"learn"`` or ``"none"``.
            pre_norm: Normalise the tokens (LayerNorm, whatever ``norm_layer`` is) before the first block.
            fc_norm: Apply the final norm after the pooling.
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
        require_choice("pos_embed", pos_embed, ("learn", "none", ""))
        require_positive_int("embed_dim", embed_dim)
        require_positive_int("in_chans", in_chans)
        require_count("num_classes", num_classes)
        require_hidden(mlp_ratio, embed_dim)
        require_bools(
            pre_norm=pre_norm, fc_norm=fc_norm, dynamic_img_size=dynamic_img_size, dynamic_img_pad=dynamic_img_pad
        )
        require_rates(
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        require_dtype(dtype)
        require_no_prefix(class_token, reg_tokens)
        require_pool(global_pool)
        image, patch = require_patches(img_size, patch_size)
        grid_size = (image[0] // patch[0], image[1] // patch[1])
        require_positive_int("depth", depth)
        depth = int(depth)  # it may be numpy's; timm wants Python's
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

        kernels = {
            "num_components": num_components,
            "amplitude": amplitude,
            "kernel_coords": kernel_coords,
            "init_width": init_width,
            "init_offset": init_offset,
        }
        mixers = mixer_layers(mixer, depth, num_heads, grid_size, steering, **kernels)
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
                for mixer_layer, rate in zip(mixers, drop_path_rates(drop_path_rate, depth), strict=True)
            ]
        )
        self._set_steps([{"module": f"blocks.{index}"} for index in range(depth)])

        self.norm = nn.Identity() if fc_norm else norm(embed_dim, **dd)
        self.fc_norm = norm(embed_dim, **dd) if fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()

        self.register_load_state_dict_pre_hook(require_sound)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights.

        Args:
            needs_reset: Also reset modules that initialise themselves at construction; False right after it.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name == "pos_embed":
                trunc_normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)  # the additions of the loops
        named_apply(partial(init_weights, needs_reset=needs_reset), self)

    @torch.jit.ignore()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as torch does.

        Raises:
            RuntimeError: as torch's, and if the weights come from a model with the other ``pre_norm``.
        """
        if strict:  # which torch doesn't tell its hooks
            require_same_norm(state_dict, pre_norm=not isinstance(self.norm_pre, nn.Identity))
        return super().load_state_dict(state_dict, strict, assign)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are positions and scales, not weights."""
        kernels = ("mixer.offset", "mixer.width", "mixer.amplitude")
        names = {name for name, _ in self.named_parameters() if name.endswith(kernels) or name.startswith("loop_")}
        return names | {"pos_embed"}

    @torch.jit.ignore()
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer decay."""
        return {
            "stem": r"^pos_embed|patch_embed|norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^loop_", (0,)), (r"^norm\.", (99999,))],
        }

    @torch.jit.ignore()
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for the backward pass and compute the rest again."""
        self.grad_checkpointing = enable

    @torch.jit.ignore()
    def get_classifier(self) -> nn.Module:
        """The classifier head."""
        return self.head

    @torch.jit.ignore()
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head with a new one, and the pooling if given.

        Raises:
            ValueError: if the pooling is unknown, or the number of classes is not an integer of at least 0.
        """
        require_count("num_classes", num_classes)
        if global_pool is not None:
            require_pool(global_pool)
        weight = self.patch_embed.proj.weight
        dd: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
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
        image, patch = require_patches(
            self.patch_embed.img_size if img_size is None else img_size,
            self.patch_embed.patch_size if patch_size is None else patch_size,
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
        update_model_input_size(self, image, patch_size=patch_size)

    def embed(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, height, width) to the tokens (batch, height, width, embed_dim) before depth."""
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
        """Drop all depth after the first ``steps`` steps."""
        self.blocks = self.blocks[:steps]
        self._set_steps([{"module": f"blocks.{index}"} for index in range(steps)])

    def _kernels(self, x: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Kernels of every block for all its calls on tokens; None where a block builds its own."""
        _, height, width, _ = x.shape
        kernels: list[tuple[Tensor, Tensor] | None] = []
        for block in self.blocks:
            if torch.jit.is_scripting():
                kernels.append(block.mixer.kernels(height, width))
            else:
                kernels.append(shared_kernels(block, x))
        return kernels

    def evolve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor]]:
        """Run the first ``stop`` steps of depth on tokens; return the last state and those after ``taps``."""
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
        """Features after the final norm, and the tokens after each chosen step of depth: a block, a loop or a time.

        Args:
            x: Images (batch, in_chans, height, width).
            indices: The last n steps if an int, these steps if a list, all if None.
            return_prefix_tokens: Has no effect, because there are none; accepted as in timm's other transformers.
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
        x, states = self.evolve(self.embed(x), take_indices, max_index + 1 if stop_early else self.num_steps)
        intermediates = []
        for state in states:
            taken = state.flatten(1, 2)
            taken = self.norm(taken) if norm else taken
            intermediates.append(
                taken.reshape(state.shape).permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else taken
            )
        result: dict[str, Any] = {"image_intermediates": intermediates}
        if not intermediates_only:
            result["image_features"] = self.norm(x.flatten(1, 2))
        if output_dict:
            return result
        return intermediates if intermediates_only else (result["image_features"], intermediates)

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
        """Tokens after the chosen steps, in DINO's interface; see `forward_intermediates`."""
        return self.forward_intermediates(  # type: ignore[return-value]
            x,
            n if isinstance(n, int) else list(n),
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images to tokens (batch, tokens, embed_dim) after the final norm."""
        none: list[int] = []
        x, _ = self.evolve(self.embed(x), none, self.num_steps)
        return self.norm(x.flatten(1, 2))

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool tokens (batch, tokens, embed_dim) as ``pool_type`` or the model says."""
        return global_pool_nlc(x, pool_type=self.global_pool if pool_type is None else pool_type, num_prefix_tokens=0)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens to logits, or to what the classifier sees."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, height, width) to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))


class SharedVitSsog(VitSsog):
    """What the looped and the continuous model share: blocks in repeated use, and a penalty on how the state moves."""

    def __init__(self, depth: int, flow_penalty: str, flow_weight: float, **kwargs: Any) -> None:
        require_choice("flow_penalty", flow_penalty, tuple(FLOW_PENALTIES))
        require_number("flow_weight", flow_weight, "0 or more, and finite", 0)
        super().__init__(depth=depth, **kwargs)
        self.flow_penalty = flow_penalty
        self.flow_weight = float(flow_weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_chans, height, width) to logits (batch, num_classes).

        In training, the gradient of any loss computed from the logits also carries that of the flow penalty.
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
        """Logits, and the flow penalty with its gradient; your own training loop adds its mean to the loss.

        Unlike in `forward`, the gradient of the logits does not carry the penalty, so nothing counts twice, and
        ``flow_weight`` is not applied.

        Args:
            x: Images (batch, in_chans, height, width).

        Returns:
            (logits, penalties), with logits (batch, num_classes) and penalties (batch,).

        Raises:
            ValueError: if the model has no flow penalty, or nothing to penalise.
        """
        if self.flow_penalty == "none":
            raise ValueError("The model has no flow penalty: create it with flow_penalty='error', 'kinetic' or 'both'.")
        terms: list[Tensor] = []
        state, _ = self._integrate(self.embed(x), [], self.num_steps, terms)
        require_terms(terms, self.num_steps, len(self.blocks))
        return self.forward_head(self.norm(state.flatten(1, 2))), torch.stack(terms).sum(0)

    def evolve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor]]:
        """Run the first ``stop`` loops, or intervals of time; return the last state and those after ``taps``."""
        return self._integrate(x, taps, stop, None)

    def _integrate(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Evolve, and collect the penalty (batch,) of every step if there is a list for it."""
        raise NotImplementedError  # abstract: loops and solvers step in their own ways


class LoopedVitSsog(SharedVitSsog):
    """The same ``depth`` blocks applied ``loops`` times, ``depth x loops`` blocks in all (DESIGN.md, section 2).

    One block looped L times is Euler's method with step 1 on the continuous model, bit for bit: the two share
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
        flow_penalty: str = "none",
        flow_weight: float = 1.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            depth: Distinct blocks.
            loops: How often they are repeated.
            loop_norms: Give every loop its own norms (a learned scale and shift after the shared ones, initially zero;
                MiniViT, arXiv 2204.07154, found that shared norms destabilise shared blocks).
            loop_embed: Add a learned embedding to the tokens before every loop, initially zero.
            input_injection: ``"add"`` adds the embedded image to the tokens before every loop, ``"none"`` does not.
            flow_penalty: What training also minimises, so that loops move the state little and evenly, as steps of
                Euler's method (`timm_ssog.flow`): ``"error"``, ``"kinetic"``, ``"both"`` or ``"none"``.
            flow_weight: Weight of the penalty beside a mean cross-entropy; for other losses see `timm_ssog.flow`.
            drop_path_rate: Stochastic depth rate of the last loop, rising linearly from 0.
            **kwargs: Arguments of `VitSsog`.
        """
        require_positive_int("loops", loops)
        require_rates(drop_path_rate=drop_path_rate)
        require_choice("input_injection", input_injection, ("none", "add"))
        require_bools(loop_norms=loop_norms, loop_embed=loop_embed)
        shared = {"flow_penalty": flow_penalty, "flow_weight": flow_weight, "device": device, "dtype": dtype}
        super().__init__(depth=depth, **shared, **kwargs)
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

        With fewer loops, the first ones run. Loops beyond those that the model was built with use the norms and the
        embedding of the last of them, if there are any.

        Raises:
            ValueError: if ``loops`` is below one.
        """
        require_positive_int("loops", loops)
        loops = int(loops)
        self.drop_path_rates = drop_path_rates(self.drop_path_rate, loops)
        self._set_steps(
            [{"module": f"blocks.{len(self.blocks) - 1}@loop{loop + 1}", "loop": loop + 1} for loop in range(loops)]
        )

    @property
    def loops(self) -> int:
        """How often the blocks are repeated."""
        return self.num_steps

    @torch.jit.ignore()
    def _truncate(self, steps: int) -> None:
        self.set_loops(steps)
        self.trained_loops = min(steps, self.trained_loops)
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name.startswith("loop_"):
                kept = parameter.detach()[: self.trained_loops].clone()
                setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))

    def _integrate(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        dtype, penalty = x.dtype, self.flow_penalty
        first = as_state(x)
        state = first
        states: list[Tensor] = []
        kernels = self._kernels(x)
        before: Tensor | None = None
        for loop in range(stop):
            trained = min(loop, self.trained_loops - 1)
            if self.loop_embed is not None:
                state = state + self.loop_embed[trained]
            if self.inject_input:
                state = state + first
            start = state
            moves: list[Tensor] = []
            for index, block in enumerate(self.blocks):
                modulation = self.loop_modulation[trained, index] if self.loop_modulation is not None else None
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    delta = checkpoint(block, state.to(dtype), kernels[index], modulation, residual=False)
                else:
                    delta = block(state.to(dtype), kernels[index], modulation, residual=False)
                if penalties is not None:
                    moves.append(delta)
                if self.training and self.drop_path_rates[loop] > 0.0:
                    delta = drop_path(delta, self.drop_path_rates[loop], self.training)
                state = advance(state, [delta], [1.0], 1.0)
            if penalties is not None and not torch.jit.is_scripting():
                known = state if self.drop_path_rates[loop] == 0.0 else None
                move = advance(as_state(moves[0]), moves[1:], [1.0] * len(moves), 1.0)
                term = step_penalty(start, [move], weights=[1.0], step=1.0, before=before, penalty=penalty, after=known)
                before = move
                if term is not None:
                    penalties.append(term)
            if loop in taps:
                states.append(state.to(dtype))
        return state.to(dtype), states


class OdeVitSsog(SharedVitSsog):
    """Continuous depth: ``dx/dt = delta(x)``, from the embedded image at t = 0 to t = ``horizon``.

    With several blocks the velocity is piecewise constant in t: each block is in force for an equal part (DESIGN.md,
    section 3). The state stays in float32; the velocity runs in the model's or autocast's dtype. Feature taps are the
    ends of ``solver_steps`` equal intervals, whatever the solver. A forward hook on a block fires once per solver stage
    and sees the velocity.

    Raises:
        ValueError: as `VitSsog`, and if a solver setting is unknown, out of range or does not go with another.
    """

    stages: list[list[float]]
    slope_weights: list[float]
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
            jitter: In training, shift the step grid by a random part of a step, so that it can't be memorised.
            flow_penalty: What training also minimises, so that the model becomes the flow of its equation
                (`timm_ssog.flow`): ``"error"``, ``"kinetic"``, ``"both"`` or ``"none"``.
            flow_weight: Weight of the penalty beside a mean cross-entropy; for other losses see `timm_ssog.flow`.
            proj_drop_rate: Only 0 is possible; accepted so that the error can say why.
            drop_path_rate: Stochastic depth rate of the last step, rising linearly from 0 (fixed-step only).
            **kwargs: Options of `timm_ssog.ode.Solver` (``solver``, ``solver_steps``, ``rtol``, ``atol``, ``adjoint``,
                ``per_sample``, ``max_evaluations``) and arguments of `VitSsog`.
        """
        require_no_dropout(proj_drop_rate)
        require_rates(drop_path_rate=drop_path_rate)
        require_positive("horizon", horizon)
        require_bools(jitter=jitter)
        settings = Solver(**{name: kwargs.pop(name) for name in SOLVER_OPTIONS if name in kwargs})
        if settings.adjoint or not settings.is_fixed_step:
            require_no_noise(drop_path_rate, jitter, settings.solver, settings.adjoint)
        super().__init__(depth=depth, flow_penalty=flow_penalty, flow_weight=flow_weight, **kwargs)
        self.horizon = float(horizon)
        self.block_span = self.horizon / depth
        self.drop_path_rate = drop_path_rate
        self.jitter = jitter
        self._use(settings)

    @torch.jit.ignore()
    def set_solver(self, solver: str | None = None, **options: Any) -> None:
        """Change how the model is solved, without touching its weights; omitted options stay as they are.

        Args:
            solver: The method.
            **options: The other options of `timm_ssog.ode.Solver`.

        Raises:
            ValueError: as `timm_ssog.ode.Solver`; the settings are then left as they were.
        """
        self._use(self.settings.change(solver=solver, **options))

    @torch.jit.ignore()
    def _use(self, settings: Solver) -> None:
        grid = TimeGrid(self.horizon / settings.solver_steps, self.block_span, settings.solver_steps)
        if settings.is_fixed_step and not grid.is_even:
            raise ValueError(
                f"solver_steps must give each of the {len(self.blocks)} blocks a whole number of steps, got "
                f"{grid.steps}: use a multiple of {len(self.blocks)}."
            )
        self.settings = settings
        # as single attributes too, for scripting, export and whoever reads them
        for name in SOLVER_OPTIONS:
            if name != "solver_steps":
                setattr(self, name, getattr(settings, name))
        self.is_fixed_step = settings.is_fixed_step
        self.stages, self.slope_weights = settings.tableau.stages, settings.tableau.step
        self._lay_out(grid)
        self.drop_path_rates = drop_path_rates(self.drop_path_rate, grid.steps)

    @torch.jit.ignore()
    def _lay_out(self, grid: TimeGrid) -> None:
        self.time_grid = grid
        self.step_size, self.steps_per_block = grid.step_size, grid.steps_per_block
        self._set_steps(
            [
                {"module": f"blocks.{grid.block_at(step)}@step{step + 1}", "time": grid.end(step)}
                for step in range(grid.steps)
            ]
        )

    @torch.jit.ignore()
    def _truncate(self, steps: int) -> None:
        grid = self.time_grid.cut(steps)
        self.settings = self.settings.change(solver_steps=steps)
        self.horizon = grid.horizon
        self.blocks = self.blocks[: grid.blocks]
        self.drop_path_rates = self.drop_path_rates[:steps]
        self._lay_out(grid)

    def _integrate(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Evolve, and collect the penalty (batch,) of every step if there is a list for it."""
        if not torch.jit.is_scripting():
            # without gradients the adjoint has nothing to do, and the plain loop is the same solve
            if (self.adjoint and torch.is_grad_enabled()) or not self.is_fixed_step:
                return self._solve(x, taps, stop, penalties)
        elif not self.is_fixed_step:
            raise RuntimeError("An adaptive solver can't be scripted: set_solver('rk4') or another fixed-step method.")
        dtype, penalty = x.dtype, self.flow_penalty
        state = as_state(x)
        states: list[Tensor] = []
        kernels = self._kernels(x)
        for index, block in enumerate(self.blocks):
            first = index * self.steps_per_block
            steps = min(self.steps_per_block, stop - first)
            phase: Tensor | None = None
            if self.jitter and self.training and steps > 0:
                phase = torch.rand([1], device=state.device)  # the first step is cut short, and one more ends the grid
                steps += 1
            before: Tensor | None = None
            for step in range(steps):
                number = first + min(step, self.steps_per_block - 1)
                rate = self.drop_path_rates[number] if self.training else 0.0
                speed = random_speed(state, rate, phase, is_first=step == 0, is_last=step == steps - 1)
                slopes: list[Tensor] = []
                full: list[Tensor] = []
                start = state
                for stage in self.stages:
                    at = advance(state, slopes, stage, self.step_size).to(dtype)
                    if self.grad_checkpointing and not torch.jit.is_scripting():
                        slope = checkpoint(block, at, kernels[index], residual=False)
                    else:
                        slope = block(at, kernels[index], residual=False)
                    full.append(slope)
                    slopes.append(slope if speed is None else slope * speed)
                state = advance(state, slopes, self.slope_weights, self.step_size)
                if penalties is not None and not torch.jit.is_scripting():
                    known, rule = (state if speed is None else None), self.slope_weights
                    term = step_penalty(
                        start, full, weights=rule, step=self.step_size, before=before, penalty=penalty, after=known
                    )
                    before = full[0]
                    if term is not None:
                        penalties.append(term)
                if number in taps and (phase is None or step < steps - 1):
                    states.append(state.to(dtype))
        return state.to(dtype), states

    @torch.jit.unused
    def _solve(
        self, x: Tensor, taps: list[int], stop: int, penalties: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        if penalties is None:
            state, states, _ = self.solve(x, taps, stop)
            return state, states
        state, states, _ = self.solve(x, list(range(stop)), stop)
        penalties += tap_penalties(
            list(self.blocks),
            [as_state(x), *states[:-1]],
            grid=self.time_grid,
            penalty=self.flow_penalty,
            dtype=x.dtype,
            grad_checkpointing=self.adjoint or self.grad_checkpointing,
        )
        return state, [states[step] for step in taps]

    @torch.jit.unused
    def solve(self, x: Tensor, taps: list[int], stop: int) -> tuple[Tensor, list[Tensor], list[SolveTrace]]:
        """Evolve with `timm_ssog.ode`, whatever the solver, and report what it did.

        Args:
            x: Tokens (batch, height, width, embed_dim).
            taps: Steps after which the states are wanted.
            stop: Number of steps.

        Returns:
            The last state, those after the taps, and the trace of each block in force.

        Raises:
            ValueError: if the model is in training with noise that acts on fixed steps.
            SolveError: if the solve fails.
        """
        if self.training:
            require_no_noise(self.drop_path_rate, self.jitter, self.solver, self.adjoint)
        state, states, traces = solve_blocks(
            list(self.blocks),
            as_state(x),
            taps,
            grid=self.time_grid.cut(stop),
            solver=self.settings,
            dtype=x.dtype,
            grad_checkpointing=self.grad_checkpointing,
        )
        return state.to(x.dtype), [tapped.to(x.dtype) for tapped in states], traces


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
# digest of its weights. timm offers every row's weights wherever it lists pretrained models, so they must be public.
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
    # the digests belong to the published weights; if kept, they would be saved with those from further training
    for module in (model, getattr(model, "model", None)):  # with features_only, the wrapper and what it wraps
        if isinstance(module, nn.Module) and isinstance(config := getattr(module, "pretrained_cfg", None), dict):
            without_digests(config)
    return model


# A looped model starts like the continuous one and shares its checkpoints. examples/lab/flow.py shows why these values.
FLOW_ARGS: dict[str, Any] = {"pre_norm": True, "flow_penalty": "both", "flow_weight": 1.5}
LOOPED_ARGS: dict[str, Any] = {"depth": 1, "loops": 12, **FLOW_ARGS}
ODE_ARGS: dict[str, Any] = {"depth": 1, "horizon": 12.0, **FLOW_ARGS}


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
