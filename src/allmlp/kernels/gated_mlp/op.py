"""gMLP's channel MLP with its spatial gating unit as a torch op, for training on a GPU.

X, H, the token product F = W norm(Z2) and the norm's statistics are saved for the gradient; activations, the norm and
the gate's output are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.custom_op import define_op, register_backward
from allmlp.kernels.gated_mlp.reference import GatedMlpWeights
from allmlp.kernels.token_matmul.op import matmul, matrix_grad

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Y, then what the gradient needs: H, F, mean, rstd."""


def gated_mlp(x: Tensor, weights: GatedMlpWeights, mask: Tensor | None, act: str, eps: float) -> Tensor:
    """As the reference; weights are cast to the dtype of x."""
    mask = None if mask is None else mask.to(x.dtype)
    return forward_op(x, [weight.to(x.dtype) for weight in weights], mask, act, eps)[0]


def gated_mlp_forward(x: Tensor, weights: Sequence[Tensor], mask: Tensor | None, act: str, eps: float) -> Outputs:
    from allmlp.kernels.gated_mlp import triton

    w = GatedMlpWeights(*weights)
    h = torch.addmm(w.up_bias, x.flatten(0, 1), w.up.T).view(*x.shape[:2], -1)
    n, mean, rstd = triton.norm(h, mask, w.norm_weight, w.norm_bias, eps, act)
    f = matmul(w.matrix, n)
    y = torch.addmm(w.down_bias, triton.gate(h, f, w.token_bias, act).flatten(0, 1), w.down.T)
    return y.view(*x.shape[:2], -1), h, f, mean, rstd


def forward_fake(x: Tensor, weights: Sequence[Tensor], mask: Tensor | None, act: str, eps: float) -> Outputs:
    (batch, tokens), w = x.shape[:2], GatedMlpWeights(*weights)
    mean, rstd = (x.new_empty(batch, tokens, dtype=torch.float32) for _ in range(2))
    y, h, f = (x.new_empty(batch, tokens, width) for width in (w.down.shape[0], w.up.shape[0], w.up.shape[0] // 2))
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
    """Gradients of x and of all weights but the last bias."""
    from allmlp.kernels.gated_mlp import triton
    from allmlp.kernels.row_sum.triton import sum_rows

    w, dy = GatedMlpWeights(*weights), dy.flatten(0, 1)
    dg, dh, partial_sums = (dy @ w.down).view_as(f), torch.empty_like(h), triton.empty_partial_sums(h)
    g, df, dtoken_bias = triton.gate_backward(h, f, w.token_bias, dg, dh, partial_sums, act)
    ddown = dy.T @ g.flatten(0, 1)
    dn = matmul(w.matrix.T.contiguous(), df)
    n = triton.norm_backward(h, mask, w.norm_weight, w.norm_bias, mean, rstd, dn, dh, partial_sums, act)
    dmatrix, dh = matrix_grad(df, n), dh.flatten(0, 1)
    dx, dup, sums = (dh @ w.up).view_as(x), dh.T @ x.flatten(0, 1), sum_rows(partial_sums, x.dtype)
    # Outputs of an op must not alias each other.
    dup_bias, dnorm_weight, dnorm_bias = sums[:2].flatten(), sums[2].clone(), sums[3].clone()
    return [dx, dup, dup_bias, dmatrix, dtoken_bias, dnorm_weight, dnorm_bias, ddown]


def backward_fake(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *weights[:-1])]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, weights, mask, ctx.act, _ = inputs
    ctx.save_for_backward(x, mask, *output[1:], *weights)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, dy: Tensor, *unused: None) -> tuple[Any, ...]:
    x, mask, h, f, mean, rstd, *weights = ctx.saved_tensors
    dx, *dweights = backward_op(x, weights, mask, h, f, mean, rstd, ctx.act, dy)
    return dx, [*dweights, dy.flatten(0, 1).sum(0)], None, None, None


forward_op, backward_op = define_op(gated_mlp_forward, forward_fake), define_op(gated_mlp_backward, backward_fake)
register_backward(forward_op, setup_context, backward)
