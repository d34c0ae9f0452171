"""Affine in fp8 as one pass over memory: a program reads a few rows and writes them and their scales, once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.launch import fused_multiply_add, launching
from allmlp.kernels.unit_rows.reference import FP8, FP8_MAX, MAX_SQUARES

BLOCK_R, CHANNELS_PER_WARP = 8, 256
"""Rows of a program, and channels for each of its warps: the best of fourteen on an H200 for 384 and 768 channels."""


@triton.jit(do_not_specialize=["R"])
def kernel(
    x_ptr, y_ptr, row_scale_ptr, weight_ptr, bias_ptr, deferred_bias_ptr, R, C,
    HAS_DEFERRED_BIAS: tl.constexpr, FP8_MAX: tl.constexpr, MAX_SQUARES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    in_rows, in_cols = rows < R, cols < C
    in_bounds = in_rows[:, None] & in_cols[None, :]
    offsets = rows[:, None] * C + cols[None, :]
    y = tl.load(x_ptr + offsets, in_bounds, 0.0).to(tl.float32)
    if HAS_DEFERRED_BIAS:
        y += tl.load(deferred_bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    y = y * tl.load(weight_ptr + cols, in_cols, 0.0)[None, :] + tl.load(bias_ptr + cols, in_cols, 0.0)[None, :]
    squares = tl.minimum(tl.sum(y * y, 1) + 1, MAX_SQUARES)
    row_scale = tl.sqrt(squares) / FP8_MAX
    tl.store(row_scale_ptr + rows, row_scale, in_rows)
    # On a GPU the conversion saturates.
    tl.store(y_ptr + offsets, (y * (1 / row_scale)[:, None]).to(y_ptr.dtype.element_ty), in_bounds)


def unit_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    deferred_bias: Tensor | None = None,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    rows, channels = x.shape
    assert x.is_contiguous(), "rows must be contiguous"
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block_c, run = int(triton.next_power_of_2(channels)), fused_multiply_add(kernel)
    block_r = max(1, min(BLOCK_R, 8192 // block_c))
    with launching("unit_rows", x):
        run[(triton.cdiv(rows, block_r),)](
            x, y, row_scale, weight, bias, deferred_bias, rows, channels,
            HAS_DEFERRED_BIAS=deferred_bias is not None, FP8_MAX=FP8_MAX, MAX_SQUARES=MAX_SQUARES,
            BLOCK_C=block_c, BLOCK_R=block_r, num_warps=min(8, max(1, block_c // CHANNELS_PER_WARP)),
        )  # fmt: skip
    return y, row_scale
