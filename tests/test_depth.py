"""Looped and fixed-step continuous depth, against torchdiffeq and against each other."""

import copy
import itertools
import json
import math
from typing import Any

import pytest
import timm
import torch
import torchdiffeq
from conftest import SIZE, as_trained, photos
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import timm_ssog.layers
from timm_ssog.runge_kutta import TABLEAUS

# torchdiffeq's names
THEIRS = {"euler": "euler", "midpoint": "midpoint", "heun": "heun2", "rk4": "rk4"}


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return as_trained(timm.create_model(f"vit_ssog_tiny{kind}", **{**SIZE, **kwargs})).to(dtype).eval()


def end_state(model: Any, images: Tensor) -> Tensor:
    return model.evolve(model.embed(images), [], model.num_steps)[0]


def their_end_state(model: Any, images: Tensor, solver: str, steps: int) -> Any:
    state = model.embed(images)
    block, kernels = model.blocks[0], model.blocks[0].mixer.kernels(*state.shape[1:3])
    grid = torch.linspace(0, model.horizon, steps + 1, dtype=state.dtype)
    return torchdiffeq.odeint(
        lambda _, at: block.delta(at, kernels),
        state,
        grid[[0, -1]],
        method=THEIRS[solver],
        options={"grid_constructor": lambda *_: grid},
    )[-1]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("mixer", ["ssog", "attention"])
@pytest.mark.parametrize("solver", TABLEAUS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_fixed_step_equals_torchdiffeq(solver, mixer, dtype, bound):
    model = build("_ode", dtype=dtype, mixer=mixer, solver=solver, solver_steps=5)
    with torch.no_grad():
        ours = end_state(model, photos(dtype=dtype))
        theirs = their_end_state(model, photos(dtype=dtype), solver, 5)
    assert ours.dtype == dtype
    assert relative(ours, theirs) < bound


@pytest.mark.parametrize("solver", TABLEAUS)
def test_a_tableau_has_a_weight_for_every_stage(solver):
    tableau = TABLEAUS[solver]
    assert [len(row) for row in tableau.stages] == list(range(len(tableau.step)))
    assert sum(tableau.step) == pytest.approx(1.0)


@pytest.mark.parametrize("solver", TABLEAUS)
def test_order_of_convergence_on_the_ssog_velocity(solver):
    model = build("_ode", dtype=torch.float64, horizon=2.0)
    images = photos(dtype=torch.float64)
    with torch.no_grad():
        model.set_solver("rk4", solver_steps=512)
        exact = end_state(model, images)
        errors = []
        for steps in (16, 32, 64):
            model.set_solver(solver, solver_steps=steps)
            errors.append(float((end_state(model, images) - exact).norm()))
    orders = [float(torch.log2(torch.tensor(before / after))) for before, after in itertools.pairwise(errors)]
    assert orders[-1] == pytest.approx(TABLEAUS[solver].order, abs=0.25), errors


@pytest.mark.parametrize("mixer", ["ssog", "attention", "identity"])
def test_looped_is_euler_with_step_one_bit_for_bit(mixer):
    looped = build("_looped", mixer=mixer)
    euler = build("_ode", seed=9, mixer=mixer, solver="euler", solver_steps=12)
    euler.load_state_dict(looped.state_dict())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        images = photos(dtype=dtype)
        assert torch.equal(looped.to(dtype)(images), euler.to(dtype)(images))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(looped.float()(photos()), euler.float()(photos()))


def test_looped_checkpoint_loads_into_the_continuous_model_and_back():
    looped, continuous = build("_looped"), build("_ode", seed=5)
    assert looped.state_dict().keys() == continuous.state_dict().keys()
    continuous.load_state_dict(looped.state_dict())
    again = build("_looped", seed=6)
    again.load_state_dict(continuous.state_dict())
    assert torch.equal(again(photos()), looped(photos()))


def test_looped_blocks_are_applied_in_turn():
    model = build("_looped", depth=2, loops=3)
    with torch.no_grad():
        x = model.embed(photos())
        for _ in range(3):
            for block in model.blocks:
                x = x + block.delta(x)
        assert torch.equal(end_state(model, photos()), x)


def test_continuous_blocks_are_in_force_one_after_the_other():
    model = build("_ode", depth=2, solver="euler", solver_steps=4, horizon=2.0)
    with torch.no_grad():
        x = model.embed(photos())
        for block in (model.blocks[0], model.blocks[0], model.blocks[1], model.blocks[1]):
            x = x + 0.5 * block.delta(x)
        torch.testing.assert_close(end_state(model, photos()), x)
        adaptive = copy.deepcopy(model)
        adaptive.set_solver("dopri5", rtol=1e-7, atol=1e-7)
        model.set_solver("rk4", solver_steps=128)
        torch.testing.assert_close(end_state(adaptive, photos()), end_state(model, photos()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["_looped", "_ode"])
def test_parameters_do_not_depend_on_loops_or_steps(kind):
    changes: list[dict[str, Any]] = (
        [{"loops": 2}, {"loops": 9}] if kind == "_looped" else [{"solver_steps": 2}, {"horizon": 3.0}]
    )
    counts = {sum(p.numel() for p in build(kind, **change).parameters()) for change in changes}
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("_looped", {"depth": 2, "loops": 3}),
        ("_ode", {"depth": 2, "solver_steps": 4}),
        ("_ode", {"solver": "dopri5"}),
        ("_ode", {"solver": "bosh3", "per_sample": True}),
        ("_ode", {"adjoint": True}),
    ],
)
def test_kernels_are_built_once_per_block_and_forward(kind, settings, monkeypatch):
    model = build(kind, **settings)
    built = []
    original = timm_ssog.layers.mixing_kernels
    monkeypatch.setattr(
        timm_ssog.layers, "mixing_kernels", lambda *args, **how: built.append(1) or original(*args, **how)
    )
    model(photos())
    assert len(built) == len(model.blocks)
    model(photos()).sum().backward()
    assert len(built) == 2 * len(model.blocks)


