"""LayerNorm in one pass is LayerNorm: within twice the error that eager PyTorch has against float64."""

from __future__ import annotations

import pytest
import torch

from allmlp.kernels.row_norm import reference
from kernels.test_token_mix import DEVICE, TYPES, check, draw

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels", [48, 70])
def test_norm(channels: int, affine: bool, dtype: torch.dtype) -> None:
    from allmlp.kernels.row_norm import triton

    x = (draw(3, 11, channels) + 2).to(DEVICE, dtype)
    weight, bias, shift = (draw(channels).to(DEVICE, dtype) if affine else None for _ in range(3))
    exact = [None if value is None else value.double().cpu() for value in (weight, bias)]
    moved = None if shift is None else shift.double().cpu()
    truth = reference.row_norm(x.double().cpu(), *exact, 1e-6, moved)
    eager = reference.row_norm(x, weight, bias, 1e-6, shift)
    check(triton.row_norm(x, weight, bias, 1e-6, shift), eager, truth)
    mean, rstd = triton.row_stats(x, 1e-6, shift)
    for mine, right in zip((mean, rstd), reference.row_stats(x.double().cpu(), 1e-6, moved)):
        torch.testing.assert_close(mine.double().cpu(), right, rtol=1e-5, atol=1e-6)


def test_the_definition_is_torchs() -> None:
    x, weight, bias = draw(2, 5, 16), draw(16), draw(16)
    right = torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-6)
    torch.testing.assert_close(reference.row_norm(x, weight, bias, 1e-6), right)


def test_rows_must_be_evenly_spaced_and_may_change_their_type() -> None:
    from allmlp.kernels.row_norm import triton

    buffer = draw(3, 8, 16).float().to(DEVICE)
    with pytest.raises(AssertionError, match="evenly spaced"):
        triton.row_norm(buffer[:, :5], None, None, 1e-6)
    mine, right = (kind.row_norm(buffer[0, :5], None, None, 1e-6, dtype=torch.float16) for kind in (triton, reference))
    assert mine.dtype == right.dtype == torch.float16
    torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "channels", "width"), [(49, 300, 56), (8, 24, 8)])
def test_turned(tokens: int, channels: int, width: int, dtype: torch.dtype) -> None:
    from allmlp.kernels.row_norm import triton

    x = (draw(2, tokens, channels) + 3).to(DEVICE, dtype)
    vectors = [draw(channels).to(DEVICE, dtype) for _ in range(3)]
    weight, bias, shift = vectors
    exact = [one.double().cpu() for one in vectors]
    truth = reference.row_norm_turned(x.double().cpu(), *exact[:2], 1e-6, exact[2], width)
    mine = triton.row_norm_turned(x, weight, bias, 1e-6, shift, width)
    check(mine, reference.row_norm_turned(x, weight, bias, 1e-6, shift, width), truth)
    assert not mine[:, :, tokens:].any()
