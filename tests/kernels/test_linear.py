"""The linear map with what stands around it has the values of its definition."""

from __future__ import annotations

import pytest
import torch

from allmlp.kernels.linear import reference
from allmlp.kernels.linear.reference import Beside
from kernels.test_token_mix import DEVICE, draw

pytest.importorskip("triton")
# The interpreter multiplies no bfloat16 numbers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
NEAR = {"rtol": 2**-7, "atol": 1e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-4}


def matrices(rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(rows, depth).to(DEVICE, dtype), draw(columns, depth).to(DEVICE, dtype)


def vector(size: int) -> torch.Tensor:
    return draw(size).to(DEVICE, torch.float32)


@pytest.mark.parametrize("act", ["none", "gelu", "gelu_tanh", "relu"])
def test_everything_beside_the_product(act: str) -> None:
    from allmlp.kernels.linear import triton

    x, weight = matrices(300, 96, 272, DTYPE)
    beside = Beside(vector(272), vector(272), vector(272), draw(300, 272).to(DEVICE, DTYPE))
    mine, right = (kind.linear(x, weight, beside, act).float() for kind in (triton, reference))  # type: ignore[arg-type]
    torch.testing.assert_close(mine, right, **NEAR)


def test_nothing_beside_it_and_another_type() -> None:
    from allmlp.kernels.linear import triton

    x, weight = matrices(130, 200, 144, DTYPE)
    mine = triton.linear(x, weight, Beside(), dtype=torch.float32)
    torch.testing.assert_close(mine, reference.linear(x, weight, Beside(), dtype=torch.float32), rtol=1e-4, atol=1e-3)


def test_statistics_of_the_second_half() -> None:
    from allmlp.kernels.linear import triton

    x, weight = matrices(200, 64, 768, DTYPE)
    beside = Beside(bias=vector(768) + 3)
    mine, right = (kind.linear_stats(x, weight, beside, "gelu", 1e-6) for kind in (triton, reference))
    torch.testing.assert_close(mine[0].float(), right[0].float(), **NEAR)
    for one, other in zip(mine[1:], right[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_statistics_of_channels_that_are_all_alike() -> None:
    """Their spread is nothing but rounding, and below zero there is no root."""
    from allmlp.kernels.linear import triton

    x, weight = matrices(200, 64, 512, DTYPE)
    same = torch.linspace(0.1, 333.3, 200, device=DEVICE).to(DTYPE)
    x[:, 0], weight[256:] = same, 0
    weight[256:, 0] = 1
    _, mean, rstd = triton.linear_stats(x, weight, Beside(), "none", 1e-12)
    torch.testing.assert_close(mean, same.float(), rtol=1e-5, atol=1e-5)
    assert rstd.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_8_bits() -> None:
    from allmlp.kernels.linear import triton

    x, weight = matrices(300, 256, 384, torch.float8_e4m3fn)
    up = Beside(vector(384) * 0.1, vector(384), torch.full((384,), 16.0, device=DEVICE))
    mine, right = (kind.linear(x, weight, up, "gelu").float() for kind in (triton, reference))
    torch.testing.assert_close(mine, right, rtol=2**-3, atol=2e-2)  # one step of the 8-bit numbers
    down = Beside(vector(384) * 0.1, other=draw(300, 384).to(DEVICE, torch.bfloat16))
    mine, right = (kind.linear(x, weight, down).float() for kind in (triton, reference))
    torch.testing.assert_close(mine, right, rtol=2**-7, atol=2e-2)
