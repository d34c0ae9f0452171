"""The second half of a gMLP layer as one kernel is its definition."""

from __future__ import annotations

import pytest
import torch

from allmlp.kernels.gate_linear import reference
from allmlp.kernels.gate_linear.reference import MOST_TOKENS, fits
from allmlp.kernels.row_norm.reference import row_stats
from allmlp.kernels.token_mix.reference import Around
from kernels.test_token_mix import DEVICE, TYPES, check, draw, to

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 196, 96, 64), (3, 49, 64, 128), (2, 64, 200, 256), (1, 17, 40, 64)], ids=str)
def test_all_of_it(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Pictures of 14 x 14 tokens, sizes that are powers of two and such that are not."""
    from allmlp.kernels.gate_linear import triton
    from allmlp.kernels.token_mix.triton import Matrix

    batch, tokens, channels, width = sizes
    assert fits(tokens, width, channels)
    hidden, matrix = draw(batch, tokens, 2 * channels) + 0.3, draw(tokens, tokens, spread=tokens**-0.5)
    around = Around(draw(tokens), draw(channels), draw(channels), *row_stats(hidden[..., channels:], 1e-6))
    weight, z, lift = draw(width, channels, spread=channels**-0.5), draw(batch, tokens, width), draw(width)
    truth = reference.gate_linear(hidden, matrix, around, weight, z, lift, 1e-6)

    hidden, matrix, weight, z = (tensor.to(DEVICE, dtype) for tensor in (hidden, matrix, weight, z))
    same = Around(*(None if value is None else value.to(DEVICE, dtype) for value in around))
    eager = reference.gate_linear(hidden, matrix, same, weight, z, lift.to(DEVICE, dtype), 1e-6)
    wide, lift = to(around, torch.float32), lift.to(DEVICE, torch.float32)
    mine = triton.gate_linear(hidden, Matrix.of(matrix), wide, weight, z.clone(), lift, 1e-6)
    for one, other, right in zip(mine, eager, truth, strict=True):
        check(one, other, right)


def test_tokens_are_cut_into_full_pieces() -> None:
    from allmlp.kernels.gate_linear.triton import pieces

    assert pieces(196) == (128, 64, 16) and pieces(256) == (128, 128, 0) and pieces(64) == (64, 0, 0)
    for tokens in range(16, MOST_TOKENS + 1):
        first, second, third = pieces(tokens)
        assert first + second <= tokens <= first + second + third and (third > 0) == (first + second < tokens)
        assert all(size == 0 or size in (16, 32, 64, 128) for size in (first, second, third))
