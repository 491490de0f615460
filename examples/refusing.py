"""How the examples refuse what they cannot use: a sentence on stderr and exit status 2, as argparse does."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

from timm_ssog.errors import require_positive

EXPECTED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    ImportError,
    OSError,
    SafetensorError,
)
"""What timm, torch and the file system raise over a wrong option or a damaged file."""


LARGEST_RATE = 1e30
"""Above, AdamW's steps overflow in float32."""


LARGEST_LOSS = 1e3
"""A model that answers at random has a cross-entropy of the logarithm of its classes: 10 at 22,000."""


def refuse(sentence: str) -> NoReturn:
    """Print a sentence that says what was expected, what came and what to do, and leave with status 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def refusing(task: str, remedy: str = "") -> Iterator[None]:
    """Refuse if a task that depends on the user's input fails: "Cannot TASK: what went wrong. What to do."."""
    try:
        yield
    except EXPECTED as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"there is no {reason}"
        refuse(f"Cannot {task}: {reason.removesuffix('.')}. {remedy}".rstrip())


@contextlib.contextmanager
def needing(package: str, command: str) -> Iterator[None]:
    """Refuse if an import fails, and name the command that installs what is missing."""
    try:
        yield
    except ImportError as error:
        refuse(f"This example needs {package}, and python says: {error}. Install it: {command}")


def require(
    parser: argparse.ArgumentParser, options: argparse.Namespace, check: Callable[[str, Any], None], *names: str
) -> None:
    """End with the parser's usage unless each option passes a check of `timm_ssog.errors`."""
    for name in names:
        try:
            check(f"--{name.replace('_', '-')}", getattr(options, name))
        except ValueError as error:
            parser.error(str(error))


def require_learning_rate(name: str, value: float) -> None:
    """Raise a ValueError unless a learning rate is positive, and small enough for single precision."""
    require_positive(name, value)
    if value > LARGEST_RATE:
        raise ValueError(f"{name} must be at most {LARGEST_RATE:g}, got {value!r}. 1e-3 is usual.")


def require_place(name: str, path: Path) -> None:
    """Refuse unless a file or folder of this path can be written; makes nothing."""
    path = path.absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    if place == path and not path.is_dir():
        place = path.parent
    if not place.is_dir():
        refuse(f"{name} must be in a folder, got {path}, where {place} is a file: name another path.")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        refuse(f"{name} must be in a folder that you may write, got {path}: {error.strerror}. Name another path.")
    if path.is_file() and not os.access(path, os.W_OK):
        refuse(f"{name} must be a file that you may write, got {path}: name another, or change its permissions.")


def require_convergence(loss: float, when: str, rate: float, kept: str = "") -> None:
    """Refuse to go on after a loss that only a model with ruined weights has.

    Args:
        loss: A cross-entropy.
        when: The epoch or step, for the message.
        rate: The learning rate that was given.
        kept: A sentence about what was saved before.
    """
    if not loss <= LARGEST_LOSS:
        refuse(f"Training diverged in {when} (loss {loss:g}): lower --lr, got {rate:g}. {kept}".rstrip())
