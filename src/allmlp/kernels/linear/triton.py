"""A linear map and its epilogue as one persistent kernel.

Programs loop over tiles and load the next one during the epilogue of the last. Tensor cores idle during an epilogue, so
two small CTAs per SM can overlap.

LayerNorm of the channels of Y from `start` on needs their statistics. Every epilogue tile writes those of its own n
channels, and a second kernel merges those of the p tiles:

    mean = mean of means,   n p variance = sum of sum_sq_dev + n sum (tile mean - mean)^2
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.activation.reference import ActivationName
from allmlp.kernels.activation.triton import FAST_GELU, act_code, activate, tanh_approx
from allmlp.kernels.launch import autotune, fused_multiply_add, launching, num_sms
from allmlp.kernels.linear.reference import EPILOGUE_N, LinearEpilogue, default_dtype

TANH_APPROX_GELU = 5
COMPILED: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter has no tanh.approx instruction and no loops of dynamic length."""
BLOCK_K_BYTES = 128


def set_block_shapes(arguments: dict[str, Any]) -> None:
    """Autotuning's pre-hook: TMA descriptors load and store the tile that is tried."""
    depth = BLOCK_K_BYTES // arguments["x_desc"].base.element_size()
    arguments["x_desc"].block_shape = [arguments["BLOCK_M"], depth]
    arguments["w_desc"].block_shape = [arguments["BLOCK_N"], depth]
    for name in ("y_desc", "residual_desc", "gate_desc"):
        if arguments[name] is not None:
            arguments[name].block_shape = [arguments["BLOCK_M"], EPILOGUE_N]


CONFIGS = [
    triton.Config(
        {"BLOCK_M": rows, "BLOCK_N": cols, "CTAS_PER_SM": ctas},
        num_warps=warps,
        num_stages=stages,
        pre_hook=set_block_shapes,
    )
    for rows, cols, warps, stages, ctas in (
        (128, 256, 8, 3, 1),
        (128, 256, 8, 4, 1),
        (256, 128, 8, 3, 1),
        (128, 128, 8, 3, 2),
        (128, 128, 4, 2, 2),
        (64, 256, 4, 2, 2),
        (64, 128, 4, 3, 3),
        (128, 128, 4, 3, 2),
        (128, 128, 8, 4, 1),
    )
]


