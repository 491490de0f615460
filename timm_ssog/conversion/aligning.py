"""Training a converted model towards its teacher's states, without labels: states of every block, then logits."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from timm_ssog.conversion.copying import has_same_head
from timm_ssog.conversion.teachers import Teacher, after_mixing, after_mlp, attend
from timm_ssog.vit_ssog import LoopedVitSsog, OdeVitSsog, VitSsog

RATE = 1e-3
STEP_IMAGES = 10
"""Images per step: many small steps come closer to the teacher than few large ones in the same time."""


@torch.no_grad()
def teacher_states(teacher: Teacher, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """The teacher's patch tokens before the first block, between attention and MLP and after each block; its logits.

    Returns:
        2 * depth + 1 states (batch, height, width, channels), and the logits from the last.
    """
    states = [teacher.patches(tokens)]
    for block in teacher.blocks:
        tokens = after_mixing(block, tokens, attend(block, tokens))
        states.append(teacher.patches(tokens))
        tokens = after_mlp(block, tokens)
        states.append(teacher.patches(tokens))
    return states, teacher.finish(tokens)


def student_states(student: VitSsog, x: Tensor) -> list[Tensor]:
    """The student's states from embedded tokens (batch, height, width, channels), evenly spaced along its depth.

    For a discrete student, the states between mixer and MLP and after each block; for one with shared blocks, the
    states at its feature taps.
    """
    if isinstance(student, (LoopedVitSsog, OdeVitSsog)):
        return student.evolve(x, list(range(student.num_steps)), student.num_steps)[1]
    states = []
    for block in student.blocks:
        x = x + block.mixer(block.norm1(x))  # type: ignore[operator]
        states.append(x)
        x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
        states.append(x)
    return states


def matching(count: int, depth: int) -> list[int]:
    """For each student state, the index of the teacher's state at the same depth, among 2 * depth + 1."""
    return [max(1, round((number + 1) * 2 * depth / count)) for number in range(count)]


def align(
    student: VitSsog,
    teacher: Teacher,
    batches: Iterable[Tensor],
    batches_per_epoch: int,
    epochs: int = 1,
    rate: float = RATE,
    on_progress: Callable[[str], None] = lambda step: None,
) -> None:
    """Train the student in place: squared distance of each state over the teacher's squared update, and KL of logits.

    Args:
        student: The student, with the teacher's grid, in eval mode: nothing in it is random.
        teacher: The teacher.
        batches: Batches of images, iterated once per epoch.
        batches_per_epoch: Number of batches, for the cosine schedule of the learning rate.
        epochs: Passes over the batches.
        rate: Initial learning rate.
        on_progress: Called with a line per epoch.

    Raises:
        ValueError: if the loss is not finite.
    """
    with_logits = has_same_head(student, teacher)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    done, total = 0, max(1, batches_per_epoch * epochs)
    for epoch in range(epochs):
        losses: list[float] = []
        for batch in batches:
            # the rate is constant within a batch: the number of steps in later batches is not known
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done / total))
            done += 1
            for images in batch.split(STEP_IMAGES):
                with torch.enable_grad():
                    loss = _distance(student, teacher, images, with_logits)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    raise ValueError(
                        "Alignment diverged (its loss is NaN or infinite); the student was left as it was. Convert "
                        "without it, or with a smaller align_rate."
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        on_progress(f"aligned, epoch {epoch + 1} of {epochs}: loss {sum(losses) / max(1, len(losses)):.3f}")
    optimizer.zero_grad()


def _distance(student: VitSsog, teacher: Teacher, images: Tensor, with_logits: bool) -> Tensor:
    targets, logits = teacher_states(teacher, teacher.embed(images).detach())
    states = student_states(student, student.embed(images))
    loss = states[0].new_zeros(())
    before = 0
    for state, index in zip(states, matching(len(states), len(teacher.blocks)), strict=True):
        update = (targets[index] - targets[before if index > before else index - 1]).square().mean()
        loss = loss + (state - targets[index]).square().mean() / update.clamp_min(1e-12)
        before = index
    if with_logits:
        ours = student.forward_head(student.norm(states[-1]).flatten(1, 2))
        divergence = F.kl_div(ours.log_softmax(-1), logits.log_softmax(-1), reduction="batchmean", log_target=True)
        loss = loss + divergence
    return loss
