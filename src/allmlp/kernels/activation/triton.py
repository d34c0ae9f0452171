"""Activations and their gradients: one pass over memory each, with the sums that biases need on the way.

    a = act(x + bias),   dx = da act'(x + bias),   dbias = sum of dx over everything but the bias's own dimension

GELU is z Phi(z), Phi the normal distribution. For 16-bit numbers, whose erf would take longer than their memory:

    Phi(z) = sigmoid(z q(z^2)),   q a cubic fitted to the logit of Phi: act(z) is right to 3e-5, act'(z) to 1.3e-4

For float32 erf is Abramowitz and Stegun's 7.1.26, right to 1.5e-7.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACT = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
SHORT_GELU = 4


def code(act: str, dtype: torch.dtype) -> int:
    """What the kernels call an activation of numbers of this type."""
    return SHORT_GELU if act == "gelu" and dtype.itemsize <= 2 else ACT[act]


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
def normal(z, s):
    """Phi(z), given s = z^2."""
    # q with the factor -log2(e); 1 / (1 + e) as a square, because the card has a fast 1 / sqrt.
    logit = z * (-2.3009778 + s * (-0.10698141 + s * (1.0822627e-3 + s * -5.6507264e-6)))
    root = tl.rsqrt(1 + tl.exp2(tl.minimum(logit, 100.0)))
    return root * root


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == 1:
        z = 0.5 * z * (1 + erf(z, tl.exp(-0.5 * z * z)))
    elif ACT == 2:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        z = z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACT == 3:
        z = tl.maximum(z, 0.0)
    elif ACT == 4:
        z *= normal(z, z * z)
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
    if ACT == 4:
        s = z * z
        share = normal(z, s)
        steep = 1.5949164 + s * (0.22246159 + s * (-3.7508366e-3 + s * 2.7417495e-5))  # of z q(z^2)
        return z * share, share + z * steep * (share - share * share)
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


# How many rows a program reads at once, and by how many warps: the interpreter has nothing to time.
TILES = [triton.Config({"BR": rows}, num_warps=warps) for rows, warps in ((16, 8), (8, 8), (4, 8), (4, 4), (2, 4))]
TILES = TILES[:1] if triton.knobs.runtime.interpret else TILES


@triton.autotune(TILES, key=["C", "BIAS", "ACT"])
@triton.jit
def backward_kernel(
    x_ptr, bias_ptr, dy_ptr, y_ptr, dx_ptr, sum_ptr, R, C, D,
    BIAS: tl.constexpr, ACT: tl.constexpr, STRIPE: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
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
        x,
        bias,
        y,
        rows,
        channels,
        x.shape[-2],
        BIAS=bias is not None,
        ACT=code(act, x.dtype),
        BR=16,
        BC=256,
        num_warps=8,
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
        BIAS=bias is not None, ACT=code(act, x.dtype), STRIPE=high, BC=256,
    )  # fmt: skip
    return y, dx, sums.view(-1, width).sum(0) if bias is not None else sums.sum(0)
