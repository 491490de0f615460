"""Kernels that listen to the content: against the definition in float64, as modules, and as whole models."""

import copy
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import Build, photos
from torch import Tensor

import timm_ssog
from timm_ssog.hybrid import STEERED, mixer_names
from timm_ssog.layers import AttentionMixer, SeparableMixer
from timm_ssog.ops import naive, steered
from timm_ssog.steering import REACH, AmplitudeSteeredMixer, ShiftSteeredMixer, ValueSteeredMixer

look_up: Any = importlib.import_module("look_up")
steering_cost: Any = importlib.import_module("steering_cost")

KINDS = ("value", "amplitude", "shift")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_operator = pytest.mark.parametrize("operator", ["amplitude", "shift"])


def inputs_of(
    operator: str, grid: tuple[int, int], batch: int = 2, heads: int = 3, components: int = 2
) -> list[Tensor]:
    """Arguments of an operator in float64, as plain tensors; no two sizes agree."""
    height, width = grid
    values = torch.randn(batch, height, width, heads, 4, dtype=torch.float64)
    if operator == "amplitude":
        rows, columns = (torch.rand(heads, components, length, length, dtype=torch.float64) for length in grid)
        return [values, rows, columns, torch.randn(batch, height, width, heads, components, dtype=torch.float64)]
    shape = (2, batch, height, width, heads, components)
    offsets, sigmas = torch.randn(shape, dtype=torch.float64) * 2, torch.rand(shape, dtype=torch.float64) + 0.3
    return [values, offsets, sigmas, torch.randn(heads, components, dtype=torch.float64)]


def call(module: Any, operator: str) -> Callable[..., Tensor]:
    if operator == "amplitude":
        return module.amplitude_mix
    stretches = [torch.tensor(stretch, dtype=torch.float64) for stretch in (1.5, 0.7)]

    def mix(values: Tensor, offsets: Tensor, sigmas: Tensor, amplitude: Tensor) -> Tensor:
        return module.shift_mix(values, [*offsets.unbind()], [*sigmas.unbind()], amplitude, stretches)

    return mix


@each_operator
@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (5, 1), (5, 7)])
@pytest.mark.parametrize("floats", [1, 256, 1 << 17])
def test_operators_are_their_definitions(
    operator: str, grid: tuple[int, int], floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one row at a time, some rows or planes at a time, everything at once
    monkeypatch.setattr(steered, "TOGETHER", floats)
    monkeypatch.setattr(steered, "ROWS_TOGETHER", 4 * floats)
    inputs = [tensor.requires_grad_() for tensor in inputs_of(operator, grid)]
    ours, theirs = call(steered, operator)(*inputs), call(naive, operator)(*inputs)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad))


def test_definition_of_shifts_is_a_sum_over_tokens() -> None:
    values, offsets, sigmas, amplitude = inputs_of("shift", (3, 4), batch=1, heads=1)
    stretches = [torch.tensor(1.0, dtype=torch.float64)] * 2
    expected = torch.zeros_like(values)
    for i, j, m in itertools.product(range(3), range(4), range(2)):
        across = torch.arange(4) - j - offsets[1, 0, i, j, 0, m]
        across = (-0.5 * (across / sigmas[1, 0, i, j, 0, m]) ** 2).softmax(0)
        for l in range(4):  # noqa: E741
            down = torch.arange(3) - i - offsets[0, 0, i, l, 0, m]
            down = (-0.5 * (down / sigmas[0, 0, i, l, 0, m]) ** 2).softmax(0)
            expected[0, i, j, 0] += amplitude[0, m] * across[l] * (down[:, None] * values[0, :, l, 0]).sum(0)
    torch.testing.assert_close(naive.shift_mix(values, [*offsets], [*sigmas], amplitude, stretches), expected)


