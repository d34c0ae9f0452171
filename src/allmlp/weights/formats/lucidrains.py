"""The format of gMLP and aMLP in lucidrains' g-mlp-pytorch, .pth files.

All norms have eps 1e-5, GELU is exact, the gate's matrix is dense, tiny attention has no bias on queries, keys and
values, and the output embedding of text models is not tied. The files do not state whether a text model is causal: set
it with `--set block.channel.inner.causal=true`. Nor do they state token shift or an activation on the gate, which are
not supported. A "circulant" gate is converted to its dense matrix, a lower triangle with scaled rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead, LMHead
from allmlp.layers.mixers.attention import TinyAttention
from allmlp.layers.mixers.projection import Dense
from allmlp.layers.norm import LayerNorm
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.spec import override_all
from allmlp.weights.formats.format import Format, NativeName, Shapes, Signatures, count_blocks, infer_img_size
from allmlp.weights.tensors import MAX_EXPANSION, SLACK_BYTES

OUTER = {"stem.proj": "to_patch_embed.1", "stem.embedding": "to_embed", "norm": "to_logits.0"}
BLOCK = {
    "channel.mix.up": "proj_in.0",
    "channel.mix.down": "proj_out",
    "channel.mix.inner.norm": "sgu.norm",
    "channel.mix.inner.proj": "sgu",
    "channel.mix.inner.attention.qkv": "attn.to_qkv",
    "channel.mix.inner.attention.out": "attn.to_out",
}
"""Native module -> its name in the source, relative to its block."""
INNER = {"gMLP": "fn.fn", "gMLP for text": "fn.fn.fn"}
"""Path of the MLP in a block; text models wrap it once more."""
OUTPUT = {"gMLP": "to_logits.2", "gMLP for text": "to_logits.1"}

EPS = LayerNorm(1e-5)
NORMS = {"norm": EPS, "block.norm": EPS, "block.channel.inner.norm": EPS}


class Lucidrains(Format):
    """The format of gMLP and aMLP in g-mlp-pytorch."""

    TITLE = "lucidrains'"
    SIGNATURES: ClassVar[Signatures] = {
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
    NOT_INFERRED: ClassVar[dict[str, str]] = {"gMLP for text": "block.channel.inner.causal"}

    def normalize_keys(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace every circulant gate by its matrix: W[i, j] = w[n - 1 - (i - j)] x[i] y[j] for j <= i, else 0."""
        renamed = dict(tensors)
        gates = [name.removesuffix("circulant_pos_x") for name in tensors if name.endswith(".sgu.circulant_pos_x")]
        given = sum(tensor.numel() for tensor in tensors.values())
        budget = SLACK_BYTES + MAX_EXPANSION * given
        for gate in gates:
            parts = [renamed.pop(gate + part, None) for part in ("weight", "circulant_pos_x", "circulant_pos_y")]
            weight, x, y = parts
            if weight is None or x is None or y is None or not weight.shape == x.shape == y.shape or weight.dim() != 2:
                raise UserError(f"{gate}weight and its circulant_pos_x and circulant_pos_y have incompatible shapes")
            budget -= weight.numel() * weight.shape[1]
            if budget < 0:
                raise UserError(
                    f"{gate}weight expands to a matrix over {weight.shape[1]:,} tokens, which is too large for this "
                    "file"
                )
            renamed[gate + "weight"] = causal_toeplitz(weight) * x[:, :, None] * y[:, None, :]
        return renamed

    def keys(self, family: str, name: str, spec: Encoder) -> tuple[str, ...]:
        block, module, parameter = NativeName.of(name)
        if block:
            path = "fn.norm" if module == "channel.norm" else f"{INNER[family]}.{BLOCK[module]}"
            return (f"layers.{block}.{path}.{parameter}",)
        return (f"{OUTPUT[family] if module in ('head', 'head.proj') else OUTER[module]}.{parameter}",)

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
        # The gate has a dimension for heads; ours has a single head.
        return tensor.unsqueeze(0) if ".inner.proj." in name else tensor

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
        inner = f"layers.0.{INNER[family]}."
        depth = count_blocks(shapes, r"layers\.(\d+)\.")
        heads, tokens, _ = shapes[f"{inner}sgu.weight"]
        hidden, width = shapes[f"{inner}proj_in.0.weight"]
        if heads != 1:
            raise UserError(f"its gate has {heads} heads; only gates with one head are supported")
        if not width or hidden % width:
            raise UserError(f"{hidden} hidden channels are not a multiple of the width {width}")
        qkv = shapes.get(f"{inner}attn.to_qkv.weight")
        attention = TinyAttention(qkv[0] // 3, bias=False) if qkv else None
        if family == "gMLP for text":
            spec = gmlp_text(depth, width, hidden, tokens, shapes["to_embed.weight"][0], attention=attention)
            changes = NORMS | {"block.channel.inner.projection": Dense(), "head": LMHead(tied=False, bias=True)}
            return override_all(spec, changes)
        colors, side_length = square_patch(shapes["to_patch_embed.1.weight"][1])
        changes = NORMS | {
            "block.channel.hidden": hidden,
            "stem.patch_size": (side_length, side_length),
            "stem.in_chans": colors,
            "stem.img_size": infer_img_size(tokens, [side_length, side_length], config),
            "head": ClassifierHead(shapes["to_logits.2.weight"][0]),
        }
        return override_all(gmlp(depth, width, 1, 1, attention=attention), changes)


def square_patch(numbers: int) -> tuple[int, int]:
    """in_chans and patch size of a square patch with this many values."""
    for colors in (3, 1):
        side = math.isqrt(numbers // colors)
        if side and colors * side**2 == numbers:
            return colors, side
    raise UserError(f"{numbers} values are not a square patch, and the file does not state another patch size")


def causal_toeplitz(weight: Tensor) -> Tensor:
    """Lower triangular Toeplitz matrices of vectors that end with the diagonal, h n -> h n n."""
    positions = torch.arange(weight.shape[1])
    distance = positions[:, None] - positions[None, :]
    return torch.where(distance >= 0, weight.flip(1)[:, distance.clamp(min=0)], 0.0)
