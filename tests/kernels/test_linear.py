"""The fused linear kernel matches its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allmlp.kernels.linear import reference
from allmlp.kernels.linear.reference import LinearEpilogue
from kernels.compare import DEVICE, randn

pytest.importorskip("triton", minversion="3.6")
# The interpreter cannot multiply bfloat16 matrices.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = {"rtol": 2**-7, "atol": 1e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-4}


def random_matrices(rows: int, depth: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(rows, depth).to(DEVICE, dtype), randn(cols, depth).to(DEVICE, dtype)


def random_vector(size: int) -> Tensor:
    return randn(size).to(DEVICE, torch.float32)


@pytest.mark.parametrize("act", ["none", "gelu", "gelu_tanh", "relu"])
def test_full_epilogue(act: Any) -> None:
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(300, 96, 272, DTYPE)
    residual = randn(300, 272).to(DEVICE, DTYPE)
    epilogue = LinearEpilogue(random_vector(272), random_vector(272), random_vector(272), residual)
    actual, expected = (module.linear(x, weight, epilogue, act).float() for module in (triton, reference))
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_gate() -> None:
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(130, 64, 272, DTYPE)
    residual, gate = (randn(130, 272).to(DEVICE, dtype) for dtype in (DTYPE, torch.float32))
    epilogue = LinearEpilogue(bias=random_vector(272), residual=residual, gate=gate)
    actual, expected = (module.linear(x, weight, epilogue) for module in (triton, reference))
    assert actual.dtype == expected.dtype == gate.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_empty_epilogue_and_output_dtype() -> None:
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(130, 200, 144, DTYPE)
    actual, expected = (m.linear(x, weight, LinearEpilogue(), dtype=torch.float32) for m in (triton, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_stats_of_the_second_half_or_of_all_channels() -> None:
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(200, 64, 768, DTYPE)
    epilogue = LinearEpilogue(bias=random_vector(768) + 3)
    for start in (384, 256, 0):
        actual, expected = (m.linear_stats(x, weight, epilogue, "gelu", 10.0, start) for m in (triton, reference))
        torch.testing.assert_close(actual[0].float(), expected[0].float(), **TOLERANCE)
        torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-3, atol=1e-3)


def test_stats_of_equal_channels() -> None:
    """Their variance is rounding error only, which must not become negative under the square root."""
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(200, 64, 512, DTYPE)
    values = torch.linspace(0.1, 333.3, 200, device=DEVICE).to(DTYPE)
    x[:, 0], weight[256:] = values, 0
    weight[256:, 0] = 1
    _, mean, rstd = triton.linear_stats(x, weight, LinearEpilogue(), "none", 1e-12, 256)
    torch.testing.assert_close(mean, values.float(), rtol=1e-5, atol=1e-5)
    assert rstd.isfinite().all()


@pytest.mark.parametrize("scaled_rows", [False, True])
def test_fp8(scaled_rows: bool) -> None:
    from allmlp.kernels.linear import triton

    x, weight = random_matrices(300, 256, 384, torch.float8_e4m3fn)
    row_scale = random_vector(300).abs() + 0.5 if scaled_rows else None
    up = LinearEpilogue(
        random_vector(384) * 0.1, random_vector(384), torch.full((384,), 8.0, device=DEVICE), row_scale=row_scale
    )
    # The interpreter does not round to fp8 correctly.
    out = torch.float32 if DEVICE == "cpu" else torch.float8_e4m3fn
    actual, expected = (module.linear(x, weight, up, "gelu", out).float() for module in (triton, reference))
    torch.testing.assert_close(actual, expected, rtol=2**-3, atol=2e-2)  # one fp8 step
    residual = randn(300, 384).to(DEVICE, DTYPE)
    down = LinearEpilogue(random_vector(384) * 0.1, residual=residual, row_scale=row_scale)
    actual, expected = (module.linear(x, weight, down).float() for module in (triton, reference))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2e-2)
    v = up._replace(quant_scale=None)
    for module in (triton, reference):
        y, mean, rstd = module.linear_stats(x, weight, v, "gelu", 1e-6, 0, DTYPE)
        assert y.dtype == DTYPE
        torch.testing.assert_close(mean, y.float().mean(1), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(rstd, y.float().var(1, correction=0).rsqrt(), rtol=1e-3, atol=1e-3)
