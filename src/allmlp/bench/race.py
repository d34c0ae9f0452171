"""Several calls timed in turns, A B C B A C ...: what the machine does meanwhile, hot or busy, hits all alike.

The order is drawn anew for every round: in a fixed one the same call would always find the machine as its neighbour
left it, and right behind a large matrix product a H200 is 6 % slower.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from allmlp.bench.clock import Call, Clock
from allmlp.errors import UserError, one_line

T = TypeVar("T")
ROUNDS, FEWEST = 10, 3
"""Turns of every call; fewer where a single call takes longer than a turn should."""
WARM_UP = 3
"""Calls before the first that counts: compilation, and what a CUDA graph is recorded from."""
MOST = 1000
"""Calls in one turn."""
ALONE = 0.2
"""The share of a turn's calls that are timed one by one, for the latency."""


class Spread(NamedTuple):
    """The middle of several measurements, and the quarter and three quarters around it."""

    median: float
    low: float
    high: float

    @property
    def share(self) -> float:
        """The inter-quartile range as a part of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


class Timing(NamedTuple):
    """Seconds of one call, round by round."""

    alone: tuple[float, ...]
    """From the call to its result, nothing else under way."""
    turns: tuple[float, ...]
    """In a row of calls, where launching one overlaps with computing another."""

    @property
    def latency(self) -> Spread:
        return spread(self.alone)

    @property
    def turn(self) -> Spread:
        return spread(self.turns)


class Failure(NamedTuple):
    """Why something has no number."""

    note: str


def race(calls: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Timing | Failure]:
    """Time every call for about `seconds`, in turns. One that fails leaves the race, the others go on."""
    found: dict[str, Timing | Failure] = {}
    single: dict[str, float] = {}
    for name, call in calls.items():
        taken = attempt(lambda call=call: warm_up(call, clock))
        if isinstance(taken, Failure):
            found[name] = taken
        else:
            single[name] = taken
    rounds = max(FEWEST, min(ROUNDS, round(seconds / max(single.values(), default=1.0))))
    counts = {name: max(1, min(MOST, round(seconds / rounds / one))) for name, one in single.items()}
    alone: dict[str, list[float]] = {name: [] for name in counts}
    turns: dict[str, list[float]] = {name: [] for name in counts}
    with no_collecting():
        for number in range(rounds):
            for name in shuffled([name for name in counts if name not in found], number):
                turn = attempt(lambda name=name: one_turn(calls[name], clock, counts[name]))
                if isinstance(turn, Failure):
                    found[name] = turn
                else:
                    alone[name].append(turn[0])
                    turns[name].append(turn[1])
    for name in counts:
        if name not in found:
            found[name] = Timing(tuple(alone[name]), tuple(turns[name]))
    return {name: found[name] for name in calls}


def shuffled(names: list[str], seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


def warm_up(call: Call, clock: Clock) -> float:
    """Seconds of one call, after those that do not count."""
    clock.time(call, WARM_UP)
    return max(clock.time(call, 1), 1e-9)


def one_turn(call: Call, clock: Clock, count: int) -> tuple[float, float]:
    """Some calls alone, then the rest in a row: seconds of one of the former, and of one of the latter."""
    singles = max(1, round(ALONE * count))
    alone = statistics.median(clock.time(call, 1) for _ in range(singles))
    row = count - singles
    return alone, clock.time(call, row) / row if row else alone


def spread(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """How much faster than the others: the median over rounds, where both met the same machine."""
    return statistics.median(other / time for time, other in zip(times, others))


def attempt(do: Callable[[], T]) -> T | Failure:
    """The result, or why there is none: a side that cannot run costs one row, not the run."""
    try:
        return do()
    except UserError as reason:
        failure = Failure(one_line(reason))
    except Exception as reason:
        failure = Failure("out of memory" if is_out_of_memory(reason) else f"failed: {one_line(reason)}")
    release()
    return failure


def is_out_of_memory(reason: Exception) -> bool:
    """Also the CPU's allocator, which says so in words alone."""
    known = isinstance(reason, (torch.OutOfMemoryError, MemoryError))
    return known or "can't allocate memory" in str(reason) or "CUDA out of memory" in str(reason)


def release() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def no_collecting() -> Iterator[None]:
    """Python's garbage collector would stop the clock's calls wherever it likes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
