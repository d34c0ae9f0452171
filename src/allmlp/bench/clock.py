"""What time calls take on a device, from the first to the end of the last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]


class Clock(Protocol):
    def time(self, call: Call, times: int) -> float:
        """Seconds that `times` calls take, one behind the other, until the device has finished the last."""
        ...


class CpuClock:
    def time(self, call: Call, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - start


class CudaClock:
    """By the card's own events. The card is idle at the start, so that one call alone includes its launching."""

    def time(self, call: Call, times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()
