"""Peak matmul and copy throughput, and GPU memory."""

from __future__ import annotations

import gc

import torch

from allmlp.bench.clock import Call, Clock
from allmlp.bench.timing import Timing, time_interleaved


def peak_matmul(device: torch.device, precision: torch.dtype) -> tuple[Call, int]:
    """A large matmul and its FLOPs; timed between the models, it is the reference for their utilization."""
    size = 8192 if device.type == "cuda" else 1024
    a, b, c = (torch.randn(size, size, device=device, dtype=precision) for _ in range(3))
    return lambda: torch.mm(a, b, out=c), 2 * size**3


def copy_rate(device: torch.device, clock: Clock, seconds: float) -> float:
    """Bytes read and written per second by a copy larger than any cache."""
    size = 2**30 if device.type == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, clock, seconds)["copy"]
    return 2 * size / timing.call.median if isinstance(timing, Timing) else 0.0


class PeakMemory:
    """Peak GPU memory of a backend beyond what was allocated before: weights, activations, captured graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self.held = 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self.before, self.held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def peak(self, call: Call) -> int | None:
        """Bytes, or None on a CPU. Replaying a graph allocates nothing, so its reserved memory counts."""
        if self.device.type != "cuda":
            return None
        call()  # an optimizer allocates its state in the first step
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - self.before
        torch.cuda.empty_cache()
        return max(most, torch.cuda.memory_reserved() - self.held)
