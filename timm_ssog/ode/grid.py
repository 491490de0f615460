"""The steps of a continuous model in time, and which block is in force when."""

import math
from dataclasses import dataclass

SLACK = 1e-6
"""Fraction of a step by which two equal times may differ: sums of steps round."""


@dataclass(frozen=True)
class TimeGrid:
    """Equal steps from time 0 on, and blocks that are each in force for an equal span.

    Steps and blocks are counted from zero.

    Attributes:
        step_size: Length of a step.
        block_span: Time for which a block is in force.
        steps: Number of steps.
    """

    step_size: float
    block_span: float
    steps: int

    @classmethod
    def over(cls, horizon: float, *, steps: int, blocks: int) -> "TimeGrid":
        """The grid with this many steps and blocks from time 0 to the horizon."""
        return cls(horizon / steps, horizon / blocks, steps)

    @property
    def horizon(self) -> float:
        """Time at which the last step ends."""
        return self.steps * self.step_size

    @property
    def blocks(self) -> int:
        """Number of blocks that are in force before the horizon."""
        return math.ceil(self.horizon / self.block_span - SLACK)

    @property
    def is_even(self) -> bool:
        """Whether every block has a whole number of steps."""
        steps = self.block_span / self.step_size
        return self.blocks == 1 or abs(steps - round(steps)) <= SLACK

    @property
    def steps_per_block(self) -> int:
        """Steps of each block on an even grid; all steps if there is one block."""
        return self.steps if self.blocks == 1 else max(round(self.block_span / self.step_size), 1)

    def cut(self, steps: int) -> "TimeGrid":
        """The first steps of the grid."""
        return TimeGrid(self.step_size, self.block_span, steps)

    def end(self, step: int) -> float:
        """Time at which a step ends."""
        return (step + 1) * self.step_size

    def block_at(self, step: int) -> int:
        """The block in force when a step begins."""
        return min(int(step * self.step_size / self.block_span + SLACK), self.blocks - 1)

    def in_force(self, block: int) -> tuple[float, float]:
        """Start and end of the time for which a block is in force, up to the horizon."""
        start = block * self.block_span
        return start, max(start, min((block + 1) * self.block_span, self.horizon))

    def overlap(self, step: int, block: int) -> float:
        """For how long a block is in force within a step; 0 if the two merely touch."""
        start, end = self.in_force(block)
        span = min(end, self.end(step)) - max(start, step * self.step_size)
        return span if span > SLACK * self.step_size else 0.0

    def ends_inside(self, block: int) -> list[int]:
        """The steps that end while a block is in force, but not at its start or end."""
        start, end = self.in_force(block)
        slack = SLACK * self.step_size
        return [step for step in range(self.steps) if start + slack < self.end(step) < end - slack]

    def ending_at(self, time: float) -> int | None:
        """The step that ends at a time; None if none does."""
        step = round(time / self.step_size) - 1
        return step if abs(self.end(step) - time) < SLACK * self.step_size else None