@triton.jit
def product(
    x_desc, w_desc, row, col,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of X W^T, with W n k, or of X W, with W k n."""
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = x_desc.load([row, start])
        w = w_desc.load([col, start]).T if TRANSPOSED else w_desc.load([start, col])
        z = tl.dot(x, w, z)
    return z


@triton.jit
def halves(z):
    """The left and the right half of the columns, without moving them between threads."""
    return z.reshape(z.shape[0], 2, z.shape[1] // 2).permute(0, 2, 1).split()


@autotune(CONFIGS, default=5, key=["is_large", "N", "K", "BLOCK_K", "ACT", "HAS_RESIDUAL", "HAS_GATE", "WRITE_STATS"])
@triton.jit(do_not_specialize=["M", "is_large"])
def kernel(
    x_desc, w_desc, y_desc, residual_desc, gate_desc, dequant_scale_ptr, bias_ptr, quant_scale_ptr, row_scale_ptr,
    mean_ptr, sum_sq_dev_ptr, M, is_large,
    N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SMS: tl.constexpr,
    HAS_DEQUANT_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_QUANT_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, WRITE_STATS: tl.constexpr,
    STATS_START: tl.constexpr, ACT: tl.constexpr, EPILOGUE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CTAS_PER_SM: tl.constexpr,
):  # fmt: skip
    col_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    programs: tl.constexpr = NUM_SMS * CTAS_PER_SM
    for wave in tl.range(0, ((M + BLOCK_M - 1) // BLOCK_M * col_tiles + programs - 1) // programs, flatten=True):
        # Tiles of the same rows are adjacent: W is small and stays in the L2 cache. Tiles past the last one are out of
        # bounds and have no effect.
        tile = wave * programs + tl.program_id(0)
        row, col = tile // col_tiles * BLOCK_M, tile % col_tiles * BLOCK_N
        z = product(x_desc, w_desc, row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, True)
        if BLOCK_N == 2 * EPILOGUE_N:
            left, right = halves(z)
            apply_epilogue(
                left, y_desc, residual_desc, gate_desc, dequant_scale_ptr, bias_ptr, quant_scale_ptr, row_scale_ptr,
                mean_ptr, sum_sq_dev_ptr, row, col, M, N, HAS_DEQUANT_SCALE, HAS_BIAS, HAS_QUANT_SCALE, HAS_ROW_SCALE,
                HAS_RESIDUAL, HAS_GATE, WRITE_STATS, STATS_START, ACT, BLOCK_M, EPILOGUE_N,
            )  # fmt: skip
            apply_epilogue(
                right, y_desc, residual_desc, gate_desc, dequant_scale_ptr, bias_ptr, quant_scale_ptr, row_scale_ptr,
                mean_ptr, sum_sq_dev_ptr, row, col + EPILOGUE_N, M, N, HAS_DEQUANT_SCALE, HAS_BIAS, HAS_QUANT_SCALE,
                HAS_ROW_SCALE, HAS_RESIDUAL, HAS_GATE, WRITE_STATS, STATS_START, ACT, BLOCK_M, EPILOGUE_N,
            )  # fmt: skip
        else:
            apply_epilogue(
                z, y_desc, residual_desc, gate_desc, dequant_scale_ptr, bias_ptr, quant_scale_ptr, row_scale_ptr,
                mean_ptr, sum_sq_dev_ptr, row, col, M, N, HAS_DEQUANT_SCALE, HAS_BIAS, HAS_QUANT_SCALE, HAS_ROW_SCALE,
                HAS_RESIDUAL, HAS_GATE, WRITE_STATS, STATS_START, ACT, BLOCK_M, EPILOGUE_N,
            )  # fmt: skip


@triton.jit
def tanh_approx_gelu(h):
    """GELU of z = 2 h as h (1 + tanh(0.80016 z + 0.03470 z^3)): within 3e-4 + 2.5e-4 |z|.

    With small K, an exponential and a division per output would take longer than the product. The two coefficients
    minimize the error of GELU, 2.7e-4; those of the usual tanh form give 4.7e-4.
    """
    u = h * (1.60031416 + 0.27760712 * h * h)
    return h + h * tanh_approx(u)


@triton.jit
def apply_epilogue(
    z, y_desc, residual_desc, gate_desc, dequant_scale_ptr, bias_ptr, quant_scale_ptr, row_scale_ptr, mean_ptr,
    sum_sq_dev_ptr, row, col, M, N,
    HAS_DEQUANT_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_QUANT_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, WRITE_STATS: tl.constexpr,
    STATS_START: tl.constexpr, ACT: tl.constexpr, BLOCK_M: tl.constexpr, EPILOGUE_N: tl.constexpr,
):  # fmt: skip
    cols = col + tl.arange(0, EPILOGUE_N)
    # tanh_approx_gelu takes z / 2: halving the scale and the bias instead of z is free.
    prescale = tl.constexpr(0.5 if ACT == 5 else 1.0)
    if HAS_DEQUANT_SCALE:
        z *= (prescale * tl.load(dequant_scale_ptr + cols, cols < N, 0.0))[None, :]
    else:
        z *= prescale
    rows = row + tl.arange(0, BLOCK_M)
    if HAS_ROW_SCALE:
        z *= tl.load(row_scale_ptr + rows, rows < M, 1.0)[:, None]
    if HAS_BIAS:
        z += (prescale * tl.load(bias_ptr + cols, cols < N, 0.0))[None, :]
    z = tanh_approx_gelu(z) if ACT == 5 else activate(z, ACT)
    if HAS_QUANT_SCALE:
        z *= tl.load(quant_scale_ptr + cols, cols < N, 0.0)[None, :]
        if HAS_ROW_SCALE:
            z *= (1 / tl.load(row_scale_ptr + rows, rows < M, 1.0))[:, None]
    if HAS_RESIDUAL:
        z += residual_desc.load([row, col]).to(tl.float32)
    if HAS_GATE:
        z *= gate_desc.load([row, col]).to(tl.float32)
    if WRITE_STATS:  # noqa: SIM102 - the outer condition is known at compile time, the inner one at run time
        if (col >= STATS_START) & (col < N):
            part = (col - STATS_START) // EPILOGUE_N
            mean = tl.sum(z, 1) / EPILOGUE_N
            # One-pass variance: its cancellation error, where the deviation is far below the mean, is below the
            # rounding error of 16-bit values.
            sum_sq_dev = tl.maximum(tl.sum(z * z, 1) - EPILOGUE_N * mean * mean, 0.0)
            tl.store(mean_ptr + part * M + rows, mean, rows < M)
            tl.store(sum_sq_dev_ptr + part * M + rows, sum_sq_dev, rows < M)
    y_desc.store([row, col], z.to(y_desc.dtype))


def launch(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    epilogue: LinearEpilogue,
    act: ActivationName,
    stats: tuple[Tensor, Tensor] | None = None,
    stats_start: int = 0,
) -> None:
    dequant_scale, bias, quant_scale, residual, row_scale, gate = epilogue
    tensors = x, weight, y, residual, gate
    descriptors = [None if t is None else TensorDescriptor.from_tensor(t, [16, 16]) for t in tensors]
    rows, sms, code = len(x), num_sms(x.device), act_code(act, y.dtype)
    run = fused_multiply_add(kernel)
    with launching("linear", x):
        run[lambda config: (sms * config["CTAS_PER_SM"],)](
            *descriptors, dequant_scale, bias, quant_scale, row_scale, *(stats or (None, None)),
            rows if COMPILED else tl.constexpr(rows), int(rows >= 128 * sms),
            N=len(weight), K=x.shape[1], BLOCK_K=BLOCK_K_BYTES // x.element_size(), NUM_SMS=sms,
            HAS_DEQUANT_SCALE=dequant_scale is not None, HAS_BIAS=bias is not None,
            HAS_QUANT_SCALE=quant_scale is not None, HAS_ROW_SCALE=row_scale is not None,
            HAS_RESIDUAL=residual is not None, HAS_GATE=gate is not None, WRITE_STATS=stats is not None,
            STATS_START=stats_start,
            ACT=TANH_APPROX_GELU if code == FAST_GELU and COMPILED else code, EPILOGUE_N=EPILOGUE_N,
        )  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, epilogue: LinearEpilogue, act: ActivationName = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """As the reference; the epilogue's vectors are float32."""
    dtype = dtype or default_dtype(x, epilogue)
    y = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    launch(x, weight, y, epilogue, act)
    return y


def linear_stats(
    x: Tensor,
    weight: Tensor,
    epilogue: LinearEpilogue,
    act: ActivationName,
    eps: float,
    start: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; `start` and the number of channels must be multiples of `EPILOGUE_N`."""
    y = torch.empty(len(x), len(weight), dtype=dtype or x.dtype, device=x.device)
    parts = (len(weight) - start) // EPILOGUE_N
    means, sums_sq_dev = (torch.empty(parts, len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    launch(x, weight, y, epilogue, act, (means, sums_sq_dev), start)
    mean, rstd = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    run = fused_multiply_add(merge_stats_kernel)
    with launching("merge_stats", x):
        run[(triton.cdiv(len(x), 256),)](
            means, sums_sq_dev, mean, rstd, len(x), eps, PARTS=parts, EPILOGUE_N=EPILOGUE_N, BLOCK_M=256
        )
    return y, mean, rstd


@triton.jit(do_not_specialize=["M"])
def merge_stats_kernel(
    means_ptr, sums_sq_dev_ptr, mean_ptr, rstd_ptr, M, eps,
    PARTS: tl.constexpr, EPILOGUE_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sum_sq_dev = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for part in range(PARTS):
        mean += tl.load(means_ptr + part * M + rows, rows < M, 0.0) / PARTS
    for part in range(PARTS):
        delta = tl.load(means_ptr + part * M + rows, rows < M, 0.0) - mean
        sum_sq_dev += tl.load(sums_sq_dev_ptr + part * M + rows, rows < M, 0.0) + EPILOGUE_N * delta * delta
    tl.store(mean_ptr + rows, mean, rows < M)
    tl.store(rstd_ptr + rows, 1 / tl.sqrt(sum_sq_dev / (PARTS * EPILOGUE_N) + eps), rows < M)
