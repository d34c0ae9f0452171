"""A training step as one CUDA graph: small models are bound by the launching of kernels, not by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

T = TypeVar("T")
WARM_UP = 3


class Recorded(Generic[T]):
    """Calls `step` a few times as it is, then records it, and from then on replays the record with new inputs.

    `step` must be a sequence of kernels on its inputs and on tensors that stay where they are: no value is read back,
    and inputs keep their shapes. Its result is copied, since the next replay overwrites it.
    """

    def __init__(self, step: Callable[..., T]) -> None:
        self.step, self.calls = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: T

    def __call__(self, *inputs: Tensor) -> T:
        self.calls += 1
        if self.calls <= WARM_UP:
            # On a stream of its own, as recording will be: what is allocated now must not be tied to the main one.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self.step(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        graph = self.graph or self.record(inputs)
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new, non_blocking=True)
        graph.replay()
        return tree_map(torch.clone, self.outputs)

    def record(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph = torch.cuda.CUDAGraph()
        # Threads that load data may go on copying meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = self.step(*self.inputs)
        return self.graph
