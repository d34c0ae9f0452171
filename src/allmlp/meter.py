"""How fast a run is, and how much of the machine that takes."""

from __future__ import annotations

import math
import time

import torch

from allmlp.tasks.task import TaskModule


class Meter:
    """Examples per second, and the share of the machine's matrix rate that they are."""

    def __init__(self, batch: int, task: TaskModule, device: torch.device, processes: int) -> None:
        self.batch, self.flops = batch, task.flops
        self.unit, self.units = task.unit
        self.peak = peak_rate(device) * processes
        self.start = time.monotonic()

    def pause(self) -> None:
        """What happened since the last reading was not training."""
        self.start = time.monotonic()

    def read(self, steps: int) -> dict[str, float]:
        seconds = max(time.monotonic() - self.start, 1e-9)
        self.start = time.monotonic()
        rate = steps * self.batch / seconds
        return {f"{self.unit}/s": rate * self.units, "share": rate * self.flops / self.peak}


def peak_rate(device: torch.device) -> float:
    """Measured floating-point operations per second of a large product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
