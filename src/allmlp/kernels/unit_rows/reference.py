"""Affine in fp8, with a scale for each row: the definition.

    y = weight * (x + deferred_bias) + bias,   row_scale = sqrt(|y|^2 + 1) / 448,   Y = y / row_scale

x: m c    weight, bias, deferred_bias: c    row_scale: m

|y_j| <= |y| for every channel, so Y is within the range of e4m3, which ends at 448. The length of a row is that of
[y 1], with a channel for the bias of the following linear map, which bounds its outputs by

    |U y + a|  =  |[U a] [y 1]|  <=  |[U a]| * 448 row_scale
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MAX_SQUARES = 1e38
"""Limit of the sum of squares of a row, which could overflow; the row is then cut off."""


def saturate(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; what is beyond the range of fp8 becomes its largest number, as on a GPU."""
    return y.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else y.to(dtype)


def unit_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    deferred_bias: Tensor | None = None,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Y, and row_scale in float32."""
    y = x.float() if deferred_bias is None else x.float() + deferred_bias
    y = y * weight + bias
    row_scale = (y.square().sum(1) + 1).clamp(max=MAX_SQUARES).sqrt() / FP8_MAX
    return saturate(y / row_scale[:, None], dtype), row_scale
