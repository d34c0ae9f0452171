"""CycleMLP (Chen et al., 2021): a pyramid of four stages whose token mixing works at every image size.

Initialized as the released code: truncated normal 0.02 with zero biases, patch embedding and merges as torch.nn.Conv2d.
"""

from __future__ import annotations

from allmlp.layers import (
    Block,
    ChannelMlp,
    ClassifierHead,
    Init,
    LayerNorm,
    MeanPool,
    PatchEmbed,
    PatchMerge,
    Stage,
    TokenCycle,
    TorchDefault,
    TruncatedNormal,
)
from allmlp.layers.norm import Norm
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

CONV = Init(TorchDefault(), TorchDefault())


def cyclemlp(
    depths: tuple[int, ...],
    widths: tuple[int, ...] = (64, 128, 320, 512),
    ratios: tuple[int, ...] = (4, 4, 4, 4),
    patch_size: int = 4,
    kernel: int = 7,
    img_size: int = 224,
    num_classes: int = 1000,
) -> Encoder:
    blocks = [
        Block(TokenCycle(), channel=ChannelMlp(ratio * width), norm=LayerNorm(1e-5))
        for width, ratio in zip(widths, ratios, strict=True)
    ]
    first, *later = zip(widths, depths, blocks, strict=True)
    return Encoder(
        *first,
        stem=PatchEmbed((img_size, img_size), (patch_size, patch_size), init=CONV, kernel=kernel),
        norm=LayerNorm(1e-5),
        pool=MeanPool(),
        head=ClassifierHead(num_classes),
        init=Init(TruncatedNormal(0.02)),
        stages=tuple(Stage(*stage, PatchMerge(kernel=3, init=CONV)) for stage in later),
    )


def pyramid(parts: list[Encoder], norm: Norm) -> Encoder:
    """One stage for each of the encoders, with overlapping patches and merges as in CycleMLP."""
    first, *later = parts
    stages = (Stage(part.width, part.depth, part.block, PatchMerge(kernel=3, norm=norm)) for part in later)
    return first.replace(stem=first.stem.replace(kernel=3), stages=tuple(stages))


def published(parameters: str, macs: str, note: str = "") -> Published:
    return Published(parameters, "CycleMLP, released weights", macs, note=note)


MACS = "the released figure counts slightly more than the matrix products"
WIDE = (8, 8, 4, 4)
PRESETS = {
    "cyclemlp_b1": Preset(cyclemlp((2, 2, 4, 2)), "CycleMLP", published("15", "2.1")),
    "cyclemlp_b2": Preset(cyclemlp((2, 3, 10, 3)), "CycleMLP", published("27", "3.9")),
    "cyclemlp_b3": Preset(cyclemlp((3, 4, 18, 3), ratios=WIDE), "CycleMLP", published("38", "6.9", MACS)),
    "cyclemlp_b4": Preset(cyclemlp((3, 8, 27, 3), ratios=WIDE), "CycleMLP", published("52", "10.1", MACS)),
    "cyclemlp_b5": Preset(cyclemlp((3, 4, 24, 3), (96, 192, 384, 768)), "CycleMLP", published("76", "12.3", MACS)),
    "cyclemlp_nano": Preset(
        cyclemlp((2, 2, 2), (32, 64, 128), (4, 4, 4), patch_size=2, kernel=3, img_size=32, num_classes=10), "CycleMLP"
    ),
    "cyclemlp_micro": Preset(
        cyclemlp((5, 6, 2), (96, 192, 320), (4, 4, 4), patch_size=2, kernel=3, img_size=32, num_classes=10), "CycleMLP"
    ),
}
