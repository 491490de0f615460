"""Hostile input: a clear error from this package, or a finite result; no traceback from inside torch, no silent NaN."""

import contextlib
import functools
import math
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.models
import torch
import yaml
from conftest import SMALL
from hub_runs import load, write_run
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import timm_ssog
from timm_ssog import hub
from timm_ssog.errors import SolveError
from timm_ssog.hub.exporting import _BENCHMARK_FIELDS, _RESULT_FIELDS, _read_rows

PACKAGE = str(Path(timm_ssog.__file__).parent)
TINY: dict[str, Any] = {**SMALL, "img_size": 16, "embed_dim": 8, "num_components": 2}
DEPTHS: dict[str, dict[str, Any]] = {
    "vit_ssog_tiny": {},
    "vit_ssog_tiny_looped": {"depth": 1, "loops": 3},
    "vit_ssog_tiny_ode": {"depth": 1, "horizon": 3.0, "solver_steps": 3},
}

depths = st.sampled_from(list(DEPTHS))
mixers = st.sampled_from(["ssog", "ssog", "attention", "identity"])


def build(name: str = "vit_ssog_tiny", **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{**TINY, **DEPTHS[name], **options}).eval()


@contextlib.contextmanager
def clear_errors(*words: str) -> Iterator[list[BaseException]]:
    """Catch errors of this package whose message has the words; the list holds them."""
    raised: list[BaseException] = []
    try:
        yield raised
    except (ValueError, TypeError, SolveError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        if not where.startswith(PACKAGE) or not all(word in str(error) for word in words) or len(str(error)) < 30:
            raise
        raised.append(error)


def assert_finite(outputs: Tensor) -> None:
    assert torch.isfinite(outputs).all()


anything = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 33, -1, True, False, None, "", "3", "none", "avg", (), (8,), (16, 8)]),
    st.sampled_from([(0, 8), [8, 16], (8, 8, 8), {}, {"a": 1}, object, b"8", 1.5, 0.5, 1e-30, 1e4, -2.0, 8.0]),
    st.sampled_from([math.nan, math.inf, -math.inf, np.float32(0.25), np.int64(8), np.float64("nan"), 1j]),
)

NAMES = [
    *("img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads"),
    *("mlp_ratio", "mixer", "num_components", "amplitude", "kernel_coords", "init_width", "init_offset"),
    *("class_token", "reg_tokens", "pos_embed", "fc_norm", "dynamic_img_size", "dynamic_img_pad", "drop_rate"),
    *("pos_drop_rate", "proj_drop_rate", "drop_path_rate"),
]
OWN = {
    "vit_ssog_tiny": NAMES,
    "vit_ssog_tiny_looped": [*NAMES, "loops", "loop_norms", "loop_embed", "input_injection"],
    "vit_ssog_tiny_ode": [
        *(*NAMES, "horizon", "solver", "solver_steps", "rtol", "atol", "adjoint", "per_sample", "max_evaluations"),
        "jitter",
    ],
}
# another option that a message may name instead, since it is the two that don't go together
PARTNERS = {"embed_dim": "num_heads", "num_heads": "embed_dim", "patch_size": "img_size", "depth": "solver_steps"}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[str, str, Any]:
    model = draw(depths)
    return model, draw(st.sampled_from(OWN[model])), draw(anything)


