"""gMLP, aMLP, Mixer and ResMLP against lucidrains' packages, and where these differ from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agree import Weights, assert_parity, relabel
from torch import Tensor

import allmlp
from allmlp.layers import Dense, LayerNorm, LMHead, TinyAttention
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp

g_mlp_pytorch = pytest.importorskip("g_mlp_pytorch")
mlp_mixer_pytorch = pytest.importorskip("mlp_mixer_pytorch")
res_mlp_pytorch = pytest.importorskip("res_mlp_pytorch")

# All three packages use torch's default eps in their norms.
EPS = {"norm": LayerNorm(1e-5), "block.norm": LayerNorm(1e-5)}
TEXT = EPS | {
    "block.channel.inner.norm": LayerNorm(1e-5),
    "block.channel.inner.projection": Dense(),
    "head": LMHead(tied=False, bias=True),
}
VOCABULARY, LENGTH = 11, 8


def rename_gmlp(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^to_patch_embed\.1\.": "stem.proj.",
            r"^to_embed\.": "stem.embedding.",
            r"^layers\.(\d+)\.fn\.norm\.": r"blocks.\1.channel.norm.",
            r"^layers\.(\d+)\.fn\.fn\.(fn\.)?": r"blocks.\1.channel.mix.",
            r"\.proj_in\.0\.": ".up.",
            r"\.proj_out\.": ".down.",
            r"\.attn\.to_(qkv|out)\.": r".inner.attention.\1.",
            r"\.sgu\.norm\.": ".inner.norm.",
            r"\.sgu\.": ".inner.proj.",
            r"^to_logits\.0\.": "norm.",
            r"^to_logits\.2\.": "head.proj.",
            r"^to_logits\.1\.weight": "head.proj.weight",
            r"^to_logits\.1\.bias": "head.bias",
        },
    )


def colors_first(stem: Tensor, patch_size: int) -> Tensor:
    """The columns of a stem that reads a patch as (height, width, color), in the order of a convolution."""
    return stem.unflatten(1, (patch_size, patch_size, -1)).permute(0, 3, 1, 2).flatten(1)


def rename_sequential(tensors: Weights) -> Weights:
    """Mixer and ResMLP, two nested nn.Sequential of depth 2 on patches of 4: stem 1, blocks 2-3, norm 4, head 6."""
    renamed = relabel(
        tensors,
        {
            r"^1\.": "stem.proj.",
            r"^4\.": "norm.",
            r"^6\.": "head.proj.",
            r"^2\.": "blocks.0.",
            r"^3\.": "blocks.1.",
            r"^(blocks\.\d)\.0\.": r"\1.token.",
            r"^(blocks\.\d)\.1\.": r"\1.channel.",
            r"\.affine\.": ".norm.",
            r"\.g$": ".alpha",
            r"norm\.b$": "norm.beta",
            r"\.scale$": ".scale.gamma",
            r"\.fn\.0\.": ".mix.up.",
            r"\.fn\.[23]\.": ".mix.down.",
            r"\.fn\.": ".mix.",
        },
    )
    return renamed | {"stem.proj.weight": colors_first(renamed["stem.proj.weight"], patch_size=4)}


@pytest.mark.parametrize("attention", [None, 6], ids=["gmlp", "amlp"])
def test_gmlp_vision(attention):
    size = {"image_size": (8, 12), "patch_size": 4, "num_classes": 5}
    peer = g_mlp_pytorch.gMLPVision(**size, dim=12, depth=3, ff_mult=6, attn_dim=attention)
    spec = gmlp(3, 12, patch_size=4, attention=TinyAttention(6, bias=False) if attention else None)
    ours = allmlp.create(spec, img_size=(8, 12), num_classes=5, overrides=EPS)
    assert_parity(ours, peer, rename_gmlp, torch.randn(3, 3, 8, 12))


def text_pair(attention: int | None = None, causal: bool = False, **options: Any) -> tuple[Any, Any]:
    sizes = {"num_tokens": VOCABULARY, "dim": 10, "depth": 2, "seq_len": LENGTH, "ff_mult": 4}
    peer = g_mlp_pytorch.gMLP(**sizes, attn_dim=attention, causal=causal, **options)
    side = TinyAttention(attention, bias=False) if attention else None
    spec = gmlp_text(2, 10, 40, seq_len=LENGTH, vocab_size=VOCABULARY, attention=side, causal=causal)
    return allmlp.create(spec, overrides=TEXT), peer


@pytest.mark.parametrize("attention", [None, 6], ids=["gmlp", "amlp"])
@pytest.mark.parametrize(("causal", "length"), [(False, LENGTH), (True, LENGTH), (True, 5)])
def test_gmlp_text(attention, causal, length):
    ours, peer = text_pair(attention, causal)
    assert_parity(ours, peer, rename_gmlp, torch.randint(VOCABULARY, (3, length)))


def test_mixer():
    """With its two expansions exchanged, see test_mixer_widths_are_swapped."""
    widths = {"expansion_factor": 0.5, "expansion_factor_token": 4}
    peer = mlp_mixer_pytorch.MLPMixer(
        image_size=(8, 12), channels=3, patch_size=4, dim=12, depth=2, num_classes=5, **widths
    )
    exact = {"block.token.act": "gelu", "block.channel.act": "gelu"}
    ours = allmlp.create(mixer(2, 12, 4), img_size=(8, 12), num_classes=5, overrides=EPS | exact)
    assert_parity(ours, peer, rename_sequential, torch.randn(3, 3, 8, 12))


def test_resmlp():
    peer = res_mlp_pytorch.ResMLP(image_size=(8, 12), patch_size=4, dim=12, depth=2, num_classes=5)
    ours = allmlp.create(resmlp(2, 12, 0.1, 4), img_size=(8, 12), num_classes=5)
    assert_parity(ours, peer, rename_sequential, torch.randn(3, 3, 8, 12))


# --- where they differ from the papers ---------------------------------------------------------------


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def change_before(model: torch.nn.Module, position: int) -> float:
    """How much the outputs before `position` change when the tokens from there on do."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    later = ids.clone()
    later[:, position:] = (later[:, position:] + 1) % VOCABULARY
    return (model(ids) - model(later))[:, :position].abs().max().item()