@pytest.mark.parametrize("kind", ["", "_looped", "_ode"])
def test_every_parameter_gets_a_gradient(kind):
    options = {"_looped": {"loop_norms": True, "loop_embed": True, "input_injection": "add"}}.get(kind, {})
    model = build(kind, **options).train()
    model(photos()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_zero_initialised_loop_options_change_nothing():
    plain = build("_looped", loops=3)
    rich = build("_looped", seed=3, loops=3, loop_norms=True, loop_embed=True)
    rich.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(rich(photos()), plain(photos()))
    assert {"loop_embed", "loop_modulation"} <= rich.no_weight_decay()


def test_loop_options_act_where_they_should():
    model = build("_looped", loops=3, loop_norms=True, loop_embed=True)
    before = model.forward_intermediates(photos(), intermediates_only=True)
    with torch.no_grad():
        model.loop_embed[2] += 1.0
        after_embed = model.forward_intermediates(photos(), intermediates_only=True)
        model.loop_embed[2] -= 1.0
        model.loop_modulation[1, 0, 0] += 1.0
        after_norm = model.forward_intermediates(photos(), intermediates_only=True)
    assert [torch.equal(a, b) for a, b in zip(before, after_embed, strict=True)] == [True, True, False]
    assert [torch.equal(a, b) for a, b in zip(before, after_norm, strict=True)] == [True, False, False]
    injected = build("_looped", loops=1, input_injection="add")
    with torch.no_grad():
        x = injected.embed(photos())
        torch.testing.assert_close(end_state(injected, photos()), 2 * x + injected.blocks[0].delta(2 * x))


def test_loops_change_up_and_down_after_training():
    model = build("_looped", loops=4, loop_embed=True)
    with torch.no_grad():
        model.loop_embed.normal_()
    states = model.forward_intermediates(photos(), intermediates_only=True)
    model.set_loops(2)
    assert model.loops == len(model.feature_info) == 2
    torch.testing.assert_close(model.forward_intermediates(photos(), intermediates_only=True)[-1], states[1])
    model.set_loops(6)
    deeper = model.forward_intermediates(photos(), intermediates_only=True)
    torch.testing.assert_close(deeper[3], states[3])
    with torch.no_grad():
        x = deeper[4].permute(0, 2, 3, 1) + model.loop_embed[3]  # the last trained one serves all later loops
        torch.testing.assert_close(deeper[5].permute(0, 2, 3, 1), x + model.blocks[0].delta(x))
    with pytest.raises(ValueError, match="loops must be an integer of at least 1, got 0"):
        model.set_loops(0)


def test_feature_taps_are_loops_and_times():
    looped, continuous = build("_looped", loops=4), build("_ode", solver="midpoint", solver_steps=6)
    assert [info["loop"] for info in looped.feature_info] == [1, 2, 3, 4]
    assert [info["time"] for info in continuous.feature_info] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    fixed = continuous.forward_intermediates(photos(), indices=[1, 5], intermediates_only=True)
    continuous.set_solver("dopri5", rtol=1e-7, atol=1e-7)
    adaptive = continuous.forward_intermediates(photos(), indices=[1, 5], intermediates_only=True)
    continuous.set_solver("rk4", solver_steps=96)
    fine = continuous.forward_intermediates(photos(), indices=[31, 95], intermediates_only=True)
    assert len(fixed) == len(adaptive) == 2
    for tap, exact in zip(adaptive, fine, strict=True):
        torch.testing.assert_close(tap, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"solver": "dopri5"}, {"solver": "bosh3", "per_sample": True}])
