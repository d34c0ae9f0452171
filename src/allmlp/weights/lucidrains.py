"""lucidrains' layout of gMLP and aMLP (g-mlp-pytorch): its names for our weights and the spec behind a .pth file.

All its norms have torch's eps 1e-5, its GELU is the exact one, the gate's matrix is dense, a tiny attention has no bias
on queries, keys and values, and the text model's output table is its own. Its files do not say whether a text model is
causal: say so with `--set block.channel.inner.causal=true`. Nor do they say whether it shifts tokens or has an
activation on its gate; such a model has no place here. A "circulant" gate is read as the dense matrix it stands for: a
lower triangle whose rows and columns are scaled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmlp.data.inputs import Inputs, TextInputs
from allmlp.errors import UserError
from allmlp.layers.head import Classes, Vocabulary
from allmlp.layers.mixers.attention import TinyAttention
from allmlp.layers.mixers.projection import Dense
from allmlp.layers.norm import LayerNorm
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.spec import override_all
from allmlp.weights.tensors import RATIO, ROOM, write_pickle
from allmlp.weights.timm import Shape, Shapes, blocks, square_image

TITLE: str = "lucidrains'"

SIGNATURES: dict[str, dict[str, int]] = {
    "gMLP": {
        "to_patch_embed.1.weight": 2,
        "layers.0.fn.fn.proj_in.0.weight": 2,
        "layers.0.fn.fn.sgu.weight": 3,
        "to_logits.2.weight": 2,
    },
    "gMLP for text": {
        "to_embed.weight": 2,
        "layers.0.fn.fn.fn.proj_in.0.weight": 2,
        "layers.0.fn.fn.fn.sgu.weight": 3,
        "to_logits.1.weight": 2,
    },
}
"""The weights by which a family is known, with their number of axes."""
SPARE: tuple[str, ...] = ()
UNTOLD: dict[str, str] = {"gMLP for text": "block.channel.inner.causal"}
"""What only the one who made a file knows."""

AROUND = {"stem.proj": "to_patch_embed.1", "stem.embedding": "to_embed", "norm": "to_logits.0"}
BLOCK = {
    "channel.mix.up": "proj_in.0",
    "channel.mix.down": "proj_out",
    "channel.mix.inner.norm": "sgu.norm",
    "channel.mix.inner.proj": "sgu",
    "channel.mix.inner.side.qkv": "attn.to_qkv",
    "channel.mix.inner.side.out": "attn.to_out",
}
"""Our module -> its name there, inside its block."""
INNER = {"gMLP": "fn.fn", "gMLP for text": "fn.fn.fn"}
"""Where a block's MLP lies: that of text is wrapped once more."""
OUTPUT = {"gMLP": "to_logits.2", "gMLP for text": "to_logits.1"}

EPS = LayerNorm(1e-5)
NORMS = {"norm": EPS, "block.norm": EPS, "block.channel.inner.norm": EPS}


def inputs(family: str, spec: Encoder, config: Mapping[str, Any]) -> None:
    """Neither pixels nor words are agreed on there."""


def keys(family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """lucidrains' name of one of our weights; KeyError where it has none."""
    block = re.match(r"blocks\.(\d+)\.", name)
    module, _, kind = (name[block.end() :] if block else name).rpartition(".")
    if block:
        place = "fn.norm" if module == "channel.norm" else f"{INNER[family]}.{BLOCK[module]}"
        return (f"layers.{block.group(1)}.{place}.{kind}",)
    return (f"{OUTPUT[family] if module in ('head', 'head.proj') else AROUND[module]}.{kind}",)


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in its shape: a gate there has heads, of which ours is the only one."""
    return tensor.unsqueeze(0) if ".inner.proj." in name else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back: the same numbers in the same order."""
    return tensor.reshape(shape)


def describe(family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
    """The model whose weights have these names and shapes."""
    inner = f"layers.0.{INNER[family]}."
    depth = blocks(shapes, r"layers\.(\d+)\.")
    heads, tokens, _ = shapes[f"{inner}sgu.weight"]
    hidden, width = shapes[f"{inner}proj_in.0.weight"]
    if heads != 1:
        raise UserError(f"its gate has {heads} heads, each with a matrix of its own; only one can be read")
    if not width or hidden % width:
        raise UserError(f"{hidden} hidden channels are not a multiple of {width}, as they are there")
    qkv = shapes.get(f"{inner}attn.to_qkv.weight")
    side = TinyAttention(qkv[0] // 3, bias=False) if qkv else None
    if family == "gMLP for text":
        spec = gmlp_text(depth, width, hidden, tokens, shapes["to_embed.weight"][0], side=side)
        changes = NORMS | {"block.channel.inner.project": Dense(), "head": Vocabulary(tied=False, bias=True)}
        return override_all(spec, changes)
    colours, side_length = square_patch(shapes["to_patch_embed.1.weight"][1])
    changes = NORMS | {
        "block.channel.hidden": hidden,
        "stem.patch": (side_length, side_length),
        "stem.in_channels": colours,
        "stem.image": square_image(tokens, [side_length, side_length]),
        "head": Classes(shapes["to_logits.2.weight"][0]),
    }
    return override_all(gmlp(depth, width, 1, 1, side=side), changes)


def square_patch(numbers: int) -> tuple[int, int]:
    """Colours and side of a square patch of so many numbers; a file does not say more."""
    for colours in (3, 1):
        side = math.isqrt(numbers // colours)
        if side and colours * side**2 == numbers:
            return colours, side
    raise UserError(f"{numbers} numbers are not a square patch, and other sizes are not written in such a file")


def tidy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every circulant gate as its matrix: W[i, j] = w[n - 1 - (i - j)] x[i] y[j] for j <= i, else 0."""
    found = dict(tensors)
    gates = [name.removesuffix("circulant_pos_x") for name in tensors if name.endswith(".sgu.circulant_pos_x")]
    given = sum(tensor.numel() for tensor in tensors.values())
    room = ROOM + RATIO * given
    for gate in gates:
        parts = [found.pop(gate + part, None) for part in ("weight", "circulant_pos_x", "circulant_pos_y")]
        weight, x, y = parts
        if weight is None or x is None or y is None or not weight.shape == x.shape == y.shape or weight.dim() != 2:
            raise UserError(f"{gate}weight and its circulant_pos_x and circulant_pos_y do not fit together")
        room -= weight.numel() * weight.shape[1]
        if room < 0:
            raise UserError(f"{gate}weight stands for a matrix over {weight.shape[1]:,} tokens; it is refused")
        found[gate + "weight"] = triangle(weight) * x[:, :, None] * y[:, None, :]
    return found


def triangle(weight: Tensor) -> Tensor:
    """Lower triangular Toeplitz matrices of vectors that end with the diagonal, h n -> h n n."""
    places = torch.arange(weight.shape[1])
    distance = places[:, None] - places[None, :]
    return torch.where(distance >= 0, weight.flip(1)[:, distance.clamp(min=0)], 0.0)


def files(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    return {}


def write(path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    write_pickle(path, tensors)
