"""Certificates of stability: bounds on how far a block, or a whole depth, can drive two inputs apart.

Everything here is about the exact function that a model in eval mode represents, in the 2-norm over all tokens and
channels (that of the flattened state). Bounds are computed in float64 from the parameters and kernels that the model
holds, whatever their dtype; rounding in the model's own forward pass is not part of them.

The composition, with the mixer branch u = mixer(norm1) and the MLP branch w = mlp(norm2) of a block:

    delta(x) = u(x) + w(x + u(x))        L_delta <= L_u + L_w (1 + L_u)        L_block <= 1 + L_delta
"""

import copy
import dataclasses
import json
import math
from typing import Any

import torch
from timm.layers import GELUTanh, LayerNormFp32, Mlp, QuickGELU
from timm.layers import LayerNorm as TimmLayerNorm
from timm.layers.activations import GELU as TimmGELU  # noqa: N811
from timm.layers.activations import Tanh as TimmTanh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from timm_ssog.arguments import check_image
from timm_ssog.errors import require_positive_int
from timm_ssog.layers import AttentionMixer, Block, CentreNorm, IdentityMixer, SeparableMixer
from timm_ssog.ops.naive import dense_operator
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

DENSE_TOKENS = 1024
"""Tokens up to which an operator's norm is computed from the dense operator itself."""

INFORMATIVE_GROWTH = 1e3
"""Growth over the whole depth up to which a certificate is called practically informative; see `Certificate`."""

GELU_SLOPE = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)
"""Largest slope of the exact GELU, 1.128904...: GELU'(x) = Phi(x) + x phi(x) is stationary where
GELU''(x) = phi(x) (2 - x^2) vanishes, so its maximum is Phi(sqrt 2) + sqrt(2) phi(sqrt 2)."""

# All of these have f'(-x) = 1 - f'(x) or slopes within [0, 1]: for each, the slopes lie within [1 - m, m].
_GELU_TANH_SLOPE = 1.1289931  # maximised numerically and rounded up, as is the next
_SILU_SLOPE = 1.0998394
_SLOPES: dict[type[nn.Module], float] = {
    TimmGELU: GELU_SLOPE,
    GELUTanh: _GELU_TANH_SLOPE,
    nn.SiLU: _SILU_SLOPE,
    QuickGELU: _SILU_SLOPE,  # SiLU with its argument and its value rescaled: the same slopes
    nn.ReLU: 1.0,
    nn.Tanh: 1.0,
    TimmTanh: 1.0,
    nn.Identity: 1.0,
}

_NOT_LIPSCHITZ = (
    "dot-product self-attention is not globally Lipschitz (Kim, Papamakarios and Mnih, ICML 2021, arXiv 2006.04710)"
)
_STEERED = (
    "with steering={!r} the kernels depend on the tokens: what is mixed is multiplied by a function of the tokens, and "
    "a product of two functions of an unbounded input has no global Lipschitz constant"
)
_BOUNDED_INPUT = (
    "; after a LayerNorm, whose output is bounded, a finite constant does exist, but it is not a product of parts and "
    "is not computed here"
)


@dataclasses.dataclass(frozen=True)
class OperatorNorm:
    """Spectral norm of a mixer's fixed linear operator on one grid, or an upper bound of it.

    Attributes:
        grid: (height, width), in cells.
        value: The norm: the largest of ``heads``, as each head acts on its own channels.
        kind: ``"exact"`` (of the dense operator, up to outward rounding) or ``"upper bound"``.
        product_bound: ``sum_m |amplitude_m| * norm(row kernel_m) * norm(column kernel_m)``, the largest over heads.
        heads: Norm or bound of every head.
    """

    grid: tuple[int, int]
    value: float
    kind: str
    product_bound: float
    heads: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.kind}; product bound {self.product_bound:.4g})"


