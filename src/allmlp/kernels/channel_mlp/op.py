"""The channel MLP for training:

    H = X U^T + a,   Y = act(H) V^T + c

X and H are saved for the gradient. act(H) is recomputed where its gradient is turned into that of H and the latter is
summed for the bias:

    dH = (dY V) act'(H),   dV = dY^T act(H),   dU = dH^T X,   da = sum dH,   dX = dH U
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allmlp.kernels.channel_mlp.reference import dispatch
from allmlp.kernels.custom_op import define_op, register_backward


def channel_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, act: str) -> Tensor:
    """Y; weights are cast to the dtype of x."""
    up, up_bias, down, down_bias = (weight.to(x.dtype) for weight in (up, up_bias, down, down_bias))
    return forward_op(x, up, up_bias, down, down_bias, act)[0]


def channel_mlp_forward(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """Y and H."""
    x2 = x.flatten(0, -2)
    h, a = dispatch(x2, up).hidden(x2, up, up_bias, act)
    y = torch.addmm(down_bias, a, down.T)
    return y.view(*x.shape[:-1], -1), h


def forward_fake(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    tokens = x.numel() // x.shape[-1]
    return x.new_empty(*x.shape[:-1], down.shape[0]), x.new_empty(tokens, up.shape[0])


def channel_mlp_backward(
    x: Tensor, h: Tensor, up: Tensor, down: Tensor, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x2, dy = x.flatten(0, -2), dy.flatten(0, -2)
    a, dh, dup_bias = dispatch(dy, down).hidden_backward(dy, down, h, act)
    return (dh @ up).view(x.shape), dh.T @ x2, dup_bias, dy.T @ a


def backward_fake(
    x: Tensor, h: Tensor, up: Tensor, down: Tensor, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), up.new_empty(len(up)), down.new_empty(down.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, _, down, _, ctx.act = inputs
    ctx.save_for_backward(x, output[1], up, down)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, dy: Tensor, dh: None) -> tuple[Tensor | None, ...]:
    x, h, up, down = ctx.saved_tensors
    dx, dup, dup_bias, ddown = backward_op(x, h, up, down, ctx.act, dy)
    return dx, dup, dup_bias, ddown, dy.flatten(0, -2).sum(0), None


forward_op, backward_op = define_op(channel_mlp_forward, forward_fake), define_op(channel_mlp_backward, backward_fake)
register_backward(forward_op, setup_context, backward)
