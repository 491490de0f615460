"""Tests of the fused path under Triton's interpreter; test_fused.py runs them in a process with TRITON_INTERPRET=1.

The interpreter truncates where a GPU rounds to bfloat16, and multiplies in float32; it is the same code otherwise.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mix import Inputs, make_inputs, mix, relative_error, with_gradients
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import timm_ssog
from timm_ssog.ops import dispatch, fused
from timm_ssog.ops.fused import operators, tables, tuning


def fused_mix(values: Tensor, row_kernels: Tensor, column_kernels: Tensor) -> Tensor:
    return timm_ssog.separable_mix(values, row_kernels, column_kernels, "fused")


def automatic_mix(*inputs: Tensor) -> Tensor:
    return mix(inputs)


def naive_mix(*inputs: Tensor) -> Tensor:
    return mix(inputs, "naive")


@pytest.fixture(autouse=True)
def memory_is_nan_until_written() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # makes torch.empty fill what it returns
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``"auto"`` take the interpreted kernels, as on a GPU."""
    monkeypatch.setattr(dispatch, "_prefers_fused", lambda v: fused.logged_obstacle(v.device, v.dtype) is None)


def leaves(*sizes: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs of (batch, height, width, heads, head_dim, components) that need gradients."""
    batch, height, width, heads, head_dim, components = sizes
    inputs = make_inputs((height, width), components, head_dim, batch, heads, dtype)
    return tuple(tensor.requires_grad_() for tensor in inputs)  # type: ignore[return-value]


def errors(inputs: Inputs, implementation: str, grad: Tensor, expected: tuple[Tensor, ...], norm: bool) -> list[float]:
    outputs = with_gradients(inputs, implementation, grad)
    assert not any(output.isnan().any() for output in outputs)
    if norm:
        return [float((o.double() - e).norm() / e.norm()) for o, e in zip(outputs, expected, strict=True)]
    return [relative_error(output, exact) for output, exact in zip(outputs, expected, strict=True)]


# grid, components, head_dim, batch, heads: odd and oblong grids, every launch, padded and several groups
SHAPES = [
    ((1, 1), 1, 64, 2, 2),
    ((1, 9), 2, 16, 2, 2),
    ((9, 1), 3, 32, 2, 2),
    ((7, 13), 4, 48, 1, 2),
    ((14, 14), 8, 16, 1, 1),
    ((17, 31), 3, 16, 1, 1),
    ((37, 64), 4, 16, 1, 1),
    ((130, 2), 4, 16, 1, 1),
]
# launches that float32 does not have
SHAPES_16_BIT = [((14, 14), 2, 64, 1, 1), ((20, 9), 1, 16, 1, 2), ((40, 33), 2, 8, 1, 1), ((2, 90), 3, 16, 1, 1)]
# one launch serves both 16-bit types: a few shapes show that float16 is handled
SHAPES_FLOAT16 = [((7, 13), 4, 48, 1, 2), ((17, 31), 3, 16, 1, 1)]


@pytest.mark.parametrize(("grid", "components", "head_dim", "batch", "heads"), SHAPES)
def test_float32_is_as_exact_as_eager(
    grid: tuple[int, int], components: int, head_dim: int, batch: int, heads: int
) -> None:
    inputs = make_inputs(grid, components, head_dim, batch, heads, torch.float32)
    grad = torch.randn(inputs[0].shape)
    exact = with_gradients(tuple(tensor.double() for tensor in inputs), "eager", grad)
    ours = errors(inputs, "fused", grad, exact, norm=False)
    theirs = errors(inputs, "eager", grad, exact, norm=False)
    for name, own, other in zip(("output", "values", "rows", "columns"), ours, theirs, strict=True):
        # the minimum: a few roundings of the largest entry, which no order of summation avoids
        assert own <= max(2 * other, 8 * torch.finfo(torch.float32).eps), (name, own, other)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *itertools.product([torch.bfloat16], [*SHAPES, *SHAPES_16_BIT]),
        *itertools.product([torch.float16], SHAPES_FLOAT16),
    ],
)
def test_16_bit(dtype: torch.dtype, shape: tuple[tuple[int, int], int, int, int, int]) -> None:
    values, rows, columns = make_inputs(*shape, torch.float32)
    inputs = values.to(dtype), rows, columns
    grad = torch.randn(values.shape).to(dtype)
    exact = with_gradients(tuple(tensor.double() for tensor in inputs), "eager", grad)
    for name, error in zip(
        ("output", "values", "rows", "columns"), errors(inputs, "fused", grad, exact, norm=True), strict=True
    ):
        assert error < 1e-2, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_layout_does_not_matter(dtype: torch.dtype) -> None:
    values, rows, columns = make_inputs((3, 4), 2, 8, 2, 2, torch.float32)
    values = values.to(dtype)
    part_of_wider = torch.randn(2, 3, 4, 2, 40, dtype=dtype)[..., 3:11]
    transposed_grid = values.transpose(1, 2).contiguous().transpose(1, 2)
    channels_apart = values.mT.contiguous().mT
    same_everywhere = torch.randn((), dtype=dtype).expand(values.shape)
    heads_apart = torch.randn(2, 2, 3, 4, 8, dtype=dtype).movedim(0, 3)
    for strided, grad in [
        (part_of_wider, same_everywhere),
        (transposed_grid, heads_apart),
        (channels_apart, channels_apart.flip(0).mT.contiguous().mT),
    ]:
        assert not strided.is_contiguous()
        assert not grad.is_contiguous()
        inputs = (strided, rows.mT.contiguous().mT, columns)
        expected = with_gradients(tuple(tensor.contiguous() for tensor in inputs), "fused", grad.contiguous())
        for ours, theirs in zip(with_gradients(inputs, "fused", grad), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert fused_mix(part_of_wider, rows, columns).is_contiguous()


def test_offsets_beyond_31_bits() -> None:
    values, rows, columns = make_inputs((2, 3), 2, 4, 1, 1, torch.bfloat16)
    row_stride = (1 << 31) + 64  # lazily committed: only the pages that are written take memory
    storage = torch.UntypedStorage(2 * (row_stride + 64))
    far = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (1, 2, 3, 1, 4), (0, row_stride, 4, 4, 1))
    far.copy_(values)
    assert torch.equal(fused_mix(far, rows, columns), fused_mix(values, rows, columns))
    gradient = torch.ops.timm_ssog.fused_column_gradient
    assert torch.equal(gradient(values, far, rows), gradient(values, values, rows))
    assert torch.equal(gradient(far, values, rows), gradient(values, values, rows))


def test_batch_splits_and_poison() -> None:
    values, rows, columns = make_inputs((3, 4), 3, 24, 4, 2, torch.bfloat16)
    together = fused_mix(values, rows, columns)
    poisoned = values.clone()
    poisoned[1:] = torch.nan
    assert torch.equal(fused_mix(poisoned, rows, columns)[0], together[0])
    assert torch.equal(fused_mix(values[:1], rows, columns), together[:1])


def test_gradient_is_the_same_in_any_run_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    values, rows, _ = make_inputs((6, 5), 3, 24, 3, 2, torch.bfloat16)
    grad = torch.randn(values.shape).bfloat16()
    gradient = functools.partial(torch.ops.timm_ssog.fused_column_gradient, grad, values, rows)
    first = gradient()
    assert torch.equal(gradient(), first)
    monkeypatch.setattr(operators, "PROGRAMS", 8)
    torch.testing.assert_close(gradient(), first)
    monkeypatch.setattr(tables, "gradient_tile", lambda *_: None)
    by_products = gradient()
    assert (by_products - first).norm() < 1e-2 * first.norm()
    monkeypatch.setattr(operators, "CHUNK_BYTES", 1)
    assert (gradient() - by_products).norm() < 1e-2 * first.norm()


def test_empty_batch_and_no_heads() -> None:
    for sizes in [(0, 3, 4, 2, 5, 2), (2, 3, 4, 0, 5, 2)]:
        inputs = leaves(*sizes)
        output = fused_mix(*inputs)
        output.sum().backward()
        assert output.shape == inputs[0].shape
        for tensor in inputs:
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape
            assert not tensor.grad.any()


@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double precision")
def test_gradients_are_those_of_finite_differences() -> None:
    # trilinear, so a long step costs only float32 rounding
    tolerances: dict[str, Any] = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4, "nondet_tol": 0.0}
    assert torch.autograd.gradcheck(fused_mix, leaves(1, 2, 2, 1, 1, 2), **tolerances)
    assert torch.autograd.gradgradcheck(fused_mix, leaves(1, 1, 2, 1, 1, 1), **tolerances)


def test_gradients_of_some_arguments_only() -> None:
    inputs = make_inputs(dtype=torch.float32)
    expected = with_gradients(inputs, "naive", torch.ones_like(inputs[0]))[1:]
    for needed in [c for n in (1, 2) for c in itertools.combinations(range(3), n)]:
        some = [tensor.clone().requires_grad_(index in needed) for index, tensor in enumerate(inputs)]
        fused_mix(*some).sum().backward()
        for index, leaf in enumerate(some):
            if index in needed:
                torch.testing.assert_close(leaf.grad, expected[index], rtol=1e-5, atol=1e-5)
            else:
                assert leaf.grad is None


def test_opcheck() -> None:
    inputs = leaves(2, 2, 3, 1, 2, 2)
    torch.library.opcheck(operators.fused_mix, (inputs[0].detach().bfloat16().requires_grad_(), *inputs[1:]))
    grad = torch.randn_like(inputs[0]).requires_grad_()
    torch.library.opcheck(operators.fused_column_gradient, (grad, *inputs[:2]))


def test_compiled_in_one_graph_for_any_batch_and_grid(automatic: None) -> None:
    torch.compiler.reset()
    graphs: list[str] = []

    def counting(module, example_inputs):
        graphs.append(module.code)
        return torch._dynamo.lookup_backend("aot_eager")(module, example_inputs)

    compiled = torch.compile(timm_ssog.separable_mix, fullgraph=True, dynamic=True, backend=counting)
    # all sizes differ, or torch treats equal ones as one
    for sizes in [(6, 3, 4, 2, 8, 5), (3, 7, 4, 2, 8, 5)]:
        inputs = leaves(*sizes)
        grad = torch.randn_like(inputs[0])
        expected = with_gradients(inputs, "eager", grad)
        output = compiled(*inputs)
        output.backward(grad)
        for ours, theirs in zip((output, *(tensor.grad for tensor in inputs)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert "fused_mix" in graphs[0]


class Mixer(torch.nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.implementation = implementation

    def forward(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return timm_ssog.separable_mix(values, rows, columns, self.implementation)


def exported(implementation: str) -> torch.export.ExportedProgram:
    inputs = tuple(tensor.detach() for tensor in leaves(2, 3, 4, 2, 5, 2))
    batch = torch.export.Dim("batch")
    program = torch.export.export(Mixer(implementation), inputs, dynamic_shapes=({0: batch}, {}, {}))
    for sizes in [(1, 3, 4, 2, 5, 2), (3, 3, 4, 2, 5, 2)]:
        others = tuple(tensor.detach() for tensor in leaves(*sizes))
        torch.testing.assert_close(program.module()(*others), mix(others, "eager"), rtol=1e-5, atol=1e-5)
    return program


def test_export_holds_the_operator_only_on_request() -> None:
    assert "timm_ssog.fused_mix" in str(exported("fused").graph)
    assert "timm_ssog" not in str(exported("auto").graph)


def test_export_and_trace_on_a_gpu_stay_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    # the choice sees nothing of a GPU but the tensors' device
    inputs = leaves(2, 3, 4, 2, 5, 2)
    monkeypatch.setattr(fused, "logged_obstacle", lambda *_: None)

    class OnCuda:
        device = torch.device("cuda")
        dtype = torch.float32

    assert dispatch._prefers_fused(OnCuda())  # type: ignore[arg-type]
    asked: list[bool] = []

    class Captured(torch.nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            asked.append(dispatch._prefers_fused(OnCuda()))  # type: ignore[arg-type]
            return values + 1

    values = inputs[0].detach()
    torch.jit.trace(Captured(), values, check_trace=False)
    torch.export.export(Captured(), (values,), strict=False)
    assert asked
    assert not any(asked)


def test_autocast() -> None:
    inputs = leaves(2, 3, 4, 2, 16, 3)
    expected = with_gradients(inputs, "eager", torch.ones_like(inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused_mix(*inputs)
        assert output.dtype == torch.bfloat16
        # under autocast too: a gradient must not be rounded again
        output.backward(torch.ones_like(output))
    for ours, theirs in zip((output, *(tensor.grad for tensor in inputs)), expected, strict=True):
        assert ours is not None
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in inputs)


def test_flops() -> None:
    batch, height, width, heads, head_dim, components = sizes = (2, 3, 5, 2, 4, 3)
    inputs = leaves(*sizes)
    with FlopCounterMode(display=False) as counter:
        output = fused_mix(*inputs)
        forward = counter.get_total_flops()
        output.sum().backward()
    channels = heads * head_dim
    assert forward == batch * 2 * components * height * width * (height + width) * channels
    # one mix for the values and the same for each of the two kernels
    assert counter.get_total_flops() == 4 * forward


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 1), (0, 1, 2)])
def test_vmap(automatic: None, in_dims: tuple[int | None, ...]) -> None:
    copies = [make_inputs((3, 2), dtype=torch.float32) for _ in range(3)]
    stacked = [
        copies[0][i] if dim is None else torch.stack([copy[i] for copy in copies], dim) for i, dim in enumerate(in_dims)
    ]
    chosen = [[copies[0 if dim is None else n][i] for i, dim in enumerate(in_dims)] for n in range(3)]
    expected = torch.stack([mix(inputs, "naive") for inputs in chosen])
    for gradients in (False, True):
        inputs = tuple(tensor.detach().requires_grad_(gradients) for tensor in stacked)
        output = torch.func.vmap(automatic_mix, in_dims=in_dims)(*inputs)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert (output.grad_fn is not None) == gradients
        if gradients:
            theirs = torch.autograd.grad(
                torch.func.vmap(naive_mix, in_dims)(*inputs),
                inputs,
                torch.ones_like(expected),
            )
            for ours, exact in zip(torch.autograd.grad(output.sum(), inputs), theirs, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_vmap_of_the_kernel_gradient() -> None:
    grads, values = torch.randn(2, 3, 2, 3, 4, 1, 5)
    rows = torch.randn(3, 1, 2, 3, 3)
    gradient = torch.ops.timm_ssog.fused_column_gradient
    expected = torch.stack([gradient(*inputs) for inputs in zip(grads, values, rows, strict=True)])
    torch.testing.assert_close(torch.func.vmap(gradient)(grads, values, rows), expected)
    shared = torch.stack([gradient(grad, values[0], rows[0]) for grad in grads])
    torch.testing.assert_close(torch.func.vmap(gradient, (0, None, None))(grads, values[0], rows[0]), shared)


def test_derivatives_that_an_operator_cannot_take_fall_back(automatic: None, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(dtype=torch.float32)
    fused.forget()

    def loss(implementation: str, *inputs: Tensor) -> Tensor:
        return mix(inputs, implementation).square().sum()

    def derivatives(implementation: str) -> tuple[Tensor, ...]:
        run = functools.partial(loss, implementation)

        def of_mix(*inputs: Tensor) -> Tensor:
            return mix(inputs, implementation)

        return (
            torch.func.jvp(of_mix, inputs, inputs)[1],
            *torch.func.grad(run, (0, 1, 2))(*inputs),
            *torch.func.jvp(torch.func.grad(run, (0, 1, 2)), inputs, inputs)[1],
            torch.func.vmap(torch.func.grad(lambda v: run(v[None], *inputs[1:])))(inputs[0]),
        )

    with caplog.at_level("WARNING", logger="timm_ssog"):
        for _ in range(2):
            for ours, theirs in zip(derivatives("auto"), derivatives("naive"), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(caplog.messages) == 2
    assert "forward-mode" in caplog.text
    assert "torch.func" in caplog.text
    with pytest.raises(ValueError, match=r"implementation='fused' cannot run .* forward-mode"):
        torch.func.jvp(fused_mix, inputs, inputs)
    with pytest.raises(ValueError, match=r"implementation='fused' cannot run .* torch\.func"):
        torch.func.grad(lambda *inputs: fused_mix(*inputs).sum())(*inputs)


def test_derivatives_within_compiled_code_fall_back(automatic: None) -> None:
    inputs = make_inputs(dtype=torch.float32)

    def tangent(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(automatic_mix, inputs, inputs)[1]

    def loss(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return automatic_mix(values, rows, columns).square().sum()

    def gradient(*inputs: Tensor) -> Tensor:
        return torch.func.grad(loss)(*inputs)

    for run in (tangent, gradient):
        torch.compiler.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), run(*inputs), rtol=1e-4, atol=1e-5)


def test_model_trains_as_with_eager(automatic: None) -> None:
    import timm

    model = timm.create_model(
        "vit_ssog_tiny_looped", img_size=32, patch_size=8, embed_dim=32, num_heads=2, num_classes=3, loops=2
    )
    images = torch.randn(2, 3, 24, 40)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(images).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_prefers_fused", lambda values: False)
        theirs = gradients()
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Turns tuning on, with its own cache."""
    monkeypatch.setenv("TIMM_SSOG_AUTOTUNE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


def test_tuning_measures_once_and_remembers(tuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TIMINGS", 1)
    inputs = make_inputs((2, 3), 2, 16, 1, 1, torch.bfloat16)
    grad = torch.randn(inputs[0].shape).bfloat16()
    monkeypatch.setenv("TIMM_SSOG_AUTOTUNE", "0")
    expected = with_gradients(inputs, "fused", grad)
    monkeypatch.setenv("TIMM_SSOG_AUTOTUNE", "1")
    tried: list[tables.Tile | None] = []
    real = tuning.candidates

    def few(*arguments):
        found = list(itertools.islice((tile for tile in real(*arguments) if tile not in tried), 3))
        tried.extend(found)
        yield from found

    monkeypatch.setattr(tuning, "candidates", few)
    for ours, theirs in zip(with_gradients(inputs, "fused", grad), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    assert len(tried) >= 5
    chosen = tuning.cache_path().read_text()
    assert len(json.loads(chosen)) == 2
    # as in another process, which must not measure again
    tuning.forget()
    monkeypatch.setattr(tuning, "candidates", None)
    with_gradients(inputs, "fused", grad)
    assert tuning.cache_path().read_text() == chosen


def test_tuning_survives_a_broken_cache_and_a_launch_that_fails(tuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.cache_path().parent.mkdir()
    tuning.cache_path().write_text('{"half a fi')
    good, bad = tables.MIX[0].tile, tables.MIX[1].tile
    monkeypatch.setattr(tuning, "candidates", lambda *_: iter([bad, good]))

    def launch(tile: tables.Tile) -> tables.Tile:
        if tile == bad:
            raise RuntimeError("out of resources")
        return tile

    assert tuning.fastest("mix", (2, 16), bad, launch, torch.zeros(1)) == good
    assert list(json.loads(tuning.cache_path().read_text()).values()) == [list(good)]
    monkeypatch.setattr(tuning, "candidates", lambda *_: iter([bad]))
    with pytest.raises(RuntimeError, match="leave TIMM_SSOG_AUTOTUNE unset"):
        tuning.fastest("mix", (2, 32), bad, launch, torch.zeros(1))
