"""Recording of CUDA graphs that stay valid when the process records others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record(run: Callable[[], Any], pool: Any = None, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """Capture the kernels that `run` launches; by default in a new memory pool, on PyTorch's capture stream."""
    graph = torch.cuda.CUDAGraph()
    # Matrix products would use the workspace that an earlier capture on this stream left in its own memory pool, and
    # which is freed with that pool, or when torch.compile(mode="reduce-overhead") records a graph. Once cleared, it is
    # allocated in this one.
    torch._C._cuda_clearCublasWorkspaces()
    # Another thread's CUDA calls must not end the capture.
    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        run()
    torch._C._cuda_clearCublasWorkspaces()
    return graph
