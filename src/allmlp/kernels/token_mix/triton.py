"""The product over tokens as one kernel: a program makes some rows and channels of one example.

LayerNorm does not touch the large operand. Its statistics belong to the summed index j, so they go into the matrix:

    sum_j A[i, j] (X[j, c] - mean[j]) rstd[j]  =  sum_j A'[i, j] X[j, c]  -  sum_j A'[i, j] mean[j],   A' = A * rstd

and what depends on the channel alone, lift, scale and shift, comes after the sum:

    H[i, c] = scale[c] (sum_j A'[i, j] X[j, c] - t[i] + lift[c] sum_j A'[i, j]) + shift[c] sum_j A[i, j] + bias[i]

So X streams from memory into the matrix units as it is.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.token_mix.reference import Act, Around, Combine

CONFIGS = [
    triton.Config({"BM": rows, "BC": columns, "BK": depth}, num_warps=warps, num_stages=stages)
    for rows, columns, depth, warps, stages in (
        (128, 128, 64, 8, 3),
        (128, 128, 32, 8, 4),
        (128, 256, 64, 8, 3),
        (64, 128, 64, 4, 3),
        (64, 256, 64, 8, 3),
        (256, 64, 64, 8, 3),
        (256, 128, 32, 8, 3),
        (64, 64, 32, 4, 4),
    )
]
ACT = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
COMBINE = {"none": 0, "multiply": 1, "add": 2}


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == 1:
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACT == 2:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), written so that nothing overflows.
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        e = tl.exp(-2 * tl.abs(u))
        z = z * tl.where(u >= 0, 1.0, e) / (1 + e)
    elif ACT == 3:
        z = tl.maximum(z, 0.0)
    return z


# The interpreter has nothing to time: one of the sizes is enough there.
@triton.autotune(
    CONFIGS[-1:] if triton.knobs.runtime.interpret else CONFIGS,
    key=["M", "K", "C", "STATS", "ACT", "COMBINE"],
    cache_results=True,
)
@triton.jit
def kernel(
    x_ptr, a_ptr, y_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, lift_ptr, other_ptr, gain_ptr,
    M, C, x_b, x_k, a_m, a_k, y_b, y_m, o_b, o_m, s_b,
    K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, STATS: tl.constexpr,
    LIFT: tl.constexpr, GAIN: tl.constexpr, ACT: tl.constexpr, COMBINE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    # Row tiles of the same channels are neighbours: the second finds the first's X in the cache.
    tile, columns, example = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    cols = columns * BC + tl.arange(0, BC)
    in_rows, in_cols = rows < M, cols < C
    total = tl.zeros((BM, BC), dtype=tl.float32)
    centre = tl.zeros((BM,), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    lifted = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, K, BK):
        ks = start + tl.arange(0, BK)
        in_k = ks < K
        a = tl.load(a_ptr + rows[:, None] * a_m + ks[None, :] * a_k, in_rows[:, None] & in_k[None, :], 0.0)
        x = tl.load(x_ptr + example * x_b + ks[:, None] * x_k + cols[None, :], in_k[:, None] & in_cols[None, :], 0.0)
        if SHIFT:
            mass += tl.sum(a.to(tl.float32), 1)
        if STATS:
            rstd = tl.load(rstd_ptr + example * s_b + ks, in_k, 0.0)
            mean = tl.load(mean_ptr + example * s_b + ks, in_k, 0.0)
            scaled = a.to(tl.float32) * rstd[None, :]
            centre += tl.sum(scaled * mean[None, :], 1)
            a = scaled.to(x.dtype)
        if LIFT:
            lifted += tl.sum(a.to(tl.float32), 1)
        total += tl.dot(a, x)
    z = total
    if STATS:
        z -= centre[:, None]
    if LIFT:
        z += lifted[:, None] * tl.load(lift_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if SCALE:
        z *= tl.load(scale_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if SHIFT:
        z += mass[:, None] * tl.load(shift_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if BIAS:
        z += tl.load(bias_ptr + rows, in_rows, 0.0).to(tl.float32)[:, None]
    z = activate(z, ACT)
    inside = in_rows[:, None] & in_cols[None, :]
    if COMBINE > 0:
        other = tl.load(other_ptr + example * o_b + rows[:, None] * o_m + cols[None, :], inside, 0.0).to(tl.float32)
        if GAIN:
            z *= tl.load(gain_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
        z = other * z if COMBINE == 1 else other + z
    tl.store(y_ptr + example * y_b + rows[:, None] * y_m + cols[None, :], z.to(y_ptr.dtype.element_ty), inside)


def token_mix(
    x: Tensor,
    matrix: Tensor,
    around: Around,
    act: Act = "none",
    combine: Combine = "none",
    out: Tensor | None = None,
) -> Tensor:
    """As the reference, in one kernel. `out` may not be `x`: other programs still read it."""
    batch, tokens, channels = x.shape
    rows = matrix.shape[0]
    y = x.new_empty(batch, rows, channels) if out is None else out
    other = around.other if combine != "none" else None
    for tensor in (x, y, other):
        assert tensor is None or tensor.stride(2) == 1, "channels must lie side by side"
    grid = lambda sizes: (triton.cdiv(rows, sizes["BM"]) * triton.cdiv(channels, sizes["BC"]), batch)  # noqa: E731
    run: Any = kernel
    run[grid](
        x, matrix, y, around.bias, around.scale, around.shift, around.mean, around.rstd,
        around.lift, other, around.gain,
        rows, channels,
        x.stride(0), x.stride(1), matrix.stride(0), matrix.stride(1), y.stride(0), y.stride(1),
        *((0, 0) if other is None else (other.stride(0), other.stride(1))),
        0 if around.mean is None else around.mean.stride(0),
        K=tokens,
        BIAS=around.bias is not None,
        SCALE=around.scale is not None,
        SHIFT=around.shift is not None,
        STATS=around.mean is not None,
        LIFT=around.lift is not None,
        GAIN=around.gain is not None and other is not None,
        ACT=ACT[act],
        COMBINE=COMBINE[combine] if other is not None else 0,
    )  # fmt: skip
    return y
