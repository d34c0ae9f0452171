"""Mixer, ResMLP, gMLP, ViT, CaiT and ConvMixer against timm."""

from __future__ import annotations

import pytest
import torch
from agree import Weights, assert_parity, relabel, shaped, weights
from torch import nn

import allmlp
from allmlp.models.cait import cait
from allmlp.models.convmixer import convmixer
from allmlp.models.gmlp import gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit

timm = pytest.importorskip("timm")
from timm.layers import GatedMlp  # noqa: E402
from timm.models import mlp_mixer  # noqa: E402
from timm.models.cait import Cait  # noqa: E402
from timm.models.convmixer import ConvMixer  # noqa: E402
from timm.models.mlp_mixer import MlpMixer  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

MEMBERS = {
    "mixer_s32": "mixer_s32_224",
    "mixer_s16": "mixer_s16_224",
    "mixer_b32": "mixer_b32_224",
    "mixer_b16": "mixer_b16_224",
    "mixer_l32": "mixer_l32_224",
    "mixer_l16": "mixer_l16_224",
    "resmlp_s12": "resmlp_12_224",
    "resmlp_s24": "resmlp_24_224",
    "resmlp_s36": "resmlp_36_224",
    "resmlp_b24_8": "resmlp_big_24_224",
    "gmlp_ti16": "gmlp_ti16_224",
    "gmlp_s16": "gmlp_s16_224",
    "gmlp_b16": "gmlp_b16_224",
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_b32": "vit_base_patch32_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_h14": "vit_huge_patch14_224",
    "cait_xs24_384": "cait_xs24_384",
    "cait_s24": "cait_s24_224",
    "cait_s24_384": "cait_s24_384",
    "cait_s36_384": "cait_s36_384",
    "cait_m36_384": "cait_m36_384",
    "cait_m48_448": "cait_m48_448",
    "convmixer_768_32": "convmixer_768_32",
    "convmixer_1536_20": "convmixer_1536_20",
    "convmixer_1024_20_ks9_p14": "convmixer_1024_20_ks9_p14",
}
RUN = ("mixer_s16", "resmlp_s12", "gmlp_ti16", "vit_ti16")
"""At full size; larger ones of these families have other numbers only, which test_same_tensors compares."""


def rename(tensors: Weights) -> Weights:
    is_cait = any(name.startswith("blocks_token_only.") for name in tensors)
    return relabel(
        tensors,
        {
            r"^blocks_token_only\.(\d+)\.(norm1\.|attn\.|gamma_1)": r"pool.gathers.\1.\2",
            r"^blocks_token_only\.(\d+)\.(norm2\.|mlp\.|gamma_2)": r"pool.channels.\1.\2",
            r"^(pool.+)\.norm[12]\.": r"\1.norm.",
            r"^(pool.+)\.gamma_[12]$": r"\1.scale.gamma",
            r"^(pool.+)\.attn\.k\.(\w+)$": r"\1.kv.\2#0",
            r"^(pool.+)\.attn\.v\.(\w+)$": r"\1.kv.\2#1",
            r"^(pool.+)\.attn\.q\.": r"\1.q.",
            r"^(pool.+)\.attn\.proj\.": r"\1.out.",
            r"^(pool.+)\.mlp\.": r"\1.mix.",
            r"\.attn\.proj_l\.": ".token.mix.before.",
            r"\.attn\.proj_w\.": ".token.mix.after.",
            r"\.gamma_1$": ".token.scale.gamma",
            r"\.gamma_2$": ".channel.scale.gamma",
            r"^patch_embed\.": "stem.",
            r"^cls_token$": "pool.token" if is_cait else "stem.token",
            r"^pos_embed$": "stem.positions.weight",
            r"\.norm1\.": ".token.norm.",
            r"\.norm2\.": ".channel.norm.",
            r"^(blocks\.\d+)\.norm\.": r"\1.channel.norm.",
            r"\.mlp_tokens\.": ".token.mix.",
            r"\.linear_tokens\.": ".token.mix.",
            r"\.attn\.qkv\.": ".token.mix.qkv.",
            r"\.attn\.proj\.": ".token.mix.out.",
            r"\.(mlp_channels|mlp)\.": ".channel.mix.",
            r"\.gate\.": ".inner.",
            r"\.fc1\.": ".up.",
            r"\.fc2\.": ".down.",
            r"\.ls1$": ".token.scale.gamma",
            r"\.ls2$": ".channel.scale.gamma",
            r"^stem\.0\.": "stem.proj.",
            r"^stem\.2\.": "stem.norm.",
            r"^(blocks\.\d+)\.0\.fn\.0\.": r"\1.token.mix.conv.",
            r"^(blocks\.\d+)\.0\.fn\.2\.": r"\1.token.norm.",
            r"^(blocks\.\d+)\.1\.": r"\1.channel.mix.proj.",
            r"^(blocks\.\d+)\.3\.": r"\1.channel.norm.",
            r"^head\.": "head.proj.",
        },
    )


def exact_gelu(name: str) -> dict[str, str] | None:
    """timm's Mixer has the exact GELU, Google's the tanh formula."""
    return {"block.token.act": "gelu", "block.channel.act": "gelu"} if name.startswith("mixer") else None


FAMILIES = {
    "mixer": (mixer(3, 12, 4), MlpMixer, {"num_blocks": 3}),
    "resmlp": (
        resmlp(3, 12, 0.1, 4),
        MlpMixer,
        {"num_blocks": 3, "mlp_ratio": 4, "block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine},
    ),
    "gmlp": (
        gmlp(3, 12, 4),
        MlpMixer,
        {"num_blocks": 3, "mlp_ratio": 6, "block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp},
    ),
    "vit": (vit(3, 12, 3, 4), VisionTransformer, {"depth": 3, "num_heads": 3}),
    "cait": (cait(3, 12, 0.1, patch_size=4, num_heads=3), Cait, {"depth": 3, "num_heads": 3}),
    "convmixer": (convmixer(12, 3, 5, 4), ConvMixer, {"dim": 12, "depth": 3, "kernel_size": 5}),
    "convmixer-relu": (
        convmixer(12, 3, 3, 4, "relu"),
        ConvMixer,
        {"dim": 12, "depth": 3, "kernel_size": 3, "act_layer": nn.ReLU},
    ),
}


@pytest.mark.parametrize("image", [(16, 16), (8, 20)], ids=["square", "wide"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tiny(name, train, image):
    spec, kind, options = FAMILIES[name]
    sizes = {} if kind is ConvMixer else {"img_size": image, "embed_dim": 12}
    peer = kind(patch_size=4, num_classes=5, **sizes, **options)
    ours = allmlp.create(spec, img_size=image, num_classes=5, overrides=exact_gelu(name))
    assert_parity(ours, peer, rename, torch.randn(3, 3, *image), train=train)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    with torch.device("meta"):
        return allmlp.create(name, overrides=exact_gelu(name)), timm.create_model(MEMBERS[name], num_classes=1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_full_size(name):
    ours, peer = (model.to_empty(device="cpu") for model in pair(name))
    assert_parity(ours, peer, rename, torch.randn(1, 3, 224, 224), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_same_tensors(name):
    ours, peer = pair(name)
    shaped(rename(weights(peer)), ours)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())


@pytest.mark.parametrize("name", [name for name in MEMBERS if name.startswith("convmixer")])
def test_convmixer_activations(name):
    """The shapes of its weights and the tiny models say the rest."""
    ours, peer = pair(name)
    act = type(peer.stem[1]).__name__.lower()
    assert {ours.spec.stem.act, ours.spec.block.token.act, ours.spec.block.channel.act} == {act}
