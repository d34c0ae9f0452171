"""One kernel: a program makes some tokens of one example, all channels of them.

The gated numbers go from one product into the next without leaving the processor:

    for some channels c at a time:    acc  +=  (U[:, c] * (A' V[:, c] - centre, scaled and shifted + bias)) W[:, c]^T

A' = A rstd and centre as in `token_mix`, made here once for each program. A program has all channels of its tokens, so
it ends with the residual sum and the next LayerNorm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.token_mix.reference import Around
from allmlp.kernels.token_mix.triton import Matrix


def pieces(tokens: int) -> tuple[int, int, int]:
    """Three powers of two that hold all tokens, most of them full: the sizes of products. 196 = 128 + 64 + 4 of 16."""
    first = min(128, 1 << (tokens.bit_length() - 1))
    second = min(128, 1 << ((tokens - first).bit_length() - 1)) if tokens - first >= 16 else 0
    left = tokens - first - second
    return first, second, max(16, 1 << (left - 1).bit_length()) if left else 0


def blocks(arguments: dict[str, Any]) -> None:
    """The sizes that autotuning tries are those in which the copy engine moves."""
    columns = arguments["BC"]
    for number in "012":
        if arguments["K" + number]:
            arguments[f"v{number}_copy"].block_shape = [1, arguments["K" + number], columns]
    arguments["u_copy"].block_shape = [1, arguments["BM"], columns]
    arguments["w_copy"].block_shape = [arguments["N"], columns]
    for name in ("z_copy", "x_copy"):
        arguments[name].block_shape = [1, arguments["BM"], arguments["N"]]


CONFIGS = [
    triton.Config({"BM": rows, "BC": columns}, num_warps=warps, num_stages=stages, pre_hook=blocks)
    for rows, columns, warps, stages in (
        (128, 64, 8, 2),
        (128, 32, 8, 4),
        (64, 32, 4, 2),
    )
]


# The interpreter has nothing to time: one of the sizes is enough there.
@triton.autotune(CONFIGS[-1:] if triton.knobs.runtime.interpret else CONFIGS, key=["M", "C", "N", "size"])
@triton.jit
def kernel(
    u_copy, v0_copy, v1_copy, v2_copy, w_copy, z_copy, x_copy, a_ptr, mass_ptr, bias_ptr, scale_ptr, shift_ptr,
    mean_ptr, rstd_ptr, lift_ptr, M, a_m, eps, size, C: tl.constexpr, N: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    # The tiles of an example are neighbours: the second finds V in the cache.
    tile, example = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    rows, first = tile * BM + tl.arange(0, BM), example.to(tl.int64) * M
    centre = tl.zeros((BM,), dtype=tl.float32)
    a0, centre = woven(a_ptr, mean_ptr + first, rstd_ptr + first, centre, rows, M, a_m, 0, K0, w_copy.dtype)
    a1, a2 = a0, a0
    if K1:
        a1, centre = woven(a_ptr, mean_ptr + first, rstd_ptr + first, centre, rows, M, a_m, K0, K1, w_copy.dtype)
    if K2:
        a2, centre = woven(a_ptr, mean_ptr + first, rstd_ptr + first, centre, rows, M, a_m, K0 + K1, K2, w_copy.dtype)
    mass = tl.load(mass_ptr + rows, rows < M, 0.0)
    bias = tl.load(bias_ptr + rows, rows < M, 0.0)
    z = tl.zeros((BM, N), dtype=tl.float32)
    for start in range(0, C, BC):
        cols = start + tl.arange(0, BC)
        h = tl.dot(a0, v0_copy.load([example, 0, start]).reshape(K0, BC), input_precision="ieee")
        if K1:
            h = tl.dot(a1, v1_copy.load([example, K0, start]).reshape(K1, BC), h, input_precision="ieee")
        if K2:
            h = tl.dot(a2, v2_copy.load([example, K0 + K1, start]).reshape(K2, BC), h, input_precision="ieee")
        scale = tl.load(scale_ptr + cols, cols < C, 0.0)
        shift = tl.load(shift_ptr + cols, cols < C, 0.0)
        h = (h - centre[:, None]) * scale[None, :] + (mass[:, None] * shift[None, :] + bias[:, None])
        u = u_copy.load([example, tile * BM, start]).reshape(BM, BC)
        w = w_copy.load([0, start])
        z = tl.dot((u.to(tl.float32) * h).to(w_copy.dtype), w.T, z, input_precision="ieee")
    z += z_copy.load([example, tile * BM, 0]).reshape(BM, N).to(tl.float32)
    z_copy.store([example, tile * BM, 0], z.to(z_copy.dtype).reshape(1, BM, N))
    z += tl.load(lift_ptr + tl.arange(0, N))[None, :]
    z -= (tl.sum(z, 1) / N)[:, None]
    z *= (1 / tl.sqrt(tl.sum(z * z, 1) / N + eps))[:, None]
    x_copy.store([example, tile * BM, 0], z.to(x_copy.dtype).reshape(1, BM, N))


@triton.jit
def woven(a_ptr, mean_ptr, rstd_ptr, centre, rows, M, a_m, first, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Some columns of A', and what they add to `centre`."""
    ks = first + tl.arange(0, SIZE)
    inside = (rows < M)[:, None] & (ks < M)[None, :]
    a = tl.load(a_ptr + rows[:, None] * a_m + ks[None, :], inside, 0.0).to(tl.float32)
    a = (a * tl.load(rstd_ptr + ks, ks < M, 0.0)[None, :]).to(DTYPE)
    # Sums of the rounded numbers: what the product will really have added.
    return a, centre + tl.sum(a.to(tl.float32) * tl.load(mean_ptr + ks, ks < M, 0.0)[None, :], 1)


def pays(z: Tensor) -> bool:
    """Whether the processors are busy nearly all the time: programs are long, and all take the same time."""
    processors = torch.cuda.get_device_properties(z.device).multi_processor_count
    programs = -(-z.shape[1] // 128) * len(z)
    return programs >= 0.9 * processors * -(-programs // processors)


def gate_linear(
    hidden: Tensor, matrix: Matrix, around: Around, weight: Tensor, z: Tensor, lift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference, for layers that `fits`; Z' is written over Z."""
    (batch, tokens, width), x = z.shape, torch.empty_like(z)
    u, v = hidden.chunk(2, dim=2)
    sizes = pieces(tokens)
    copies = [TensorDescriptor.from_tensor(one, [1, 16, 16]) for one in (u, v, v, v)]
    ends = [TensorDescriptor.from_tensor(one, [1, 16, 16]) for one in (z, x)]
    run: Any = kernel
    run[lambda config: (triton.cdiv(tokens, config["BM"]) * batch,)](
        *copies, TensorDescriptor.from_tensor(weight, [16, 16]), *ends,
        matrix.weight, matrix.mass, around.bias, around.scale, around.shift, around.mean, around.rstd, lift,
        tokens, matrix.weight.stride(0), eps, batch.bit_length(),
        C=v.shape[2], N=width, K0=sizes[0], K1=sizes[1], K2=sizes[2],
    )  # fmt: skip
    return z, x
