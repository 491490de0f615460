"""`warm_start`: from a trained attention model to an SSoG model of the same shape."""

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from timm_ssog.conversion.aligning import RATE, align, matching, student_states, teacher_states
from timm_ssog.conversion.copying import check_pair, copied_state, has_same_head
from timm_ssog.conversion.kernel_fit import FittedKernels, fit_kernels
from timm_ssog.conversion.refitting import refit as refit_layers
from timm_ssog.conversion.report import PURE_CONTENT, HeadReport, WarmStartReport
from timm_ssog.conversion.statistics import HeadMoments, empty_moments, observe
from timm_ssog.conversion.teachers import Teacher, evaluating, map_chunk, read_teacher, require_as_read
from timm_ssog.errors import require_positive_int
from timm_ssog.layers import SeparableMixer
from timm_ssog.ops.naive import dense_operator
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

SHARED_BLOCK = 1
"""The teacher's block that a student with one shared block starts from."""

Batch = Tensor | Sequence[Tensor]


def warm_start(
    student: VitSsog,
    teacher: torch.nn.Module,
    images: Iterable[Batch],
    *,
    refit: bool = False,
    align_epochs: int = 0,
    align_rate: float = RATE,
    blocks: Sequence[int] | None = None,
    labelled: Iterable[Sequence[Tensor]] | None = None,
    sample: int = 1000,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda step: None,
) -> WarmStartReport:
    """Give a student the weights of a trained attention model, and kernels fitted to what its attention does.

    Copies what carries over, folds value biases and layer scales, fits every head's Gaussians to the teacher's mean
    maps and values, and on request refits linear maps (``refit``, for use without labels) and trains towards the
    teacher's states (``align_epochs``). The student changes only when everything has succeeded. Runs on the teacher's
    device. With N patch tokens, the memory needed in addition to both models, a copy of the student and one batch is
    ``4 (3 N^2 + N d)`` bytes per head of each converted block (d channels), three times the embedded ``sample``, and
    200 MB for a chunk's maps.

    Args:
        student: A ``vit_ssog_*`` with the teacher's width, heads and depth, and any image and patch size
            (`timm_ssog.conversion.student_options` has the options). One with shared blocks takes some of the
            teacher's, see ``blocks``.
        teacher: timm's VisionTransformer, with or without class token, registers, layer scale, q/k norm, biases; or a
            discrete ``vit_ssog_*`` with ``mixer="attention"``.
        images: Batches (batch, in_chans, height, width) of the teacher's image size, normalised as for the teacher, or
            sequences that begin with one, as from a loader. A few hundred images are enough. Iterated once, and
            ``align_epochs`` times more.
        refit: Refit ``proj``, ``fc2`` and ``head`` by ridge regression. Then fine-tune at 5e-4 or less.
        align_epochs: Passes over the images in which the student is trained towards the teacher's states, ten images
            per step: shuffle them.
        align_rate: Learning rate of these passes.
        blocks: The teacher's block (from 0) for each block of a student with shared blocks; by default the second
            and those after it. A discrete student takes them all.
        labelled: Batches of images and labels, to measure the top-1 of both.
        sample: Number of images, the first ones, on which layers are refitted and states compared.
        seed: Seed of the fits' starting points. Nothing else is random, and no global generator is touched.
        on_progress: Called with a line before each step.

    Returns:
        The report.

    Raises:
        ValueError: if the teacher has something that SSoG cannot express or does not fit the student, a weight or pixel
            is NaN, or there are no images or they have another size.
    """
    start = time.perf_counter()
    require_positive_int("sample", sample)
    is_shared = isinstance(student, (LoopedVitSsog, OdeVitSsog))
    if align_epochs and iter(images) is images:  # type: ignore[comparison-overlap]
        raise ValueError("Alignment passes over the images again: give a list or a loader instead of an iterator.")
    if not isinstance(student, VitSsog):
        raise ValueError(f"The student must be a vit_ssog_* model, got {type(student).__name__}.")
    if any(parameter.is_meta for parameter in student.parameters()):
        raise ValueError("The student is on the meta device, without weights: create it on a real one.")
    if is_shared and refit:
        raise ValueError("A refit goes block by block, but this student shares its blocks: use align_epochs.")
    seen = read_teacher(teacher)
    source = _source_blocks(student, seen, blocks)
    notes = check_pair(student, seen, source)

    work = copy.deepcopy(student).to(seen.model.patch_embed.proj.weight.device).float()
    own_size, own_patch = work.patch_embed.img_size, work.patch_embed.patch_size
    _lay_out(work, seen.image_size, seen.model.patch_embed.patch_size)
    with evaluating(teacher, work):
        on_progress(f"reading {len(set(source))} blocks of the teacher")
        moments = empty_moments(seen, source)
        kept = _observe_all(seen, images, moments, sample)
        work.load_state_dict(copied_state(work, seen, source))
        generator = torch.Generator().manual_seed(seed)
        fits = {}
        for index in sorted(moments):
            on_progress(f"fitting kernels of block {index + 1} of {len(seen.blocks)}")
            fits[index] = _fit(work.blocks[source.index(index)].mixer, moments[index], seen.grid, generator)
        for block, index in zip(work.blocks, source, strict=True):
            _install(block.mixer, fits[index], seen.grid)  # type: ignore[arg-type]
        if refit:
            on_progress(f"refitting linear maps on {len(kept)} images")
            refit_layers(work, seen, kept)
        if align_epochs:
            steps = len(images) if isinstance(images, Sized) else sum(1 for _ in images)
            align(work, seen, _Reiterable(seen, images), steps, align_epochs, align_rate, on_progress)
        on_progress("comparing student and teacher")
        errors, agreement = _compare(work, seen, kept)
        top1 = _top1(work, seen, labelled) if labelled is not None else (None, None)
        maps, kernels = _centre_maps(work, moments, source, seen)
    if any(not torch.isfinite(parameter).all() for parameter in work.parameters()):
        raise ValueError("The conversion ended in NaN; the student was left as it was. Please report this teacher.")
    _lay_out(work, own_size, own_patch)
    student.load_state_dict(work.state_dict())
    heads = tuple(
        HeadReport(index, head, *(float(share[head]) for share in (fit.map_share, fit.value_share, fit.fixed_share)))
        for index, fit in sorted(fits.items())
        for head in range(seen.heads)
    )
    return WarmStartReport(
        heads=heads,
        state_errors=errors,
        agreement=agreement,
        student_top1=top1[0],
        teacher_top1=top1[1],
        images=next(iter(moments.values())).images,
        sample=len(kept),
        refitted=refit,
        aligned=align_epochs,
        warnings=(*notes, *_content_warnings(heads)),
        seconds=time.perf_counter() - start,
        mean_maps=maps,
        kernels=kernels,
    )


