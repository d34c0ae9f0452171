"""A channel MLP for training:

    H = X U^T + a,   Y = act(H) V^T + c

X and H are kept for the gradient. act(H) is computed again, in the pass that turns its gradient into H's and sums that
up for the bias:

    dH = (dY V) act'(H),   dV = dY^T act(H),   dU = dH^T X,   da = sum dH,   dX = dH U
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.activation import reference as plain
from allmlp.kernels.operator import define, differentiate


def channel_mlp(x: Tensor, up: Tensor, a: Tensor, down: Tensor, c: Tensor, act: str) -> Tensor:
    """Weights are brought to the type of x."""
    up, a, down, c = (weight.to(x.dtype) for weight in (up, a, down, c))
    return operator(x, up, a, down, c, act)[0]


def channel_mlp_forward(x: Tensor, up: Tensor, a: Tensor, down: Tensor, c: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Y and H."""
    h = torch.addmm(a, x.flatten(0, -2), up.T)
    y = torch.addmm(c, plain.kernels(h).forward(h, None, act), down.T)
    return y.view(*x.shape[:-1], -1), h


def shape(x: Tensor, up: Tensor, a: Tensor, down: Tensor, c: Tensor, act: str) -> tuple[Tensor, Tensor]:
    tokens = x.numel() // x.shape[-1]
    return x.new_empty(*x.shape[:-1], down.shape[0]), x.new_empty(tokens, up.shape[0])


def channel_mlp_backward(
    x: Tensor, h: Tensor, up: Tensor, down: Tensor, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x2, dy = x.flatten(0, -2), dy.flatten(0, -2)
    a, dh, da = plain.kernels(h).backward(h, None, dy @ down, act)
    return (dh @ up).view(x.shape), dh.T @ x2, da.to(x.dtype), dy.T @ a


def shapes(
    x: Tensor, h: Tensor, up: Tensor, down: Tensor, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), up.new_empty(len(up)), down.new_empty(down.shape)


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, _, down, _, ctx.act = inputs
    ctx.save_for_backward(x, output[1], up, down)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, dy: Tensor, dh: None) -> tuple[Tensor | None, ...]:
    x, h, up, down = ctx.saved_tensors
    dx, dup, da, ddown = gradients(x, h, up, down, ctx.act, dy)
    return dx, dup, da, ddown, dy.flatten(0, -2).sum(0), None


operator, gradients = define(channel_mlp_forward, shape), define(channel_mlp_backward, shapes)
differentiate(operator, remember, backward)
