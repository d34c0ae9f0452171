"""gMLP and aMLP (Liu et al., 2021): a channel MLP with a spatial gating unit, for images and text.

No code was released with the paper. Image models are initialized as timm's gMLP (Xavier uniform, biases N(0, 1e-6),
classifier zero, gate weight N(0, 1e-6) and bias 1); text models as BERT, with the same gate. The language models have
Toeplitz spatial weights, with which the parameter counts match the published ones.
"""

from __future__ import annotations

from typing import Literal

from allmlp.layers import (
    Block,
    ChannelMlp,
    ClassifierHead,
    Constant,
    Init,
    LayerNorm,
    LecunNormal,
    LMHead,
    MeanPool,
    Normal,
    PatchEmbed,
    SpatialGatingUnit,
    TinyAttention,
    Toeplitz,
    TokenEmbed,
    XavierUniform,
    Zeros,
)
from allmlp.models.bert import TEXT_INIT
from allmlp.models.cyclemlp import pyramid
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

GateVariant = Literal["split", "multiplicative", "additive", "linear"]

NEAR_ONE = Init(Normal(1e-6), Constant(1.0))
"""Multiplication by f(Z) is the identity at initialization."""
NEAR_ZERO = Init(Normal(1e-6), Zeros())
"""Addition of f(Z) is the identity at initialization."""
GATE_INIT = {
    "split": NEAR_ONE,
    "multiplicative": NEAR_ONE,
    "additive": NEAR_ZERO,
    # Without the factor or term Z, a near-zero f(Z) would block the branch; the paper does not say how it starts.
    "linear": Init(LecunNormal()),
}


def gmlp(
    depth: int,
    width: int,
    patch_size: int = 16,
    img_size: int = 224,
    num_classes: int = 1000,
    attention: TinyAttention | None = None,
) -> Encoder:
    gate = SpatialGatingUnit(norm=LayerNorm(1e-5), attention=attention, init=NEAR_ONE)
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((img_size, img_size), (patch_size, patch_size), init=Init(LecunNormal())),
        block=Block(channel=ChannelMlp(6 * width, inner=gate)),
        pool=MeanPool(),
        head=ClassifierHead(num_classes, init=Init(Zeros())),
        init=Init(XavierUniform(), Normal(1e-6)),
    )


def gmlp_staged(
    depths: tuple[int, ...], widths: tuple[int, ...], patch_size: int, img_size: int, num_classes: int
) -> Encoder:
    """A pyramid of gMLP blocks."""
    parts = [gmlp(depth, width, patch_size, img_size, num_classes) for depth, width in zip(depths, widths, strict=True)]
    return pyramid(parts, LayerNorm())


def gmlp_text(
    depth: int,
    width: int,
    hidden: int,
    seq_len: int = 128,
    vocab_size: int = 32_000,
    variant: GateVariant = "split",
    attention: TinyAttention | None = None,
    causal: bool = False,
) -> Encoder:
    gate = SpatialGatingUnit(variant, Toeplitz(), causal, attention=attention, init=GATE_INIT[variant])
    return Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len),
        block=Block(channel=ChannelMlp(hidden, inner=gate)),
        head=LMHead(),
        init=TEXT_INIT,
    )


WIDTHS = {"ti16": 128, "s16": 256, "b16": 512}
MACS = "the paper's FLOPs count slightly more than the matrix products"
VISION = {
    "ti16": Published("6", "gMLP, table 1", "1.4", note=MACS),
    "s16": Published("20", "gMLP, table 1", "4.5", note=f"its sizes give 19.4 M; {MACS}"),
    "b16": Published("73", "gMLP, table 1", "15.8", note=MACS),
}

UNSPLIT = "the caption's d_ffn 3072 gives 130.0 M; 2048, used here, gives the printed 92"


def table(number: int, parameters: str, note: str = "") -> Published:
    return Published(parameters, f"gMLP, table {number}", note=note)


