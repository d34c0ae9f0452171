"""Throughput and cost of a run and, on a GPU, its model FLOPs utilization (MFU)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from allmlp.device import default_dtype
from allmlp.tasks.task import TaskModule


class Meter:
    """Examples per second, and the fraction of the peak matmul throughput that they use."""

    def __init__(self, task: TaskModule, device: torch.device, processes: int) -> None:
        self.task, self.device, self.flops = task, device, task.flops
        self.unit, self.units = task.unit
        self.peak = peak_flops(device) * processes if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.start = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block; examples before it, and their time, still count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.monotonic()
        try:
            yield
        finally:
            self.start += time.monotonic() - start

    def read(self, examples: int) -> dict[str, float]:
        """Throughput and MFU for this many examples since the last call."""
        seconds = max(time.monotonic() - self.start, 1e-9)
        self.start = time.monotonic()
        rate = examples / seconds
        utilization = {"mfu": rate * self.flops / self.peak} if self.peak else {}
        return {f"{self.unit}/s": rate * self.units, **utilization}

    def cost(self) -> dict[str, int]:
        """Multiply-adds of one example's forward pass, and the peak GPU memory of this process in bytes."""
        macs = {"macs": self.task.model.describe().macs}
        if self.device.type != "cuda":
            return macs
        return macs | {"peak_memory": torch.cuda.max_memory_allocated(self.device)}


def peak_flops(device: torch.device) -> float:
    """Measured floating-point operations per second of a large matrix product in half precision."""
    size = 8192
    a = torch.randn(size, size, device=device, dtype=default_dtype(device))
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
