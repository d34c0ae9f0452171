"""The hidden layer of the channel MLP and its gradient, with the activation in the epilogue of the product.

Beside the product itself, H and A are written once, and in the backward pass H is read once: the gradient of A never
reaches memory. Programs loop over the row tiles of the same columns. So each sums its dH for the bias in registers, and
threads and warps exchange sums only after the loop; partial sums of all programs are added afterwards.

A is computed from the rounded H, which is all that the backward pass has: both passes have the same A.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.activation.triton import activate, activate_with_grad, tanh_code
from allmlp.kernels.launch import autotune, fused_multiply_add, launching, num_sms
from allmlp.kernels.linear.triton import COMPILED, halves, product
from allmlp.kernels.row_sum.triton import sum_rows


def set_block_shapes(arguments: dict[str, Any]) -> None:
    """Autotuning's pre-hook: TMA descriptors move the tile that is tried, those of H, A and dH half of it at a time."""
    rows, cols, depth = (arguments[f"BLOCK_{axis}"] for axis in "MNK")
    arguments["x_desc"].block_shape = [rows, depth]
    arguments["w_desc"].block_shape = [depth, cols] if "dh_desc" in arguments else [cols, depth]
    for name in {"h_desc", "a_desc", "dh_desc"} & arguments.keys():
        arguments[name].block_shape = [rows, cols // 2]


REGISTERS = 65536
"""Of a multiprocessor; a thread has at most 255."""


def configs(*tiles: tuple[int, ...]) -> list[triton.Config]:
    return [
        triton.Config(
            {"BLOCK_M": rows, "BLOCK_N": cols, "BLOCK_K": depth, "WARPS": warps, "CTAS_PER_SM": ctas},
            num_warps=warps,
            num_stages=stages,
            pre_hook=set_block_shapes,
            maxnreg=min(255, REGISTERS // (32 * warps * ctas)),
        )
        for rows, cols, depth, warps, stages, ctas in tiles
    ]


FORWARD_CONFIGS = configs(
    (128, 256, 64, 8, 3, 1),
    (128, 256, 64, 8, 4, 1),
    (256, 128, 64, 8, 4, 1),
    (128, 128, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 128, 32, 4, 6, 2),
)
BACKWARD_CONFIGS = configs(
    (128, 256, 64, 8, 3, 1),
    (256, 128, 64, 8, 3, 1),
    (128, 128, 64, 4, 2, 2),
    (128, 128, 64, 8, 2, 2),
    (128, 128, 32, 4, 5, 2),
)


def strips(arguments: dict[str, Any]) -> int:
    """Programs that share the rows of each column tile."""
    return max(1, arguments["NUM_SMS"] * arguments["CTAS_PER_SM"] // -(-arguments["N"] // arguments["BLOCK_N"]))


def grid(arguments: dict[str, Any]) -> tuple[int]:
    return (strips(arguments) * -(-arguments["N"] // arguments["BLOCK_N"]),)


@triton.jit
def store_hidden(z, bias_ptr, h_desc, a_desc, row, col, N: tl.constexpr, ACT: tl.constexpr):
    cols = col + tl.arange(0, z.shape[1])
    h = (z + tl.load(bias_ptr + cols, cols < N, 0.0).to(tl.float32)[None, :]).to(h_desc.dtype)
    h_desc.store([row, col], h)
    a_desc.store([row, col], activate(h.to(tl.float32), ACT).to(a_desc.dtype))


@autotune(FORWARD_CONFIGS, default=3, key=["is_large", "N", "K", "ACT"])
@triton.jit(do_not_specialize=["M", "is_large"])
def forward_kernel(
    x_desc, w_desc, bias_ptr, h_desc, a_desc, M, is_large,
    N: tl.constexpr, K: tl.constexpr, NUM_SMS: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    CTAS_PER_SM: tl.constexpr,
):  # fmt: skip
    col_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    programs: tl.constexpr = NUM_SMS * CTAS_PER_SM
    strips: tl.constexpr = tl.constexpr(programs // col_tiles if col_tiles < programs else 1)
    col = tl.program_id(0) % col_tiles * BLOCK_N
    # Rows past the last one are out of bounds and have no effect.
    for step in tl.range(0, (M + BLOCK_M * strips - 1) // (BLOCK_M * strips), flatten=True):
        row = (step * strips + tl.program_id(0) // col_tiles) * BLOCK_M
        left, right = halves(product(x_desc, w_desc, row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, True))
        store_hidden(left, bias_ptr, h_desc, a_desc, row, col, N, ACT)
        store_hidden(right, bias_ptr, h_desc, a_desc, row, col + BLOCK_N // 2, N, ACT)


@triton.jit
def sum_within_threads(z, WARPS: tl.constexpr):
    """Sums over the rows that a thread holds of a product: 8 apart, and of all groups of 16 rows for each warp."""
    total = tl.sum(z.reshape(z.shape[0] // (16 * WARPS), 16 * WARPS, z.shape[1]), 0)
    return tl.sum(total.reshape(WARPS, 2, 8, z.shape[1]), 1)


@triton.jit
def in_layout_of(like, x):
    """x: an instruction that the assembler removes lets the compiler see that both operands belong together. It would
    compute the activation twice, once as the product lies in the threads and once as memory does.
    """
    if COMPILED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [x, like], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def store_gradient(da, h_desc, a_desc, dh_desc, row, col, ACT: tl.constexpr, WARPS: tl.constexpr):
    h = in_layout_of(da, h_desc.load([row, col]).to(tl.float32))
    a, act_grad = activate_with_grad(h, ACT)
    a_desc.store([row, col], a.to(a_desc.dtype))
    dh = da * act_grad
    dh_desc.store([row, col], dh.to(dh_desc.dtype))
    return sum_within_threads(dh, WARPS)


@triton.jit
def store_sum(total, sum_ptr, strip, col, N: tl.constexpr, SUM_ROWS: tl.constexpr, STRIPS: tl.constexpr):
    """Write the sum of all rows of this program, and zeros to rows of the partial sums that have no program."""
    cols = col + tl.arange(0, total.shape[2])
    value = tl.sum(tl.sum(total, 1), 0)  # within warps, then across them
    for i in tl.static_range((SUM_ROWS + STRIPS - 1) // STRIPS):
        tl.store(sum_ptr + (strip + i * STRIPS) * N + cols, value, (cols < N) & (strip + i * STRIPS < SUM_ROWS))
        value = tl.zeros_like(value)


@autotune(BACKWARD_CONFIGS, default=2, key=["is_large", "N", "K", "ACT"])
@triton.jit(do_not_specialize=["M", "is_large"])
def backward_kernel(
    x_desc, w_desc, h_desc, a_desc, dh_desc, sum_ptr, M, is_large,
    N: tl.constexpr, K: tl.constexpr, NUM_SMS: tl.constexpr, SUM_ROWS: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    CTAS_PER_SM: tl.constexpr,
):  # fmt: skip
    col_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    programs: tl.constexpr = NUM_SMS * CTAS_PER_SM
    strips: tl.constexpr = tl.constexpr(programs // col_tiles if col_tiles < programs else 1)
    col, strip = tl.program_id(0) % col_tiles * BLOCK_N, tl.program_id(0) // col_tiles
    HALF: tl.constexpr = BLOCK_N // 2
    left_sum = sum_within_threads(tl.zeros((BLOCK_M, HALF), dtype=tl.float32), WARPS)
    right_sum = left_sum
    # Rows past the last one are loaded as zeros and not stored.
    for step in tl.range(0, (M + BLOCK_M * strips - 1) // (BLOCK_M * strips), flatten=True):
        row = (step * strips + strip) * BLOCK_M
        left, right = halves(product(x_desc, w_desc, row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, False))
        left_sum += store_gradient(left, h_desc, a_desc, dh_desc, row, col, ACT, WARPS)
        right_sum += store_gradient(right, h_desc, a_desc, dh_desc, row, col + HALF, ACT, WARPS)
    store_sum(left_sum, sum_ptr, strip, col, N, SUM_ROWS, strips)
    store_sum(right_sum, sum_ptr, strip, col + HALF, N, SUM_ROWS, strips)


def descriptors(*tensors: Tensor) -> list[TensorDescriptor]:
    return [TensorDescriptor.from_tensor(tensor, [16, 16]) for tensor in tensors]


def hidden(x: Tensor, up: Tensor, up_bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """As the reference."""
    x, up = x.contiguous(), up.contiguous()
    (rows, width), sms = x.shape, num_sms(x.device)
    h, a = (x.new_empty(rows, len(up)) for _ in range(2))
    run = fused_multiply_add(forward_kernel)
    with launching("channel_mlp", x):
        run[grid](
            *descriptors(x, up), up_bias, *descriptors(h, a),
            rows if COMPILED else tl.constexpr(rows), int(rows >= 128 * sms),
            N=len(up), K=width, NUM_SMS=sms, ACT=tanh_code(act, x.dtype),
        )  # fmt: skip
    return h, a


def hidden_backward(dy: Tensor, down: Tensor, h: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    dy, down, h = dy.contiguous(), down.contiguous(), h.contiguous()
    (rows, channels), sms = h.shape, num_sms(h.device)
    a, dh = torch.empty_like(h), torch.empty_like(h)
    most_strips = max(strips({"NUM_SMS": sms, "N": channels, **config.kwargs}) for config in BACKWARD_CONFIGS)
    partial_sums = torch.empty(most_strips, channels, dtype=torch.float32, device=h.device)
    run = fused_multiply_add(backward_kernel)
    with launching("channel_mlp_backward", h):
        run[grid](
            *descriptors(dy, down, h, a, dh), partial_sums,
            rows if COMPILED else tl.constexpr(rows), int(rows >= 128 * sms),
            N=channels, K=dy.shape[1], NUM_SMS=sms, SUM_ROWS=most_strips, ACT=tanh_code(act, h.dtype),
        )  # fmt: skip
    return a, dh, sum_rows(partial_sums, h.dtype)
