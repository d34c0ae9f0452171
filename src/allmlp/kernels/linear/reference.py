"""A linear map over channels with its fused epilogue: the definition.

    Y = act(dequant_scale * (X W^T) + bias) * quant_scale + residual

x: m k    weight: n k    dequant_scale, bias, quant_scale: n    residual: m n

For fp8 X and W, `dequant_scale` undoes the scaling of X and of W's rows, and `quant_scale` scales Y to the range of the
next fp8 product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import ActivationName, activate

EPILOGUE_N = 128
"""Output channels of an epilogue tile, which leaves one partial mean and sum of squared deviations per row."""


class LinearEpilogue(NamedTuple):
    """Operands of the fused epilogue; None leaves one out."""

    dequant_scale: Tensor | None = None
    bias: Tensor | None = None
    quant_scale: Tensor | None = None
    residual: Tensor | None = None


def linear(
    x: Tensor, weight: Tensor, epilogue: LinearEpilogue, act: ActivationName = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Y in `dtype`, by default that of the residual or of x."""
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(compute_dtype) @ weight.to(compute_dtype).T
    z = z if epilogue.dequant_scale is None else z * epilogue.dequant_scale
    z = activate(z if epilogue.bias is None else z + epilogue.bias, act)
    z = z if epilogue.quant_scale is None else z * epilogue.quant_scale
    if epilogue.residual is not None:
        return (z + epilogue.residual).to(dtype or epilogue.residual.dtype)
    return z.to(dtype or x.dtype)


def linear_stats(
    x: Tensor, weight: Tensor, epilogue: LinearEpilogue, act: ActivationName, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, and the mean and reciprocal standard deviation (m) of the second half of its channels."""
    y = linear(x, weight, epilogue, act)
    half = y[:, y.shape[1] // 2 :].to(torch.promote_types(y.dtype, torch.float32))
    variance, mean = torch.var_mean(half, dim=1, correction=0)
    return y, mean, (variance + eps).rsqrt()
