"""Dropout, with cheaper random numbers on a CPU without MKL."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LEVELS = 2**16
"""Each element uses sixteen random bits, so the dropout rate is a multiple of 1 / LEVELS."""
HAS_MKL = torch.backends.mkl.is_available()


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """F.dropout, but four elements share one 64-bit random number. torch draws one per element, which takes five times
    as long (Neoverse N1): longer than the matrix products of a small model.
    """
    if HAS_MKL or torch.compiler.is_compiling() or x.device.type != "cpu" or not (training and 0 < rate < 1):
        return F.dropout(x, rate, training)
    dropped = min(round(rate * LEVELS), LEVELS - 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    noise = torch.empty_like(x)  # dense, in the order of x
    torch.ge(words.view(torch.int16)[: x.numel()], dropped - LEVELS // 2, out=noise.as_strided((x.numel(),), (1,)))
    return x * noise.mul_(LEVELS / (LEVELS - dropped))