@dataclasses.dataclass(frozen=True)
class BlockCertificate:
    """Global Lipschitz bounds of one block on one grid.

    Attributes:
        name: Name of the block in the model, and the loop if loops differ.
        operator: Norm of the mixing operator; None for mixers without a fixed one.
        factors: Constants of the parts. ``norm1`` and ``norm2`` are those of the bare norms; their weights are folded
            into the linear map after them (``value``, or ``proj value`` where nothing is mixed; ``fc1``).
        mixer_bound: Bound of u, the mixer after its norm: the product of its factors.
        mlp_bound: Bound of w, the MLP after its norm: ``norm2 * (fc2 fc1 / 2 + (activation - 1/2) * fc2 * fc1)``.
        velocity_bound: Bound of ``delta``: ``u + w (1 + u)``.
        map_bound: Bound of the block, ``x + delta(x)``: one more.
        reason: Why there is no finite bound; None if there is one.
    """

    name: str
    operator: OperatorNorm | None
    factors: dict[str, float]
    mixer_bound: float
    mlp_bound: float
    velocity_bound: float
    map_bound: float
    reason: str | None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}: infinity"
        factors = ", ".join(f"{name} {value:.4g}" for name, value in self.factors.items())
        return (
            f"{self.name}: velocity {self.velocity_bound:.4g} "
            f"(mixer {self.mixer_bound:.4g}, MLP {self.mlp_bound:.4g}); {factors}"
        )


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What can be proved about a model's depth on one grid, from the embedded image to the state after the last step.

    ``solution_unique`` and ``informative`` are two statements, and the first says nothing about the second. *Unique*:
    the velocity ``delta`` has a finite global Lipschitz constant, so ``dx/dt = delta(x)`` has exactly one solution on
    the whole interval (Picard-Lindelöf), however large the constant. For a discrete or looped model this is about the
    continuous one with the same velocity. False means that nothing is certified, not that there are several solutions.
    *Informative*: the certified growth over the depth is at most `INFORMATIVE_GROWTH`, so that a perturbation of a
    thousandth of the state provably stays below the size of the state. Above that, the bound is true but of no
    practical use.

    Attributes:
        depth: ``"discrete"``, ``"looped"`` or ``"continuous"``.
        grid: (height, width), in cells.
        steps: Length of the depth: blocks, loops, or the horizon.
        blocks: One report per block; per loop and block if loops have their own norms.
        operator_kind: ``"exact"``, or ``"upper bound"`` if that of any block is; None without a fixed operator.
        velocity_bound: Global Lipschitz bound of the velocity: the largest over blocks.
        step_threshold: Euler's method maps different states to different states for steps below it: one over the bound.
        growth: Bound of the factor by which the distance of two states can grow over the depth: ``exp(L T)`` for the
            exact solution of a continuous model, else the product of ``1 + L`` over all steps. Infinite if float64
            can't hold it; with input injection it also counts what the injection adds.
        log10_growth: Its decimal logarithm, finite whenever the bound is.
        solution_unique: See above.
        informative: See above.
        reason: Why there is no certificate; None if there is one.
    """

    depth: str
    grid: tuple[int, int]
    steps: float
    blocks: tuple[BlockCertificate, ...]
    operator_kind: str | None
    velocity_bound: float
    step_threshold: float
    growth: float
    log10_growth: float
    solution_unique: bool
    informative: bool
    reason: str | None

    def __str__(self) -> str:
        unit = {"discrete": "blocks", "looped": "loops", "continuous": "units of time"}[self.depth]
        height, width = self.grid
        lines = [f"Certificate of a {self.depth} depth of {self.steps:g} {unit} on a grid of {height} x {width}:"]
        if self.reason is not None:
            lines.append(f"  no certificate: infinity, because {self.reason}")
            lines.append("  finite, hence a unique solution of dx/dt = delta(x): not certified")
            lines.append("  practically informative: no")
        else:
            comparison = "at most" if self.informative else "above"
            lines.append(f"  velocity bound: {self.velocity_bound:.4g} (global Lipschitz constant of delta)")
            if self.operator_kind is not None:
                lines.append(f"  operator norm: {self.operator_kind}")
            lines.append(f"  growth over the depth: at most {_rounded_up(self.log10_growth)}")
            lines.append("  finite, hence a unique solution of dx/dt = delta(x): yes (Picard-Lindelöf)")
            lines.append(
                f"  practically informative: {'yes' if self.informative else 'no'} (the growth bound is {comparison} "
                f"{INFORMATIVE_GROWTH:g})"
            )
        for block in self.blocks:
            lines.append(f"  {block}")
            if block.operator is not None:
                lines.append(f"    operator: {block.operator}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All fields as strict JSON, which has no infinity: it is written as the string ``"Infinity"``."""
        return json.dumps(_without_infinity(dataclasses.asdict(self)), indent=2, allow_nan=False)


