"""LayerNorm as one pass over memory: a program reads a few tokens and writes them, their statistics or their sum, once.

The transposed version writes channels as rows: the following product over tokens is then a plain GEMM, for which cuBLAS
has its fastest kernels, with bias and activation in the epilogue. Those need row lengths that are multiples of 8, which
196 tokens are not, so rows are zero-padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.launch import autotune, fused_multiply_add, launching, num_sms
from allmlp.kernels.tiles import tile_and_batch

BLOCK_R, NUM_WARPS = 4, 2
"""Rows and warps of a program: on an H200 within 4 % of the best of fourteen, from 256 to 1,024 channels."""


@triton.jit(do_not_specialize=["R"])
def kernel(
    x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, deferred_bias_ptr, R, C, stride_x, stride_y, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DEFERRED_BIAS: tl.constexpr,
    WRITE_NORM: tl.constexpr, WRITE_STATS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    in_rows, in_cols = rows < R, cols < C
    in_bounds = in_rows[:, None] & in_cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], in_bounds, 0.0).to(tl.float32)
    if HAS_DEFERRED_BIAS:
        x += tl.load(deferred_bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    mean = tl.sum(x, 1) / C
    centered = tl.where(in_cols[None, :], x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, 1) / C + eps)
    if WRITE_STATS:
        tl.store(mean_ptr + rows, mean, in_rows)
        tl.store(rstd_ptr + rows, rstd, in_rows)
    if WRITE_NORM:
        y = centered * rstd[:, None]
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y.to(y_ptr.dtype.element_ty), in_bounds)


def launch(
    x: Tensor,
    eps: float,
    deferred_bias: Tensor | None,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    stats: tuple[Tensor, Tensor] | None = None,
) -> None:
    channels = x.shape[-1]
    rows = x.numel() // channels
    assert x.is_contiguous() or x.dim() == 2 or x.stride(0) == x.shape[1] * x.stride(1), "rows must be evenly spaced"
    block_c, run = int(triton.next_power_of_2(channels)), fused_multiply_add(kernel)
    block_r = max(1, min(BLOCK_R, 4096 // block_c))
    with launching("layer_norm", x):
        run[(triton.cdiv(rows, block_r),)](
            x, y, *(stats or (None, None)), weight, bias, deferred_bias, rows, channels,
            x.stride(-2), 0 if y is None else y.stride(-2), eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, HAS_DEFERRED_BIAS=deferred_bias is not None,
            WRITE_NORM=y is not None, WRITE_STATS=stats is not None, BLOCK_C=block_c, BLOCK_R=block_r,
            num_warps=max(NUM_WARPS, min(8, block_c // 1024)),
        )  # fmt: skip


def layer_norm_stats(x: Tensor, eps: float, deferred_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the reference."""
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    launch(x, eps, deferred_bias, stats=(mean, rstd))
    return mean, rstd


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    deferred_bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As the reference."""
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    launch(x, eps, deferred_bias, y, weight, bias)
    return y


TRANSPOSED_CONFIGS = [
    triton.Config({"BLOCK_S": tokens, "BLOCK_C": channels}, num_warps=warps)
    for tokens, channels, warps in ((32, 256, 8), (32, 128, 8), (32, 128, 4), (16, 256, 4), (16, 512, 8))
]


@autotune(TRANSPOSED_CONFIGS, default=0, key=["is_large", "C", "WIDTH"])
@triton.jit(do_not_specialize=["is_large"])
def transposed_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, deferred_bias_ptr, S, WIDTH, stride_xb, stride_xs, stride_yb, stride_yc, eps,
    is_large, C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DEFERRED_BIAS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, batch = tile_and_batch(tl.cdiv(WIDTH, BLOCK_S))
    tokens = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    mean = tl.zeros((BLOCK_S,), dtype=tl.float32)
    sum_sq_dev = tl.zeros((BLOCK_S,), dtype=tl.float32)
    # Chan's parallel variance: merge the running mean and sum of squared deviations with those of the next block.
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        in_bounds = (tokens < S)[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + batch * stride_xb + tokens[:, None] * stride_xs + cols[None, :], in_bounds, 0.0)
        x = x.to(tl.float32)
        if HAS_DEFERRED_BIAS:
            x += tl.load(deferred_bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        count, block_count = start * 1.0, tl.sum((cols < C).to(tl.float32), 0)
        block_mean = tl.sum(tl.where((cols < C)[None, :], x, 0.0), 1) / block_count
        centered = tl.where((cols < C)[None, :], x - block_mean[:, None], 0.0)
        delta = block_mean - mean
        sum_sq_dev += tl.sum(centered * centered, 1) + delta * delta * (count * block_count / (count + block_count))
        mean += delta * (block_count / (count + block_count))
    rstd = 1 / tl.sqrt(sum_sq_dev / C + eps)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        in_bounds = (tokens < S)[:, None] & (cols < C)[None, :]
        y = tl.load(x_ptr + batch * stride_xb + tokens[:, None] * stride_xs + cols[None, :], in_bounds, 0.0)
        y = y.to(tl.float32)
        if HAS_DEFERRED_BIAS:
            y += tl.load(deferred_bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        y = (y - mean[:, None]) * rstd[:, None]
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
        y = tl.trans(tl.where((tokens < S)[:, None], y, 0.0).to(y_ptr.dtype.element_ty))
        in_bounds = (cols < C)[:, None] & (tokens < WIDTH)[None, :]
        tl.store(y_ptr + batch * stride_yb + cols[:, None] * stride_yc + tokens[None, :], y, in_bounds)


def layer_norm_transposed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, deferred_bias: Tensor | None, width: int
) -> Tensor:
    """As the reference."""
    batch, tokens, channels = x.shape
    assert x.stride(2) == 1, "channels must be contiguous"
    y = x.new_empty(batch, channels, width)
    is_large = batch * triton.cdiv(width, 32) >= num_sms(x.device)
    run = fused_multiply_add(transposed_kernel)
    with launching("layer_norm_transposed", x):
        run[lambda config: (triton.cdiv(width, config["BLOCK_S"]) * batch,)](
            x, y, weight, bias, deferred_bias, tokens, width, *x.stride()[:2], *y.stride()[:2], eps, int(is_large),
            C=channels, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            HAS_DEFERRED_BIAS=deferred_bias is not None,
        )  # fmt: skip
    return y


MEAN_TOKENS = 32
"""Tokens that one program of the mean adds up: enough programs for a GPU even with few examples."""


@triton.jit(do_not_specialize=["S"])
def mean_kernel(
    x_ptr, sum_ptr, weight_ptr, bias_ptr, deferred_bias_ptr, S, C, stride_xb, stride_xs, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DEFERRED_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, batch = tile_and_batch(tl.cdiv(S, TOKENS))
    cols = tl.arange(0, BLOCK_C)
    in_cols = cols < C
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in tl.range(0, TOKENS, BLOCK_R, num_stages=3):
        rows = tile * TOKENS + start + tl.arange(0, BLOCK_R)
        in_bounds = (rows < S)[:, None] & in_cols[None, :]
        x = tl.load(x_ptr + batch * stride_xb + rows[:, None] * stride_xs + cols[None, :], in_bounds, 0.0)
        x = x.to(tl.float32)
        if HAS_DEFERRED_BIAS:
            x += tl.load(deferred_bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        mean = tl.sum(x, 1) / C
        centered = tl.where(in_bounds, x - mean[:, None], 0.0)
        variance = tl.where(rows < S, tl.sum(centered * centered, 1) / C + eps, 1.0)  # eps may be 0
        total += centered / tl.sqrt(variance)[:, None]
    y = tl.sum(total, 0) / S
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, in_cols, 0.0).to(tl.float32)
    if HAS_BIAS:  # once, not per tile
        y += tl.where(tile == 0, tl.load(bias_ptr + cols, in_cols, 0.0).to(tl.float32), 0.0)
    tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * C + cols, y, in_cols)


def layer_norm_mean(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, deferred_bias: Tensor | None = None
) -> Tensor:
    """As the reference."""
    batch, tokens, channels = x.shape
    assert x.stride(2) == 1, "channels must be contiguous"
    tiles, block_c = -(-tokens // MEAN_TOKENS), int(triton.next_power_of_2(channels))
    sums = torch.empty(batch, tiles, channels, dtype=torch.float32, device=x.device)
    run = fused_multiply_add(mean_kernel)
    with launching("layer_norm_mean", x):
        run[(tiles * batch,)](
            x, sums, weight, bias, deferred_bias, tokens, channels, *x.stride()[:2], eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, HAS_DEFERRED_BIAS=deferred_bias is not None,
            TOKENS=MEAN_TOKENS, BLOCK_R=max(1, min(4, 4096 // block_c)), BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return sums.sum(1).to(x.dtype)
