"""Timing calls in turns, so that whatever else the machine does hits all of them."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

Call = Callable[[], Any]

Timer = Callable[[Call, int], float]
"""Makes a call several times in a row and returns the seconds that each took."""

LEAST_TURNS, MOST_TURNS = 3, 50
MOST_REPEATS = 200

DUEL = ("ssog", "ceiling")
"""If others are so slow that there is time for only a few turns, these two go on: they differ by a few percent only."""


def wall_clock() -> float:
    """Seconds of the wall clock."""
    return time.perf_counter()


def cpu_clock() -> float:
    """Seconds that this process computed: with one thread the wall clock, minus what others did in between."""
    return time.process_time()


def timer(clock: Callable[[], float], device: torch.device | str = "cpu") -> Timer:
    """A timer that reads a clock before and after, when the device has nothing left to do."""
    device = torch.device(device)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds_per_call(call: Call, repeats: int) -> float:
        synchronize()
        start = clock()
        for _ in range(repeats):
            call()
        synchronize()
        return (clock() - start) / repeats

    return seconds_per_call


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was too little memory; on the CPU torch has no type for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def take_turns(
    calls: dict[str, Call],
    *,
    timer: Timer,
    turns: int | None = None,
    seconds: float = 0.0,
    sample_seconds: float = 0.0,
    drops: Callable[[str, Exception], bool] = lambda _, error: is_out_of_memory(error),
    advance: Callable[[float], Any] = lambda _: None,
) -> dict[str, list[float]]:
    """Time calls in turns.

    Args:
        calls: What to time, by name; each once per turn.
        timer: Tells how long a call takes.
        turns: How many; if omitted, as many as ``seconds`` allow, at least `LEAST_TURNS` and at most `MOST_TURNS`. The
            two of `DUEL` have as many of these as they would have on their own.
        seconds: About how long all turns take.
        sample_seconds: Least time between two readings of the clock: shorter calls are repeated.
        drops: Gets the name of a call that failed and its error; whether to go on without it. By default if it ran out
            of memory.
        advance: Called after every turn with its share of all turns.

    Returns:
        The milliseconds of every turn, by name; where lengths differ, the shorter ones are of the first turns.
    """
    calls = dict(calls)
    repeats = dict.fromkeys(calls, 1)

    def turn(names: Iterable[str]) -> dict[str, float]:
        times = {}
        for name in names:
            if (call := calls.get(name)) is None:
                continue
            try:
                times[name] = 1e3 * timer(call, repeats[name])
            except Exception as error:
                if not drops(name, error):
                    raise
                del calls[name]
                torch.cuda.empty_cache()
        return times

    def turns_in_time(names: Iterable[str]) -> int:
        return min(MOST_TURNS, max(LEAST_TURNS, int(1e3 * seconds / max(sum(first[name] for name in names), 1e-9))))

    if sample_seconds:
        turn(tuple(calls))  # what is set up by a first call would make the calls look longer than they are
    first = turn(tuple(calls))
    if sample_seconds:
        for name, time_of_one in first.items():
            repeats[name] = max(1, min(MOST_REPEATS, math.ceil(1e3 * sample_seconds / max(time_of_one, 1e-3))))
    count = turns_in_time(first) if turns is None else turns
    total = turns_in_time(DUEL) if turns is None and set(DUEL) <= set(calls) else count
    # the first turn may still set things up; where turns are so long that there are only a few, this is nothing
    taken = []
    if turns is None and count == LEAST_TURNS and seconds > 0:
        taken.append(first)
        advance(1 / total)
    while len(taken) < total:
        taken.append(turn(tuple(calls) if len(taken) < count else DUEL))
        advance(1 / total)
    return {name: [float(f"{times[name]:.6g}") for times in taken if name in times] for name in calls}
