"""The token mixers: SSoG, the dense attention twin against timm's own attention, the identity."""

import math

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn

import timm_ssog
from timm_ssog.layers import WIDTH_MIN, AttentionMixer, Block, IdentityMixer, SeparableMixer
from timm_ssog.ops import eager


@pytest.mark.parametrize("amplitude", ["signed", "convex"])
def test_separable_mixer_is_value_mix_proj(amplitude: str) -> None:
    mixer = SeparableMixer(12, 3, (4, 6), num_components=5, amplitude=amplitude)
    x = torch.randn(2, 4, 6, 12)
    # through the N x N operator of each head, made with Kronecker products
    rows, columns = mixer.kernels(4, 6)
    values = F.linear(x, mixer.value.weight).reshape(2, 24, 3, 4)
    operators = [[torch.kron(rows[head, m], columns[head, m]) for m in range(5)] for head in range(3)]
    heads = [torch.stack(operators[head]).sum(0) @ values[:, :, head] for head in range(3)]
    expected = F.linear(torch.cat(heads, -1).reshape(2, 4, 6, 12), mixer.proj.weight, mixer.proj.bias)
    torch.testing.assert_close(mixer(x), expected)


def test_given_kernels_are_those_it_would_build() -> None:
    mixer = SeparableMixer(8, 2, (4, 6))
    x = torch.randn(2, 8, 9, 8)
    assert torch.equal(mixer(x, mixer.kernels(8, 9)), mixer(x))
    rows, columns = mixer.kernels(8, 9)
    assert not torch.allclose(mixer(x, (rows * 2, columns)), mixer(x))


def test_reference_grid_is_part_of_the_checkpoint() -> None:
    mixer, other = SeparableMixer(8, 2, (4, 6)), SeparableMixer(8, 2, (9, 3))
    assert mixer.reference_grid == (4, 6)
    assert not torch.allclose(other.kernels(8, 8)[0], mixer.kernels(8, 8)[0])
    other.load_state_dict(mixer.state_dict())
    assert other.reference_grid == (4, 6)
    for ours, theirs in zip(other.kernels(8, 8), mixer.kernels(8, 8), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_reference_grid_survives_a_change_of_dtype(dtype: torch.dtype) -> None:
    # bfloat16 can't represent 257, float16 can't represent 4097
    mixer = SeparableMixer(8, 2, (257, 4097)).to(dtype)
    assert mixer.reference_grid == (257, 4097)


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (2, 2), (7, 7), (64, 64)])
@pytest.mark.parametrize("init_offset", [0.0, 2.0, 100.0])
def test_initial_components_lie_within_the_grid(grid: tuple[int, int], init_offset: float) -> None:
    mixer = SeparableMixer(256, 64, grid, num_components=8, init_offset=init_offset)
    for axis in (0, 1):
        reach = mixer.offset[..., axis].abs().max()
        # from the middle cell, every component looks at a cell of the grid
        assert reach <= (grid[axis] - 1) / 2
        if init_offset == 2 and grid[axis] == 64:
            assert 1.8 < mixer.offset[..., axis].std() < 2.2
        assert init_offset == 0 or grid[axis] == 1 or mixer.offset[..., axis].std() > reach / 8
    torch.testing.assert_close(F.softplus(mixer.width) + WIDTH_MIN, torch.full_like(mixer.width, 0.72))


def test_initial_amplitudes() -> None:
    convex = SeparableMixer(8, 2, (7, 7), num_components=4, amplitude="convex")
    torch.testing.assert_close(convex.amplitude.softmax(-1), torch.full((2, 4), 0.25))
    signed = SeparableMixer(1024, 256, (7, 7), num_components=4)
    # a mixture of M independent components keeps the variance of what it mixes
    assert math.isclose(signed.amplitude.square().sum(-1).mean().item(), 1, rel_tol=0.1)
    assert (signed.amplitude < 0).any()


@pytest.mark.parametrize("amplitude", ["signed", "convex"])
@pytest.mark.parametrize("grid", [(7, 7), (64, 64)])
def test_no_component_starts_with_a_dead_gradient(grid: tuple[int, int], amplitude: str) -> None:
    mixer = SeparableMixer(32, 4, grid, amplitude=amplitude)
    values = torch.randn(4, *grid, 4, 8)
    rows, columns = mixer.kernels(*grid)
    target = torch.randn_like(values)
    (timm_ssog.separable_mix(values, rows, columns) * target).mean().backward()
    # moving a component by a cell, or changing its weight by one, must have similar effects (within a factor of 100)
    assert mixer.amplitude.grad is not None
    typical = mixer.amplitude.grad.abs().mean() if amplitude == "signed" else mixer.amplitude.grad.abs().mean() * 4
    weight = mixer.amplitude.abs() if amplitude == "signed" else mixer.amplitude.softmax(-1)
    for parameter in (mixer.offset, mixer.width):
        assert parameter.grad is not None
        sensitivity = parameter.grad.norm(dim=-1) / weight.detach()
        assert (sensitivity > typical / 100).all()


