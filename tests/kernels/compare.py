"""Helpers to compare kernels with their references."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply bfloat16 matrices; float16 takes the same code path.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def randn(*shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * std


def assert_within_twice_eager(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """The error against float64 is at most twice that of eager PyTorch."""
    error, eager_error = ((value.double().cpu() - exact).abs().max() for value in (actual, eager))
    assert error <= 2 * eager_error + 1e-6 * exact.abs().max(), (float(error), float(eager_error))
