"""The product over tokens on Hopper: a persistent, warp-specialized kernel with one producer and eight consumer warps.

    H[i, c] = norm_weight[c] (sum_j A'[i, j] X[j, c] - mean_offset[i] + deferred_bias[c] row_sum'[i])
              + norm_bias[c] row_sum[i] + bias[i]

as in triton.py, whose fold_norm computes A'. Each program loops over tiles. Its producer warp runs ahead: while the
consumers execute the epilogue of one tile, A' and X of the next are already loading, and `other` loads during the
product. Output and `other` have the same dtype and use the same shared-memory buffer, one after the other.

Written in Gluon, which exposes warp specialization; Triton's interpreter does not support it.
"""

# Gluon's annotations look like Python types but are not.
# pyrefly: ignore-errors

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from allmlp.kernels.activation.reference import ActivationName
from allmlp.kernels.launch import fused_multiply_add, launching, num_sms
from allmlp.kernels.token_mix import triton as portable
from allmlp.kernels.token_mix.reference import Combine, PackedMatrix, TokenMixEpilogue
from allmlp.kernels.token_mix.triton import (
    apply_epilogue,
    combine_other,
    epilogue_flags,
    fold_norm,
    is_tma_aligned,
)
from allmlp.kernels.unit_rows.reference import FP8

# Renamed in Triton 3.8.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK_M, BLOCK_C, BLOCK_K, STAGES, NUM_WARPS = 256, 128, 32, 6, 8
MAX_TOKENS = 512
"""Tokens up to which the loop over them is unrolled."""


@gluon.jit
def tile_coords(tile, row_tiles, col_tiles):
    """Row tile, channel tile and example; row tiles of the same channels are adjacent."""
    return tile % row_tiles, tile // row_tiles % col_tiles, tile // row_tiles // col_tiles


