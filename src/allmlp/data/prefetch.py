"""Prefetching of batches: read ahead by threads, and copied to a GPU while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Examples, map_tensors

AHEAD = 3
"""Batches read in advance, one thread each."""

N = TypeVar("N")
T = TypeVar("T")


def read_ahead(
    read: Callable[[N], T], numbers: Iterable[N], ahead: int = AHEAD, workers: int | None = None
) -> Generator[T]:
    """Yield read(number) for all numbers in order, while threads read the next `ahead` ones."""
    source, pending = iter(numbers), deque[Future[T]]()
    with ThreadPoolExecutor(workers or ahead, thread_name_prefix="read-ahead") as pool:
        try:
            while True:
                pending.extend(pool.submit(read, number) for number in islice(source, ahead - len(pending)))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class Moving(NamedTuple):
    """Examples that are being copied."""

    examples: Examples
    event: Any
    """A CUDA event after the copies; None if there is nothing to wait for."""


class Transfer:
    """Copies examples to a GPU on a separate stream, from page-locked memory.

    A copy on the model's stream would wait for earlier kernels and delay later ones, and asynchronous copies need
    page-locked memory. PyTorch reuses that memory for later batches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, examples: Examples) -> Moving:
        """Start the copies; any thread may do this."""
        if self.stream is None:
            return Moving(map_tensors(examples, lambda tensor: tensor.to(self.device)), None)
        with torch.cuda.stream(self.stream):
            return Moving(map_tensors(examples, self.copy), self.stream.record_event())

    def copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy_alone(tensor, pinned)
            tensor = pinned
        return tensor.to(self.device, non_blocking=True)

    def receive(self, moving: Moving) -> Examples:
        """The copies, for kernels that this thread launches from now on."""
        if moving.event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(moving.event)
            for tensor in moving.examples:
                tensor.record_stream(stream)  # its memory is not reused before these kernels are done
        return moving.examples


def copy_alone(source: Tensor, target: Tensor) -> None:
    """Copy without other threads. torch would wake one per core, and wait for each, while the cores decode images."""
    np.copyto(as_bytes(target), as_bytes(source))


def as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.flatten().view(torch.uint8).numpy()
