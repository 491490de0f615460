"""The mixing operator: the oracle against loops, the fast forms against the oracle, and everything autograd asks."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import timm_ssog
from timm_ssog.ops import eager

FORMS = ("stacked", "stacked by head", "dense", "auto")
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one form of the eager path, or leaves the choice to the cost rule."""
    if request.param != "auto":
        monkeypatch.setattr(eager, "prefers_dense", lambda *_, **__: request.param == "dense")
        monkeypatch.setattr(eager, "CACHE_BYTES", 0 if request.param == "stacked by head" else float("inf"))
    return request.param


def make_inputs(
    grid: tuple[int, int] = (3, 4),
    components: int = 2,
    head_dim: int = 3,
    batch: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Values, and kernels as a mixer makes them: rows of weights, signed amplitudes folded into the row kernels."""
    height, width = grid
    values = torch.randn(batch, height, width, heads, head_dim, dtype=torch.float64)
    offset = torch.randn(2, heads, components, dtype=torch.float64) * 2
    sigma = torch.rand(2, heads, components, dtype=torch.float64) * 2 + 0.25
    amplitude = torch.randn(heads, components, 1, 1, dtype=torch.float64)
    rows = timm_ssog.axis_kernels(offset[0], sigma[0], height) * amplitude
    columns = timm_ssog.axis_kernels(offset[1], sigma[1], width)
    return values.to(dtype), rows.to(dtype), columns.to(dtype)


def mix(inputs: Iterable[Tensor], implementation: str = "auto") -> Tensor:
    return timm_ssog.separable_mix(*inputs, implementation=implementation)


def with_gradients(inputs: Sequence[Tensor], implementation: str, grad: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of all three inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = mix(leaves, implementation)
    output.backward(grad.to(output.dtype))
    return output.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[misc]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("implementation", ["naive", "eager", "auto"])
def test_output_is_the_definition(implementation: str) -> None:
    # all sizes differ, so that no axis can be mistaken for another
    values, rows, columns = make_inputs((3, 5), components=4, head_dim=7, batch=1, heads=2)
    expected = torch.zeros_like(values)
    for head, m, i, j in itertools.product(range(2), range(4), range(3), range(5)):
        for k, l in itertools.product(range(3), range(5)):  # noqa: E741
            weight = rows[head, m, i, k] * columns[head, m, j, l]
            expected[:, i, j, head] += weight * values[:, k, l, head]
    torch.testing.assert_close(timm_ssog.separable_mix(values, rows, columns, implementation), expected)


GRIDS = [(1, 1), (1, 9), (9, 1), (7, 13), (14, 14)]
# where only the stacked form is worth a run
LARGE_GRIDS = [(37, 64), (64, 64)]


@pytest.mark.parametrize(("components", "head_dim"), [(1, 64), (3, 16), (8, 32)])
@pytest.mark.parametrize(
    ("form", "grid"), [*itertools.product(FORMS, GRIDS), *itertools.product(["auto"], LARGE_GRIDS)], indirect=["form"]
)
def test_eager_is_exact_to_float32_rounding(form: str, grid: tuple[int, int], components: int, head_dim: int) -> None:
    copies = 1 if grid in LARGE_GRIDS else 2
    inputs = make_inputs(grid, components, head_dim, batch=copies, heads=copies)
    # the oracle gets the rounded inputs: only the arithmetic is compared
    inputs = tuple(tensor.float() for tensor in inputs)
    grad = torch.randn(inputs[0].shape)
    outputs = with_gradients(inputs, "eager", grad)
    assert all(output.dtype == torch.float32 for output in outputs)
    expected = with_gradients(tuple(tensor.double() for tensor in inputs), "naive", grad)
    for name, ours, theirs in zip(("output", "values", "rows", "columns"), outputs, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-6, name


@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_gradients_are_those_of_finite_differences(form: str, grid: tuple[int, int]) -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in make_inputs(grid, head_dim=2))
    assert torch.autograd.gradcheck(timm_ssog.separable_mix, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(timm_ssog.separable_mix, inputs)


@pytest.mark.parametrize("needed", [c for n in (1, 2) for c in itertools.combinations(range(3), n)])
def test_gradients_of_some_arguments_only(form: str, needed: tuple[int, ...]) -> None:
    inputs = make_inputs()
    grad = torch.randn_like(inputs[0])
    expected = with_gradients(inputs, "naive", grad)[1:]
    leaves = [tensor.clone().requires_grad_(index in needed) for index, tensor in enumerate(inputs)]
    mix(leaves).backward(grad)
    for index, leaf in enumerate(leaves):
        if index in needed:
            torch.testing.assert_close(leaf.grad, expected[index])
        else:
            assert leaf.grad is None


def test_no_gradient_is_recorded_where_none_is_asked() -> None:
    inputs = make_inputs()
    assert mix(inputs).grad_fn is None
    with torch.no_grad():
        assert mix(tensor.requires_grad_() for tensor in inputs).grad_fn is None


@pytest.mark.parametrize("needed", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
def test_forward_mode(form: str, needed: tuple[int, ...]) -> None:
    inputs = make_inputs()
    tangents = {index: torch.randn_like(inputs[index]) for index in needed}
    # linear in each argument: an argument with a tangent adds the mix that it makes in that argument's place
    expected = sum(mix((*inputs[:index], tangents[index], *inputs[index + 1 :]), "naive") for index in needed)
    # outside a reverse-mode graph and inside one, where the custom function runs
    for requires_grad in (False, True):
        with forward_ad.dual_level():
            duals = [tensor.clone().requires_grad_(requires_grad) for tensor in inputs]
            for index, tangent in tangents.items():
                duals[index] = forward_ad.make_dual(duals[index], tangent)
            output = forward_ad.unpack_dual(mix(duals))
        assert output.primal.requires_grad == requires_grad
        torch.testing.assert_close(output.tangent, expected)


def test_torch_func_forward_over_reverse(form: str) -> None:
    inputs = make_inputs()
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)

    def product(implementation: str) -> tuple[Tensor, ...]:
        def loss(*inputs: Tensor) -> Tensor:
            return mix(inputs, implementation).square().sum()

        return torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), inputs, tangents)[1]

    for ours, theirs in zip(product("auto"), product("naive"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torch_func_reverse_mode(form: str) -> None:
    inputs = make_inputs()
    grad = torch.randn_like(inputs[0])
    output, pull_back, *_ = torch.func.vjp(timm_ssog.separable_mix, *inputs)
    expected = with_gradients(inputs, "naive", grad)
    for ours, theirs in zip((output, *pull_back(grad)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 1), (0, 1, 2)])
def test_vmap(form: str, in_dims: tuple[int | None, ...]) -> None:
    copies = [make_inputs() for _ in range(3)]
    stacked = [
        copies[0][index] if dim is None else torch.stack([copy[index] for copy in copies], dim)
        for index, dim in enumerate(in_dims)
    ]
    expected = torch.stack(
        [
            mix((copies[0 if dim is None else number][index] for index, dim in enumerate(in_dims)), "naive")
            for number in range(3)
        ]
    )
    for gradients in (False, True):
        values, rows, columns = (tensor.requires_grad_(gradients) for tensor in stacked)
        ours = torch.func.vmap(timm_ssog.separable_mix, in_dims=in_dims)(values, rows, columns)
        torch.testing.assert_close(ours.detach(), expected)


def test_gradients_per_sample(form: str) -> None:
    values, rows, columns = make_inputs(batch=3)

    def loss(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return timm_ssog.separable_mix(values[None], rows, columns).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None))(values, rows, columns)
    for index in range(3):
        sample = (values[index : index + 1], rows, columns)
        output = mix(sample, "naive")
        _, of_values, of_rows, of_columns = with_gradients(sample, "naive", 2 * output)
        for ours, theirs in zip(per_sample, (of_values[0], of_rows, of_columns), strict=True):
            torch.testing.assert_close(ours[index], theirs)


@pytest.mark.parametrize("kernel_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(form: str, dtype: torch.dtype, kernel_dtype: str) -> None:
    values, rows, columns = make_inputs((7, 9), components=4, head_dim=16)
    kernels = (rows.to(dtype), columns.to(dtype)) if kernel_dtype == "same" else (rows.float(), columns.float())
    inputs = values.to(dtype), *kernels
    grad = torch.randn_like(inputs[0])
    expected = with_gradients(tuple(tensor.double() for tensor in inputs), "naive", grad)
    outputs = with_gradients(inputs, "eager", grad)
    oracle = with_gradients(inputs, "naive", grad)
    for ours, naive, theirs, like in zip(outputs, oracle, expected, (values, *inputs), strict=True):
        assert ours.dtype == (dtype if like is values else like.dtype)
        # in norm: kernels, intermediate and result are rounded, each to half an eps, and signed terms cancel a little
        bound = 2 * torch.finfo(dtype).eps
        assert (ours - theirs).norm() / theirs.norm() < bound
        assert (naive - theirs).norm() / theirs.norm() < bound


@pytest.mark.parametrize("implementation", ["auto", "naive"])
def test_autocast(implementation: str) -> None:
    inputs = tuple(tensor.float() for tensor in make_inputs((7, 9), components=4, head_dim=16))
    grad = torch.randn_like(inputs[0])
    expected = with_gradients(inputs, implementation, grad)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = mix(leaves, implementation)
    assert output.dtype == torch.bfloat16
    output.backward(grad.bfloat16())
    for ours, theirs in zip((output, *(leaf.grad for leaf in leaves)), expected, strict=True):
        assert ours is not None
        assert (ours - theirs).norm() / theirs.norm() < 2 * torch.finfo(torch.bfloat16).eps
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_autocast_leaves_float64_alone() -> None:
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = mix(inputs)
    torch.testing.assert_close(output, mix(inputs, "naive"))


def test_memory_layout_does_not_matter(form: str) -> None:
    values, rows, columns = make_inputs((3, 4), components=2, batch=3)
    # a transposed batch, every second channel of a wider tensor, kernels broadcast over components, transposed kernels
    strided = torch.randn(4, 3, 3, 2, 6, dtype=torch.float64).permute(1, 2, 0, 3, 4)[..., ::2]
    expanded = rows[:, :1].expand(-1, 2, -1, -1)
    for inputs in [
        (values.transpose(0, 1).contiguous().transpose(0, 1), rows, columns),
        (strided, expanded, columns.mT),
    ]:
        assert not inputs[0].is_contiguous()
        grad = torch.randn_like(inputs[0]).mT.contiguous().mT
        expected = with_gradients(tuple(tensor.contiguous() for tensor in inputs), "naive", grad)
        for ours, theirs in zip(with_gradients(inputs, "auto", grad), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_empty_batch(form: str) -> None:
    inputs = make_inputs(batch=0)
    output, of_values, of_rows, of_columns = with_gradients(inputs, "auto", torch.zeros_like(inputs[0]))
    assert output.shape == of_values.shape == inputs[0].shape
    assert not of_rows.any()
    assert not of_columns.any()
    assert of_rows.shape == inputs[1].shape
    assert of_columns.shape == inputs[2].shape


def test_no_sample_sees_another(form: str) -> None:
    values, rows, columns = make_inputs(batch=4, dtype=torch.float32)
    together = timm_ssog.separable_mix(values, rows, columns)
    poisoned = values.clone()
    poisoned[1:] = torch.nan
    torch.testing.assert_close(timm_ssog.separable_mix(poisoned, rows, columns)[0], together[0])
    torch.testing.assert_close(timm_ssog.separable_mix(values[:1], rows, columns), together[:1])


def test_backward_keeps_the_inputs_and_nothing_else(form: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in make_inputs((6, 8), components=4, head_dim=16)]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mix(inputs)
    assert kept == {tensor.data_ptr(): tensor.nbytes for tensor in inputs}
    output.sum().backward()


def test_cost_rule_sends_small_grids_to_the_dense_form() -> None:
    for backward in (False, True):
        assert eager.prefers_dense(64, 2, 2, 64, 4, backward)
        assert not eager.prefers_dense(64, 64, 64, 64, 4, backward)


@pytest.mark.parametrize(("batch", "apart"), [(1, False), (3, False), (4, True), (8, True)])
def test_heads_are_mixed_apart_where_all_of_them_outgrow_the_cache(
    batch: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name in ("stacked_mix", "_stacked_by_head", "stacked_mix_backward", "_stacked_backward_by_head"):
        form = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *inputs, form=form, name=name: taken.append(name) or form(*inputs))
    monkeypatch.setattr(eager, "prefers_dense", lambda *_, **__: False)
    # 448 KiB of intermediate per image: 14 x 14 tokens, 2 x 73 channels, 4 components, float32
    values, rows, columns = make_inputs((14, 14), 4, 73, batch, dtype=torch.float32)
    mix([values.requires_grad_(), rows, columns]).sum().backward()
    expected = ["_stacked_by_head", "_stacked_backward_by_head"] if apart else ["stacked_mix", "stacked_mix_backward"]
    assert taken == expected


def test_select_implementation_names_one_that_exists() -> None:
    from timm_ssog.ops import dispatch

    name, reason = dispatch.select_implementation(torch.device("cpu"))
    assert name == "eager"
    assert "cpu" in reason
    inputs = make_inputs()
    assert torch.equal(mix(inputs), mix(inputs, name))


VALUES, ROWS, COLUMNS = torch.zeros(2, 3, 4, 2, 5), torch.zeros(2, 6, 3, 3), torch.zeros(2, 6, 4, 4)


@pytest.mark.parametrize(
    ("values", "rows", "columns", "message"),
    [
        (
            VALUES[0],
            ROWS,
            COLUMNS,
            r"values must be a floating-point tensor \(batch, height, width, heads, head_dim\), got .*",
        ),
        (VALUES.long(), ROWS, COLUMNS, r"values must be a floating-point tensor .* got torch.int64"),
        (VALUES, ROWS[0], COLUMNS, r"row_kernels must be \(heads, components, height, height\) with 2 heads"),
        (VALUES, ROWS[:1], COLUMNS, r"row_kernels must be .* with 2 heads .* got shape \[1, 6, 3, 3\]"),
        (VALUES, ROWS, COLUMNS[:, :0], r"column_kernels must be .* at least one component, got shape \[2, 0, 4, 4\]"),
        (
            VALUES,
            COLUMNS,
            COLUMNS,
            r"row_kernels must be square, of the values' height 3, got .* timm_ssog.axis_kernels",
        ),
        (VALUES, ROWS, ROWS, r"column_kernels must be square, of the values' width 4, got shape \[2, 6, 3, 3\]"),
        (VALUES, ROWS, COLUMNS[..., :3], r"column_kernels must be square, of the values' width 4"),
        (VALUES, ROWS[:, :3], COLUMNS, r"same number of components, got 3 and 6"),
        (
            VALUES,
            ROWS.long(),
            COLUMNS,
            r"row_kernels must have a floating-point dtype and be on the values' device cpu, got torch.int64",
        ),
        (VALUES, ROWS, COLUMNS.to("meta"), r"column_kernels must .* device cpu, got torch.float32 on meta"),
    ],
)
def test_wrong_inputs_say_what_was_expected(values: Tensor, rows: Tensor, columns: Tensor, message: str) -> None:
    for implementation in ("auto", "naive", "eager"):
        with pytest.raises(ValueError, match=message):
            timm_ssog.separable_mix(values, rows, columns, implementation)


def test_unknown_implementation_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"implementation must be one of 'auto', .*got 'egaer'\. Did you mean 'eager'\?"
    ):
        timm_ssog.separable_mix(VALUES, ROWS, COLUMNS, "egaer")
