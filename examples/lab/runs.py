"""Runs of an experiment over settings and seeds, in one results file that a second call continues."""

import argparse
import contextlib
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import timm
import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from timm_ssog.files import replace_file

OUTPUT = Path(__file__).parents[2] / "output"

Task = tuple[str, int]
"""A setting and a seed."""


def provenance() -> dict[str, Any]:
    """Versions and date, for the record of a run."""
    return {
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "timm": timm.__version__},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Reserve a results file for this process, which also checks before any measurement that it can be written.

    Raises:
        SystemExit: if it cannot be written, or another process has it.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        if path.is_dir():
            raise IsADirectoryError("a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise SystemExit(f"Another process is writing {path}: name another file with --output.") from None
    except OSError as error:
        raise SystemExit(f"{path} cannot be written ({error}): name another file with --output.") from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def results_of(path: Path, recipe: dict[str, Any], fields: Collection[str]) -> list[dict[str, Any]]:
    """The runs recorded in a results file, none if there is no such file.

    Args:
        path: The file.
        recipe: What all its runs must share.
        fields: What every record must have.

    Raises:
        SystemExit: if the file is not a results file, or its runs followed another recipe.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, runs = dict(content["recipe"]), list(content["runs"])
        for record in runs:
            for field in fields:
                record[field]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} holds no results of this script ({error!r}): name another --output.") from error
    if found != recipe:
        changed = ", ".join(key for key in {**found, **recipe} if found.get(key) != recipe.get(key))
        raise SystemExit(f"The runs in {path} followed another recipe ({changed}): name another file with --output.")
    return runs


def write_results(path: Path, recipe: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Write all runs at once."""
    replace_file(path, json.dumps({"recipe": recipe, "runs": runs}, indent=1) + "\n")


def records(run: Callable[[str, int], dict[str, Any]], tasks: list[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """Run all tasks and yield each record when it is there, from several processes if ``jobs`` > 1."""
    if jobs == 1:
        for task in tasks:
            yield run(*task)
        return
    # spawned, as torch's threads do not survive a fork; Ctrl-C ends the workers without a word
    quiet = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=signal.signal, initargs=quiet) as pool:
        futures = [pool.submit(run, *task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_all(
    output: Path,
    recipe: dict[str, Any],
    settings: list[str],
    *,
    seeds: int,
    run: Callable[[str, int], dict[str, Any]],
    jobs: int = 1,
) -> list[dict[str, Any]]:
    """Run every setting with every seed, except those already in the results file, and record each there.

    Args:
        output: The results file.
        recipe: What all runs share; runs that followed another one are not mixed in.
        settings: Names that ``run`` understands.
        seeds: Number of seeds, counted from 0.
        run: Maps a setting and a seed to a record with ``setting``, ``seed`` and ``accuracy``; importable, for it
            may run in other processes.
        jobs: Processes, one thread each.

    Returns:
        All records of the file.

    Raises:
        SystemExit: if the file does not fit, or on an interruption.
    """
    # seeds outermost: what is interrupted has fewer seeds, not fewer settings
    wanted = [(setting, seed) for seed in range(seeds) for setting in settings]
    with claimed(output):
        runs = results_of(output, recipe, ("setting", "seed", "accuracy"))
        done = {(record["setting"], record["seed"]) for record in runs}
        tasks = [task for task in wanted if task not in done]
        try:
            with tqdm(total=len(wanted), initial=len(wanted) - len(tasks), unit="run", smoothing=0) as bar:
                for record in records(run, tasks, jobs):
                    runs.append(record)
                    write_results(output, recipe, runs)
                    bar.set_postfix_str(f"{record['setting']}, seed {record['seed']}: {record['accuracy']:.1f} %")
                    bar.update()
        except KeyboardInterrupt:
            raise SystemExit(
                f"\nInterrupted. {len(runs)} runs are in {output}; the same command resumes from there."
            ) from None
    return runs


def results_file(options: argparse.Namespace, name: str) -> Path:
    """Where an experiment writes, unless told otherwise: below output/, not over the results of the repository."""
    return options.output or OUTPUT / f"{name}{'-quick' if options.quick else ''}.json"


def run_options(description: str | None, settings: Collection[str]) -> argparse.ArgumentParser:
    """A parser of the options that all experiments have; `parse_counts` reads them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds per setting (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="SETTING", choices=settings, help="run only these settings")
    parser.add_argument("--output", type=Path, help="results file (default: named after the script, in output/)")
    parser.add_argument(
        "--quick", action="store_true", help="one epoch over 50 images, to see that it runs; not for results"
    )
    return parser


def parse_counts(
    parser: argparse.ArgumentParser, argv: list[str] | None, counts: Sequence[str] = ("seeds", "jobs")
) -> argparse.Namespace:
    """Parse, and refuse numbers below one; those of ``counts`` that were not given may be None."""
    options = parser.parse_args(argv)
    for name in counts:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return options


def mean_spread(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is nan for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def decimal(value: float, digits: int = 1) -> str:
    """A number with this many decimals, or a dash for nan."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def plus_minus(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation, with this many decimals."""
    mean, spread = mean_spread(values)
    return f"{mean:.{digits}f} ± {decimal(spread, digits)}"
