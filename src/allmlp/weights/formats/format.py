"""The interface of a weight format, and functions shared by several: key translation and inference of sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing
from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.weights.tensors import write_pickle

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Signatures = dict[str, dict[str, int]]
"""Per family, the keys that identify it, with the number of dimensions of their tensors."""

HALF = (0.5, 0.5, 0.5)
IMG_SIZE_FIELD = "stem.img_size"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Format:
    """A format of weights. "Native" is this library's layout, "source" the other one.

    The spec of a model is an `Encoder`, or a `SeriesEncoder` for families of time series.
    """

    TITLE: ClassVar[str]
    SIGNATURES: ClassVar[Signatures]
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Prefixes of source keys that may be dropped."""
    NOT_INFERRED: ClassVar[dict[str, str]] = {}
    """Per family, the field that neither keys, nor shapes, nor the configuration determine."""

    def normalize_keys(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map the variants of the format's keys to one; tensors of other formats are returned unchanged."""
        return dict(tensors)

    def preprocessing(
        self, family: str, spec: Any, config: Mapping[str, Any]
    ) -> ImagePreprocessing | TextPreprocessing | None:
        """None if the format does not define any."""
        return None

    def keys(self, family: str, name: str, spec: Any) -> tuple[str, ...]:
        """Source keys of the tensors that are stacked in the native tensor `name`; KeyError if there are none."""
        raise NotImplementedError

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Any) -> Tensor:
        """A native tensor in the shape that the source uses."""
        raise NotImplementedError

    def from_source(self, family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        """The inverse of `to_source`, here for formats that keep the order of the elements."""
        return tensor.reshape(shape)

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder | SeriesEncoder:
        """The spec for these keys and shapes; `config` is the configuration next to the weights, if there is one."""
        raise NotImplementedError

    def config_files(self, spec: Any, preprocessing: Any) -> dict[str, Any]:
        """The JSON files to write next to the weights: name -> content."""
        return {}

    def write(self, path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
        write_pickle(path, tensors)


class NativeName(NamedTuple):
    """The name of a native tensor in its parts: blocks.3.channel.norm.bias is the bias of channel.norm in block 3."""

    block: str
    """Empty outside of the blocks."""
    module: str
    parameter: str

    @classmethod
    def of(cls, name: str) -> Self:
        *block, inner = re.split(r"^blocks\.(\d+)\.", name)
        module, _, parameter = inner.rpartition(".")
        return cls(block[1] if block else "", module, parameter)


def translate_key(name: str, names: Mapping[str, str]) -> str:
    """Translate a key for a format that keeps `blocks.0.` and the last part (weight, bias, alpha, beta)."""
    block, module, parameter = NativeName.of(name)
    whole = f"{module}.{parameter}"
    return (f"blocks.{block}." if block else "") + (names[whole] if whole in names else f"{names[module]}.{parameter}")


def rename_keys(tensors: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace the patterns in all keys."""
    renamed: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        new = old
        for pattern, replacement in patterns.items():
            new = re.sub(pattern, replacement, new)
        if new in renamed:
            raise UserError(f"{new} occurs twice")
        renamed[new] = tensor
    return renamed


def patch_kernel(tensor: Tensor, spec: Encoder) -> Tensor:
    """The weight of the patch embedding as a convolution kernel, [C, in_chans, height, width]."""
    assert isinstance(spec.stem, PatchEmbed)
    return tensor.reshape(-1, spec.stem.in_chans, *spec.stem.patch_size)


def check_supported(config: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for name, needed in required.items():
        if config.get(name, needed) != needed:
            raise UserError(f"its configuration has {name} {config[name]!r}; only {needed!r} is supported")


def count_blocks(shapes: Shapes, pattern: str) -> int:
    return len({match.group(1) for name in shapes if (match := re.match(pattern, name))})


def check_sizes(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if config.get(name, size) != size:
            raise UserError(f"its configuration has {name} {config[name]!r}, its weights have {size}")


def infer_img_size(tokens: int, patch_size: list[int], config: Mapping[str, Any]) -> tuple[int, int]:
    """The image size for a square grid of `tokens` patches; other aspect ratios cannot be inferred from weights. If the
    user sets it, the overrides replace this value later.
    """
    side = math.isqrt(max(tokens, 0))
    if side**2 == tokens:
        return side * patch_size[0], side * patch_size[1]
    if IMG_SIZE_FIELD in config and tokens > 0:
        return tokens * patch_size[0], patch_size[1]
    raise UserError(
        f"{tokens} tokens are not a square grid of patches, and the file does not state another image size: set "
        f"{IMG_SIZE_FIELD}"
    )


def classifier(spec: Encoder, shape: Shape | None) -> ClassifierHead | None:
    """The head of `spec` with as many classes as a weight of this shape has rows; None without a weight."""
    if shape is None:
        return None
    assert isinstance(spec.head, ClassifierHead)
    return spec.head.replace(num_classes=shape[0] if shape else 0)
