"""LayerNorm as one pass over memory: a program reads a few tokens, and writes them or their statistics once.

Turned, it writes channels as rows: a product over tokens is then a plain one, for which cuBLAS has its best kernels
and adds bias and activation on the way. 196 tokens are no multiple of 8, which those kernels need: rows are filled up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# How many rows a program reads at once, and by how many warps: the interpreter has nothing to time.
ROWS = [triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in ((1, 1), (1, 4), (2, 4), (4, 4), (4, 8))]


@triton.autotune(ROWS[2:3] if triton.knobs.runtime.interpret else ROWS, key=["WIDE", "NORM", "STATS"])
@triton.jit
def kernel(
    x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, N, C, x_row, y_row, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr, STATS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, WIDE)
    in_rows, in_cols = rows < N, cols < C
    inside = in_rows[:, None] & in_cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], inside, 0.0).to(tl.float32)
    if SHIFT:
        x += tl.load(shift_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    mean = tl.sum(x, 1) / C
    away = tl.where(in_cols[None, :], x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(away * away, 1) / C + eps)
    if STATS:
        tl.store(mean_ptr + rows, mean, in_rows)
        tl.store(rstd_ptr + rows, rstd, in_rows)
    if NORM:
        y = away * rstd[:, None]
        if WEIGHT:
            y *= tl.load(weight_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + rows[:, None] * y_row + cols[None, :], y.to(y_ptr.dtype.element_ty), inside)


def launch(
    x: Tensor,
    eps: float,
    shift: Tensor | None,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    stats: tuple[Tensor, Tensor] | None = None,
) -> None:
    channels = x.shape[-1]
    rows = x.numel() // channels
    assert x.is_contiguous() or x.dim() == 2 or x.stride(0) == x.shape[1] * x.stride(1), "rows must be evenly spaced"
    run: Any = kernel
    run[lambda sizes: (triton.cdiv(rows, sizes["ROWS"]),)](
        x, y, *(stats or (None, None)), weight, bias, shift, rows, channels,
        x.stride(-2), 0 if y is None else y.stride(-2), eps,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        SHIFT=shift is not None,
        NORM=y is not None,
        STATS=stats is not None,
        WIDE=triton.next_power_of_2(channels),
    )  # fmt: skip


def row_stats(x: Tensor, eps: float, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    launch(x, eps, shift, stats=(mean, rstd))
    return mean, rstd


def row_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    launch(x, eps, shift, y, weight, bias)
    return y


# Tokens and channels at a time.
TILES = [
    triton.Config({"BS": tokens, "BC": channels}, num_warps=warps)
    for tokens, channels, warps in ((32, 256, 8), (32, 128, 8), (32, 128, 4), (16, 256, 4), (16, 512, 8))
]


@triton.autotune(TILES[:1] if triton.knobs.runtime.interpret else TILES, key=["C", "T"])
@triton.jit
def turned_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, shift_ptr, S, T, x_b, x_s, y_b, y_c, eps,
    C: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BS + tl.arange(0, BS)
    example = tl.program_id(1).to(tl.int64)
    mean = tl.zeros((BS,), dtype=tl.float32)
    away = tl.zeros((BS,), dtype=tl.float32)
    # Channels come in parts; mean and squared distance of all seen so far are joined with those of the next part.
    for start in range(0, C, BC):
        cols = start + tl.arange(0, BC)
        inside = (tokens < S)[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + example * x_b + tokens[:, None] * x_s + cols[None, :], inside, 0.0).to(tl.float32)
        if SHIFT:
            x += tl.load(shift_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        seen, part = start * 1.0, tl.sum((cols < C).to(tl.float32), 0)
        middle = tl.sum(tl.where((cols < C)[None, :], x, 0.0), 1) / part
        far = tl.where((cols < C)[None, :], x - middle[:, None], 0.0)
        step = middle - mean
        away += tl.sum(far * far, 1) + step * step * (seen * part / (seen + part))
        mean += step * (part / (seen + part))
    rstd = 1 / tl.sqrt(away / C + eps)
    for start in range(0, C, BC):
        cols = start + tl.arange(0, BC)
        inside = (tokens < S)[:, None] & (cols < C)[None, :]
        y = tl.load(x_ptr + example * x_b + tokens[:, None] * x_s + cols[None, :], inside, 0.0).to(tl.float32)
        if SHIFT:
            y += tl.load(shift_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        y = (y - mean[:, None]) * rstd[:, None]
        if WEIGHT:
            y *= tl.load(weight_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        y = tl.trans(tl.where((tokens < S)[:, None], y, 0.0).to(y_ptr.dtype.element_ty))
        inside = (cols < C)[:, None] & (tokens < T)[None, :]
        tl.store(y_ptr + example * y_b + cols[:, None] * y_c + tokens[None, :], y, inside)


def row_norm_turned(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None = None, width: int = 0
) -> Tensor:
    """The norm of x (b s c) as b c width: columns after the s-th are 0."""
    batch, tokens, channels = x.shape
    assert x.stride(2) == 1, "channels must lie side by side"
    y = x.new_empty(batch, channels, width)
    run: Any = turned_kernel
    run[lambda sizes: (triton.cdiv(width, sizes["BS"]), batch)](
        x, y, weight, bias, shift, tokens, width, *x.stride()[:2], *y.stride()[:2], eps,
        C=channels,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        SHIFT=shift is not None,
    )  # fmt: skip
    return y
