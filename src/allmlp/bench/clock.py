"""Timing of calls on a device, including the completion of the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]


class Clock(Protocol):
    def time(self, call: Call, times: int) -> float:
        """Seconds for `times` back-to-back calls, until the device has finished the last."""
        ...


class CpuClock:
    def time(self, call: Call, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - start


class CudaClock:
    """CUDA events. The GPU is idle at the start, so a single call includes its launch."""

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
