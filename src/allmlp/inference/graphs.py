"""CUDA graphs of a model, one per bucket of batch sizes, in a bounded amount of memory.

A batch is padded to the next bucket, at most an eighth more examples; batches of up to 16 and powers of two are not
padded. Capturing a bucket takes some hundredths of a second, once its kernels are compiled and tuned.

All graphs of one kind of input share a memory pool, and their input and output buffers, which are those of the largest
bucket. A batch that is larger than all before replaces them, so that only the largest batch takes memory.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allmlp.cuda_graph import record
from allmlp.kernels.launch import device_guard, naming_errors, synchronous

MAX_KINDS = 8
"""Kinds of inputs, such as lengths of texts, whose graphs are kept; the least recently used is dropped first."""
CAPTURING = threading.Lock()
"""PyTorch allows one capture at a time in a process."""


def batch_bucket(size: int) -> int:
    """The next number of at most four significant bits: 1 to 16, 18, 20, ..., 32, 36, 40, ..., 64, 72, ..."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


@dataclass
class GraphGroup:
    """The graphs for one kind of input, by bucket."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    pool: Any
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.inputs[0])


class CudaGraphs:
    """Safe to use from several threads and streams: calls wait for each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.groups: OrderedDict[Any, GraphGroup] = OrderedDict()
        self.stream: torch.cuda.Stream | None = None
        self.done: Any = None

    def replay(
        self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype, kind: Any
    ) -> Tensor:
        """compute(*inputs) for inputs with the batch as their first dimension; images are cast to `dtype`.

        `kind` and the shapes of an example determine which graphs can be used.
        """
        size = len(inputs[0])
        bucket = batch_bucket(size)
        kind = kind, *((x.shape[1:], x.is_floating_point() or x.dtype) for x in inputs)
        with self.lock, device_guard(inputs[0].device):
            stream = torch.cuda.current_stream()
            if self.done is not None:
                stream.wait_event(self.done)  # the last call may have been on another stream
            with torch.inference_mode():
                if kind not in self.groups or bucket not in self.groups[kind].graphs:
                    with CAPTURING:
                        self.capture(compute, inputs, dtype, kind, bucket)
                self.groups.move_to_end(kind)
                group = self.groups[kind]
                for buffer, x in zip(group.inputs, inputs, strict=True):
                    buffer[:size].copy_(x)
                with naming_errors(f"CUDA graph for {bucket} examples"):
                    group.graphs[bucket].replay()
            output = group.output[:size].clone()
            self.done = stream.record_event(self.done)
        return output

    def capture(
        self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype, kind: Any, bucket: int
    ) -> None:
        group = self.groups.get(kind)
        is_new = group is None or bucket > group.size
        # Padding is zeros, valid images and token ids, or examples of earlier calls.
        buffers = tuple(zeros(bucket, x, dtype) for x in inputs) if is_new else group.inputs
        examples = tuple(buffer[:bucket] for buffer in buffers)
        with synchronous(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32")  # float32 was requested for its precision
            output = compute(*examples)  # compiles and loads the kernels, which a capture cannot, and raises errors
        if is_new:
            torch.cuda.synchronize()  # earlier calls may still use the graphs dropped here
            self.groups.pop(kind, None)
            while len(self.groups) >= MAX_KINDS:
                self.groups.popitem(last=False)
            group = self.groups[kind] = GraphGroup(buffers, torch.empty_like(output), torch.cuda.graph_pool_handle())
        del output  # memory used so far is free for the graph
        self.stream = self.stream or torch.cuda.Stream()
        result = group.output[:bucket]
        group.graphs[bucket] = record(lambda: result.copy_(compute(*examples)), group.pool, self.stream)


def zeros(size: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_zeros(size, *x.shape[1:], dtype=dtype if x.is_floating_point() else x.dtype)
