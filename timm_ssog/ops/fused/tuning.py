"""Optional measurement of launches on the current machine, kept between processes.

``TIMM_SSOG_AUTOTUNE=1`` turns it on: the first call for each kernel, dtype, longest axis, head_dim and number of
components compiles and times a few dozen launches (about a minute), once per card and release of torch.
Results may then differ between machines in the last digits, as the order of sums does.
"""

import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from timm_ssog.files import replace_file
from timm_ssog.ops.fused import support
from timm_ssog.ops.fused.tables import Tile

SWITCH = "TIMM_SSOG_AUTOTUNE"

MOST_REGISTERS = 160
"""Most accumulators per thread that leave enough registers for everything else."""

TIMINGS = 9

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_chosen: dict[str, Tile | None] = {}


def fastest(
    kernel: str,
    problem: tuple[int, ...],
    static: Tile | None,
    launch: Callable[..., Result],
    values: Tensor,
) -> Result:
    """Launch a kernel, with the table's tile or, where tuning is on, the fastest one for this problem.

    Args:
        kernel: ``"mix"`` or ``"gradient"``; the second also has matrix products as a candidate, represented by None.
        problem: The keys of the tables; the batch is not one of them.
        static: The tile of the table.
        launch: Runs the kernel with a tile; may be called more than once.
        values: Tensor with the device and the dtype.
    """
    capturing = values.is_cuda and torch.cuda.is_current_stream_capturing()
    if os.environ.get(SWITCH) != "1" or capturing:
        return launch(static)
    key = _key(kernel, problem, values)
    if key not in _chosen:
        _chosen.update(_read())
    if key not in _chosen:
        _chosen[key] = _measure(key, kernel, problem, static, launch, values.device)
        _write()
    return launch(_chosen[key])


def cache_path() -> Path:
    """The file that keeps the measurements."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # without a home directory, as in many containers, the tilde stays
    root = Path(tempfile.gettempdir()) if cache.startswith("~") else Path(cache)
    return root / "timm_ssog" / "autotune.json"


def forget() -> None:
    """Forget the launches that this process measured or read; the file keeps them."""
    _chosen.clear()


def candidates(kernel: str, problem: tuple[int, ...], static: Tile | None) -> Iterator[Tile | None]:
    """Launches worth trying, the table's first."""
    yield static
    if kernel == "gradient" and static is not None:
        yield None
    if static is None:
        return
    for rows, chunk, channels, warps, stages in itertools.product((16, 32), (4, 8, 16), (16, 32), (4, 8), (1, 2, 3)):
        tile = static._replace(rows=rows, chunk=chunk, channels=channels, warps=warps, stages=stages)
        held = tile.extent * (rows * channels if kernel == "mix" else tile.group * chunk)
        intermediate = tile.group * rows * chunk * channels
        # the second product sums over at least 16 pairs (m, l), which tensor cores require
        if tile.group * chunk >= 16 and held + intermediate <= MOST_REGISTERS * 32 * warps and tile != static:
            yield tile


def _measure(
    key: str,
    kernel: str,
    problem: tuple[int, ...],
    static: Tile | None,
    launch: Callable[..., object],
    device: torch.device,
) -> Tile | None:
    seconds: dict[Tile | None, float] = {}
    for tile in candidates(kernel, problem, static):
        try:
            seconds[tile] = _seconds(launch, tile, device)
        except Exception as error:  # too much shared memory, or a shape that this release cannot compile
            _log.debug("%s: %s does not run here: %s", key, tile, error)
    if not seconds:
        raise RuntimeError(f"No launch of {key} runs here; leave {SWITCH} unset.")
    best = min(seconds, key=seconds.__getitem__)
    _log.info("%s: %s in %.1f us, best of %d", key, best, seconds[best] * 1e6, len(seconds))
    return best


def _seconds(launch: Callable[..., object], tile: Tile | None, device: torch.device) -> float:
    launch(tile)
    timings = []
    for _ in range(TIMINGS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            launch(tile)
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            timings.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            launch(tile)
            timings.append(time.perf_counter() - begin)
    return statistics.median(timings)


def _key(kernel: str, problem: tuple[int, ...], values: Tensor) -> str:
    device = torch.cuda.get_device_name(values.device) if values.is_cuda else values.device.type
    precision = support.precision(values.dtype)
    return json.dumps([kernel, device, torch.__version__, str(values.dtype), precision, *problem])


def _read() -> dict[str, Tile | None]:
    try:
        entries = json.loads(cache_path().read_text())
        return {key: None if tile is None else Tile(*tile) for key, tile in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read and will be replaced: %s", cache_path(), error)
        return {}


def _write() -> None:
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(_chosen, indent=1))
    except OSError as error:
        _log.warning("%s cannot be written, so tuning starts again in the next process: %s", path, error)
