"""Activations and their gradients: one pass over memory each, with the sums that biases need on the way.

    a = act(x + bias),   dx = da act'(x + bias),   dbias = sum of dx over everything but the bias's own dimension

GELU's erf is Abramowitz and Stegun's 7.1.26, right to 1.5e-7: a few multiplications and the exponential that the
gradient needs anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACT = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def erf(z, bell):
    """erf(z / sqrt(2)), given bell = exp(-z^2 / 2)."""
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(z))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * bell
    return tl.where(z >= 0, 1 - tail, tail - 1)


@triton.jit
def sigmoid(u):
    e = tl.exp(-tl.abs(u))  # nothing overflows
    return tl.where(u >= 0, 1.0, e) / (1 + e)


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == 1:
        z = 0.5 * z * (1 + erf(z, tl.exp(-0.5 * z * z)))
    elif ACT == 2:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        z = z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACT == 3:
        z = tl.maximum(z, 0.0)
    return z


@triton.jit
def slope(z, ACT: tl.constexpr):
    """act(z) and act'(z)."""
    if ACT == 1:
        bell = tl.exp(-0.5 * z * z)
        share = 0.5 * (1 + erf(z, bell))
        return z * share, share + z * bell * 0.3989422804014327
    if ACT == 2:
        share = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return z * share, share + z * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * z * z)
    if ACT == 3:
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    return z, z * 0 + 1


@triton.jit
def forward_kernel(
    x_ptr, bias_ptr, y_ptr, R, C, D, BIAS: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    place = rows.to(tl.int64)[:, None] * C + cols[None, :]
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + rows % D).to(tl.float32)[:, None]
    tl.store(y_ptr + place, activate(x, ACT).to(y_ptr.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    x_ptr, bias_ptr, dy_ptr, y_ptr, dx_ptr, sum_ptr, R, C, D,
    BIAS: tl.constexpr, ACT: tl.constexpr, STRIPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    # Summed over rows at the end alone: rows lie in different warps, which would wait for each other.
    columns = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(0, STRIPE, BR):
        rows = tl.program_id(0) * STRIPE + start + tl.arange(0, BR)
        inside = (rows < R)[:, None] & (cols < C)[None, :]
        place = rows.to(tl.int64)[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias_ptr + rows % D).to(tl.float32)[:, None]
        y, rise = slope(x, ACT)
        dx = tl.load(dy_ptr + place, inside, 0.0).to(tl.float32) * rise
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), inside)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), inside)
        if BIAS:
            tl.store(sum_ptr + tl.program_id(1) * R + rows, tl.sum(dx, 1), rows < R)
        else:
            columns += dx
    if not BIAS:
        tl.store(sum_ptr + tl.program_id(0) * C + cols, tl.sum(columns, 0), cols < C)


def forward(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(x + bias): x is ... d c, and the bias d; without one x is as wide as it likes."""
    x = x.contiguous()
    channels, y = x.shape[-1], torch.empty_like(x)
    rows = x.numel() // channels
    run: Any = forward_kernel
    run[(triton.cdiv(rows, 16), triton.cdiv(channels, 256))](
        x, bias, y, rows, channels, x.shape[-2], BIAS=bias is not None, ACT=ACT[act], BR=16, BC=256, num_warps=8
    )
    return y


def backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """act(x + bias), dx, and the sum of dx: for each d with a bias, else for each channel (a linear map's bias)."""
    x, dy = x.contiguous(), dy.contiguous()
    channels, width = x.shape[-1], x.shape[-2]
    rows = x.numel() // channels
    y, dx = torch.empty_like(x), torch.empty_like(x)
    high = 64
    stripes, columns = -(-rows // high), -(-channels // 256)
    shape = (columns, rows) if bias is not None else (stripes, channels)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    run: Any = backward_kernel
    run[(stripes, columns)](
        x, bias, dy, y, dx, sums, rows, channels, width,
        BIAS=bias is not None, ACT=ACT[act], STRIPE=high, BR=16, BC=256, num_warps=8,
    )  # fmt: skip
    return y, dx, sums.view(-1, width).sum(0) if bias is not None else sums.sum(0)
