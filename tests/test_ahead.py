"""Kernels built for several blocks at once, in inference: the same numbers, and only where it is safe."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Build
from timm.models import create_feature_extractor
from torch import Tensor, nn
from torch.nn.utils import prune

from timm_ssog import layers
from timm_ssog.layers import Block, SeparableMixer, kernels_ahead


def tokens(height: int = 3, width: int = 5) -> Tensor:
    return torch.randn(1, height, width, 32)


def stirred(model: Any) -> Any:
    """With kernels of different widths and offsets in every block, and a reference grid that is not the model's."""
    for block in model.blocks:
        nn.init.normal_(block.mixer.width)
        block.mixer.reference_grid = (5, 6)
    return model


@pytest.mark.parametrize("options", [{}, {"amplitude": "convex", "kernel_coords": "cells"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kernels_built_together_are_those_of_each_block(build: Build, options: Any, dtype: torch.dtype) -> None:
    model = stirred(build(depth=3, **options)).to(dtype)
    with torch.no_grad():
        together = kernels_ahead(model.blocks, tokens())
        assert len(together) == 3
        for kernels, block in zip(together, model.blocks, strict=True):
            assert kernels is not None
            for ours, alone in zip(kernels, block.mixer.kernels(3, 5), strict=True):
                assert ours.dtype == alone.dtype
                torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-8)


def test_inference_builds_them_once_and_predicts_what_training_does(build: Build, monkeypatch) -> None:
    model, images = stirred(build(depth=3)), torch.randn(2, 3, 24, 40)
    with_gradients = model(images).detach()
    built = []
    original = layers.mixing_kernels
    monkeypatch.setattr(layers, "mixing_kernels", lambda *args, **how: built.append(1) or original(*args, **how))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(images), with_gradients)
    assert len(built) == 2
    with torch.no_grad():
        _, taken = model.forward_intermediates(images, [0, 1], stop_early=True)
    assert len(taken) == 2
    assert len(built) == 3


def test_training_builds_them_block_by_block(build: Build, monkeypatch) -> None:
    # a shared operation would give the gradients of all blocks' kernels at the very end, too late for DDP's overlap
    model, built = build(depth=3), []
    original = layers.mixing_kernels
    monkeypatch.setattr(layers, "mixing_kernels", lambda *args, **how: built.append(1) or original(*args, **how))
    model.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(built) == 3


@torch.no_grad()
def test_their_memory_is_bounded(build: Build, monkeypatch) -> None:
    model = build(depth=5)
    block = sum(kernels.numel() * 4 for kernels in model.blocks[0].mixer.kernels(3, 5))
    monkeypatch.setattr(layers, "AHEAD_BYTES", 2 * block)
    assert len(kernels_ahead(model.blocks, tokens())) == 2
    assert len(kernels_ahead(model.blocks[4:], tokens())) == 1
    assert kernels_ahead(model.blocks, tokens(4, 5)) == [None]
    assert model(torch.randn(1, 3, 24, 40)).isfinite().all()


class Wrapped(Block):
    pass


def by_subclass(blocks: Any) -> None:
    blocks[1].__class__ = Wrapped  # as torch.distributed.fsdp.fully_shard does


def by_other_module(blocks: Any) -> None:
    blocks[1] = nn.Identity()


def by_parametrized_mixer(blocks: Any) -> None:
    nn.utils.parametrize.register_parametrization(blocks[1].mixer, "width", nn.Softplus())


def by_pruned_mixer(blocks: Any) -> None:
    prune.l1_unstructured(blocks[1].mixer, "amplitude", 0.5)
    with torch.no_grad():
        blocks[1].mixer.amplitude_orig += 1  # a step that computes the amplitude when the mixer is called


def by_other_device(blocks: Any) -> None:
    blocks[1].mixer.to("meta")


def by_other_components(blocks: Any) -> None:
    blocks[1].mixer = SeparableMixer(32, 2, (4, 4), num_components=3)


def by_other_amplitude(blocks: Any) -> None:
    blocks[1].mixer.convex = True


def by_other_grid(blocks: Any) -> None:
    blocks[1].mixer.reference_grid = (3, 4)


def by_other_coords(blocks: Any) -> None:
    blocks[1].mixer.relative = False


@pytest.mark.parametrize(
    "replace",
    [
        by_subclass,
        by_other_module,
        by_parametrized_mixer,
        by_pruned_mixer,
        by_other_device,
        by_other_components,
        by_other_amplitude,
        by_other_coords,
        by_other_grid,
    ],
)
def test_a_block_that_differs_builds_its_own(build: Build, replace: Callable[[Any], None]) -> None:
    model, images = stirred(build(depth=4)), torch.randn(2, 3, 32, 32)
    replace(model.blocks)
    with torch.no_grad():
        assert kernels_ahead(model.blocks, tokens()) == [None]
        assert len(kernels_ahead(model.blocks[2:], tokens())) == 2
    if replace is not by_other_device:
        expected = model(images).detach()
        with torch.no_grad():
            torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
@torch.no_grad()
def test_pruned_kernels_follow_their_parameters(build: Build, name: str) -> None:
    model, images = build(name), torch.randn(2, 3, 32, 32)
    for block in model.blocks:
        prune.l1_unstructured(block.mixer, "amplitude", 0.5)
        block.mixer.amplitude_orig += 1
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.mixer.amplitude = block.mixer.amplitude_orig * block.mixer.amplitude_mask
        prune.remove(block.mixer, "amplitude")
    torch.testing.assert_close(model(images), plain(images))


@torch.no_grad()
def test_parameters_that_are_not_here_are_left_alone(build: Build) -> None:
    model = build(depth=3)
    for block in model.blocks:  # as DeepSpeed's ZeRO-3 does until a block runs
        for name in ("offset", "width", "amplitude"):
            block.mixer.get_parameter(name).data = torch.empty(0)
    assert kernels_ahead(model.blocks, tokens()) == [None]


@torch.no_grad()
def test_blocks_may_be_shared_hooked_and_copied(build: Build) -> None:
    model, images = stirred(build(depth=3)), torch.randn(2, 3, 32, 32)
    model.blocks[2] = model.blocks[0]
    expected = copy.deepcopy(model)(images)
    seen: list[torch.Size] = []
    model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model.blocks[1].register_forward_pre_hook(lambda module, inputs: inputs[0])
    torch.testing.assert_close(model(images), expected)
    assert seen == [torch.Size([2, 4, 4, 32])]


@torch.no_grad()
def test_graphs_hold_no_kernels_of_other_blocks(build: Build) -> None:
    model, images = build(depth=3), torch.randn(2, 3, 32, 32)
    expected = model(images)
    torch.testing.assert_close(torch.jit.trace(model, images)(images), expected)
    torch.testing.assert_close(create_feature_extractor(model, ["head"])(images)["head"], expected)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), expected)
    assert not any(node.target is torch.ops.aten.stack.default for node in exported.graph.nodes)


@torch.no_grad()
def test_an_ensemble_runs_under_vmap(build: Build) -> None:
    models, images = [stirred(build(depth=2)) for _ in range(2)], torch.randn(2, 3, 32, 32)

    def logits_of(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), images)

    together = torch.func.vmap(logits_of)(*torch.func.stack_module_state(models))
    for logits, model in zip(together, models, strict=True):
        torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
