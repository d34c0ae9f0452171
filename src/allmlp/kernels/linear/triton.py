"""One kernel for the product and all that stands around it.

Programs stay and make tile after tile, loading the next while they finish the last. In an epilogue the matrix units
rest: two small programs on a processor do not rest at the same time.

LayerNorm of the second half of Y needs its mean and spread. Every tile leaves those of its own n channels:

    mean = mean of means,   n p spread^2 = sum of away + n sum (mean of part - mean)^2
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from allmlp.kernels.activation.triton import SHORT_GELU, activate, code
from allmlp.kernels.linear.reference import PART, Beside
from allmlp.kernels.token_mix.reference import Act

HARDWARE_GELU = 5
HARDWARE = not triton.knobs.runtime.interpret
"""Whether there is an instruction for tanh, and loops of any length: the interpreter has neither."""
DEEP = 128
"""Bytes of a row of X that are loaded at once."""


def blocks(arguments: dict[str, Any]) -> None:
    """The sizes that autotuning tries are those in which the copy engine moves."""
    depth = DEEP // arguments["x_copy"].base.element_size()
    arguments["x_copy"].block_shape = [arguments["BM"], depth]
    arguments["w_copy"].block_shape = [arguments["BN"], depth]
    for name in ("y_copy", "o_copy"):
        if arguments[name] is not None:
            arguments[name].block_shape = [arguments["BM"], PART]


CONFIGS = [
    triton.Config(
        {"BM": rows, "BN": columns, "TOGETHER": together}, num_warps=warps, num_stages=stages, pre_hook=blocks
    )
    for rows, columns, warps, stages, together in (
        (128, 256, 8, 3, 1),
        (128, 256, 8, 4, 1),
        (256, 128, 8, 3, 1),
        (128, 128, 8, 3, 2),
        (128, 128, 4, 2, 2),
        (64, 256, 4, 2, 2),
        (64, 128, 4, 3, 3),
    )
]


# The interpreter has nothing to time: one of the sizes is enough there.
@triton.autotune(
    CONFIGS[:1] if triton.knobs.runtime.interpret else CONFIGS, key=["size", "N", "K", "DEPTH", "ACT", "OTHER", "STATS"]
)
@triton.jit
def kernel(
    x_copy, w_copy, y_copy, o_copy, scale_ptr, bias_ptr, gain_ptr, mean_ptr, away_ptr, M, size,
    N: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, PROCESSORS: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, OTHER: tl.constexpr, STATS: tl.constexpr,
    ACT: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (N + BN - 1) // BN
    programs: tl.constexpr = PROCESSORS * TOGETHER
    for turn in tl.range(0, ((M + BM - 1) // BM * columns + programs - 1) // programs, flatten=True):
        # Tiles of the same rows are neighbours: W is small and stays in the cache. After the last tile all is outside.
        tile = turn * programs + tl.program_id(0)
        row, column = tile // columns * BM, tile % columns * BN
        z = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, K, DEPTH):
            x = x_copy.load([row, start])
            w = w_copy.load([column, start])
            z = tl.dot(x, w.T, z)
        if BN == 2 * PART:
            left, right = z.reshape(BM, 2, PART).permute(0, 2, 1).split()
            finish(
                left, y_copy, o_copy, scale_ptr, bias_ptr, gain_ptr, mean_ptr, away_ptr, row, column, M, N,
                SCALE, BIAS, GAIN, OTHER, STATS, ACT, BM, PART,
            )  # fmt: skip
            finish(
                right, y_copy, o_copy, scale_ptr, bias_ptr, gain_ptr, mean_ptr, away_ptr, row, column + PART, M, N,
                SCALE, BIAS, GAIN, OTHER, STATS, ACT, BM, PART,
            )  # fmt: skip
        else:
            finish(
                z, y_copy, o_copy, scale_ptr, bias_ptr, gain_ptr, mean_ptr, away_ptr, row, column, M, N,
                SCALE, BIAS, GAIN, OTHER, STATS, ACT, BM, PART,
            )  # fmt: skip


@triton.jit
def hardware_gelu(h):
    """GELU of z = 2 h as h (1 + tanh(0.80016 z + 0.03470 z^3)): within 3e-4 + 2.5e-4 |z|.

    Every output of a short product needs one; exponential and division would take longer than the product. The two
    numbers are those with the least error in GELU, 2.7e-4; those of its tanh form leave 4.7e-4.
    """
    u = h * (1.60031416 + 0.27760712 * h * h)
    t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    return h + h * t


@triton.jit
def finish(
    z, y_copy, o_copy, scale_ptr, bias_ptr, gain_ptr, mean_ptr, away_ptr, row, column, M, N,
    SCALE: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, OTHER: tl.constexpr, STATS: tl.constexpr,
    ACT: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    cols = column + tl.arange(0, PART)
    part_of = tl.constexpr(0.5 if ACT == 5 else 1.0)  # halved on the way, by the instruction that adds the bias
    if SCALE:
        z *= (part_of * tl.load(scale_ptr + cols, cols < N, 0.0))[None, :]
    else:
        z *= part_of
    if BIAS:
        z += (part_of * tl.load(bias_ptr + cols, cols < N, 0.0))[None, :]
    z = hardware_gelu(z) if ACT == 5 else activate(z, ACT)
    if GAIN:
        z *= tl.load(gain_ptr + cols, cols < N, 0.0)[None, :]
    if OTHER:
        z += o_copy.load([row, column]).to(tl.float32)
    if STATS:  # noqa: SIM102 - one is known when it is compiled, the other when it runs
        if column >= N // 2:
            rows, part = row + tl.arange(0, BM), (column - N // 2) // PART
            mean = tl.sum(z, 1) / PART
            # Both sums at once. What this loses where the spread is far below the mean, 16-bit numbers lose before it.
            away = tl.maximum(tl.sum(z * z, 1) - PART * mean * mean, 0.0)
            tl.store(mean_ptr + part * M + rows, mean, rows < M)
            tl.store(away_ptr + part * M + rows, away, rows < M)
    y_copy.store([row, column], z.to(y_copy.dtype))


def launch(x: Tensor, weight: Tensor, y: Tensor, beside: Beside, act: Act, stats: tuple[Tensor, Tensor] | None) -> None:
    scale, bias, gain, other = beside
    copies = [None if one is None else TensorDescriptor.from_tensor(one, [16, 16]) for one in (x, weight, y, other)]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    act_code = code(act, y.dtype)
    # What is quickest depends on how many times round the processors go, not on each batch size.
    rows, size = len(x), (len(x) // (128 * processors)).bit_length()
    run: Any = kernel
    run[lambda sizes: (processors * sizes["TOGETHER"],)](
        *copies, scale, bias, gain, *(stats or (None, None)),
        rows if HARDWARE else tl.constexpr(rows), size,
        N=len(weight), K=x.shape[1], DEPTH=DEEP // x.element_size(), PROCESSORS=processors,
        SCALE=scale is not None, BIAS=bias is not None, GAIN=gain is not None, OTHER=other is not None,
        STATS=stats is not None, ACT=HARDWARE_GELU if act_code == SHORT_GELU and HARDWARE else act_code, PART=PART,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, beside: Beside, act: Act = "none", dtype: torch.dtype | None = None) -> Tensor:
    """As the reference; the vectors beside are float32."""
    dtype = dtype or (x.dtype if beside.other is None else beside.other.dtype)
    y = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    launch(x, weight, y, beside, act, None)
    return y


def linear_stats(x: Tensor, weight: Tensor, beside: Beside, act: Act, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference: half of the channels must be a multiple of `PART`."""
    y, parts = x.new_empty(len(x), len(weight)), len(weight) // 2 // PART
    means, aways = (torch.empty(parts, len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    launch(x, weight, y, beside, act, (means, aways))
    mean, rstd = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    run: Any = join_kernel
    run[(triton.cdiv(len(x), 256),)](means, aways, mean, rstd, len(x), eps, PARTS=parts, PART=PART, BM=256)
    return y, mean, rstd


@triton.jit
def join_kernel(
    means_ptr, aways_ptr, mean_ptr, rstd_ptr, M, eps, PARTS: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    mean = tl.zeros((BM,), dtype=tl.float32)
    away = tl.zeros((BM,), dtype=tl.float32)
    for part in range(PARTS):
        mean += tl.load(means_ptr + part * M + rows, rows < M, 0.0) / PARTS
    for part in range(PARTS):
        step = tl.load(means_ptr + part * M + rows, rows < M, 0.0) - mean
        away += tl.load(aways_ptr + part * M + rows, rows < M, 0.0) + PART * step * step
    tl.store(mean_ptr + rows, mean, rows < M)
    tl.store(rstd_ptr + rows, 1 / tl.sqrt(away / (PARTS * PART) + eps), rows < M)
