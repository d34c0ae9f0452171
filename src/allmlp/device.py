"""Device and dtypes of a process."""

from __future__ import annotations

import logging
import os
import shutil
from functools import cache

import torch
from torch import Tensor

from allmlp.errors import UserError, one_line

log = logging.getLogger(__name__)

INSTALL = {"cuda": "a CUDA build of torch", "xpu": "torch for Intel GPUs", "mps": "torch for macOS"}
"""The accelerators in order of preference, and what to install for each."""


def own_device(device: str | None = None) -> torch.device:
    """The device of this process: "cpu", "cuda", "cuda:1", "mps", "xpu", or None for an accelerator if there is one."""
    name = device or next((kind for kind in INSTALL if count_devices(kind)), "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", *INSTALL) or (number and (kind == "cpu" or not number.isdecimal())):
        raise UserError(f"unknown device {name!r}: use cpu, cuda, cuda:1, mps or xpu")
    if kind == "cpu":
        return torch.device(kind)
    count = count_devices(kind)
    if not count:
        raise UserError(f"torch sees no {kind} device here: use --device cpu, or install {INSTALL[kind]}")
    if "RANK" in os.environ:
        if kind == "mps" or number:
            raise UserError(f"under torchrun every process has its own GPU: use --device cuda or cpu, not {name}")
        number = os.environ.get("LOCAL_RANK", "0")
    if number and int(number) >= count:
        raise UserError(f"there is no device {kind}:{number}: torch sees {count}, numbered from 0")
    return torch.device(kind, int(number)) if number else torch.device(kind)


def usable_device(device: str | torch.device) -> torch.device:
    """A device of torch, with its number; UserError if it cannot be used here."""
    try:
        kind = torch.device(device).type
        if kind in INSTALL and not count_devices(kind):
            raise UserError(f"cannot use the device {device}: torch sees no {kind} device here")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as reason:
        raise UserError(f"cannot use the device {device}: {one_line(reason)}") from None


def count_devices(kind: str) -> int:
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind)
    return module.device_count() if module.is_available() else 0


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for its queued work; from pageable memory a GPU would."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "c++", "clang++", "cl")))


def default_dtype(device: torch.device) -> torch.dtype:
    """Default dtype of matrix products: bfloat16 on a CUDA GPU, or float16 if it has no bfloat16 (compute capability
    below 8.0: V100, T4, RTX 20); float32 on other devices.
    """
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Check and return a floating-point dtype, given as such or by name ("float16")."""
    result = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    possible = torch.float32, torch.float16, torch.bfloat16, torch.float64
    if not isinstance(result, torch.dtype) or result not in possible:
        raise UserError(f"a model computes in float32, float16, bfloat16 or float64, not in {dtype}")
    return result


def slow_format(device: torch.device, dtype: torch.dtype | None) -> str:
    """Warning about a 16-bit dtype that is slower than float32 on this device; empty for others."""
    if device.type != "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return ""
    if dtype == torch.bfloat16 and has_cpu_bfloat16():
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"{name} is many times slower than float32 on a CPU without instructions for it: use float32"


def has_cpu_bfloat16() -> bool:
    """Whether oneDNN computes matrix products in bfloat16 here (AVX-512, AMX, or the bf16 extension of ARM)."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16 (Intel's AMX), with which training in it is faster."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported()


@cache  # warns once per device and dtype
def warn_of_slow_format(device: torch.device, dtype: torch.dtype | None) -> None:
    if text := slow_format(device, dtype):
        log.warning("%s", text)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of a device, for sums over many examples."""
    if device.type == "xpu":
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64
