"""Solver traces, the "is it an ODE?" report and the figures."""

import json
from typing import Any

import pytest
import timm
import torch
import torchdiffeq
from conftest import SIZE, as_trained, photos
from torch import Tensor

import timm_ssog
from timm_ssog import analysis


def build(kind: str = "_ode", **options: Any) -> Any:
    torch.manual_seed(0)
    return as_trained(timm.create_model(f"vit_ssog_tiny{kind}", **{**SIZE, **options}).eval())


def velocity_calls(model: Any, images: Tensor) -> int:
    calls = []
    handle = model.blocks[0].mixer.register_forward_hook(lambda *_: calls.append(1))
    model(images)
    handle.remove()
    return len(calls)


@pytest.mark.parametrize("settings", [{"solver": "rk4", "solver_steps": 5}, {"solver": "dopri5"}, {"solver": "bosh3"}])
def test_trace_counts_what_the_model_does(settings):
    model = build(**settings)
    trace = timm_ssog.trace_solve(model, photos(3))
    assert trace.evaluations == velocity_calls(model, photos(3))
    assert trace.times[-1] == pytest.approx(12.0)
    assert len(trace.times) == trace.accepted
    assert trace.states is None


def test_trace_per_sample_counts_each_image():
    model = build(solver="dopri5", per_sample=True, rtol=1e-5, atol=1e-5)
    images = photos(3)
    images[1] *= 100
    trace: Any = timm_ssog.trace_solve(model, images)
    alone: list[Any] = [timm_ssog.trace_solve(model, images[i : i + 1]).evaluations for i in range(3)]
    assert torch.equal(trace.evaluations, torch.cat(alone))


def test_trace_keeps_states_at_feature_times_and_leaves_the_model_as_it_was():
    model = build(solver_steps=4).train()
    trace: Any = timm_ssog.trace_solve(model, photos(3), keep_states=True)
    assert model.training
    assert model.num_steps == 4
    taps = model.eval().forward_intermediates(photos(3), intermediates_only=True)
    assert len(trace.states) == 4
    for state, tap in zip(trace.states, taps, strict=True):
        torch.testing.assert_close(state.permute(0, 3, 1, 2), tap)


def test_error_estimate_of_a_fixed_step_solve_is_close_to_its_error():
    model = build(solver="rk4", solver_steps=24)
    estimate = timm_ssog.trace_solve(model, photos(3)).error_estimate
    states = {}
    for steps in (24, 384):
        model.set_solver(solver_steps=steps)
        trace: Any = timm_ssog.trace_solve(model, photos(3), keep_states=True)
        states[steps] = trace.states[-1]
    error = (states[24] - states[384]).flatten(1).square().mean(1).sqrt().max()
    assert 0.5 * error < estimate < 2 * error


def test_trace_of_several_blocks_is_one():
    model = build(depth=2, solver="dopri5", solver_steps=4)
    trace: Any = timm_ssog.trace_solve(model, photos(3), keep_states=True)
    assert len(trace.states) == 4
    assert trace.times[-1] == pytest.approx(12.0)
    assert 6.0 in [pytest.approx(time) for time in trace.times]


def test_only_a_continuous_model_has_a_trace():
    with pytest.raises(ValueError, match=r"Expected a continuous model .* got LoopedVitSsog"):
        timm_ssog.trace_solve(build("_looped"), photos(3))


def test_report_tells_a_solution_from_a_memorised_grid():
    smooth = build(solver="rk4", solver_steps=48, horizon=1.0)
    report = analysis.ode_report(smooth, photos(3), torch.tensor([0, 1, 2]), steps=(1, 4, 16))
    assert report.converges
    assert "converges" in str(report)
    drift = {(row.solver, row.steps): row.drift for row in report.rows}
    assert drift["rk4", 16] < drift["midpoint", 16] < drift["euler", 16] < drift["euler", 1]
    predicted = smooth(photos(3)).argmax(1)
    perfect = analysis.ode_report(smooth, photos(3), predicted, steps=(16,), solvers=("rk4",)).rows[0]
    assert perfect.accuracy == 1.0
    wrong = analysis.ode_report(smooth, photos(3), (predicted + 1) % 5, steps=(16,), solvers=("rk4",)).rows[0]
    assert wrong.accuracy == 0.0
    assert smooth.num_steps == 48
    coarse = build(solver="euler", solver_steps=1)
    report = analysis.ode_report(coarse, photos(3), steps=(1, 2))
    assert not report.converges
    assert "Not a solution" in report.verdict
    assert json.loads(json.dumps(report.to_dict()))["trained"] == "euler x 1"


