"""The discrete models: every option and method that timm users need, and every way to misuse them."""

import copy
import fnmatch
import io
import pickle
import re
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import Build
from timm.models._features import FeatureGetterNet
from timm.optim import create_optimizer_v2
from torch import Tensor

MIXERS = ["ssog", "attention", "identity"]


@pytest.mark.parametrize(
    ("name", "mixer", "millions"),
    [
        ("vit_ssog_tiny", "attention", 5.54),
        ("vit_ssog_tiny", "ssog", 4.65),
        ("vit_ssog_small", "attention", 21.70),
        ("vit_ssog_small", "ssog", 18.15),
        ("vit_ssog_base", "attention", 85.88),
        ("vit_ssog_base", "ssog", 71.69),
    ],
)
def test_parameter_counts(name: str, mixer: str, millions: float) -> None:
    model = timm.create_model(name, mixer=mixer, num_classes=100, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_attention_twin_is_timms_vit() -> None:
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    twin = timm.create_model("vit_ssog_tiny", mixer="attention", num_classes=5, **options).eval()
    vit = timm.create_model(
        "vit_tiny_patch16_224", class_token=False, global_pool="avg", fc_norm=False, num_classes=5, **options
    ).eval()
    renamed = {name.replace(".mixer.", ".attn."): tensor for name, tensor in twin.state_dict().items()}
    renamed["pos_embed"] = renamed["pos_embed"].flatten(1, 2)
    vit.load_state_dict(renamed)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(twin(images), vit(images))


def test_state_dict_names_are_a_promise(build: Build) -> None:
    names = build(depth=1).state_dict().keys()
    norms = [f"{norm}.{tensor}" for norm in ("norm1", "norm2") for tensor in ("weight", "bias")]
    kernels = ["offset", "width", "amplitude", "_extra_state", "value.weight", "proj.weight", "proj.bias"]
    mlp = [f"mlp.{layer}.{tensor}" for layer in ("fc1", "fc2") for tensor in ("weight", "bias")]
    block = [*norms, *(f"mixer.{name}" for name in kernels), *mlp]
    outer = ["patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "norm.weight", "norm.bias"]
    assert set(names) == {*outer, "head.weight", "head.bias", *(f"blocks.0.{name}" for name in block)}
    twin = build(depth=1, mixer="attention").state_dict().keys()
    assert {name for name in twin if ".mixer." in name} == {
        f"blocks.0.mixer.{layer}.{tensor}" for layer in ("qkv", "proj") for tensor in ("weight", "bias")
    }


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("size", [(32, 32), (8, 8), (8, 80), (80, 8), (48, 24), (72, 104)])
def test_any_size_and_aspect_ratio(build: Build, size: tuple[int, int], mixer: str) -> None:
    model = build(mixer=mixer)
    images = torch.randn(2, 3, *size)
    logits = model(images)
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    assert model.forward_features(images).shape == (2, size[0] * size[1] // 64, 32)


def test_height_and_width_are_not_confused(build: Build) -> None:
    model = build().eval()
    turned = copy.deepcopy(model)
    # the same model, its image transposed: patch filters, position embedding and kernels change their axes
    with torch.no_grad():
        turned.patch_embed.proj.weight.copy_(model.patch_embed.proj.weight.mT)
        turned.pos_embed.copy_(turned.pos_embed.transpose(1, 2).clone())
        for block in turned.blocks:
            block.mixer.offset.copy_(block.mixer.offset.flip(-1))
            block.mixer.width.copy_(block.mixer.width.flip(-1))
    images = torch.randn(2, 3, 48, 24)
    # antialiased resampling runs one axis after the other
    torch.testing.assert_close(turned(images.mT), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(230, 75), (225, 1), (5, 6), (32, 32)])
def test_dynamic_img_pad_takes_any_size(build: Build, size: tuple[int, int]) -> None:
    model = build(dynamic_img_pad=True)
    images = torch.randn(2, 3, *size)
    height, width = -(-size[0] // 8), -(-size[1] // 8)
    assert model.patch_embed.dynamic_feat_size(size) == (height, width)
    padded = torch.zeros(2, 3, 8 * height, 8 * width)
    padded[:, :, : size[0], : size[1]] = images
    plain = build()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images), plain(padded))


@pytest.mark.parametrize("kernel_coords", ["relative", "cells"])
def test_set_input_size(build: Build, kernel_coords: str) -> None:
    model = build(kernel_coords=kernel_coords)
    images = torch.randn(2, 3, 64, 48)
    expected = model(images)
    model.pos_embed.requires_grad_(False)
    model.patch_embed.proj.bias.requires_grad_(False)
    model.set_input_size(img_size=(64, 48))
    # the same function in another layout: what was resampled at call time is now permanent
    torch.testing.assert_close(model(images), expected)
    assert model.pos_embed.shape == (1, 8, 6, 32)
    assert model.patch_embed.grid_size == (8, 6)
    assert all(block.mixer.reference_grid == (4, 4) for block in model.blocks)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"pos_embed", "patch_embed.proj.bias"}

    model.set_input_size(patch_size=(16, 8))
    assert model.pos_embed.shape == (1, 4, 6, 32)
    assert model.patch_embed.proj.weight.shape[-2:] == (16, 8)
    assert [info["reduction"] for info in model.feature_info] == [16, 16]
    assert model(images).shape == (2, 5)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"pos_embed", "patch_embed.proj.bias"}

    model.set_input_size(img_size=96, patch_size=8)
    assert model.pos_embed.shape == (1, 12, 12, 32)
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 5)