@given(arguments())
@example(("vit_ssog_tiny", "mlp_ratio", "3"))
@example(("vit_ssog_tiny", "num_classes", 1.5))
@example(("vit_ssog_tiny", "dynamic_img_pad", "none"))
@example(("vit_ssog_tiny", "init_width", "3"))
@example(("vit_ssog_tiny", "drop_rate", "3"))
@example(("vit_ssog_tiny", "init_width", np.float32(0.25)))
@example(("vit_ssog_tiny", "dynamic_img_size", False))
@example(("vit_ssog_tiny_ode", "solver", {}))
@example(("vit_ssog_tiny_ode", "rtol", 1e-30))
@example(("vit_ssog_tiny_ode", "rtol", None))
def test_constructor_arguments(case: tuple[str, str, Any]) -> None:
    name, argument, value = case
    assume(not (argument == "img_size" and isinstance(value, int) and value > 64))
    classes = {"vit_ssog_tiny": timm_ssog.VitSsog, "vit_ssog_tiny_looped": timm_ssog.LoopedVitSsog}
    options = {**TINY, **DEPTHS[name], argument: value}
    model: Any = None
    with clear_errors() as raised:
        torch.manual_seed(0)
        model = classes.get(name, timm_ssog.OdeVitSsog)(**options).eval()
    if raised:
        assert argument in str(raised[0]) or PARTNERS.get(argument, argument) in str(raised[0])
        return
    patch, channels = model.patch_embed.patch_size, model.in_chans
    image = torch.randn(2, channels, 2 * patch[0], patch[1])
    if not model.dynamic_img_size:
        with pytest.raises(AssertionError, match="doesn't match model"):  # in timm's words
            model(image)
        return
    with clear_errors():  # a solver may give up
        assert_finite(model(image))
    with clear_errors():
        model.train()(image).sum().backward()


LAYERS = ["layernorm", "LayerNorm", "rmsnorm", "centrenorm", "batchnorm2d", "layernorm2d", "groupnorm", "nonsense", ""]
ACTS = ["gelu", "relu", "quick_gelu", "identity", "softmax", "prelu", "Nonsense", "gelu ", ""]
CLASSES = [
    *(nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, functools.partial(nn.LayerNorm, eps=1e-3), nn.Identity, nn.GLU),
    *(nn.ReLU, nn.GELU(), nn.LayerNorm(8), 3, 1.5, object, print, nn.Softmax, nn.MultiheadAttention, torch.relu, []),
]


@given(depths, st.sampled_from([*LAYERS, *CLASSES]), st.sampled_from([*ACTS, *CLASSES]))
@example("vit_ssog_tiny", "batchnorm2d", "gelu")
@example("vit_ssog_tiny", "nonsense", "gelu")
@example("vit_ssog_tiny", "layernorm", "nonsense")
@example("vit_ssog_tiny", "layernorm", nn.GLU)
@example("vit_ssog_tiny", nn.ReLU, "gelu")
def test_layers(name: str, norm_layer: Any, act_layer: Any) -> None:
    with clear_errors("_layer must ") as raised:
        model = build(name, norm_layer=norm_layer, act_layer=act_layer)
    if not raised:
        assert_finite(model(torch.randn(2, 3, 16, 8)))


@given(
    depths,
    st.integers(1, 2048),
    st.one_of(st.integers(1, 2048), st.integers(1, 64)),
    st.sampled_from([8, 32, 64, (16, 64)]),
    st.booleans(),
    st.sampled_from([0, 1, 1, 3]),
    st.booleans(),
)
@example("vit_ssog_tiny", 2048, 32, 32, False, 1, True)
@example("vit_ssog_tiny", 1, 64, 32, True, 1, False)
@example("vit_ssog_tiny_ode", 1, 1, 8, True, 0, False)
def test_image_sizes_layouts_and_batches(
    name: str, height: int, width: int, patch: Any, pad: bool, batch: int, channels_last: bool
) -> None:
    tall, wide = patch if isinstance(patch, tuple) else (patch, patch)
    assume(math.ceil(height / tall) * math.ceil(width / wide) <= 1100)
    model = build(name, patch_size=patch, img_size=64, dynamic_img_pad=pad)
    image = torch.randn(batch, 3, height, width)
    outputs = None
    with clear_errors(f"{height} x {width}") as raised:
        if channels_last:
            outputs = model.to(memory_format=torch.channels_last)(image.to(memory_format=torch.channels_last))
        else:
            outputs = model(image)
    fits = height % tall == 0 and width % wide == 0
    assert bool(raised) != (fits or pad)
    if outputs is not None:
        assert outputs.shape == (batch, 5)
        assert_finite(outputs)


@given(depths, st.sampled_from(["dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun"]), st.booleans())
def test_adaptive_solvers_take_no_image_and_one(name: str, solver: str, per_sample: bool) -> None:
    assume(not (per_sample and solver in ("dopri8", "adaptive_heun", "fehlberg2")))
    for batch in (0, 1):
        with clear_errors():
            model = build("vit_ssog_tiny_ode", solver=solver, per_sample=per_sample)
            outputs = model(torch.randn(batch, 3, 16, 16))
            assert outputs.shape == (batch, 5)
            assert_finite(outputs)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NO_IMAGES = [torch.uint8, torch.int64, torch.bool, torch.complex64, torch.int8]