def test_stop_early_gives_the_same_taps(settings):
    model = build("_ode", solver_steps=4, rtol=1e-6, atol=1e-6, **settings)
    whole = model.forward_intermediates(photos(), indices=[0, 1], intermediates_only=True)
    stopped = model.forward_intermediates(photos(), indices=[0, 1], intermediates_only=True, stop_early=True)
    for a, b in zip(whole, stopped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "settings"), [("_looped", {}), ("_ode", {"depth": 2, "solver_steps": 6})])
def test_pruning_truncates_depth_and_keeps_the_step_size(kind, settings):
    model = build(kind, **settings)
    expected = model.forward_intermediates(photos(), indices=[1], intermediates_only=True)[0]
    step: Any = getattr(model, "step_size", None)
    assert model.prune_intermediate_layers([1]) == [1]
    assert model.num_steps == 2
    assert getattr(model, "step_size", None) == step
    torch.testing.assert_close(model.forward_intermediates(photos(), intermediates_only=True)[-1], expected)
    model.train()
    model.forward_features(photos()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if kind == "_ode":
        assert model.horizon == 2 * step
        assert len(model.blocks) == 1


def test_solver_changes_without_touching_weights():
    model = build("_ode")
    weights = copy.deepcopy(model.state_dict())
    model.set_solver("dopri5", rtol=1e-6, atol=1e-6)
    tight = model(photos())
    model.set_solver(solver="rk4", solver_steps=96)
    torch.testing.assert_close(model(photos()), tight, rtol=1e-3, atol=1e-4)
    assert model.rtol == 1e-6
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_per_sample_survives_a_fixed_step_solver():
    model = build("_ode", solver="dopri5", per_sample=True)
    before = model(photos())
    model.set_solver("midpoint")
    model(photos())
    model.set_solver("dopri5")
    assert model.per_sample
    assert torch.equal(model(photos()), before)


def test_a_refused_setting_leaves_the_solver_as_it_was():
    model = build("_ode")
    before = model(photos())
    with pytest.raises(ValueError, match="rtol must be positive"):
        model.set_solver("dopri5", rtol=-1.0)
    assert model.solver == "midpoint"
    assert torch.equal(model(photos()), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "rk5"}, r"solver must be one of .* got 'rk5'. Did you mean 'rk4'"),
        ({"solver_steps": 0}, "solver_steps must be an integer of at least 1"),
        ({"solver": "dopri5", "atol": float("nan")}, "atol must be positive and finite"),
        ({"horizon": -1.0}, "horizon must be positive"),
        ({"horizon": "12"}, "horizon must be positive and finite, got '12'"),
        ({"depth": 5, "solver_steps": 12}, "multiple of 5"),
        ({"solver": "dopri8", "per_sample": True}, "per_sample needs one of the adaptive solvers"),
        ({"solver": "dopri5", "per_sample": True, "adjoint": True}, "don't go together"),
        ({"solver": "dopri5", "drop_path_rate": 0.1}, "drop_path and jitter need a fixed-step solver"),
        ({"proj_drop_rate": 0.1}, "no dropout in its velocity"),
        ({"max_evaluations": 0}, "max_evaluations must be"),
    ],
)
def test_settings_that_can_not_work_say_why(settings, message):
    with pytest.raises(ValueError, match=message):
        build("_ode", **settings)