@pytest.mark.parametrize("in_chans", [1, 4])
def test_in_chans(build: Build, in_chans: int) -> None:
    model = build(in_chans=in_chans)
    assert model(torch.randn(2, in_chans, 32, 32)).shape == (2, 5)


def test_patch_size_may_differ_by_axis(build: Build) -> None:
    model = build(img_size=(32, 24), patch_size=(8, 4))
    assert model.blocks[0].mixer.reference_grid == (4, 6)
    assert model.forward_features(torch.randn(1, 3, 16, 16)).shape == (1, 2 * 4, 32)
    assert model.feature_info[0]["reduction"] == 8


def test_no_classes_leaves_pooled_features(build: Build) -> None:
    model = build(num_classes=0)
    images = torch.randn(2, 3, 32, 32)
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    torch.testing.assert_close(model(images), model.forward_features(images).mean(1))
    model = build()
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), model.forward_head(model.forward_features(images), pre_logits=True))


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("global_pool", ["avg", "avgmax", "max", ""])
def test_global_pool(build: Build, global_pool: str, fc_norm: bool) -> None:
    model = build(global_pool=global_pool, fc_norm=fc_norm)
    torch.nn.init.normal_(model.fc_norm.weight if fc_norm else model.norm.weight)
    images = torch.randn(2, 3, 32, 32)
    tokens = model.embed(images)
    for block in model.blocks:
        tokens = block(tokens)
    tokens = tokens.flatten(1, 2)
    tokens = tokens if fc_norm else model.norm(tokens)
    torch.testing.assert_close(model.forward_features(images), tokens)
    pooled = {
        "avg": tokens.mean(1),
        "max": tokens.amax(1),
        "avgmax": (tokens.mean(1) + tokens.amax(1)) / 2,
        "": tokens,
    }[global_pool]
    torch.testing.assert_close(model.pool(tokens), pooled)
    expected = model.head(model.fc_norm(pooled) if fc_norm else pooled)
    torch.testing.assert_close(model(images), expected)
    assert model.pool(tokens, "max").shape == (2, 32)


def test_reset_classifier(build: Build) -> None:
    model = build().train()
    model.reset_classifier(7, "max")
    assert (model.num_classes, model.global_pool) == (7, "max")
    assert model.get_classifier() is model.head
    assert model.head.training
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    model.bfloat16().reset_classifier(3)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.global_pool == "max"
    with pytest.raises(ValueError, match="global_pool must be one of"):
        model.reset_classifier(9, "mean")
    assert (model.num_classes, model.global_pool) == (3, "max")


