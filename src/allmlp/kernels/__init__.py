"""Fused operations. Each folder holds the definition in plain PyTorch (reference.py) next to the fast path.

Inference kernels: token_mix, layer_norm, linear, unit_rows. Differentiable training ops: token_matmul, channel_mlp,
gated_mlp, made of kernels of their own and of those in activation and row_sum.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import get_args

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import ActivationName

ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)
"""Activations supported by the kernels."""
HAS_C_COMPILER = sys.platform != "linux" or any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang")))
"""Triton on Linux needs a C compiler to launch its kernels; container images often have none."""
HAS_TRITON = find_spec("triton") is not None and HAS_C_COMPILER
OLDEST_TRITON = (3, 6)
"""The oldest version that our kernels are run with."""
GLUON_VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton whose Gluon API our kernels match: run with 3.6, compiled only with the others."""


def has_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernels run on a device: they need Hopper, and a Triton version whose Gluon API they match."""
    if not HAS_TRITON or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return triton.__version__.startswith(GLUON_VERSIONS)


def has_tma(device: torch.device) -> bool:
    """Whether loads by tensor descriptor use the hardware (TMA). Below compute capability 9.0 they become plain loads,
    which wait for memory, while loads by pointer are asynchronous copies.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_old_triton() -> bool:
    """Whether the installed Triton is too old for our kernels; versions of other builds (ROCm) are unknown."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return False
    return tuple(map(int, installed.split(".")[:2])) < OLDEST_TRITON


def has_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on a GPU: Triton supports compute capability 8.0 and higher."""
    if not HAS_TRITON or has_old_triton():
        return False
    # `allmlp plan` simulates a GPU with tensors that are not on one.
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


# The attribute set by torch.compiler.assume_constant_result; calling it would import all of torch._dynamo.
has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def training_dtype(x: Tensor, act: str = "none") -> torch.dtype | None:
    """The dtype in which a layer trains with the fused ops, or None to use plain PyTorch.

    The ops take bfloat16 and float16 on a GPU, under autocast or as the layer's own dtype, and compute `ACTIVATIONS`.
    """
    if not (act in ACTIVATIONS and x.is_cuda and torch.is_grad_enabled() and has_kernels(x.device)):
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None