@each_operator
def test_derivatives_of_every_kind(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steered, "TOGETHER", 16)
    monkeypatch.setattr(steered, "ROWS_TOGETHER", 32)
    inputs = [tensor.requires_grad_() for tensor in inputs_of(operator, (2, 3), batch=1, heads=1)]
    mix = call(steered, operator)
    assert torch.autograd.gradcheck(mix, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(mix, inputs)


@each_operator
def test_error_in_float32_is_rounding(operator: str) -> None:
    inputs = [tensor.float() for tensor in inputs_of(operator, (24, 33), components=3)]
    exact = call(naive, operator)(*(tensor.double() for tensor in inputs))
    assert (call(steered, operator)(*inputs) - exact).abs().max() < 3e-6 * exact.abs().max()


def steered_mixer(kind: str, **options: Any) -> Any:
    mixer: Any = STEERED[kind](12, 3, (4, 6), **options)
    torch.nn.init.normal_(mixer.steer.weight, std=0.5)
    torch.nn.init.normal_(mixer.steer.bias, std=0.5)
    return mixer.double()


@pytest.mark.parametrize("amplitude", ["signed", "convex"])
@each_kind
def test_mixers_are_what_they_say(kind: str, amplitude: str) -> None:
    mixer = steered_mixer(kind, amplitude=amplitude)
    x = torch.randn(2, 8, 9, 12, dtype=torch.float64)
    values = mixer.value(x).reshape(2, 8, 9, 3, 4)
    heard = mixer.steer(x)
    if kind == "value":
        gated = values * (2 / (1 + (-heard).exp()))[..., None]
        mixed = naive.separable_mix(gated, *mixer.kernels(8, 9))
    elif kind == "amplitude":
        rows, columns = (
            timm_ssog.axis_kernels(mixer.offset[..., axis], mixer.width[..., axis].exp().log1p() + 0.25, length, ref)
            for axis, length, ref in ((0, 8, 4), (1, 9, 6))
        )
        weights = mixer.amplitude + heard.unflatten(-1, (3, 4)).tanh()
        mixed = naive.amplitude_mix(values, rows, columns, weights.softmax(-1) if amplitude == "convex" else weights)
    else:
        moves = heard.unflatten(-1, (4, 3, 4)).tanh()
        sigma = mixer.width.exp().log1p() + 0.25
        mixed = naive.shift_mix(
            values,
            [mixer.offset[..., axis] + REACH * moves[..., axis, :, :] for axis in (0, 1)],
            [sigma[..., axis] * 2 ** moves[..., 2 + axis, :, :] for axis in (0, 1)],
            mixer.amplitude.softmax(-1) if amplitude == "convex" else mixer.amplitude,
            [torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)],
        )
    torch.testing.assert_close(mixer(x), mixer.proj(mixed.flatten(3)))


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
@each_kind
def test_fixed_checkpoint_loads_and_continues(build: Build, kind: str, name: str) -> None:
    fixed, model = build(name, depth=1), build(name, depth=1, steering=kind)
    torch.nn.init.normal_(model.blocks[0].mixer.steer.weight)
    model.load_state_dict(fixed.state_dict())
    assert not model.blocks[0].mixer.steer.weight.any()
    torch.testing.assert_close(model(photos()), fixed(photos()))
    if kind == "value":
        assert torch.equal(model(photos()), fixed(photos()))
    model.train()(photos()).square().sum().backward()
    assert model.blocks[0].mixer.steer.weight.grad.abs().max() > 0
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mixer\.steer\.weight"):
        fixed.load_state_dict(model.state_dict())


@each_kind
def test_trained_state_comes_back(build: Build, kind: str) -> None:
    model, other = build(steering=kind), build(steering=kind)
    for parameter in (parameter for name, parameter in model.named_parameters() if "steer" in name):
        torch.nn.init.normal_(parameter)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(photos()), model(photos()))
    assert not torch.allclose(build(steering=kind)(photos()), model(photos()))


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(build: Build, kind: str, dtype: torch.dtype) -> None:
    model = build(steering=kind).train()
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.steer.weight, std=0.3)
    exact = copy.deepcopy(model).double()(photos().double())
    with torch.autocast("cpu", dtype=dtype):
        logits = model(photos())
    assert (logits - exact).norm() < 24 * torch.finfo(dtype).eps * exact.norm()
    logits.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    logits = model.to(dtype)(photos().to(dtype))
    assert logits.dtype == dtype
    assert (logits - exact).norm() < 24 * torch.finfo(dtype).eps * exact.norm()


def saved_bytes(mixer: torch.nn.Module, x: Tensor) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mixer(x)
    assert output.requires_grad
    return sum(kept.values()) - sum(parameter.nbytes for parameter in mixer.parameters())


@each_kind
def test_backward_keeps_no_kernels_of_tokens(kind: str) -> None:
    x = torch.randn(1, 32, 32, 64)
    own = saved_bytes(STEERED[kind](64, 4, (32, 32)), x) - saved_bytes(SeparableMixer(64, 4, (32, 32)), x)
    # what steers, in a few forms of it, and the values again; one axis of kernels would be 4 * 32 times the components
    components = x.nbytes / 64 * 4 * 4
    assert own < 16 * components + 2 * x.nbytes
    assert 32 * components > 16 * components + 2 * x.nbytes


def test_what_content_costs_in_parameters() -> None:
    def count(**options: Any) -> int:
        model = timm.create_model("vit_ssog_small", num_classes=100, device="meta", **options)
        return sum(parameter.numel() for parameter in model.parameters())

    attention = count(mixer="attention")
    for kind in ("none", *KINDS):
        assert count(steering=kind) < (1 - 0.088) * attention  # the paper's saving
    assert count(steering="value") - count() == 12 * (384 * 6 + 6)
    assert count(steering="shift") - count() == 12 * (384 + 1) * 4 * 6 * 4
    assert count(mixer="attention", steering="shift") == attention