@pytest.mark.parametrize("option", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_drop_rates_act_in_training_only(build: Build, mixer: str, option: str) -> None:
    model = build(mixer=mixer, **{option: 0.5})
    images = torch.randn(8, 3, 32, 32)
    assert torch.equal(model(images), model(images))
    plain = build(mixer=mixer)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images), plain(images))
    model.train()
    assert not torch.allclose(model(images), model(images), atol=1e-4)


def test_drop_path_drops_whole_branches_of_a_sample(build: Build) -> None:
    model = build(drop_path_rate=0.9, depth=2).train()
    tokens = torch.randn(64, 4, 4, 32)
    # the rate rises linearly from zero
    assert torch.equal(model.blocks[0](tokens), model.blocks[0](tokens))
    added = (model.blocks[1](tokens) - tokens).flatten(1)
    untouched = (added == 0).all(1)
    assert 0.5 < untouched.float().mean() < 1
    assert ((added != 0).float().mean(1) > 0.9)[~untouched].all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_dropout_free_training_mode_changes_nothing(build: Build, mixer: str) -> None:
    model = build(mixer=mixer)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.train()(images), model.eval()(images))


@pytest.mark.parametrize(("out_indices", "taken"), [((0, 2), [0, 2]), ((-1,), [2]), ((-3, -1), [0, 2]), (2, [1, 2])])
def test_features_only(build: Build, out_indices: Any, taken: list[int]) -> None:
    features = build(depth=3, features_only=True, out_indices=out_indices)
    assert isinstance(features, FeatureGetterNet)
    assert features.feature_info.channels() == [32] * len(taken)
    assert features.feature_info.reduction() == [8] * len(taken)
    model = build(depth=3)
    model.load_state_dict({**model.state_dict(), **features.model.state_dict()})
    images = torch.randn(2, 3, 48, 32)
    expected = model.forward_intermediates(images, taken, intermediates_only=True)
    outputs = features(images)
    assert [output.shape for output in outputs] == [(2, 32, 6, 4)] * len(taken)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stop_early", [False, True])
def test_forward_intermediates(build: Build, norm: bool, stop_early: bool) -> None:
    model = build(depth=3)
    torch.nn.init.normal_(model.norm.weight)
    images = torch.randn(2, 3, 48, 32)
    states = []
    hooks = [block.register_forward_hook(lambda _, __, output: states.append(output)) for block in model.blocks]
    features = model.forward_features(images)
    for hook in hooks:
        hook.remove()
    expected = [model.norm(state) if norm else state for state in states]

    final, taken = model.forward_intermediates(images, [0, 1], norm=norm, stop_early=stop_early)
    assert len(taken) == 2
    for ours, theirs in zip(taken, expected, strict=False):
        torch.testing.assert_close(ours, theirs.permute(0, 3, 1, 2))
        assert ours.is_contiguous()
    torch.testing.assert_close(final, model.norm(states[1]).flatten(1, 2) if stop_early else features)

    sequences = model.forward_intermediates(images, output_fmt="NLC", norm=norm, intermediates_only=True)
    for ours, theirs in zip(sequences, expected, strict=True):
        torch.testing.assert_close(ours, theirs.flatten(1, 2))
    last = model.forward_intermediates(images, 1, norm=norm, intermediates_only=True)
    assert len(last) == 1
    torch.testing.assert_close(last[0], expected[2].permute(0, 3, 1, 2))

    named = model.forward_intermediates(images, norm=norm, output_dict=True)
    assert set(named) == {"image_features", "image_intermediates"}
    torch.testing.assert_close(named["image_features"], features)
    torch.testing.assert_close(named["image_intermediates"][2], expected[2].permute(0, 3, 1, 2))
    only = model.forward_intermediates(images, output_dict=True, intermediates_only=True)
    assert set(only) == {"image_intermediates"}


