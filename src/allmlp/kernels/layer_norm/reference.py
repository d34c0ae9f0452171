"""LayerNorm of every token, and its statistics alone: the definition.

    mean = mean(x),   rstd = 1 / sqrt(var(x) + eps),   Y = (x - mean) * rstd * weight + bias,   x = X + deferred_bias

`deferred_bias` (c) is the sum of the biases that earlier layers did not add to X.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm_stats(x: Tensor, eps: float, deferred_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation over channels, in float32 or better: b s."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x if deferred_bias is None else x + deferred_bias
    variance, mean = torch.var_mean(x, dim=-1, correction=0)
    return mean, (variance + eps).rsqrt()


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    deferred_bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Y in `dtype`, by default that of x."""
    mean, rstd = layer_norm_stats(x, eps, deferred_bias)
    y = x.to(mean.dtype)
    y = y if deferred_bias is None else y + deferred_bias
    y = (y - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype or x.dtype)


def layer_norm_transposed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, deferred_bias: Tensor | None, width: int
) -> Tensor:
    """LayerNorm of x (b s c), transposed and zero-padded to b c width."""
    y = layer_norm(x, weight, bias, eps, deferred_bias).transpose(1, 2)
    return torch.nn.functional.pad(y, (0, width - x.shape[1]))


def layer_norm_mean(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, deferred_bias: Tensor | None = None
) -> Tensor:
    """The mean over tokens of LayerNorm of x (b s c): b c."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return layer_norm(x, weight, bias, eps, deferred_bias, wide).mean(1).to(x.dtype)
