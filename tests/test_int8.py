"""8-bit storage of weights: what is kept exactly, how large the error can be, and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import allmlp
from allmlp.weights.int8 import dequantize, quantize
from tiny import tiny_model


@given(
    st.integers(0, 2**32), st.integers(2, 5), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.floats(-20, 20)
)
@settings(max_examples=60, deadline=None)
def test_error_is_at_most_half_a_level(seed: int, rows: int, shape: list[int], exponent: float) -> None:
    weight = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed)) * 2**exponent
    stored = quantize({"weight": weight})
    levels, scale = stored["weight"], stored["weight.scale"]
    assert levels.dtype == torch.int8 and levels.shape == weight.shape and scale.dtype == torch.bfloat16
    error = (dequantize(levels, scale) - weight).flatten(1).abs().amax(1)
    # The largest entry is at most 0.4 % beyond the last level, because the scale is rounded to bfloat16.
    assert (error <= 0.5001 * scale.float()).all()
    assert (levels.flatten(1).abs().amax(1) == 127).all(), "the range of a row is used"


def test_saved_again_it_is_the_same(tmp_path: Path) -> None:
    model = tiny_model("gmlp_ti16", torch.float32)
    allmlp.save(model, tmp_path / "a", dtype=torch.int8)
    once = allmlp.load(tmp_path / "a")
    allmlp.save(once, tmp_path / "b", dtype=torch.int8)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_stored(tmp_path: Path) -> None:
    """Matrices in 8 bits, vectors unchanged; the loaded model is float32 whatever is asked of the file."""
    model = tiny_model("gmlp_ti16", torch.float32)
    allmlp.save(model, tmp_path, dtype=torch.int8)
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in model.state_dict().items():
        if weight.ndim > 1:
            assert stored[name].dtype == torch.int8 and stored[f"{name}.scale"].shape == weight.shape[:1]
        else:
            assert torch.equal(stored[name], weight) and f"{name}.scale" not in stored
    for dtype in (torch.float32, None):
        loaded = allmlp.load(tmp_path, dtype=dtype)
        assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    assert allmlp.load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    x = model.dummy_inputs(2)
    torch.testing.assert_close(loaded(*x), model(*x), atol=0.02 * float(model(*x).detach().abs().max()), rtol=0)


def test_zero_rows_stay_zero() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    stored = quantize({"w": weight})
    assert torch.equal(dequantize(stored["w"], stored["w.scale"])[0], weight[0])


def test_other_precisions(tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.float32)
    allmlp.save(model, tmp_path, dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float16}
    with pytest.raises(allmlp.UserError, match=r"cannot be stored as torch\.int32: choose"):
        allmlp.save(model, tmp_path, dtype=torch.int32)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.float32)
    with torch.no_grad():
        model.head.proj.weight[1, 0] = torch.inf  # type: ignore[union-attr]
    with pytest.raises(allmlp.UserError, match=r"head\.proj\.weight has values that are not finite"):
        allmlp.save(model, tmp_path, dtype=torch.int8)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("head.proj.weight.scale", None, r"1 missing \(head\.proj\.weight\.scale\)"),
        ("head.proj.weight.scale", torch.ones(2), r"1 of another shape \(head\.proj\.weight\.scale\)"),
        ("head.proj.bias.scale", torch.ones(2), r"1 unexpected \(head\.proj\.bias\.scale\)"),
    ],
)
def test_scales_that_do_not_match(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    allmlp.save(tiny_model("mixer_s32", torch.float32), tmp_path, dtype=torch.int8)
    state = load_file(tmp_path / "model.safetensors")
    state.pop(name, None)
    save_file(state | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(allmlp.UserError, match=message):
        allmlp.load(tmp_path)