def test_stochastic_depth_with_an_adaptive_solver_is_refused_in_training_only():
    model = build("_ode", drop_path_rate=0.2)
    model.set_solver("dopri5")
    model(photos())
    with pytest.raises(ValueError, match="drop_path and jitter need a fixed-step solver"):
        model.train()(photos())


@pytest.mark.parametrize("kind", ["_looped", "_ode"])
def test_stochastic_depth_skips_whole_steps_of_single_images(kind):
    steps: dict[str, Any] = {"loops": 3} if kind == "_looped" else {"solver_steps": 3}
    model = build(kind, drop_path_rate=0.999, **steps).train()
    x = model.embed(photos(4))
    torch.manual_seed(3)
    _, states = model.evolve(x, [0, 1, 2], 3)
    assert not torch.equal(states[0], x)  # the first step is never dropped
    assert torch.equal(states[2], states[1])  # at this rate the last one always is
    one = build("_ode", solver="midpoint", solver_steps=1, drop_path_rate=0.5, horizon=1.0)
    one.drop_path_rates = [0.5]
    torch.manual_seed(0)
    x = one.embed(photos(8))
    end, _ = one.train().evolve(x, [], 1)
    kept = [index for index in range(8) if not torch.equal(end[index], x[index])]
    assert 0 < len(kept) < 8
    with torch.no_grad():
        # the stages of a step share its mask: a kept image moves as if its velocity were 1 / (1 - rate) as large
        half = x + 0.5 * 2 * one.blocks[0].delta(x)
        torch.testing.assert_close(end[kept], (x + 2 * one.blocks[0].delta(half))[kept])


def test_jitter_moves_the_grid_in_training_only():
    model = build("_ode", jitter=True, solver="euler", solver_steps=3)
    plain = build("_ode", solver="euler", solver_steps=3)
    assert torch.equal(model(photos()), plain(photos()))
    model.train()
    torch.manual_seed(0)
    first = end_state(model, photos())
    second = end_state(model, photos())
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    u = float(torch.rand([1]))
    with torch.no_grad():
        x = model.embed(photos())
        for step in (4 * u, 4.0, 4.0, 4 * (1 - u)):
            x = x + step * model.blocks[0].delta(x)
    torch.testing.assert_close(first, x)


@pytest.mark.parametrize("kind", ["_looped", "_ode"])
def test_state_is_float32_and_the_velocity_runs_in_autocast(kind):
    model = build(kind)
    seen = []
    model.blocks[0].register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(photos())
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert len(seen) == 12
    assert model.to(torch.bfloat16)(photos(dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("", {}), ("_looped", {}), ("_ode", {}), ("_ode", {"solver": "bosh3", "rtol": 1e-5, "atol": 1e-5})],
)
def test_gradient_checkpointing_changes_nothing(kind, settings):
    plain = build(kind, **settings).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.set_grad_checkpointing()
    for model in (plain, checkpointed):
        model(photos()).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("settings", [{}, {"solver": "bosh3", "per_sample": True, "rtol": 1e-4, "atol": 1e-4}])
