"""The fused product over tokens is within twice the error of eager PyTorch against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allmlp import kernels
from allmlp.kernels import has_gluon, has_old_triton, has_tma
from allmlp.kernels.layer_norm.reference import layer_norm_stats
from allmlp.kernels.token_mix import reference
from allmlp.kernels.token_mix.reference import TokenMixEpilogue
from kernels.compare import DEVICE, DTYPES, assert_within_twice_eager, randn

pytest.importorskip("triton", minversion="3.6")


def random_inputs(
    norm: str, combine: str, layer_scale: bool, shape: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor, TokenMixEpilogue]:
    """x, matrix and epilogue in float64; shape: batch, rows, tokens, channels."""
    batch, rows, tokens, channels = shape
    x, matrix = randn(batch, tokens, channels) + 0.3, randn(rows, tokens, std=tokens**-0.5)
    deferred_bias = randn(channels) if norm == "layer" else None
    mean, rstd = layer_norm_stats(x, 1e-6, deferred_bias) if norm == "layer" else (None, None)
    epilogue = TokenMixEpilogue(
        bias=randn(rows),
        norm_weight=randn(channels) if norm != "none" else None,
        norm_bias=randn(channels) if norm != "none" else None,
        mean=mean,
        rstd=rstd,
        deferred_bias=deferred_bias,
        other=randn(batch, rows, channels) if combine != "none" else None,
        layer_scale=randn(channels) if layer_scale else None,
    )
    return x, matrix, epilogue


def cast(epilogue: TokenMixEpilogue, dtype: torch.dtype) -> TokenMixEpilogue:
    """The operands as the kernel gets them: statistics in float32, the rest in `dtype`."""
    dtypes = {"mean": torch.float32, "rstd": torch.float32}
    operands = epilogue._asdict().items()
    return TokenMixEpilogue(
        **{name: None if value is None else value.to(DEVICE, dtypes.get(name, dtype)) for name, value in operands}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "combine", "layer_scale", "act"),
    [
        ("none", "none", False, "none"),
        ("affine", "add", True, "none"),
        ("layer", "multiply", False, "none"),
        ("layer", "none", False, "gelu"),
        ("layer", "none", False, "gelu_tanh"),
        ("none", "add", False, "relu"),
    ],
)
@pytest.mark.parametrize("channels", [64, 70], ids=["aligned", "unaligned"])
def test_token_mix(norm: str, combine: Any, layer_scale: bool, act: Any, channels: int, dtype: torch.dtype) -> None:
    from allmlp.kernels.token_mix import triton

    x, matrix, epilogue = random_inputs(norm, combine, layer_scale, (2, 70, 41, channels))  # two tiles of rows
    x, matrix, epilogue = x.to(DEVICE, dtype), matrix.to(DEVICE, dtype), cast(epilogue, dtype)
    # The exact result is that of the rounded inputs, so that only the arithmetic is measured.
    epilogue64 = TokenMixEpilogue(*(None if value is None else value.double().cpu() for value in epilogue))
    exact = reference.token_mix(x.double().cpu(), matrix.double().cpu(), epilogue64, act, combine)
    eager_epilogue = TokenMixEpilogue(*(None if value is None else value.to(dtype) for value in epilogue))
    eager = reference.token_mix(x, matrix, eager_epilogue, act, combine)
    assert_within_twice_eager(triton.token_mix(x, matrix, epilogue, act, combine), eager, exact)


@pytest.mark.parametrize("channels", [64, 70], ids=["aligned", "unaligned"])
def test_gate_of_another_dtype(channels: int) -> None:
    from allmlp.kernels.token_mix import triton

    dtype = torch.float32 if DEVICE == "cpu" else torch.float8_e4m3fn  # the interpreter does not round to fp8 correctly
    x, matrix, epilogue = random_inputs("layer", "multiply", True, (2, 70, 41, channels))
    x, matrix, epilogue = x.to(DEVICE, DTYPES[1]), matrix.to(DEVICE, DTYPES[1]), cast(epilogue, torch.float32)
    assert epilogue.other is not None
    epilogue = epilogue._replace(other=epilogue.other.to(dtype))
    actual = triton.token_mix(x, matrix, epilogue, combine="multiply")
    expected = reference.token_mix(x.float(), matrix.float(), epilogue, combine="multiply")
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-3, atol=2e-2)  # one fp8 step


def test_a_gate_in_fp8_saturates() -> None:
    epilogue = TokenMixEpilogue(other=torch.full((1, 4, 16), 100.0).to(torch.float8_e4m3fn))
    y = reference.token_mix(torch.full((1, 4, 16), 100.0), torch.eye(4), epilogue, combine="multiply")
    assert (y.float() == 448).all()


@pytest.mark.parametrize(
    ("capability", "cuda", "version", "expected"),
    [
        ((9, 0), "13.0", "3.6.0", True),
        ((9, 0), "13.0", "3.9.0", True),
        ((8, 0), "13.0", "3.6.0", False),
        ((10, 0), "13.0", "3.6.0", False),
        ((9, 0), "13.0", "3.10.0", False),
        ((9, 4), None, "3.6.0", False),
    ],
    ids=["Hopper", "newer Triton", "Ampere", "Blackwell", "another Triton", "AMD"],
)
def test_has_gluon(
    capability: tuple[int, int], cuda: str | None, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("triton.__version__", version)
    assert has_gluon(torch.device("cuda")) is expected


@pytest.mark.parametrize(("version", "is_old"), [("3.4.0", True), ("3.6.0", False), ("3.10.0+git1234", False)])
def test_old_triton(version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "version", lambda name: version)
    assert has_old_triton.__wrapped__() is is_old


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_has_tma(capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert has_tma(torch.device("cuda")) is expected and has_tma(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu" or not has_gluon(torch.device(DEVICE)), reason="needs a Hopper GPU and Triton 3.6")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((22, 196, 648), torch.bfloat16),
        ((150, 196, 648), torch.bfloat16),
        ((70, 300, 136), torch.float16),
    ],
    ids=["one tile per program", "many tiles per program", "two row tiles"],
)
@pytest.mark.parametrize(
    ("norm", "combine", "layer_scale"), [("layer", "multiply", False), ("affine", "add", True), ("none", "none", False)]
)
def test_hopper_matches_the_portable_kernel(
    norm: str, combine: Any, layer_scale: bool, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Up to rounding; x and `other` are halves of one tensor, as in gMLP."""
    from allmlp.kernels.token_mix import hopper, triton

    batch, tokens, channels = sizes
    x, matrix, epilogue = random_inputs(norm, combine, layer_scale, (batch, tokens, tokens, channels))
    other = x if epilogue.other is None else epilogue.other
    other, x = torch.cat([other, x], 2).to(DEVICE, dtype).chunk(2, 2)
    epilogue = cast(epilogue, dtype)._replace(other=None if epilogue.other is None else other)
    matrix = matrix.to(DEVICE, dtype)
    actual, expected = (module.token_mix(x, matrix, epilogue, combine=combine) for module in (hopper, triton))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-2)
