"""The hidden layer of the channel MLP and its gradient on Hopper, as in triton.py: two groups of four warps take turns,
one multiplies while the other executes the epilogue of its last tile.

A third partition, one warp, loads for both: X and W of their tiles in turn, and in the backward pass the tile of H
during the product. Each group works through the rows of its own 128 columns.

Written in Gluon, which exposes warp specialization; Triton's interpreter does not support it.
"""

# Gluon's annotations look like Python types but are not.
# pyrefly: ignore-errors

from __future__ import annotations

import torch
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

from allmlp.kernels.activation.triton import activate, activate_with_grad, tanh_code
from allmlp.kernels.channel_mlp import triton as portable
from allmlp.kernels.channel_mlp.triton import sum_within_threads
from allmlp.kernels.launch import fused_multiply_add, launching, num_sms
from allmlp.kernels.linear.triton import halves
from allmlp.kernels.row_sum.triton import sum_rows

# Renamed in Triton 3.8.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK, BLOCK_K, STAGES, GROUPS, GROUP_WARPS = 128, 64, 4, 2, 4
HALF = BLOCK // 2


@gluon.jit
def first_tile(group, GROUPS: gl.constexpr, BLOCK: gl.constexpr, col_tiles: gl.constexpr):
    """The columns of a group, and its first row tile."""
    index = gl.program_id(0) * GROUPS + group
    return index % col_tiles * BLOCK, index // col_tiles


