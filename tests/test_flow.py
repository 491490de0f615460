"""The flow penalty against its definition in float64, and its way into the gradient of any training loop."""

import copy
from typing import Any

import pytest
import timm
import torch
from conftest import SIZE, as_trained, photos
from torch import Tensor, nn

import timm_ssog.layers
from timm_ssog import flow
from timm_ssog.runge_kutta import TABLEAUS

IMAGES, CLASSES = 8, SIZE["num_classes"]
PENALTIES = ("error", "kinetic", "both")
TAPPED: list[dict[str, Any]] = [
    {"solver": "bosh3", "rtol": 1e-6, "atol": 1e-6},
    {"solver": "dopri5", "rtol": 1e-6, "atol": 1e-6, "adjoint": True},
    {"solver": "bosh3", "rtol": 1e-6, "atol": 1e-6, "per_sample": True},
    {"solver": "rk4", "adjoint": True},
]
"""Solves that show no stages, whose penalty comes from the velocity at the feature times."""


def build(dtype: torch.dtype = torch.float32, name: str = "vit_ssog_tiny_ode", **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        **({"horizon": 3.0, "solver_steps": 3} if name.endswith("_ode") else {}),
        "pre_norm": False,
        "flow_penalty": "error",
        "flow_weight": 1.0,
        **options,
    }
    return as_trained(timm.create_model(name, **{**SIZE, **settings})).to(dtype).train()


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return photos(IMAGES, dtype=dtype), torch.arange(IMAGES) % CLASSES


def gradient(model: nn.Module) -> Tensor:
    """All gradients as one vector."""
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found), "a parameter without gradient"
    return torch.cat([grad.flatten().double() for grad in found if grad is not None])


def trained(model: Any, run: Any = None) -> Tensor:
    """The gradient that a loop such as train.py's sees."""
    own = batch(next(model.parameters()).dtype)
    run = model if run is None else run  # not `or`: a compiled module has no truth
    loss = nn.functional.cross_entropy(run(own[0]), own[1])
    model.zero_grad()
    loss.backward()
    return gradient(model)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def by_definition(model: Any, images: Tensor, penalty: str) -> tuple[Tensor, Tensor]:
    """Logits and penalties from an explicit loop over the tableau; one block, fixed steps."""
    x = model.embed(images)
    block, h = model.blocks[0], model.horizon / model.num_steps
    rule = TABLEAUS[model.solver]
    total: Any = 0.0
    before = None
    for _ in range(model.num_steps):
        slopes: list[Tensor] = []
        for row in rule.stages:
            slopes.append(block.delta(x + h * sum((w * k for w, k in zip(row, slopes, strict=True)), torch.zeros(()))))
        step = h * sum(w * k for w, k in zip(rule.step, slopes, strict=True))
        if model.solver == "euler":
            error = None if before is None else h / 2 * (slopes[0] - before)
        else:
            error = step - h * slopes[0]
        before = slopes[0]
        square = x.pow(2).mean((1, 2, 3))
        if penalty != "kinetic" and error is not None:
            total = total + error.pow(2).mean((1, 2, 3)) / square
        if penalty != "error":
            share = 0.05 if penalty == "both" else 1.0
            total = total + share * step.pow(2).mean((1, 2, 3)) / square
        x = x + step
    return model.forward_head(model.norm(x.flatten(1, 2))), total


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("solver", TABLEAUS)
def test_the_gradient_is_that_of_the_definition(solver: str, penalty: str) -> None:
    model = build(torch.float64, solver=solver, flow_penalty=penalty, flow_weight=0.7)
    images, labels = batch(torch.float64)
    logits, penalties = by_definition(model, images, penalty)
    assert penalties.min() > 1e-3
    (nn.functional.cross_entropy(logits, labels) + 0.7 * penalties.mean()).backward()
    expected = gradient(model)
    ours = trained(model)
    assert (ours - expected).norm() <= 1e-9 * expected.norm()
    without = trained(build(torch.float64, solver=solver, flow_penalty="none"))
    assert (without - expected).norm() > 1e-2 * expected.norm(), "the penalty matters here"


