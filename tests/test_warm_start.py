"""From a trained ViT to SSoG: exact parts exactly, statistics and fits against their definitions, refusals by name."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from torch import Tensor, nn

import timm_ssog
from timm_ssog import conversion
from timm_ssog.conversion import copying, kernel_fit, read_teacher, refitting, statistics, student_options, teachers

VIT: dict[str, Any] = {"img_size": (24, 32), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
VIT |= {"num_classes": 5, "mlp_ratio": 2.0}
AVG = {"class_token": False, "global_pool": "avg"}

FAMILIES: dict[str, dict[str, Any]] = {
    "average": AVG,
    "class token": {},
    "class token, average": {"global_pool": "avg"},
    "registers": {"reg_tokens": 3, "no_embed_class": True},
    "layer scale": {**AVG, "init_values": 0.3},
    "q/k norm": {**AVG, "qk_norm": True},
    "no q/k/v bias": {**AVG, "qkv_bias": False},
    "no biases": {**AVG, "proj_bias": False},
    "norm before pooling": {**AVG, "fc_norm": False},
    "norm behind the class token": {"fc_norm": True},
    "no positions": {**AVG, "pos_embed": "none"},
    "max pooling": {"class_token": False, "global_pool": "max"},
    "any size": {"dynamic_img_size": True},
    "patch 4": {**AVG, "patch_size": 4},
    "patch 32": {**AVG, "patch_size": 32, "img_size": (64, 96)},
}


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Shorter fits, for tests of other things."""
    if "found_again" not in request.node.name:
        monkeypatch.setattr(kernel_fit, "MAP_STEPS", 10)
        monkeypatch.setattr(kernel_fit, "VALUE_STEPS", 20)


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    """A small teacher in which no weight is zero, one or negligible."""
    model = timm.create_model(name, **{**VIT, **options}).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else 0.7 * parameter + noise * 0.2 + 0.1)
    return model


def student_of(teacher: Any, name: str = "vit_ssog_tiny", **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{**student_options(read_teacher(teacher)), **options}).eval()


def photos(count: int = 6, size: tuple[int, int] = (24, 32), seed: int = 2) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def dense(mixer: Any, grid: tuple[int, int]) -> Tensor:
    """The N x N matrix of each head, entry by entry from the formula of DESIGN.md, in float64."""
    height, width = grid
    sigma = nn.functional.softplus(mixer.width.detach().double()) + 0.25
    mu, amplitude = mixer.offset.detach().double(), mixer.amplitude.detach().double()

    def axis(length: int, offset: Tensor, sd: Tensor) -> Tensor:
        rows = [torch.softmax(-((torch.arange(length) - i - offset) ** 2) / (2 * sd**2), 0) for i in range(length)]
        return torch.stack(rows)

    heads = []
    for h in range(len(mu)):
        parts = [
            amplitude[h, m]
            * torch.kron(axis(height, mu[h, m, 0], sigma[h, m, 0]), axis(width, mu[h, m, 1], sigma[h, m, 1]))
            for m in range(mu.shape[1])
        ]
        heads.append(torch.stack(parts).sum(0))
    return torch.stack(heads)


