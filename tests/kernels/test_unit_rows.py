"""Rows of an Affine layer in fp8: the kernel matches its reference, whose bounds hold."""

from __future__ import annotations

import pytest
import torch

from allmlp.kernels.unit_rows import reference
from allmlp.kernels.unit_rows.reference import FP8_MAX
from kernels.compare import DEVICE, DTYPES, randn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [48, 70])
@pytest.mark.parametrize("has_deferred_bias", [True, False])
def test_unit_rows(channels: int, has_deferred_bias: bool, dtype: torch.dtype) -> None:
    triton = pytest.importorskip("allmlp.kernels.unit_rows.triton")
    x = (randn(11, channels) * torch.logspace(-3, 3, 11)[:, None]).to(DEVICE, dtype)
    x[3] = 0
    weight, bias, deferred_bias = (randn(channels).to(DEVICE, torch.float32) for _ in range(3))
    given = x, weight, bias, deferred_bias if has_deferred_bias else None
    # The interpreter does not round to fp8 correctly.
    out = torch.float32 if DEVICE == "cpu" else torch.float8_e4m3fn
    (y, row_scale), (expected, expected_scale) = (m.unit_rows(*given, dtype=out) for m in (triton, reference))
    torch.testing.assert_close(row_scale, expected_scale)
    torch.testing.assert_close(y.float(), expected.float(), rtol=2**-3, atol=2**-9)  # one fp8 step


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_no_row_overflows(size: float) -> None:
    """Not if all of its length is in one channel, either."""
    x, ones = torch.zeros(2, 64), torch.ones(64)
    x[0, 3], x[1] = size, size
    y, row_scale = reference.unit_rows(x, ones, 0 * ones)
    assert y.float().abs().max() <= FP8_MAX and row_scale.isfinite().all() and (row_scale > 0).all()
    if size == 1:
        torch.testing.assert_close(y.float() * row_scale[:, None], x, rtol=2**-4, atol=0)
