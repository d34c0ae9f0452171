"""Matrix products over tokens for training, with an activation in front:

    Y = A act(X + bias 1^T),      A: m k    X: b k c    bias: k

Mixer's token MLP is two of them, the second with bias and activation; the token mixing of ResMLP and gMLP is one.
Only X is saved for the gradient: act(X + bias) is recomputed.

cuBLAS falls back to a kernel of half the speed when the number of tokens (such as 196) is not a multiple of 8. So each
example is read together with the first rows of the next one (a window of 200 rows), which meet zero columns of A; the
last example has no next one and gets its own product. An infinity in those rows becomes NaN in the example before them,
which makes no difference to training: the loss of the batch is not finite either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.kernels.activation.reference import dispatch
from allmlp.kernels.custom_op import define_op, register_backward
from allmlp.kernels.row_sum.reference import dispatch as dispatch_row_sum

ALIGNMENT = 8


def token_matmul(matrix: Tensor, x: Tensor, bias: Tensor | None = None, act: str = "none") -> Tensor:
    """A act(X + bias 1^T); matrix and bias are cast to the dtype of x."""
    return forward_op(matrix.to(x.dtype), x, None if bias is None else bias.to(x.dtype), act)


def row_padding(x: Tensor) -> int:
    """Rows to add to each example so that their number is aligned; 0 where windows cannot provide them."""
    batch, tokens, _ = x.shape
    padding = -tokens % ALIGNMENT
    return 0 if batch == 1 or padding > tokens else padding


def windows(x: Tensor, rows: int) -> Tensor:
    """All examples but the last, each extended by rows of the next one: b-1 rows c."""
    batch, tokens, channels = x.shape
    return x.as_strided((batch - 1, rows, channels), (tokens * channels, channels, 1), x.storage_offset())


def matmul(matrix: Tensor, x: Tensor) -> Tensor:
    """A X for every example."""
    batch, tokens, channels = x.shape
    padding = row_padding(x)
    if not padding:
        return torch.bmm(matrix.expand(batch, -1, -1), x)
    x = x.contiguous()
    y = x.new_empty(batch, len(matrix), channels)
    padded = F.pad(matrix, (0, padding))
    torch.bmm(padded.expand(batch - 1, -1, -1), windows(x, tokens + padding), out=y[:-1])
    torch.mm(matrix, x[-1], out=y[-1])
    return y


def matrix_grad(dy: Tensor, x: Tensor) -> Tensor:
    """sum_b dY X^T, m k."""
    tokens, padding = x.shape[1], row_padding(x)
    sum_rows = dispatch_row_sum(x).sum_rows
    if not padding:
        return sum_rows(torch.bmm(dy, x.transpose(1, 2)), x.dtype)
    x = x.contiguous()
    all_but_last = sum_rows(torch.bmm(dy[:-1], windows(x, tokens + padding).transpose(1, 2)), x.dtype)
    return all_but_last[:, :tokens] + dy[-1] @ x[-1].T


def token_matmul_forward(matrix: Tensor, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    if act == "none" and bias is None:
        return matmul(matrix, x)
    return matmul(matrix, dispatch(x).forward(x, bias, act))


def forward_fake(matrix: Tensor, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0], x.shape[2])


def token_matmul_backward(
    matrix: Tensor, x: Tensor, bias: Tensor | None, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dA = sum_b dY act(X + bias)^T,   dX = (A^T dY) act'(X + bias),   dbias = sum of dX."""
    dy = dy.contiguous()
    dx = matmul(matrix.T.contiguous(), dy)
    if act == "none" and bias is None:
        return matrix_grad(dy, x), dx, x.new_empty(0)
    a, dx, dbias = dispatch(x).backward(x, bias, dx, act)
    return matrix_grad(dy, a), dx, dbias


def backward_fake(
    matrix: Tensor, x: Tensor, bias: Tensor | None, act: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(matrix), x.new_empty(x.shape), x.new_empty(0 if bias is None else x.shape[1])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, x, bias, ctx.act = inputs
    ctx.save_for_backward(matrix, x, bias)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    matrix, x, bias = ctx.saved_tensors
    dmatrix, dx, dbias = backward_op(matrix, x, bias, ctx.act, dy)
    return dmatrix, dx, None if bias is None else dbias, None


forward_op, backward_op = define_op(token_matmul_forward, forward_fake), define_op(token_matmul_backward, backward_fake)
register_backward(forward_op, setup_context, backward)
