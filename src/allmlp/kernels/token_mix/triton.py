"""The product over tokens as one kernel: a program computes one tile of rows and channels of one example.

LayerNorm is not applied to X, the large operand. Its statistics are indexed by the summed token j, so a small kernel
folds them into a matrix per example:

    sum_j A[i, j] (X[j, c] - mean[j]) rstd[j]  =  sum_j A'[i, j] X[j, c]  -  mean_offset[i]
    A' = A * rstd,   mean_offset[i] = sum_j A'[i, j] mean[j]
    row_sum[i] = sum_j A[i, j],   row_sum'[i] = sum_j A'[i, j]

and what depends on the channel alone (deferred_bias, norm_weight, norm_bias) is applied in the epilogue:

    H[i, c] = norm_weight[c] (sum_j A'[i, j] X[j, c] - mean_offset[i] + deferred_bias[c] row_sum'[i])
              + norm_bias[c] row_sum[i] + bias[i]

So X goes from memory to the tensor cores unchanged, loaded by TMA where the GPU has it and its rows are aligned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels import has_tma
from allmlp.kernels.activation.reference import ActivationName
from allmlp.kernels.activation.triton import act_code, activate
from allmlp.kernels.launch import autotune, fused_multiply_add, launching, num_sms
from allmlp.kernels.tiles import tile_and_batch
from allmlp.kernels.token_mix.reference import Combine, PackedMatrix, TokenMixEpilogue

COMBINE_CODES = {"none": 0, "multiply": 1, "add": 2}


# --- LayerNorm folded into the matrix ---------------------------------------------------------------------


@triton.jit
def fold_norm_kernel(
    a_ptr, mean_ptr, rstd_ptr, folded_ptr, mean_offset_ptr, row_sum_ptr, M, stride_am, stride_sb, stride_fb, stride_fm,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, batch = tile_and_batch(tl.cdiv(M, BLOCK_M))
    rows, ks = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    in_bounds = (rows < M)[:, None] & (ks < K)[None, :]
    mean = tl.load(mean_ptr + batch * stride_sb + ks, ks < K, 0.0)
    rstd = tl.load(rstd_ptr + batch * stride_sb + ks, ks < K, 0.0)
    a = tl.load(a_ptr + rows[:, None] * stride_am + ks[None, :], in_bounds, 0.0).to(tl.float32)
    folded = (a * rstd[None, :]).to(folded_ptr.dtype.element_ty)
    tl.store(folded_ptr + batch * stride_fb + rows[:, None] * stride_fm + ks[None, :], folded, in_bounds)
    # Sum the rounded values, since those are what the product accumulates.
    folded = folded.to(tl.float32)
    tl.store(mean_offset_ptr + batch * M + rows, tl.sum(folded * mean[None, :], 1), rows < M)
    tl.store(row_sum_ptr + batch * M + rows, tl.sum(folded, 1), rows < M)


def fold_norm(matrix: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A' (b m k), mean_offset (b m) and row_sum' (b m)."""
    batch, (rows, tokens) = len(mean), matrix.shape
    folded = matrix.new_empty(batch, rows, -(-tokens // 16) * 16)
    mean_offset, row_sum = (torch.empty(batch, rows, dtype=torch.float32, device=matrix.device) for _ in range(2))
    block_k = triton.next_power_of_2(tokens)
    block_m = max(1, 4096 // block_k)
    run = fused_multiply_add(fold_norm_kernel)
    with launching("fold_norm", matrix):
        run[(triton.cdiv(rows, block_m) * batch,)](
            matrix, mean, rstd, folded, mean_offset, row_sum, rows, matrix.stride(0), mean.stride(0),
            *folded.stride()[:2], K=tokens, BLOCK_M=block_m, BLOCK_K=block_k,
        )  # fmt: skip
    return folded[:, :, :tokens], mean_offset, row_sum


# --- the product ------------------------------------------------------------------------------------------


def set_block_shapes(arguments: dict[str, Any]) -> None:
    """Autotuning's pre-hook: TMA descriptors load and store the tile that is tried."""
    if arguments["USE_TMA"]:
        rows, cols, depth = (arguments[name] for name in ("BLOCK_M", "BLOCK_C", "BLOCK_K"))
        shapes = {"x_desc": (depth, cols), "a_desc": (rows, depth), "y_desc": (rows, cols), "other_desc": (rows, cols)}
        for name, shape in shapes.items():
            if arguments[name] is not None:
                arguments[name].block_shape = [1, *shape]


CONFIGS = [
    triton.Config(
        {"BLOCK_M": rows, "BLOCK_C": cols, "BLOCK_K": depth, "TMA_EPILOGUE": tma_epilogue},
        num_warps=warps,
        num_stages=stages,
        pre_hook=set_block_shapes,
    )
    for rows, cols, depth, warps, stages, tma_epilogue in (
        (128, 128, 64, 4, 3, False),
        (128, 128, 64, 4, 2, True),
        (256, 128, 64, 8, 3, True),
        (64, 64, 32, 4, 4, True),
        (32, 64, 64, 4, 4, True),
    )
]


@autotune(CONFIGS, default=3, key=["is_large", "M", "K", "C", "HAS_STATS", "ACT", "COMBINE", "USE_TMA"])
@triton.jit(do_not_specialize=["is_large"])
def kernel(
    x_desc, a_desc, y_desc, other_desc, x_ptr, a_ptr, y_ptr,
    bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr, folded_row_sum_ptr,
    other_ptr, layer_scale_ptr,
    M, C, stride_xb, stride_xk, stride_ab, stride_am, stride_yb, stride_ym, stride_ob, stride_om, stride_rb, is_large,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    HAS_STATS: tl.constexpr, HAS_DEFERRED_BIAS: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr,
    ACT: tl.constexpr, COMBINE: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, TMA_EPILOGUE: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(M, BLOCK_M)
    tile, batch_64 = tile_and_batch(row_tiles * tl.cdiv(C, BLOCK_C))
    # Row tiles of the same channels are adjacent programs, so that all but the first read X from the L2 cache.
    row_tile, col_tile = tile % row_tiles, tile // row_tiles
    batch = batch_64.to(tl.int32)
    matrix_idx = (batch * (stride_ab > 0)).to(tl.int32)  # one matrix per example, or one for all
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = col_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    in_rows, in_cols = rows < M, cols < C
    z = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if USE_TMA:
            a = a_desc.load([matrix_idx, row_tile * BLOCK_M, start]).reshape(BLOCK_M, BLOCK_K)
            x = x_desc.load([batch, start, col_tile * BLOCK_C]).reshape(BLOCK_K, BLOCK_C)
        else:
            ks = start + tl.arange(0, BLOCK_K)
            in_bounds = in_rows[:, None] & (ks < K)[None, :]
            a = tl.load(a_ptr + batch_64 * stride_ab + rows[:, None] * stride_am + ks[None, :], in_bounds, 0.0)
            in_bounds = (ks < K)[:, None] & in_cols[None, :]
            x = tl.load(x_ptr + batch_64 * stride_xb + ks[:, None] * stride_xk + cols[None, :], in_bounds, 0.0)
        z = tl.dot(a, x, z, input_precision="ieee")
    z = apply_epilogue(
        z, bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr,
        folded_row_sum_ptr, layer_scale_ptr, rows, cols, batch_64, M, C, stride_rb,
        HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, HAS_STATS, HAS_DEFERRED_BIAS, HAS_LAYER_SCALE, ACT,
    )  # fmt: skip
    if USE_TMA and TMA_EPILOGUE:
        # TMA needs no per-element addresses, which would take registers.
        if COMBINE > 0:
            other = other_desc.load([batch, row_tile * BLOCK_M, col_tile * BLOCK_C]).reshape(BLOCK_M, BLOCK_C)
            z = combine_other(other, z, COMBINE)
        z = z.to(y_ptr.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_C)
        y_desc.store([batch, row_tile * BLOCK_M, col_tile * BLOCK_C], z)
    else:
        in_bounds = in_rows[:, None] & in_cols[None, :]
        if COMBINE > 0:
            others = other_ptr + batch_64 * stride_ob + rows[:, None] * stride_om + cols[None, :]
            z = combine_other(tl.load(others, in_bounds, 0.0), z, COMBINE)
        ys = y_ptr + batch_64 * stride_yb + rows[:, None] * stride_ym + cols[None, :]
        tl.store(ys, z.to(y_ptr.dtype.element_ty), in_bounds)


@triton.jit
def apply_epilogue(
    z, bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr,
    folded_row_sum_ptr, layer_scale_ptr, rows, cols, batch_64, M, C, stride_rb,
    HAS_BIAS: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_STATS: tl.constexpr,
    HAS_DEFERRED_BIAS: tl.constexpr, HAS_LAYER_SCALE: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """From the accumulator to Z, before `other` is combined with it."""
    in_rows, in_cols = rows < M, cols < C
    if HAS_STATS:
        z -= tl.load(mean_offset_ptr + batch_64 * M + rows, in_rows, 0.0)[:, None]
    if HAS_DEFERRED_BIAS:
        row_sum = tl.load(folded_row_sum_ptr + batch_64 * stride_rb + rows, in_rows, 0.0)
        z += row_sum[:, None] * tl.load(deferred_bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if HAS_NORM_WEIGHT:
        z *= tl.load(norm_weight_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if HAS_NORM_BIAS:
        row_sum = tl.load(row_sum_ptr + rows, in_rows, 0.0)
        z += row_sum[:, None] * tl.load(norm_bias_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        z += tl.load(bias_ptr + rows, in_rows, 0.0).to(tl.float32)[:, None]
    z = activate(z, ACT)
    if HAS_LAYER_SCALE:
        z *= tl.load(layer_scale_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def combine_other(other, z, COMBINE: tl.constexpr):
    return other.to(tl.float32) * z if COMBINE == 1 else other.to(tl.float32) + z


def epilogue_flags(epilogue: TokenMixEpilogue, combine: Combine) -> dict[str, Any]:
    """The constexpr arguments that tell which operands are present."""
    has_other = epilogue.other is not None and combine != "none"
    return {
        "HAS_BIAS": epilogue.bias is not None,
        "HAS_NORM_WEIGHT": epilogue.norm_weight is not None,
        "HAS_NORM_BIAS": epilogue.norm_bias is not None,
        "HAS_STATS": epilogue.mean is not None and epilogue.rstd is not None,
        "HAS_DEFERRED_BIAS": epilogue.deferred_bias is not None,
        "HAS_LAYER_SCALE": epilogue.layer_scale is not None and has_other,
        "COMBINE": COMBINE_CODES[combine] if has_other else 0,
    }


def token_mix(
    x: Tensor,
    matrix: PackedMatrix | Tensor,
    epilogue: TokenMixEpilogue,
    act: ActivationName = "none",
    combine: Combine = "none",
) -> Tensor:
    """As the reference, in one kernel, or two with LayerNorm."""
    weight, row_sum = matrix if isinstance(matrix, PackedMatrix) else PackedMatrix.pack(matrix)
    batch, tokens, channels = x.shape
    rows = len(weight)
    other = epilogue.other if combine != "none" else None
    y = (x if other is None else other).new_empty(batch, rows, channels)
    for tensor in (x, other):
        assert tensor is None or tensor.stride(2) == 1, "channels must be contiguous"
    weight, folded_row_sum, mean_offset = weight.unsqueeze(0), row_sum, None
    if epilogue.mean is not None and epilogue.rstd is not None:
        weight, mean_offset, folded_row_sum = fold_norm(weight[0], epilogue.mean, epilogue.rstd)
    tensors = x, weight, y, other
    use_tma = has_tma(x.device) and all(tensor is None or is_tma_aligned(tensor) for tensor in tensors)
    descriptors = [TensorDescriptor.from_tensor(t, [1, 16, 16]) if use_tma and t is not None else None for t in tensors]
    is_large = batch * triton.cdiv(rows, 128) * triton.cdiv(channels, 128) >= num_sms(x.device)
    run = fused_multiply_add(kernel)
    with launching("token_mix", x):
        run[lambda config: (triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(channels, config["BLOCK_C"]) * batch,)](
            *descriptors, x, weight, y,
            epilogue.bias, epilogue.norm_weight, epilogue.norm_bias, mean_offset, row_sum, epilogue.deferred_bias,
            folded_row_sum, other, epilogue.layer_scale,
            rows, channels, *x.stride()[:2], 0 if mean_offset is None else weight.stride(0), weight.stride(1),
            *y.stride()[:2], *((0, 0) if other is None else other.stride()[:2]), 0 if mean_offset is None else rows,
            int(is_large),
            K=tokens, ACT=act_code(act, x.dtype), USE_TMA=use_tma, **epilogue_flags(epilogue, combine),
        )  # fmt: skip
    return y


def is_tma_aligned(tensor: Tensor) -> bool:
    """Whether TMA can load it: every row starts at a multiple of 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in tensor.stride()[:-1])
