"""Common parts of kernel launches: the device guard, errors that name the kernel, and autotuning."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allmlp.kernels import ahead

AUTOTUNE = os.environ.get("ALLMLP_AUTOTUNE", "1") != "0"
"""Whether kernels try all their configurations once per shape, or always use their default one."""


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: Triton, CUDA graphs and streams use the current GPU, not that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class LaunchMode(threading.local):
    synchronous = False


MODE = LaunchMode()


@contextmanager
def synchronous() -> Iterator[None]:
    """Synchronize with the device wherever errors are named, so that an error is raised where it happened."""
    MODE.synchronous = True
    try:
        yield
    finally:
        MODE.synchronous = False


class naming_errors:
    """Prefix CUDA errors in the `with` block with `name`, except out of memory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None and MODE.synchronous:
            try:
                torch.cuda.synchronize()
            except RuntimeError as late:
                error = late
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise RuntimeError(f"{self.name}: {error}") from error


LAUNCHING = threading.RLock()
"""Triton's autotuner keeps the arguments of the launch in progress in an attribute: one launch at a time."""


class launching(naming_errors):
    """The context of a kernel launch on the device of `x`."""

    def __init__(self, name: str, x: Tensor) -> None:
        super().__init__(f"kernel {name}")
        self.guard = device_guard(x.device)

    def __enter__(self) -> None:
        if not ahead.RECORDING.active:
            ahead.wait_for_kernels()
        LAUNCHING.acquire()
        self.guard.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self.guard.__exit__(kind, error, traceback)
            LAUNCHING.release()


class fused_multiply_add:
    """`kernel` with fused multiply-add, regardless of Triton's default: newer versions turn it off, which costs our
    epilogues three instructions per number.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = partial(ahead.compile_kernel, self.kernel) if ahead.RECORDING.active else self.kernel[grid]
        return partial(launch, enable_fp_fusion=True)


def autotune(configs: list[Any], default: int, key: list[str]) -> Callable[[Any], Any]:
    """triton.autotune over `configs`; only `configs[default]` in the interpreter, which has nothing to time.

    `key` must not depend on the batch size beyond a few classes: every new key costs a second of tuning.
    """
    import triton

    def do_bench(call: Callable[[], Any], quantiles: tuple[float, ...]) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    one = triton.knobs.runtime.interpret or not AUTOTUNE
    return triton.autotune(configs[default : default + 1] if one else configs, key=key, do_bench=do_bench)
