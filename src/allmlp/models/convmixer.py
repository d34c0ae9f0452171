"""ConvMixer (Trockman and Kolter, 2022): depthwise and pointwise convolutions on patches, with BatchNorm.

Initialized by torch.nn's defaults, as in timm. The released weights of ConvMixer-768/32 have ReLU, the others GELU.
"""

from __future__ import annotations

from allmlp.layers import (
    BatchNorm,
    Block,
    ChannelLinear,
    ClassifierHead,
    Init,
    MeanPool,
    PatchEmbed,
    TokenConv,
    TorchDefault,
)
from allmlp.layers.act import Act
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def convmixer(
    width: int,
    depth: int,
    kernel: int,
    patch_size: int,
    act: Act = "gelu",
    img_size: int = 224,
    num_classes: int = 1000,
) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((img_size, img_size), (patch_size, patch_size), act=act, norm=BatchNorm()),
        block=Block(
            token=TokenConv("depthwise", kernel, act),
            channel=ChannelLinear(act),
            norm=BatchNorm(),
            order="res-post",
            residual="token",
        ),
        norm=None,
        pool=MeanPool(),
        head=ClassifierHead(num_classes),
        init=Init(TorchDefault(), TorchDefault()),
    )


def published(parameters: str) -> Published:
    return Published(parameters, "ConvMixer, weights released in timm")


PRESETS = {
    "convmixer_768_32": Preset(convmixer(768, 32, 7, 7, "relu"), "ConvMixer", published("21.11"), "ReLU"),
    "convmixer_1536_20": Preset(convmixer(1536, 20, 9, 7), "ConvMixer", published("51.63")),
    "convmixer_1024_20_ks9_p14": Preset(convmixer(1024, 20, 9, 14), "ConvMixer", published("24.38"), "patch 14"),
    "convmixer_nano": Preset(convmixer(128, 8, 5, 4, img_size=32, num_classes=10), "ConvMixer"),
}