def certify(model: nn.Module, image_size: int | tuple[int, int]) -> Certificate:
    """Certify a model's depth for images of one size, by the composition in the module's docstring.

    For a continuous model the growth is that of the exact solution; a solver adds its own error to it.

    Args:
        model: A `VitSsog`, `LoopedVitSsog` or `OdeVitSsog`.
        image_size: Height and width, in pixels.

    Raises:
        TypeError: if the model is not one of this package.
        ValueError: if the image size does not fit the patch size, or a parameter is NaN or infinite.
    """
    vit = _require_ours(model, "certify")
    height, width = _grid(vit, image_size)
    for name, parameter in vit.named_parameters():
        if name.startswith(("blocks.", "loop_modulation")) and not torch.isfinite(parameter).all():
            raise ValueError(f"{name} holds values that are NaN or infinite; nothing can be certified.")

    looped = isinstance(vit, LoopedVitSsog)
    loops, modulations = (vit.loops, vit.loop_modulation) if looped else (1, None)
    # loops beyond the trained ones repeat the last trained one
    distinct_loops = 1 if modulations is None else min(loops, vit.trained_loops)
    reports: list[list[BlockCertificate]] = []
    for loop in range(distinct_loops):
        suffix = "" if modulations is None else f", loop {loop + 1}"
        reports.append(
            [
                certify_block(
                    block, height, width, None if modulations is None else modulations[loop, k], f"blocks.{k}{suffix}"
                )
                for k, block in enumerate(vit.blocks)
            ]
        )

    blocks = tuple(report for of_loop in reports for report in of_loop)
    velocity_bound = max(report.velocity_bound for report in blocks)
    if isinstance(vit, OdeVitSsog):
        depth, steps = "continuous", vit.horizon
        in_force = map(vit.time_grid.in_force, range(len(blocks)))
        log_growth = sum(
            report.velocity_bound * (end - start) for report, (start, end) in zip(blocks, in_force, strict=True)
        )
    else:
        depth, steps = ("looped", loops) if looped else ("discrete", len(blocks))
        log_growth = 0.0
        for loop in range(loops):
            if looped and vit.inject_input:
                log_growth += math.log1p(math.exp(-log_growth))  # the first state once more, with its distance of one
            log_growth += sum(math.log1p(report.velocity_bound) for report in reports[min(loop, distinct_loops - 1)])
    kinds = {report.operator.kind for report in blocks if report.operator is not None}
    return Certificate(
        depth=depth,
        grid=(height, width),
        steps=float(steps),
        blocks=blocks,
        operator_kind=max(kinds) if kinds else None,
        velocity_bound=velocity_bound,
        step_threshold=1 / velocity_bound if velocity_bound > 0 else math.inf,
        growth=math.exp(log_growth) if log_growth < math.log(torch.finfo(torch.float64).max) else math.inf,
        log10_growth=log_growth / math.log(10),
        solution_unique=math.isfinite(velocity_bound),
        informative=log_growth <= math.log(INFORMATIVE_GROWTH),
        reason=next((report.reason for report in blocks if report.reason is not None), None),
    )