@given(depths, mixers, st.sampled_from(DTYPES), st.sampled_from([*DTYPES, *NO_IMAGES]))
@example("vit_ssog_tiny", "ssog", torch.float32, torch.uint8)
def test_dtypes_of_images(name: str, mixer: str, dtype: torch.dtype, image_dtype: torch.dtype) -> None:
    model = build(name, mixer=mixer, dtype=dtype)
    image = torch.rand(1, 3, 16, 16).mul(2).to(image_dtype)
    if dtype != image_dtype and image_dtype in DTYPES:
        # two types of floats, and no autocast to say which: torch names both
        with pytest.raises(RuntimeError, match=r"(?i)input type .* bias type .* should be the same"):
            model(image)
        return
    with clear_errors("floating-point") as raised:
        outputs = model(image)
    assert bool(raised) == (image_dtype in NO_IMAGES)
    if not raised:
        assert outputs.dtype == dtype
        assert_finite(outputs)


@given(st.sampled_from([*NO_IMAGES, "float32", 3, float]))
def test_dtypes_of_models(dtype: Any) -> None:
    with clear_errors("dtype must be") as raised:
        timm_ssog.VitSsog(**TINY, dtype=dtype)
    assert raised


extreme = st.sampled_from([0.0, 1e-30, -1e-30, 0.5, -3.0, 100.0, -1e3, 1e4, -1e4])
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
huge = st.sampled_from([0.0, 0.5, 1e4, -1e7, 1e19, -1e20, 1e30, 3e38, -3e38])


@given(
    depths,
    st.sampled_from(["signed", "convex"]),
    st.sampled_from(["relative", "cells"]),
    st.one_of(extreme, huge),
    extreme,
    extreme,
    st.sampled_from([(16, 16), (8, 128), (64, 8)]),
    st.sampled_from([None, torch.bfloat16, torch.float64]),
)
@example("vit_ssog_tiny", "signed", "relative", 1e4, -1e4, 1e4, (16, 16), None)
@example("vit_ssog_tiny", "signed", "relative", 1e20, -1e4, 1e4, (16, 16), None)
@example("vit_ssog_tiny_ode", "convex", "cells", -1e4, 1e4, -1e4, (8, 128), torch.bfloat16)
def test_kernel_parameters(
    name: str,
    amplitude: str,
    kernel_coords: str,
    offset: float,
    width: float,
    weight: float,
    size: tuple[int, int],
    dtype: torch.dtype | None,
) -> None:
    model = build(name, amplitude=amplitude, kernel_coords=kernel_coords)
    with torch.no_grad():
        for block in model.blocks:
            for parameter, value in zip(
                (block.mixer.offset, block.mixer.width, block.mixer.amplitude), (offset, width, weight), strict=True
            ):
                parameter[0] = value  # of one head: the other stays as it was
    image = torch.randn(2, 3, *size)
    if dtype == torch.float64:
        model, image = model.double(), image.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = model(image)
    assert_finite(outputs)
    outputs.sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), parameter_name


