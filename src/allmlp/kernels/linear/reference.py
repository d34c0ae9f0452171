"""A linear map over channels and what stands around it.

    Y = act(scale * (X W^T) + bias) * gain + other            X (m k), W (n k), the others (n), other (m n)

With 8-bit X and W, `scale` takes the factors out again that W's rows were multiplied with, and `gain` brings Y into
the range of the next 8-bit product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import activate
from allmlp.kernels.token_mix.reference import Act

PART = 128
"""Channels that share their statistics."""


class Beside(NamedTuple):
    """What stands around the product; what is not there does nothing."""

    scale: Tensor | None = None
    bias: Tensor | None = None
    gain: Tensor | None = None
    other: Tensor | None = None


def linear(x: Tensor, weight: Tensor, beside: Beside, act: Act = "none", dtype: torch.dtype | None = None) -> Tensor:
    """Y in `dtype`, which is `other`'s or x's if not given."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(wide) @ weight.to(wide).T
    z = z if beside.scale is None else z * beside.scale
    z = activate(z if beside.bias is None else z + beside.bias, act)
    z = z if beside.gain is None else z * beside.gain
    if beside.other is not None:
        return (z + beside.other).to(dtype or beside.other.dtype)
    return z.to(dtype or x.dtype)


def linear_stats(x: Tensor, weight: Tensor, beside: Beside, act: Act, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Y, and the mean and 1 / standard deviation of the second half of its channels: m."""
    y = linear(x, weight, beside, act)
    half = y[:, y.shape[1] // 2 :].to(torch.promote_types(y.dtype, torch.float32))
    variance, mean = torch.var_mean(half, dim=1, correction=0)
    return y, mean, (variance + eps).rsqrt()