def certify_block(
    block: Block, grid_height: int, grid_width: int, modulation: Tensor | None = None, name: str = "block"
) -> BlockCertificate:
    """Bound the global Lipschitz constants of a block on one grid, or say why there is none.

    The parts: for a linear map, its spectral norm. LayerNorm without its weight is ``z = (x - mean) / s`` with
    ``s = sqrt(var + eps)``; its Jacobian ``(P - z z^T / d) / s``, P the centring projection, has norm at most
    ``1 / sqrt(eps)``, attained where all channels are equal: this is its constant, with the weight at most
    ``max|weight| / sqrt(eps)``. `CentreNorm` gives its own. An activation with slopes within [1 - m, m] is half the
    identity plus a rest with slopes below m - 1/2 (m = `GELU_SLOPE` for the exact GELU), so that
    ``L(fc2 act fc1) <= norm(fc2 fc1) / 2 + (m - 1/2) norm(fc2) norm(fc1)``, never above ``m norm(fc2) norm(fc1)``.

    Args:
        block: The block.
        grid_height: Height of the grid, in cells.
        grid_width: Width of the grid, in cells.
        modulation: As in `Block.delta`.
        name: Name in the report.

    Raises:
        ValueError: if the mixer's kernels are NaN or infinite.
    """
    mixer: Any = block.mixer
    mlp: Any = block.mlp
    scale1, scale2 = (modulation[0], modulation[2]) if modulation is not None else (None, None)
    fixed = isinstance(mixer, SeparableMixer) and mixer.steering == "none"
    operator = operator_norm(mixer, grid_height, grid_width) if fixed else None
    reasons = [
        _reason_of_norm(block.norm1),
        _reason_of_mixer(block),
        _reason_of_norm(block.norm2),
        _reason_of_mlp(block),
    ]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        return BlockCertificate(name, operator, {}, math.inf, math.inf, math.inf, math.inf, reason)

    constant1, gain1 = _norm_parts(block.norm1, mlp.fc1.in_features, scale1)
    constant2, gain2 = _norm_parts(block.norm2, mlp.fc1.in_features, scale2)
    value, proj = _float64(mixer.value.weight), _float64(mixer.proj.weight)
    if operator is None:
        factors = {"norm1": constant1, "proj value": spectral_norm(proj @ value @ gain1).item()}
    else:
        factors = {
            "norm1": constant1,
            "value": spectral_norm(value @ gain1).item(),
            "operator": operator.value,
            "proj": spectral_norm(proj).item(),
        }
    fc1, fc2 = _float64(mlp.fc1.weight) @ gain2, _float64(mlp.fc2.weight)
    mixer_bound = math.prod(factors.values())
    factors |= {
        "norm2": constant2,
        "fc1": spectral_norm(fc1).item(),
        "activation": _slope(mlp.act),
        "fc2": spectral_norm(fc2).item(),
        "fc2 fc1": spectral_norm(fc2 @ fc1).item(),
    }
    mlp_bound = constant2 * (factors["fc2 fc1"] / 2 + (factors["activation"] - 0.5) * factors["fc2"] * factors["fc1"])
    velocity_bound = mixer_bound + mlp_bound * (1 + mixer_bound)
    return BlockCertificate(name, operator, factors, mixer_bound, mlp_bound, velocity_bound, 1 + velocity_bound, None)


def operator_norm(mixer: SeparableMixer, grid_height: int, grid_width: int) -> OperatorNorm:
    """Spectral norm of the operator ``sum_m kron(rows[m], columns[m])`` that a mixer applies on a grid.

    Up to `DENSE_TOKENS` tokens it is the norm of the dense operator. Above that, it is the smaller of two bounds: the
    product bound, and the norm of the operator with every amplitude replaced by its absolute value. That operator is at
    least as large in every entry and has no negative ones, so its norm is no smaller; and the norm of a matrix B
    without negative entries is bounded by any positive vector x, ``norm(B)^2 <= max_i (B^T B x)_i / x_i`` (Collatz and
    Wielandt; Horn and Johnson, Matrix Analysis, theorem 8.1.26), ever more tightly under power iteration and at the
    cost of the separable form.

    Args:
        mixer: The mixer, whose own kernels on that grid are used.
        grid_height: Height of the grid, in cells.
        grid_width: Width of the grid, in cells.

    Raises:
        ValueError: if the kernels hold NaN or infinity.
    """
    with torch.no_grad():
        rows, columns = (_float64(kernels) for kernels in mixer.kernels(grid_height, grid_width))
    if not (torch.isfinite(rows).all() and torch.isfinite(columns).all()):
        raise ValueError("The mixer's kernels hold NaN or infinity; nothing can be certified.")
    product_bound = (spectral_norm(rows) * spectral_norm(columns)).sum(-1)
    tokens = grid_height * grid_width
    if tokens <= DENSE_TOKENS:
        kind = "exact"
        # amplitudes of both signs cancel, which leaves rounding errors as large as those of the summands
        rounding = rows.shape[1] * torch.finfo(torch.float64).eps * product_bound
        norms = torch.minimum(spectral_norm(dense_operator(rows, columns)) + rounding, product_bound)
    else:
        kind = "upper bound"
        norms = torch.minimum(_majorant_bound(rows.abs(), columns), product_bound)
    return OperatorNorm(
        (grid_height, grid_width), norms.max().item(), kind, product_bound.max().item(), tuple(norms.tolist())
    )


