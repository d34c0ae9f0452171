"""A linear map over channels with its fused epilogue: the definition.

    Y = gate * (act(row_scale * dequant_scale * (X W^T) + bias) * quant_scale / row_scale + residual)

x: m k    weight: n k    dequant_scale, bias, quant_scale: n    row_scale: m    residual, gate: m n

For fp8 X and W, `dequant_scale` undoes the scaling of X and of W's rows, and `quant_scale` scales Y to the range of the
next fp8 product. `row_scale` undoes a scaling of each row of X; with `quant_scale`, Y is scaled by the same factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.kernels.activation.reference import ActivationName, activate
from allmlp.kernels.unit_rows.reference import saturate

EPILOGUE_N = 128
"""Output channels of an epilogue tile, which leaves one partial mean and sum of squared deviations per row."""


class LinearEpilogue(NamedTuple):
    """Operands of the fused epilogue; None leaves one out."""

    dequant_scale: Tensor | None = None
    bias: Tensor | None = None
    quant_scale: Tensor | None = None
    residual: Tensor | None = None
    row_scale: Tensor | None = None
    gate: Tensor | None = None


def linear(
    x: Tensor, weight: Tensor, epilogue: LinearEpilogue, act: ActivationName = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Y in `dtype`, by default that of the gate, the residual or x."""
    dtype = dtype or default_dtype(x, epilogue)
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(compute_dtype) @ weight.to(compute_dtype).T
    z = z if epilogue.dequant_scale is None else z * epilogue.dequant_scale
    z = z if epilogue.row_scale is None else z * epilogue.row_scale[:, None]
    z = activate(z if epilogue.bias is None else z + epilogue.bias, act)
    if epilogue.quant_scale is not None:
        z = z * epilogue.quant_scale
        z = z if epilogue.row_scale is None else z / epilogue.row_scale[:, None]
    z = z if epilogue.residual is None else z + epilogue.residual
    return saturate(z if epilogue.gate is None else z * epilogue.gate.to(compute_dtype), dtype)


def default_dtype(x: Tensor, epilogue: LinearEpilogue) -> torch.dtype:
    """The dtype of Y if none is given."""
    return next(tensor for tensor in (epilogue.gate, epilogue.residual, x) if tensor is not None).dtype


def linear_stats(
    x: Tensor,
    weight: Tensor,
    epilogue: LinearEpilogue,
    act: ActivationName,
    eps: float,
    start: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, and the mean and reciprocal standard deviation (m) of its channels from `start` on."""
    y = linear(x, weight, epilogue, act, dtype)
    normed = y[:, start:].to(torch.promote_types(y.dtype, torch.float32))
    variance, mean = torch.var_mean(normed, dim=1, correction=0)
    return y, mean, (variance + eps).rsqrt()
