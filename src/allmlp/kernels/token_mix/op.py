"""The product over tokens as an operator of torch: one kernel on a GPU, its definition elsewhere, with gradients.

torch.compile and torch.export see one node. The gradient needs no more than the inputs: what the forward pass had in
between is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.token_mix import reference
from allmlp.kernels.token_mix.reference import Act, Around, Combine


def token_mix(x: Tensor, matrix: Tensor, around: Around, act: Act = "none", combine: Combine = "none") -> Tensor:
    return operator(x, matrix, *around, act, combine)


@torch.library.custom_op("allmlp::token_mix", mutates_args=())
def operator(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    lift: Tensor | None,
    other: Tensor | None,
    gain: Tensor | None,
    act: str,
    combine: str,
) -> Tensor:
    around = Around(bias, scale, shift, mean, rstd, lift, other, gain)
    if not x.is_cuda:
        return reference.token_mix(x, matrix, around, act, combine)  # type: ignore[arg-type]
    from allmlp.kernels.token_mix import triton

    return triton.token_mix(x, matrix, around, act, combine)  # type: ignore[arg-type]


@operator.register_fake
def shape(x: Tensor, matrix: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0], x.shape[2])


def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act, ctx.combine = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """With R = (X + lift - mean) rstd, P = scale R + shift, H = A P + bias, Z = act(H) and Y as combined:

    dH = dZ act'(H),   dbias = dH 1,   dA = sum_b dH P^T,   dP = A^T dH
    dscale = sum dP R,   dshift = sum dP,   dR = dP scale
    dX = dR rstd,   dmean = - sum_c dR rstd,   drstd = sum_c dR (X + lift - mean),   dlift = sum dX
    """
    x, matrix, *rest = ctx.saved_tensors
    around = Around(*rest)
    r = reference.prepare(x, Around(mean=around.mean, rstd=around.rstd, lift=around.lift))
    p = reference.prepare(r, Around(scale=around.scale, shift=around.shift))
    dz, dother, dgain = dy, None, None
    if ctx.combine == "multiply":
        z = reference.token_mix(p, matrix, Around(around.bias), ctx.act)
        assert around.other is not None
        dother, dz = dy * z, dy * around.other
    elif ctx.combine == "add":
        dother = dy
        if around.gain is not None:
            z = reference.token_mix(p, matrix, Around(around.bias), ctx.act)
            dgain, dz = (dy * z).sum((0, 1)), dy * around.gain
    if ctx.act != "none":
        with torch.enable_grad():
            h = reference.token_mix(p, matrix, Around(around.bias)).detach().requires_grad_()
            (dz,) = torch.autograd.grad(reference.activate(h, ctx.act), h, dz)
    dmatrix = torch.bmm(dz, p.transpose(1, 2)).sum(0)
    dp = torch.matmul(matrix.T, dz)
    dr = dp if around.scale is None else dp * around.scale
    dx, dmean, drstd = dr, None, None
    if around.mean is not None and around.rstd is not None:
        dx = dr * around.rstd.unsqueeze(2)
        dmean, drstd = -dx.sum(2), (dr * r / around.rstd.unsqueeze(2)).sum(2)
    return (
        dx.to(x.dtype),
        dmatrix.to(matrix.dtype),
        None if around.bias is None else dz.sum((0, 2)),
        None if around.scale is None else (dp * r).sum((0, 1)),
        None if around.shift is None else dp.sum((0, 1)),
        dmean,
        drstd,
        None if around.lift is None else dx.sum((0, 1)),
        dother,
        dgain,
        None,
        None,
    )


operator.register_autograd(backward, setup_context=remember)
