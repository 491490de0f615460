"""How a continuous model is solved: the only home of its solver settings."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from timm_ssog.errors import require_bool, require_choice, require_positive, require_positive_int
from timm_ssog.runge_kutta import PAIRS, TABLEAUS, Tableau

ADAPTIVE_SOLVERS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
PER_SAMPLE_SOLVERS = tuple(PAIRS)


@dataclass(frozen=True)
class Solver:
    """A method and its settings, under the names that they have as options of a model.

    Attributes:
        solver: A fixed-step method (``"euler"``, ``"midpoint"``, ``"heun"``, ``"rk4"``) or an adaptive one
            (``"dopri5"``, ``"dopri8"``, ``"bosh3"``, ``"fehlberg2"``, ``"adaptive_heun"``).
        solver_steps: Steps of a fixed-step method over the horizon; with an adaptive one only the feature taps.
        rtol: Relative tolerance of an adaptive method.
        atol: Absolute tolerance of an adaptive method.
        adjoint: Backpropagate by the adjoint equation, in memory that does not grow with the steps, except that a flow
            penalty keeps one state and the terms of its mean squares for each of ``solver_steps`` intervals.
        per_sample: Solve every image with its own steps, so that no prediction depends on batch-mates; with fixed steps
            none does anyway.
        max_evaluations: Evaluations of the velocity after which an adaptive solve gives up.

    Raises:
        ValueError: if a setting is unknown, out of range or does not go with another.
    """

    solver: str = "midpoint"
    solver_steps: int = 6
    rtol: float = 1e-3
    atol: float = 1e-3
    adjoint: bool = False
    per_sample: bool = False
    max_evaluations: int = 1000

    def __post_init__(self) -> None:
        require_choice("solver", self.solver, (*TABLEAUS, *ADAPTIVE_SOLVERS))
        require_positive_int("solver_steps", self.solver_steps)
        require_positive_int("max_evaluations", self.max_evaluations)
        require_bool("adjoint", self.adjoint)
        require_bool("per_sample", self.per_sample)
        require_positive("rtol", self.rtol)
        require_positive("atol", self.atol)
        object.__setattr__(self, "solver_steps", int(self.solver_steps))  # it may be numpy's
        if self.is_fixed_step or not self.per_sample:
            return
        if self.solver not in PER_SAMPLE_SOLVERS:
            raise ValueError(
                f"per_sample needs one of the adaptive solvers {', '.join(map(repr, PER_SAMPLE_SOLVERS))} or a "
                f"fixed-step one, got {self.solver!r}."
            )
        if self.adjoint:
            raise ValueError(
                "adjoint and per_sample don't go together: the adjoint equation of a batch has one clock, per_sample "
                "one per image. Choose one of them."
            )

    @property
    def is_fixed_step(self) -> bool:
        """Whether the steps form a fixed grid."""
        return self.solver in TABLEAUS

    @property
    def tableau(self) -> Tableau:
        """The method of a fixed-step solver; Euler's for an adaptive one, which has none of its own."""
        return TABLEAUS[self.solver if self.is_fixed_step else "euler"]

    def change(self, **options: Any) -> "Solver":
        """The same solver with other options; those that are None stay as they are.

        Raises:
            ValueError: as the class, and for an unknown option.
        """
        for name in options:
            require_choice("option", name, SOLVER_OPTIONS)
        return dataclasses.replace(self, **{name: value for name, value in options.items() if value is not None})


SOLVER_OPTIONS = tuple(field.name for field in dataclasses.fields(Solver))
"""Names of the model options that are solver settings."""
