"""The sum over the rows of a matrix: the definition.

y_c = sum_r x_rc
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def dispatch(x: Tensor) -> ModuleType:
    """The module whose `sum_rows` to use: Triton's on a GPU, else this one."""
    return import_module(f"allmlp.kernels.row_sum.{'triton' if x.is_cuda else 'reference'}")


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension, rounded once, from float32 or float64 to `dtype`."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)
