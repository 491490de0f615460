"""What a model does inside: solver traces, the "is it an ODE?" report, and figures of kernels and trajectories."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from timm_ssog.certificates import certify, local_growth
from timm_ssog.errors import require_choice
from timm_ssog.layers import CentreNorm, SeparableMixer, shared_kernels
from timm_ssog.ode import PER_SAMPLE_SOLVERS, SolveTrace, join_traces
from timm_ssog.ops.naive import dense_operator
from timm_ssog.runge_kutta import TABLEAUS, advance, as_state
from timm_ssog.vit_ssog import OdeVitSsog, VitSsog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCE_STEPS = 96
"""Steps of rk4 that stand for the exact solution in `ode_report`."""

GROWTH_IMAGES = 8
"""Images that the growth over the depth is measured at in `ode_report`."""

STEP_PARTS = 8
"""Steps of rk4 within one step of a model that stand for the exact flow over that step."""


@torch.no_grad()
def trace_solve(model: OdeVitSsog, images: Tensor, keep_states: bool = False) -> SolveTrace:
    """Solve a continuous model for images and report what the solver did.

    For a fixed-step method the error is estimated by step doubling: the largest root mean square over an image of the
    difference from a solve with twice the steps, over ``1 - 2^-order``. For an adaptive method it is the method's own
    scaled estimate.

    Args:
        model: The model, with the solver settings to look at.
        images: (batch, in_chans, height, width).
        keep_states: Also keep the state at each of the model's feature times, (batch, height, width, embed_dim).

    Returns:
        The trace; counts are per image if the model solves per sample.

    Raises:
        ValueError: if the model is not a continuous one.
    """
    _require_continuous(model)
    with _evaluating(model):
        tokens = model.embed(images)
        taps = list(range(model.num_steps)) if keep_states else []
        if not model.is_fixed_step:
            _, states, traces = model.solve(tokens, taps, model.num_steps)
            return dataclasses.replace(join_traces(traces), states=states if keep_states else None)
        end, states = model.evolve(tokens, taps, model.num_steps)
        steps, stages = model.num_steps, len(model.stages)
        order = TABLEAUS[model.solver].order
        with _solving(model, solver_steps=2 * steps):
            finer, _ = model.evolve(tokens, [], 2 * steps)
        distance = (end.float() - finer.float()).flatten(1).square().mean(1).sqrt()
        return SolveTrace(
            evaluations=steps * stages,
            accepted=steps,
            rejected=0,
            times=[(step + 1) * model.step_size for step in range(steps)],
            error_estimate=float(distance.max()) / (1 - 2**-order) if len(distance) else 0.0,
            states=states if keep_states else None,
        )


@dataclass(frozen=True)
class OdeRow:
    """One solver setting in an `OdeReport`: accuracy and flips as fractions of the images, drift in logit spreads."""

    solver: str
    steps: int
    evaluations: int
    accuracy: float | None
    drift: float
    flips: float


@dataclass(frozen=True)
class OdeReport:
    """Whether a trained continuous model solves its equation or has learned its step grid; see `ode_report`."""

    trained: str
    rows: tuple[OdeRow, ...]
    trained_drift: float
    trained_flips: float
    converges: bool
    step_errors: tuple[float, ...]
    remedy: str
    growth: float | None = None
    log10_certified_growth: float | None = None

    @property
    def verdict(self) -> str:
        """The report in one sentence."""
        distance = f"{self.trained_drift:.3g} logit spreads and {self.trained_flips:.1%} of predictions"
        if self.converges:
            return f"The solution converges: {self.trained} is {distance} away from the exact flow."
        return (
            f"Not a solution of its equation: {self.trained} is {distance} away from the exact flow. The network has "
            f"adapted to its step grid; before you treat it as an ODE, {self.remedy}."
        )

    def __str__(self) -> str:
        lines = [f"{'solver':<10} {'steps':>5} {'evals':>6} {'top-1':>7} {'drift':>9} {'flips':>7}"]
        for row in self.rows:
            accuracy = "-" if row.accuracy is None else f"{row.accuracy:.1%}"
            lines.append(
                f"{row.solver:<10} {row.steps:>5} {row.evaluations:>6} {accuracy:>7} {row.drift:>9.2e} "
                f"{row.flips:>7.1%}"
            )
        errors = ", ".join(f"{error:.2g}" for error in self.step_errors)
        lines.append(f"Error of {self.trained} in each step, over the size of the state: {errors}")
        if self.growth is not None:
            lines.append(
                f"Growth of small differences over the depth: {self.growth:.3g} at these images, certified at most "
                f"10^{self.log10_certified_growth:.1f}"
            )
        return "\n".join([*lines, self.verdict])

    def to_dict(self) -> dict:
        """The report as JSON types."""
        return {**asdict(self), "verdict": self.verdict}


@torch.no_grad()
def ode_report(
    model: OdeVitSsog,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    steps: Sequence[int] = (1, 2, 3, 6, 12, 24, 48),
    solvers: Sequence[str] = tuple(TABLEAUS),
    max_drift: float = 0.05,
    max_flips: float = 0.01,
) -> OdeReport:
    """Compare a trained continuous model's predictions across solvers and steps with those of the exact flow.

    The exact flow is rk4 with `REFERENCE_STEPS` steps. *Drift* is the root mean square difference of the logits over
    the reference logits' standard deviation, *flips* the share of predictions that differ. The model passes as an ODE
    if its current setting is within ``max_drift`` and ``max_flips`` of the exact flow (after "ResNet After All",
    arXiv 2007.15386). The *error per step* shows where along the path the distance arises: how far this setting is
    from the exact flow after one step (or the interval to the next feature time) from the state it has reached, as root
    mean squares, over that state. For a model with ``norm_layer="centrenorm"``, whose certificate is of use, the report
    also has the certified *growth* over the depth and the largest that is reached at the first `GROWTH_IMAGES` images.

    Args:
        model: The model, in the solver setting it was trained with.
        images: (batch, in_chans, height, width).
        labels: (batch,), for accuracies.
        steps: Steps to try with each solver.
        solvers: Fixed-step methods to try.
        max_drift: Largest drift of the trained setting.
        max_flips: Largest share of flipped predictions of the trained setting.

    Returns:
        The report, which prints as a table.

    Raises:
        ValueError: if the model is not a continuous one, a number of steps does not fit its blocks, or the logits are
            not finite.
    """
    _require_continuous(model)
    if not len(images) or (labels is not None and labels.shape != (len(images),)):
        shape = None if labels is None else tuple(labels.shape)
        raise ValueError(f"Expected images and one label each, got {len(images)} images and labels of shape {shape}.")
    for solver in solvers:
        require_choice("solvers", solver, tuple(TABLEAUS))
    with _evaluating(model):
        trained = (
            f"{model.solver} x {model.num_steps}" if model.is_fixed_step else f"{model.solver} at rtol {model.rtol:g}"
        )
        as_trained = model(images)
        with _solving(model, solver="rk4", solver_steps=REFERENCE_STEPS, adjoint=False, per_sample=False):
            exact = model(images)
        if not (torch.isfinite(exact).all() and torch.isfinite(as_trained).all()):
            raise ValueError(
                "The logits of these images are NaN or infinite, so there is nothing to compare: check the images and "
                "the weights, or shorten the horizon."
            )
        rows = []
        for solver in solvers:
            for count in steps:
                with _solving(model, solver=solver, solver_steps=count, adjoint=False, per_sample=False):
                    logits = model(images)
                drift, flips = _distance(logits, exact)
                accuracy = None if labels is None else float((logits.argmax(-1) == labels).float().mean())
                rows.append(OdeRow(solver, count, count * len(TABLEAUS[solver].stages), accuracy, drift, flips))
        step_errors = _step_errors(model, images)
    drift, flips = _distance(as_trained, exact)
    converges = drift <= max_drift and flips <= max_flips
    growth = _growths(model, images) if isinstance(model.blocks[0].norm1, CentreNorm) else (None, None)
    return OdeReport(trained, tuple(rows), drift, flips, converges, step_errors, _remedy(model), *growth)


def _growths(model: OdeVitSsog, images: Tensor) -> tuple[float, float] | tuple[None, None]:
    """The largest growth at images, and the decimal logarithm of the certified one; None where there is none."""
    certificate = certify(model, (images.shape[-2], images.shape[-1]))
    if certificate.reason is not None:
        return None, None
    with _evaluating(model):
        return float(local_growth(model, images[:GROWTH_IMAGES]).max()), certificate.log10_growth


def _step_errors(model: OdeVitSsog, images: Tensor) -> tuple[float, ...]:
    tokens = model.embed(images)
    with _solving(model, adjoint=False):
        _, ends = model.evolve(tokens, list(range(model.num_steps)), model.num_steps)
    states = [as_state(state) for state in (tokens, *ends)]
    rule = TABLEAUS["rk4"]
    errors = []
    for index, (state, reached) in enumerate(itertools.pairwise(states)):
        exact = state
        for number, block in enumerate(model.blocks):
            span = model.time_grid.overlap(index, number)
            if not span:
                continue
            kernels = shared_kernels(block, tokens)
            for _ in range(STEP_PARTS):
                slopes: list[Tensor] = []
                for stage in rule.stages:
                    at = advance(exact, slopes, stage, span / STEP_PARTS).to(tokens.dtype)
                    slopes.append(block(at, kernels, residual=False))
                exact = advance(exact, slopes, rule.step, span / STEP_PARTS)
        size = state.square().mean().sqrt().clamp_min(torch.finfo(state.dtype).tiny)
        errors.append(float((reached - exact).square().mean().sqrt() / size))
    return tuple(errors)


def _remedy(model: OdeVitSsog) -> str:
    if model.flow_penalty == "none" or not model.flow_weight:
        return "train it with pre_norm=True and flow_penalty='both' (timm_ssog.flow)"
    missing = "pre_norm=True and " if isinstance(model.norm_pre, nn.Identity) else ""
    return (
        f"train it longer or with {missing}a flow_weight above {model.flow_weight:g}, or solve it with more steps or a "
        f"method of higher order"
    )


def _distance(logits: Tensor, reference: Tensor) -> tuple[float, float]:
    drift = (logits - reference).square().mean().sqrt() / reference.std()
    return float(drift), float((logits.argmax(-1) != reference.argmax(-1)).float().mean())


@dataclass(frozen=True)
class AnytimeRow:
    """A way to solve a trained model: evaluations per image (mean, least, most), accuracy and flips as fractions.

    ``setting`` is the number of steps of a fixed-step method, or the tolerance of an adaptive one.
    """

    solver: str
    setting: float
    evaluations: float
    least: int
    most: int
    accuracy: float
    flips: float


@dataclass(frozen=True)
class Anytime:
    """Accuracy of a trained continuous model against evaluations of its velocity; see `anytime`."""

    trained: str
    trained_evaluations: float
    trained_accuracy: float
    rows: tuple[AnytimeRow, ...]

    def __str__(self) -> str:
        lines = [f"{'solver':<10} {'setting':>10} {'evaluations':>20} {'top-1':>7} {'flips':>7}"]
        for row in self.rows:
            setting = f"x {row.setting:g}" if row.solver in TABLEAUS else f"tol {row.setting:g}"
            spread = "" if row.least == row.most else f" ({row.least} to {row.most})"
            lines.append(
                f"{row.solver:<10} {setting:>10} {f'{row.evaluations:.1f}{spread}':>20} {row.accuracy:>7.1%} "
                f"{row.flips:>7.1%}"
            )
        lines.append(
            f"Trained with {self.trained}: {self.trained_evaluations:g} evaluations, top-1 {self.trained_accuracy:.1%}."
        )
        half = [row for row in self.rows if row.evaluations <= self.trained_evaluations / 2]
        if half:
            best = max(half, key=lambda row: row.accuracy)
            lines.append(
                f"Half the evaluations cost {100 * (self.trained_accuracy - best.accuracy):.1f} points: {best.solver} "
                f"with {best.evaluations:g} evaluations has {best.accuracy:.1%}."
            )
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """The result as JSON types."""
        return asdict(self)


@torch.no_grad()
def anytime(
    model: OdeVitSsog,
    images: Tensor,
    labels: Tensor,
    evaluations: Sequence[int] = (3, 4, 6, 8, 12, 24, 48),
    solvers: Sequence[str] = (*TABLEAUS, "bosh3"),
    tolerances: Sequence[float] = (1.0, 0.3, 0.1, 0.03, 0.01),
) -> Anytime:
    """Measure a trained model's accuracy against the evaluations of its velocity that inference spends.

    Every solver runs on the same weights. Adaptive ones solve each image by itself, so that every image gets the
    evaluations that it needs; *flips* are predictions that differ from those of the exact flow (`ode_report`).

    Args:
        model: A trained model, in the solver setting it was trained with.
        images: (batch, in_chans, height, width).
        labels: (batch,).
        evaluations: Budgets of the fixed-step methods; a method skips those it can't spend in whole steps.
        solvers: Fixed-step methods, and adaptive ones that solve per sample.
        tolerances: Tolerances of the adaptive ones, relative and absolute.

    Returns:
        The rows, which print as a table; `draw_anytime` draws them.

    Raises:
        ValueError: if the model is not a continuous one, a solver is unknown, or there is not one label per image.
    """
    _require_continuous(model)
    if not len(images) or labels.shape != (len(images),):
        raise ValueError(
            f"Expected images and one label each, got {len(images)} images and labels of shape {tuple(labels.shape)}."
        )
    for solver in solvers:
        require_choice("solvers", solver, (*TABLEAUS, *PER_SAMPLE_SOLVERS))

    def right(logits: Tensor) -> float:
        return float((logits.argmax(-1) == labels).float().mean())

    rows = []
    with _evaluating(model):
        trained = f"{model.solver} x {model.num_steps}" if model.is_fixed_step else f"{model.solver}, {model.rtol:g}"
        spent = torch.as_tensor(trace_solve(model, images[:8]).evaluations).double()
        trained_accuracy = right(model(images))
        with _solving(model, solver="rk4", solver_steps=REFERENCE_STEPS, adjoint=False, per_sample=False):
            exact = model(images)
        for solver in solvers:
            if solver not in TABLEAUS:
                for tolerance in tolerances:
                    # one step, so that the solve need not stop in between
                    alone: dict[str, Any] = {"solver_steps": 1, "adjoint": False, "per_sample": True}
                    with _solving(model, solver=solver, rtol=tolerance, atol=tolerance, **alone):
                        end, _, traces = model.solve(model.embed(images), [], 1)
                        logits = model.forward_head(model.norm(end.flatten(1, 2)))
                    counts = torch.as_tensor(join_traces(traces).evaluations)
                    spread = (float(counts.double().mean()), int(counts.min()), int(counts.max()))
                    rows.append(AnytimeRow(solver, tolerance, *spread, right(logits), _distance(logits, exact)[1]))
                continue
            stages = len(TABLEAUS[solver].stages)
            for budget in evaluations:
                steps = budget // stages
                if budget % stages or steps % len(model.blocks):
                    continue
                with _solving(model, solver=solver, solver_steps=steps, adjoint=False, per_sample=False):
                    logits = model(images)
                flips = _distance(logits, exact)[1]
                rows.append(AnytimeRow(solver, steps, budget, budget, budget, right(logits), flips))
    return Anytime(trained, float(spent.mean()), trained_accuracy, tuple(rows))


def draw_anytime(result: Anytime) -> Figure:
    """Draw accuracy against evaluations for every solver of an `anytime` result.

    Returns:
        A matplotlib figure, its horizontal axis logarithmic; the cross is the setting of training.
    """
    figure, axes = panels(1, 1, size=4.0)
    axis = axes[0][0]
    for solver in dict.fromkeys(row.solver for row in result.rows):
        rows = sorted((row for row in result.rows if row.solver == solver), key=lambda row: row.evaluations)
        axis.plot(
            [row.evaluations for row in rows],
            [100 * row.accuracy for row in rows],
            marker="o",
            markersize=3,
            linestyle="-" if solver in TABLEAUS else "--",
            label=solver if solver in TABLEAUS else f"{solver}, each image by itself",
        )
    axis.plot(result.trained_evaluations, 100 * result.trained_accuracy, "kx", label=f"as trained: {result.trained}")
    axis.set_xscale("log", base=2)
    ticks = sorted({row.least for row in result.rows if row.solver in TABLEAUS})
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axis.set(xlabel="evaluations of the velocity per image", ylabel="top-1 accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


@torch.no_grad()
def kernel_atlas(model: VitSsog, image_size: int | tuple[int, int]) -> Figure:
    """Draw, for each block (row) and head (column), the weights with which the centre token looks at all tokens.

    Args:
        model: A model with SSoG mixers; of steered ones, the kernels before the content moves them.
        image_size: Image size that the kernels are built for.

    Returns:
        A matplotlib figure; every block has its own colour scale, symmetric about 0.

    Raises:
        ValueError: if the model has no SSoG mixer.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    height, width = model.patch_embed.dynamic_feat_size(size)
    mixers = [module for module in model.modules() if isinstance(module, SeparableMixer)]
    if not mixers:
        raise ValueError("kernel_atlas draws SSoG kernels, but this model has a different mixer.")
    heads = mixers[0].num_heads
    row, column = height // 2, width // 2
    figure, axes = panels(len(mixers), heads, size=1.7)
    for block, mixer in enumerate(mixers):
        operator = dense_operator(*SeparableMixer.kernels(mixer, height, width))
        seen = operator[:, row * width + column].reshape(heads, height, width).cpu()
        scale = float(seen.abs().max()) or 1.0
        for head, axis in enumerate(axes[block]):
            image = axis.imshow(seen[head].numpy(), cmap="RdBu_r", vmin=-scale, vmax=scale)
            axis.plot(column, row, marker="+", color="black", markersize=6)
            axis.set(xticks=[], yticks=[])
            if block == 0:
                axis.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                axis.set_ylabel(f"block {block + 1}", fontsize=9)
        figure.colorbar(image, ax=list(axes[block]), pad=0.02, aspect=12).ax.tick_params(labelsize=7)
    figure.suptitle(
        f"What the centre token (+) sees on a {height} x {width} grid: red adds, blue subtracts", fontsize=10
    )
    return figure


