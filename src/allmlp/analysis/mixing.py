"""The sections on token mixing: filters as images and lines, token matrices, their locality and direction."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch

from allmlp.analysis import figures
from allmlp.analysis.figures import Chart, FigureText, Panel, Series
from allmlp.analysis.module_path import module_path
from allmlp.analysis.output_folder import OutputFolder, Section
from allmlp.analysis.target import AnalysisTarget
from allmlp.analysis.toeplitz import chance_fraction, mean_filter, toeplitz_fraction
from allmlp.analysis.token_filters import (
    CENTER,
    TokenWeights,
    UnitPair,
    center_patches,
    direction,
    evenly_spaced,
    frequencies,
    opposing_pairs,
    reach,
    token_weights,
    undescribed_mixers,
)
from allmlp.layers.token_roles import token_parameters
from allmlp.models.external import ExternalModel
from allmlp.models.model import Model

LAYERS, TILES, FIRST = 36, 36, 256
"""The largest number of layers in a figure and of tiles per layer; the first three layers of a Mixer are drawn again
with up to FIRST tiles. The tables have all of them.
"""
SCALE = "scaled by its own largest |weight| (red +, blue -, white 0)"


def mixing_sections(target: AnalysisTarget, output: OutputFolder) -> list[Section]:
    layers = list(token_weights(target.model))
    if not layers:
        return [Section("token mixing", why_no_weights(target.model))]
    pairs = {one.name: opposing_pairs(one) for one in layers if one.kind == "units"}
    matrices = [one for one in layers if one.kind == "matrix"]
    sections = [filter_section(output, layers, pairs, undescribed_mixers(target.model))]
    if matrices:
        sections += [matrix_section(output, matrices), locality_section(output, matrices)]
    return sections


def why_no_weights(model: Model) -> str:
    """Reason why there are no token-mixing weights to show."""
    if isinstance(model, ExternalModel):
        return "not known for a network of another package"
    unknown = undescribed_mixers(model)
    if unknown:
        return f"not known for {', '.join(unknown)}, which declares no token_roles"
    if any(parameter.role == "attention" for parameter in token_parameters(model)):
        return "attention stores no weights over tokens"
    return "no parameter of the model acts on tokens"


def label(name: str) -> str:
    path = module_path(name)
    if path.block is None:
        return name.removesuffix(".mix")
    return f"{path.stack} block {path.block}".strip()


def choose(layers: list[TokenWeights]) -> tuple[list[TokenWeights], str]:
    """The layers shown in a figure, and a description of the selection."""
    chosen = [layers[index] for index in evenly_spaced(len(layers), LAYERS)]
    if len(chosen) == len(layers):
        return chosen, "every layer"
    return chosen, f"{len(chosen)} of {len(layers)} layers, evenly spaced"


def filter_section(
    output: OutputFolder, layers: list[TokenWeights], pairs: dict[str, list[UnitPair]], unknown: list[str]
) -> Section:
    """The weights as maps: a table of frequencies and a mosaic for each layer."""
    rows = [
        (one.name, one.kind, *module_path(one.name), *one.weight.shape[:2], float(frequencies(one.maps).mean()))
        for one in layers
    ]
    columns = ("name", "kind", "stack", "block", "rows", "inputs", "frequency")
    output.table("filters", columns, rows, "Token-mixing weights; frequency in cycles per token, mean over the rows.")
    counts = Counter(one.kind for one in layers)
    text = "token mixing by " + ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    if pairs:
        units = [
            (name, order, unit, pair.units[1 - side] if len(pair.units) > 1 else None, pair.frequency, pair.cosine)
            for name, several in pairs.items()
            for order, pair in enumerate(several)
            for side, unit in enumerate(pair.units)
        ]
        columns = ("name", "order", "unit", "partner", "frequency", "cosine")
        output.table("units", columns, units, "Hidden units in pairs of opposing phase, sorted by frequency.")
        cosines = [pair.cosine for several in pairs.values() for pair in several if pair.cosine is not None]
        text += f", paired with a mean cosine of {sum(cosines) / max(len(cosines), 1):.2f}"
    if unknown:
        text += f"; not known for {', '.join(unknown)}, which declares no token_roles"
    draw_filters(output, layers, pairs)
    return output.section("filters", text)


def draw_filters(output: OutputFolder, all_layers: list[TokenWeights], pairs: dict[str, list[UnitPair]]) -> None:
    on_grid = [one for one in all_layers if one.grid is not None or one.kind == "kernels"]
    text_units = [one for one in all_layers if one.grid is None and one.kind == "units"]
    if on_grid:
        layers, which = choose(on_grid)
        kinds = {one.kind for one in layers}
        tile = {
            "matrix": "row i of the token matrix, what patch i reads, for the patches in the center",
            "units": "one hidden unit of the token MLP, opposing pairs side by side, low frequencies first",
            "kernels": "one kernel of the convolution over patches",
            "class row": "what the class token reads",
        }
        note = f"{which}; a tile is {'; '.join(tile[kind] for kind in tile if kind in kinds)}"
        note += f"; at most {TILES} tiles, each {SCALE}"
        text = FigureText("Patches read by token mixing, by layer", note, "patch column", "patch row")
        output.figure("filters", figures.mosaics([tiles(one, pairs, TILES) for one in layers], text))
    early = [one for one in on_grid if one.kind == "units"][:3]
    if early:
        note = f"up to {FIRST} units in pairs of opposing phase, from low to high frequency, evenly spaced if there "
        note += f"are more; each {SCALE}"
        text = FigureText("Hidden units of the first token-mixing MLPs", note, "patch column", "patch row")
        output.figure("units", figures.mosaics([tiles(one, pairs, FIRST) for one in early], text, size=3.6))
    if text_units:
        layers, which = choose(text_units)
        note = f"{which}; opposing pairs are adjacent, low frequencies on top; each layer {SCALE}"
        text = FigureText("Hidden units of the token-mixing MLPs over text", note, "token read", "hidden unit, sorted")
        orders = [[unit for pair in pairs[one.name] for unit in pair.units] for one in layers]
        panels = [Panel(label(one.name), one.weight[order].cpu()) for one, order in zip(layers, orders)]
        output.figure("filters", figures.heatmaps(panels, text))


def tiles(one: TokenWeights, pairs: dict[str, list[UnitPair]], most: int) -> Panel:
    """The maps of one layer that are drawn: units in pairs, the rows of a matrix at the position of their patches."""
    if one.kind == "matrix" and one.grid is not None:
        chosen, across = center_patches(one.grid), min(one.grid[1], CENTER)
    elif one.kind == "units":
        several = pairs[one.name]
        chosen = [unit for index in evenly_spaced(len(several), most // 2) for unit in several[index].units]
        across = 2 * math.ceil(math.sqrt(len(chosen)) / 2)
    else:
        chosen = evenly_spaced(len(one.weight), most)
        across = math.ceil(math.sqrt(len(chosen)))
    return Panel(label(one.name), one.maps[chosen].float().cpu(), across=across)


def matrix_section(output: OutputFolder, matrices: list[TokenWeights]) -> Section:
    """The token matrices as images, and their mean weight by distance."""
    lines = {one.name: mean_filter(one.weight.double()) for one in matrices}
    longest = max(len(line) // 2 for line in lines.values())
    offsets = range(-longest, longest + 1)
    rows = [
        (name, *(None if abs(d) > len(line) // 2 else float(line[d + len(line) // 2]) for d in offsets))
        for name, line in lines.items()
    ]
    about = "w[d], the mean weight with which a token reads the one d positions later; exact for Toeplitz weights."
    output.table("lines", ("name", *map(str, offsets)), rows, about)
    layers, which = choose(matrices)
    is_text = all(one.grid is None for one in matrices)
    kinds = [direction(lines[one.name])[0] for one in layers]
    note = f"{which}; the mean over each diagonal, scaled by its largest |weight|"
    note += "; positive offsets are later tokens" if is_text else ""
    unit = "tokens" if is_text else "patches, row by row"
    text = FigureText(
        "Mean token-mixing weight by offset", note, f"offset of the token read ({unit})", "relative weight"
    )
    titles = [f"{label(one.name)}, {kind}" if is_text else label(one.name) for one, kind in zip(layers, kinds)]
    panels = [Panel(title, lines[one.name], kind) for title, one, kind in zip(titles, layers, kinds)]
    output.figure("lines", figures.filter_lines(panels, text, directions=is_text))
    note = f"{which}; each {SCALE}; T: Toeplitz fraction of the energy"
    note += "" if is_text else " on the grid of patches"
    if any(len(one.weight) > figures.SIDE for one in layers):
        note += f"; drawn as {figures.SIDE} x {figures.SIDE} means over equal blocks"
    token, how = ("token", "") if is_text else ("patch", ", row by row")
    text = FigureText("Token matrices", note, f"{token} read{how}", f"{token} that reads{how}")
    titles = [f"{label(one.name)}, T = {toeplitz_fraction(one.weight, one.grid):.2f}" for one in layers]
    panels = [Panel(title, one.weight.float().cpu()) for title, one in zip(titles, layers)]
    output.figure("matrices", figures.heatmaps(panels, text))
    if layers[0].grid is not None:
        note = f"{which}; the mean over all reading patches; each {SCALE}"
        text = FigureText("Mean token-mixing weight by displacement", note, "patches to the right", "patches down")
        panels = [Panel(label(one.name), mean_filter(one.weight.float().cpu(), one.grid)) for one in layers]
        output.figure("kernels", figures.heatmaps(panels, text, centered=True))
    tokens = " or ".join(map(str, dict.fromkeys(len(one.weight) for one in matrices)))
    return output.section("matrices", f"{len(matrices)} matrices over {tokens} tokens")


class Locality(NamedTuple):
    """A row of the locality table."""

    name: str
    stack: str
    block: int | None
    toeplitz: float
    toeplitz_grid: float | None
    chance: float
    reach: float | None
    direction: str | None
    ahead: float | None


def locality(one: TokenWeights) -> Locality:
    kind, ahead = direction(mean_filter(one.weight.double())) if one.grid is None else (None, None)
    on_grid = None if one.grid is None else toeplitz_fraction(one.weight, one.grid)
    fractions = toeplitz_fraction(one.weight), on_grid, chance_fraction(len(one.weight), one.grid, one.causal)
    return Locality(one.name, *module_path(one.name), *fractions, reach(one.weight, one.grid), kind, ahead)


def locality_section(output: OutputFolder, matrices: list[TokenWeights]) -> Section:
    """Toeplitz fraction, reach and direction of every matrix."""
    rows = [locality(one) for one in matrices]
    about = (
        "toeplitz: fraction of the energy (squared weights) that depends on the distance alone, in the sequence and on "
        "the grid of patches; chance: its expectation for independent weights, on the grid if there is one. reach: "
        "mean distance read, in tokens or patches, weighted by the squared weights. direction, of the mean weight by "
        "offset: forward if at least 3/4 of its energy on other tokens is on later ones, backward if at most 1/4 is, "
        "else two-sided; own token if under 5 % is on other tokens. ahead: the fraction on later tokens."
    )
    output.table("locality", Locality._fields, rows, about)
    grid, depth = matrices[0].grid, list(range(len(rows)))
    fractions = [Series("sequence", depth, [row.toeplitz for row in rows])]
    chances = [Series("independent weights", depth, [row.chance for row in rows], dashed=True)]
    if grid is not None:
        fractions.append(Series("grid of patches", depth, [row.toeplitz_grid or 0.0 for row in rows]))
        in_sequence = [chance_fraction(len(one.weight)) for one in matrices]
        chances = [
            chances[0]._replace(label="independent weights, grid"),
            Series("independent weights, sequence", depth, in_sequence, dashed=True),
        ]
    equal = [torch.ones_like(one.weight) for one in matrices]
    uniform = [reach(ones.tril() if one.causal else ones, one.grid) or 0.0 for one, ones in zip(matrices, equal)]
    reached = [
        Series("this model", depth, [row.reach or 0.0 for row in rows]),
        Series("equal weights", depth, uniform, dashed=True),
    ]
    charts = [
        Chart("Energy that depends on distance alone", "Toeplitz fraction of the energy", [*fractions, *chances]),
        Chart("Reach", f"mean distance read ({'patches' if grid else 'tokens'})", reached),
    ]
    output.figure("locality", figures.by_depth(charts, "Locality of the token matrices", "token matrix"))
    shown = fractions[-1].ys
    chance = " to ".join(dict.fromkeys(f"{row.chance:.2f}" for row in (rows[0], rows[-1])))
    text = f"Toeplitz fraction {min(shown):.2f} to {max(shown):.2f} (chance {chance})"
    kinds = Counter(row.direction for row in rows if row.direction)
    return output.section("locality", text + "".join(f", {count} {kind}" for kind, count in kinds.most_common()))
