"""A gated MLP as an operator of torch, for training on a GPU.

X, H, the gate's product F = W norm(Z2) and the norm's statistics are kept for the gradient; activations, the norm and
the gate's output are computed again where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.gated_mlp.reference import Weights
from allmlp.kernels.operator import define, differentiate
from allmlp.kernels.token_product.op import outer, product

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Y, and what the gradient needs: H, F, mean, rstd."""


def gated_mlp(x: Tensor, weights: Weights, mask: Tensor | None, act: str, eps: float) -> Tensor:
    """As the reference; weights are brought to the type of x."""
    mask = None if mask is None else mask.to(x.dtype)
    return operator(x, [weight.to(x.dtype) for weight in weights], mask, act, eps)[0]


def gated_mlp_forward(x: Tensor, weights: Sequence[Tensor], mask: Tensor | None, act: str, eps: float) -> Kept:
    from allmlp.kernels.gated_mlp import triton

    own = Weights(*weights)
    h = torch.addmm(own.a, x.flatten(0, 1), own.up.T).view(*x.shape[:2], -1)
    n, mean, rstd = triton.norm(h, mask, own.norm_weight, own.norm_bias, eps, act)
    f = product(own.matrix, n)
    y = torch.addmm(own.c, triton.gate(h, f, own.b, act).flatten(0, 1), own.down.T)
    return y.view(*x.shape[:2], -1), h, f, mean, rstd


def kept(x: Tensor, weights: Sequence[Tensor], mask: Tensor | None, act: str, eps: float) -> Kept:
    (batch, tokens), hidden = x.shape[:2], weights[0].shape[0]
    mean, rstd = (x.new_empty(batch, tokens, dtype=torch.float32) for _ in range(2))
    y, h, f = (x.new_empty(batch, tokens, width) for width in (weights[6].shape[0], hidden, hidden // 2))
    return y, h, f, mean, rstd


def gated_mlp_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    mask: Tensor | None,
    h: Tensor,
    f: Tensor,
    mean: Tensor,
    rstd: Tensor,
    act: str,
    dy: Tensor,
) -> list[Tensor]:
    """Of x and the weights but c."""
    from allmlp.kernels.gated_mlp import triton

    own, dy = Weights(*weights), dy.flatten(0, 1)
    dg, dh, sums = (dy @ own.down).view_as(f), torch.empty_like(h), triton.stripes(h)
    g, df, db = triton.gate_backward(h, f, own.b, dg, dh, sums, act)
    ddown = dy.T @ g.flatten(0, 1)
    dn = product(own.matrix.T.contiguous(), df)
    norm = own.norm_weight, own.norm_bias, mean, rstd
    n = triton.norm_backward(h, mask, *norm, dn, dh, sums, act)
    dmatrix, dh = outer(df, n), dh.flatten(0, 1)
    dx, dup, total = (dh @ own.up).view_as(x), dh.T @ x.flatten(0, 1), sums.sum(0).to(x.dtype)
    # An operator's results share no memory.
    da, dweight, dbias = total[:2].flatten(), total[2].clone(), total[3].clone()
    return [dx, dup, da, dmatrix.to(x.dtype), db.to(x.dtype), dweight, dbias, ddown]


def shapes(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (x, *weights[:-1])]


def remember(ctx: Any, inputs: tuple[Any, ...], output: Kept) -> None:
    x, weights, mask, ctx.act, _ = inputs
    ctx.save_for_backward(x, mask, *output[1:], *weights)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, dy: Tensor, *others: None) -> tuple[Any, ...]:
    x, mask, h, f, mean, rstd, *weights = ctx.saved_tensors
    dx, *dweights = gradients(x, weights, mask, h, f, mean, rstd, ctx.act, dy)
    return dx, [*dweights, dy.flatten(0, 1).sum(0)], None, None, None


operator, gradients = define(gated_mlp_forward, kept), define(gated_mlp_backward, shapes)
differentiate(operator, remember, backward)