def test_only_kernels_that_no_token_moves_are_shared(build: Build) -> None:
    for kind, shared in (("none", True), ("value", True), ("amplitude", True), ("shift", False)):
        model = build("vit_ssog_tiny_looped", depth=1, steering=kind)
        assert (model._kernels(model.embed(photos()))[0] is not None) == shared, kind


@each_kind
@pytest.mark.parametrize("norm_layer", [None, "centrenorm"])
def test_steered_models_are_not_certified_as_fixed_ones(build: Build, kind: str, norm_layer: str | None) -> None:
    model = build("vit_ssog_tiny_ode", depth=1, steering=kind, norm_layer=norm_layer)
    certificate = timm_ssog.certify(model, 32)
    assert not certificate.solution_unique
    assert certificate.velocity_bound == float("inf")
    assert certificate.reason is not None
    assert f"steering='{kind}'" in certificate.reason
    # a LayerNorm bounds what the kernels hear, and then a constant exists
    assert ("a finite constant does exist" in certificate.reason) == (norm_layer is None)


@pytest.mark.parametrize("kind", ["value", "amplitude"])
def test_a_product_of_two_functions_has_no_global_constant(kind: str) -> None:
    mixer = steered_mixer(kind)
    x, step = torch.randn(1, 4, 6, 12, dtype=torch.float64), 1e-4 * torch.randn(1, 4, 6, 12, dtype=torch.float64)
    # near the plane where the map is zero, the slope grows with the length of the input
    with torch.no_grad():
        mixer.steer.weight[1:] = 0
        mixer.steer.bias.zero_()
        direction = mixer.steer.weight[0] / mixer.steer.weight[0].norm()
        x = x - (x @ direction)[..., None] * direction
        slopes = [float((mixer(scale * x + step) - mixer(scale * x)).norm() / step.norm()) for scale in (1, 1e3, 1e6)]
    assert slopes[0] < slopes[1] / 10 < slopes[2] / 100


def test_names_of_mixers() -> None:
    assert mixer_names("ssog", 2) == ["ssog", "ssog"]
    assert mixer_names("ssog*2+attention", 3) == mixer_names(["ssog", "ssog", "attention"], 3)
    for wrong in ("ssog*2+atention", "ssog*0+attention", "ssog*", "", ["ssog", 3], 3, None):
        with pytest.raises(ValueError, match=r"mixer must be one of 'ssog', 'attention', 'identity'.*got"):
            mixer_names(wrong, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"names 2 blocks, but the model has depth=3"):
        mixer_names("ssog+attention", 3)
    with pytest.raises(ValueError, match=r"steering must be one of 'none', 'value', 'amplitude', 'shift'"):
        timm.create_model("vit_ssog_tiny", steering="values")


def test_hybrids(build: Build) -> None:
    model = build(depth=3, mixer="ssog*2+attention", steering="value")
    assert [type(block.mixer) for block in model.blocks] == [ValueSteeredMixer, ValueSteeredMixer, AttentionMixer]
    images = torch.randn(2, 3, 48, 24)
    assert model(images).isfinite().all()
    names = ["attention", "ssog", "identity"]
    assert [type(block.mixer).__name__ for block in build(depth=3, mixer=names).blocks] == [
        "AttentionMixer",
        "SeparableMixer",
        "IdentityMixer",
    ]
    assert "self-attention is not globally Lipschitz" in str(timm_ssog.certify(build(mixer="ssog+attention"), 32))
    shared = build("vit_ssog_tiny_ode", depth=2, mixer="ssog+attention", solver_steps=4)
    assert shared(images).isfinite().all()


def test_only_attention_finds_content_by_content() -> None:
    # chance is 25 %, and a guess among the values that an image holds more often is better
    assert look_up.top1("hybrid", steps=400) >= 95
    assert look_up.top1("fixed", steps=200) < 70
    assert look_up.top1("value", steps=200) < 70


def test_steering_cost_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    steering_cost.main(["--quick", "--output", str(tmp_path / "steering.json")])
    [run] = json.loads((tmp_path / "steering.json").read_text())["runs"]
    assert list(run["forward"]) == list(run["training"]) == ["none", *KINDS, "attention"]
    assert "| 4 x 4 | 1 |" in steering_cost.table([run])


def test_the_steered_mixers_are_those_of_the_option() -> None:
    kinds = {"value": ValueSteeredMixer, "amplitude": AmplitudeSteeredMixer, "shift": ShiftSteeredMixer}
    for kind, cls in kinds.items():
        assert type(timm.create_model("vit_ssog_tiny", depth=1, steering=kind).blocks[0].mixer) is cls  # type: ignore[union-attr]