def replace_maps(teacher: Any, student: Any) -> None:
    """Give the patch tokens of the teacher the student's kernels as attention maps; prefix tokens see all equally."""
    for block, other in zip(teacher.blocks, student.blocks, strict=True):
        attention = block.attn
        grid = teacher.patch_embed.grid_size
        prefix = teacher.num_prefix_tokens
        count = prefix + grid[0] * grid[1]
        maps = torch.full((attention.num_heads, count, count), 1 / count)
        maps[:, prefix:, :prefix] = 0
        maps[:, prefix:, prefix:] = dense(other.mixer, grid).float()

        def forward(x: Tensor, attention: Any = attention, maps: Tensor = maps, **_: Any) -> Tensor:
            batch, count, width = x.shape
            v = attention.qkv(x)[..., 2 * width :].reshape(batch, count, attention.num_heads, -1)
            return attention.proj(torch.einsum("hij,bjhd->bihd", maps, v).reshape(batch, count, width))

        attention.forward = forward


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_copied_block_is_the_teachers_where_the_maps_are_kernels(family):
    teacher = vit(**FAMILIES[family])
    student = student_of(teacher)
    seen = read_teacher(teacher)
    source = list(range(len(student.blocks)))
    copying.check_pair(student, seen, source)
    student.load_state_dict(copying.copied_state(student, seen, source))
    for block in student.blocks:  # rows that sum to one, as attention's do, though some weights are negative
        block.mixer.amplitude += (1 - block.mixer.amplitude.sum(-1, keepdim=True)) / 4
        assert (block.mixer.amplitude < 0).any() or (block.mixer.amplitude > 1).any()
    replace_maps(teacher, student)
    images = photos(size=seen.image_size)
    expected = teacher.forward_intermediates(images, intermediates_only=True)
    got = student.forward_intermediates(images, intermediates_only=True)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    if teacher.num_prefix_tokens == 0:
        torch.testing.assert_close(student(images), teacher(images), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_twin_is_a_teacher():
    torch.manual_seed(0)
    twin: Any = timm.create_model("vit_ssog_tiny", mixer="attention", **VIT).eval()
    seen = read_teacher(twin)
    teachers.require_as_read(seen, seen.embed(photos()))
    student: Any = student_of(twin)
    report = timm_ssog.warm_start(student, twin, [photos(32)])
    assert len(report.heads) == 4
    assert torch.equal(student.patch_embed.proj.weight, twin.patch_embed.proj.weight)
    assert torch.equal(student.pos_embed, twin.pos_embed)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parts_compute_what_the_teacher_does(family):
    teacher = vit(**FAMILIES[family])
    seen = read_teacher(teacher)
    images = photos(size=seen.image_size)
    tokens = seen.embed(images)
    teachers.require_as_read(seen, tokens[:1])
    for block in seen.blocks:
        tokens = teachers.after_mlp(block, teachers.after_mixing(block, tokens, teachers.attend(block, tokens)))
    torch.testing.assert_close(seen.finish(tokens), teacher(images), rtol=1e-4, atol=1e-4)


def heads_of(teacher: Any, images: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps, values and mixed values of a block over all tokens, from its hooked input, image by image in float64."""
    block = copy.deepcopy(teacher).blocks[index]
    inputs: list[Tensor] = []
    handle = teacher.blocks[index].register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    teacher(images)
    handle.remove()
    attention = block.attn.double()
    x = block.norm1.double()(inputs[0].double())
    q, k, v = torch.nn.functional.linear(x, attention.qkv.weight).split(16, -1)
    bias = attention.qkv.bias.split(16)
    maps, values, mixed = [], [], []
    for h in range(2):
        part = slice(8 * h, 8 * h + 8)
        scores = (q + bias[0])[..., part] @ (k + bias[1])[..., part].mT / 8**0.5
        maps.append(scores.softmax(-1))
        values.append(v[..., part])
        mixed.append(maps[-1] @ values[-1])
    return torch.stack(maps), torch.stack(values), torch.stack(mixed)


@torch.no_grad()
def moments_of(teacher: Any, images: Tensor, index: int, batch: int = 3) -> statistics.HeadMoments:
    seen = read_teacher(teacher)
    moments = statistics.empty_moments(seen, [index])
    for part in images.split(batch):
        statistics.observe(seen, seen.embed(part), moments)
    return moments[index]


@torch.no_grad()
def test_moments_are_the_means_over_images():
    teacher, images = vit(), photos(7)
    means = moments_of(teacher, images, 1).means()
    maps, values, mixed = heads_of(teacher, images, 1)
    maps, values, mixed = maps[..., 1:, 1:], values[..., 1:, :], mixed[..., 1:, :]
    assert means.images == 7
    for got, expected in (
        (means.values, (values @ values.mT).mean(1)),
        (means.cross, (mixed @ values.mT).mean(1)),
        (means.maps, maps.mean(1)),
        (means.value_mean, values.mean(1)),
        (means.mixed_mean, mixed.mean((1, 2))),
        (means.mixed_power, mixed.square().sum((2, 3)).mean(1)),
        (means.map_power, maps.square().sum((2, 3)).mean(1)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_moments_do_not_depend_on_batches():
    teacher, images = vit(), photos(7)
    for one, other in zip(*(vars(moments_of(teacher, images, 0, batch)).values() for batch in (1, 7)), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def direct_error(kernels: Tensor, values: Tensor, mixed: Tensor) -> Tensor:
    """Mean over images of the squared error of each head with the best intercept per channel, by its definition."""
    miss = mixed - torch.einsum("hij,hbjd->hbid", kernels, values)
    return (miss - miss.mean((1, 2), keepdim=True)).square().sum((2, 3)).mean(1)


@torch.no_grad()
def test_fit_is_measured_by_the_error_of_the_mixed_values():
    teacher, images = vit(), photos(40)
    fit = kernel_fit.fit_kernels(moments_of(teacher, images, 1), (3, 4), 3, False, torch.Generator().manual_seed(0))
    _, values, mixed = heads_of(teacher, images, 1)
    values, mixed = values[..., 1:, :], mixed[..., 1:, :]
    mixer = timm_ssog.layers.SeparableMixer(16, 2, (3, 4), num_components=3)
    for name in ("offset", "width", "amplitude"):
        getattr(mixer, name).copy_(getattr(fit, name))
    kernels = dense(mixer, (3, 4))
    variance = direct_error(torch.zeros_like(kernels), values, mixed)
    torch.testing.assert_close(fit.value_share, 1 - direct_error(kernels, values, mixed) / variance, rtol=0, atol=1e-3)
    shift = (mixed - torch.einsum("hij,hbjd->hbid", kernels, values)).mean((1, 2))
    torch.testing.assert_close(fit.shift, shift, rtol=1e-3, atol=1e-4)

    # the best fixed map, by gradient descent from the definition
    best = torch.zeros_like(kernels).requires_grad_()
    optimizer = torch.optim.LBFGS([best], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (direct_error(best, values, mixed) / variance).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    least = 1 - direct_error(best.detach(), values, mixed) / variance
    torch.testing.assert_close(fit.fixed_share, least, rtol=0, atol=5e-3)
    assert (fit.fixed_share >= fit.value_share - 1e-6).all()


@pytest.mark.parametrize("convex", [False, True])
@torch.no_grad()
def test_kernels_are_found_again(convex):
    """Maps that are Gaussian kernels are fitted by them."""
    grid, generator = (5, 6), torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    mixer = timm_ssog.layers.SeparableMixer(16, 2, grid, num_components=2, init_offset=1.5)
    mixer.amplitude.copy_(torch.tensor([[0.7, 0.3], [0.4, 0.6]]))
    maps = dense(mixer, grid).float()[None].expand(20, -1, -1, -1)
    values = torch.randn(20, 2, 30, 8, generator=generator)
    moments = statistics.HeadMoments.empty(2, 30, 8, torch.device("cpu"))
    moments.add(teachers.Attended(maps, values, maps @ values), 0)
    fit = kernel_fit.fit_kernels(moments, grid, 4, convex, generator)
    assert fit.map_share.min() > 0.98
    assert fit.value_share.min() > 0.97


def hopeless(kind: str, tokens: int) -> teachers.Attended:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 2, tokens, 4, generator=generator)
    maps = torch.full((6, 2, tokens, tokens), 1 / tokens)
    if kind == "no values":
        values = torch.zeros_like(values)
    elif kind == "constant values":
        values = torch.ones_like(values)
    elif kind == "tiny values":
        values = values * 1e-18
    elif kind == "huge values":
        values = values * 1e12
    elif kind == "one image":
        values, maps = values[:1], maps[:1]
    elif kind == "all look at one":
        maps = torch.zeros_like(maps)
        maps[..., 0] = 1
    elif kind == "content":
        maps = torch.eye(tokens)[torch.randint(tokens, (6, 2, tokens), generator=generator)]
    return teachers.Attended(maps, values, maps @ values)


@pytest.mark.parametrize("grid", [(3, 4), (1, 7), (1, 1)])
@pytest.mark.parametrize(
    "kind",
    ["plain", "no values", "constant values", "tiny values", "huge values", "one image", "all look at one", "content"],
)
def test_fit_stays_on_the_grid_and_finite(kind, grid):
    moments = statistics.HeadMoments.empty(2, grid[0] * grid[1], 4, torch.device("cpu"))
    moments.add(hopeless(kind, grid[0] * grid[1]), 0)
    for convex in (False, True):
        fit = kernel_fit.fit_kernels(moments, grid, 2, convex, torch.Generator().manual_seed(0))
        for name, part in vars(fit).items():
            assert torch.isfinite(part).all(), name
        for axis, length in enumerate(grid):
            assert fit.offset[..., axis].abs().max() <= length - 1
            sigma = nn.functional.softplus(fit.width[..., axis]) + 0.25
            assert sigma.max() <= max(length, 1) + 1e-6
        for share in (fit.map_share, fit.value_share, fit.fixed_share):
            assert ((share >= 0) & (share <= 1)).all()


@torch.no_grad()
def test_regression_is_ridge_towards_the_current_weights():
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    before = copy.deepcopy(layer).double()
    inputs, wanted = torch.randn(4, 10, 6) + 1, torch.randn(4, 10, 3)
    regression = refitting.Regression(layer)
    for x, y in zip(inputs.split(3), wanted.split(3), strict=True):
        regression.add(x, y)
    regression.solve()
    x, y = inputs.reshape(-1, 6).double(), wanted.reshape(-1, 3).double()
    ridge = refitting.RIDGE * (x - x.mean(0)).square().mean()

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight.T + bias - y).square().sum(1).mean() + ridge * (weight - before.weight).square().sum()

    weight = layer.weight.detach().double().requires_grad_()
    bias = layer.bias.detach().double().requires_grad_()
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(weight, bias), (weight, bias))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5


def test_refit_and_alignment_come_closer_to_the_teacher():
    teacher, images = vit(**AVG), photos(96)
    reports = {}
    runs: dict[str, dict[str, Any]] = {"fit": {}, "refit": {"refit": True}, "aligned": {"align_epochs": 2}}
    for name, options in runs.items():
        student = student_of(teacher)
        reports[name] = timm_ssog.warm_start(student, teacher, list(images.split(8)), **options)
    assert reports["refit"].state_errors[-1] < reports["fit"].state_errors[-1]
    assert reports["aligned"].state_errors[-1] < reports["fit"].state_errors[-1]
    assert reports["refit"].refitted
    assert reports["aligned"].aligned == 2


def test_report_measures_what_the_student_is():
    teacher, images = vit(), photos(32)
    labels = torch.arange(32) % 5
    student = student_of(teacher)
    lines: list[str] = []
    batches = [(part, None) for part in images.split(8)]
    report = timm_ssog.warm_start(
        student,
        teacher,
        batches,  # type: ignore[arg-type]
        labelled=[(images, labels)],
        on_progress=lines.append,
    )
    with torch.no_grad():
        ours, theirs = student(images).argmax(-1), teacher(images).argmax(-1)
        assert report.student_top1 == pytest.approx(float((ours == labels).float().mean()))
        assert report.teacher_top1 == pytest.approx(float((theirs == labels).float().mean()))
        assert report.agreement == pytest.approx(float((ours == theirs).float().mean()))
        states = [model.forward_intermediates(images, intermediates_only=True) for model in (student, teacher)]
        for error, state, target in zip(report.state_errors, *states, strict=True):
            spread = (target - target.mean((0, 2, 3), keepdim=True)).square().mean()
            assert error == pytest.approx(float(((state - target).square().mean() / spread).sqrt()), rel=1e-3)
    assert report.images == 32
    content = json.loads(report.to_json())
    assert len(content["heads"]) == 4
    assert {"block", "head", "map", "values", "position", "content"} == set(content["heads"][0])
    text = str(report)
    assert "top-1: student" in text
    assert "class token" in text  # the warning that the head reads it
    assert any("fitting kernels of block 2 of 2" in line for line in lines)
    assert report.mean_maps.shape == report.kernels.shape == (4, 3, 4)
    maps = heads_of(teacher, images, 0)[0][:, :, 1:, 1:].mean(1)
    torch.testing.assert_close(report.mean_maps[:2].flatten(1), maps[:, 1 * 4 + 2].float(), rtol=1e-4, atol=1e-5)


def test_picture_shows_the_worst_heads_first():
    teacher = vit(**AVG)
    report = timm_ssog.warm_start(student_of(teacher), teacher, [photos(16)])
    figure = conversion.kernel_fits(report, heads=3)
    titles = [axis.get_title() for axis in figure.axes[:3]]
    worst = sorted(report.heads, key=lambda head: head.values)[:3]
    assert [title.split("\n")[0] for title in titles] == [f"block {h.block + 1}, head {h.head + 1}" for h in worst]
    index = report.heads.index(worst[0])
    assert (figure.axes[0].images[0].get_array() == report.mean_maps[index].numpy()).all()
    assert (figure.axes[3].images[0].get_array() == report.kernels[index].numpy()).all()
    with pytest.raises(ValueError, match="heads must be an integer"):
        conversion.kernel_fits(report, heads=0)


def test_a_head_of_content_is_named():
    teacher = vit(**AVG, img_size=64, pos_embed="none")
    with torch.no_grad():
        for block in teacher.blocks:
            block.attn.qkv.weight[:32] *= 30  # nearly one-hot maps, which follow the image
    report = timm_ssog.warm_start(student_of(teacher, num_components=1), teacher, [photos(64, (64, 64))])
    named = [head for head in report.heads if head.values < 0.05]
    assert len(report.warnings) == len(named) > 0
    assert f"{named[0].values:.1%}" in report.warnings[0]
    assert f"head {named[0].head + 1} is content" in report.warnings[0]


def test_is_deterministic_and_touches_no_global_generator():
    teacher, images = vit(**AVG), list(photos(16).split(8))
    students = [student_of(teacher) for _ in range(2)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for student in students:
        timm_ssog.warm_start(student, teacher, images, refit=True, align_epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(*(student.state_dict().values() for student in students), strict=True):
        assert torch.equal(one, other)


def test_modes_and_teacher_stay_as_they_were():
    teacher = vit(**AVG, drop_path_rate=0.5).train()
    before = copy.deepcopy(teacher.state_dict())
    student = student_of(teacher, proj_drop_rate=0.5).train()
    timm_ssog.warm_start(student, teacher, [photos()], align_epochs=1)
    assert teacher.training
    assert student.blocks[0].mixer.proj_drop.training
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in student.parameters())


@pytest.mark.parametrize("options", [{"img_size": 64}, {"patch_size": 16, "img_size": (48, 64)}])
def test_student_of_another_grid_keeps_it_and_the_teachers_scale(options):
    teacher = vit(**AVG)
    same, other = student_of(teacher), student_of(teacher, **options)
    for student in (same, other):
        timm_ssog.warm_start(student, teacher, [photos(16)])
    assert other.patch_embed.img_size == ((64, 64) if options["img_size"] == 64 else (48, 64))
    for ours, theirs in zip(other.blocks, same.blocks, strict=True):
        assert torch.equal(ours.mixer.offset, theirs.mixer.offset)
        assert tuple(ours.mixer.reference_grid) == (3, 4)
    same.set_input_size(other.patch_embed.img_size, other.patch_embed.patch_size)
    images = photos(2, other.patch_embed.img_size)
    with torch.no_grad():
        torch.testing.assert_close(other(images), same(images))


@pytest.mark.parametrize("kind", ["_looped", "_ode"])
def test_shared_blocks_start_from_one_of_the_teachers(kind):
    teacher = vit(**AVG)
    options: dict[str, Any] = {"loops": 2} if kind == "_looped" else {"horizon": 2.0, "solver_steps": 2}
    student = student_of(teacher, f"vit_ssog_tiny{kind}", depth=1, **options)
    report = timm_ssog.warm_start(student, teacher, [photos(16)] * 2)
    assert torch.equal(student.blocks[0].norm2.weight, teacher.blocks[1].norm2.weight)
    assert {head.block for head in report.heads} == {1}
    first = timm_ssog.warm_start(student, teacher, [photos(16)] * 2, blocks=[0], align_epochs=3)
    assert {head.block for head in first.heads} == {0}
    assert len(first.state_errors) == 2
    with pytest.raises(ValueError, match="shares its blocks: use align_epochs"):
        timm_ssog.warm_start(student, teacher, [photos(16)], refit=True)
    with pytest.raises(ValueError, match="0 to 1, for each of the 1"):
        timm_ssog.warm_start(student, teacher, [photos(16)], blocks=[2])


REFUSED: dict[str, Callable[[], Any]] = {
    "a distillation token": lambda: timm.create_model("deit_tiny_distilled_patch16_224", embed_dim=24, depth=1),
    "attention pooling": lambda: vit(class_token=False, global_pool="map"),
    "a norm inside its attention": lambda: vit(scale_attn_norm=True),
    "a norm inside its MLP": lambda: vit(scale_mlp_norm=True),
    "parallel blocks": lambda: vit(block_fn=ParallelScalingBlock),
    "post-norm blocks": lambda: vit(block_fn=ResPostBlock),
    "a gated MLP": lambda: vit(mlp_layer=timm.layers.SwiGLU),
    "differential attention": lambda: vit(attn_layer="diff"),
    "a norm in its patch embedding": lambda: vit(embed_norm_layer="layernorm"),
    "no final norm": lambda: vit(final_norm=False),
    "rotary positions, gated MLPs": lambda: timm.create_model("eva02_tiny_patch14_224", embed_dim=24, depth=1),
    "relative positions": lambda: timm.create_model("beit_base_patch16_224", embed_dim=24, depth=1, num_heads=2),
    "got ResNet": lambda: timm.create_model("resnet18"),
    "blocks are shared": lambda: timm.create_model("vit_ssog_tiny_looped", mixer="attention", embed_dim=24),
    "must mix by attention": lambda: timm.create_model("vit_ssog_tiny", embed_dim=24, depth=1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(what):
    with pytest.raises(ValueError, match=what):
        read_teacher(REFUSED[what]())


def damaged(value: float = float("nan")) -> Any:
    teacher = vit(**AVG)
    with torch.no_grad():
        teacher.blocks[1].mlp.fc1.weight[0, 0] = value
    return teacher


def overflowing() -> Any:
    teacher = vit(**AVG)
    with torch.no_grad():
        teacher.blocks[0].mlp.fc2.weight.fill_(3e38)
        teacher.blocks[0].mlp.fc1.bias.fill_(10.0)
    return teacher


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    r"depth=2, the student depth=3": (lambda: vit(**AVG), {"depth": 3}, [photos()]),
    r"embed_dim=16, the student embed_dim=32": (lambda: vit(**AVG), {"embed_dim": 32}, [photos()]),
    r"num_heads=2, the student num_heads=4": (lambda: vit(**AVG), {"num_heads": 4}, [photos()]),
    r"mlp_ratio=2.0, the student mlp_ratio=4.0": (lambda: vit(**AVG), {"mlp_ratio": 4.0}, [photos()]),
    r"fc_norm=True, the student fc_norm=False": (lambda: vit(**AVG), {"fc_norm": False}, [photos()]),
    r"global_pool='avg', the student 'max'": (lambda: vit(**AVG), {"global_pool": "max"}, [photos()]),
    r"in_chans=3, the student in_chans=1": (lambda: vit(**AVG), {"in_chans": 1}, [photos()]),
    r"a position embedding, the student none": (lambda: vit(**AVG), {"pos_embed": "none"}, [photos()]),
    r"create it with mixer='ssog'": (lambda: vit(**AVG), {"mixer": "attention"}, [photos()]),
    r"act_layer is ReLU": (lambda: vit(**AVG, act_layer="relu"), {}, [photos()]),
    r"norm_layer is RmsNorm": (lambda: vit(**AVG, norm_layer="rmsnorm"), {}, [photos()]),
    r"got none": (lambda: vit(**AVG), {}, []),
    r"the teacher's size, got \[6, 3, 32, 32\]": (lambda: vit(**AVG), {}, [photos(size=(32, 32))]),
    r"the teacher's size, got \[3, 24, 32\]": (lambda: vit(**AVG), {}, photos()),
    r"images holds values that are NaN": (lambda: vit(**AVG), {}, [photos() * float("nan")]),
    r"blocks.1.mlp.fc1.weight of the teacher is NaN or infinite in 1 of": (damaged, {}, [photos()]),
    r"Block 0 of the teacher gives NaN": (overflowing, {}, [photos()]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_clear_error_and_changes_nothing(message):
    make, options, images = BAD[message]
    teacher = make()
    base = timm.create_model("vit_tiny_patch16_224", **VIT, **AVG)
    student = student_of(base, **options)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match=message):
        timm_ssog.warm_start(student, teacher, images)
    assert all(torch.equal(before[name], tensor) for name, tensor in student.state_dict().items())


def test_alignment_needs_images_twice():
    teacher = vit(**AVG)
    with pytest.raises(ValueError, match="give a list or a loader"):
        timm_ssog.warm_start(student_of(teacher), teacher, iter([photos()]), align_epochs=1)


def test_diverging_alignment_leaves_the_student():
    teacher = vit(**AVG)
    student = student_of(teacher)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match="Alignment diverged"):
        timm_ssog.warm_start(student, teacher, [photos()] * 8, align_epochs=3, align_rate=1e30)
    assert all(torch.equal(before[name], tensor) for name, tensor in student.state_dict().items())


def test_a_block_that_was_changed_is_noticed():
    teacher = vit(**AVG)
    teacher.blocks[1].register_forward_hook(lambda _, __, output: output * 1.5)
    with pytest.raises(ValueError, match="Block 1 of the teacher does not compute"):
        timm_ssog.warm_start(student_of(teacher), teacher, [photos()])


def test_other_classes_keep_the_students_head():
    teacher = vit(**AVG)
    student = student_of(teacher, num_classes=7)
    head = student.head.weight.detach().clone()
    report = timm_ssog.warm_start(student, teacher, [photos(16)], refit=True)
    assert torch.equal(student.head.weight, head)
    assert report.agreement is None
    assert "5 classes and the student 7" in report.warnings[0]


def test_converted_model_exports():
    teacher = vit(**AVG)
    student = student_of(teacher)
    timm_ssog.warm_start(student, teacher, [photos(16)], refit=True)
    images = photos(2)
    program = torch.export.export(student.eval(), (images,))
    torch.testing.assert_close(program.module()(images), student(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_student_keeps_its_dtype(dtype):
    teacher = vit(**AVG)
    student = student_of(teacher).to(dtype)
    timm_ssog.warm_start(student, teacher, [photos(8)])
    assert student.patch_embed.proj.weight.dtype == dtype
    torch.testing.assert_close(student.head.weight, teacher.head.weight.to(dtype))
