"""Report of a conversion: how much of every head the kernels explain, and how far the student is from its teacher."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

PURE_CONTENT = 0.05
"""Explained share of a head's mixed values below which its kernels say next to nothing."""


@dataclass(frozen=True)
class HeadReport:
    """How one head was converted; shares between 0 and 1.

    Attributes:
        block: The teacher's block, from 0.
        head: The head, from 0.
        map: Share of the mean attention map (of its squares) that the best Gaussians for it explain.
        values: Share of the variance of the mixed values that the kernels explain, over images, tokens and channels.
        position: The same for the best fixed map, applied to this block's values.
    """

    block: int
    head: int
    map: float
    values: float
    position: float

    @property
    def content(self) -> float:
        """Share of the mixed values that no fixed map explains: the part that depends on the image."""
        return 1 - self.position


@dataclass(frozen=True)
class WarmStartReport:
    """What `timm_ssog.warm_start` did, and what to expect from its student; prints as a table.

    Attributes:
        heads: Every converted head.
        state_errors: For each feature tap of the student, the root mean square distance of its patch tokens from the
            teacher's at the same depth, over the standard deviation of the teacher's; measured on ``sample`` images.
        agreement: Share of images with the teacher's prediction; None without a common head.
        student_top1: Top-1 accuracy of the student on the labelled images; None without labels.
        teacher_top1: Likewise for the teacher.
        images: Images whose moments the kernels were fitted to.
        sample: Images on which states were compared (and, with ``refitted``, layers refitted).
        refitted: Whether linear maps were refitted.
        aligned: Epochs of alignment.
        warnings: What to know before using it.
        seconds: How long it took.
        mean_maps: (heads, height, width), where the grid's centre token looks on average in the teacher.
        kernels: (heads, height, width), the same for the fitted kernels.
    """

    heads: tuple[HeadReport, ...]
    state_errors: tuple[float, ...]
    agreement: float | None
    student_top1: float | None
    teacher_top1: float | None
    images: int
    sample: int
    refitted: bool
    aligned: int
    warnings: tuple[str, ...]
    seconds: float
    mean_maps: Tensor = field(repr=False, compare=False)
    kernels: Tensor = field(repr=False, compare=False)

    @property
    def values(self) -> float:
        """Mean share of the mixed values that the kernels explain."""
        return sum(head.values for head in self.heads) / len(self.heads)

    @property
    def position(self) -> float:
        """Mean share of the mixed values that fixed maps could explain."""
        return sum(head.position for head in self.heads) / len(self.heads)

    @property
    def expectation(self) -> str:
        """What to expect, in a few sentences."""
        text = (
            f"The kernels explain {self.values:.0%} of what the teacher's attention mixes; the best fixed maps would "
            f"explain {self.position:.0%}. The rest is content, which fixed kernels cannot express. "
        )
        if self.refitted or self.aligned:
            return text + (
                "The student works without training, but less well than its teacher. Fine-tune it at a learning rate "
                "of 5e-4 or less; a larger one undoes the refit."
            )
        return text + (
            "Without training the student is far below its teacher: fine-tune it, or convert with refit=True if "
            "there are no labels."
        )

    def __str__(self) -> str:
        blocks = sorted({head.block for head in self.heads})
        lines = [f"{'block':>5} {'map':>6} {'values':>7} {'position':>9} {'content':>8}   worst head"]
        for block in blocks:
            heads = [head for head in self.heads if head.block == block]
            worst = min(heads, key=lambda head: head.values)
            means = [
                sum(getattr(head, name) for head in heads) / len(heads)
                for name in ("map", "values", "position", "content")
            ]
            lines.append(
                f"{block + 1:>5} {means[0]:>6.0%} {means[1]:>7.0%} {means[2]:>9.0%} {means[3]:>8.0%}   "
                f"head {worst.head + 1}: {worst.values:.0%}"
            )
        lines.append(f"state errors along the depth: {' '.join(f'{error:.2f}' for error in self.state_errors)}")
        if self.agreement is not None:
            lines.append(f"agreement with the teacher: {self.agreement:.1%}")
        if self.student_top1 is not None and self.teacher_top1 is not None:
            lines.append(f"top-1: student {self.student_top1:.1%}, teacher {self.teacher_top1:.1%}")
        lines.append(f"{self.images} images, {self.seconds:.0f} s")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings), self.expectation])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types, without the maps."""
        parts = {name: value for name, value in vars(self).items() if name not in ("mean_maps", "kernels", "heads")}
        heads = [{**asdict(head), "content": head.content} for head in self.heads]
        return {**parts, "expectation": self.expectation, "heads": heads}

    def to_json(self) -> str:
        """The report as JSON, without the maps."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