def test_bidirectional_circulant_cannot_see_the_future():
    """The peer's circulant matrix is a lower triangle; our Toeplitz matrix has both sides."""
    _, peer = text_pair(circulant_matrix=True)
    ours = gmlp_text(2, 10, 40, seq_len=LENGTH, vocab_size=VOCABULARY).build()
    assert change_before(peer, 5) == 0
    assert change_before(ours, 5) > 0.1
    assert change_before(gmlp_text(2, 10, 40, seq_len=LENGTH, vocab_size=VOCABULARY, causal=True).build(), 5) == 0


def test_bidirectional_model_reads_no_shorter_text():
    ours, peer = text_pair()
    ids = torch.randint(VOCABULARY, (1, LENGTH - 3))
    with pytest.raises(RuntimeError):
        peer(ids)
    assert ours(ids).shape == (1, LENGTH - 3, VOCABULARY)


def test_mixer_widths_are_swapped():
    """By default the token MLP gets the channel MLP's width and the other way round. S/16 has 18.5 M weights."""
    with torch.device("meta"):
        size = {"image_size": 224, "channels": 3, "patch_size": 16, "dim": 512, "depth": 8, "num_classes": 1000}
        assert parameters(mlp_mixer_pytorch.MLPMixer(**size)) == 9_467_912
        exchanged = mlp_mixer_pytorch.MLPMixer(**size, expansion_factor=0.5, expansion_factor_token=4)
        assert parameters(allmlp.create("mixer_s16")) == parameters(exchanged) == 18_528_264


def test_text_embedding_is_not_tied():
    """The paper prints 102 M for 36 layers: with one embedding table, and Toeplitz matrices over tokens."""
    with torch.device("meta"):
        peer = g_mlp_pytorch.gMLP(num_tokens=32_000, dim=512, depth=36, seq_len=128, ff_mult=6)
        assert parameters(peer) == 118_606_592
        assert parameters(allmlp.create("gmlp_l36")) == 101_609_948