@gluon.jit
def producer(
    x_desc, a_desc, other_desc, x_smem, a_smem, out_smem, ready_bars, empty_bars, other_ready_bar, out_empty_bar,
    num_tiles, row_tiles, col_tiles, a_batched,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    HAS_OTHER: gl.constexpr,
):  # fmt: skip
    count = 0
    for i in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        row_tile, col_tile, batch = tile_coords(i * gl.num_programs(0) + gl.program_id(0), row_tiles, col_tiles)
        for start in gl.static_range(0, K, BLOCK_K):
            stage = count % STAGES
            # Waiting for the odd phase of a fresh barrier returns at once.
            mbarrier.wait(empty_bars.index(stage), (count // STAGES & 1) ^ 1)
            ready_bar = ready_bars.index(stage)
            mbarrier.expect(ready_bar, x_desc.block_type.nbytes + a_desc.block_type.nbytes)
            async_load(x_desc, [batch, start, col_tile * BLOCK_C], ready_bar, x_smem.index(stage))
            async_load(a_desc, [batch * a_batched, row_tile * BLOCK_M, start], ready_bar, a_smem.index(stage))
            count += 1
        if HAS_OTHER:
            mbarrier.wait(out_empty_bar, (i & 1) ^ 1)
            mbarrier.expect(other_ready_bar, other_desc.block_type.nbytes)
            async_load(other_desc, [batch, row_tile * BLOCK_M, col_tile * BLOCK_C], other_ready_bar, out_smem)


@gluon.jit
def consumer(
    y_desc, x_smem, a_smem, out_smem, ready_bars, empty_bars, other_ready_bar, out_empty_bar,
    bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr, folded_row_sum_ptr,
    layer_scale_ptr, num_tiles, row_tiles, col_tiles, M, C, stride_rb,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM_WEIGHT: gl.constexpr, HAS_NORM_BIAS: gl.constexpr, HAS_STATS: gl.constexpr,
    HAS_DEFERRED_BIAS: gl.constexpr, HAS_LAYER_SCALE: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_C, 16])
    count = 0
    for i in range(gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))):
        row_tile, col_tile, batch = tile_coords(i * gl.num_programs(0) + gl.program_id(0), row_tiles, col_tiles)
        z = gl.zeros((BLOCK_M, BLOCK_C), gl.float32, layout)
        for start in gl.static_range(0, K, BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(ready_bars.index(stage), count // STAGES & 1)
            a, x = a_smem.index(stage).reshape([BLOCK_M, BLOCK_K]), x_smem.index(stage).reshape([BLOCK_K, BLOCK_C])
            z = warpgroup_mma(a, x, z, is_async=True)
            if start > 0:
                z = warpgroup_mma_wait(1, deps=[z])
                mbarrier.arrive(empty_bars.index((count - 1) % STAGES), count=1)
            elif i > 0:
                # The previous tile has been stored from the buffer, which is now free for this tile's `other`.
                tma.store_wait(0)
                mbarrier.arrive(out_empty_bar, count=1)
            count += 1
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty_bars.index((count - 1) % STAGES), count=1)
        rows = row_tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        cols = col_tile * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, layout))
        z = apply_epilogue(
            z, bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr,
            folded_row_sum_ptr, layer_scale_ptr, rows, cols, batch.to(gl.int64), M, C, stride_rb,
            HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, HAS_STATS, HAS_DEFERRED_BIAS, HAS_LAYER_SCALE, 0,
        )  # fmt: skip
        out = out_smem.reshape([BLOCK_M, BLOCK_C])
        if COMBINE > 0:
            mbarrier.wait(other_ready_bar, i & 1)
            z = combine_other(out.load(layout), z, COMBINE)
        out.store(z.to(y_desc.dtype))
        fence_async_shared()
        async_store(y_desc, [batch, row_tile * BLOCK_M, col_tile * BLOCK_C], out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B"])
def kernel(
    x_desc, a_desc, y_desc, other_desc,
    bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr, folded_row_sum_ptr,
    layer_scale_ptr, B, M, C, stride_rb, a_batched,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM_WEIGHT: gl.constexpr, HAS_NORM_BIAS: gl.constexpr, HAS_STATS: gl.constexpr,
    HAS_DEFERRED_BIAS: gl.constexpr, HAS_LAYER_SCALE: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, BLOCK_K, BLOCK_C], x_desc.layout)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, BLOCK_M, BLOCK_K], a_desc.layout)
    out_smem = gl.allocate_shared_memory(y_desc.dtype, [1, BLOCK_M, BLOCK_C], y_desc.layout)
    ready_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other_ready_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    out_empty_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready_bars.index(stage), count=1)
        mbarrier.init(empty_bars.index(stage), count=1)
    mbarrier.init(other_ready_bar, count=1)
    mbarrier.init(out_empty_bar, count=1)
    fence_async_shared()
    row_tiles, col_tiles = gl.cdiv(M, BLOCK_M), gl.cdiv(C, BLOCK_C)
    num_tiles = B * row_tiles * col_tiles
    gl.warp_specialize(
        [
            (consumer, (
                y_desc, x_smem, a_smem, out_smem, ready_bars, empty_bars, other_ready_bar, out_empty_bar,
                bias_ptr, norm_weight_ptr, norm_bias_ptr, mean_offset_ptr, row_sum_ptr, deferred_bias_ptr,
                folded_row_sum_ptr, layer_scale_ptr, num_tiles, row_tiles, col_tiles, M, C, stride_rb,
                K, BLOCK_M, BLOCK_C, BLOCK_K, STAGES,
                HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, HAS_STATS, HAS_DEFERRED_BIAS, HAS_LAYER_SCALE, COMBINE,
            )),
            (producer, (
                x_desc, a_desc, other_desc, x_smem, a_smem, out_smem, ready_bars, empty_bars, other_ready_bar,
                out_empty_bar, num_tiles, row_tiles, col_tiles, a_batched,
                K, BLOCK_M, BLOCK_C, BLOCK_K, STAGES, COMBINE > 0,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def descriptor(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}[tensor.dtype]
    block = [1, rows, cols]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def token_mix(
    x: Tensor,
    matrix: PackedMatrix | Tensor,
    epilogue: TokenMixEpilogue,
    act: ActivationName = "none",
    combine: Combine = "none",
) -> Tensor:
    """As the reference; falls back to the portable kernel where this one does not apply."""
    weight, row_sum = matrix = matrix if isinstance(matrix, PackedMatrix) else PackedMatrix.pack(matrix)
    (batch, tokens, channels), rows = x.shape, len(weight)
    other = epilogue.other if combine != "none" else None
    num_tiles = batch * triton.cdiv(rows, BLOCK_M) * triton.cdiv(channels, BLOCK_C)
    sms = num_sms(x.device)
    loaded = [tensor for tensor in (x, weight, other) if tensor is not None]
    y_dtype = x.dtype if other is None else other.dtype
    loadable = all(is_tma_aligned(tensor) and tensor.dtype in (x.dtype, FP8) for tensor in loaded)
    loadable = loadable and weight.dtype == x.dtype and channels * y_dtype.itemsize % 16 == 0
    fits = rows > BLOCK_M // 2 and tokens <= MAX_TOKENS and num_tiles >= sms
    if not (loadable and fits and act == "none" and x.dtype in (torch.bfloat16, torch.float16)):
        return portable.token_mix(x, matrix, epilogue, act, combine)
    y = x.new_empty(batch, rows, channels, dtype=y_dtype)
    weight, folded_row_sum, mean_offset = weight.unsqueeze(0), row_sum, None
    if epilogue.mean is not None and epilogue.rstd is not None:
        weight, mean_offset, folded_row_sum = fold_norm(weight[0], epilogue.mean, epilogue.rstd)
    run = fused_multiply_add(kernel)
    with launching("token_mix (Hopper)", x):
        run[(min(num_tiles, sms),)](
            descriptor(x, BLOCK_K, BLOCK_C), descriptor(weight, BLOCK_M, BLOCK_K), descriptor(y, BLOCK_M, BLOCK_C),
            descriptor(y if other is None else other, BLOCK_M, BLOCK_C),
            epilogue.bias, epilogue.norm_weight, epilogue.norm_bias, mean_offset, row_sum, epilogue.deferred_bias,
            folded_row_sum, epilogue.layer_scale,
            batch, rows, channels, 0 if mean_offset is None else rows, int(mean_offset is not None),
            K=tokens, BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, BLOCK_K=BLOCK_K, STAGES=STAGES,
            **epilogue_flags(epilogue, combine),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return y