@gluon.jit
def producer(
    x_desc, w_desc, h_desc, x_smem, w_smem, h_smem, ready_bars, empty_bars, h_ready_bars, h_empty_bars, steps,
    col_tiles: gl.constexpr, strips: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    count = 0
    for step in range(steps):
        for group in gl.static_range(GROUPS):
            col, strip = first_tile(group, GROUPS, BLOCK, col_tiles)
            row = (step * strips + strip) * BLOCK
            for start in range(0, K, BLOCK_K):
                stage = count % STAGES
                # Waiting for the odd phase of a fresh barrier returns at once.
                mbarrier.wait(empty_bars.index(stage), (count // STAGES & 1) ^ 1)
                ready_bar = ready_bars.index(stage)
                mbarrier.expect(ready_bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
                async_load(x_desc, [row, start], ready_bar, x_smem.index(stage))
                if BACKWARD:
                    async_load(w_desc, [start, col], ready_bar, w_smem.index(stage))
                else:
                    async_load(w_desc, [col, start], ready_bar, w_smem.index(stage))
                count += 1
            if BACKWARD:
                mbarrier.wait(h_empty_bars.index(group), (step & 1) ^ 1)
                h_ready_bar = h_ready_bars.index(group)
                mbarrier.expect(h_ready_bar, 2 * h_desc.block_type.nbytes)
                for half in gl.static_range(2):
                    h_tile = h_smem.index(group * 2 + half)
                    async_load(h_desc, [row, col + half * (BLOCK // 2)], h_ready_bar, h_tile)


@gluon.jit
def epilogue(
    z, h_tile, out_smem, h_desc, a_desc, dh_desc, bias_ptr, row, col, N: gl.constexpr,
    ACT: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Store H and A of half a tile, or A and dH, which is returned; h_tile is the tile of H, then the first result."""
    if BACKWARD:
        a, act_grad = activate_with_grad(h_tile.load(z.type.layout).to(gl.float32), ACT)
        z *= act_grad
        h_tile.store(a.to(h_desc.dtype))
        fence_async_shared()
        async_store(a_desc, [row, col], h_tile)
        second = z
    else:
        cols = col + gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
        h = (z + gl.expand_dims(gl.load(bias_ptr + cols, cols < N, 0.0).to(gl.float32), 0)).to(h_desc.dtype)
        h_tile.store(h)
        fence_async_shared()
        async_store(h_desc, [row, col], h_tile)
        second = activate(h.to(gl.float32), ACT)
    # All stores but the one under way have read their tile.
    tma.store_wait(1)
    out_smem.store(second.to(h_desc.dtype))
    fence_async_shared()
    if BACKWARD:
        async_store(dh_desc, [row, col], out_smem)
    else:
        async_store(a_desc, [row, col], out_smem)
    return z


@gluon.jit
def consumer(
    group: gl.constexpr, h_desc, a_desc, dh_desc, x_smem, w_smem, h_smem, out_smem,
    ready_bars, empty_bars, h_ready_bars, h_empty_bars, bias_ptr, sum_ptr, steps,
    col_tiles: gl.constexpr, strips: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
    ACT: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    HALF: gl.constexpr = BLOCK // 2
    K_STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    col, strip = first_tile(group, GROUPS, BLOCK, col_tiles)
    zero, _ = halves(gl.zeros((BLOCK, BLOCK), gl.float32, layout))
    left_sum = sum_within_threads(zero, WARPS)
    right_sum = left_sum
    for step in range(steps):
        row = (step * strips + strip) * BLOCK
        z = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        # The groups' tiles pass through the stages in turn.
        count = (step * GROUPS + group) * K_STEPS
        for k_step in range(K_STEPS):
            stage = count % STAGES
            mbarrier.wait(ready_bars.index(stage), count // STAGES & 1)
            w = w_smem.index(stage) if BACKWARD else w_smem.index(stage).permute((1, 0))
            z = warpgroup_mma(x_smem.index(stage), w, z, is_async=True)
            z = warpgroup_mma_wait(1, deps=[z])
            if k_step > 0:
                mbarrier.arrive(empty_bars.index((count - 1) % STAGES), count=1)
            elif step > 0:
                # The last tile has been stored from the buffers, which are free for this one.
                tma.store_wait(0)
                if BACKWARD:
                    mbarrier.arrive(h_empty_bars.index(group), count=1)
            count += 1
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty_bars.index((count - 1) % STAGES), count=1)
        if BACKWARD:
            mbarrier.wait(h_ready_bars.index(group), step & 1)
        left, right = halves(z)
        left = epilogue(
            left, h_smem.index(group * 2), out_smem.index(group), h_desc, a_desc, dh_desc, bias_ptr,
            row, col, N, ACT, BACKWARD,
        )  # fmt: skip
        right = epilogue(
            right, h_smem.index(group * 2 + 1), out_smem.index(group), h_desc, a_desc, dh_desc, bias_ptr,
            row, col + HALF, N, ACT, BACKWARD,
        )  # fmt: skip
        if BACKWARD:
            left_sum += sum_within_threads(left, WARPS)
            right_sum += sum_within_threads(right, WARPS)
    tma.store_wait(0)
    if BACKWARD:
        store_sum(left_sum, sum_ptr + strip * N + col)
        store_sum(right_sum, sum_ptr + strip * N + col + HALF)


@gluon.jit
def store_sum(total, sum_ptr):
    total = gl.sum(gl.sum(total, 1), 0)  # within warps, then across them
    gl.store(sum_ptr + gl.arange(0, total.shape[0], total.type.layout), total)


@gluon.jit(do_not_specialize=["M"])
def kernel(
    x_desc, w_desc, h_desc, a_desc, dh_desc, bias_ptr, sum_ptr, M,
    strips: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr, ACT: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    col_tiles: gl.constexpr = N // BLOCK
    w_shape: gl.constexpr = [STAGES, BLOCK_K, BLOCK] if BACKWARD else [STAGES, BLOCK, BLOCK_K]
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, w_shape, w_desc.layout)
    h_smem = gl.allocate_shared_memory(h_desc.dtype, [GROUPS * 2, BLOCK, BLOCK // 2], h_desc.layout)
    out_smem = gl.allocate_shared_memory(h_desc.dtype, [GROUPS, BLOCK, BLOCK // 2], h_desc.layout)
    ready_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_ready_bars = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    h_empty_bars = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready_bars.index(stage), count=1)
        mbarrier.init(empty_bars.index(stage), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(h_ready_bars.index(group), count=1)
        mbarrier.init(h_empty_bars.index(group), count=1)
    fence_async_shared()
    steps = gl.cdiv(M, BLOCK * strips)
    gl.warp_specialize(
        [
            (consumer, (
                0, h_desc, a_desc, dh_desc, x_smem, w_smem, h_smem, out_smem,
                ready_bars, empty_bars, h_ready_bars, h_empty_bars, bias_ptr, sum_ptr, steps,
                col_tiles, strips, N, K, BLOCK, BLOCK_K, STAGES, GROUPS, WARPS, ACT, BACKWARD,
            )),
            (consumer, (
                1, h_desc, a_desc, dh_desc, x_smem, w_smem, h_smem, out_smem,
                ready_bars, empty_bars, h_ready_bars, h_empty_bars, bias_ptr, sum_ptr, steps,
                col_tiles, strips, N, K, BLOCK, BLOCK_K, STAGES, GROUPS, WARPS, ACT, BACKWARD,
            )),
            (producer, (
                x_desc, w_desc, h_desc, x_smem, w_smem, h_smem, ready_bars, empty_bars, h_ready_bars, h_empty_bars,
                steps, col_tiles, strips, K, BLOCK, BLOCK_K, STAGES, GROUPS, BACKWARD,
            )),
        ],
        [WARPS, 1],
        [232, 40],
    )  # fmt: skip


def descriptor(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(tensor, [rows, cols], gl.NVMMASharedLayout.get_default_for([rows, cols], dtype))


def launch(
    x: Tensor, weight: Tensor, h: Tensor, a: Tensor, dh: Tensor | None, bias: Tensor | None, sums: Tensor | None,
    act: str, strips: int,
) -> None:  # fmt: skip
    (rows, channels), backward = h.shape, dh is not None
    run = fused_multiply_add(kernel)
    with launching("channel_mlp (Hopper)", x):
        run[(strips * channels // BLOCK // GROUPS,)](
            descriptor(x, BLOCK, BLOCK_K),
            descriptor(weight, *((BLOCK_K, BLOCK) if backward else (BLOCK, BLOCK_K))),
            *(descriptor(tensor, BLOCK, HALF) for tensor in (h, a, h if dh is None else dh)), bias, sums, rows,
            strips=strips, N=channels, K=x.shape[1], BLOCK=BLOCK, BLOCK_K=BLOCK_K, STAGES=STAGES, GROUPS=GROUPS,
            WARPS=GROUP_WARPS, ACT=tanh_code(act, h.dtype), BACKWARD=backward, num_warps=GROUP_WARPS,
        )  # fmt: skip


def strips_of(channels: int, device: torch.device) -> int:
    """Groups that share the rows of each column tile; 0 where the columns do not fill their tiles or pairs of them."""
    return 0 if channels % (GROUPS * BLOCK) else max(1, num_sms(device) * GROUPS // (channels // BLOCK))


def hidden(x: Tensor, up: Tensor, up_bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """As the reference; falls back to the portable kernel where this one does not apply."""
    strips = strips_of(len(up), x.device)
    if not strips:
        return portable.hidden(x, up, up_bias, act)
    h, a = (x.new_empty(len(x), len(up)) for _ in range(2))
    launch(x.contiguous(), up.contiguous(), h, a, None, up_bias, None, act, strips)
    return h, a


def hidden_backward(dy: Tensor, down: Tensor, h: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; falls back to the portable kernel where this one does not apply."""
    strips = strips_of(h.shape[1], h.device)
    if not strips:
        return portable.hidden_backward(dy, down, h, act)
    a, dh = (h.new_empty(h.shape) for _ in range(2))
    partial_sums = torch.empty(strips, h.shape[1], dtype=torch.float32, device=h.device)
    launch(dy.contiguous(), down.contiguous(), h.contiguous(), a, dh, None, partial_sums, act, strips)
    return a, dh, sum_rows(partial_sums, h.dtype)
