"""Adaptive, per-sample and adjoint solves against closed forms, torchdiffeq and direct backpropagation."""

import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdiffeq import odeint

from timm_ssog.errors import SolveError
from timm_ssog.layers import Block, SeparableMixer
from timm_ssog.ode import (
    ADAPTIVE_SOLVERS,
    PER_SAMPLE_SOLVERS,
    Solver,
    join_traces,
    solve_adaptive,
    solve_fixed_adjoint,
    solve_per_sample,
)
from timm_ssog.runge_kutta import TABLEAUS, advance

EVALUATIONS_PER_STEP = {"dopri5": 6, "dopri8": 13, "bosh3": 3, "fehlberg2": 2, "adaptive_heun": 1}
EVALUATIONS_PER_SAMPLE_STEP = {"dopri5": 6, "bosh3": 3, "adaptive_heun": 2}

Solve = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def linear_problem(batch: int = 3) -> tuple[Callable[[Tensor], Tensor], Tensor, Callable[[float], Tensor]]:
    """dx/dt = x A, a damped rotation, whose solution is x exp(A t)."""
    matrix = torch.randn(5, 5, dtype=torch.float64)
    matrix = (matrix - matrix.T) - 0.3 * torch.eye(5, dtype=torch.float64)
    x = torch.randn(batch, 2, 2, 5, dtype=torch.float64)
    return lambda state: state @ matrix, x, lambda time: x @ torch.linalg.matrix_exp(matrix * time)


def ssog_block(dim: int = 16, grid: int = 4, dtype: torch.dtype = torch.float64) -> Block:
    return Block(SeparableMixer(dim, 2, (grid, grid)), dim).to(dtype)


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max())


@pytest.mark.parametrize(
    ("solve", "solver", "tolerances"),
    [
        (solve_adaptive, "dopri5", (1e-3, 1e-8)),
        (solve_adaptive, "dopri8", (1e-2, 1e-9)),
        (solve_adaptive, "bosh3", (1e-3, 1e-6)),
        (solve_adaptive, "adaptive_heun", (1e-2, 1e-4)),
        (solve_adaptive, "fehlberg2", (1e-4, 1e-6)),
        (solve_per_sample, "dopri5", (1e-3, 1e-8)),
        (solve_per_sample, "bosh3", (1e-3, 1e-6)),
        (solve_per_sample, "adaptive_heun", (1e-2, 1e-4)),
    ],
)
def test_error_follows_the_tolerance_to_the_matrix_exponential(
    solve: Solve, solver: str, tolerances: tuple[float, float]
) -> None:
    velocity, x, exact = linear_problem()
    times = [0.5, 1.0, 2.75]
    errors = []
    for tolerance in tolerances:
        states, trace = solve(
            velocity, x, times, Solver(solver, rtol=tolerance, atol=tolerance, max_evaluations=100_000)
        )
        assert len(states) == 2
        errors.append(max(largest_difference(s, exact(t - 0.5)) for s, t in zip(states, times[1:], strict=True)))
        # local errors add up over the interval; Fehlberg's estimate is for a better method than the one that steps
        assert errors[-1] < (10_000 if solver == "fehlberg2" else 100) * tolerance
        assert torch.as_tensor(trace.error_estimate).max() <= 1
    loose, tight = tolerances
    assert errors[1] < 10 * tight / loose * errors[0]


@pytest.mark.parametrize("solver", PER_SAMPLE_SOLVERS)
def test_per_sample_solves_the_logistic_equation_from_many_starts(solver: str) -> None:
    x = torch.linspace(1e-3, 2.5, 40, dtype=torch.float64).reshape(40, 1, 1, 1)
    settings = ([0, 4], Solver(solver, rtol=1e-5, atol=1e-7, max_evaluations=10_000))
    (state,), trace = solve_per_sample(lambda s: s * (1 - s), x, *settings, together=True)
    growth = math.exp(4)
    torch.testing.assert_close(state, x * growth / (1 + x * (growth - 1)), rtol=1e-3, atol=0)
    assert isinstance(trace.evaluations, Tensor)
    assert len(trace.evaluations.unique()) > 1


