"""Checkpoints through timm's own functions: saved and loaded, changed on the way, and broken."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import timm.models
import timm.utils
import torch
import torch.nn.functional as F
import torch.optim.swa_utils
from conftest import Build
from torch import Tensor

from timm_ssog import VitSsog
from timm_ssog.layers import grid_digits, grid_of_digits


def save(model: torch.nn.Module, folder: Path) -> str:
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)
    return f"local-dir:{folder}"


def load(source: str, **options: Any) -> Any:
    return timm.create_model(source, pretrained=True, **options).eval()


def assert_same_state(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def resampled(pos_embed: Tensor, grid: tuple[int, int]) -> Tensor:
    planes = F.interpolate(pos_embed.permute(0, 3, 1, 2), grid, mode="bicubic", antialias=True)
    return planes.permute(0, 2, 3, 1)


def reset_head(model: VitSsog) -> None:
    model.reset_classifier(7)


def resize(model: VitSsog) -> None:
    model.set_input_size((48, 64))


def resize_patches(model: VitSsog) -> None:
    model.set_input_size((48, 64), patch_size=(16, 8))


@pytest.mark.parametrize("change", [None, reset_head, resize, resize_patches])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixer": "attention"},
        {"mixer": "identity"},
        {"amplitude": "convex", "kernel_coords": "cells", "num_components": 2},
        {"img_size": (64, 24), "in_chans": 1, "num_classes": 0},
        {"dynamic_img_pad": True, "pos_embed": "none", "fc_norm": True, "global_pool": "avgmax"},
    ],
)
def test_hub_folder_round_trip(build: Build, tmp_path: Path, options: dict[str, Any], change: Any) -> None:
    model = build(**options)
    if change is not None:
        change(model)
    loaded = load(save(model, tmp_path))
    assert_same_state(loaded, model.state_dict())
    for size in [(32, 32), (64, 24), (16, 80)]:
        images = torch.randn(2, options.get("in_chans", 3), *size)
        assert torch.equal(loaded(images), model(images))
    # and again, from the loaded model
    again = load(save(loaded, tmp_path / "again"))
    assert torch.equal(again(images), model(images))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "vit_ssog_tiny"
    assert config["num_classes"] == model.num_classes


@pytest.mark.parametrize("mixer", ["ssog", "attention"])
def test_training_checkpoint_round_trip(build: Build, tmp_path: Path, mixer: str) -> None:
    model = build(mixer=mixer).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    ema.update(model)
    saver = timm.utils.CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, 0.5)
    path = str(tmp_path / "last.pth.tar")
    images = torch.randn(2, 3, 32, 32)

    for use_ema, source in ((False, model.eval()), (True, ema.module.eval())):
        loaded = build(mixer=mixer)
        timm.models.load_checkpoint(loaded, path, use_ema=use_ema)
        assert_same_state(loaded, source.state_dict())
        assert torch.equal(loaded(images), source(images))
    assert not torch.equal(model(images), ema.module(images))
    # validate.py and inference.py load this way, and take the average
    assert torch.equal(build(mixer=mixer, checkpoint_path=path)(images), ema.module(images))


@pytest.mark.parametrize("wrap", [None, "model", "state_dict"])
def test_wrapped_checkpoints_load(build: Build, tmp_path: Path, wrap: str | None) -> None:
    model = build()
    state = model.state_dict()
    torch.save({wrap: state} if wrap else state, tmp_path / "weights.pth")
    loaded = build(pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "weights.pth"), "num_classes": 5})
    assert_same_state(loaded, state)


def test_greyscale_from_colour(build: Build, tmp_path: Path) -> None:
    model = build()
    loaded = load(save(model, tmp_path), in_chans=1)
    images = torch.randn(2, 1, 32, 32)
    # timm's adaptation sums the filters: a grey image looks like its colour version
    torch.testing.assert_close(loaded(images), model(images.expand(-1, 3, -1, -1)))


def test_other_classes_leave_the_body(build: Build, tmp_path: Path) -> None:
    model = build()
    source = save(model, tmp_path)
    loaded = load(source, num_classes=9)
    images = torch.randn(2, 3, 32, 32)
    assert loaded(images).shape == (2, 9)
    assert torch.equal(loaded.forward_features(images), model.forward_features(images))
    assert torch.equal(load(source, num_classes=0)(images), model.forward_head(model.forward_features(images), True))


@pytest.mark.parametrize("kernel_coords", ["relative", "cells"])
@pytest.mark.parametrize("trained", [(32, 32), (24, 64), (64, 16)])
@pytest.mark.parametrize("wanted", [(48, 48), (64, 24), (16, 64)])
def test_loading_at_another_size(
    build: Build, tmp_path: Path, trained: tuple[int, int], wanted: tuple[int, int], kernel_coords: str
) -> None:
    model = build(img_size=trained, kernel_coords=kernel_coords)
    loaded = load(save(model, tmp_path), img_size=wanted)
    grid = (wanted[0] // 8, wanted[1] // 8)
    torch.testing.assert_close(loaded.pos_embed, resampled(model.pos_embed.detach(), grid))
    # the scale of the kernels is the checkpoint's: the loaded model is the same function of an image of any size
    for ours, theirs in zip(loaded.blocks, model.blocks, strict=True):
        assert ours.mixer.reference_grid == (trained[0] // 8, trained[1] // 8)
        for kernels, expected in zip(ours.mixer.kernels(*grid), theirs.mixer.kernels(*grid), strict=True):
            assert torch.equal(kernels, expected)
    images = torch.randn(2, 3, *wanted)
    torch.testing.assert_close(loaded(images), model(images))


def test_loading_with_another_patch_size(build: Build, tmp_path: Path) -> None:
    model = build()
    loaded = load(save(model, tmp_path), patch_size=16)
    twin = copy.deepcopy(model)
    twin.set_input_size(patch_size=16)
    images = torch.randn(2, 3, 32, 32)
    assert loaded.patch_embed.proj.weight.shape[-2:] == (16, 16)
    torch.testing.assert_close(loaded(images), twin(images))


def test_bfloat16_weights(build: Build, tmp_path: Path) -> None:
    model = build().bfloat16()
    source = save(model, tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert stored["blocks.0.mixer.offset"].dtype == torch.bfloat16
    images = torch.randn(2, 3, 32, 32)
    loaded = load(source)
    assert loaded.head.weight.dtype == torch.float32
    assert torch.equal(loaded(images), copy.deepcopy(model).float()(images))
    assert torch.equal(load(source, dtype=torch.bfloat16)(images.bfloat16()), model(images.bfloat16()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["blocks.1.mixer.width", "pos_embed", "head.bias", "patch_embed.proj.weight"])
def test_diverged_checkpoints_are_refused_whole(build: Build, tmp_path: Path, name: str, value: float) -> None:
    model = build()
    diverged = copy.deepcopy(model.state_dict())
    for tensor in diverged.values():
        tensor.mul_(2)
    diverged[name].view(-1)[-1] = value
    before = copy.deepcopy(model.state_dict())
    message = rf"{name} of the checkpoint is NaN or infinite in 1 of {diverged[name].numel()} values"
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(diverged)
    assert_same_state(model, before)

    torch.save({"state_dict": diverged}, tmp_path / "diverged.pth")
    with pytest.raises(ValueError, match=message):
        timm.models.load_checkpoint(model, str(tmp_path / "diverged.pth"))
    assert_same_state(model, before)
    source = save(model, tmp_path)
    safetensors.torch.save_file(diverged, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(source)


def test_checkpoint_with_an_impossible_reference_grid_is_refused(build: Build) -> None:
    model = build()
    damaged = copy.deepcopy(model.state_dict())
    damaged["blocks.1.mixer._extra_state"][0] = 0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"_extra_state .* got \(0, 4\)"):
        model.load_state_dict(damaged)
    assert_same_state(model, before)


def test_diverged_checkpoint_of_a_wrapped_model_is_refused(build: Build) -> None:
    wrapper = torch.nn.ModuleDict({"backbone": build(), "neck": torch.nn.Linear(2, 2)})
    state = copy.deepcopy(wrapper.state_dict())
    state["backbone.pos_embed"][0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"backbone\.pos_embed of the checkpoint is NaN or infinite in 1 of"):
        wrapper.load_state_dict(state)
    # keys that are not the model's do not matter to it
    state = copy.deepcopy(wrapper.state_dict())
    state["neck.weight"][0] = torch.nan
    wrapper.load_state_dict(state)


def test_pretrained_without_weights_is_timms_error(build: Build) -> None:
    with pytest.raises(RuntimeError, match="No pretrained weights exist for vit_ssog_tiny"):
        build(pretrained=True)
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("vit_ssog_tiny.in1k")


def test_a_checkpoint_of_the_twin_is_refused(build: Build) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*mixer\.qkv"):
        build(mixer="attention").load_state_dict(build().state_dict())


GRIDS = ((1, 1), (7, 9), (14, 14), (16, 15), (255, 256), (301, 4095))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64])
def test_the_reference_grid_survives_averages_in_any_dtype(grid: tuple[int, int], dtype: torch.dtype) -> None:
    digits = grid_digits(grid).to(dtype)
    assert grid_of_digits(digits) == grid
    for parts in (2, 3, 7, 10):
        assert grid_of_digits(torch.stack([digits.float() / parts] * parts).sum(0)) == grid
    if dtype != torch.float8_e4m3fn:
        for decay in (0.9, 0.99, 0.992, 0.996, 0.997, 0.999, 0.9995, 0.9999):
            average = digits.clone()
            for _ in range(50):
                average = decay * average + (1 - decay) * digits
            assert grid_of_digits(average) == grid


EMAS: dict[str, Callable[[Any], Any]] = {
    "ModelEmaV2": lambda model: timm.utils.ModelEmaV2(model, decay=0.9),
    "ModelEmaV3": lambda model: timm.utils.ModelEmaV3(model, decay=0.9),
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
}


@pytest.mark.parametrize("average", EMAS.values(), ids=EMAS)
def test_an_average_of_a_model_with_itself_is_the_model(build: Build, average: Callable[[Any], Any]) -> None:
    model = build(img_size=112)  # a grid of 14 x 14, which whole numbers averaged with a decay of 0.9 turn into 13
    averaged = average(model)
    update = averaged.update_parameters if hasattr(averaged, "update_parameters") else averaged.update
    for _ in range(20):
        update(model)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(averaged.module.eval()(images), model(images), rtol=1e-4, atol=1e-5)


def test_a_soup_of_checkpoints_keeps_the_grid(build: Build) -> None:
    model, images = build(img_size=112), torch.randn(2, 3, 64, 64)
    state = model.state_dict()
    for soup in (
        {name: sum(tensor / 10 for _ in range(10)) for name, tensor in state.items()},
        {name: 0.3 * tensor + 0.7 * tensor for name, tensor in state.items()},
        {name: tensor.double().to(torch.bfloat16) for name, tensor in state.items()},
    ):
        fresh = build(img_size=64)
        fresh.pos_embed = torch.nn.Parameter(torch.empty_like(model.pos_embed))
        fresh.load_state_dict(soup)
        assert [block.mixer.reference_grid for block in fresh.blocks] == [(14, 14)] * 2
        torch.testing.assert_close(fresh(images), model(images), rtol=0.1, atol=0.05)


def test_checkpoints_with_the_grid_as_two_integers_still_load(build: Build) -> None:
    model = build(img_size=112)
    old = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    old |= {f"blocks.{index}.mixer.reference_grid": torch.tensor([14, 14]) for index in range(2)}
    fresh, images = build(img_size=112), torch.randn(2, 3, 32, 32)
    for block in fresh.blocks:
        block.mixer.reference_grid = (4, 4)
    fresh.load_state_dict(old)
    assert torch.equal(fresh(images), model(images))
    old["blocks.0.mixer.reference_grid"] = torch.tensor([13.9999, 14.0001])  # averaged elsewhere
    fresh.load_state_dict(old)
    assert torch.equal(fresh(images), model(images))
    with pytest.raises(ValueError, match=r"blocks.1.mixer.reference_grid .* got \(0, 14\)"):
        fresh.load_state_dict({**old, "blocks.1.mixer.reference_grid": torch.tensor([0, 14])})


def test_loading_kernels_without_their_grid_warns(build: Build) -> None:
    model = build(pos_embed="none")
    parameters = dict(model.named_parameters())
    other = build(img_size=64, pos_embed="none")
    with pytest.warns(UserWarning, match=r"not their reference grid \(blocks.0.mixer._extra_state\).* 8 x 8 tokens"):
        other.load_state_dict(parameters, strict=False)
    with pytest.warns(match="their reference grid"), pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        other.load_state_dict(parameters)


def test_no_buffer_stands_beside_the_parameters(build: Build) -> None:
    # whatever averages, casts, shards or offloads buffers must not touch the model; opacus takes none at all
    for name in ("vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"):
        assert not list(build(name).buffers())


def test_a_state_dict_can_be_called_as_it_is(build: Build) -> None:
    model, images = build(), torch.randn(2, 3, 32, 32)
    assert torch.equal(torch.func.functional_call(model, model.state_dict(), (images,)), model(images))


def test_a_checkpoint_without_values_loads_where_torch_loads_it(build: Build) -> None:
    state = {name: tensor.to("meta") for name, tensor in build().state_dict().items()}
    old = {name.replace("_extra_state", "reference_grid"): tensor for name, tensor in state.items()}
    for checkpoint in (state, old):
        model = build(device="meta")
        model.load_state_dict(checkpoint, assign=True)
        assert [block.mixer.reference_grid for block in model.blocks] == [(4, 4)] * 2
