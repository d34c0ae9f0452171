"""LayerNorm of every token, and its statistics alone.

    mean = mean(x),   rstd = 1 / sqrt(var(x) + eps),   Y = (x - mean) * rstd * weight + bias,   x = X + shift

`shift` (c) is what earlier layers have left out of X: biases of theirs, which a product into X does not add.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_stats(x: Tensor, eps: float, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation over channels, in float32 or better: b s."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if shift is None else wide + shift
    variance, mean = torch.var_mean(wide, dim=-1, correction=0)
    return mean, (variance + eps).rsqrt()


def row_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Y in `dtype`, x's if not given."""
    mean, rstd = row_stats(x, eps, shift)
    wide = x.to(mean.dtype)
    wide = wide if shift is None else wide + shift
    y = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype or x.dtype)


def row_norm_turned(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None, width: int = 0
) -> Tensor:
    """The norm of x (b s c) as b c width: columns after the s-th are 0."""
    y = row_norm(x, weight, bias, eps, shift).transpose(1, 2)
    return torch.nn.functional.pad(y, (0, width - x.shape[1]))
