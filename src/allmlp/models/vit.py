"""Vision Transformer (Dosovitskiy et al., 2020), as in DeiT: the baseline of the image models.

Initialized as Google's Flax code: Xavier uniform, positions N(0, 0.02); but MLP biases are zero, there N(0, 1e-6).
"""

from __future__ import annotations

from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    ClassifierHead,
    FirstTokenPool,
    Init,
    LearnedPositions,
    LecunNormal,
    PatchEmbed,
    XavierUniform,
    Zeros,
)
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def vit(
    depth: int, width: int, num_heads: int, patch_size: int, img_size: int = 224, num_classes: int = 1000
) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed(
            (img_size, img_size),
            (patch_size, patch_size),
            class_token=True,
            positions=LearnedPositions(),
            init=Init(LecunNormal()),
        ),
        block=Block(token=Attention(num_heads), channel=ChannelMlp(4 * width)),
        pool=FirstTokenPool(),
        head=ClassifierHead(num_classes, init=Init(Zeros())),
        init=Init(XavierUniform()),
    )


PRESETS = {
    "vit_ti16": Preset(vit(12, 192, 3, 16), "ViT", Published("5.7", "DeiT, table 1")),
    "vit_s16": Preset(vit(12, 384, 6, 16), "ViT", Published("22", "ResMLP, table 1", "4.6")),
    "vit_b16": Preset(
        vit(12, 768, 12, 16),
        "ViT",
        Published(
            "87",
            "ResMLP, DINO table",
            "17.5",
            note="its table 1 prints 86 M for the same DeiT-B; 17.56 G is truncated, not rounded, to 17.5",
        ),
    ),
    "vit_b32": Preset(vit(12, 768, 12, 32), "ViT"),
    "vit_l16": Preset(vit(24, 1024, 16, 16), "ViT", Published("304", "DeiT III, table 1")),
    "vit_h14": Preset(vit(32, 1280, 16, 14), "ViT", Published("632", "ViT, table 1")),
    "vit_nano": Preset(vit(8, 96, 3, 4, img_size=32, num_classes=10), "ViT"),
    "vit_micro": Preset(vit(10, 256, 4, 4, img_size=32, num_classes=10), "ViT"),
}
