"""Token-mixing weights of a layer for the web page, quantized to int8."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from allmlp.analysis.attention_maps import attention_layers
from allmlp.analysis.token_filters import TokenWeights, frequencies, token_weights
from allmlp.models.model import Model
from allmlp.serve.schema import LayerInfo, MapsResponse

MAX_WEIGHTS = 2**20
"""Weights sent for one layer; of a larger layer only the first maps are sent."""


def layers(model: Model) -> list[LayerInfo]:
    """List the layers that mix tokens, those with fixed weights before those that attend."""
    fixed = [LayerInfo(name=one.name, kind=one.kind, count=len(maps(one))) for one in token_weights(model)]
    specs = {name: getattr(layer, "spec", layer) for name, layer in attention_layers(model).items()}
    heads = {name: getattr(spec, "num_heads", 1) for name, spec in specs.items()}
    return fixed + [LayerInfo(name=name, kind="attention", count=count) for name, count in heads.items()]


def maps(weights: TokenWeights) -> Tensor:
    """Weights as maps, n h w.

    For images, one map for each row, a Mixer's hidden units sorted by frequency; for text, the matrix itself.
    """
    if weights.grid is None and weights.kind != "kernels":
        return weights.weight[None]
    selected = weights.maps
    if weights.kind == "units":
        selected = selected[frequencies(selected).argsort(stable=True)]
    return selected[: max(MAX_WEIGHTS // selected[0].numel(), 1)]


def layer_maps(weights: TokenWeights) -> MapsResponse:
    return MapsResponse(layer=weights.name, kind=weights.kind, **quantize(maps(weights)))


def quantize(values: Tensor) -> dict[str, Any]:
    """The maps n h w as fields of a response."""
    values = values.float()
    scale = float(values.abs().max()) / 127
    quantized = (values / (scale or 1.0)).round().to(torch.int8).contiguous()
    count, height, width = values.shape
    data = base64.b64encode(quantized.numpy().tobytes()).decode()
    return {"count": count, "height": height, "width": width, "scale": scale, "data": data}