def test_per_sample_agrees_with_torchdiffeq_on_the_ssog_velocity() -> None:
    block = ssog_block().requires_grad_(False)
    kernels = block.mixer.kernels(4, 4)
    x = torch.randn(3, 4, 4, 16, dtype=torch.float64)
    times = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    reference = odeint(lambda _, s: block.delta(s, kernels), x, times, rtol=1e-10, atol=1e-11, method="dopri8")
    assert isinstance(reference, Tensor)
    for solver, tolerance, allowed in (("dopri5", 1e-8, 1e-6), ("bosh3", 1e-5, 1e-3), ("adaptive_heun", 1e-3, 1e-1)):
        for together in (False, True):
            states, _ = solve_per_sample(
                lambda s: block.delta(s, kernels),
                x,
                times.tolist(),
                Solver(solver, rtol=tolerance, atol=tolerance, max_evaluations=50_000),
                together=together,
            )
            for state, expected in zip(states, reference[1:], strict=True):
                assert largest_difference(state, expected) < allowed * float(expected.abs().max())


def test_a_single_sample_takes_the_evaluations_of_torchdiffeq() -> None:
    block = ssog_block().requires_grad_(False)
    x = torch.randn(1, 4, 4, 16, dtype=torch.float64)
    for tolerance in (1e-3, 1e-6):
        _, ours = solve_per_sample(
            block.delta, x, [0, 12], Solver("dopri5", rtol=tolerance, atol=tolerance, max_evaluations=10_000)
        )
        _, theirs = solve_adaptive(
            block.delta, x, [0, 12], Solver("dopri5", rtol=tolerance, atol=tolerance, max_evaluations=10_000)
        )
        assert isinstance(ours.evaluations, Tensor)
        assert int(ours.evaluations[0]) == pytest.approx(theirs.evaluations, rel=0.2)


