"""Scale a model in tokens, width or depth, and fit how its cost grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from allmlp.errors import UserError
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.spec import override_all

ScalingAxis = Literal["tokens", "width", "depth"]
FACTORS: dict[str, tuple[float, ...]] = {"tokens": (0.25, 0.5, 1, 2, 4), "width": (0.5, 1, 2), "depth": (0.5, 1, 2)}


class ScaledModel(NamedTuple):
    size: int
    """Tokens, channels or blocks."""
    spec: Encoder


def scaled_models(spec: ModelSpec, what: ScalingAxis) -> list[ScaledModel]:
    """`spec` in several sizes, smallest first; only what depends on the scaled size changes."""
    if not isinstance(spec, Encoder) or spec.stages:
        kind = type(spec).__name__ if not isinstance(spec, Encoder) else f"pyramid of {len(spec.all_stages)} stages"
        raise UserError(f"--scale needs a model with a single stack of blocks, not a {kind}")
    by_size = {}
    for factor in FACTORS[what]:
        scaled = SCALE[what](spec, factor)
        size = {"tokens": scaled.stem.tokens, "width": scaled.width, "depth": scaled.depth}[what]
        by_size[size] = ScaledModel(size, scaled)
    return list(by_size.values())


def tokens(spec: Encoder, factor: float) -> Encoder:
    """A larger image or a longer text."""
    stem = spec.stem
    if isinstance(stem, PatchEmbed):
        sizes = [
            max(1, round(size // patch * factor**0.5)) * patch for size, patch in zip(stem.img_size, stem.patch_size)
        ]
        return spec.configure(img_size=tuple(sizes))
    return spec.configure(seq_len=max(1, round(stem.tokens * factor)))


def width(spec: Encoder, factor: float) -> Encoder:
    """Hidden widths and the number of heads scale along, as between published sizes."""
    changes: dict[str, Any] = {"width": round(spec.width * factor)}
    token, channel = spec.block.token, spec.block.channel
    if isinstance(channel, ChannelMlp):
        changes["block.channel.hidden"] = round(channel.hidden * factor)
    if isinstance(token, TokenMlp) and token.hidden is not None:
        changes["block.token.hidden"] = round(token.hidden * factor)
    if isinstance(token, Attention):
        changes["block.token.num_heads"] = max(1, round(token.num_heads * factor))
    return override_all(spec, changes)


def depth(spec: Encoder, factor: float) -> Encoder:
    return spec.replace(depth=max(1, round(spec.depth * factor)))


SCALE = {"tokens": tokens, "width": width, "depth": depth}


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """e in cost ~ size^e: the slope of the least-squares line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y)) / sum((a - middle) ** 2 for a in x)
