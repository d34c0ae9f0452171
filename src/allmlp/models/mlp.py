"""The plain MLP (Bachmann et al., 2023): residual blocks on the flattened pixels of the whole image.

The image is one patch, so there is a single token and nothing to mix. "B-6/Wi-1024" is 6 blocks of 1024 channels with
4096 hidden ones. Initialized by torch.nn's defaults, as in the released code.
"""

from __future__ import annotations

from allmlp.layers import Block, ChannelMlp, ClassifierHead, Init, LayerNorm, MeanPool, PatchEmbed, TorchDefault
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def mlp(depth: int, width: int, img_size: int = 64, num_classes: int = 11_230) -> Encoder:
    """The number of classes is that of ImageNet-21k in the released code."""
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((img_size, img_size), (img_size, img_size)),
        block=Block(channel=ChannelMlp(4 * width), norm=LayerNorm(1e-5)),
        norm=None,
        pool=MeanPool(),
        head=ClassifierHead(num_classes),
        init=Init(TorchDefault(), TorchDefault()),
    )


def published(parameters: str, note: str = "") -> Published:
    return Published(parameters, "Scaling MLPs, released weights", note=note)


PRINTED = {
    (6, 512): published("24", "24.66 M is truncated, not rounded"),
    (12, 512): published("37"),
    (6, 1024): published("74"),
    (12, 1024): published("124", "124.84 M is truncated, not rounded"),
}

PRESETS = {
    f"mlp_b{depth}_{width}": Preset(mlp(depth, width), "MLP", printed, f"B-{depth}/Wi-{width}")
    for (depth, width), printed in PRINTED.items()
} | {
    "mlp_nano": Preset(mlp(2, 128, img_size=32, num_classes=10), "MLP"),
    "mlp_micro": Preset(mlp(5, 384, img_size=32, num_classes=10), "MLP"),
}