def stiff_among_easy(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The SSoG velocity, slowed or sped up by a factor that travels in the last channel; sample 17 is the stiff one."""
    block = ssog_block(dtype=dtype).requires_grad_(False)
    kernels = block.mixer.kernels(4, 4)

    def velocity(state: Tensor) -> Tensor:
        tokens, rate = state[..., :-1], state[..., -1:]
        return torch.cat([rate * (block.delta(tokens, kernels) - tokens), torch.zeros_like(rate)], dim=-1)

    x = torch.randn(64, 4, 4, 17, dtype=dtype)
    x[..., -1] = 0.2
    x[17, ..., -1] = 20.0
    return velocity, x


@pytest.mark.parametrize("solver", PER_SAMPLE_SOLVERS)
def test_a_sample_is_solved_the_same_alone_and_next_to_a_stiff_one(solver: str) -> None:
    velocity, x = stiff_among_easy(torch.float32)
    (batched,), trace = solve_per_sample(
        velocity, x, [0, 3], Solver(solver, rtol=1e-3, atol=1e-4, max_evaluations=10_000)
    )
    assert isinstance(trace.evaluations, Tensor)
    assert trace.evaluations[17] > 3 * trace.evaluations[:17].max()
    for sample in (0, 16, 17, 18, 63):
        (alone,), own = solve_per_sample(
            velocity, x[sample : sample + 1], [0, 3], Solver(solver, rtol=1e-3, atol=1e-4, max_evaluations=10_000)
        )
        assert torch.equal(alone[0], batched[sample])
        assert isinstance(own.evaluations, Tensor)
        assert isinstance(own.rejected, Tensor)
        assert isinstance(trace.rejected, Tensor)
        assert own.evaluations[0] == trace.evaluations[sample]
        assert own.rejected[0] == trace.rejected[sample]
        assert own.times[0] == trace.times[sample]
    # what this avoids: with one clock for all, batch-mates decide
    (shared,), _ = solve_adaptive(velocity, x, [0, 3], Solver("dopri5", rtol=1e-3, atol=1e-4, max_evaluations=10_000))
    (alone,), _ = solve_adaptive(
        velocity, x[:1], [0, 3], Solver("dopri5", rtol=1e-3, atol=1e-4, max_evaluations=10_000)
    )
    assert largest_difference(shared[0], alone[0]) > 1e-6


def test_samples_evaluated_together_agree_up_to_rounding() -> None:
    velocity, x = stiff_among_easy(torch.float64)
    settings = ([0, 1, 3], Solver("dopri5", rtol=1e-5, atol=1e-6, max_evaluations=10_000))
    together, trace = solve_per_sample(velocity, x, *settings, together=True)
    apart, own = solve_per_sample(velocity, x, *settings)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-9)
    torch.testing.assert_close(trace.evaluations, own.evaluations, rtol=0, atol=0)


def test_finished_samples_are_not_evaluated_again() -> None:
    velocity, x = stiff_among_easy(torch.float64)
    seen = 0

    def counted(state: Tensor) -> Tensor:
        nonlocal seen
        seen += len(state)
        return velocity(state)

    for together in (False, True):
        seen = 0
        _, trace = solve_per_sample(
            counted, x, [0, 1, 3], Solver("dopri5", rtol=1e-4, atol=1e-5, max_evaluations=10_000), together=together
        )
        assert isinstance(trace.evaluations, Tensor)
        assert seen == trace.evaluations.sum()


@pytest.mark.parametrize("solver", ADAPTIVE_SOLVERS)
def test_counts_of_a_shared_solve_add_up(solver: str) -> None:
    # a kink at 1, so that steps get rejected; two evaluations to start with, and one where the second interval begins
    calls = 0

    def velocity(state: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.where(state < 1, torch.ones_like(state), 100 * (1.5 - state))

    _, trace = solve_adaptive(
        velocity,
        torch.zeros(2, 3),
        [0, 1, 2],
        Solver(solver, rtol=1e-4, atol=1e-5, max_evaluations=10_000),
        keep_states=True,
    )
    assert isinstance(trace.accepted, int)
    assert isinstance(trace.rejected, int)
    assert calls == trace.evaluations == 3 + EVALUATIONS_PER_STEP[solver] * (trace.accepted + trace.rejected)
    assert trace.rejected > 0
    assert len(trace.times) == trace.accepted
    assert trace.states is not None
    assert len(trace.states) == trace.accepted
    assert {1.0, 2.0} <= {time for time in trace.times if isinstance(time, float)}
    assert trace.times == sorted(trace.times)
    assert f"{trace.evaluations} evaluations" in str(trace)
    assert f"{trace.rejected} rejected" in str(trace)


@pytest.mark.parametrize("solver", PER_SAMPLE_SOLVERS)
def test_counts_of_a_per_sample_solve_add_up(solver: str) -> None:
    x = torch.tensor([[0.0], [0.9], [0.99], [1.2]])

    def velocity(state: Tensor) -> Tensor:
        return torch.where(state < 1, torch.ones_like(state), 100 * (1.5 - state))

    states, trace = solve_per_sample(
        velocity, x, [0, 1, 2], Solver(solver, rtol=1e-4, atol=1e-5, max_evaluations=10_000), keep_states=True
    )
    assert isinstance(trace.accepted, Tensor)
    assert isinstance(trace.rejected, Tensor)
    tries = trace.accepted + trace.rejected
    torch.testing.assert_close(trace.evaluations, 2 + EVALUATIONS_PER_SAMPLE_STEP[solver] * tries)
    assert trace.rejected.max() > 0
    assert trace.states is not None
    for sample in range(4):
        times, kept = trace.times[sample], trace.states[sample]
        assert isinstance(times, list)
        assert len(times) == len(kept) == trace.accepted[sample]
        assert times == sorted(times)
        assert times[-1] == 2.0
        torch.testing.assert_close(kept[times.index(1.0)], states[0][sample], rtol=0, atol=0)
        torch.testing.assert_close(kept[-1], states[1][sample], rtol=0, atol=0)
    assert str(trace).startswith("4 samples, each: ")


@pytest.mark.parametrize("solve", [solve_adaptive, solve_per_sample])
def test_a_kept_trajectory_lies_on_the_solution(solve: Solve) -> None:
    velocity, x, exact = linear_problem(1)
    _, trace = solve(
        velocity,
        x.requires_grad_(),
        [0, 2],
        Solver("dopri5", rtol=1e-7, atol=1e-8, max_evaluations=10_000),
        keep_states=True,
    )
    times, states = (trace.times, trace.states) if solve is solve_adaptive else (trace.times[0], trace.states[0])
    assert len(times) > 5
    for time, state in zip(times, states, strict=True):
        assert not state.requires_grad
        assert largest_difference(state.reshape(x.shape), exact(time)) < 1e-5


@pytest.mark.parametrize("solve", [solve_adaptive, solve_per_sample])
def test_dense_times_change_no_accuracy_and_consecutive_solves_join(solve: Solve) -> None:
    velocity, x, exact = linear_problem()
    times = [2 * step / 25 for step in range(26)]
    states, _ = solve(velocity, x, times, Solver("dopri5", rtol=1e-6, atol=1e-6, max_evaluations=10_000))
    for time, state in zip(times[1:], states, strict=True):
        assert largest_difference(state, exact(time)) < 1e-5

    (middle,), first = solve(
        velocity, x, [0, 1], Solver("dopri5", rtol=1e-6, atol=1e-6, max_evaluations=10_000), keep_states=True
    )
    (end,), second = solve(
        velocity, middle, [1, 2], Solver("dopri5", rtol=1e-6, atol=1e-6, max_evaluations=10_000), keep_states=True
    )
    assert largest_difference(end, states[-1]) < 1e-5
    joined = join_traces([first, second])
    torch.testing.assert_close(
        torch.as_tensor(joined.evaluations), torch.as_tensor(first.evaluations) + torch.as_tensor(second.evaluations)
    )
    joined_times, expected = (
        (joined.times, first.times + second.times)
        if solve is solve_adaptive
        else (joined.times[1], first.times[1] + second.times[1])
    )
    assert joined_times == expected
    assert torch.as_tensor(joined.error_estimate).max() == max(
        torch.as_tensor(first.error_estimate).max(), torch.as_tensor(second.error_estimate).max()
    )
    assert joined.states is not None
    kept = joined.states if solve is solve_adaptive else joined.states[1]
    assert len(kept) == len(expected)


def test_per_sample_gradients_are_those_of_the_steps() -> None:
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[0.3, -0.2], [1.5, 0.9], [-2.0, 0.1]], dtype=torch.float64, requires_grad=True)

    # the step sizes, constants to autograd, move in a finite difference: tight tolerances make that negligible
    def solve(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        settings = ([0, 0.2, 0.5], Solver("dopri5", rtol=1e-11, atol=1e-11, max_evaluations=9999))
        return tuple(solve_per_sample(lambda s: torch.tanh(s @ weight), x, *settings, together=True)[0])

    assert torch.autograd.gradcheck(solve, (x, weight), eps=1e-4, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("together", [False, True])
def test_a_rejected_overflow_leaves_no_trace_in_the_gradient(together: bool) -> None:
    rate = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    # x' = rate sqrt(1 - x) is solved by 1 - (root - rate t / 2)^2, root^2 = 1 - x(0); trials end beyond 1, in NaN
    root = torch.linspace(1, 1.5, 30, dtype=torch.float64)[:, None]
    x = 1 - root**2
    tried_nan = 0

    def velocity(state: Tensor) -> Tensor:
        nonlocal tried_nan
        slope = rate * (1 - state).sqrt()
        tried_nan += int(slope.isnan().sum())
        return slope

    (state,), trace = solve_per_sample(
        velocity, x, [0, 1.9], Solver("bosh3", rtol=1e-2, atol=1e-2, max_evaluations=1000), together=together
    )
    assert tried_nan > 0
    assert isinstance(trace.rejected, Tensor)
    assert 0 < int((trace.rejected > 0).sum()) < 30
    torch.testing.assert_close(state, 1 - (root - 0.95) ** 2, rtol=0, atol=0.05)
    state.sum().backward()
    assert rate.grad is not None
    assert float(rate.grad) == pytest.approx(float((1.9 * (root - 0.95)).sum()), rel=0.2)


def ssog_gradients(
    block: Block, x: Tensor, solve: Callable[[Callable[[Tensor], Tensor], Tensor, list[Tensor]], list[Tensor]]
) -> dict[str, Tensor]:
    """Gradients of a loss on the states; kernels are built once, an adjoint gets them instead of their parameters."""
    block.zero_grad()
    x = x.detach().clone().requires_grad_()
    kernels = block.mixer.kernels(*x.shape[1:3])
    raw = ("mixer.offset", "mixer.width", "mixer.amplitude")
    parameters = [*(p for name, p in block.named_parameters() if name not in raw), *kernels]
    states = solve(lambda s: block.delta(s, kernels), x, parameters)
    sum((state.square().mean() * (1 + index) for index, state in enumerate(states)), torch.zeros(())).backward()
    gradients = {name: p.grad for name, p in block.named_parameters()} | {"x": x.grad}
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def relative_differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    assert a.keys() == b.keys()
    return {name: float((a[name] - b[name]).norm() / b[name].norm()) for name in a}


def test_adjoint_gradients_are_those_of_backpropagation() -> None:
    block = ssog_block()
    x = torch.randn(3, 4, 4, 16, dtype=torch.float64)
    settings = ([0, 5, 12], Solver("dopri5", rtol=1e-6, atol=1e-8, max_evaluations=5000))
    direct = ssog_gradients(block, x, lambda velocity, x, _: solve_adaptive(velocity, x, *settings)[0])
    assert set(direct) == {"x", *(name for name, _ in block.named_parameters())}
    adjoint = ssog_gradients(block, x, lambda velocity, x, p: solve_adaptive(velocity, x, *settings, parameters=p)[0])
    per_sample = ssog_gradients(block, x, lambda velocity, x, _: solve_per_sample(velocity, x, *settings)[0])
    for gradients in (adjoint, per_sample):
        assert max(relative_differences(gradients, direct).values()) < 1e-3


@pytest.mark.parametrize("solver", tuple(TABLEAUS))
def test_fixed_steps_with_the_adjoint(solver: str) -> None:
    block = ssog_block()
    x = torch.randn(2, 4, 4, 16, dtype=torch.float64)
    tableau = TABLEAUS[solver]
    times = [0.0, 0.4, 2.0]

    def by_hand(velocity: Callable[[Tensor], Tensor], x: Tensor, step_size: float) -> list[Tensor]:
        states = []
        for start, end in pairwise(times):
            steps = round((end - start) / step_size)
            for _ in range(steps):
                slopes: list[Tensor] = []
                for row in tableau.stages:
                    slopes.append(velocity(advance(x, slopes, row, (end - start) / steps)))
                x = advance(x, slopes, tableau.step, (end - start) / steps)
            states.append(x)
        return states

    differences = []
    for step_size in (0.2, 0.1):
        direct = ssog_gradients(block, x, lambda velocity, x, _, h=step_size: by_hand(velocity, x, h))
        adjoint = ssog_gradients(
            block,
            x,
            lambda velocity, x, p, h=step_size: solve_fixed_adjoint(
                velocity, x, times, Solver(solver), step_size=h, parameters=p
            )[0],
        )
        differences.append(max(relative_differences(adjoint, direct).values()))
    # equal up to the error of the method, which falls with the step
    assert differences[1] < differences[0] * 0.75
    assert differences[1] < {1: 0.1, 2: 1e-2, 3: 1e-3, 4: 1e-5}[tableau.order]

    states, trace = solve_fixed_adjoint(
        block.delta, x, times, Solver(solver), step_size=0.2, parameters=list(block.parameters())
    )
    torch.testing.assert_close(states, by_hand(block.delta, x, 0.2), rtol=1e-12, atol=1e-12)
    assert (trace.accepted, trace.rejected, trace.evaluations) == (10, 0, 10 * len(tableau.stages))
    assert trace.times == pytest.approx([0.2 * step for step in range(1, 11)])
    assert trace.error_estimate is None
    assert "error estimate none" in str(trace)


def test_fixed_steps_may_be_uneven() -> None:
    velocity, x, _ = linear_problem()
    times = [0.0, 0.13, 0.63, 1.13]
    states, trace = solve_fixed_adjoint(velocity, x, times, Solver("euler"), step_size=0.5, parameters=[])
    expected = x
    for (start, end), state in zip(pairwise(times), states, strict=True):
        expected = expected + (end - start) * velocity(expected)
        torch.testing.assert_close(state, expected)
    assert trace.times == times[1:]


def test_an_adjoint_solve_wants_every_tensor_once() -> None:
    block = ssog_block()
    x = torch.randn(1, 4, 4, 16, dtype=torch.float64)
    kernels = block.mixer.kernels(4, 4)
    raw = ("mixer.offset", "mixer.width", "mixer.amplitude")
    weights = [p for name, p in block.named_parameters() if name not in raw]
    settings = ([0, 1], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=1000))
    wrong: list[tuple[list[Any], str]] = [
        ([*block.parameters(), *kernels], "count twice"),
        ([*weights, *kernels, kernels[0]], "every tensor only once"),
        ([*weights], "gets no gradient"),
        ([*weights[1:], *kernels], "gets no gradient"),
    ]
    for parameters, message in wrong:
        with pytest.raises(ValueError, match=message):
            solve_adaptive(lambda s: block.delta(s, kernels), x, *settings, parameters=parameters)
        with pytest.raises(ValueError, match=message):
            solve_fixed_adjoint(
                lambda s: block.delta(s, kernels), x, [0, 1], Solver("rk4"), step_size=1.0, parameters=parameters
            )
    # without gradients there is nothing to lose
    with torch.no_grad():
        solve_adaptive(lambda s: block.delta(s, kernels), x, *settings, parameters=[])


def test_the_adjoint_runs_backward_under_the_autocast_of_forward() -> None:
    weight = nn.Parameter(torch.randn(4, 4) / 2)
    seen: list[torch.dtype] = []

    def velocity(state: Tensor) -> Tensor:
        product = state @ weight
        seen.append(product.dtype)
        return product

    x = torch.randn(2, 3, 4, requires_grad=True)
    for solve in (
        lambda: solve_adaptive(
            velocity, x, [0, 1], Solver("bosh3", rtol=1e-1, atol=1e-1, max_evaluations=1000), parameters=[weight]
        ),
        lambda: solve_fixed_adjoint(velocity, x, [0, 1], Solver("rk4"), step_size=0.5, parameters=[weight]),
    ):
        seen.clear()
        weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            (state,), _ = solve()
            # a cast cached without gradient in the forward solve would cut this off
            assert (x.detach() @ weight).requires_grad
        assert state.dtype == torch.float32
        forward = len(seen)
        state.sum().backward()
        assert len(seen) > forward
        assert set(seen) == {torch.bfloat16}
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0


SOLVES: dict[str, Solve] = {
    "adaptive": lambda velocity, x, max_evaluations=1000: solve_adaptive(
        velocity, x, [0, 2], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=max_evaluations)
    ),
    "adjoint": lambda velocity, x, max_evaluations=1000: solve_adaptive(
        velocity, x, [0, 2], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=max_evaluations), parameters=[]
    ),
    "per sample": lambda velocity, x, max_evaluations=1000: solve_per_sample(
        velocity, x, [0, 2], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=max_evaluations)
    ),
    "together": lambda velocity, x, max_evaluations=1000: solve_per_sample(
        velocity, x, [0, 2], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=max_evaluations), together=True
    ),
    "fixed": lambda velocity, x, max_evaluations=1000: solve_fixed_adjoint(
        velocity, x, [0, 1, 2], Solver("rk4"), step_size=0.1, parameters=[]
    ),
}


@pytest.mark.parametrize("solve", SOLVES.values(), ids=SOLVES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_named_with_the_time(solve: Solve, bad: float) -> None:
    x = torch.ones(4, 2)
    x[2, 1] = bad
    with pytest.raises(SolveError, match=r"NaN or infinity in 1 of 4 samples \(2\), at time 0 after 0") as raised:
        solve(lambda s: -s, x)
    assert (raised.value.time, raised.value.evaluations) == (0, 0)

    # x grows by 1 per unit of time; the velocity breaks at 2.25, which is time 1.25
    with pytest.raises(SolveError, match=r"NaN or infini.* evaluations of the velocity\. Check the input") as raised:
        solve(lambda s: torch.where(s < 2.25, torch.ones_like(s), bad), torch.ones(3, 2, dtype=torch.float64))
    assert 0 <= raised.value.time <= 2
    with pytest.raises(SolveError, match="NaN or infini"):
        solve(lambda s: s * bad, torch.ones(3, 2))


@pytest.mark.parametrize("solve", [SOLVES[name] for name in ("adaptive", "adjoint", "per sample", "together")])
def test_a_solve_gives_up_with_the_time_reached(solve: Solve) -> None:
    with pytest.raises(SolveError, match="Raise max_evaluations") as raised:
        solve(lambda s: 1e3 * (s.cos() - s), torch.ones(3, 2), max_evaluations=100)
    assert 0 < raised.value.time < 2
    assert 90 < raised.value.evaluations <= 100

    # a solution that becomes infinite at time 1
    with pytest.raises(SolveError, match=r"step size fell to .*(raise rtol|fixed-step)|NaN or infinite") as raised:
        solve(lambda s: s**2, torch.ones(1, 2, dtype=torch.float64), max_evaluations=100_000)
    assert raised.value.time == pytest.approx(1.0, abs=1e-3)

    # a velocity that changes at every call can't be followed
    with pytest.raises(SolveError, match="step size fell to"):
        solve(lambda s: 1e14 * torch.randn_like(s), torch.ones(2, 2, dtype=torch.float64), max_evaluations=100_000)


def test_trouble_in_the_backward_solve_is_named_too() -> None:
    x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    settings = ([0, 1], Solver("dopri5", rtol=1e-6, atol=1e-8, max_evaluations=100))
    (state,), _ = solve_adaptive(lambda s: -s, x, *settings, parameters=[])
    with pytest.raises(SolveError, match="NaN or infinite in the adjoint solve") as raised:
        (state * math.nan).sum().backward()
    assert raised.value.time == 1

    rate = 1.0
    (state,), _ = solve_adaptive(lambda s: -rate * s, x, *settings, parameters=[])
    rate = 1e4
    with pytest.raises(SolveError, match="used up in the adjoint solve") as raised:
        state.sum().backward()
    assert raised.value.evaluations == 100
    assert 0 < raised.value.time <= 1


def test_the_sample_at_fault_is_named() -> None:
    x = torch.ones(3, 1, dtype=torch.float64)
    x[1] = 50.0
    with pytest.raises(SolveError, match=r"are not enough \(sample 1\)"):
        solve_per_sample(lambda s: -s * s.abs(), x, [0, 9], Solver("dopri5", rtol=1e-6, atol=1e-6, max_evaluations=120))


def test_bad_arguments_are_refused() -> None:
    x = torch.ones(2, 3)

    def velocity(state: Tensor) -> Tensor:
        return -state

    for solve in (solve_adaptive, solve_per_sample):
        good: dict[str, Any] = {"solver": "dopri5", "rtol": 1e-3, "atol": 1e-3, "max_evaluations": 100}
        solve(velocity, x, [0, 1], Solver(**good))
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"solver": "dopri55"}, "Did you mean 'dopri5'"),
            ({"solver": "rk4"}, "solver must be one of"),
            ({"rtol": -1e-3}, "rtol must be positive and finite"),
            ({"rtol": 0}, "rtol must be"),
            ({"atol": math.inf}, "atol must be"),
            ({"atol": math.nan}, "atol must be"),
            ({"atol": "1e-3"}, "atol must be"),
            ({"max_evaluations": 0}, "max_evaluations must be an integer"),
        ]
        for change, message in wrong:
            with pytest.raises(ValueError, match=message):
                solve(velocity, x, [0, 1], Solver(**{**good, **change}))
        for times, message in (
            ([0], "times must be at least two"),
            ([0, 1, 1], "each above the one before"),
            ([1, 0], "each above the one before"),
            ([0, math.nan], "finite numbers"),
        ):
            with pytest.raises(ValueError, match=message):
                solve(velocity, x, times, Solver(**good))
        for dtype in (torch.float16, torch.bfloat16, torch.int64):
            with pytest.raises(ValueError, match="must be float32"):
                solve(velocity, x.to(dtype), [0, 1], Solver(**good))
    with pytest.raises(ValueError, match="Did you mean 'dopri5'"):
        solve_per_sample(velocity, x, [0, 1], Solver("dopri8", rtol=1e-3, atol=1e-3, max_evaluations=100))
    with pytest.raises(ValueError, match=f"must be one of {', '.join(map(repr, TABLEAUS))}, got 'bosh3'"):
        solve_fixed_adjoint(velocity, x, [0, 1], Solver("bosh3"), step_size=1.0, parameters=[])
    with pytest.raises(ValueError, match="step_size must be"):
        solve_fixed_adjoint(velocity, x, [0, 1], Solver("heun"), step_size=-1.0, parameters=[])


@pytest.mark.parametrize("solve", SOLVES.values(), ids=SOLVES)
def test_an_empty_batch_is_solved_and_asks_for_nothing(solve: Solve) -> None:
    def velocity(state: Tensor) -> Tensor:
        raise AssertionError("nothing to evaluate")

    states, trace = solve(velocity, torch.zeros(0, 4, 4, 8))
    assert all(state.shape == (0, 4, 4, 8) for state in states)
    assert torch.as_tensor(trace.evaluations).sum() == 0
    str(trace)


@pytest.mark.parametrize("solve", SOLVES.values(), ids=SOLVES)
def test_a_solve_stands_still_where_the_velocity_is_zero(solve: Solve) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    states, _ = solve(lambda s: s * 0, x)
    torch.testing.assert_close(states[-1], x)
    states[-1].sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2, 3))
    with torch.inference_mode():
        solve(lambda s: -s, torch.randn(2, 3))


def test_a_solve_is_not_frozen_into_a_trace() -> None:
    class Solved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return solve_adaptive(lambda s: -s, x, [0, 1], Solver("dopri5", rtol=1e-3, atol=1e-3, max_evaluations=100))[
                0
            ][0]

    warnings.simplefilter("ignore")
    with pytest.raises(SolveError, match="can't be traced"):
        torch.jit.trace(Solved(), torch.ones(1, 2))
    with pytest.raises(SolveError, match=r"can't be traced or exported.*fixed-step"):
        torch.export.export(Solved(), (torch.ones(1, 2),), strict=False)


def test_a_compiled_model_solves_the_same() -> None:
    weight = torch.randn(3, 3, dtype=torch.float64) / 2

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        x = 2 * x
        settings = ([0.0, 1.0], Solver("dopri5", rtol=1e-6, atol=1e-6, max_evaluations=1000))
        (shared,), _ = solve_adaptive(lambda s: torch.tanh(s @ weight), x, *settings)
        (own,), _ = solve_per_sample(lambda s: torch.tanh(s @ weight), x, *settings)
        return shared + 1, own + 1

    warnings.simplefilter("ignore")
    compiled = torch.compile(model, backend="eager")
    for scale in (1.0, 30.0):
        x = scale * torch.randn(4, 3, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)


def test_a_solve_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SolveError("The step size fell", 1.5, 42, "Raise rtol.")))
    assert (error.time, error.evaluations) == (1.5, 42)
    assert str(error) == "The step size fell, at time 1.5 after 42 evaluations of the velocity. Raise rtol."
