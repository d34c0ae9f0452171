"""FAIR's layout of ResMLP: its names for our weights and the spec behind a .pth file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allmlp.data.inputs import Inputs, TextInputs
from allmlp.models.encoder import Encoder
from allmlp.models.resmlp import resmlp
from allmlp.spec import override_all
from allmlp.weights.tensors import write_pickle
from allmlp.weights.timm import (
    IMAGENET,
    Shape,
    Shapes,
    blocks,
    classifier,
    convolution,
    scale_at,
    square_image,
    translate,
)

TITLE: str = "FAIR's"

SIGNATURES: dict[str, dict[str, int]] = {
    "ResMLP": {"patch_embed.proj.weight": 4, "blocks.0.attn.weight": 2, "blocks.0.mlp.fc1.weight": 2}
}
"""The weights by which the family is known, with their number of axes."""
SPARE: tuple[str, ...] = ()
UNTOLD: dict[str, str] = {}

NAMES = {
    "stem.proj": "patch_embed.proj",
    "token.norm": "norm1",
    "token.mix": "attn",
    "token.scale.gamma": "gamma_1",
    "channel.norm": "norm2",
    "channel.mix.up": "mlp.fc1",
    "channel.mix.down": "mlp.fc2",
    "channel.scale.gamma": "gamma_2",
    "norm": "norm",
    "head.proj": "head",
}
"""Our module or weight, inside its block -> its name there."""


def inputs(family: str, spec: Encoder, config: Mapping[str, Any]) -> Inputs:
    return Inputs(*IMAGENET, crop=0.9)


def keys(family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """FAIR's name of one of our weights; KeyError where it has none."""
    return (translate(name, NAMES),)


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in FAIR's shape: only the stem differs."""
    return convolution(tensor, spec) if name == "stem.proj.weight" else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back: the same numbers in the same order."""
    return tensor.reshape(shape)


def describe(family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
    """The model whose weights have these names and shapes."""
    depth = blocks(shapes, r"blocks\.(\d+)\.")
    width, colours, *patch = shapes["patch_embed.proj.weight"]
    spec = resmlp(depth, width, scale_at(depth), 1, 1)
    changes = {
        "block.channel.hidden": shapes["blocks.0.mlp.fc1.weight"][0],
        "stem.in_channels": colours,
        "stem.patch": tuple(patch),
        "stem.image": square_image(shapes["blocks.0.attn.weight"][0], patch),
        "head": classifier(spec, shapes.get("head.weight")),
    }
    return override_all(spec, changes)


def files(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    return {}


def write(path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    write_pickle(path, tensors)
