"""The LayerNorm kernels are within twice the error of eager PyTorch against float64."""

from __future__ import annotations

import pytest
import torch

from allmlp.kernels.layer_norm import reference
from kernels.compare import DEVICE, DTYPES, assert_within_twice_eager, randn

pytest.importorskip("triton", minversion="3.6")
EPS = 0.1  # large enough to notice when it is missing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels", [48, 70])
def test_layer_norm_and_stats(channels: int, affine: bool, dtype: torch.dtype) -> None:
    from allmlp.kernels.layer_norm import triton

    x = (randn(3, 11, channels) + 2).to(DEVICE, dtype)
    weight, bias, deferred_bias = (randn(channels).to(DEVICE, dtype) if affine else None for _ in range(3))
    x64, weight64, bias64, deferred64 = (
        None if value is None else value.double().cpu() for value in (x, weight, bias, deferred_bias)
    )
    assert x64 is not None
    exact = reference.layer_norm(x64, weight64, bias64, EPS, deferred64)
    eager = reference.layer_norm(x, weight, bias, EPS, deferred_bias)
    assert_within_twice_eager(triton.layer_norm(x, weight, bias, EPS, deferred_bias), eager, exact)
    stats = triton.layer_norm_stats(x, EPS, deferred_bias)
    for actual, expected in zip(stats, reference.layer_norm_stats(x64, EPS, deferred64), strict=True):
        torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_reference_matches_torch() -> None:
    x, weight, bias = randn(2, 5, 16), randn(16), randn(16)
    expected = torch.nn.functional.layer_norm(x, (16,), weight, bias, EPS)
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, EPS), expected)


def test_unevenly_spaced_rows_are_rejected() -> None:
    from allmlp.kernels.layer_norm import triton

    with pytest.raises(AssertionError, match="evenly spaced"):
        triton.layer_norm(randn(3, 8, 16).float().to(DEVICE)[:, :5], None, None, EPS)


def test_output_dtype() -> None:
    from allmlp.kernels.layer_norm import triton

    x = randn(5, 16).float().to(DEVICE)
    actual, expected = (m.layer_norm(x, None, None, EPS, dtype=torch.float16) for m in (triton, reference))
    assert actual.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "channels", "width"), [(49, 300, 56), (8, 24, 8)])
def test_layer_norm_transposed(tokens: int, channels: int, width: int, dtype: torch.dtype) -> None:
    from allmlp.kernels.layer_norm import triton

    x = (randn(2, tokens, channels) + 3).to(DEVICE, dtype)
    weight, bias, deferred_bias = (randn(channels).to(DEVICE, dtype) for _ in range(3))
    x64, weight64, bias64, deferred64 = (value.double().cpu() for value in (x, weight, bias, deferred_bias))
    exact = reference.layer_norm_transposed(x64, weight64, bias64, EPS, deferred64, width)
    eager = reference.layer_norm_transposed(x, weight, bias, EPS, deferred_bias, width)
    actual = triton.layer_norm_transposed(x, weight, bias, EPS, deferred_bias, width)
    assert_within_twice_eager(actual, eager, exact)
    assert not actual[:, :, tokens:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_mean(affine: bool, dtype: torch.dtype) -> None:
    from allmlp.kernels.layer_norm import triton

    x = (randn(2, 49, 300) + 3).to(DEVICE, dtype)  # two programs per example
    weight, bias, deferred_bias = (randn(300).to(DEVICE, dtype) if affine else None for _ in range(3))
    x64, weight64, bias64, deferred64 = (
        None if value is None else value.double().cpu() for value in (x, weight, bias, deferred_bias)
    )
    assert x64 is not None
    exact = reference.layer_norm_mean(x64, weight64, bias64, EPS, deferred64)
    eager = reference.layer_norm(x, weight, bias, EPS, deferred_bias).mean(1)
    actual = triton.layer_norm_mean(x, weight, bias, EPS, deferred_bias)
    assert actual.dtype == dtype
    assert_within_twice_eager(actual, eager, exact)


def test_layer_norm_mean_without_eps() -> None:
    """Rows past the last token have no deviation."""
    from allmlp.kernels.layer_norm import triton

    x = randn(2, 6, 16).float().to(DEVICE)
    actual, expected = (module.layer_norm_mean(x, None, None, 0.0) for module in (triton, reference))
    torch.testing.assert_close(actual, expected)
