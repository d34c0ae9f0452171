"""How many weights hardly count: ResMLP's figure 3."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.place import place
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.mixers.attention import AttentionLayer, BiasAttentionLayer, CrossAttentionLayer, TinyAttentionLayer
from allmlp.layers.mixers.conv import TokenConvLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import Dense, TokenProjection
from allmlp.layers.pool import ClassGather
from allmlp.models.model import Model

Role = Literal["token", "channel", "attention", "other"]
ROLES: dict[type[nn.Module], Role] = {
    TokenProjection: "token",
    TokenMlpLayer: "token",
    TokenConvLayer: "token",
    ClassGather: "token",
    ChannelMlpLayer: "channel",
    AttentionLayer: "attention",
    BiasAttentionLayer: "attention",
    CrossAttentionLayer: "attention",
    TinyAttentionLayer: "attention",
}


class Sparsity(NamedTuple):
    name: str
    role: Role
    """What the matrix mixes: tokens (the paper's linear layers), channels (its MLPs), by attention, or other things."""
    stack: str
    block: int | None
    weights: int
    share: float
    """Of the weights under 5 % of the matrix's largest."""


def small_share(weight: Tensor, limit: float = 0.05) -> float:
    """The share of weights whose absolute value is below `limit` times the largest one.

    share = #{|w| < limit max|w|} / #w
    """
    size = weight.abs()
    return float((size < limit * size.max()).double().mean())


def sparsity(model: Model, limit: float = 0.05) -> list[Sparsity]:
    """The share in every weight of two or more axes, and in every Toeplitz vector; biases, norms, scales are left out.

    Of a causal matrix only the lower triangle is counted: the rest is no weight.
    """
    found = []
    with torch.no_grad():
        for name, weight in model.named_parameters():
            owners = ancestors(model, name)
            projection = owners[-1] if isinstance(owners[-1], TokenProjection) else None
            if weight.dim() < 2 and (projection is None or not name.endswith(".weight")):
                continue
            if projection is not None and projection.causal and isinstance(projection.spec, Dense):
                lower = torch.ones_like(weight, dtype=torch.bool).tril()
                weight = weight[lower]  # noqa: PLW2901
            role: Role = next((ROLES[type(owner)] for owner in reversed(owners) if type(owner) in ROLES), "other")
            found.append(Sparsity(name, role, *place(name), weight.numel(), small_share(weight, limit)))
    return found


def ancestors(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around a parameter, from the outermost to its owner."""
    parts = name.split(".")[:-1]
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