def test_the_gradient_of_a_binary_classifier_is_that_of_the_definition() -> None:
    model = build(torch.float64, num_classes=1, flow_penalty="both", flow_weight=0.7)
    images, labels = batch(torch.float64)
    binary = (labels % 2).double()
    logits, penalties = by_definition(model, images, "both")
    (nn.functional.binary_cross_entropy_with_logits(logits[:, 0], binary) + 0.7 * penalties.mean()).backward()
    expected = gradient(model)
    model.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(images)[:, 0], binary).backward()
    assert (gradient(model) - expected).norm() <= 1e-9 * expected.norm()


def test_the_pull_fades_with_the_loss_of_a_learned_sample() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0], [12.0, 0.0, 0.0]], dtype=torch.float64)
    labels = torch.zeros(3, dtype=torch.long)
    for scale in (1.0, 65536.0):
        output, penalty = logits.clone().requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
        pulled = flow.pull_on_backward(output, penalty, 2.0)
        (scale * nn.functional.cross_entropy(pulled, labels, reduction="sum")).backward()
        assert penalty.grad is not None
        assert output.grad is not None
        lengths = output.grad.norm(dim=1) / scale
        expected = 2 * torch.cat([torch.ones(1), lengths[1:] / flow.LEAST_LENGTH])
        assert torch.allclose(penalty.grad / scale, expected, rtol=1e-12)
        assert lengths[1] < flow.LEAST_LENGTH


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_custom_loop_adds_the_penalty_once(penalty: str) -> None:
    model = build(torch.float64, flow_penalty=penalty)
    images, labels = batch(torch.float64)
    logits, penalties = by_definition(model, images, penalty)
    (nn.functional.cross_entropy(logits, labels) + 0.3 * penalties.mean()).backward()
    expected = gradient(model)
    model.zero_grad()
    logits, penalties = model.forward_with_penalty(images)
    assert penalties.shape == (IMAGES,)
    (nn.functional.cross_entropy(logits, labels) + 0.3 * penalties.mean()).backward()
    assert (gradient(model) - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("settings", [*({"solver": solver} for solver in TABLEAUS), *TAPPED], ids=str)
def test_logits_are_those_of_a_model_without_penalty(settings: dict[str, Any]) -> None:
    images, _ = batch()
    with_penalty, without = build(**settings), build(**settings, flow_penalty="none")
    if settings["solver"] in TABLEAUS or settings.get("per_sample"):
        assert torch.equal(with_penalty(images), without(images))
    for model in (with_penalty, without):
        model.eval()
    assert torch.equal(with_penalty(images), without(images))
    with torch.no_grad():
        assert torch.equal(with_penalty.train()(images), without.train()(images))


def test_inference_and_fixed_steps_cost_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = timm_ssog.layers.Block.forward
    monkeypatch.setattr(timm_ssog.layers.Block, "forward", lambda *args, **how: calls.append(1) or plain(*args, **how))
    model = build()
    model(batch()[0])
    assert len(calls) == 2 * model.num_steps
    model.set_solver("bosh3")
    calls.clear()
    model.eval()(batch()[0])
    in_inference = len(calls)
    calls.clear()
    model.train()(batch()[0])
    assert len(calls) == in_inference + model.num_steps, "one velocity for every feature interval"


@pytest.mark.parametrize("penalty", PENALTIES)
def test_adaptive_solves_and_the_adjoint_have_the_gradient_of_a_fine_solve(penalty: str) -> None:
    """All gradients of tight solves agree, also with those of the definition at the same times."""
    made = []
    for settings in (*TAPPED, {"solver": "rk4", "solver_steps": 3, "adjoint": True, "horizon": 3.0}):
        model = build(torch.float64, **{**settings, "horizon": 0.75}, flow_penalty=penalty, mlp_ratio=1.0)
        images, labels = batch(torch.float64)
        logits, penalties = model.forward_with_penalty(images)
        (nn.functional.cross_entropy(logits, labels) + penalties.mean()).backward()
        made.append((penalties.detach(), gradient(model)))
    model = build(torch.float64, solver="euler", horizon=0.75, flow_penalty=penalty, mlp_ratio=1.0)
    logits, penalties = by_definition(model, images, penalty)
    for penalty_values, grads in made:
        assert torch.allclose(penalty_values, made[0][0], rtol=1e-3)
        assert (grads - made[0][1]).norm() <= 1e-2 * made[0][1].norm()
    # Euler's states differ by its own error, so the penalties agree only nearly
    assert torch.allclose(penalties, made[0][0], rtol=0.5)


def test_several_blocks_and_the_block_that_changes_between_steps() -> None:
    model = build(torch.float64, depth=3, horizon=3.0, solver="euler", solver_steps=6)
    images, _ = batch(torch.float64)
    x, h, total = model.embed(images), 0.5, torch.zeros(IMAGES, dtype=torch.float64)
    for block in model.blocks:
        first = block.delta(x)
        x = x + h * first
        second = block.delta(x)
        total += (h / 2 * (second - first)).pow(2).mean((1, 2, 3)) / x.pow(2).mean((1, 2, 3))
        x = x + h * second
    assert torch.allclose(model.forward_with_penalty(images)[1], total, rtol=1e-10)
    model.set_solver("dopri5", rtol=1e-9, atol=1e-9)
    assert torch.allclose(model.forward_with_penalty(images)[1], total, rtol=0.5)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_loops_have_the_gradient_of_eulers_steps(penalty: str) -> None:
    shared = {"flow_penalty": penalty, "flow_weight": 0.7}
    euler = build(torch.float64, solver="euler", solver_steps=3, **shared)
    looped = build(torch.float64, name="vit_ssog_tiny_looped", loops=3, **shared)
    looped.load_state_dict(euler.state_dict())
    assert torch.equal(trained(looped), trained(euler))


def test_a_loop_of_several_blocks_moves_once() -> None:
    options = {"depth": 2, "loops": 3, "input_injection": "add", "loop_embed": True, "flow_penalty": "both"}
    model = build(torch.float64, name="vit_ssog_tiny_looped", drop_path_rate=0.5, **options)
    images, _ = batch(torch.float64)
    first = x = model.embed(images)
    total, before = torch.zeros(IMAGES, dtype=torch.float64), None
    for loop in range(3):
        start = x = x + model.loop_embed[loop] + first
        for block in model.blocks:
            x = x + block.delta(x)
        square, move = start.pow(2).mean((1, 2, 3)), x - start
        total += flow.KINETIC_SHARE * move.pow(2).mean((1, 2, 3)) / square
        if before is not None:
            total += ((move - before) / 2).pow(2).mean((1, 2, 3)) / square
        before = move
    assert torch.allclose(model.eval().forward_with_penalty(images)[1], total, rtol=1e-10)
    assert torch.isfinite(trained(model.train())).all()


@pytest.mark.parametrize(
    "settings", [{}, {"jitter": True}, {"drop_path_rate": 0.5}, {"drop_path_rate": 0.3, "jitter": True}]
)
def test_checkpointing_and_noise(settings: dict[str, Any]) -> None:
    grads = []
    for checkpointing in (False, True):
        model = build(torch.float64, **settings)
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(5)
        grads.append(trained(model))
    assert torch.isfinite(grads[0]).all()
    assert (grads[0] - grads[1]).norm() <= 1e-9 * grads[0].norm()


def scaled(model: Any, scale: float) -> Tensor:
    """The gradient of the first step that a GradScaler does not skip for an overflow."""
    images, labels = batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(8):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if torch.isfinite(gradient(model)).all():
            return gradient(model)
        scaler.step(optimizer)
        scaler.update()
    raise AssertionError("no step without an overflow")


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4"])
def test_a_scaler_and_accumulation_keep_the_direction(solver: str, penalty: str) -> None:
    model = build(solver=solver, flow_penalty=penalty, flow_weight=20.0)
    expected = trained(model)
    images, labels = batch()
    plain = trained(build(solver=solver, flow_penalty="none"))
    assert cosine(expected, plain) < 0.98, "the penalty matters here"
    for scale in (1024.0, 65536.0):
        assert cosine(scaled(model, scale), expected) > 0.999
    model.zero_grad()
    for part, wanted in zip(images.chunk(4), labels.chunk(4), strict=True):
        (nn.functional.cross_entropy(model(part), wanted) / 4).backward()
    accumulated = gradient(model)
    assert (accumulated - expected).norm() <= 1e-4 * expected.norm()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        nn.functional.cross_entropy(model(images), labels).backward()
    assert cosine(gradient(model), expected) > 0.99


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_compiled_model_trains_the_same(penalty: str) -> None:
    model = build(flow_penalty=penalty)
    expected = trained(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert (trained(model, compiled) - expected).norm() <= 1e-5 * expected.norm()


def test_per_sample_gradients_by_vmap() -> None:
    model = build()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = batch()

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (image[None],))
        return nn.functional.cross_entropy(logits, label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)
    mean = torch.cat([each[name].mean(0).flatten().double() for name in parameters])
    expected = trained(model)
    assert (mean - expected).norm() <= 1e-4 * expected.norm()


def test_a_training_model_can_be_copied_and_averaged() -> None:
    model = build()
    loss = nn.functional.cross_entropy(model(batch()[0]), batch()[1])
    average = timm.utils.ModelEmaV3(model, decay=0.5)
    copied = copy.deepcopy(model)
    loss.backward()
    average.update(model)
    assert torch.equal(copied.eval()(batch()[0]), model.eval()(batch()[0]))


def test_a_minimal_loss_does_not_pull() -> None:
    model = build()
    (model(batch()[0]) * 0).sum().backward()
    assert gradient(model).norm() == 0


def test_export_and_script_in_training_stand_aside_or_say_so() -> None:
    model = build()
    images, _ = batch()
    program = torch.export.export(model, (images,), strict=False)
    assert torch.allclose(program.module()(images), model(images), atol=1e-5)
    scripted = torch.jit.script(model)
    with pytest.raises(Exception, match=r"create it with flow_weight=0"):
        scripted(images)
    with torch.no_grad():
        assert torch.allclose(scripted(images), model(images), atol=1e-5)
    assert torch.allclose(scripted.eval()(images), model(images), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flow_penalty": "energy"}, "flow_penalty must be one of 'none', 'error', 'kinetic', 'both'"),
        ({"flow_weight": -1.0}, "flow_weight must be 0 or more, and finite, got -1.0"),
        ({"flow_weight": float("nan")}, "flow_weight must be 0 or more"),
        ({"flow_weight": "strong"}, "flow_weight must be 0 or more"),
        ({"pre_norm": "yes"}, "pre_norm must be True or False"),
    ],
    ids=str,
)
def test_wrong_options_say_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_one_step_of_euler_has_no_error_to_penalise() -> None:
    model = build(solver="euler", solver_steps=3, depth=3)
    with pytest.raises(ValueError, match=r"needs two steps per block.*got 3 for 3 blocks: use flow_penalty='kinetic'"):
        model(batch()[0])
    model.eval()(batch()[0])
    with pytest.raises(ValueError, match="The model has no flow penalty"):
        build(flow_penalty="none").forward_with_penalty(batch()[0])