@pytest.mark.parametrize("mixer", ["ssog", "attention", "identity"])
def test_construction_is_deterministic(mixer: str) -> None:
    def build() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        if mixer == "ssog":
            return SeparableMixer(8, 2, (7, 7)).state_dict()
        return (AttentionMixer(8, 2) if mixer == "attention" else IdentityMixer(8)).state_dict()

    first, second = build(), build()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_twin_is_timms_attention(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = AttentionMixer(24, 3)
    timms = timm.layers.Attention(24, 3, qkv_bias=True)
    timms.load_state_dict(twin.state_dict())
    twin.fused_attn = timms.fused_attn = fused
    called = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: called.append(1) or sdpa(*args))
    x = torch.randn(2, 4, 6, 24)
    output = twin(x)
    assert bool(called) == fused
    torch.testing.assert_close(output, timms(x.reshape(2, 24, 24)).reshape(2, 4, 6, 24))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_twin_follows_timms_switch(fused: bool) -> None:
    before = timm.layers.use_fused_attn()
    try:
        timm.layers.set_fused_attn(fused)
        assert AttentionMixer(8, 2).fused_attn == fused
    finally:
        timm.layers.set_fused_attn(before)


def test_identity_mixer_leaves_every_token_alone() -> None:
    mixer = IdentityMixer(8)
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(mixer(x), mixer.proj(mixer.value(x)))
    torch.testing.assert_close(mixer(x)[:, 1:2, 2:3], mixer(x[:, 1:2, 2:3]))


def test_twins_build_no_kernels() -> None:
    assert AttentionMixer(8, 2).kernels(4, 4) is None
    assert IdentityMixer(8).kernels(4, 4) is None


@pytest.mark.parametrize(
    "mixer", [SeparableMixer(8, 2, (3, 5), proj_drop=0.5), AttentionMixer(8, 2, 0.5), IdentityMixer(8, 0.5)]
)
def test_dropout_acts_in_training_only(mixer: nn.Module) -> None:
    x = torch.randn(4, 3, 5, 8)
    share = (mixer.train()(x) == 0).float().mean()
    assert 0.3 < share < 0.7
    mixer.eval()
    assert torch.equal(mixer(x), mixer(x))
    assert (mixer(x) != 0).all()


def test_block_is_two_residual_branches() -> None:
    block = Block(SeparableMixer(8, 2, (3, 5)), 8, mlp_ratio=2)
    x = torch.randn(2, 3, 5, 8)
    mixed = x + block.mixer(block.norm1(x))
    expected = mixed + block.mlp(block.norm2(mixed))
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(block.delta(x), expected - x)
    assert block.mlp.fc1.out_features == 16
    kernels = block.mixer.kernels(3, 5)
    assert torch.equal(block(x, kernels), block(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 10, "num_heads": 3}, r"embed_dim must be divisible by num_heads.*embed_dim=9 or 12 works"),
        ({"dim": 0}, r"embed_dim must be an integer of at least 1, got 0"),
        ({"num_heads": 0}, r"num_heads must be an integer of at least 1, got 0"),
        (
            {"num_components": 0},
            r"num_components must be an integer of at least 1, got 0\. Every head needs",
        ),
        ({"num_components": 2.0}, r"num_components must be an integer of at least 1, got 2\.0"),
        ({"num_components": True}, r"num_components must be an integer of at least 1, got True"),
        ({"amplitude": "convx"}, r"amplitude must be one of 'signed', 'convex', got 'convx'\. Did you mean 'convex'\?"),
        ({"kernel_coords": "cell"}, r"kernel_coords must be one of .*Did you mean 'cells'\?"),
        ({"init_width": 0.25}, r"init_width must be above 0\.25 cells.* got 0\.25"),
        ({"init_width": math.nan}, r"init_width must be above 0\.25 cells.* got nan"),
        ({"init_width": math.inf}, r"init_width must be above 0\.25 cells.* got inf"),
        ({"init_offset": -1.0}, r"init_offset must be 0 or more cells, and at most 10000, got -1\.0"),
        ({"init_offset": math.inf}, r"init_offset must be 0 or more cells, and at most 10000, got inf"),
    ],
)
def test_wrong_options_say_what_was_expected(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeparableMixer(**{"dim": 8, "num_heads": 2, "grid_size": (7, 7), **options})


def test_attention_twin_checks_its_heads() -> None:
    with pytest.raises(ValueError, match="embed_dim must be divisible by num_heads"):
        AttentionMixer(10, 3)


def test_kernels_for_another_grid_are_refused() -> None:
    mixer = SeparableMixer(8, 2, (3, 5))
    with pytest.raises(ValueError, match=r"row_kernels must be square, of the values' height 4.*axis_kernels"):
        mixer(torch.randn(1, 4, 5, 8), mixer.kernels(3, 5))


@pytest.mark.parametrize("width", [0.26, 0.72, 5.0, 1000.0])
def test_initial_width_is_the_one_asked_for(width: float) -> None:
    mixer = SeparableMixer(8, 2, (7, 7), init_width=width)
    sigma = torch.nn.functional.softplus(mixer.width.double()) + 0.25
    torch.testing.assert_close(sigma, torch.full_like(sigma, width), rtol=1e-5, atol=0)


@torch.no_grad()
def test_stacked_products_read_kernels_without_a_copy() -> None:
    rows, columns = SeparableMixer(8, 2, (4, 6), 3).kernels(5, 7)
    row_stack, column_stack = eager._stacks(rows, columns, torch.float32)
    assert row_stack.data_ptr() == rows.data_ptr()
    assert column_stack.data_ptr() == columns.data_ptr()
    assert row_stack.is_contiguous()
    assert column_stack.is_contiguous()
