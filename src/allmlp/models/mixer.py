"""MLP-Mixer (Tolstikhin et al., 2021): a token MLP and a channel MLP in every block.

Initialized as Google's Flax code: LeCun normal, biases and classifier zero, tanh GELU.
"""

from __future__ import annotations

from allmlp.layers import (
    Block,
    ChannelMlp,
    ClassifierHead,
    Init,
    LecunNormal,
    LMHead,
    MeanPool,
    PatchEmbed,
    TokenEmbed,
    TokenMlp,
    Zeros,
)
from allmlp.models.bert import TEXT_INIT
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

SIZES = {"s": (8, 512), "b": (12, 768), "l": (24, 1024), "h": (32, 1280)}


def mixer(
    depth: int,
    width: int,
    patch_size: int,
    img_size: int = 224,
    num_classes: int = 1000,
    token_hidden: int | None = None,
) -> Encoder:
    """The hidden width of the token MLP is half the number of channels, that of the channel MLP four times."""
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((img_size, img_size), (patch_size, patch_size)),
        block=Block(
            token=TokenMlp(token_hidden or width // 2, act="gelu_tanh"), channel=ChannelMlp(4 * width, act="gelu_tanh")
        ),
        pool=MeanPool(),
        head=ClassifierHead(num_classes, init=Init(Zeros())),
        init=Init(LecunNormal()),
    )


def mixer_text(depth: int, width: int, token_hidden: int, hidden: int, vocab_size: int = 32_000) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len=128),
        block=Block(token=TokenMlp(token_hidden), channel=ChannelMlp(hidden)),
        head=LMHead(),
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
    f"mixer_{size}{patch_size}": Preset(mixer(*SIZES[size], patch_size), "Mixer", PRINTED.get(f"{size}{patch_size}"))
    for size, patch_size in [("s", 32), ("s", 16), ("s", 8), ("b", 32), ("b", 16), ("l", 32), ("l", 16), ("h", 14)]
} | {
    "mixer_nano": Preset(mixer(6, 128, 4, img_size=32, num_classes=10), "Mixer"),
    "mixer_micro": Preset(mixer(12, 256, 4, img_size=32, num_classes=10), "Mixer"),
    "mixer_mlm": Preset(
        mixer_text(24, 768, 384, 2304),
        "Mixer",
        Published(
            "112",
            "gMLP, table 3",
            note="the caption's channel width 3072 gives 140.4 M; 2304, used here, gives the printed 112",
        ),
    ),
    "mixer_mlm_tiny": Preset(mixer_text(6, 128, 64, 512, vocab_size=8192), "Mixer"),
    "mixer_mlm_small": Preset(mixer_text(12, 256, 128, 1024, vocab_size=16_384), "Mixer"),
}
