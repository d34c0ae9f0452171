"""The token-mixing weights of a layer, small enough for a page: one signed byte a weight."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from allmlp.analysis.filters import TokenWeights, frequencies, token_weights
from allmlp.models.model import Model
from allmlp.serve.schema import Layer, Maps

MOST = 2**20
"""Weights of one layer that are sent; of a larger one the first maps."""


def layers(model: Model) -> list[Layer]:
    """Every place where tokens mix with fixed weights. Attention has none."""
    return [Layer(name=one.name, kind=one.kind, count=len(shown(one))) for one in token_weights(model)]


def shown(weights: TokenWeights) -> Tensor:
    """Maps, n h w: over a picture one for each row, a Mixer's units from slow to fast; over text the matrix itself."""
    if weights.grid is None and weights.kind != "kernels":
        return weights.weight[None]
    maps = weights.maps
    if weights.kind == "units":
        maps = maps[frequencies(maps).argsort(stable=True)]
    return maps[: max(MOST // maps[0].numel(), 1)]


def layer_maps(weights: TokenWeights) -> Maps:
    maps = shown(weights).float()
    largest = float(maps.abs().max())
    bytes_ = (maps * (127 / largest if largest else 0.0)).round().to(torch.int8).contiguous()
    return Maps(
        layer=weights.name,
        kind=weights.kind,
        count=maps.shape[0],
        height=maps.shape[1],
        width=maps.shape[2],
        largest=largest,
        data=base64.b64encode(bytes_.numpy().tobytes()).decode(),
    )
