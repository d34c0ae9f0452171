"""ResMLP (Touvron et al., 2021) and every ablation of its table: one linear map over patches.

Initialized as FAIR's code: truncated normal 0.02, biases zero, patch embedding as torch.nn.Conv2d, LayerScale smaller
for deeper models.
"""

from __future__ import annotations

from allmlp.layers import (
    Affine,
    Block,
    ChannelMlp,
    ClassifierHead,
    ClassMlp,
    DropPath,
    Init,
    LayerNorm,
    LayerScale,
    MeanPool,
    NoMixing,
    PatchEmbed,
    TokenConv,
    TokenLinear,
    TokenMlp,
    TorchDefault,
    TruncatedNormal,
)
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.norm import Norm
from allmlp.layers.pool import Pool
from allmlp.models.cyclemlp import pyramid
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published


def resmlp(
    depth: int,
    width: int,
    scale: float,
    patch_size: int = 16,
    img_size: int = 224,
    num_classes: int = 1000,
    token: TokenMixer | None = None,
    norm: Norm = Affine(),
    pool: Pool = MeanPool(),
) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((img_size, img_size), (patch_size, patch_size), init=Init(TorchDefault(), TorchDefault())),
        block=Block(token or TokenLinear(), channel=ChannelMlp(4 * width), norm=norm, scale=LayerScale(scale)),
        norm=norm,
        pool=pool,
        head=ClassifierHead(num_classes),
        drop_path=DropPath(schedule="flat"),
        init=Init(TruncatedNormal(0.02)),
    )


def resmlp_staged(
    depths: tuple[int, ...], widths: tuple[int, ...], patch_size: int, img_size: int, num_classes: int
) -> Encoder:
    """A pyramid of ResMLP blocks."""
    sizes = zip(depths, widths, strict=True)
    parts = [resmlp(depth, width, 0.1, patch_size, img_size, num_classes) for depth, width in sizes]
    return pyramid(parts, Affine())


def published(parameters: str, macs: str, note: str = "") -> Published:
    return Published(parameters, "ResMLP, ablation table", macs, note=note)


def s12(parameters: str, macs: str, about: str, note: str = "", **variant: object) -> Preset:
    return Preset(resmlp(12, 384, 0.1, **variant), "ResMLP", published(parameters, macs, note), about)  # type: ignore[arg-type]


PRESETS = {
    "resmlp_s12": s12("15.4", "3.0", ""),
    "resmlp_s24": Preset(resmlp(24, 384, 1e-5), "ResMLP", published("30.0", "6.0")),
    "resmlp_s36": Preset(resmlp(36, 384, 1e-6), "ResMLP", Published("45", "ResMLP, released weights", "8.9")),
    "resmlp_b24": Preset(resmlp(24, 768, 1e-6), "ResMLP", published("115.7", "23.0")),
    "resmlp_s12_14": s12("15.6", "4.0", "patch 14", patch_size=14),
    "resmlp_s12_8": s12("22.1", "14.0", "patch 8", patch_size=8),
    "resmlp_b24_8": Preset(resmlp(24, 768, 1e-6, patch_size=8), "ResMLP", published("129.1", "100.2"), "patch 8"),
    "resmlp_s12_ln": s12("15.4", "3.0", "Affine -> LayerNorm", norm=LayerNorm()),
    "resmlp_s12_class": s12("17.7", "3.0", "average pooling -> Class-MLP", pool=ClassMlp(layers=2)),
    "resmlp_s12_none": s12("14.9", "2.8", "linear -> none", token=NoMixing()),
    "resmlp_s12_mlp": s12(
        "18.6", "4.3", "linear -> MLP, 4S hidden", "4.249 G is printed rounded up", token=TokenMlp(expansion=4.0)
    ),
    "resmlp_s12_conv": s12("30.8", "6.0", "linear -> conv 3x3", token=TokenConv("full")),
    "resmlp_s12_dw": s12("14.9", "2.8", "linear -> depth-wise 3x3", token=TokenConv("depthwise")),
    "resmlp_s12_dwsep": s12("16.7", "3.2", "linear -> depth-separable 3x3", token=TokenConv("separable")),
    "resmlp_nano": Preset(resmlp(10, 96, 0.1, patch_size=4, img_size=32, num_classes=10), "ResMLP"),
    "resmlp_micro": Preset(resmlp(12, 256, 0.1, patch_size=4, img_size=32, num_classes=10), "ResMLP"),
    "resmlp_staged_micro": Preset(resmlp_staged((4, 7, 2), (128, 256, 320), 2, 32, 10), "ResMLP", about="three stages"),
}