@given(
    st.lists(st.tuples(huge | floats, extreme.map(abs) | huge.map(abs)), min_size=1, max_size=4),
    st.integers(1, 70),
    st.one_of(st.none(), st.sampled_from([1, 0.5, 14, 4096])),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@example([(1e19, 1.0)], 14, None, torch.float32)
@example([(0.5, 0.0)], 14, None, torch.float32)
def test_axis_kernels(
    components: list[tuple[float, float]], length: int, reference: float | None, dtype: torch.dtype
) -> None:
    offset, width = torch.tensor(components, dtype=torch.float64).to(dtype).requires_grad_().unbind(-1)
    kernels = timm_ssog.axis_kernels(offset, width, length, reference)
    assert_finite(kernels)
    torch.testing.assert_close(kernels.sum(-1), torch.ones_like(kernels[..., 0]), rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(kernels[..., 0].sum(), (offset, width))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_the_limits_of_axis_kernels(width: float) -> None:
    """A Gaussian without width is the nearest cell, and one infinitely far away the last one."""
    width_tensor = torch.full((3,), width)
    near = timm_ssog.axis_kernels(torch.tensor([2.2, 0.0, -1.0]), torch.zeros(3), 6)
    for kernel, shift in zip(near, (2, 0, -1), strict=True):
        assert kernel.argmax(-1).tolist() == [min(max(row + shift, 0), 5) for row in range(6)]
        assert torch.equal(kernel.amax(-1), torch.ones(6))
    far = timm_ssog.axis_kernels(torch.tensor([1e20, -1e20, 3e38]), width_tensor, 6)
    for kernel, end in zip(far, (5, 0, 5), strict=True):
        assert torch.equal(kernel[:, end], torch.ones(6))


def damage(state: dict[str, Any], name: str, how: str) -> dict[str, Any]:
    state = {key: value.clone() for key, value in state.items()}
    tensor = state[name]
    changes: dict[str, Any] = {
        "nan": tensor.float().fill_(math.nan),
        "inf": tensor.double().fill_(-math.inf),
        "half": tensor.half(),
        "float8": tensor.float().to(torch.float8_e4m3fn),
        "int": tensor.to(torch.int8),
        "bool": tensor.to(torch.bool),
        "complex": tensor.to(torch.complex64),
        "empty": tensor[:0],
        "flat": tensor.reshape(-1),
        "deeper": tensor[None],
        "longer": torch.cat([tensor, tensor]),
        "scalar": torch.tensor(1.0),
        "zeros": torch.zeros_like(tensor),
        "list": tensor.tolist(),
        "array": tensor.numpy(),
        "none": None,
        "text": "weights",
    }
    if how == "missing":
        del state[name]
    elif how == "extra":
        state[f"{name}.more"] = tensor
    elif how == "number":
        state[3] = tensor  # type: ignore[index]
    else:
        state[name] = changes[how]
    return state


HOW = [
    *("nan", "inf", "half", "float8", "int", "bool", "complex", "empty", "flat", "deeper", "longer", "scalar", "zeros"),
    *("list", "array", "none", "text", "missing", "extra", "number"),
]
CHANGES = [{}, {"num_classes": 3}, {"img_size": 32}, {"patch_size": 4}, {"in_chans": 1}]
MODELS = {name: build(name) for name in DEPTHS}


def assert_refused_or_finite(model: Any, loaded: bool, raised: list[BaseException]) -> None:
    assert loaded != bool(raised)
    if loaded:
        assert_finite(model(torch.randn(1, 3, 16, 16)))


@contextlib.contextmanager
def clear_loading_errors() -> Iterator[list[BaseException]]:
    """Errors of this package, and torch's list of what does not fit, which every user of torch knows."""
    raised: list[BaseException] = []
    try:
        with clear_errors() as ours:
            yield raised
        raised.extend(ours)
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict for "):
            raise
        raised.append(error)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, str]:
    name = draw(depths)
    return name, draw(st.sampled_from(list(MODELS[name].state_dict()))), draw(st.sampled_from(HOW))


@given(damages(), st.booleans())
@example(("vit_ssog_tiny", "blocks.0.mixer.offset", "int"), True)
@example(("vit_ssog_tiny", "blocks.0.mixer._extra_state", "complex"), True)
@example(("vit_ssog_tiny", "blocks.0.mixer._extra_state", "zeros"), False)
@example(("vit_ssog_tiny", "blocks.0.mixer._extra_state", "flat"), False)
@example(("vit_ssog_tiny", "blocks.0.mixer._extra_state", "text"), True)
def test_state_dicts(case: tuple[str, str, str], strict: bool) -> None:
    name, key, how = case
    model = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loaded = False
    with clear_loading_errors() as raised:
        model.load_state_dict(damage(before, key, how), strict=strict)
        loaded = True
    assert_refused_or_finite(model, loaded, raised)
    if how in ("nan", "inf", "int", "bool", "complex") and not key.endswith("_extra_state"):
        assert raised
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@given(
    damages(),
    st.sampled_from(["plain", "model", "state_dict"]),
    st.sampled_from(CHANGES),
)
@example(("vit_ssog_tiny", "patch_embed.proj.weight", "none"), "plain", {"patch_size": 4})
@example(("vit_ssog_tiny", "patch_embed.proj.weight", "flat"), "plain", {"patch_size": 4})
@example(("vit_ssog_tiny", "patch_embed.proj.weight", "missing"), "plain", {"in_chans": 1})
@example(("vit_ssog_tiny", "pos_embed", "empty"), "model", {"img_size": 32})
def test_checkpoints_through_timm(case: tuple[str, str, str], wrap: str, options: dict[str, Any]) -> None:
    name, key, how = case
    state: Any = damage(MODELS[name].state_dict(), key, how)
    state = state if wrap == "plain" else {wrap: state}
    model: Any = None
    with clear_loading_errors() as raised:
        model = build(name, pretrained=True, pretrained_cfg_overlay={"state_dict": state, "num_classes": 5}, **options)
    if model is None:
        assert raised
    else:
        assert_finite(model(torch.randn(1, model.in_chans, 16, 16)))


@pytest.mark.parametrize("content", [[], 3, "text", None, {"model": 3}, {"state_dict": [1]}, {"a": {"b": 1}}])
def test_what_is_not_a_checkpoint(content: Any) -> None:
    model = build()
    with pytest.raises(ValueError, match="Expected a checkpoint of named tensors"):
        timm_ssog.vit_ssog.checkpoint_filter_fn(content, model)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to be read only."""
    folder = tmp_path_factory.mktemp("published")
    write_run(folder / "run", "vit_ssog_tiny_looped", model_kwargs={"act_layer": "quick_gelu", "loops": 2})
    return hub.export(folder / "run", folder / "out")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"amplitude": "convex"}, "amplitude='signed' .* 'convex'"),
        ({"norm_layer": "rmsnorm"}, None),  # has no bias, so that torch refuses it
        ({"norm_layer": "centrenorm"}, "norm_layer='LayerNorm' .* 'CentreNorm'"),
        ({"act_layer": "relu"}, "act_layer='QuickGELU' .* 'ReLU'"),
        ({"input_injection": "add"}, "input_injection='none' .* 'add'"),
    ],
)
def test_other_options_than_the_published_ones(published: Path, options: dict[str, Any], said: str | None) -> None:
    if not hasattr(load(published), "pretrained_model_args"):
        pytest.skip("this timm does not say what was published")
    if said is None:
        with pytest.raises(RuntimeError, match=r"Missing|Unexpected"):
            load(published, **options)
        return
    with pytest.warns(UserWarning, match=f"The weights were trained with {said}"):
        load(published, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timm.create_model(f"local-dir:{published}", **options)  # nothing is loaded


@pytest.mark.parametrize(
    "options", [{}, {"loops": 3}, {"kernel_coords": "cells"}, {"act_layer": "quick_gelu"}, {"norm_layer": "layernorm"}]
)
def test_published_options_and_those_for_users_to_choose_do_not_warn(published: Path, options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(published, **options)


@pytest.mark.parametrize("value", [3, "abc", ["a"], [["a", 1]], True])
def test_export_of_a_run_whose_model_kwargs_are_none(tmp_path: Path, value: Any) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run/args.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "model_kwargs": value}))
    with pytest.raises(ValueError, match=r"args\.yaml.*model_kwargs"):
        hub.export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["3", "[1, 2]", '["a"]', "null", "[null]", "[]", '{"top1": {}}', "", "top1,top1_err\n1"]
)
@pytest.mark.parametrize("fields", [_RESULT_FIELDS, _BENCHMARK_FIELDS])
def test_malformed_results(tmp_path: Path, text: str, fields: tuple[str, ...]) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json"):
        _read_rows(tmp_path / "results.json", fields, parameters=1)


def test_export_with_malformed_results_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "results.json").write_text('["a"]')
    with pytest.raises(ValueError, match=r"results\.json holds no results"):
        hub.export(tmp_path / "run", tmp_path / "out", results={"test": tmp_path / "results.json"})
    assert not (tmp_path / "out").exists()
