"""The same model with more or fewer tokens, channels or blocks: how its cost grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from allmlp.errors import UserError
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.stem import Patches
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.spec import override_all

What = Literal["tokens", "width", "depth"]
FACTORS: dict[str, tuple[float, ...]] = {"tokens": (0.25, 0.5, 1, 2, 4), "width": (0.5, 1, 2), "depth": (0.5, 1, 2)}


class Grown(NamedTuple):
    size: int
    """Tokens, channels or blocks."""
    spec: Encoder


def grow(spec: ModelSpec, what: What) -> list[Grown]:
    """`spec` in several sizes, from small to large; everything that the size decides follows, and only that."""
    if not isinstance(spec, Encoder):
        raise UserError(f"--grow takes models of one stack, not a {type(spec).__name__}")
    found = {}
    for factor in FACTORS[what]:
        grown = SCALE[what](spec, factor)
        size = {"tokens": grown.stem.tokens, "width": grown.width, "depth": grown.depth}[what]
        found[size] = Grown(size, grown)
    return list(found.values())


def tokens(spec: Encoder, factor: float) -> Encoder:
    """A larger image or a longer text."""
    stem = spec.stem
    if isinstance(stem, Patches):
        sides = [max(1, round(side // patch * factor**0.5)) * patch for side, patch in zip(stem.image, stem.patch)]
        return spec.configure(image=tuple(sides))
    return spec.configure(length=max(1, round(stem.tokens * factor)))


def width(spec: Encoder, factor: float) -> Encoder:
    """Hidden layers and the number of heads in proportion, as between the published sizes."""
    changes: dict[str, Any] = {"width": round(spec.width * factor)}
    if spec.block.channel is not None:
        changes["block.channel.hidden"] = round(spec.block.channel.hidden * factor)
    token = spec.block.token
    if isinstance(token, TokenMlp) and token.hidden is not None:
        changes["block.token.hidden"] = round(token.hidden * factor)
    if isinstance(token, Attention):
        changes["block.token.heads"] = max(1, round(token.heads * factor))
    return override_all(spec, changes)


def depth(spec: Encoder, factor: float) -> Encoder:
    return spec.replace(depth=max(1, round(spec.depth * factor)))


SCALE = {"tokens": tokens, "width": width, "depth": depth}


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """e in cost ~ size^e: the slope of the least-squares line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y)) / sum((a - middle) ** 2 for a in x)
