"""Gaussian kernels fitted to a head's maps and values, amplitudes in closed form at every step (variable projection).

With K the sum of the components, S = E[V V'], C = E[O V'] and a free intercept, the mean squared error of K V is, up
to a constant, ``tr(K S K') - 2 tr(K C') - N |E[o] - mean_i(K E[V])|^2``: quadratic in the amplitudes. As a component
is a Kronecker product of two axis kernels, ``tr(K_m S K_n')`` is S contracted with ``R_m' R_n`` on its row axes and
``X_m' X_n`` on its column axes: N^2 multiply-adds per pair instead of N^3. Variable projection: Golub, Pereyra, 1973.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from timm_ssog.conversion.statistics import HeadMoments
from timm_ssog.layers import WIDTH_MIN
from timm_ssog.ops.gaussian import stretched_kernels

RESTARTS = 8
MAP_STEPS, MAP_RATE = 50, 0.1
VALUE_STEPS, VALUE_RATE = 250, 0.1
RIDGE = 1e-3
"""Ridge on the amplitudes, over the mean diagonal of their quadratic form."""
WIDTH_ABOVE = 0.02
"""Least distance of a fitted width from `WIDTH_MIN`, where its gradient would vanish."""


@dataclass(frozen=True)
class FittedKernels:
    """Kernels of the heads of one block, as parameters of a `SeparableMixer`, and how well they fit.

    Attributes:
        offset: (heads, components, 2).
        width: (heads, components, 2), unconstrained.
        amplitude: (heads, components), logits if the mixer is convex.
        shift: (heads, head_dim), the intercept to add to the mixed values.
        map_share: (heads,), share of the mean map's square that the best Gaussians for it explain.
        value_share: (heads,), share of the variance of the mixed values that these kernels explain.
        fixed_share: (heads,), the same for the best of all fixed maps: the rest is content.
    """

    offset: Tensor
    width: Tensor
    amplitude: Tensor
    shift: Tensor
    map_share: Tensor
    value_share: Tensor
    fixed_share: Tensor


@dataclass(frozen=True)
class Problem:
    """A quadratic form in K for each head: ``tr(K S K') - 2 tr(K C') - N |mixed - mean_i(K V)|^2``.

    Attributes:
        pairs: S as (heads, height^2, width^2), rows (jy, ky), columns (jx, kx); None for the identity.
        cross: C as (heads, height^2, width^2), rows (iy, jy), columns (ix, jx).
        values: Mean values (heads, height, width, head_dim); None for no intercept.
        mixed: Mean mixed values (heads, head_dim).
        grid: (height, width).
    """

    pairs: Tensor | None
    cross: Tensor
    values: Tensor | None
    mixed: Tensor | None
    grid: tuple[int, int]

    def of_kernels(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The form in the amplitudes of given axis kernels, ``a' G a - 2 a' b`` up to a constant.

        Args:
            rows: (heads, restarts, components, height, height).
            columns: (heads, restarts, components, width, width).

        Returns:
            G (heads, restarts, components, components) and b (heads, restarts, components).
        """
        # sums over queries of products of weights: (heads, restarts, m, n, j, k)
        row_pairs = torch.einsum("hrmij,hrnik->hrmnjk", rows, rows)
        column_pairs = torch.einsum("hrmij,hrnik->hrmnjk", columns, columns)
        if self.pairs is None:
            traces = [pairs.diagonal(dim1=-2, dim2=-1).sum(-1) for pairs in (row_pairs, column_pairs)]
            gram = traces[0] * traces[1]
        else:
            gram = _contract(row_pairs, self.pairs, column_pairs)
        linear = _contract(rows, self.cross, columns)
        if self.values is not None and self.mixed is not None:
            means = self.kernel_means(rows, columns)
            tokens = self.grid[0] * self.grid[1]
            gram = gram - tokens * means @ means.mT
            linear = linear - tokens * torch.einsum("hrmd,hd->hrm", means, self.mixed)
        return gram, linear

    def kernel_means(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Mean over queries of every component's mixed mean values, (heads, restarts, components, head_dim)."""
        assert self.values is not None
        return torch.einsum("hrmy,hrmx,hyxd->hrmd", rows.mean(-2), columns.mean(-2), self.values)


def _contract(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """``left' matrix right`` over the last two axes of left and right, flattened; the leading axes stay."""
    heads, shape = left.shape[0], left.shape[:-2]
    left, right = left.reshape(heads, -1, matrix.shape[1]), right.reshape(heads, -1, matrix.shape[2])
    return ((left @ matrix) * right).sum(-1).reshape(shape)


def _split(matrix: Tensor, grid: tuple[int, int]) -> Tensor:
    """(heads, N, N) as (heads, height^2, width^2): pairs of rows by pairs of columns."""
    height, width = grid
    split = matrix.reshape(-1, height, width, height, width).transpose(2, 3)
    return split.reshape(-1, height * height, width * width)


def map_problem(moments: HeadMoments, grid: tuple[int, int]) -> Problem:
    """The distance of K to the mean map."""
    return Problem(None, _split(moments.maps, grid), None, None, grid)


def value_problem(moments: HeadMoments, grid: tuple[int, int]) -> Problem:
    """The error of K's mixed values, with a free intercept."""
    values = moments.value_mean.unflatten(1, grid)
    return Problem(_split(moments.values, grid), _split(moments.cross, grid), values, moments.mixed_mean, grid)


def solve_amplitudes(gram: Tensor, linear: Tensor) -> Tensor:
    """Minimise ``a' G a - 2 a' b`` with a small ridge; see `RIDGE`."""
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + (RIDGE * scale + 1e-9) * eye, linear)


def energy(gram: Tensor, linear: Tensor, amplitude: Tensor) -> Tensor:
    """``a' G a - 2 a' b``."""
    return torch.einsum("hrm,hrmn,hrn->hr", amplitude, gram, amplitude) - 2 * (amplitude * linear).sum(-1)


def fit_kernels(
    sums: HeadMoments,
    grid: tuple[int, int],
    components: int,
    convex: bool,
    generator: torch.Generator,
) -> FittedKernels:
    """Fit the kernels of the heads of one block, on the grid of the teacher.

    `RESTARTS` random starts are fitted to the mean maps at once, then the better half of them to the values. Offsets
    stay on the grid, widths between `WIDTH_MIN` and the grid.

    Args:
        sums: Moments of the block's heads.
        grid: Tokens (height, width).
        components: Gaussians per head.
        convex: Whether the amplitudes are the softmax of logits.
        generator: Generator of the starts, on the CPU.
    """
    moments = _normalised(sums.means())
    heads = len(moments.maps)
    start = _starts(heads, grid, components, generator)
    parameters = [part.to(moments.maps) for part in start]
    on_map, on_values = map_problem(moments, grid), value_problem(moments, grid)
    parameters, losses = _descend(on_map, parameters, convex, MAP_STEPS, MAP_RATE)
    map_power = moments.maps.square().sum((1, 2))
    map_share = _share(map_power + losses.amin(1), map_power)

    kept = losses.topk(min(RESTARTS // 2, losses.shape[1]), largest=False).indices
    parameters = [_taken(part, kept) for part in parameters]
    parameters, losses = _descend(on_values, parameters, convex, VALUE_STEPS, VALUE_RATE)
    best = losses.argmin(1, keepdim=True)
    offset, width, logits = (_taken(part, best) for part in parameters)

    rows, columns = _kernels(offset, width, grid)
    gram, linear = on_values.of_kernels(rows, columns)
    amplitude = logits.softmax(-1) if convex else solve_amplitudes(gram, linear)
    loss = energy(gram, linear, amplitude)[:, 0]
    tokens = grid[0] * grid[1]
    variance = moments.mixed_power - tokens * moments.mixed_mean.square().sum(-1)
    shift = moments.mixed_mean - (amplitude[..., None] * on_values.kernel_means(rows, columns)).sum(2)[:, 0]
    return FittedKernels(
        offset[:, 0],
        width[:, 0],
        (logits if convex else amplitude)[:, 0],
        # back from values of power one
        shift * _power(sums.means())[:, None].sqrt(),
        map_share,
        _share(variance + loss, variance),
        _share(variance + _best_fixed(moments), variance),
    )


def _power(moments: HeadMoments) -> Tensor:
    """Mean square of a head's values per token; one for a head whose values are zero."""
    power = moments.values.diagonal(dim1=1, dim2=2).mean(1)
    return torch.where(power > 0, power, torch.ones_like(power))


def _normalised(moments: HeadMoments) -> HeadMoments:
    """Moments as if the values of every head had power one, so that the fit's constants have no unit."""
    power = _power(moments)
    square, root = power[:, None, None], power.sqrt()
    return HeadMoments(
        moments.values / square,
        moments.cross / square,
        moments.maps,
        moments.value_mean / root[:, None, None],
        moments.mixed_mean / root[:, None],
        moments.mixed_power / power,
        moments.map_power,
        moments.images,
    )


def _share(error: Tensor, of: Tensor) -> Tensor:
    """One minus the error's share, between 0 and 1; 1 if there is nothing to explain."""
    tiny = 1e-12
    return torch.where(of > tiny, 1 - error / of.clamp_min(tiny), torch.ones_like(of)).clamp(0, 1)


def _best_fixed(moments: HeadMoments) -> Tensor:
    """The least of ``a' G a - 2 a' b`` over all N x N maps, as if each were a component of amplitude one.

    A ridge keeps it from overfitting few images.
    """
    tokens = moments.maps.shape[1]
    values = moments.values + RIDGE * torch.eye(tokens, dtype=moments.maps.dtype, device=moments.maps.device)
    centre = torch.full_like(moments.mixed_mean[:, None, :1], 1 / tokens).expand(-1, 1, tokens)
    # the intercept b solves (1 - v' S^-1 v) b = o - mean_i(C S^-1 v), v the mean values
    solved = torch.linalg.solve(values, torch.cat([moments.cross.mT, moments.value_mean], 2))
    cross, mean = solved[..., :tokens].mT, solved[..., tokens:]
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    left = eye - moments.value_mean.mT @ mean + 1e-9 * eye
    right = moments.mixed_mean[:, None] - centre @ cross @ moments.value_mean
    intercept = torch.linalg.solve(left, right.mT)[..., 0]
    best = cross - (mean @ intercept[..., None]).mT
    miss = moments.mixed_mean[:, None] - centre @ best @ moments.value_mean
    quadratic = ((best @ moments.values) * best).sum((1, 2)) - 2 * (best * moments.cross).sum((1, 2))
    return quadratic + tokens * (moments.mixed_mean.square().sum(-1) - miss.square().sum((1, 2)))


def _starts(heads: int, grid: tuple[int, int], components: int, generator: torch.Generator) -> list[Tensor]:
    """Random offsets, raw widths and logits, (heads, restarts, components, ...)."""
    shape = (heads, RESTARTS, components)
    offsets, widths = [], []
    for length in grid:
        offset = torch.randn(shape, generator=generator, dtype=torch.float64) * length / 2 / 1.5
        offset[:, ::4, 0] = 0.0  # one component without offset
        offsets.append(offset.clamp(-length / 2, length / 2))
        low, high = math.log(0.5), math.log(max(length / 2, 0.5))
        spread = torch.rand(shape, generator=generator, dtype=torch.float64)
        widths.append(_raw((low + (high - low) * spread).exp()))
    offset, width = _clamped(torch.stack(offsets, -1), torch.stack(widths, -1), grid)
    return [offset, width, torch.zeros(shape, dtype=torch.float64)]


def _raw(width: Tensor) -> Tensor:
    """The inverse of the mixer's ``softplus(raw) + WIDTH_MIN``."""
    above = (width - WIDTH_MIN).clamp_min(WIDTH_ABOVE)
    return above + torch.log(-torch.expm1(-above))


def _clamped(offset: Tensor, width: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Clamp offsets so that they lead from some cell to another, and widths between the narrowest and the grid."""
    lengths = torch.tensor(grid, dtype=offset.dtype, device=offset.device)
    low, high = (_raw(edge) for edge in (torch.zeros_like(lengths), lengths.clamp_min(1.0)))
    return offset.clamp(1 - lengths, lengths - 1), width.clamp(low, high)


def _kernels(offset: Tensor, width: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Axis kernels on the reference grid, as the model builds them."""
    sigma = F.softplus(width) + WIDTH_MIN
    stretch = torch.ones((), dtype=offset.dtype, device=offset.device)
    rows = stretched_kernels(offset[..., 0], sigma[..., 0], grid[0], stretch)
    return rows, stretched_kernels(offset[..., 1], sigma[..., 1], grid[1], stretch)


@torch.enable_grad()
def _descend(
    problem: Problem, parameters: list[Tensor], convex: bool, steps: int, rate: float
) -> tuple[list[Tensor], Tensor]:
    """Adam with a cosine schedule over all heads and starts at once, each with its best point and that point's loss."""
    offset, width, logits = (part.clone().requires_grad_() for part in parameters)
    moving = [offset, width, logits] if convex else [offset, width]
    optimizer = torch.optim.Adam(moving, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = [part.clone() for part in parameters]
    least = torch.full(offset.shape[:2], math.inf, dtype=offset.dtype, device=offset.device)
    for step in range(steps + 1):
        gram, linear = problem.of_kernels(*_kernels(offset, width, problem.grid))
        amplitude = logits.softmax(-1) if convex else solve_amplitudes(gram, linear)
        losses = energy(gram, linear, amplitude)
        with torch.no_grad():
            better = losses < least  # False for NaN
            least = torch.where(better, losses, least)
            for kept, part in zip(best, (offset, width, logits), strict=True):
                mask = better[(...,) + (None,) * (part.dim() - 2)]
                kept.copy_(torch.where(mask, part, kept))
        if step == steps:
            break
        optimizer.zero_grad()
        losses.sum().backward()
        for part in moving:
            assert part.grad is not None
            part.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            clamped = _clamped(offset, width, problem.grid)
            offset.copy_(clamped[0])
            width.copy_(clamped[1])
    return best, least


def _taken(part: Tensor, chosen: Tensor) -> Tensor:
    """The chosen (heads, count) of the starts of (heads, restarts, ...)."""
    index = chosen[(...,) + (None,) * (part.dim() - 2)].expand(-1, -1, *part.shape[2:])
    return part.gather(1, index)
