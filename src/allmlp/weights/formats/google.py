"""Google's format of MLP-Mixer, .npz files of Flax parameters.

Flax stores a dense kernel as inputs x outputs and a convolution kernel as height x width x channels x outputs. The
models use the tanh GELU and LayerNorm with eps 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.layers.head import PooledHead
from allmlp.models.encoder import Encoder
from allmlp.models.mixer import mixer
from allmlp.spec import override_all
from allmlp.weights.formats.format import (
    HALF,
    Format,
    NativeName,
    Shape,
    Shapes,
    Signatures,
    classifier,
    count_blocks,
    infer_img_size,
    patch_kernel,
    rename_keys,
)
from allmlp.weights.tensors import write_npz

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
"""Native module, relative to its block -> its name in Flax."""

OLD_KEYS = {
    r"^params/": "",
    r"^Mixer/encoder_norm/": "pre_head_layer_norm/",
    r"^embedding/": "stem/",
    r"^Mixer/encoderblock_(\d+)/": r"MixerBlock_\1/",
    r"/(token|channel)_mixing_phase_0/(kernel|bias)1$": r"/\1_mixing/Dense_0/\2",
    r"/(token|channel)_mixing_phase_0/(kernel|bias)2$": r"/\1_mixing/Dense_1/\2",
}
"""Patterns of keys with the prefix of a full Flax tree, or from before Flax linen -> current keys."""


class Google(Format):
    """Google's format of MLP-Mixer."""

    TITLE = "Google's"
    SIGNATURES: ClassVar[Signatures] = {
        "Mixer": {
            "stem/kernel": 4,
            "MixerBlock_0/token_mixing/Dense_0/kernel": 2,
            "MixerBlock_0/channel_mixing/Dense_0/kernel": 2,
        }
    }

    def normalize_keys(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename old keys; the old MLP weights also have dimensions of size one."""
        squeezed = {name: array.squeeze() if "_phase_0/" in name else array for name, array in tensors.items()}
        return rename_keys(squeezed, OLD_KEYS)

    def preprocessing(self, family: str, spec: Encoder, config: Mapping[str, Any]) -> ImagePreprocessing:
        """Pixels in [-1, 1]; Google evaluates on the central 224 of 256 pixels."""
        return ImagePreprocessing(HALF, HALF, crop_pct=0.875)

    def keys(self, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
        block, module, parameter = NativeName.of(name)
        start = f"MixerBlock_{block}/" if block else ""
        kinds = {"bias": "bias", "weight": "scale" if module.endswith("norm") else "kernel"}
        return (f"{start}{NAMES[module]}/{kinds[parameter]}",)

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
        if name == "stem.proj.weight":
            return patch_kernel(tensor, spec).permute(2, 3, 1, 0)
        return tensor.T if tensor.dim() == 2 else tensor

    def from_source(self, family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        if name == "stem.proj.weight":
            return tensor.permute(3, 2, 0, 1).reshape(shape)
        return tensor.T if tensor.dim() == 2 else tensor

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
        rows, columns, colors, width = shapes["stem/kernel"]
        tokens, token_hidden = shapes["MixerBlock_0/token_mixing/Dense_0/kernel"]
        spec = mixer(count_blocks(shapes, r"MixerBlock_(\d+)/"), width, 1, 1, token_hidden=token_hidden)
        head = classifier(spec, shapes.get("head/bias"))
        changes = {
            "block.channel.hidden": shapes["MixerBlock_0/channel_mixing/Dense_0/kernel"][1],
            "stem.in_chans": colors,
            "stem.patch_size": (rows, columns),
            "stem.img_size": infer_img_size(tokens, [rows, columns], config),
            "head": PooledHead(head.num_classes) if head and "pre_logits/kernel" in shapes else head,
        }
        return override_all(spec, changes)

    def write(self, path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
        write_npz(path, tensors)
