"""Compilation of Triton kernels in the background, while torch.compile still traces the model that will launch them.

torch.compile asks every op for the shapes of its outputs long before it runs. The first time an op is asked with given
shapes, it runs on those fake tensors: each launch in it becomes a job for a thread, which compiles the kernel, and the
launcher that Triton has a C compiler build. The first real launch waits for the jobs under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

DEVICE_TYPE = "cuda"
WORKERS = 4


class Recording(threading.local):
    """Whether this thread compiles kernels in the background where it would launch them."""

    active = False


RECORDING = Recording()
EXECUTOR = ThreadPoolExecutor(WORKERS, "compile kernels")
PENDING: set[Future[None]] = set()
SEEN: set[Hashable] = set()


def compile_launches(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Compile what `function` launches for fake tensors such as `args`, unless that has been done."""
    leaves, structure = tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not torch.cuda.is_initialized() or not all(tensor.device.type == DEVICE_TYPE for tensor in tensors):
        return
    if not all(type(size) is int for tensor in tensors for size in (*tensor.shape, *tensor.stride())):
        return  # dynamic shapes: arithmetic on them would add guards
    key = function, str(structure), tuple(described(leaf) for leaf in leaves)
    if key in SEEN:
        return
    SEEN.add(key)
    RECORDING.active = True
    try:
        # Whatever fails here fails again, with its message, where the op really runs.
        with suppress(Exception):
            function(*args)
    finally:
        RECORDING.active = False


def described(leaf: Any) -> Hashable:
    return (leaf.dtype, leaf.device, leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else leaf


def compile_kernel(kernel: Any, *args: Any, **options: Any) -> None:
    """In place of `kernel[grid](*args, **options)`: compile it in the background."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    types = [arg.dtype if isinstance(arg, Tensor) else arg for arg in args]
    separate_launchers()
    future = EXECUTOR.submit(compile_for, device, kernel, types, options)
    PENDING.add(future)
    future.add_done_callback(PENDING.discard)


@cache
def separate_launchers() -> None:
    """Give each launcher that Triton loads a module of its own.

    Triton up to 3.6 loads them all under one name. Where a file is loaded again, Python puts its functions into the
    latest module of that name, from which another thread may be about to read its own launcher: a kernel was then
    launched with the arguments of another.
    """
    from triton.runtime import build

    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:  # of a later version, whose kernels share one launcher
        return

    def load_separately(name: str, path: str) -> ModuleType:
        module = ModuleType(name)
        with lock:
            module.__dict__.update(load(name, path).__dict__)
        return module

    build._load_module_from_path = load_separately


def compile_for(device: torch.device, kernel: Any, types: list[Any], options: dict[str, Any]) -> None:
    with torch.cuda.device(device):
        compiled = kernel.warmup(*types, grid=(1,), **options)
        # Reading this attribute loads the kernel and builds its launcher.
        compiled.run  # noqa: B018


def wait_for_kernels() -> None:
    if PENDING:
        wait(tuple(PENDING))
