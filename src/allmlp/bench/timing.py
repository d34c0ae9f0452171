"""Interleaved timing: all calls run in every round, so that heat and background load affect all of them equally.

The order is shuffled in every round: in a fixed order a call always follows the same neighbor, and right after a large
matmul an H200 is 6 % slower.
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
from allmlp.errors import UserError, is_out_of_memory, one_line

T = TypeVar("T")
ROUNDS, FEWEST = 10, 3
"""Rounds per call; fewer if a row takes longer than a round should."""
WARM_UP = 3
"""Untimed calls: compilation and CUDA-graph capture."""
MAX_CALLS = 1000
"""Calls in one row."""
MAX_SINGLE = 10
"""Calls of one round that are timed one by one: a tenth of the row, up to this many."""


class Quartiles(NamedTuple):
    """Median and quartiles of several measurements."""

    median: float
    low: float
    high: float


class Timing(NamedTuple):
    """Seconds per call of each round."""

    latencies: tuple[float, ...]
    """A single call, from launch to result."""
    calls: tuple[float, ...]
    """Back-to-back calls, where launches overlap with execution."""
    device_times: tuple[float, ...] = ()
    """A single call on the GPU alone, without its launch; empty on a CPU."""

    @property
    def latency(self) -> Quartiles:
        return quartiles(self.latencies)

    @property
    def call(self) -> Quartiles:
        return quartiles(self.calls)

    @property
    def device_time(self) -> Quartiles | None:
        return quartiles(self.device_times) if self.device_times else None


class Failure(NamedTuple):
    """Why a measurement failed."""

    note: str


def time_interleaved(calls: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Timing | Failure]:
    """Time every call for about `seconds` in interleaved rounds. A call that fails is dropped; the others go on."""
    failures: dict[str, Timing | Failure] = {}
    single: dict[str, float] = {}
    for name, call in calls.items():
        taken = try_call(lambda call=call: warm_up(call, clock))
        if isinstance(taken, Failure):
            failures[name] = taken
        else:
            single[name] = taken
    shortest = max(clock.min_seconds, *single.values(), 1e-9)
    rounds = max(FEWEST, min(ROUNDS, round(seconds / shortest)))
    row = max(clock.min_seconds, seconds / rounds)
    counts = {name: max(clock.min_calls, min(MAX_CALLS, round(row / one))) for name, one in single.items()}
    timings = {name: Timing((), ()) for name in counts}
    with gc_disabled():
        for number in range(rounds):
            for name in shuffled([name for name in counts if name not in failures], number):
                timed = try_call(lambda name=name: one_round(calls[name], clock, counts[name]))
                if isinstance(timed, Failure):
                    failures[name] = timed
                else:
                    timings[name] = Timing(*(before + new for before, new in zip(timings[name], timed)))
    return {name: failures.get(name) or timings[name] for name in calls}


def shuffled(names: list[str], seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


def warm_up(call: Call, clock: Clock) -> float:
    """Warm up, then return the seconds of one call."""
    for _ in range(WARM_UP):
        call()
    return max(clock.latency(call), 1e-9)


def one_round(call: Call, clock: Clock, count: int) -> Timing:
    """Seconds per call in a row, then the medians of single calls: latency, and time on the device."""
    row = clock.row(call, count)
    if count == 1:
        return Timing((row,), (row,))
    singles = range(max(1, min(MAX_SINGLE, count // 10)))
    latency = statistics.median(clock.latency(call) for _ in singles)
    device_times = [device_time for _ in singles if (device_time := clock.device_time(call, latency)) is not None]
    return Timing((latency,), (row,), (statistics.median(device_times),) if device_times else ())


def quartiles(values: Sequence[float]) -> Quartiles:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


def speedup(times: Sequence[float], others: Sequence[float]) -> Quartiles:
    """Speedup over the others: quartiles of per-round ratios, since a round sees one state of the machine."""
    return quartiles([other / time for time, other in zip(times, others)])


def try_call(call: Callable[[], T]) -> T | Failure:
    """The result, or the reason for failure: a backend that cannot run costs one row, not the whole benchmark."""
    try:
        return call()
    except UserError as reason:
        failure = Failure(one_line(reason))
    except Exception as reason:
        failure = Failure("out of memory" if is_out_of_memory(reason) else f"failed: {one_line(reason)}")
    end_capture()
    release()
    return failure


def end_capture() -> None:
    """Clean up after a failed CUDA graph capture: reset its stream and the mode of the random generator."""
    if torch.cuda.is_initialized():
        torch.cuda.set_stream(torch.cuda.default_stream())
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())


def release() -> None:
    """Collect garbage and empty the CUDA cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep garbage collection out of timed regions."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
