"""What stands around the products of a gated MLP: one pass over memory for each stage.

Z = act(H) = [Z1 Z2],   N = mask norm(Z2),   F = W N,   G = Z1 (F + b)

dF = dG Z1,   dH1 = dG (F + b) act'(H1),   db = sum dF
dZ2 = norm's gradient of mask W^T dF,   dH2 = dZ2 act'(H2)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.activation.triton import TILES, activate, code, slope

STRIPE = 64
"""Rows that a program of the backward pass goes through: it leaves their sums, which are added up afterwards."""


def stripes(h: Tensor) -> Tensor:
    """Room for the sums of every stripe: of dH1, dH2, and of the gradients of norm's weight and bias, n 4 c."""
    rows = h.shape[0] * h.shape[1]
    return torch.empty(-(-rows // STRIPE), 4, h.shape[2] // 2, dtype=torch.float32, device=h.device)


@triton.jit
def gate_kernel(
    h_ptr, f_ptr, b_ptr, g_ptr, R, C, S, h_r, ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside, far = (rows < R)[:, None] & (cols < C)[None, :], rows.to(tl.int64)[:, None]
    z = activate(tl.load(h_ptr + far * h_r + cols[None, :], inside, 0.0).to(tl.float32), ACT)
    f = tl.load(f_ptr + far * C + cols[None, :], inside, 0.0).to(tl.float32)
    g = z * (f + tl.load(b_ptr + rows % S).to(tl.float32)[:, None])
    tl.store(g_ptr + far * C + cols[None, :], g.to(g_ptr.dtype.element_ty), inside)


def gate(h: Tensor, f: Tensor, b: Tensor, act: str) -> Tensor:
    """G, b s c: h is b s 2c."""
    g = torch.empty_like(f)
    rows, channels = f.shape[0] * f.shape[1], f.shape[2]
    run: Any = gate_kernel
    run[(triton.cdiv(rows, 16), triton.cdiv(channels, 256))](
        h, f, b, g, rows, channels, f.shape[1], h.stride(1), ACT=code(act, h.dtype), BR=16, BC=256, num_warps=8
    )
    return g


# How many rows a program reads at once, and by how many warps: the interpreter has nothing to time.
ROWS = [
    triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in ((1, 1), (1, 4), (1, 8), (2, 4), (4, 4), (4, 8))
]
ROWS = ROWS[4:5] if triton.knobs.runtime.interpret else ROWS


@triton.autotune(TILES, key=["C", "ACT"])
@triton.jit
def gate_backward_kernel(
    h_ptr, f_ptr, b_ptr, dg_ptr, g_ptr, df_ptr, dh_ptr, db_ptr, sum_ptr, R, C, S, h_r,
    ACT: tl.constexpr, STRIPE: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    # Summed over rows at the end alone: rows lie in different warps, which would wait for each other.
    da = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(0, STRIPE, BR):
        rows = tl.program_id(0) * STRIPE + start + tl.arange(0, BR)
        inside, far = (rows < R)[:, None] & (cols < C)[None, :], rows.to(tl.int64)[:, None]
        z, rise = slope(tl.load(h_ptr + far * h_r + cols[None, :], inside, 0.0).to(tl.float32), ACT)
        f = tl.load(f_ptr + far * C + cols[None, :], inside, 0.0).to(tl.float32)
        f += tl.load(b_ptr + rows % S).to(tl.float32)[:, None]
        dg = tl.load(dg_ptr + far * C + cols[None, :], inside, 0.0).to(tl.float32)
        df, dh = dg * z, dg * f * rise
        tl.store(g_ptr + far * C + cols[None, :], (z * f).to(g_ptr.dtype.element_ty), inside)
        tl.store(df_ptr + far * C + cols[None, :], df.to(df_ptr.dtype.element_ty), inside)
        tl.store(dh_ptr + far * h_r + cols[None, :], dh.to(dh_ptr.dtype.element_ty), inside)
        tl.store(db_ptr + tl.program_id(1) * R + rows, tl.sum(df, 1), rows < R)
        da += dh
    tl.store(sum_ptr + tl.program_id(0) * 4 * C + cols, tl.sum(da, 0), cols < C)


def gate_backward(
    h: Tensor, f: Tensor, b: Tensor, dg: Tensor, dh: Tensor, sums: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """G again, dF and db; dH1 goes into the first half of `dh`, its sums into the first row of every `sums`."""
    g, df = torch.empty_like(f), torch.empty_like(f)
    rows, channels = f.shape[0] * f.shape[1], f.shape[2]
    columns = -(-channels // 256)
    db = torch.empty(columns, rows, dtype=torch.float32, device=h.device)
    run: Any = gate_backward_kernel
    run[(len(sums), columns)](
        h, f, b, dg, g, df, dh, db, sums, rows, channels, f.shape[1], h.stride(1),
        ACT=code(act, h.dtype), STRIPE=STRIPE, BC=256,
    )  # fmt: skip
    return g, df, db.view(-1, f.shape[1]).sum(0)


@triton.autotune(ROWS, key=["WIDE", "ACT"])
@triton.jit
def norm_kernel(
    h_ptr, mask_ptr, weight_ptr, bias_ptr, n_ptr, mean_ptr, rstd_ptr, R, C, h_r, eps,
    ACT: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    in_cols, far = (cols < C)[None, :], rows.to(tl.int64)[:, None]
    inside = (rows < R)[:, None] & in_cols
    z = activate(tl.load(h_ptr + far * h_r + cols[None, :], inside, 0.0).to(tl.float32), ACT)
    mean = tl.sum(tl.where(in_cols, z, 0.0), 1) / C
    away = tl.where(in_cols, z - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(away * away, 1) / C + eps)
    n = away * rstd[:, None] * tl.load(weight_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    n += tl.load(bias_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    if MASK:
        n *= tl.load(mask_ptr + rows, rows < R, 0.0).to(tl.float32)[:, None]
    tl.store(n_ptr + far * C + cols[None, :], n.to(n_ptr.dtype.element_ty), inside)
    tl.store(mean_ptr + rows, mean, rows < R)
    tl.store(rstd_ptr + rows, rstd, rows < R)


def norm(
    h: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor, eps: float, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """N (b s c) from the second half of h (b s 2c), and the statistics, b s."""
    batch, tokens, channels = h.shape[0], h.shape[1], h.shape[2] // 2
    n = h.new_empty(batch, tokens, channels)
    mean, rstd = (torch.empty(batch, tokens, dtype=torch.float32, device=h.device) for _ in range(2))
    run: Any = norm_kernel
    run[lambda sizes: (triton.cdiv(batch * tokens, sizes["ROWS"]),)](
        h[..., channels:], mask, weight, bias, n, mean, rstd, batch * tokens, channels, h.stride(1), eps,
        ACT=code(act, h.dtype), MASK=mask is not None, WIDE=triton.next_power_of_2(channels),
    )  # fmt: skip
    return n, mean, rstd


@triton.autotune(ROWS, key=["WIDE", "ACT"])
@triton.jit
def norm_backward_kernel(
    h_ptr, mask_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dn_ptr, n_ptr, dh_ptr, sum_ptr, R, C, h_r,
    ACT: tl.constexpr, MASK: tl.constexpr, STRIPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, WIDE)
    in_cols = cols < C
    weight = tl.load(weight_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((WIDE,), dtype=tl.float32)
    dbias = tl.zeros((WIDE,), dtype=tl.float32)
    da = tl.zeros((WIDE,), dtype=tl.float32)
    for start in range(0, STRIPE, ROWS):
        rows = tl.program_id(0) * STRIPE + start + tl.arange(0, ROWS)
        in_rows, far = rows < R, rows.to(tl.int64)[:, None]
        inside = in_rows[:, None] & in_cols[None, :]
        z, rise = slope(tl.load(h_ptr + far * h_r + cols[None, :], inside, 0.0).to(tl.float32), ACT)
        dn = tl.load(dn_ptr + far * C + cols[None, :], inside, 0.0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + rows, in_rows, 0.0)[:, None], tl.load(rstd_ptr + rows, in_rows, 0.0)[:, None]
        x = tl.where(inside, (z - mean) * rstd, 0.0)
        n = x * weight + bias
        if MASK:
            real = tl.load(mask_ptr + rows, in_rows, 0.0).to(tl.float32)[:, None]
            n, dn = n * real, dn * real
        tl.store(n_ptr + far * C + cols[None, :], n.to(n_ptr.dtype.element_ty), inside)
        dweight += tl.sum(dn * x, 0)
        dbias += tl.sum(dn, 0)
        dx = dn * weight
        dz = rstd * (dx - tl.sum(dx, 1)[:, None] / C - x * (tl.sum(dx * x, 1)[:, None] / C))
        dh = tl.where(inside, dz * rise, 0.0)
        tl.store(dh_ptr + far * h_r + cols[None, :], dh.to(dh_ptr.dtype.element_ty), inside)
        da += tl.sum(dh, 0)
    place = sum_ptr + tl.program_id(0) * 4 * C + cols
    tl.store(place + C, da, in_cols)
    tl.store(place + 2 * C, dweight, in_cols)
    tl.store(place + 3 * C, dbias, in_cols)


def norm_backward(
    h: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dn: Tensor,
    dh: Tensor,
    sums: Tensor,
    act: str,
) -> Tensor:
    """N again; dH2 goes into the second half of `dh`, the sums of dH2, dweight and dbias into the rest of `sums`."""
    n, channels = torch.empty_like(dn), dn.shape[2]
    run: Any = norm_backward_kernel
    run[(len(sums),)](
        h[..., channels:], mask, weight, bias, mean, rstd, dn, n, dh[..., channels:], sums,
        dn.shape[0] * dn.shape[1], channels, h.stride(1),
        ACT=code(act, h.dtype), MASK=mask is not None, STRIPE=STRIPE, WIDE=triton.next_power_of_2(channels),
    )  # fmt: skip
    return n
