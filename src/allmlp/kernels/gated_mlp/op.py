"""A gated MLP as an operator of torch, for training on a GPU.

X, H, the gate's product F = W norm(Z2) and the norm's statistics are kept for the gradient; activations, the norm and
the gate's output are computed again where they are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.operator import define, differentiate
from allmlp.kernels.token_product.op import outer, product

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gated_mlp(
    x: Tensor,
    up: Tensor,
    a: Tensor,
    matrix: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    down: Tensor,
    c: Tensor,
    act: str,
    eps: float,
) -> Tensor:
    """As the reference; weights are brought to the type of x."""
    up, a, matrix, b, weight, bias, down, c = (w.to(x.dtype) for w in (up, a, matrix, b, weight, bias, down, c))
    mask = None if mask is None else mask.to(x.dtype)
    return operator(x, up, a, matrix, b, weight, bias, mask, down, c, act, eps)[0]


def gated_mlp_forward(
    x: Tensor,
    up: Tensor,
    a: Tensor,
    matrix: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    down: Tensor,
    c: Tensor,
    act: str,
    eps: float,
) -> Five:
    """Y, and what the gradient needs: H, F, mean, rstd."""
    from allmlp.kernels.gated_mlp import triton

    h = torch.addmm(a, x.flatten(0, 1), up.T).view(*x.shape[:2], -1)
    n, mean, rstd = triton.norm(h, mask, weight, bias, eps, act)
    f = product(matrix, n)
    y = torch.addmm(c, triton.gate(h, f, b, act).flatten(0, 1), down.T)
    return y.view(*x.shape[:2], -1), h, f, mean, rstd


def shape(x: Tensor, up: Tensor, *rest: Any) -> Five:
    down, tokens = rest[-4], x.shape[:2]
    mean, rstd = (x.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    return (
        x.new_empty(*tokens, len(down)),
        x.new_empty(*tokens, len(up)),
        x.new_empty(*tokens, len(up) // 2),
        mean,
        rstd,
    )


def gated_mlp_backward(
    x: Tensor,
    up: Tensor,
    matrix: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    down: Tensor,
    h: Tensor,
    f: Tensor,
    mean: Tensor,
    rstd: Tensor,
    act: str,
    dy: Tensor,
) -> list[Tensor]:
    """Of x, up, a, matrix, b, weight, bias and down."""
    from allmlp.kernels.gated_mlp import triton

    dy = dy.flatten(0, 1)
    dg, dh = (dy @ down).view_as(f), torch.empty_like(h)
    g, df, db, da1 = triton.gate_backward(h, f, b, dg, dh, act)
    ddown = dy.T @ g.flatten(0, 1)
    dn = product(matrix.T.contiguous(), df)
    n, dweight, dbias, da2 = triton.norm_backward(h, mask, weight, bias, mean, rstd, dn, dh, act)
    dmatrix, dh = outer(df, n), dh.flatten(0, 1)
    dx, dup, da = (dh @ up).view_as(x), dh.T @ x.flatten(0, 1), torch.cat([da1, da2])
    return [dx, dup, da.to(x.dtype), dmatrix, db.to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype), ddown]


def shapes(
    x: Tensor, up: Tensor, matrix: Tensor, b: Tensor, weight: Tensor, bias: Tensor, mask: Any, down: Tensor, *rest: Any
) -> list[Tensor]:
    a = up.new_empty(len(up))
    return [one.new_empty(one.shape) for one in (x, up, a, matrix, b, weight, bias, down)]


def remember(ctx: Any, inputs: tuple[Any, ...], output: Five) -> None:
    x, up, _, matrix, b, weight, bias, mask, down, _, ctx.act, _ = inputs
    ctx.save_for_backward(x, up, matrix, b, weight, bias, mask, down, *output[1:])
    ctx.set_materialize_grads(False)


def backward(ctx: Any, dy: Tensor, *others: None) -> tuple[Tensor | None, ...]:
    dx, dup, da, dmatrix, db, dweight, dbias, ddown = gradients(*ctx.saved_tensors, ctx.act, dy)
    return dx, dup, da, dmatrix, db, dweight, dbias, None, ddown, dy.flatten(0, 1).sum(0), None, None


operator, gradients = define(gated_mlp_forward, shape), define(gated_mlp_backward, shapes)
differentiate(operator, remember, backward)