@pytest.mark.parametrize("solver", ["midpoint", "heun", "rk4"])
def test_the_penalty_keeps_no_copies_of_states(solver: str) -> None:
    def kept(penalty: str) -> int:
        """Bytes that backward keeps: each storage counts once."""
        storages: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        model = timm.create_model("vit_ssog_tiny_ode", solver=solver, flow_penalty=penalty, num_classes=CLASSES)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = model.train()(torch.zeros(1, 3, 224, 224))
        assert logits.requires_grad
        return sum(storages.values())

    none = kept("none")
    assert kept("kinetic") <= 1.01 * none
    assert none < kept("both") <= 1.05 * none


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
def test_pre_norm_gives_the_state_a_unit_start(name: str) -> None:
    model: Any = timm.create_model(name, pre_norm=True, **SIZE).eval()
    state = model.embed(100 * batch()[0])
    assert torch.allclose(state.pow(2).mean(-1), torch.ones(()), atol=1e-2)
    assert torch.allclose(state.mean(-1), torch.zeros(()), atol=1e-4)


def test_a_checkpoint_of_the_other_pre_norm_says_what_to_do() -> None:
    with_norm, without = build(pre_norm=True), build(pre_norm=False)
    with pytest.raises(RuntimeError, match=r"this model has pre_norm=True: create it with pre_norm=False"):
        with_norm.load_state_dict(without.state_dict())
    with pytest.raises(RuntimeError, match=r"this model has pre_norm=False: create it with pre_norm=True"):
        without.load_state_dict(with_norm.state_dict())
    with_norm.load_state_dict(without.state_dict(), strict=False)
    without.load_state_dict(without.state_dict())