def test_get_intermediate_layers(build: Build) -> None:
    model = build(depth=3)
    images = torch.randn(2, 3, 48, 32)
    expected = model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    for ours, theirs in zip(model.get_intermediate_layers(images, 2), expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    chosen = model.get_intermediate_layers(images, (0,), reshape=True, norm=True)
    torch.testing.assert_close(chosen[0], model.norm(expected[0]).mT.reshape(2, 32, 6, 4))


def test_prune_intermediate_layers(build: Build) -> None:
    model = build(depth=3)
    images = torch.randn(2, 3, 32, 32)
    taps = model.forward_intermediates(images, intermediates_only=True)
    assert model.prune_intermediate_layers([0, -2], prune_norm=True) == [0, 1]
    assert len(model.blocks) == len(model.feature_info) == 2
    pruned = model.forward_intermediates(images, intermediates_only=True)
    for ours, theirs in zip(pruned, taps, strict=False):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(model(images), taps[1].flatten(2).mT)


@pytest.mark.parametrize("mixer", MIXERS)
def test_grad_checkpointing_changes_no_gradient(build: Build, mixer: str) -> None:
    model = build(mixer=mixer, depth=3, drop_path_rate=0.3).train()
    images = torch.randn(4, 3, 32, 32)
    runs = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(images)
        logits.square().sum().backward()
        runs.append((kept, logits, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (kept, logits, gradients), (kept_less, *rest) = runs
    assert kept_less < kept / 3
    torch.testing.assert_close(rest, [logits, gradients], rtol=0, atol=0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_gets_a_gradient(build: Build, mixer: str) -> None:
    model = build(mixer=mixer).train()
    model(torch.randn(4, 3, 48, 32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def learning_rates(model: torch.nn.Module) -> dict[str, float]:
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    rate = {
        id(parameter): group["lr"] * group["lr_scale"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: rate[id(parameter)] for name, parameter in model.named_parameters()}


def test_layer_decay_is_that_of_timms_vit(build: Build) -> None:
    ours = learning_rates(build(depth=3))
    timms = learning_rates(
        timm.create_model("vit_tiny_patch16_224", depth=3, class_token=False, global_pool="avg", fc_norm=False)
    )
    for name, rate in ours.items():
        layer = re.sub(r"(blocks\.\d+)\.mixer.*", r"\1.attn.qkv.weight", name)
        assert rate == timms[layer], name
    assert ours["pos_embed"] < ours["blocks.0.mixer.offset"] < ours["blocks.2.mixer.offset"] < ours["head.weight"] == 1


def test_weight_decay_spares_positions_and_scales(build: Build) -> None:
    model = build()
    decay = {}
    for group in create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1).param_groups:
        decay.update({id(parameter): group["weight_decay"] for parameter in group["params"]})
    spared = ["*.offset", "*.width", "*.amplitude", "pos_embed", "*.bias", "*norm*"]
    for name, parameter in model.named_parameters():
        expected = 0.0 if any(fnmatch.fnmatch(name, pattern) for pattern in spared) else 0.1
        assert decay[id(parameter)] == expected, name
    # by name, not for their shape: a frozen backbone's optimizer may look at nothing else
    assert {"pos_embed", "blocks.1.mixer.offset", "blocks.1.mixer.width"} <= model.no_weight_decay()
    assert all(not name.endswith("weight") for name in model.no_weight_decay())


@pytest.mark.parametrize("mixer", MIXERS)
def test_no_prediction_depends_on_batch_mates(build: Build, mixer: str) -> None:
    model = build(mixer=mixer)
    images = torch.randn(5, 3, 32, 32)
    together = model(images)
    for index in range(5):
        torch.testing.assert_close(model(images[index : index + 1]), together[index : index + 1])
    images[1:] = torch.nan
    torch.testing.assert_close(model(images)[0], together[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_meta_construction_then_init_weights(build: Build, mixer: str) -> None:
    model = build(mixer=mixer, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7)
    model.init_weights()
    fresh = build(mixer=mixer)
    for (name, tensor), like in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        if name.endswith("_extra_state"):
            assert torch.equal(tensor, like), name
        elif like.std() < 1e-6:
            torch.testing.assert_close(tensor, like, msg=name)
        else:
            assert 0.5 < tensor.std() / like.std() < 2, name
            assert (tensor.mean() - like.mean()).abs() < like.std(), name
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


def test_construction_is_deterministic(build: Build) -> None:
    torch.manual_seed(5)
    first = build().state_dict()
    torch.manual_seed(5)
    second = build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("mixer", MIXERS)
def test_copies_are_equal_and_independent(build: Build, mixer: str) -> None:
    model = build(mixer=mixer)
    images = torch.randn(2, 3, 48, 32)
    expected = model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for twin in copies:
        assert torch.equal(twin(images), expected)
        assert twin.default_cfg == model.default_cfg


@pytest.mark.parametrize("mixer", MIXERS)
def test_channels_last(build: Build, mixer: str) -> None:
    model = build(mixer=mixer)
    images = torch.randn(2, 3, 48, 32)
    expected = model(images)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mixer", MIXERS)
def test_models_of_other_dtypes(build: Build, mixer: str, dtype: torch.dtype) -> None:
    model = build(mixer=mixer)
    images = torch.randn(4, 3, 48, 32)
    expected = copy.deepcopy(model).double()(images.double())
    model.to(dtype)
    logits = model(images.to(dtype))
    assert logits.dtype == dtype
    # about ten successive roundings through two blocks; logits of a new model are small
    error = (logits - expected).norm() / expected.norm()
    assert error < 16 * torch.finfo(dtype).eps
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == dtype for parameter in model.parameters())


def test_construction_in_a_dtype(build: Build) -> None:
    model = build(dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_autocast_trains_without_nan(build: Build, mixer: str, dtype: torch.dtype) -> None:
    model = build(mixer=mixer).train()
    images = torch.randn(4, 3, 48, 32)
    expected = model(images)
    with torch.autocast("cpu", dtype=dtype):
        logits = model(images)
    assert (logits - expected).norm() / expected.norm() < 16 * torch.finfo(dtype).eps
    logits.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


def test_without_position_embedding(build: Build) -> None:
    model = build(pos_embed="none")
    assert model.pos_embed is None
    assert "pos_embed" not in model.state_dict()
    model.set_input_size(48)
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 5)


def test_layers_may_be_named(build: Build) -> None:
    model = build(norm_layer="rmsnorm", act_layer="relu")
    assert type(model.norm).__name__ == "RmsNorm"
    assert isinstance(model.blocks[0].mlp.act, torch.nn.ReLU)
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_strict_size_where_dynamic_size_is_off(build: Build) -> None:
    model = build(dynamic_img_size=False)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    with pytest.raises(AssertionError, match=r"Input height \(40\) doesn't match model \(32\)"):
        model(torch.randn(1, 3, 40, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_token": True}, r"prefix tokens have no place, got class_token=True and reg_tokens=0\..*Omit them"),
        ({"reg_tokens": 4}, r"prefix tokens have no place, got class_token=False and reg_tokens=4"),
        ({"global_pool": "token"}, r"global_pool='token' is not available: vit_ssog has neither a class token"),
        ({"global_pool": "map"}, r"global_pool='map' is not available: .*Use one of '', 'avg', 'avgmax', 'max'"),
        ({"global_pool": "averge"}, r"global_pool must be one of .*got 'averge'\. Did you mean 'avg"),
        ({"img_size": 7}, r"img_size must be at least one patch of 8 x 8, got 7 x 7"),
        ({"img_size": (32, 4)}, r"img_size must be at least one patch of 8 x 8, got 32 x 4"),
        ({"embed_dim": 33}, r"embed_dim must be divisible by num_heads, got embed_dim=33 and num_heads=2; .*32 or 34"),
        ({"num_heads": 0}, r"num_heads must be an integer of at least 1, got 0"),
        ({"num_components": 0}, r"num_components must be an integer of at least 1, got 0"),
        ({"depth": 0}, r"depth must be an integer of at least 1, got 0"),
        (
            {"mixer": "atention"},
            r"mixer must be one of 'ssog', .*, got 'atention'\. Did you mean 'attention'",
        ),
        ({"amplitude": "free"}, r"amplitude must be one of 'signed', 'convex', got 'free'"),
        ({"kernel_coords": "relativ"}, r"kernel_coords must be one of .* Did you mean 'relative'"),
        ({"pos_embed": "learned"}, r"pos_embed must be one of .* Did you mean 'learn'"),
        ({"init_width": 0.1}, r"init_width must be above 0\.25"),
    ],
)
def test_wrong_options_say_what_was_expected(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_unknown_options_are_refused(build: Build) -> None:
    with pytest.raises(TypeError, match="num_component"):
        build(num_component=4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32, 32), r"Expected images \(batch, 3, height, width\), got shape \[3, 32, 32\]"),
        ((1, 1, 32, 32), r"Expected images \(batch, 3, height, width\), got shape \[1, 1, 32, 32\]"),
        ((1, 3, 7, 32), r"Images of 7 x 32 are smaller than a patch of 8 x 8: .*dynamic_img_pad=True"),
        ((1, 3, 32, 5), r"Images of 32 x 5 are smaller than a patch of 8 x 8"),
        ((1, 3, 36, 32), r"multiples of the patch size 8 x 8, got 36 x 32: .*dynamic_img_pad=True"),
    ],
)
def test_wrong_images_say_what_was_expected(build: Build, shape: tuple[int, ...], message: str) -> None:
    model = build()
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(shape))


def test_wrong_method_arguments_say_what_was_expected(build: Build) -> None:
    model = build()
    images = torch.zeros(1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"output_fmt must be one of 'NCHW', 'NLC', got 'NLCH'"):
        model.forward_intermediates(images, output_fmt="NLCH")
    with pytest.raises(ValueError, match=r"img_size must be at least one patch of 8 x 8, got 4 x 4"):
        model.set_input_size(4)
    with pytest.raises(ValueError, match=r"img_size must be at least one patch of 64 x 64, got 32 x 32"):
        model.set_input_size(patch_size=64)
    assert model.patch_embed.img_size == (32, 32)
    assert model(images).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": "32"}, "img_size must be an integer of at least 1, got '32'"),
        ({"img_size": (32, 32, 3)}, "img_size must be an integer or a pair"),
        ({"patch_size": 0}, "patch_size must be an integer of at least 1, got 0"),
        ({"patch_size": True}, "patch_size must be an integer"),
        ({"in_chans": 0}, "in_chans must be an integer of at least 1, got 0"),
        ({"embed_dim": -32}, "embed_dim must be an integer of at least 1"),
        ({"drop_path_rate": 1.5}, "drop_path_rate must be at least 0 and below 1"),
        ({"drop_rate": float("nan")}, "drop_rate must be at least 0 and below 1"),
    ],
)
def test_sizes_and_rates_out_of_range_say_so(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_sizes_may_be_lists_and_numpy_integers(build):
    model = build(img_size=[np.int64(32), 48], patch_size=np.int64(8), depth=np.int64(2))
    assert model(torch.randn(1, 3, 32, 48)).shape == (1, 5)


def test_a_refused_classifier_leaves_the_old_one(build):
    model = build()
    with pytest.raises(ValueError, match=r"num_classes must be an integer of at least 0, got 2\.5"):
        model.reset_classifier(2.5)
    assert model.num_classes == 5
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
def test_a_hook_on_the_final_norm_sees_tokens_as_in_timms_vit(build: Build, name: str) -> None:
    model, seen = build(name), []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].shape, output.shape)))
    images = torch.randn(2, 3, 32, 48)
    model(images)
    model.forward_intermediates(images, [0], norm=True, intermediates_only=True)
    assert seen == [((2, 24, 32), (2, 24, 32))] * 2


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
def test_every_tap_has_its_own_name_that_tells_its_module(build: Build, name: str) -> None:
    model = build(name)
    names = [info["module"] for info in model.feature_info]
    assert len(set(names)) == len(names)
    for tap in names:
        assert tap.split("@")[0] in dict(model.named_modules())