def test_no_image_depends_on_its_batch_mates(settings):
    model = build("_ode", dtype=torch.float64, **settings)
    images = photos(5, dtype=torch.float64)
    images[3] *= 30
    together = model(images)
    for index in range(5):
        torch.testing.assert_close(model(images[index : index + 1])[0], together[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", ["rk4", "dopri5"])
def test_adjoint_gradients_agree_with_backpropagation(solver):
    settings = {"solver": solver, "solver_steps": 96 if solver == "rk4" else 3, "rtol": 1e-7, "atol": 1e-9}
    direct = build("_ode", dtype=torch.float64, horizon=3.0, max_evaluations=100000, **settings).train()
    adjoint = copy.deepcopy(direct)
    adjoint.set_solver(adjoint=True)
    for model in (direct, adjoint):
        model(photos(dtype=torch.float64)).square().sum().backward()
    for (name, a), (_, b) in zip(direct.named_parameters(), adjoint.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None, name
        assert relative(b.grad, a.grad) < 1e-3, name


def test_centring_norm_is_an_option_that_makes_the_certificate_informative():
    plain, centred = build("_ode"), build("_ode", norm_layer="centrenorm")
    assert timm_ssog.certify(plain, 32).solution_unique
    assert not timm_ssog.certify(plain, 32).informative
    assert timm_ssog.certify(centred, 32).velocity_bound < timm_ssog.certify(plain, 32).velocity_bound / 1e3
    assert isinstance(centred.norm, timm_ssog.layers.CentreNorm)
    assert centred(photos()).isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"solver": "dopri5"}])
def test_adjoint_models_predict_without_gradients(settings):
    model = build("_ode", adjoint=True, **settings)
    with torch.no_grad():
        expected = model(photos())
    with torch.inference_mode():
        torch.testing.assert_close(model(photos()), expected)
    torch.testing.assert_close(model(photos()), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_an_adjoint_solve_is_not_differentiated_again():
    model = build("_ode", adjoint=True)
    images = photos().requires_grad_()
    with pytest.raises(RuntimeError, match="can't be differentiated again"):
        torch.autograd.grad(model(images).square().sum(), images, create_graph=True)


@pytest.mark.parametrize("settings", [{}, {"per_sample": True}])
def test_adaptive_taps_of_blocks_that_end_between_them(settings):
    model = build("_ode", depth=2, solver="dopri5", solver_steps=3, rtol=1e-7, atol=1e-7, **settings)
    taps = model.forward_intermediates(photos(), intermediates_only=True)
    second = model.forward_intermediates(photos(), indices=[1], intermediates_only=True)
    model.set_solver("rk4", solver_steps=96)
    exact = model.forward_intermediates(photos(), indices=[31, 63, 95], intermediates_only=True)
    assert (len(taps), len(second)) == (3, 1)
    for tap, state in zip([*taps, *second], [*exact, exact[1]], strict=True):
        torch.testing.assert_close(tap, state, rtol=1e-3, atol=1e-3)


def test_taps_of_a_short_horizon():
    model = build("_ode", solver="dopri5", horizon=1e-6, solver_steps=12)
    assert len(model.forward_intermediates(photos(), intermediates_only=True)) == 12


def test_a_pruned_last_block_counts_for_its_part_of_the_horizon_only():
    model = build("_ode", depth=2, solver_steps=6, norm_layer="centrenorm")
    first = timm_ssog.certify(model, 32).blocks[0].velocity_bound
    model.prune_intermediate_layers([3], prune_head=False)
    certificate = timm_ssog.certify(model, 32)
    second = certificate.blocks[1].velocity_bound
    assert certificate.log10_growth == pytest.approx((6 * first + 2 * second) / math.log(10))
    assert [len(states) for states in timm_ssog.local_lipschitz(model, photos(1), iterations=1).values()] == [3, 1]


def test_memory_of_an_adjoint_step_does_not_grow_with_its_steps(tmp_path):
    images = photos()

    def peak(steps, adjoint):
        settings = {"solver": "euler", "solver_steps": steps, "adjoint": adjoint, "flow_penalty": "none"}
        model = build("_ode", **settings).train()
        model(images).sum().backward()  # sets up the gradients
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(images).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        totals = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
        return max(totals) - totals[0]

    few, some, many = (peak(steps, adjoint=True) for steps in (12, 48, 192))
    assert max(some, many) < 1.1 * few
    assert peak(48, adjoint=False) > 3 * peak(12, adjoint=False) > 3 * few


@pytest.mark.parametrize("settings", [{"jitter": True, "adjoint": True}, {"drop_path_rate": 0.1, "adjoint": True}])
def test_noise_that_the_adjoint_would_not_see_is_refused(settings):
    with pytest.raises(ValueError, match="drop_path and jitter need a fixed-step solver without the adjoint"):
        build("_ode", **settings)
