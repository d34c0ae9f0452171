"""Products over tokens for training, with an activation in front:

    Y = A act(X + bias 1^T),      A: m k    X: b k c    bias: k

A Mixer's token MLP is two of them, the second with bias and activation; ResMLP's and gMLP's token maps are one each.
The gradient keeps X alone: act(X + bias) is computed again.

196 tokens are no multiple of 8, and cuBLAS then falls back to a kernel of half the speed. So each example is
read with the first rows of the next one behind its own (a window of 200 rows), which meet columns of zeros in A; the
last example, which has no next one, has a product of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation import reference as plain
from allmlp.kernels.operator import define, differentiate

MULTIPLE = 8


def token_product(matrix: Tensor, x: Tensor, bias: Tensor | None = None, act: str = "none") -> Tensor:
    return operator(matrix.to(x.dtype), x, None if bias is None else bias.to(x.dtype), act)


def windows(x: Tensor, wide: int) -> Tensor:
    """All examples but the last, each with rows of its successor: b-1 wide c."""
    batch, tokens, channels = x.shape
    return x.as_strided((batch - 1, wide, channels), (tokens * channels, channels, 1), x.storage_offset())


def spare(tokens: int) -> int:
    """How many rows a window has more than an example."""
    return -tokens % MULTIPLE


def product(matrix: Tensor, x: Tensor) -> Tensor:
    """A X for every example."""
    batch, tokens, channels = x.shape
    more = spare(tokens)
    if not more or batch == 1 or more > tokens:
        return torch.bmm(matrix.expand(batch, -1, -1), x)
    x = x.contiguous()
    y = x.new_empty(batch, len(matrix), channels)
    wide = F.pad(matrix, (0, more))
    torch.bmm(wide.expand(batch - 1, -1, -1), windows(x, tokens + more), out=y[:-1])
    torch.mm(matrix, x[-1], out=y[-1])
    return y


def outer(dy: Tensor, x: Tensor) -> Tensor:
    """sum_b dY X^T, m k."""
    batch, tokens, _ = x.shape
    more = spare(tokens)
    if not more or batch == 1 or more > tokens:
        return torch.bmm(dy, x.transpose(1, 2)).sum(0)
    x = x.contiguous()
    most = torch.bmm(dy[:-1], windows(x, tokens + more).transpose(1, 2)).sum(0)
    return most[:, :tokens] + dy[-1] @ x[-1].T


def token_product_forward(matrix: Tensor, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    if act == "none" and bias is None:
        return product(matrix, x)
    return product(matrix, plain.kernels(x).forward(x, bias, act))


def shape(matrix: Tensor, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0], x.shape[2])


def token_product_backward(
    matrix: Tensor, x: Tensor, bias: Tensor | None, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dA = sum_b dY act(X + bias)^T,   dX = (A^T dY) act'(X + bias),   dbias = sum of dX."""
    dy = dy.contiguous()
    dx = product(matrix.T.contiguous(), dy)
    if act == "none" and bias is None:
        return outer(dy, x), dx, x.new_empty(0)
    a, dx, dbias = plain.kernels(x).backward(x, bias, dx, act)
    return outer(dy, a), dx, dbias.to(x.dtype)


def shapes(matrix: Tensor, x: Tensor, bias: Tensor | None, act: str, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(matrix), x.new_empty(x.shape), x.new_empty(0 if bias is None else x.shape[1])


def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, x, bias, ctx.act = inputs
    ctx.save_for_backward(matrix, x, bias)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    matrix, x, bias = ctx.saved_tensors
    dmatrix, dx, dbias = gradients(matrix, x, bias, ctx.act, dy)
    return dmatrix, dx, None if bias is None else dbias, None


operator, gradients = define(token_product_forward, shape), define(token_product_backward, shapes)
differentiate(operator, remember, backward)
