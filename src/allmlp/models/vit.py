"""Vision Transformer (Dosovitskiy et al., 2020), as DeiT uses it: the baseline of the image models.

Initialised as Google's Flax code does: Xavier uniform, MLP biases near zero, positions N(0, 0.02).
"""

from __future__ import annotations

from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    Classes,
    First,
    Init,
    Learned,
    LecunNormal,
    Patches,
    XavierUniform,
    Zeros,
)
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def vit(depth: int, width: int, heads: int, patch: int, image: int = 224, classes: int = 1000) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=Patches((image, image), (patch, patch), class_token=True, positions=Learned(), init=Init(LecunNormal())),
        block=Block(token=Attention(heads), channel=ChannelMlp(4 * width)),
        pool=First(),
        head=Classes(classes, init=Init(Zeros())),
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
            note="its table 1 prints 86 M for the same DeiT-B; 17.58 G is cut, not rounded, to 17.5",
        ),
    ),
    "vit_b32": Preset(vit(12, 768, 12, 32), "ViT"),
    "vit_l16": Preset(vit(24, 1024, 16, 16), "ViT", Published("304", "DeiT III, table 1")),
    "vit_h14": Preset(vit(32, 1280, 16, 14), "ViT", Published("632", "ViT, table 1")),
    "vit_nano": Preset(vit(8, 96, 3, 4, image=32, classes=10), "ViT"),
    "vit_micro": Preset(vit(10, 256, 4, 4, image=32, classes=10), "ViT"),
}
