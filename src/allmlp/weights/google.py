"""Google's layout of Mixer: its names for our weights and the spec behind an .npz file.

Flax keeps a linear map as inputs x outputs and a convolution as height x width x colours x outputs. Its GELU is the
tanh formula, its LayerNorm has eps 1e-6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allmlp.data.inputs import Inputs, TextInputs
from allmlp.errors import UserError
from allmlp.layers.head import Pair
from allmlp.layers.stem import Patches
from allmlp.models.encoder import Encoder
from allmlp.models.mixer import mixer
from allmlp.spec import override_all
from allmlp.weights.tensors import write_npz
from allmlp.weights.timm import Shape, Shapes, blocks, classifier, square_image

TITLE: str = "Google's"

SIGNATURES: dict[str, dict[str, int]] = {
    "Mixer": {
        "stem/kernel": 4,
        "MixerBlock_0/token_mixing/Dense_0/kernel": 2,
        "MixerBlock_0/channel_mixing/Dense_0/kernel": 2,
    }
}
"""The weights by which the family is known, with their number of axes."""
SPARE: tuple[str, ...] = ()
UNTOLD: dict[str, str] = {}

NAMES = {
    "stem.proj": "stem",
    "token.norm": "LayerNorm_0",
    "token.mix.up": "token_mixing/Dense_0",
    "token.mix.down": "token_mixing/Dense_1",
    "channel.norm": "LayerNorm_1",
    "channel.mix.up": "channel_mixing/Dense_0",
    "channel.mix.down": "channel_mixing/Dense_1",
    "norm": "pre_head_layer_norm",
    "head.pooler": "pre_logits",
    "head.proj": "head",
}
"""Our module, inside its block -> its name there."""

OLDER = {
    r"^params/": "",
    r"^Mixer/encoder_norm/": "pre_head_layer_norm/",
    r"^embedding/": "stem/",
    r"^Mixer/encoderblock_(\d+)/": r"MixerBlock_\1/",
    r"/(token|channel)_mixing_phase_0/(kernel|bias)1$": r"/\1_mixing/Dense_0/\2",
    r"/(token|channel)_mixing_phase_0/(kernel|bias)2$": r"/\1_mixing/Dense_1/\2",
}
"""Names of a whole Flax tree and from before Flax's linen -> those of today."""


def inputs(family: str, spec: Encoder, config: Mapping[str, Any]) -> Inputs:
    """Pixels from -1 to 1. Google's own evaluation brings the picture to 256 pixels and keeps 224."""
    return Inputs((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop=0.875)


# --- names and shapes -------------------------------------------------------------------------------------


def keys(family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """Google's name of one of our weights; KeyError where it has none."""
    block = re.match(r"blocks\.(\d+)\.", name)
    start = f"MixerBlock_{block.group(1)}/" if block else ""
    module, _, kind = (name[block.end() :] if block else name).rpartition(".")
    kinds = {"bias": "bias", "weight": "scale" if module.endswith("norm") else "kernel"}
    return (f"{start}{NAMES[module]}/{kinds[kind]}",)


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in Google's order of axes."""
    if name == "stem.proj.weight":
        assert isinstance(spec.stem, Patches)
        return tensor.reshape(-1, spec.stem.in_channels, *spec.stem.patch).permute(2, 3, 1, 0)
    return tensor.T if tensor.dim() == 2 else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back."""
    if name == "stem.proj.weight":
        return tensor.permute(3, 2, 0, 1).reshape(shape)
    return tensor.T if tensor.dim() == 2 else tensor


def describe(family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
    """The model whose weights have these names and shapes."""
    rows, columns, colours, width = shapes["stem/kernel"]
    tokens, token_hidden = shapes["MixerBlock_0/token_mixing/Dense_0/kernel"]
    spec = mixer(blocks(shapes, r"MixerBlock_(\d+)/"), width, 1, 1, token_hidden=token_hidden)
    head = classifier(spec, shapes.get("head/bias"))
    changes = {
        "block.channel.hidden": shapes["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
        "stem.in_channels": colours,
        "stem.patch": (rows, columns),
        "stem.image": square_image(tokens, [rows, columns]),
        "head": Pair(head.classes) if head and "pre_logits/kernel" in shapes else head,
    }
    return override_all(spec, changes)


def tidy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Older names in today's; the older weights of MLPs have axes of size one besides."""
    renamed: dict[str, Tensor] = {}
    for old, array in tensors.items():
        new = old
        for pattern, replacement in OLDER.items():
            new = re.sub(pattern, replacement, new)
        if new in renamed:
            raise UserError(f"it has {new} twice")
        renamed[new] = array.squeeze() if "_phase_0/" in old else array
    return renamed


def files(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    return {}


def write(path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    write_npz(path, tensors)
