"""Timing of calls on a device, including the completion of the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]
LEAD_CALLS = 2
"""Untimed calls in front of a row on a GPU."""
SLEEP_CYCLES_PER_S = 2.5e9
"""More cycles than a GPU has in a second, so that it sleeps for at least the given time."""


class Clock(Protocol):
    min_calls: int
    """Calls in a row, at least."""
    min_seconds: float
    """Length of a row, at least."""

    def row(self, call: Call, count: int) -> float:
        """Seconds per call of `count` calls back to back."""
        ...

    def latency(self, call: Call) -> float:
        """Seconds of one call, from its launch on an idle device to its result."""
        ...

    def device_time(self, call: Call, latency: float) -> float | None:
        """Device time of one call in seconds, if the device runs asynchronously."""
        ...


class CpuClock:
    min_calls = 1
    min_seconds = 0.0

    def row(self, call: Call, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    def latency(self, call: Call) -> float:
        return self.row(call, 1)

    def device_time(self, call: Call, latency: float) -> None:
        return None


class ThreadClock(CpuClock):
    """CPU time of this thread, which excludes other processes."""

    def row(self, call: Call, count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            call()
        return (time.thread_time() - start) / count


class CudaClock:
    """CUDA events.

    A row begins while the GPU is busy with untimed calls, so that the launches of timed ones overlap with execution. On
    an idle GPU the first call of a compiled model waits for its guards, longer the more layers it has. Rows are long
    enough for the clock to fall to what the power limit sustains: single calls of a Mixer-B are 2 % faster than a row.
    """

    min_calls = 10
    min_seconds = 0.3

    def row(self, call: Call, count: int) -> float:
        for _ in range(LEAD_CALLS):
            call()
        return self.between(call, count) / count

    def latency(self, call: Call) -> float:
        torch.cuda.synchronize()
        return self.between(call, 1)

    def device_time(self, call: Call, latency: float) -> float:
        """Measured after a sleep on the GPU, during which the host launches every kernel of the call."""
        torch.cuda._sleep(int(latency * SLEEP_CYCLES_PER_S))
        return self.between(call, 1)

    @staticmethod
    def between(call: Call, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()