def _lay_out(student: VitSsog, image_size: Any, patch_size: Any) -> None:
    with torch.random.fork_rng(devices=[]):  # a new patch embedding is initialised before it gets its weights
        student.set_input_size(image_size, patch_size)


def _source_blocks(student: VitSsog, teacher: Teacher, blocks: Sequence[int] | None) -> list[int]:
    depth, count = len(teacher.blocks), len(student.blocks)
    if not isinstance(student, (LoopedVitSsog, OdeVitSsog)):
        if blocks is not None:
            raise ValueError("blocks is for students with shared blocks; a discrete one takes all teacher blocks.")
        if count != depth:
            raise ValueError(
                f"The teacher has depth={depth}, the student depth={count}: create the student with depth={depth}, or "
                f"take another teacher."
            )
        return list(range(depth))
    chosen = [min(SHARED_BLOCK + number, depth - 1) for number in range(count)] if blocks is None else list(blocks)
    if len(chosen) != count or not all(isinstance(index, int) and 0 <= index < depth for index in chosen):
        raise ValueError(
            f"blocks must name a block of the teacher, 0 to {depth - 1}, for each of the {count}, got {blocks}."
        )
    return chosen


def _tensors(teacher: Teacher, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Checked images on the teacher's device."""
    weight = teacher.model.patch_embed.proj.weight
    expected = (weight.shape[1], *teacher.image_size)
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch[0]
        if not isinstance(images, Tensor) or images.dim() != 4 or tuple(images.shape[1:]) != expected:
            shape = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(
                f"Expected images (batch, {', '.join(map(str, expected))}), the teacher's size, got {shape}: resize "
                f"them, or call set_input_size on the teacher. (The student may have another size.)"
            )
        if not torch.isfinite(images).all():
            raise ValueError("A batch of images holds values that are NaN or infinite: omit those images.")
        yield images.to(weight)


class _Reiterable:
    def __init__(self, teacher: Teacher, batches: Iterable[Batch]) -> None:
        self.teacher, self.batches = teacher, batches

    def __iter__(self) -> Iterator[Tensor]:
        return _tensors(self.teacher, self.batches)


@torch.no_grad()
def _observe_all(teacher: Teacher, images: Iterable[Batch], moments: dict[int, HeadMoments], sample: int) -> Tensor:
    """Add all images to the moments; returns the first ``sample`` of them, embedded."""
    kept: list[Tensor] = []
    room = sample
    for batch in _tensors(teacher, images):
        for chunk in batch.split(map_chunk(teacher)):
            tokens = teacher.embed(chunk)
            if not kept and len(chunk):
                require_as_read(teacher, tokens[:1])
            observe(teacher, tokens, moments)
            if room > 0:
                kept.append(tokens[:room].clone())
                room -= len(kept[-1])
    if not kept:
        raise ValueError("Expected images to read the teacher's attention on, got none. A few hundred are enough.")
    for index, moment in moments.items():
        if not all(torch.isfinite(part).all() for part in vars(moment).values() if isinstance(part, Tensor)):
            raise ValueError(f"Block {index} of the teacher gives NaN or infinite values on these images.")
    return torch.cat(kept)


def _fit(mixer: Any, moments: HeadMoments, grid: tuple[int, int], generator: torch.Generator) -> FittedKernels:
    return fit_kernels(moments, grid, mixer.amplitude.shape[1], mixer.convex, generator)


@torch.no_grad()
def _install(mixer: SeparableMixer, fit: FittedKernels, grid: tuple[int, int]) -> None:
    """Put fitted kernels into a mixer, and their average error into its bias."""
    for name in ("offset", "width", "amplitude"):
        getattr(mixer, name).copy_(getattr(fit, name))
    mixer.reference_grid = grid
    mixer.proj.bias += mixer.proj.weight @ fit.shift.flatten().to(mixer.proj.weight)


@torch.no_grad()
def _compare(student: VitSsog, teacher: Teacher, tokens: Tensor) -> tuple[tuple[float, ...], float | None]:
    """Errors of the student's states along its depth, and how often its predictions are the teacher's."""
    count = student.num_steps
    squares = torch.zeros(count, dtype=torch.float64)
    spreads = torch.zeros(count, dtype=torch.float64)
    agreed = 0
    for chunk in tokens.split(map_chunk(teacher)):
        targets, logits = teacher_states(teacher, chunk)
        states = student_states(student, targets[0].float())
        states = states[len(states) // count - 1 :: len(states) // count]
        for number, (state, index) in enumerate(zip(states, matching(count, len(teacher.blocks)), strict=True)):
            target = targets[index].float()
            squares[number] += float((state - target).square().sum())
            spreads[number] += float((target - target.mean((0, 1, 2))).square().sum())
        if has_same_head(student, teacher):
            ours = student.forward_head(student.norm(states[-1]).flatten(1, 2))
            agreed += int((ours.argmax(-1) == logits.argmax(-1)).sum())
    errors = (squares / spreads.clamp_min(1e-12)).sqrt().tolist()
    return tuple(errors), agreed / len(tokens) if has_same_head(student, teacher) else None


@torch.no_grad()
def _top1(
    student: VitSsog, teacher: Teacher, labelled: Iterable[Sequence[Tensor]]
) -> tuple[float | None, float | None]:
    right, total = [0, 0], 0
    for first, labels in labelled:
        images = next(_tensors(teacher, [first]))
        for number, model in enumerate((student, teacher.model)):
            logits = model(images.float() if model is student else images)
            right[number] += int((logits.argmax(-1).cpu() == labels.cpu()).sum())
        total += len(labels)
    if not total:
        raise ValueError("Expected labelled images to measure top-1 on, got none.")
    return right[0] / total, right[1] / total


@torch.no_grad()
def _centre_maps(
    student: VitSsog, moments: dict[int, HeadMoments], source: list[int], teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """Where the centre token looks: in the teacher on average, and by the kernels, both (heads, height, width)."""
    height, width = teacher.grid
    token = height // 2 * width + width // 2
    maps, kernels = [], []
    for index in sorted(moments):
        mixer: Any = student.blocks[source.index(index)].mixer
        maps.append(moments[index].maps[:, token] / moments[index].images)
        kernels.append(dense_operator(*SeparableMixer.kernels(mixer, height, width))[:, token])
    return tuple(torch.cat(parts).unflatten(1, teacher.grid).cpu() for parts in (maps, kernels))  # type: ignore[return-value]


def _content_warnings(heads: Iterable[HeadReport]) -> Iterator[str]:
    for _, group in itertools.groupby(heads, key=lambda head: head.block):
        for head in group:
            if head.values < PURE_CONTENT:
                yield (
                    f"Block {head.block + 1}, head {head.head + 1} is content: its kernels explain {head.values:.1%} "
                    f"of what it mixes, the best fixed map {head.position:.1%}."
                )
