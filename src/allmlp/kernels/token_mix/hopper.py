"""The product over tokens on Hopper: one warp moves, eight multiply.

    H[i, c] = scale[c] (sum_j A'[i, j] X[j, c] - centre[i] + lift[c] mass'[i]) + shift[c] mass[i] + bias[i]

as in triton.py, whose small kernel puts LayerNorm into A'. Here a program stays and makes tile after tile. Its moving
warp runs ahead: while the others finish a tile, the next one's A' and X already come in, and the other operand comes
while they multiply. Result and other operand lie in the same spot, one after the other.

Written in Gluon, in which a program says which warp does what; the interpreter does not know it.
"""

# Gluon's annotations are those of Python, not of the language it is.
# pyrefly: ignore-errors

from __future__ import annotations

from typing import Any

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

from allmlp.kernels.token_mix import triton as portable
from allmlp.kernels.token_mix.reference import Act, Around, Combine
from allmlp.kernels.token_mix.triton import Matrix, aligned, finish, parts, weave, with_other

ROWS, CHANNELS, DEPTH, STAGES, WARPS = 256, 128, 32, 6, 8
"""Of a tile, what is loaded of it at once and how many such loads are under way, and the warps that multiply."""
LONGEST = 512
"""Tokens up to which the loop over them is written out."""


@gluon.jit
def place(item, tiles, strips):
    """Tile of rows, strip of channels, example: row tiles of the same channels are neighbours."""
    return item % tiles, item // tiles % strips, item // tiles // strips


@gluon.jit
def move(
    x, a, other, x_slots, a_slots, spot, ready, free, spot_ready, spot_free, items, tiles, strips, own,
    K: gl.constexpr, BM: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, OTHER: gl.constexpr,
):  # fmt: skip
    count = 0
    for turn in range(gl.cdiv(items - gl.program_id(0), gl.num_programs(0))):
        tile, strip, example = place(turn * gl.num_programs(0) + gl.program_id(0), tiles, strips)
        for start in gl.static_range(0, K, BK):
            slot = count % STAGES
            # Phases are even and odd by turns; the wait for the odd one before the first is over at once.
            mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(slot), x.block_type.nbytes + a.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [example, start, strip * BC], ready.index(slot), x_slots.index(slot))
            tma.async_copy_global_to_shared(
                a, [example * own, tile * BM, start], ready.index(slot), a_slots.index(slot)
            )
            count += 1
        if OTHER:
            mbarrier.wait(spot_free, (turn & 1) ^ 1)
            mbarrier.expect(spot_ready, other.block_type.nbytes)
            tma.async_copy_global_to_shared(other, [example, tile * BM, strip * BC], spot_ready, spot)


@gluon.jit
def multiply(
    y, x_slots, a_slots, spot, ready, free, spot_ready, spot_free,
    bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr,
    items, tiles, strips, M, C, l_b,
    K: gl.constexpr, BM: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, SCALE: gl.constexpr, SHIFT: gl.constexpr, CENTRE: gl.constexpr, LIFT: gl.constexpr,
    GAIN: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BC, 16])
    count = 0
    for turn in range(gl.cdiv(items - gl.program_id(0), gl.num_programs(0))):
        tile, strip, example = place(turn * gl.num_programs(0) + gl.program_id(0), tiles, strips)
        z = gl.zeros((BM, BC), gl.float32, layout)
        for start in gl.static_range(0, K, BK):
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            a, x = a_slots.index(slot).reshape([BM, BK]), x_slots.index(slot).reshape([BK, BC])
            z = warpgroup_mma(a, x, z, is_async=True)
            if start > 0:
                z = warpgroup_mma_wait(1, deps=[z])
                mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
            elif turn > 0:
                # The last tile's result has been read from its place, where this one's other operand may come now.
                tma.store_wait(0)
                mbarrier.arrive(spot_free, count=1)
            count += 1
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        rows = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
        cols = strip * BC + gl.arange(0, BC, gl.SliceLayout(0, layout))
        z = finish(
            z, bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr,
            rows, cols, example.to(gl.int64), M, C, l_b, BIAS, SCALE, SHIFT, CENTRE, LIFT, GAIN, 0,
        )  # fmt: skip
        flat = spot.reshape([BM, BC])
        if COMBINE > 0:
            mbarrier.wait(spot_ready, turn & 1)
            z = with_other(flat.load(layout), z, COMBINE)
        flat.store(z.to(y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [example, tile * BM, strip * BC], spot)
    tma.store_wait(0)


@gluon.jit
def kernel(
    x, a, y, other, bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr,
    B, M, C, l_b, own,
    K: gl.constexpr, BM: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, SCALE: gl.constexpr, SHIFT: gl.constexpr, CENTRE: gl.constexpr, LIFT: gl.constexpr,
    GAIN: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, 1, BK, BC], x.layout)
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, 1, BM, BK], a.layout)
    spot = gl.allocate_shared_memory(y.dtype, [1, BM, BC], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    spot_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    spot_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    mbarrier.init(spot_ready, count=1)
    mbarrier.init(spot_free, count=1)
    fence_async_shared()
    tiles, strips = gl.cdiv(M, BM), gl.cdiv(C, BC)
    items = B * tiles * strips
    gl.warp_specialize(
        [
            (multiply, (
                y, x_slots, a_slots, spot, ready, free, spot_ready, spot_free,
                bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr,
                items, tiles, strips, M, C, l_b,
                K, BM, BC, BK, STAGES, BIAS, SCALE, SHIFT, CENTRE, LIFT, GAIN, COMBINE,
            )),
            (move, (
                x, a, other, x_slots, a_slots, spot, ready, free, spot_ready, spot_free, items, tiles, strips, own,
                K, BM, BC, BK, STAGES, COMBINE > 0,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    block = [1, rows, columns]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def token_mix(
    x: Tensor, matrix: Matrix | Tensor, around: Around, act: Act = "none", combine: Combine = "none"
) -> Tensor:
    """As the reference; what this kernel is not made for goes to the portable one."""
    weight, mass = matrix = matrix if isinstance(matrix, Matrix) else Matrix.of(matrix)
    (batch, tokens, channels), rows = x.shape, len(weight)
    other = around.other if combine != "none" else None
    items = batch * triton.cdiv(rows, ROWS) * triton.cdiv(channels, CHANNELS)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    moved = [one for one in (x, weight, other) if one is not None]
    movable = all(aligned(one) and one.dtype == x.dtype for one in moved) and channels % 8 == 0
    enough = rows > ROWS // 2 and tokens <= LONGEST and items >= processors
    if not (movable and enough and act == "none" and x.dtype in (torch.bfloat16, torch.float16)):
        return portable.token_mix(x, matrix, around, act, combine)
    y = x.new_empty(batch, rows, channels)
    weight, lifted, centre = weight.unsqueeze(0), mass, None
    if around.mean is not None and around.rstd is not None:
        weight, centre, lifted = weave(weight[0], around.mean, around.rstd)
    run: Any = kernel
    run[(min(items, processors),)](
        describe(x, DEPTH, CHANNELS), describe(weight, ROWS, DEPTH), describe(y, ROWS, CHANNELS),
        describe(y if other is None else other, ROWS, CHANNELS),
        around.bias, around.scale, around.shift, centre, mass, around.lift, lifted, around.gain,
        batch, rows, channels, 0 if centre is None else rows, int(centre is not None),
        K=tokens, BM=ROWS, BC=CHANNELS, BK=DEPTH, STAGES=STAGES,
        **parts(around, combine),
        num_warps=WARPS,
    )  # fmt: skip
    return y
