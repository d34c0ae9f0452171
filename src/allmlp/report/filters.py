"""Token-mixing weights of a model as small images, layer by layer; `allmlp analyze` shows more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.figures import mosaic, shrink
from allmlp.analysis.mixing import label, tiles
from allmlp.analysis.toeplitz import mean_filter, toeplitz_fraction
from allmlp.analysis.token_filters import TokenWeights, direction, evenly_spaced, opposing_pairs, token_weights
from allmlp.models.model import Model
from allmlp.report.images import EmbeddedImage, weights_image

LAYERS, TILES, OFFSETS = 12, 36, 32
"""Maximum number of layers, evenly spaced; tiles per layer; offsets to either side for filters over text."""


class FilterPanel(NamedTuple):
    title: str
    note: str
    image: EmbeddedImage | None
    """None where `weights` are plotted."""
    weights: tuple[float, ...] = ()
    """w[d] for d = -OFFSETS .. OFFSETS or fewer, the largest scaled to 1."""


class Filters(NamedTuple):
    panels: list[FilterPanel]
    about: str
    """A caption, or why there are no panels."""


CAPTIONS = {
    "matrix": "each tile is a row of the token matrix: the weights of one output patch, for the central patches",
    "units": "each tile is a hidden unit of the token MLP, opposing pairs side by side, low frequencies first",
    "kernels": "each tile is a kernel of the convolution over patches",
    "class row": "each tile shows the weights of the class token over the patches",
}


def filters(model: Model) -> Filters:
    with torch.no_grad():
        layers = [one for one in token_weights(model) if one.weight.isfinite().all()]
        if not layers:
            return Filters([], "the model has no fixed weights over tokens")
        chosen = [layers[number] for number in evenly_spaced(len(layers), LAYERS)]
        panels = [panel(one) for one in chosen]
    about = "All layers" if len(chosen) == len(layers) else f"{len(chosen)} of {len(layers)} layers, evenly spaced"
    if all(one.grid or one.kind == "kernels" for one in chosen):
        kinds = [CAPTIONS[kind] for kind in CAPTIONS if any(one.kind == kind for one in chosen)]
        return Filters(panels, f"{about}; {'; '.join(kinds)}; each tile is scaled by its largest weight.")
    if any(one.kind == "matrix" for one in chosen):
        reach = min(OFFSETS, len(chosen[0].weight) - 1)
        return Filters(panels, f"{about}; mean weight by offset, up to {reach} tokens before (left) and after (right).")
    return Filters(panels, f"{about}; rows are hidden units, columns are input tokens, low frequencies on top.")


def panel(one: TokenWeights) -> FilterPanel:
    title = label(one.name)
    if one.grid or one.kind == "kernels":
        pairs = {one.name: opposing_pairs(one)} if one.kind == "units" else {}
        shown = tiles(one, pairs, TILES)
        note = f"Toeplitz fraction {toeplitz_fraction(one.weight, one.grid):.2f}" if one.kind == "matrix" else ""
        return FilterPanel(title, note, weights_image(mosaic(shown.values, shown.across)))
    if one.kind == "matrix":
        mean = mean_filter(one.weight.double())
        kind, _ = direction(mean)
        middle, reach = len(mean) // 2, min(OFFSETS, len(mean) // 2)
        return FilterPanel(title, kind, None, tuple(scaled(mean[middle - reach : middle + reach + 1]).tolist()))
    order = [unit for pair in opposing_pairs(one) for unit in pair.units] if one.kind == "units" else [0]
    return FilterPanel(title, "", weights_image(scaled(shrink(one.weight[order].float().cpu())).numpy()))


def scaled(values: Tensor) -> Tensor:
    largest = values.abs().max()
    return values / largest if largest else values