PRESETS = (
    {f"gmlp_{size}": Preset(gmlp(30, width), "gMLP", VISION[size]) for size, width in WIDTHS.items()}
    | {
        f"amlp_{size}": Preset(gmlp(30, width, attention=TinyAttention(64, bias=False)), "aMLP")
        for size, width in WIDTHS.items()
    }
    | {
        "gmlp_nano": Preset(gmlp(10, 96, patch_size=4, img_size=32, num_classes=10), "gMLP"),
        "gmlp_micro": Preset(gmlp(12, 256, patch_size=4, img_size=32, num_classes=10), "gMLP"),
        "gmlp_staged_micro": Preset(gmlp_staged((4, 6, 2), (128, 256, 320), 2, 32, 10), "gMLP", about="three stages"),
        "amlp_nano": Preset(
            gmlp(8, 96, patch_size=4, img_size=32, num_classes=10, attention=TinyAttention(32, bias=False)), "aMLP"
        ),
        "amlp_micro": Preset(
            gmlp(12, 256, patch_size=4, img_size=32, num_classes=10, attention=TinyAttention(64, bias=False)), "aMLP"
        ),
        "gmlp_l18": Preset(gmlp_text(18, 512, 3072), "gMLP", table(4, "59")),
        "gmlp_l36": Preset(gmlp_text(36, 512, 3072), "gMLP", table(3, "102")),
        "gmlp_l72": Preset(gmlp_text(72, 512, 3072), "gMLP", table(4, "187")),
        "gmlp_l144": Preset(gmlp_text(144, 512, 3072), "gMLP", table(4, "357")),
        "gmlp_l36_linear": Preset(gmlp_text(36, 512, 2048, variant="linear"), "gMLP", table(3, "92", UNSPLIT)),
        "gmlp_l36_additive": Preset(gmlp_text(36, 512, 2048, variant="additive"), "gMLP", table(3, "92", UNSPLIT)),
        "gmlp_l36_multiplicative": Preset(
            gmlp_text(36, 512, 2048, variant="multiplicative"), "gMLP", table(3, "92", UNSPLIT)
        ),
        "gmlp_base": Preset(gmlp_text(48, 512, 3072, seq_len=512), "gMLP", table(5, "130")),
        "gmlp_large": Preset(gmlp_text(96, 768, 3072, seq_len=512), "gMLP", table(5, "365")),
        "gmlp_xlarge": Preset(gmlp_text(144, 1024, 4096, seq_len=512), "gMLP", table(5, "941")),
        "amlp_base": Preset(
            gmlp_text(36, 512, 3072, seq_len=512, attention=TinyAttention(64)), "aMLP", table(5, "109")
        ),
        "amlp_large": Preset(
            gmlp_text(72, 768, 3072, seq_len=512, attention=TinyAttention(128)), "aMLP", table(5, "316")
        ),
        "gmlp_mlm_tiny": Preset(gmlp_text(6, 128, 768, vocab_size=8192), "gMLP"),
        "gmlp_mlm_small": Preset(gmlp_text(12, 256, 1536, vocab_size=16_384), "gMLP"),
        "amlp_mlm_tiny": Preset(gmlp_text(6, 128, 768, vocab_size=8192, attention=TinyAttention(32)), "aMLP"),
        "amlp_mlm_small": Preset(gmlp_text(12, 256, 1536, vocab_size=16_384, attention=TinyAttention(64)), "aMLP"),
        "gmlp_causal_tiny": Preset(gmlp_text(6, 128, 768, vocab_size=8192, causal=True), "gMLP"),
        "gmlp_causal_small": Preset(gmlp_text(12, 256, 1536, seq_len=256, vocab_size=16_384, causal=True), "gMLP"),
        "gmlp_causal_l18": Preset(gmlp_text(18, 512, 3072, seq_len=512, causal=True), "gMLP"),
        "gmlp_causal_l36": Preset(gmlp_text(36, 512, 3072, seq_len=512, causal=True), "gMLP"),
        "amlp_causal_small": Preset(
            gmlp_text(12, 256, 1536, seq_len=256, vocab_size=16_384, attention=TinyAttention(64), causal=True), "aMLP"
        ),
    }
)
