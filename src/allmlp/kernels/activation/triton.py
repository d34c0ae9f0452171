"""Activations and their gradients in one pass over memory each; the backward pass also sums the bias gradient.

    a = act(x + bias),   dx = da act'(x + bias),   dbias = sum of dx over all dimensions but the bias's own

GELU is z Phi(z), with Phi the normal CDF. For 16-bit inputs an exact erf would make the kernel compute-bound, so

    Phi(z) = sigmoid(z q(z^2)),   q a cubic fitted to the logit of Phi; error of act(z) 3e-5, of act'(z) 1.3e-4

In the epilogue of a bfloat16 product, where instructions count more, it is the tanh of the hardware (`tanh_code`):

    Phi(z) = (1 + tanh(0.79969 z + 0.035496 z^3)) / 2,   error of act(z) and act'(z) 5e-4

with coefficients that minimize the larger of both errors; the instruction itself adds 2.5e-4 |z| to that of act(z) and
up to 1.2e-3 to that of act'(z), less than rounding to bfloat16 (2e-3 at 1).

For float32, erf is Abramowitz and Stegun's 7.1.26, with error 1.5e-7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allmlp.kernels.launch import fused_multiply_add, launching
from allmlp.kernels.row_sum.triton import sum_rows

ACT_CODES = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
FAST_GELU = 4
TANH_CODES = {FAST_GELU: 6, ACT_CODES["gelu_tanh"]: 7}
BLOCK_C = 256
ROWS_PER_PROGRAM = 64
"""Rows that one program of a backward pass reduces; the partial sums of all programs are added afterwards.

Tile sizes and warps are fixed instead of autotuned: these kernels are bound by memory, so on an H200 the choices below
are within a few percent of the best of six for every width, and each candidate would delay the first training step.
"""
NUM_STAGES = 3
"""Iterations of a backward pass that are under way at a time: their loads are asynchronous copies."""


def act_code(act: str, dtype: torch.dtype) -> int:
    """The kernels' `ACT` for an activation of inputs of this dtype."""
    return FAST_GELU if act == "gelu" and dtype.itemsize <= 2 else ACT_CODES[act]


def tanh_code(act: str, dtype: torch.dtype) -> int:
    """As `act_code`, with the tanh of the hardware for bfloat16; the interpreter does not have it."""
    code = act_code(act, dtype)
    return TANH_CODES.get(code, code) if dtype == torch.bfloat16 and not triton.knobs.runtime.interpret else code


@triton.jit
def erf(z, gaussian):
    """erf(z / sqrt(2)), given gaussian = exp(-z^2 / 2)."""
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(z))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * gaussian
    return tl.where(z >= 0, 1 - tail, tail - 1)


@triton.jit
def sigmoid(u):
    e = tl.exp(-tl.abs(u))  # cannot overflow
    return tl.where(u >= 0, 1.0, e) / (1 + e)


@triton.jit
def normal_cdf(z, z_sq):
    """Phi(z), given z_sq = z^2."""
    # q times -log2(e); 1 / (1 + e) is computed as a squared rsqrt, which is one fast instruction.
    logit = z * (-2.3009778 + z_sq * (-0.10698141 + z_sq * (1.0822627e-3 + z_sq * -5.6507264e-6)))
    root = tl.rsqrt(1 + tl.exp2(tl.minimum(logit, 100.0)))
    return root * root


