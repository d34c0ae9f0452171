"""FAIR's format of ResMLP, .pth files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.models.encoder import Encoder
from allmlp.models.resmlp import resmlp
from allmlp.spec import override_all
from allmlp.weights.formats.format import (
    IMAGENET,
    Format,
    Shapes,
    Signatures,
    classifier,
    count_blocks,
    infer_img_size,
    patch_kernel,
    translate_key,
)
from allmlp.weights.formats.timm import scale_at

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
"""Native module or parameter, relative to its block -> FAIR's name."""


class Fair(Format):
    """FAIR's format of ResMLP."""

    TITLE = "FAIR's"
    SIGNATURES: ClassVar[Signatures] = {
        "ResMLP": {"patch_embed.proj.weight": 4, "blocks.0.attn.weight": 2, "blocks.0.mlp.fc1.weight": 2}
    }

    def preprocessing(self, family: str, spec: Encoder, config: Mapping[str, Any]) -> ImagePreprocessing:
        return ImagePreprocessing(*IMAGENET, crop_pct=0.9)

    def keys(self, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
        return (translate_key(name, NAMES),)

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
        return patch_kernel(tensor, spec) if name == "stem.proj.weight" else tensor

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
        depth = count_blocks(shapes, r"blocks\.(\d+)\.")
        width, colors, *patch_size = shapes["patch_embed.proj.weight"]
        spec = resmlp(depth, width, scale_at(depth), 1, 1)
        changes = {
            "block.channel.hidden": shapes["blocks.0.mlp.fc1.weight"][0],
            "stem.in_chans": colors,
            "stem.patch_size": tuple(patch_size),
            "stem.img_size": infer_img_size(shapes["blocks.0.attn.weight"][0], patch_size, config),
            "head": classifier(spec, shapes.get("head.weight")),
        }
        return override_all(spec, changes)