def test_report_measures_drift_and_flips_against_the_exact_flow():
    model = build(solver="euler", solver_steps=2)
    report = analysis.ode_report(model, photos(8), steps=(2,), solvers=("euler",))
    with torch.no_grad():
        trained = model(photos(8))
        model.set_solver("rk4", solver_steps=analysis.REFERENCE_STEPS)
        exact = model(photos(8))
    assert report.rows[0].flips == pytest.approx(float((trained.argmax(1) != exact.argmax(1)).float().mean()))
    assert report.trained_drift == pytest.approx(float((trained - exact).square().mean().sqrt() / exact.std()))


def test_report_says_which_step_errs_and_what_helps():
    model = build(solver="heun", solver_steps=4, depth=2, flow_penalty="none")
    report = analysis.ode_report(model, photos(3), steps=(2,), solvers=("euler",))
    span = model.step_size
    with torch.no_grad():
        state = model.embed(photos(3))
        for step, error in enumerate(report.step_errors):
            block = model.blocks[step // 2]
            first = block.delta(state)
            reached = state + span / 2 * (first + block.delta(state + span * first))
            exact = torchdiffeq.odeint(
                lambda _, at, block=block: block.delta(at), state, torch.tensor([0.0, span]), rtol=1e-7, atol=1e-7
            )
            expected = (reached - exact[1]).square().mean().sqrt() / state.square().mean().sqrt()
            assert error == pytest.approx(float(expected), rel=0.02)
            state = reached
    assert len(report.step_errors) == 4
    assert f"{report.step_errors[0]:.2g}" in str(report)
    assert "flow_penalty='both'" in report.remedy
    regular = analysis.ode_report(
        build(pre_norm=False, flow_penalty="error", flow_weight=2.0), photos(3), steps=(2,), solvers=("euler",)
    )
    assert "pre_norm=True and a flow_weight above 2" in regular.remedy
    adaptive = build(solver="dopri5", rtol=1e-6, atol=1e-6, solver_steps=3)
    assert max(analysis.ode_report(adaptive, photos(3), steps=(2,), solvers=("euler",)).step_errors) < 1e-4


def test_anytime_counts_and_judges_every_solver():
    model = build(solver="midpoint", solver_steps=4, depth=2)
    labels = torch.tensor([0, 1, 2])
    result = analysis.anytime(model, photos(3), labels, evaluations=(3, 4, 8), tolerances=(1e-1, 1e-3))
    found = {(row.solver, row.setting): row for row in result.rows}
    assert [key for key in found if key[0] != "bosh3"] == [
        ("euler", 4),
        ("euler", 8),
        ("midpoint", 2),
        ("midpoint", 4),
        ("heun", 2),
        ("heun", 4),
        ("rk4", 2),
    ], "a budget is spent in whole steps, and every block takes as many"
    assert found["midpoint", 4].accuracy == result.trained_accuracy
    assert result.trained_evaluations == 8
    for tolerance in (1e-1, 1e-3):
        model.set_solver("bosh3", solver_steps=1, rtol=tolerance, atol=tolerance, per_sample=True)
        counts = timm_ssog.trace_solve(model, photos(3)).evaluations
        row = found["bosh3", tolerance]
        assert (row.least, row.most, row.evaluations) == (counts.min(), counts.max(), counts.double().mean())
        with torch.no_grad():
            assert row.accuracy == pytest.approx(float((model(photos(3)).argmax(1) == labels).float().mean()))
    assert found["bosh3", 1e-3].flips == 0.0
    assert "Half the evaluations cost" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["trained"] == "midpoint x 4"
    assert analysis.draw_anytime(result).axes[0].get_xlabel() == "evaluations of the velocity per image"
    with pytest.raises(ValueError, match="one label each"):
        analysis.anytime(model, photos(3), labels[:2])
    with pytest.raises(ValueError, match="solvers must be one of"):
        analysis.anytime(model, photos(3), labels, solvers=("dopri8",))


@pytest.mark.parametrize("kind", ["", "_looped", "_ode"])
def test_figures_are_drawn(kind, tmp_path):
    model = build(kind, depth=2 if not kind else 1)
    for figure, panels in (
        (analysis.kernel_atlas(model, 64), 2 * len(model.blocks) + len(model.blocks)),
        (analysis.receptive_field(model, photos(3)), 2),
        (analysis.trajectory(model, photos(3)), 2),
    ):
        assert len(figure.axes) == panels  # colour bars are axes too
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5000


def test_atlas_draws_the_centre_tokens_response_to_impulses():
    model = build("", depth=2, num_components=3, img_size=(56, 40))
    figure = analysis.kernel_atlas(model, (56, 40))
    rows, columns = model.blocks[1].mixer.kernels(7, 5)
    impulses = torch.eye(35).reshape(35, 7, 5, 1, 1).expand(-1, -1, -1, 2, 1)
    response = timm_ssog.separable_mix(impulses, rows, columns)[:, 3, 2, :, 0].detach()
    images = [axis.images[0] for axis in figure.axes if axis.images]
    assert len(images) == 4
    for head in range(2):
        drawn = torch.as_tensor(images[2 + head].get_array())
        torch.testing.assert_close(drawn, response[:, head].reshape(7, 5))
        low, high = images[2 + head].get_clim()
        assert low == -high < 0
    with pytest.raises(ValueError, match="this model has a different mixer"):
        analysis.kernel_atlas(build("", mixer="attention"), 32)


def test_receptive_field_is_the_patch_where_nothing_mixes_and_the_jacobian_where_it_does():
    drawn = analysis.receptive_field(build("", depth=1, mixer="identity"), photos(3)).axes[0].images[0].get_array()
    outside = torch.ones(32, 32, dtype=torch.bool)
    outside[16:24, 16:24] = False
    drawn = torch.as_tensor(drawn)
    assert bool((drawn[outside] == -6).all())
    assert bool((drawn[~outside] > -3).all())

    model = build("", depth=1)
    images = photos(24)
    drawn = torch.as_tensor(analysis.receptive_field(model, images).axes[0].images[0].get_array())

    def centre(image: Tensor) -> Tensor:
        return model.evolve(model.embed(image[None]), [], 1)[0][0, 2, 2]

    squares = torch.stack([torch.func.jacrev(centre)(image).square().sum((0, 1)) for image in images])
    effect = squares.mean(0).sqrt()
    exact = (effect / effect.max()).log10().detach()
    # a random projection of 24 images: within a factor of about 1.5
    assert float((drawn - exact).abs().mean()) < 0.1
    assert float((drawn - exact).abs().max()) < 0.5
    with pytest.raises(ValueError, match="got none"):
        analysis.receptive_field(model, images[:0])


def test_modes_of_single_modules_survive_a_report():
    model = build().train()
    model.pos_drop.eval()
    timm_ssog.trace_solve(model, photos(3))
    assert model.training
    assert not model.pos_drop.training


@pytest.mark.parametrize("labels", [torch.zeros(3, 1), torch.zeros(1), torch.zeros(2)])
def test_report_wants_one_label_per_image(labels):
    with pytest.raises(ValueError, match="one label each, got 3 images"):
        analysis.ode_report(build(), photos(3), labels)


def test_report_refuses_logits_that_are_not_finite():
    with pytest.raises(ValueError, match="NaN or infinite"):
        analysis.ode_report(build(), photos(3) * float("nan"), steps=(1,))


def test_a_report_of_a_certified_model_shows_both_growths() -> None:
    model = build(norm_layer="centrenorm", horizon=2.0)
    report = analysis.ode_report(model, photos(2), steps=(2,), solvers=("euler",))
    assert report.growth == pytest.approx(float(timm_ssog.local_growth(model, photos(2)).max()))
    certified = timm_ssog.certify(model, 32)
    assert report.log10_certified_growth == certified.log10_growth
    assert report.growth is not None
    assert 0 < report.growth <= certified.growth
    assert f"{report.growth:.3g} at these images, certified at most 10^{report.log10_certified_growth:.1f}" in str(
        report
    )
    assert report.to_dict()["growth"] == report.growth
    for other in (build(), build(norm_layer="centrenorm", mixer="attention")):
        report = analysis.ode_report(other, photos(2), steps=(2,), solvers=("euler",))
        assert report.growth is None
        assert report.log10_certified_growth is None
        assert "certified" not in str(report)
