"""Copies to a GPU and back while it computes: batches to it, results from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BUFFERS = 2
"""One is filled while the GPU reads the other."""


def start_copies(*results: Tensor) -> Callable[[], list[Tensor]]:
    """Start to copy results to the CPU; the function returned waits for them, but not for kernels launched later."""
    copies = [result.to("cpu", non_blocking=result.is_cuda) for result in results]
    done = torch.cuda.current_stream(results[0].device).record_event() if results[0].is_cuda else None

    def wait() -> list[Tensor]:
        if done is not None:
            done.synchronize()
        return copies

    return wait


class Staging:
    """Stacks tensors in page-locked buffers, and copies them to the device on a separate stream.

    A copy from pageable memory would block the thread, and page-locked memory is slow to allocate, so the buffers are
    kept, with the size of the largest batches so far. Several threads may share one instance.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock, self.turn = device, threading.Lock(), 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self.copied: list[Any] = [None] * BUFFERS
        """CUDA events after which a buffer may be filled again."""

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """torch.stack(tensors) on the device, available to all kernels launched next."""
        first, size = tensors[0], len(tensors) * tensors[0].nbytes
        # Buffers allocated in inference mode could not be written outside of it.
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.turn = (self.turn + 1) % BUFFERS
            if self.copied[self.turn] is not None:
                self.copied[self.turn].synchronize()
            if self.buffers[self.turn].nbytes < size:
                self.buffers[self.turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
            host = self.buffers[self.turn][:size].view(first.dtype).view(len(tensors), *first.shape)
            torch.stack(tuple(tensors), out=host)
            return self.copy(host)

    def copy(self, host: Tensor) -> Tensor:
        if self.stream is None:
            return host.to(self.device, copy=True)
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            # Allocated for this stream: memory that kernels on the other one still use is not reused.
            batch = host.to(self.device, non_blocking=True)
            self.copied[self.turn] = self.stream.record_event()
        compute.wait_event(self.copied[self.turn])
        batch.record_stream(compute)
        return batch
