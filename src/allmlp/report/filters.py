"""Token-mixing weights of a run's model as small pictures, layer by layer; `allmlp analyze` shows all there is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.filters import TokenWeights, direction, opposing_pairs, spread, token_weights
from allmlp.analysis.mixing import label, tiles
from allmlp.analysis.plots import mosaic, shrink
from allmlp.analysis.toeplitz import mean_filter, toeplitz_share
from allmlp.models.model import Model
from allmlp.report.pictures import Picture, weights_picture

LAYERS, TILES, OFFSETS = 12, 36, 32
"""At most so many layers, evenly spread; tiles of each; tokens to either side in the line of a filter over text."""


class Layer(NamedTuple):
    title: str
    note: str
    picture: Picture | None
    """None where a line is drawn."""
    line: tuple[float, ...] = ()
    """w[d] for d = -OFFSETS .. OFFSETS or fewer, the largest scaled to 1."""


class Filters(NamedTuple):
    layers: list[Layer]
    about: str
    """What is seen, or why there is nothing to see."""


ABOUT = {
    "matrix": "a tile is a row of the token matrix: what the patch at that place reads, for the patches in the middle",
    "units": "a tile is a hidden unit of the token MLP, opposing pairs side by side, low frequency first",
    "kernels": "a tile is a kernel of the convolution over patches",
    "class row": "a tile is what the class token reads",
}


def filters(model: Model) -> Filters:
    with torch.no_grad():
        found = [one for one in token_weights(model) if one.weight.isfinite().all()]
        if not found:
            return Filters([], "the model has no fixed weights over tokens")
        chosen = [found[number] for number in spread(len(found), LAYERS)]
        layers = [layer(one) for one in chosen]
    about = "Every layer" if len(chosen) == len(found) else f"{len(chosen)} of {len(found)} layers, evenly spread"
    if all(one.grid or one.kind == "kernels" for one in chosen):
        kinds = [ABOUT[kind] for kind in ABOUT if any(one.kind == kind for one in chosen)]
        return Filters(layers, f"{about}; {'; '.join(kinds)}; each tile by its own largest weight.")
    if any(one.kind == "matrix" for one in chosen):
        reach = min(OFFSETS, len(chosen[0].weight) - 1)
        return Filters(layers, f"{about}; mean weight by distance, {reach} tokens to either side; later ones right.")
    return Filters(layers, f"{about}; a row is a hidden unit, a column the token it reads, low frequency on top.")


def layer(one: TokenWeights) -> Layer:
    title = label(one.name)
    if one.grid or one.kind == "kernels":
        pairs = {one.name: opposing_pairs(one)} if one.kind == "units" else {}
        panel = tiles(one, pairs, TILES)
        share = f"Toeplitz share {toeplitz_share(one.weight, one.grid):.2f}" if one.kind == "matrix" else ""
        return Layer(title, share, weights_picture(mosaic(panel.values, panel.across)))
    if one.kind == "matrix":
        line = mean_filter(one.weight.double())
        kind, _ = direction(line)
        middle, reach = len(line) // 2, min(OFFSETS, len(line) // 2)
        return Layer(title, kind, None, tuple(scaled(line[middle - reach : middle + reach + 1]).tolist()))
    order = [unit for pair in opposing_pairs(one) for unit in pair.units] if one.kind == "units" else [0]
    return Layer(title, "", weights_picture(scaled(shrink(one.weight[order].float().cpu())).numpy()))


def scaled(values: Tensor) -> Tensor:
    largest = values.abs().max()
    return values / largest if largest else values
