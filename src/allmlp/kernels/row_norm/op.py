"""LayerNorm's statistics as an operator of torch: one kernel on a GPU, its definition elsewhere, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.row_norm import reference


@torch.library.custom_op("allmlp::row_stats", mutates_args=())
def row_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation over channels, b s."""
    if not x.is_cuda:
        return reference.row_stats(x, eps)
    from allmlp.kernels.row_norm import triton

    return triton.row_stats(x, eps)


@row_stats.register_fake
def shape(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[:-1], dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)


def backward(ctx: Any, dmean: Tensor, drstd: Tensor) -> tuple[Tensor, None]:
    """dX = (dmean - drstd rstd^3 (X - mean)) / C."""
    x, mean, rstd = ctx.saved_tensors
    away = x.to(mean.dtype) - mean.unsqueeze(-1)
    dx = (dmean.unsqueeze(-1) - (drstd * rstd**3).unsqueeze(-1) * away) / x.shape[-1]
    return dx.to(x.dtype), None


row_stats.register_autograd(backward, setup_context=remember)
