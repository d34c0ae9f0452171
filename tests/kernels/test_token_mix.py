"""The fused product over tokens is its definition: within twice the error that eager PyTorch has against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allmlp.kernels import has_gluon
from allmlp.kernels.row_norm.reference import row_stats
from allmlp.kernels.token_mix import reference
from allmlp.kernels.token_mix.reference import Around

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices of bfloat16; float16 takes the same path.
TYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def draw(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * spread


def example(norm: str, combine: str, gain: bool, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Around]:
    batch, rows, tokens, channels = sizes
    x, matrix = draw(batch, tokens, channels) + 0.3, draw(rows, tokens, spread=tokens**-0.5)
    lift = draw(channels) if norm == "layer" else None
    mean, rstd = row_stats(x, 1e-6, lift) if norm == "layer" else (None, None)
    return (
        x,
        matrix,
        Around(
            bias=draw(rows),
            scale=draw(channels) if norm != "none" else None,
            shift=draw(channels) if norm != "none" else None,
            mean=mean,
            rstd=rstd,
            lift=lift,
            other=draw(batch, rows, channels) if combine != "none" else None,
            gain=draw(channels) if gain else None,
        ),
    )


def to(around: Around, dtype: torch.dtype) -> Around:
    """Tensors as the kernel gets them: statistics are float32, the rest of type `dtype`."""
    cast = {name: None if value is None else value.to(DEVICE, dtype) for name, value in around._asdict().items()}
    for name in ("mean", "rstd"):
        if cast[name] is not None:
            cast[name] = getattr(around, name).to(DEVICE, torch.float32)
    return Around(**cast)


def check(mine: Tensor, eager: Tensor, truth: Tensor) -> None:
    error, allowed = ((one.double().cpu() - truth).abs().max() for one in (mine, eager))
    assert error <= 2 * allowed + 1e-6 * truth.abs().max(), (float(error), float(allowed))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "combine", "gain", "act"),
    [
        ("none", "none", False, "none"),
        ("affine", "add", True, "none"),
        ("layer", "multiply", False, "none"),
        ("layer", "none", False, "gelu"),
        ("layer", "none", False, "gelu_tanh"),
        ("none", "add", False, "relu"),
    ],
)
@pytest.mark.parametrize("channels", [64, 70], ids=["aligned", "odd"])
def test_forward(norm: str, combine: Any, gain: bool, act: Any, channels: int, dtype: torch.dtype) -> None:
    from allmlp.kernels.token_mix import triton

    x, matrix, around = example(norm, combine, gain, (2, 37, 41, channels))
    rounded, small = to(around, dtype), (x.to(DEVICE, dtype), matrix.to(DEVICE, dtype))
    # The truth is that of the rounded inputs: what is measured is the arithmetic.
    exact = Around(*(None if value is None else value.double().cpu() for value in rounded))
    truth = reference.token_mix(small[0].double().cpu(), small[1].double().cpu(), exact, act, combine)
    eager = reference.token_mix(*small, Around(*(None if v is None else v.to(dtype) for v in rounded)), act, combine)
    check(triton.token_mix(*small, rounded, act, combine), eager, truth)


@pytest.mark.parametrize(
    ("capability", "cuda", "version", "there"),
    [
        ((9, 0), "13.0", "3.6.0", True),
        ((8, 0), "13.0", "3.6.0", False),
        ((10, 0), "13.0", "3.6.0", False),
        ((9, 0), "13.0", "3.9.0", False),
        ((9, 4), None, "3.6.0", False),
    ],
    ids=["Hopper", "Ampere", "Blackwell", "another Triton", "AMD"],
)
def test_where_gluon_is(
    capability: tuple[int, int], cuda: str | None, version: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("triton.__version__", version)
    assert has_gluon(torch.device("cuda")) is there


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu" or not has_gluon(torch.device(DEVICE)), reason="needs a Hopper GPU and Triton 3.6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(22, 196, 648), (150, 196, 648), (70, 300, 136)], ids=["a tile each", "many tiles", "two tiles of rows"]
)
@pytest.mark.parametrize(
    ("norm", "combine", "gain"), [("layer", "multiply", False), ("affine", "add", True), ("none", "none", False)]
)
def test_on_hopper_as_elsewhere(
    norm: str, combine: Any, gain: bool, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The same to rounding, and nothing left that was not written; X and the other operand are halves, as in gMLP."""
    from allmlp.kernels.token_mix import hopper, triton

    batch, tokens, channels = sizes
    x, matrix, around = example(norm, combine, gain, (batch, tokens, tokens, channels))
    other = x if around.other is None else around.other
    other, x = torch.cat([other, x], 2).to(DEVICE, dtype).chunk(2, 2)
    rounded = to(around, dtype)._replace(other=None if around.other is None else other)
    weight = matrix.to(DEVICE, dtype)
    elsewhere = triton.token_mix(x, weight, rounded, combine=combine)
    unwritten = torch.full_like(elsewhere, torch.nan)
    del unwritten  # its memory is what the next result gets
    torch.testing.assert_close(hopper.token_mix(x, weight, rounded, combine=combine), elsewhere, rtol=2**-7, atol=1e-2)
