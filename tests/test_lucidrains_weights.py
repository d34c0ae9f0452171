"""lucidrains' gMLP: outputs equal to g-mlp-pytorch's, lossless round trips, and errors for unsupported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import allmlp
from allmlp.layers import Dense, LayerNorm, LMHead, TinyAttention, Toeplitz
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.weights.convert import convert

peers = pytest.importorskip("g_mlp_pytorch")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
CAUSAL = {"block.channel.inner.causal": True}


def randomize(model: nn.Module) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (0.3 if weight.squeeze().dim() < 2 else 0.0))
    return model.eval()


def image_model(**options: Any) -> Any:
    sizes = {"image_size": 12, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "ff_mult": 6}
    return randomize(peers.gMLPVision(**sizes | options))


def text_model(**options: Any) -> Any:
    sizes = {"num_tokens": 11, "dim": 10, "depth": 2, "seq_len": 8, "ff_mult": 4}
    return randomize(peers.gMLP(**sizes | options))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def round_trip(peer: Any, inputs: Tensor, folder: Path, overrides: dict[str, Any] | None = None) -> Any:
    """Check outputs and weights after conversion to a model folder and back; returns the native spec."""
    dtype = next(peer.parameters()).dtype
    torch.save(peer.state_dict(), folder / "theirs.pth")
    ours = allmlp.load(convert(str(folder / "theirs.pth"), str(folder / "ours"), overrides=overrides), dtype=None)
    with torch.no_grad():
        expected = peer(inputs)
        assert ours.dtype == dtype and expected.abs().max() > 0.1
        torch.testing.assert_close(ours(inputs), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    back = convert(str(folder / "ours"), str(folder / "back.pth"), to="lucidrains")
    assert same(torch.load(back, weights_only=True), peer.state_dict())
    assert not (folder / "ours" / "preprocessing.json").exists()
    return ours.spec


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"attn_dim": 6}, {"channels": 1, "patch_size": 6}], ids=["gmlp", "amlp", "gray"]
)
def test_images(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    peer = image_model(**options).to(dtype)
    spec = round_trip(peer, torch.randn(3, options.get("channels", 3), 12, 12, dtype=dtype), tmp_path)
    assert spec.stem.patch_size == (options.get("patch_size", 4),) * 2 and spec.norm == LayerNorm(1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("attention", [None, 6], ids=["gmlp", "amlp"])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_text(causal: bool, attention: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    peer = text_model(attn_dim=attention, causal=causal).to(dtype)
    overrides = CAUSAL if causal else None
    spec = round_trip(peer, torch.randint(11, (3, 5 if causal else 8)), tmp_path, overrides)
    assert spec.head == LMHead(tied=False, bias=True) and spec.block.causal == causal


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_circulant_gate_becomes_a_triangular_matrix(dtype: torch.dtype, tmp_path: Path) -> None:
    """Converted to its dense matrix, it gives the same outputs and is written back as a dense model."""
    peer = text_model(circulant_matrix=True).to(dtype)
    save_file(peer.state_dict(), tmp_path / "theirs")
    folder = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    ours, ids = allmlp.load(folder, dtype=None), torch.randint(11, (3, 8))
    matrix = ours.state_dict()["blocks.0.channel.mix.inner.proj.weight"]
    assert torch.equal(matrix, matrix.tril()) and matrix[-1].all()
    dense = text_model().to(dtype)
    back = convert(str(folder), str(tmp_path / "back.pth"), to="lucidrains")
    dense.load_state_dict(torch.load(back, weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), peer(ids), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(dense(ids), peer(ids))


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (image_model(heads=2), "its gate has 2 heads; only gates with one head are supported"),
        (image_model(image_size=(8, 12)), "6 tokens are not a square grid of patches"),
        (image_model(channels=2), "32 values are not a square patch"),
        (text_model(num_tokens=None), "but lacks to_embed.weight, to_logits.1.weight"),
    ],
    ids=["heads", "wide", "channels", "embedding"],
)
def test_unsupported_files(peer: Any, message: str, tmp_path: Path) -> None:
    torch.save(peer.state_dict(), tmp_path / "theirs.pth")
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(tmp_path / "theirs.pth"), str(tmp_path / "ours"))
    assert message in str(caught.value) and "theirs.pth" in str(caught.value)


def test_circulant_gate_size_is_limited(tmp_path: Path) -> None:
    state = text_model(circulant_matrix=True).state_dict()
    gate = "layers.0.fn.fn.fn.sgu."
    for part in ("weight", "circulant_pos_x", "circulant_pos_y"):
        state[gate + part] = torch.ones(1, 2**16)
    save_file(state, tmp_path / "bomb")
    with pytest.raises(allmlp.UserError, match="expands to a matrix over 65,536 tokens, which is too large"):
        convert(str(tmp_path / "bomb"), str(tmp_path / "ours"))
    state[gate + "circulant_pos_x"] = torch.ones(1, 3)
    save_file(state, tmp_path / "bomb")
    with pytest.raises(allmlp.UserError, match="have incompatible shapes"):
        convert(str(tmp_path / "bomb"), str(tmp_path / "ours"))


LUCIDRAINS = {
    "norm": LayerNorm(1e-5),
    "block.norm": LayerNorm(1e-5),
    "block.channel.inner.norm": LayerNorm(1e-5),
    "block.channel.inner.projection": Dense(),
    "head": LMHead(tied=False, bias=True),
}


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (gmlp_text(1, 8, 16, vocab_size=9), {"head": LMHead()}, "lacks to_logits.1.weight"),
        (gmlp_text(1, 8, 16, vocab_size=9), {"norm": LayerNorm()}, "norm.eps is 1e-06, but the format implies 1e-05"),
        (
            gmlp_text(1, 8, 16, vocab_size=9),
            {"block.channel.inner.projection": Toeplitz()},
            "layers.0.fn.fn.fn.sgu.weight has the shape [1, 255], but 3 dimensions are expected",
        ),
        (gmlp_text(1, 8, 20, vocab_size=9), {}, "20 hidden channels are not a multiple of the width 8"),
        (
            gmlp_text(1, 8, 16, vocab_size=9, attention=TinyAttention(4)),
            {},
            "inner.attention.bias is True, but the format implies False",
        ),
    ],
)
def test_unsupported_models(spec: Any, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    allmlp.save(allmlp.create(spec, overrides=LUCIDRAINS | changes), tmp_path / "ours")
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(tmp_path / "ours"), str(tmp_path / "theirs.pth"), to="lucidrains")
    assert message in str(caught.value) and not (tmp_path / "theirs.pth").exists()


def test_gmlp_of_timm_has_another_eps(tmp_path: Path) -> None:
    allmlp.save(allmlp.create(gmlp(1, 8, patch_size=4, img_size=8, num_classes=3)), tmp_path / "ours")
    with pytest.raises(allmlp.UserError, match="eps is 1e-06, but the format implies 1e-05"):
        convert(str(tmp_path / "ours"), str(tmp_path / "theirs.pth"), to="lucidrains")
