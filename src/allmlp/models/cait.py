"""CaiT (Touvron et al., 2021): deep ViTs with LayerScale, talking heads, and class attention after the last block.

Initialized as FAIR's code: truncated normal 0.02, biases zero, patch embedding as torch.nn.Conv2d, LayerScale smaller
for deeper models.
"""

from __future__ import annotations

from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    ClassAttention,
    ClassifierHead,
    DropPath,
    Init,
    LayerScale,
    LearnedPositions,
    PatchEmbed,
    TorchDefault,
    TruncatedNormal,
)
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def cait(
    depth: int,
    width: int,
    scale: float,
    img_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    num_heads: int | None = None,
) -> Encoder:
    """CaiT with heads of 48 channels."""
    heads = num_heads or width // 48
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed(
            (img_size, img_size),
            (patch_size, patch_size),
            positions=LearnedPositions(TruncatedNormal(0.02)),
            init=Init(TorchDefault(), TorchDefault()),
        ),
        block=Block(Attention(heads, talking_heads=True), channel=ChannelMlp(4 * width), scale=LayerScale(scale)),
        pool=ClassAttention(heads),
        head=ClassifierHead(num_classes),
        drop_path=DropPath(schedule="flat"),
        init=Init(TruncatedNormal(0.02)),
    )


def released(parameters: str, macs: str) -> Published:
    note = "the released figure counts slightly more than the matrix products"
    return Published(parameters, "CaiT, released weights", macs, note=note)


PRESETS = {
    "cait_xs24": Preset(cait(24, 288, 1e-5), "CaiT", Published("27", "ResMLP, table 1", "5.4")),
    "cait_xs24_384": Preset(cait(24, 288, 1e-5, 384), "CaiT", released("27", "19.3"), "384 px"),
    "cait_s24": Preset(cait(24, 384, 1e-5), "CaiT", released("47", "9.4")),
    "cait_s24_384": Preset(cait(24, 384, 1e-5, 384), "CaiT", released("47", "32.2"), "384 px"),
    "cait_s36_384": Preset(cait(36, 384, 1e-6, 384), "CaiT", released("68", "48.0"), "384 px"),
    "cait_m36_384": Preset(cait(36, 768, 1e-6, 384), "CaiT", released("271", "173.3"), "384 px"),
    "cait_m48_448": Preset(cait(48, 768, 1e-6, 448), "CaiT", released("356", "329.6"), "448 px"),
    "cait_nano": Preset(cait(6, 96, 0.1, img_size=32, patch_size=4, num_classes=10), "CaiT"),
}