@triton.jit
def tanh_approx(u):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh_gelu_with_grad(z, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    """z Phi(z) with Phi(z) = (1 + tanh(LINEAR z + CUBIC z^3)) / 2, and its derivative."""
    z_sq = z * z
    t = tanh_approx(z * (LINEAR + CUBIC * z_sq))
    cdf = 0.5 + 0.5 * t
    return z * cdf, cdf + z * (0.5 * LINEAR + 1.5 * CUBIC * z_sq) * (1 - t * t)


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == 1:
        z = 0.5 * z * (1 + erf(z, tl.exp(-0.5 * z * z)))
    elif ACT == 2:
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        z = z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACT == 3:
        z = tl.maximum(z, 0.0)
    elif ACT == 4:
        z *= normal_cdf(z, z * z)
    elif ACT >= 6:
        z, _ = activate_with_grad(z, ACT)  # the compiler drops the derivative
    return z


@triton.jit
def activate_with_grad(z, ACT: tl.constexpr):
    """act(z) and act'(z)."""
    if ACT == 1:
        gaussian = tl.exp(-0.5 * z * z)
        cdf = 0.5 * (1 + erf(z, gaussian))
        return z * cdf, cdf + z * gaussian * 0.3989422804014327
    if ACT == 2:
        cdf = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return z * cdf, cdf + z * cdf * (1 - cdf) * 1.5957691216057308 * (1 + 0.134145 * z * z)
    if ACT == 3:
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    if ACT == 4:
        z_sq = z * z
        cdf = normal_cdf(z, z_sq)
        dlogit = 1.5949164 + z_sq * (0.22246159 + z_sq * (-3.7508366e-3 + z_sq * 2.7417495e-5))  # d/dz of z q(z^2)
        return z * cdf, cdf + z * dlogit * (cdf - cdf * cdf)
    if ACT == 6:
        return tanh_gelu_with_grad(z, 0.79969331, 0.03549644)
    if ACT == 7:
        return tanh_gelu_with_grad(z, 0.7978845608, 0.0356774081)
    return z, z * 0 + 1


@triton.jit(do_not_specialize=["R"])
def forward_kernel(
    x_ptr, bias_ptr, y_ptr, R, C, D,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_bounds = (rows < R)[:, None] & (cols < C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
    x = tl.load(x_ptr + offsets, in_bounds, 0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + rows % D).to(tl.float32)[:, None]
    tl.store(y_ptr + offsets, activate(x, ACT).to(y_ptr.dtype.element_ty), in_bounds)


@triton.jit(do_not_specialize=["R"])
def backward_kernel(
    x_ptr, bias_ptr, dy_ptr, y_ptr, dx_ptr, sum_ptr, R, C, D,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Rows are spread over warps, so reducing over them synchronizes the warps: do it once, after the loop.
    dx_sum = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in tl.range(0, ROWS_PER_PROGRAM, BLOCK_R, num_stages=NUM_STAGES):
        rows = tl.program_id(0) * ROWS_PER_PROGRAM + start + tl.arange(0, BLOCK_R)
        in_bounds = (rows < R)[:, None] & (cols < C)[None, :]
        offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + offsets, in_bounds, 0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + rows % D).to(tl.float32)[:, None]
        y, act_grad = activate_with_grad(x, ACT)
        dx = tl.load(dy_ptr + offsets, in_bounds, 0.0).to(tl.float32) * act_grad
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), in_bounds)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), in_bounds)
        if HAS_BIAS:
            tl.store(sum_ptr + tl.program_id(1) * R + rows, tl.sum(dx, 1), rows < R)
        else:
            dx_sum += dx
    if not HAS_BIAS:
        tl.store(sum_ptr + tl.program_id(0) * C + cols, tl.sum(dx_sum, 0), cols < C)


def forward(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """As the reference."""
    x = x.contiguous()
    channels, y = x.shape[-1], torch.empty_like(x)
    rows = x.numel() // channels
    run = fused_multiply_add(forward_kernel)
    with launching("activation", x):
        run[(triton.cdiv(rows, 16), triton.cdiv(channels, BLOCK_C))](
            x, bias, y, rows, channels, x.shape[-2],
            HAS_BIAS=bias is not None, ACT=act_code(act, x.dtype), BLOCK_R=16, BLOCK_C=BLOCK_C, num_warps=8,
        )  # fmt: skip
    return y


def backward(x: Tensor, bias: Tensor | None, dy: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    x, dy = x.contiguous(), dy.contiguous()
    channels, width = x.shape[-1], x.shape[-2]
    rows = x.numel() // channels
    y, dx = torch.empty_like(x), torch.empty_like(x)
    grid = -(-rows // ROWS_PER_PROGRAM), -(-channels // BLOCK_C)
    partial_sums = x.new_empty((grid[1], rows) if bias is not None else (grid[0], channels), dtype=torch.float32)
    run = fused_multiply_add(backward_kernel)
    with launching("activation_backward", x):
        run[grid](
            x, bias, dy, y, dx, partial_sums, rows, channels, width,
            HAS_BIAS=bias is not None, ACT=act_code(act, x.dtype), ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, BLOCK_C=BLOCK_C,
            BLOCK_R=16 if bias is not None else 4, NUM_STAGES=NUM_STAGES, num_warps=8,
        )  # fmt: skip
    return y, dx, sum_rows(partial_sums if bias is None else partial_sums.view(-1, width), x.dtype)
