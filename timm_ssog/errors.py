"""How this package reports a wrong input: what was expected, what came, what to do."""

import difflib
import math
import numbers
import operator
import sys
from collections.abc import Sequence


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless an option is one of its allowed values.

    Raises:
        ValueError: names the option, what came, the allowed values and the nearest of them.
    """
    if value in choices:
        return
    expected = ", ".join(map(repr, choices))
    raise ValueError(f"{name} must be one of {expected}, got {value!r}.{did_you_mean(value, choices)}")


def did_you_mean(value: object, choices: Sequence[str]) -> str:
    """A question, with a space before it, that names the choice nearest to a value; empty if none is near."""
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near and near[0] else ""


def require_positive_int(name: str, value: object, hint: str = "") -> None:
    """Raise unless an option is an integer of at least one.

    Raises:
        ValueError: names the option, what came and, if given, what to do.
    """
    try:
        count = operator.index(value)  # type: ignore[arg-type]  (numpy's integers are integers too)
    except TypeError:
        count = 0
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.{' ' + hint if hint else ''}")


def require_count(name: str, value: object) -> None:
    """Raise unless an option is an integer of at least zero.

    Raises:
        ValueError: names the option and what came.
    """
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")


def require_number(name: str, value: object, expected: str, least: float, most: float = sys.float_info.max) -> None:
    """Raise unless an option is a number from ``least`` to ``most``.

    Raises:
        ValueError: names the option, what was expected, in the given words, and what came.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not least <= float(value) <= most:
        raise ValueError(f"{name} must be {expected}, got {value!r}.")


def require_positive(name: str, value: object) -> None:
    """Raise unless an option is a positive finite number.

    Raises:
        ValueError: names the option and what came.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")


def require_rate(name: str, value: object) -> None:
    """Raise unless an option is a rate of at least 0 and below 1, which leaves something.

    Raises:
        ValueError: names the option and what came.
    """
    if not isinstance(value, numbers.Real) or not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}.")


def require_bool(name: str, value: object) -> None:
    """Raise unless an option is True or False: ``"false"`` would count as true.

    Raises:
        ValueError: names the option and what came.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


class SolveError(RuntimeError):
    """A solve of the ODE that could not go on; says how far it got and what to change.

    Attributes:
        time: Time reached, in units of depth.
        evaluations: Evaluations of the velocity up to that time.
    """

    def __init__(self, problem: str, time: float, evaluations: int, remedy: str) -> None:
        super().__init__(problem, time, evaluations, remedy)
        self.time = time
        self.evaluations = evaluations

    def __str__(self) -> str:
        problem, time, evaluations, remedy = self.args
        return f"{problem}, at time {time:.6g} after {evaluations} evaluations of the velocity. {remedy}"
