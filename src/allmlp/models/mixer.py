"""MLP-Mixer (Tolstikhin et al., 2021): a token MLP and a channel MLP in every block.

Initialised as Google's Flax code does: LeCun normal, biases and classifier zero, tanh GELU.
"""

from __future__ import annotations

from allmlp.layers import (
    Block,
    ChannelMlp,
    Classes,
    Init,
    LecunNormal,
    Mean,
    Patches,
    TokenMlp,
    Tokens,
    Vocabulary,
    Zeros,
)
from allmlp.models.bert import TEXT_INIT
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

SIZES = {"s": (8, 512), "b": (12, 768), "l": (24, 1024), "h": (32, 1280)}


def mixer(
    depth: int, width: int, patch: int, image: int = 224, classes: int = 1000, token_hidden: int | None = None
) -> Encoder:
    """Token MLP half as wide as the channels, channel MLP four times."""
    return Encoder(
        width=width,
        depth=depth,
        stem=Patches((image, image), (patch, patch)),
        block=Block(
            token=TokenMlp(token_hidden or width // 2, act="gelu_tanh"),
            channel=ChannelMlp(4 * width, act="gelu_tanh"),
        ),
        pool=Mean(),
        head=Classes(classes, init=Init(Zeros())),
        init=Init(LecunNormal()),
    )


def mixer_text(depth: int, width: int, token_hidden: int, hidden: int, vocabulary: int = 32_000) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=Tokens(vocabulary, length=128),
        block=Block(token=TokenMlp(token_hidden), channel=ChannelMlp(hidden)),
        head=Vocabulary(),
        init=TEXT_INIT,
    )


def published(parameters: str, macs: str | None = None, note: str = "") -> Published:
    return Published(parameters, "MLP-Mixer, table 1", macs, head=False, note=note)


MACS = "the paper's MAdds count slightly more than the matrix products"
PRINTED = {
    "s32": published("19"),
    "s16": published("18"),
    "b32": published("60"),
    "b16": published("59", "12.7", MACS),
    "l32": published("206"),
    "l16": published("207", "44.8", MACS),
    "h14": published("431"),
}

PRESETS = {
    f"mixer_{size}{patch}": Preset(mixer(*SIZES[size], patch), "Mixer", PRINTED.get(f"{size}{patch}"))
    for size, patch in [("s", 32), ("s", 16), ("s", 8), ("b", 32), ("b", 16), ("l", 32), ("l", 16), ("h", 14)]
} | {
    "mixer_nano": Preset(mixer(6, 128, 4, image=32, classes=10), "Mixer"),
    "mixer_micro": Preset(mixer(12, 256, 4, image=32, classes=10), "Mixer"),
    "mixer_mlm": Preset(
        mixer_text(24, 768, 384, 2304),
        "Mixer",
        Published(
            "112",
            "gMLP, table 3",
            note="the caption's channel width 3072 gives 140.4 M; 2304, used here, gives the printed 112",
        ),
    ),
    "mixer_mlm_tiny": Preset(mixer_text(6, 128, 64, 512, vocabulary=8192), "Mixer"),
    "mixer_mlm_small": Preset(mixer_text(12, 256, 128, 1024, vocabulary=16_384), "Mixer"),
}
