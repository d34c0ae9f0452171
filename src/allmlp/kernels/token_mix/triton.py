"""The product over tokens as one kernel: a program makes some rows and channels of one example.

LayerNorm does not touch the large operand. Its statistics belong to the summed index j, so a small kernel before puts
them into a matrix for each example:

    sum_j A[i, j] (X[j, c] - mean[j]) rstd[j]  =  sum_j A'[i, j] X[j, c]  -  centre[i]
    A' = A * rstd,   centre[i] = sum_j A'[i, j] mean[j],   mass'[i] = sum_j A'[i, j],   mass[i] = sum_j A[i, j]

and what depends on the channel alone, lift, scale and shift, comes after the sum:

    H[i, c] = scale[c] (sum_j A'[i, j] X[j, c] - centre[i] + lift[c] mass'[i]) + shift[c] mass[i] + bias[i]

So X streams from memory into the matrix units as it is, moved by the copy engine (TMA) where its rows are aligned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.activation.triton import activate, code
from allmlp.kernels.token_mix.reference import Act, Around, Combine

COMBINE = {"none": 0, "multiply": 1, "add": 2}


class Matrix(NamedTuple):
    """A matrix over tokens as the kernel reads it: rows that start at multiples of 16 bytes, and their sums."""

    weight: Tensor
    mass: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Matrix:
        rows, columns = weight.shape
        storage = weight.new_zeros(rows, -(-columns // 16) * 16)
        storage[:, :columns] = weight
        return cls(storage[:, :columns], storage.float().sum(1))


# --- LayerNorm goes into the matrix -----------------------------------------------------------------------


@triton.jit
def weave_kernel(
    a_ptr, mean_ptr, rstd_ptr, woven_ptr, centre_ptr, mass_ptr, M, a_m, s_b, w_b, w_m,
    K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(1).to(tl.int64)
    rows, ks = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (rows < M)[:, None] & (ks < K)[None, :]
    mean = tl.load(mean_ptr + example * s_b + ks, ks < K, 0.0)
    rstd = tl.load(rstd_ptr + example * s_b + ks, ks < K, 0.0)
    a = tl.load(a_ptr + rows[:, None] * a_m + ks[None, :], inside, 0.0).to(tl.float32)
    woven = (a * rstd[None, :]).to(woven_ptr.dtype.element_ty)
    tl.store(woven_ptr + example * w_b + rows[:, None] * w_m + ks[None, :], woven, inside)
    # Sums of the rounded numbers: what the product will really have added.
    woven = woven.to(tl.float32)
    tl.store(centre_ptr + example * M + rows, tl.sum(woven * mean[None, :], 1), rows < M)
    tl.store(mass_ptr + example * M + rows, tl.sum(woven, 1), rows < M)


def weave(matrix: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A' (b m k), centre (b m) and mass' (b m)."""
    batch, (rows, tokens) = len(mean), matrix.shape
    woven = matrix.new_empty(batch, rows, -(-tokens // 16) * 16)
    centre, mass = (torch.empty(batch, rows, dtype=torch.float32, device=matrix.device) for _ in range(2))
    wide = triton.next_power_of_2(tokens)
    together = max(1, 4096 // wide)
    run: Any = weave_kernel
    run[(triton.cdiv(rows, together), batch)](
        matrix, mean, rstd, woven, centre, mass, rows, matrix.stride(0), mean.stride(0), *woven.stride()[:2],
        K=tokens, ROWS=together, WIDE=wide,
    )  # fmt: skip
    return woven[:, :, :tokens], centre, mass


# --- the product -----------------------------------------------------------------------------------------------


def blocks(arguments: dict[str, Any]) -> None:
    """The sizes that autotuning tries are those in which the copy engine moves."""
    if arguments["TMA"]:
        rows, columns, depth = (arguments[name] for name in ("BM", "BC", "BK"))
        shapes = {
            "x_copy": (depth, columns),
            "a_copy": (rows, depth),
            "y_copy": (rows, columns),
            "o_copy": (rows, columns),
        }
        for name, shape in shapes.items():
            if arguments[name] is not None:
                arguments[name].block_shape = [1, *shape]


CONFIGS = [
    triton.Config(
        {"BM": rows, "BC": columns, "BK": depth, "THROUGH": through},
        num_warps=warps,
        num_stages=stages,
        pre_hook=blocks,
    )
    for rows, columns, depth, warps, stages, through in (
        (128, 128, 64, 4, 3, False),
        (128, 128, 64, 4, 2, True),
        (256, 128, 64, 8, 3, True),
        (64, 64, 32, 4, 4, True),
    )
]


# The interpreter has nothing to time: one of the sizes is enough there.
@triton.autotune(
    CONFIGS[-1:] if triton.knobs.runtime.interpret else CONFIGS,
    key=["M", "K", "C", "CENTRE", "ACT", "COMBINE", "TMA"],
)
@triton.jit
def kernel(
    x_copy, a_copy, y_copy, o_copy, x_ptr, a_ptr, y_ptr,
    bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, other_ptr, gain_ptr,
    M, C, x_b, x_k, a_b, a_m, y_b, y_m, o_b, o_m, l_b,
    K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, CENTRE: tl.constexpr,
    LIFT: tl.constexpr, GAIN: tl.constexpr, ACT: tl.constexpr, COMBINE: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, THROUGH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    # Row tiles of the same channels are neighbours: the second finds the first's X in the cache.
    tile, columns = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    example = tl.program_id(1)
    own = (example * (a_b > 0)).to(tl.int32)  # which matrix: each example's, or the one of all
    far = example.to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    cols = columns * BC + tl.arange(0, BC)
    in_rows, in_cols = rows < M, cols < C
    z = tl.zeros((BM, BC), dtype=tl.float32)
    for start in range(0, K, BK):
        if TMA:
            a = a_copy.load([own, tile * BM, start]).reshape(BM, BK)
            x = x_copy.load([example, start, columns * BC]).reshape(BK, BC)
        else:
            ks = start + tl.arange(0, BK)
            inside = in_rows[:, None] & (ks < K)[None, :]
            a = tl.load(a_ptr + far * a_b + rows[:, None] * a_m + ks[None, :], inside, 0.0)
            inside = (ks < K)[:, None] & in_cols[None, :]
            x = tl.load(x_ptr + far * x_b + ks[:, None] * x_k + cols[None, :], inside, 0.0)
        z = tl.dot(a, x, z, input_precision="ieee")
    z = finish(
        z, bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr,
        rows, cols, far, M, C, l_b, BIAS, SCALE, SHIFT, CENTRE, LIFT, GAIN, ACT,
    )  # fmt: skip
    if TMA and THROUGH:
        # By the copy engine: no thread holds an address for each of its numbers.
        if COMBINE > 0:
            z = with_other(o_copy.load([example, tile * BM, columns * BC]).reshape(BM, BC), z, COMBINE)
        y_copy.store([example, tile * BM, columns * BC], z.to(y_ptr.dtype.element_ty).reshape(1, BM, BC))
    else:
        inside = in_rows[:, None] & in_cols[None, :]
        if COMBINE > 0:
            other = tl.load(other_ptr + far * o_b + rows[:, None] * o_m + cols[None, :], inside, 0.0)
            z = with_other(other, z, COMBINE)
        tl.store(y_ptr + far * y_b + rows[:, None] * y_m + cols[None, :], z.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def finish(
    z, bias_ptr, scale_ptr, shift_ptr, centre_ptr, mass_ptr, lift_ptr, lifted_ptr, gain_ptr, rows, cols, far, M, C, l_b,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, CENTRE: tl.constexpr, LIFT: tl.constexpr,
    GAIN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """All that comes after the sum and before the other operand."""
    in_rows, in_cols = rows < M, cols < C
    if CENTRE:
        z -= tl.load(centre_ptr + far * M + rows, in_rows, 0.0)[:, None]
    if LIFT:
        lifted = tl.load(lifted_ptr + far * l_b + rows, in_rows, 0.0)
        z += lifted[:, None] * tl.load(lift_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if SCALE:
        z *= tl.load(scale_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if SHIFT:
        mass = tl.load(mass_ptr + rows, in_rows, 0.0)
        z += mass[:, None] * tl.load(shift_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    if BIAS:
        z += tl.load(bias_ptr + rows, in_rows, 0.0).to(tl.float32)[:, None]
    z = activate(z, ACT)
    if GAIN:
        z *= tl.load(gain_ptr + cols, in_cols, 0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def with_other(other, z, COMBINE: tl.constexpr):
    return other.to(tl.float32) * z if COMBINE == 1 else other.to(tl.float32) + z


def parts(around: Around, combine: Combine) -> dict[str, Any]:
    """Which parts are there, as a kernel is compiled for them."""
    other = around.other is not None and combine != "none"
    return {
        "BIAS": around.bias is not None,
        "SCALE": around.scale is not None,
        "SHIFT": around.shift is not None,
        "CENTRE": around.mean is not None and around.rstd is not None,
        "LIFT": around.lift is not None,
        "GAIN": around.gain is not None and other,
        "COMBINE": COMBINE[combine] if other else 0,
    }


def token_mix(
    x: Tensor, matrix: Matrix | Tensor, around: Around, act: Act = "none", combine: Combine = "none"
) -> Tensor:
    """As the reference, in one kernel, or two with LayerNorm."""
    weight, mass = matrix if isinstance(matrix, Matrix) else Matrix.of(matrix)
    batch, tokens, channels = x.shape
    rows = len(weight)
    y = x.new_empty(batch, rows, channels)
    other = around.other if combine != "none" else None
    for tensor in (x, other):
        assert tensor is None or tensor.stride(2) == 1, "channels must lie side by side"
    weight, lifted, centre = weight.unsqueeze(0), mass, None
    if around.mean is not None and around.rstd is not None:
        weight, centre, lifted = weave(weight[0], around.mean, around.rstd)
    moved = x, weight, y, other
    tma = all(tensor is None or aligned(tensor) for tensor in moved)
    copies = [TensorDescriptor.from_tensor(one, [1, 16, 16]) if tma and one is not None else None for one in moved]
    run: Any = kernel
    run[lambda sizes: (triton.cdiv(rows, sizes["BM"]) * triton.cdiv(channels, sizes["BC"]), batch)](
        *copies, x, weight, y,
        around.bias, around.scale, around.shift, centre, mass, around.lift, lifted, other, around.gain,
        rows, channels, *x.stride()[:2], 0 if centre is None else weight.stride(0), weight.stride(1), *y.stride()[:2],
        *((0, 0) if other is None else other.stride()[:2]), 0 if centre is None else rows,
        K=tokens,
        ACT=code(act, x.dtype),
        TMA=tma,
        **parts(around, combine),
    )  # fmt: skip
    return y


def aligned(tensor: Tensor) -> bool:
    """Whether the copy engine can move it: every row begins at a multiple of 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in tensor.stride()[:-1])
