"""The hidden layer of the channel MLP and its gradient, with the activation in the epilogue of the product.

Beside the product itself, H and A are written once, and in the backward pass H is read once: the gradient of A never
reaches memory. Programs loop over the row tiles of the same columns. So each sums its dH for the bias in registers, and
threads and warps exchange sums only after the loop; partial sums of all programs are added afterwards.

A is computed from the rounded H, which is all that the backward pass has: both passes have the same A.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.activation.triton import activate, activate_with_grad, tanh_code
from allmlp.kernels.launch import fused_multiply_add, launching, num_sms
from allmlp.kernels.linear.triton import COMPILED, halves, product
from allmlp.kernels.row_sum.triton import sum_rows

REGISTERS = 65536
"""Of a multiprocessor; a thread has at most 255."""


class Tile(NamedTuple):
    """Rows, columns and depth of a product's tile, and how many warps, loads and programs are under way."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int

    def strips(self, cols: int, sms: int) -> int:
        """Programs that share the rows of each column tile."""
        return max(1, sms * self.programs_per_sm // -(-cols // self.cols))

    def grid(self, cols: int, sms: int) -> tuple[int]:
        return (self.strips(cols, sms) * -(-cols // self.cols),)

    def options(self, cols: int, sms: int) -> dict[str, int]:
        """Arguments of the kernel."""
        return {
            "STRIPS": self.strips(cols, sms), "BLOCK_M": self.rows, "BLOCK_N": self.cols, "BLOCK_K": self.depth,
            "num_warps": self.warps, "num_stages": self.stages,
            "maxnreg": min(255, REGISTERS // (32 * self.warps * self.programs_per_sm)),
        }  # fmt: skip


FORWARD, BACKWARD = Tile(128, 128, 64, 8, 3, 2), Tile(128, 128, 32, 4, 5, 2)
"""The fastest, or within 2 % of it, of six and five at widths 384 and 768 on an H200."""


def descriptor(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, cols])


@triton.jit
def store_hidden(z, bias_ptr, h_desc, a_desc, row, col, N: tl.constexpr, ACT: tl.constexpr):
    cols = col + tl.arange(0, z.shape[1])
    h = (z + tl.load(bias_ptr + cols, cols < N, 0.0).to(tl.float32)[None, :]).to(h_desc.dtype)
    h_desc.store([row, col], h)
    a_desc.store([row, col], activate(h.to(tl.float32), ACT).to(a_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x_desc, w_desc, bias_ptr, h_desc, a_desc, M,
    N: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, STRIPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    col_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    col = tl.program_id(0) % col_tiles * BLOCK_N
    # Rows past the last one are out of bounds and have no effect.
    for step in tl.range(0, (M + BLOCK_M * STRIPS - 1) // (BLOCK_M * STRIPS), flatten=True):
        row = (step * STRIPS + tl.program_id(0) // col_tiles) * BLOCK_M
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
def store_sum(total, sum_ptr, strip, col, N: tl.constexpr):
    cols = col + tl.arange(0, total.shape[2])
    total = tl.sum(tl.sum(total, 1), 0)  # within warps, then across them
    tl.store(sum_ptr + strip * N + cols, total, cols < N)


@triton.jit(do_not_specialize=["M"])
def backward_kernel(
    x_desc, w_desc, h_desc, a_desc, dh_desc, sum_ptr, M,
    N: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, STRIPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    col_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    col, strip = tl.program_id(0) % col_tiles * BLOCK_N, tl.program_id(0) // col_tiles
    HALF: tl.constexpr = BLOCK_N // 2
    left_sum = sum_within_threads(tl.zeros((BLOCK_M, HALF), dtype=tl.float32), WARPS)
    right_sum = left_sum
    # Rows past the last one are loaded as zeros and not stored.
    for step in tl.range(0, (M + BLOCK_M * STRIPS - 1) // (BLOCK_M * STRIPS), flatten=True):
        row = (step * STRIPS + strip) * BLOCK_M
        left, right = halves(product(x_desc, w_desc, row, col, K, BLOCK_M, BLOCK_N, BLOCK_K, False))
        left_sum += store_gradient(left, h_desc, a_desc, dh_desc, row, col, ACT, WARPS)
        right_sum += store_gradient(right, h_desc, a_desc, dh_desc, row, col + HALF, ACT, WARPS)
    store_sum(left_sum, sum_ptr, strip, col, N)
    store_sum(right_sum, sum_ptr, strip, col + HALF, N)


def hidden(x: Tensor, up: Tensor, up_bias: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """As the reference."""
    x, up = x.contiguous(), up.contiguous()
    (rows, width), channels, sms, tile = x.shape, len(up), num_sms(x.device), FORWARD
    h, a = (x.new_empty(rows, channels) for _ in range(2))
    run = fused_multiply_add(forward_kernel)
    with launching("channel_mlp", x):
        run[tile.grid(channels, sms)](
            descriptor(x, tile.rows, tile.depth), descriptor(up, tile.cols, tile.depth), up_bias,
            *(descriptor(y, tile.rows, tile.cols // 2) for y in (h, a)), rows if COMPILED else tl.constexpr(rows),
            N=channels, K=width, ACT=tanh_code(act, x.dtype), **tile.options(channels, sms),
        )  # fmt: skip
    return h, a


def hidden_backward(dy: Tensor, down: Tensor, h: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    dy, down, h = dy.contiguous(), down.contiguous(), h.contiguous()
    (rows, channels), sms, tile = h.shape, num_sms(h.device), BACKWARD
    a, dh = torch.empty_like(h), torch.empty_like(h)
    partial_sums = torch.empty(tile.strips(channels, sms), channels, dtype=torch.float32, device=h.device)
    run = fused_multiply_add(backward_kernel)
    with launching("channel_mlp_backward", h):
        run[tile.grid(channels, sms)](
            descriptor(dy, tile.rows, tile.depth), descriptor(down, tile.depth, tile.cols),
            *(descriptor(y, tile.rows, tile.cols // 2) for y in (h, a, dh)), partial_sums,
            rows if COMPILED else tl.constexpr(rows),
            N=channels, K=dy.shape[1], ACT=tanh_code(act, h.dtype), WARPS=tile.warps, **tile.options(channels, sms),
        )  # fmt: skip
    return a, dh, sum_rows(partial_sums, h.dtype)
