"""Graph capture: one graph for any batch, height and width, with the same numbers as the model it came from."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.fx.experimental._config
import torchvision.models.feature_extraction
from conftest import Build
from timm.models import create_feature_extractor
from torch import Tensor
from torch.export import Dim

from timm_ssog.ops.capture import is_captured

SIZES = [(2, 3, 48, 40), (3, 3, 32, 32), (1, 3, 24, 72)]

each_mixer = pytest.mark.parametrize("mixer", ["ssog", "attention"])

MODELS: dict[str, dict[str, Any]] = {
    "discrete": {"name": "vit_ssog_tiny", "depth": 1},
    "twin": {"name": "vit_ssog_tiny", "depth": 1, "mixer": "attention"},
    "value": {"name": "vit_ssog_tiny", "depth": 1, "steering": "value"},
    "amplitude": {"name": "vit_ssog_tiny", "depth": 1, "steering": "amplitude"},
    "shift": {"name": "vit_ssog_tiny_ode", "depth": 1, "horizon": 2.0, "solver_steps": 1, "steering": "shift"},
    "looped": {
        "name": "vit_ssog_tiny_looped",
        "depth": 1,
        "loops": 2,
        "loop_norms": True,
        "loop_embed": True,
        "input_injection": "add",
    },
    "continuous": {"name": "vit_ssog_tiny_ode", "depth": 1, "horizon": 4.0, "solver": "midpoint", "solver_steps": 2},
}
each_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    torch.compiler.reset()


def assert_same_logits(captured: Callable[[Tensor], Tensor], model: torch.nn.Module, sizes: list = SIZES) -> None:
    for size in sizes:
        images = torch.randn(size)
        with torch.no_grad():
            torch.testing.assert_close(captured(images), model(images), rtol=1e-5, atol=1e-6)


def steered(model: Any) -> Any:
    """The model, listening to the content if it can: what it hears starts as zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mixer.steer" in name:
                parameter.normal_(std=0.2)
    return model


def gradients(model: torch.nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    run(images).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


SCRIPTED: list[dict[str, Any]] = [
    *({"steering": steering} for steering in ("value", "amplitude", "shift")),
    {"steering": "shift", "amplitude": "convex", "kernel_coords": "cells"},
    *(
        {"mixer": mixer, **options}
        for mixer in ("ssog", "attention")
        for options in ({}, {"dynamic_img_pad": True}, {"amplitude": "convex", "kernel_coords": "cells"})
    ),
]


@pytest.mark.parametrize("options", SCRIPTED)
def test_torchscript(build: Build, options: dict[str, Any]) -> None:
    model = steered(build(depth=1, **options))
    scripted: Any = torch.jit.script(model)
    sizes = [*SIZES, (2, 3, 8, 16), (2, 3, 33, 41)] if "dynamic_img_pad" in options else SIZES
    assert_same_logits(scripted, model, sizes)
    assert_same_logits(torch.jit.freeze(scripted), model, sizes)
    images = torch.randn(2, 3, 48, 40)
    expected = gradients(model, model, images)
    actual = gradients(model, scripted, images)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_torchscript_says_what_images_it_takes(build: Build) -> None:
    scripted: Any = torch.jit.script(build())
    with pytest.raises(torch.jit.Error, match="multiples of the patch size 8 x 8, got 36 x 32"):
        scripted(torch.zeros(1, 3, 36, 32))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the argument checks
def test_torchscript_trace(build: Build) -> None:
    model = build()
    images = torch.randn(2, 3, 48, 40)
    traced: Any = torch.jit.trace(model, images, check_trace=False)
    torch.testing.assert_close(traced(images), model(images))


@each_mixer
def test_fx(build: Build, mixer: str) -> None:
    model = build(mixer=mixer)
    extractor = create_feature_extractor(model, {"blocks.0": "first", "norm": "last", "head": "logits"})
    for size in SIZES:
        images = torch.randn(size)
        outputs = extractor(images)
        first = model.forward_intermediates(images, [0], intermediates_only=True)
        assert torch.equal(outputs["first"].permute(0, 3, 1, 2), first[0])
        assert torch.equal(outputs["last"], model.forward_features(images))
        assert torch.equal(outputs["logits"], model(images))


@each_model
def test_plain_fx_and_torchvisions_extractor(build: Build, options: dict[str, Any]) -> None:
    model = steered(build(**options))
    traced = torch.fx.symbolic_trace(model)
    extractor = torchvision.models.feature_extraction.create_feature_extractor(
        model, {"norm": "last", "head": "logits"}
    )
    for size in SIZES:
        images = torch.randn(size)
        assert torch.equal(traced(images), model(images))
        assert torch.equal(extractor(images)["last"], model.forward_features(images))
        assert torch.equal(extractor(images)["logits"], model(images))


@each_model
def test_compile_in_one_graph(build: Build, options: dict[str, Any]) -> None:
    model = steered(build(**options))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same_logits(compiled, model, SIZES[:2])


@each_model
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_training_step(build: Build, options: dict[str, Any], dynamic: bool | None) -> None:
    model = steered(build(**options)).train()
    images = torch.randn(2, 3, 48, 40)
    expected = gradients(model, model, images)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(gradients(model, compiled, images), expected, rtol=1e-4, atol=1e-6)
    assert len(expected) == len(list(model.parameters()))


def test_compiled_under_autocast_and_checkpointing(build: Build) -> None:
    model = build(depth=1).train()
    model.set_grad_checkpointing()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def cast(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def under_autocast(images: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(images).float()

        return under_autocast

    expected = gradients(model, cast(model), images)
    actual = gradients(model, cast(compiled), images)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 4 * torch.finfo(torch.bfloat16).eps * gradient.norm(), name


# where torch is told to use no vector instructions, its inductor still writes vector code, for which it has no header
@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="inductor writes vector code")
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a compiler")
def test_inductor(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # not the cache of all processes, in which one that was killed may have left half a library
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = build(depth=1).train()
    images = torch.randn(2, 3, 48, 40)
    expected = gradients(model, model, images)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled, images), expected, rtol=1e-4, atol=1e-6)


def any_size() -> tuple[dict[int, Any]]:
    return ({0: Dim("batch", max=64), 2: 8 * Dim("rows", max=64), 3: 8 * Dim("columns", max=64)},)


@each_model
def test_export_for_any_batch_height_and_width(build: Build, options: dict[str, Any], tmp_path: Path) -> None:
    model = steered(build(**options))
    # the grid of the position embedding itself: nothing of the example may be baked in
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=any_size())
    assert_same_logits(program.module(), model)
    for node in program.graph.nodes:
        if node.op == "call_function":
            # other runtimes have no custom operators, and some have at most five dimensions
            assert getattr(node.target, "namespace", "aten") in ("aten", "prims"), node
            value = node.meta.get("val")
            assert not isinstance(value, Tensor) or value.dim() <= 5, node
    torch.export.save(program, tmp_path / "model.pt2")
    assert_same_logits(torch.export.load(tmp_path / "model.pt2").module(), model)


