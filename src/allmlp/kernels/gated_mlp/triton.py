"""The elementwise and normalization stages of the gated MLP, one pass over memory each.

Z = act(H) = [Z1 Z2],   N = mask norm(Z2),   F = W N,   G = Z1 (F + b)

dF = dG Z1,   dH1 = dG (F + b) act'(H1),   db = sum dF
dZ2 = gradient of norm at mask W^T dF,   dH2 = dZ2 act'(H2)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.activation.triton import (
    BLOCK_C,
    NUM_STAGES,
    act_code,
    activate,
    activate_with_grad,
)
from allmlp.kernels.launch import fused_multiply_add, launching, num_sms
from allmlp.kernels.row_sum.triton import sum_rows

GATE_BLOCK_R = 8
NORM_WARPS_PER_SM = 8
"""Warps of the norm's backward pass that one multiprocessor runs at a time: each holds many registers."""


def empty_partial_sums(h: Tensor) -> Tensor:
    """One row per program of the backward pass: its sums of dH1, dH2, and of the norm's dweight and dbias, n 4 c."""
    rows, channels = h.shape[0] * h.shape[1], h.shape[2] // 2
    per_sm = max(1, NORM_WARPS_PER_SM // backward_tile(int(triton.next_power_of_2(channels)))["num_warps"])
    programs = min(per_sm * num_sms(h.device), -(-rows // GATE_BLOCK_R))
    return torch.empty(programs, 4, channels, dtype=torch.float32, device=h.device)


@triton.jit(do_not_specialize=["R"])
def gate_kernel(
    h_ptr, f_ptr, b_ptr, g_ptr, R, C, S, stride_h,
    ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_bounds, rows_64 = (rows < R)[:, None] & (cols < C)[None, :], rows.to(tl.int64)[:, None]
    z = activate(tl.load(h_ptr + rows_64 * stride_h + cols[None, :], in_bounds, 0.0).to(tl.float32), ACT)
    f = tl.load(f_ptr + rows_64 * C + cols[None, :], in_bounds, 0.0).to(tl.float32)
    g = z * (f + tl.load(b_ptr + rows % S).to(tl.float32)[:, None])
    tl.store(g_ptr + rows_64 * C + cols[None, :], g.to(g_ptr.dtype.element_ty), in_bounds)


def gate(h: Tensor, f: Tensor, b: Tensor, act: str) -> Tensor:
    """G (b s c) from h (b s 2c), f (b s c) and the token bias b (s)."""
    g = torch.empty_like(f)
    rows, channels = f.shape[0] * f.shape[1], f.shape[2]
    run = fused_multiply_add(gate_kernel)
    with launching("gate", h):
        run[(triton.cdiv(rows, 16), triton.cdiv(channels, BLOCK_C))](
            h, f, b, g, rows, channels, f.shape[1], h.stride(1),
            ACT=act_code(act, h.dtype), BLOCK_R=16, BLOCK_C=BLOCK_C, num_warps=8,
        )  # fmt: skip
    return g


@triton.jit(do_not_specialize=["R"])
def gate_backward_kernel(
    h_ptr, f_ptr, b_ptr, dg_ptr, g_ptr, df_ptr, dh_ptr, db_ptr, sum_ptr, R, C, S, stride_h,
    ACT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Rows are spread over warps, so reducing over them synchronizes the warps: do it once, after the loop.
    dh_sum = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK_R, R, tl.num_programs(0) * BLOCK_R, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        in_bounds, rows_64 = (rows < R)[:, None] & (cols < C)[None, :], rows.to(tl.int64)[:, None]
        h = tl.load(h_ptr + rows_64 * stride_h + cols[None, :], in_bounds, 0.0).to(tl.float32)
        z, act_grad = activate_with_grad(h, ACT)
        f = tl.load(f_ptr + rows_64 * C + cols[None, :], in_bounds, 0.0).to(tl.float32)
        f += tl.load(b_ptr + rows % S).to(tl.float32)[:, None]
        dg = tl.load(dg_ptr + rows_64 * C + cols[None, :], in_bounds, 0.0).to(tl.float32)
        df, dh = dg * z, dg * f * act_grad
        tl.store(g_ptr + rows_64 * C + cols[None, :], (z * f).to(g_ptr.dtype.element_ty), in_bounds)
        tl.store(df_ptr + rows_64 * C + cols[None, :], df.to(df_ptr.dtype.element_ty), in_bounds)
        tl.store(dh_ptr + rows_64 * stride_h + cols[None, :], dh.to(dh_ptr.dtype.element_ty), in_bounds)
        tl.store(db_ptr + tl.program_id(1) * R + rows, tl.sum(df, 1), rows < R)
        dh_sum += dh
    tl.store(sum_ptr + tl.program_id(0) * 4 * C + cols, tl.sum(dh_sum, 0), cols < C)


def gate_backward(
    h: Tensor, f: Tensor, b: Tensor, dg: Tensor, dh: Tensor, partial_sums: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """G (recomputed), dF and db. Writes dH1 to the first half of `dh` and its sums to `partial_sums[:, 0]`."""
    g, df = torch.empty_like(f), torch.empty_like(f)
    rows, channels = f.shape[0] * f.shape[1], f.shape[2]
    col_blocks = -(-channels // BLOCK_C)
    db = torch.empty(col_blocks, rows, dtype=torch.float32, device=h.device)
    run = fused_multiply_add(gate_backward_kernel)
    with launching("gate_backward", h):
        run[(len(partial_sums), col_blocks)](
            h, f, b, dg, g, df, dh, db, partial_sums, rows, channels, f.shape[1], h.stride(1),
            ACT=act_code(act, h.dtype), BLOCK_C=BLOCK_C, BLOCK_R=GATE_BLOCK_R, NUM_STAGES=NUM_STAGES, num_warps=4,
        )  # fmt: skip
    return g, df, sum_rows(db.view(-1, f.shape[1]), b.dtype)


def forward_tile(block_c: int) -> dict[str, int]:
    """Whole rows, 32 numbers for each thread."""
    return {"BLOCK_R": max(1, 1024 // block_c), "num_warps": min(8, max(1, block_c // 1024))}


def backward_tile(block_c: int) -> dict[str, int]:
    """Two whole rows, at most 32 numbers for each thread; sums over the rows stay within a thread."""
    return {"BLOCK_R": 2 if block_c <= 4096 else 1, "num_warps": min(8, max(1, block_c // 512))}


@triton.jit(do_not_specialize=["R"])
def norm_kernel(
    h_ptr, mask_ptr, weight_ptr, bias_ptr, n_ptr, mean_ptr, rstd_ptr, R, C, stride_h, eps,
    ACT: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    in_cols, rows_64 = (cols < C)[None, :], rows.to(tl.int64)[:, None]
    in_bounds = (rows < R)[:, None] & in_cols
    z = activate(tl.load(h_ptr + rows_64 * stride_h + cols[None, :], in_bounds, 0.0).to(tl.float32), ACT)
    mean = tl.sum(tl.where(in_cols, z, 0.0), 1) / C
    centered = tl.where(in_cols, z - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, 1) / C + eps)
    n = centered * rstd[:, None] * tl.load(weight_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    n += tl.load(bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    if HAS_MASK:
        n *= tl.load(mask_ptr + rows, rows < R, 0.0).to(tl.float32)[:, None]
    tl.store(n_ptr + rows_64 * C + cols[None, :], n.to(n_ptr.dtype.element_ty), in_bounds)
    tl.store(mean_ptr + rows, mean, rows < R)
    tl.store(rstd_ptr + rows, rstd, rows < R)


def norm(
    h: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor, eps: float, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """N (b s c) from the second half of h (b s 2c), and the norm's mean and rstd (b s)."""
    batch, tokens, channels = h.shape[0], h.shape[1], h.shape[2] // 2
    n = h.new_empty(batch, tokens, channels)
    mean, rstd = (torch.empty(batch, tokens, dtype=torch.float32, device=h.device) for _ in range(2))
    block_c, run = int(triton.next_power_of_2(channels)), fused_multiply_add(norm_kernel)
    tile = forward_tile(block_c)
    with launching("gated_mlp_norm", h):
        run[(triton.cdiv(batch * tokens, tile["BLOCK_R"]),)](
            h[..., channels:], mask, weight, bias, n, mean, rstd, batch * tokens, channels, h.stride(1), eps,
            ACT=act_code(act, h.dtype), HAS_MASK=mask is not None, BLOCK_C=block_c, **tile,
        )  # fmt: skip
    return n, mean, rstd


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["R"])
def norm_backward_kernel(
    h_ptr, mask_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dn_ptr, n_ptr, dh_ptr, sum_ptr, R, C, stride_h,
    ACT: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_C)
    in_cols = cols < C
    weight = tl.load(weight_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dh_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK_R, R, tl.num_programs(0) * BLOCK_R, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        in_rows, rows_64 = rows < R, rows.to(tl.int64)[:, None]
        in_bounds = in_rows[:, None] & in_cols[None, :]
        h = tl.load(h_ptr + rows_64 * stride_h + cols[None, :], in_bounds, 0.0).to(tl.float32)
        z, act_grad = activate_with_grad(h, ACT)
        dn = tl.load(dn_ptr + rows_64 * C + cols[None, :], in_bounds, 0.0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + rows, in_rows, 0.0)[:, None], tl.load(rstd_ptr + rows, in_rows, 0.0)[:, None]
        x = tl.where(in_bounds, (z - mean) * rstd, 0.0)
        n = x * weight + bias
        if HAS_MASK:
            mask = tl.load(mask_ptr + rows, in_rows, 0.0).to(tl.float32)[:, None]
            n, dn = n * mask, dn * mask
        tl.store(n_ptr + rows_64 * C + cols[None, :], n.to(n_ptr.dtype.element_ty), in_bounds)
        dweight += tl.sum(dn * x, 0)
        dbias += tl.sum(dn, 0)
        dx = dn * weight
        # Both sums in one reduction, so that the warps meet once.
        dx_sum, dx_x_sum = tl.reduce((dx, dx * x), 1, add_pairs)
        dz = rstd * (dx - dx_sum[:, None] / C - x * (dx_x_sum[:, None] / C))
        dh = tl.where(in_bounds, dz * act_grad, 0.0)
        tl.store(dh_ptr + rows_64 * stride_h + cols[None, :], dh.to(dh_ptr.dtype.element_ty), in_bounds)
        dh_sum += tl.sum(dh, 0)
    sums = sum_ptr + tl.program_id(0) * 4 * C + cols
    tl.store(sums + C, dh_sum, in_cols)
    tl.store(sums + 2 * C, dweight, in_cols)
    tl.store(sums + 3 * C, dbias, in_cols)


def norm_backward(
    h: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dn: Tensor,
    dh: Tensor,
    partial_sums: Tensor,
    act: str,
) -> Tensor:
    """N (recomputed). Writes dH2 to the second half of `dh`; sums of dH2, dweight, dbias to `partial_sums[:, 1:]`."""
    n, channels = torch.empty_like(dn), dn.shape[2]
    block_c, run = int(triton.next_power_of_2(channels)), fused_multiply_add(norm_backward_kernel)
    with launching("gated_mlp_norm_backward", h):
        run[(len(partial_sums),)](
            h[..., channels:], mask, weight, bias, mean, rstd, dn, n, dh[..., channels:], partial_sums,
            dn.shape[0] * dn.shape[1], channels, h.stride(1),
            ACT=act_code(act, h.dtype), HAS_MASK=mask is not None, BLOCK_C=block_c, NUM_STAGES=NUM_STAGES,
            **backward_tile(block_c),
        )  # fmt: skip
    return n