def spectral_norm(matrix: Tensor) -> Tensor:
    """Largest singular value of float64 matrices (..., m, n), rounded outward by more than the error of computing it.

    It is the root of the largest eigenvalue of the smaller Gram matrix, whose entries are off by at most
    ``max(m, n) eps`` of what they sum, and whose eigenvalues are off by ``min(m, n)`` times that.
    """
    m, n = matrix.shape[-2:]
    gram = matrix @ matrix.mT if m <= n else matrix.mT @ matrix
    outward = 1 + m * n * torch.finfo(torch.float64).eps
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt() * outward


def local_lipschitz(model: nn.Module, images: Tensor, iterations: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """Measure how far each block's velocity stretches differences at the states that given images pass through.

    The local constant of ``delta`` at a state is the spectral norm of its Jacobian there. Power iteration on J^T J in
    float64, per image, approaches it from below: the result is never above the certified bound. The states are the
    inputs of every block of a discrete model, of every block in every loop of a looped one, and those at the start
    of every step of a continuous one (of ``solver_steps`` equal intervals, whatever the solver).

    Args:
        model: A `VitSsog`, `LoopedVitSsog` or `OdeVitSsog`, in eval mode, on a device that has float64.
        images: (batch, in_chans, height, width).
        iterations: Steps of the power iteration, at least one.
        seed: Seed of the random directions that it starts from.

    Returns:
        (states, batch) by the name of each block, float64, on the model's device.

    Raises:
        TypeError: if the model is not one of this package.
        ValueError: if the model is in training mode, the images do not fit it, or ``iterations`` is below one.
    """
    vit = _require_measurable(model, "local_lipschitz", iterations)
    generator = torch.Generator().manual_seed(seed)
    measured: dict[str, list[Tensor]] = {f"blocks.{index}": [] for index in range(len(vit.blocks))}
    for index, state, modulation in _visited_states(vit, images):
        norm = _jacobian_norm(vit.blocks[index], state, modulation, iterations, generator)
        measured[f"blocks.{index}"].append(norm)
    return {name: torch.stack(norms) for name, norms in measured.items()}


def local_growth(model: nn.Module, images: Tensor, iterations: int = 20, seed: int = 0) -> Tensor:
    """Measure the largest factor by which the whole depth stretches small differences of the embedded images.

    It is the spectral norm of the Jacobian of the last state by the first one, approached from below by power iteration
    in float64. For a continuous model ``certify`` bounds it, up to the error of the solver.

    Args:
        model: A `VitSsog`, `LoopedVitSsog` or `OdeVitSsog`, in eval mode, on a device that has float64.
        images: (batch, in_chans, height, width).
        iterations: Steps of the power iteration, at least one.
        seed: Seed of the random directions that it starts from.

    Returns:
        (batch,), float64, on the model's device.

    Raises:
        TypeError: if the model is not one of this package.
        ValueError: if the model is in training mode, the images do not fit it, or ``iterations`` is below one.
    """
    vit = copy.deepcopy(_require_measurable(model, "local_growth", iterations)).double().requires_grad_(False)
    vit.set_grad_checkpointing(False)
    if isinstance(vit, OdeVitSsog):
        vit.set_solver(adjoint=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        tokens = vit.embed(images.double()).detach().requires_grad_()
        end, _ = vit.evolve(tokens, [], vit.num_steps)
        return _largest_stretch(end, tokens, iterations, generator)


def _require_measurable(model: nn.Module, name: str, iterations: int) -> Any:
    vit = _require_ours(model, name)
    require_positive_int("iterations", iterations)
    if vit.training:
        raise ValueError(f"{name} needs a model in eval mode, because dropout is random: call model.eval().")
    return vit


def _visited_states(model: VitSsog, images: Tensor) -> list[tuple[int, Tensor, Tensor | None]]:
    """Index of the block, the state (batch, height, width, dim) that it sees, and its modulation, in order."""
    with torch.no_grad():
        if isinstance(model, OdeVitSsog):
            ends: Any = model.forward_intermediates(images, intermediates_only=True)
            states = [model.embed(images), *(end.permute(0, 2, 3, 1) for end in ends[:-1])]
            in_force = [model.time_grid.block_at(step) for step in range(len(states))]
            return [(block, state, None) for block, state in zip(in_force, states, strict=True)]

        visited: list[tuple[int, Tensor, Tensor | None]] = []
        hooks = []
        for index, block in enumerate(model.blocks):

            def record(_: nn.Module, inputs: tuple[Any, ...], index: int = index) -> None:
                modulation = None
                if isinstance(model, LoopedVitSsog) and model.loop_modulation is not None:
                    loop = min(len(visited) // len(model.blocks), model.trained_loops - 1)
                    modulation = model.loop_modulation[loop, index]
                visited.append((index, inputs[0].clone(), modulation))

            hooks.append(block.register_forward_pre_hook(record))
        try:
            model.forward_features(images)
        finally:
            for hook in hooks:
                hook.remove()
        return visited


def _jacobian_norm(
    block: Block, state: Tensor, modulation: Tensor | None, iterations: int, generator: torch.Generator
) -> Tensor:
    """Lower bounds (batch,) of the norm of the Jacobian of ``delta``, for each image by itself."""
    kernels = block.mixer.kernels(state.shape[1], state.shape[2])
    kernels = None if kernels is None else tuple(kernel.detach().double() for kernel in kernels)
    modulation = None if modulation is None else modulation.detach().double()
    parameters = {name: tensor.detach().double() for name, tensor in block.named_parameters()}
    # the fused attention kernels can't be differentiated twice
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        state = state.detach().double().requires_grad_()
        delta = torch.func.functional_call(block, parameters, (state, kernels, modulation), {"residual": False})
        return _largest_stretch(delta, state, iterations, generator)


def _largest_stretch(outputs: Tensor, inputs: Tensor, iterations: int, generator: torch.Generator) -> Tensor:
    """Lower bounds (batch,) of the norm of the Jacobian of outputs by inputs, of the same shape, for each sample."""
    direction = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs.device)
    direction = direction / _norms(direction)
    best = torch.zeros(inputs.shape[0], dtype=torch.float64, device=inputs.device)
    # J^T probe is linear in the probe: its derivative with respect to it gives J without a second forward pass
    probe = torch.zeros_like(outputs, requires_grad=True)
    (pulled_back,) = torch.autograd.grad(outputs, inputs, probe, create_graph=True)
    for _ in range(iterations):
        (stretched,) = torch.autograd.grad(pulled_back, probe, direction, retain_graph=True)
        best = torch.maximum(best, _norms(stretched).flatten())
        (direction,) = torch.autograd.grad(outputs, inputs, stretched, retain_graph=True)
        direction = direction / _norms(direction).clamp(min=torch.finfo(torch.float64).tiny)
    return best


def _norms(states: Tensor) -> Tensor:
    return torch.linalg.vector_norm(states, dim=(1, 2, 3), keepdim=True)


def _majorant_bound(rows: Tensor, columns: Tensor, iterations: int = 20) -> Tensor:
    """Upper bound (heads,) of the norm of ``sum_m kron(rows[m], columns[m])`` for kernels without negative entries."""
    vector = rows.new_ones(rows.shape[0], rows.shape[-1], columns.shape[-1])
    best = rows.new_full(rows.shape[:1], math.inf)
    for _ in range(iterations):
        image = torch.einsum("hmik,hkl,hmjl->hij", rows, vector, columns)
        image = torch.einsum("hmik,hij,hmjl->hkl", rows, image, columns)
        best = torch.minimum(best, (image / vector).amax((1, 2)))
        largest = image.amax((1, 2), keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        vector = (image / largest).clamp(min=1e-6)  # any positive vector gives a bound; tiny entries only slow it down
    # sums of that many terms, none of them negative, which bounds their relative error
    terms = 2 * rows.shape[1] * (rows.shape[-1] + columns.shape[-1])
    return best.sqrt() * (1 + terms * torch.finfo(rows.dtype).eps)


def _norm_parts(norm: nn.Module, dim: int, scale: Tensor | None) -> tuple[float, Tensor]:
    """Constant of the bare norm, and the linear map (dim, dim) after it: its weight times the centring projection."""
    weight = torch.ones(dim, dtype=torch.float64)
    if isinstance(norm, nn.LayerNorm | CentreNorm) and norm.weight is not None:
        weight = _float64(norm.weight)
    if scale is not None:
        weight = weight * (1 + _float64(scale))
    if isinstance(norm, nn.Identity):
        return 1.0, torch.diag(weight)
    constant = norm.scale if isinstance(norm, CentreNorm) else 1 / math.sqrt(norm.eps)  # type: ignore[arg-type]
    return constant, weight[:, None] * (torch.eye(dim, dtype=torch.float64) - 1 / dim)


def _slope(act: nn.Module) -> float:
    if type(act) is nn.GELU:
        return GELU_SLOPE if act.approximate == "none" else _GELU_TANH_SLOPE
    return _SLOPES.get(type(act), math.inf)


def _reason_of_norm(norm: nn.Module) -> str | None:
    # by exact type: a subclass may normalise something else
    if type(norm) in (CentreNorm, nn.Identity):
        return None
    if type(norm) in (nn.LayerNorm, TimmLayerNorm, LayerNormFp32):
        return None if norm.eps > 0 else "LayerNorm with eps=0 is not Lipschitz"  # type: ignore[operator]
    return f"no Lipschitz constant is known here for the norm {type(norm).__name__}; LayerNorm and CentreNorm have one"


def _reason_of_mixer(block: Block) -> str | None:
    if isinstance(block.mixer, SeparableMixer) and block.mixer.steering != "none":
        return _STEERED.format(block.mixer.steering) + (_BOUNDED_INPUT if isinstance(block.norm1, nn.LayerNorm) else "")
    if isinstance(block.mixer, SeparableMixer | IdentityMixer):
        return None
    if isinstance(block.mixer, AttentionMixer):
        return _NOT_LIPSCHITZ + (_BOUNDED_INPUT if isinstance(block.norm1, nn.LayerNorm) else "")
    return f"no Lipschitz constant is known here for the mixer {type(block.mixer).__name__}"


def _reason_of_mlp(block: Block) -> str | None:
    if type(block.mlp) is not Mlp or type(block.mlp.norm) is not nn.Identity:
        return f"no Lipschitz constant is known here for the MLP {type(block.mlp).__name__}"
    if math.isinf(_slope(block.mlp.act)):
        known = ", ".join(sorted({"GELU", *(act.__name__ for act in _SLOPES)}))
        return (
            f"no Lipschitz constant is known here for the activation {type(block.mlp.act).__name__}; there is one for "
            f"{known}"
        )
    return None


def _require_ours(model: nn.Module, caller: str) -> Any:
    if not isinstance(model, VitSsog):
        raise TypeError(
            f"{caller} takes a vit_ssog model (VitSsog, LoopedVitSsog or OdeVitSsog), got {type(model).__name__}. "
            f"If it wraps such a model (torch.compile, DistributedDataParallel), pass the model inside."
        )
    return model


def _grid(model: VitSsog, image_size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    require_positive_int("image_size", height)
    require_positive_int("image_size", width)
    patch: Any = model.patch_embed.patch_size
    # shape only: this is the check that images themselves go through
    image = torch.empty(1, model.in_chans, height, width, device="meta")
    check_image(image, model.in_chans, patch[0], patch[1], model.patch_embed.dynamic_img_pad)
    return math.ceil(height / patch[0]), math.ceil(width / patch[1])


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _rounded_up(log10: float) -> str:
    if log10 < 6:
        return f"{math.ceil(10**log10 * 1000) / 1000:.3f}"
    return f"10^{math.ceil(log10 * 10) / 10:.1f}"


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(item) for item in value]
    return "Infinity" if value == math.inf else value