def receptive_field(model: VitSsog, images: Tensor) -> Figure:
    """Draw how much each pixel moves the centre token after the last block, on average over images.

    The effective receptive field of Luo et al. (arXiv 1701.04128), as the root mean square over images and channels of
    the Jacobian of the token with respect to the pixels; a random sign per channel of the token replaces the sum over
    channels.

    Args:
        model: Any of this package's models.
        images: (batch, in_chans, height, width).

    Returns:
        A matplotlib figure, logarithmic, relative to the pixel with the largest effect.

    Raises:
        ValueError: if there is no image.
    """
    if not len(images):
        raise ValueError("receptive_field averages over images, but got none.")
    with _evaluating(model), torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        end, _ = model.evolve(model.embed(pixels), [], model.num_steps)
        _, height, width, channels = end.shape
        signs = torch.randint(2, (len(images), channels), generator=torch.Generator().manual_seed(0)) * 2 - 1
        token = end[:, height // 2, width // 2]
        (gradient,) = torch.autograd.grad((token * signs.to(token)).sum(), pixels)
    effect = gradient.float().square().mean((0, 1)).sqrt().cpu()
    relative = effect / effect.max().clamp_min(torch.finfo(torch.float32).tiny)
    figure, axes = panels(1, 1, size=4.0)
    image = axes[0][0].imshow(relative.clamp_min(1e-6).log10().numpy(), cmap="magma", vmin=-4, vmax=0)
    axes[0][0].set(xticks=[], yticks=[])
    figure.colorbar(image, ax=axes[0][0], label="effect on the centre token, log10 of the largest")
    return figure


@torch.no_grad()
def trajectory(model: VitSsog, images: Tensor) -> Figure:
    """Draw how far the tokens of each image move, and how fast, over the model's depth: blocks, loops or times.

    Args:
        model: Any of this package's models.
        images: (batch, in_chans, height, width).

    Returns:
        A matplotlib figure; distances are root mean squares over tokens and channels.
    """
    with _evaluating(model):
        tokens = model.embed(images)
        _, states = model.evolve(tokens, list(range(model.num_steps)), model.num_steps)
    path = torch.stack([tokens, *states]).float().flatten(2)
    depth = [0.0, *(float(info.get("time", index + 1)) for index, info in enumerate(model.feature_info))]
    spans = torch.tensor([after - before for before, after in itertools.pairwise(depth)])
    distance = (path - path[0]).square().mean(-1).sqrt()
    speed = (path[1:] - path[:-1]).square().mean(-1).sqrt() / spans[:, None]
    figure, axes = panels(1, 2, size=3.2)
    for axis, times, lines, label in (
        (axes[0][0], depth, distance, "distance from the embedding"),
        (axes[0][1], depth[1:], speed, "mean speed since the previous step"),
    ):
        axis.plot(times, lines.cpu().numpy(), color="tab:blue", alpha=0.25, linewidth=0.8)
        axis.plot(times, lines.mean(1).cpu().numpy(), color="tab:blue", linewidth=2, label="mean")
        axis.set_xlabel("time" if "time" in model.feature_info[0] else "depth")
        axis.set_title(label, fontsize=9)
        axis.legend(frameon=False, fontsize=8)
    return figure


def panels(rows: int, columns: int, size: float = 1.1) -> tuple[Figure, Any]:
    """A figure of rows by columns of square panels, ``size`` inches each, and their axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # not with pyplot, which would choose a GUI backend and keep every figure alive
    figure = Figure(figsize=(size * columns + 0.8, size * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _require_continuous(model: nn.Module) -> None:
    if not isinstance(model, OdeVitSsog):
        raise ValueError(
            f"Expected a continuous model (vit_ssog_*_ode), got {type(model).__name__}: only its depth is a solve."
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _solving(model: OdeVitSsog, **settings: str | int | float | bool) -> Iterator[None]:
    """Solve with other settings for a while."""
    before = dataclasses.asdict(model.settings)
    model.set_solver(**settings)  # type: ignore[arg-type]
    try:
        yield
    finally:
        model.set_solver(**before)