@each_model
def test_export_from_an_example_of_one(build: Build, options: dict[str, Any]) -> None:
    model = steered(build(**options))
    # without this torch setting no model has a dynamic batch from such an example; torch.onnx.export turns it on
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, (torch.randn(1, 3, 32, 32),), dynamic_shapes=any_size())
    assert_same_logits(program.module(), model)


def axes_by_name() -> dict[str, Any]:
    return {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch", 2: "height", 3: "width"}}}


@each_model
@pytest.mark.parametrize("batch", [1, 2])
def test_onnx_for_any_batch_height_and_width(build: Build, options: dict[str, Any], batch: int, tmp_path: Path) -> None:
    model = steered(build(**options))
    path = str(tmp_path / "model.onnx")
    images = (torch.randn(batch, 3, 48, 40),)
    # from an example batch of one, as in every tutorial
    shapes = {"dynamo": True, "dynamic_shapes": any_size()} if batch > 1 else axes_by_name()
    torch.onnx.export(model, images, path, verbose=False, **shapes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    # a grid of one row too, which torch.export's own guards exclude
    assert_same_logits(run, model, [*SIZES, (2, 3, 8, 80)])


@pytest.mark.parametrize("steering", ["none", "value", "amplitude", "shift"])
def test_whole_model_under_torch_func(build: Build, steering: str) -> None:
    model = steered(build(depth=1, steering=steering))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    images = torch.randn(3, 3, 24, 40)

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, (parameters, buffers), (image[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, images)
    for index in range(3):
        expected = gradients(model, model, images[index : index + 1])
        actual = {name: gradient[index] for name, gradient in per_sample.items()}
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)

    tangent = torch.randn_like(images)
    step = 1e-3
    twin = copy.deepcopy(model).double()
    slope = torch.func.jvp(twin, (images.double(),), (tangent.double(),))[1]
    secant = (twin(images + step * tangent.double()) - twin(images - step * tangent.double())) / (2 * step)
    torch.testing.assert_close(slope, secant, rtol=1e-4, atol=1e-6)


def test_only_graphs_that_leave_the_process_count_as_captured() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (1 if is_captured() else 0)

    x = torch.zeros(1)
    assert Asks()(x) == torch.compile(Asks(), fullgraph=True, backend="eager")(x) == 0
    assert torch.jit.trace(Asks(), x)(x) == 1
    for strict in (False, True):
        assert torch.export.export(Asks(), (x,), strict=strict).module()(x) == 1
