"""The sections on token mixing: filters as images and lines, matrices, how local and how directed they are."""

from __future__ import annotations

import math
from collections import Counter

from allmlp.analysis import plots
from allmlp.analysis.filters import (
    MIDDLE,
    Pair,
    TokenWeights,
    centre,
    direction,
    distances,
    frequencies,
    opposing_pairs,
    reach,
    spread,
    token_weights,
)
from allmlp.analysis.place import place
from allmlp.analysis.plots import Chart, Panel, Series, Words
from allmlp.analysis.record import Record
from allmlp.analysis.section import Answer, Section
from allmlp.analysis.subject import Subject
from allmlp.analysis.toeplitz import chance_share, mean_filter, toeplitz_share

LAYERS, TILES, FIRST = 36, 36, 256
"""A figure shows at most so many layers, evenly spread, and so many tiles of each; the first three layers of a Mixer
again with FIRST tiles. The tables have them all.
"""


def mixing(subject: Subject, record: Record) -> list[Section]:
    found = list(token_weights(subject.model))
    if not found:
        return [Section("token mixing", "the model has no fixed weights over tokens")]
    sections = []
    pairs = {one.name: opposing_pairs(one) for one in found if one.kind == "units"}
    matrices = [one for one in found if one.kind == "matrix"]
    sections.append(filters(record, found, pairs))
    if matrices:
        sections += [square(record, matrices), locality(record, matrices)]
    return sections


def label(name: str) -> str:
    where = place(name)
    if where.block is None:
        return name.removesuffix(".mix")
    return f"{where.stack} block {where.block}".strip()


def choose(found: list[TokenWeights]) -> tuple[list[TokenWeights], str]:
    """The layers a figure shows, and how to say so."""
    chosen = [found[number] for number in spread(len(found), LAYERS)]
    return chosen, f"{len(chosen)} of {len(found)} layers, evenly spread" if len(chosen) < len(found) else "every layer"


def filters(record: Record, found: list[TokenWeights], pairs: dict[str, list[Pair]]) -> Section:
    """The weights as maps: a table of frequencies and a mosaic of each layer."""
    answer = Answer(record, "filters")
    speeds = {one.name: frequencies(one.maps) for one in found}
    rows = [
        (one.name, one.kind, *place(one.name), *one.weight.shape[:2], float(speeds[one.name].mean())) for one in found
    ]
    columns = ("name", "kind", "stack", "block", "rows", "inputs", "frequency")
    record.table("filters", columns, rows, "Token-mixing weights; frequency in cycles per token, mean over the rows.")
    counts = Counter(one.kind for one in found)
    text = "token mixing by " + ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    if pairs:
        units = [
            (name, order, unit, pair.units[1 - side] if len(pair.units) > 1 else None, pair.frequency, pair.cosine)
            for name, several in pairs.items()
            for order, pair in enumerate(several)
            for side, unit in enumerate(pair.units)
        ]
        columns = ("name", "order", "unit", "partner", "frequency", "cosine")
        record.table("units", columns, units, "Hidden units in pairs of opposing phase, sorted by frequency.")
        cosines = [pair.cosine for several in pairs.values() for pair in several if pair.cosine is not None]
        text += f", paired with a mean cosine of {sum(cosines) / max(len(cosines), 1):.2f}"
    draw_filters(record, found, pairs)
    return answer.section(text)


def draw_filters(record: Record, found: list[TokenWeights], pairs: dict[str, list[Pair]]) -> None:
    pictures = [one for one in found if one.grid is not None or one.kind == "kernels"]
    texts = [one for one in found if one.grid is None and one.kind == "units"]
    if pictures:
        layers, which = choose(pictures)
        kinds = {one.kind for one in layers}
        what = {
            "matrix": "row i of the token matrix: what the patch at i reads, for the patches in the middle",
            "units": "one hidden unit of the token MLP, opposing pairs side by side, low frequency first",
            "kernels": "one kernel of the convolution over patches",
            "class row": "what the class token reads",
        }
        note = f"{which}; a tile is {'; '.join(what[kind] for kind in what if kind in kinds)}"
        note += f"; at most {TILES} tiles, each scaled by its own largest |weight| (red +, blue -, white 0)"
        words = Words("Which patches token mixing reads, layer by layer", note, "patch column", "patch row")
        record.figure("filters", plots.mosaics([tiles(one, pairs, TILES) for one in layers], words))
    early = [one for one in pictures if one.kind == "units"][:3]
    if early:
        note = f"up to {FIRST} units in pairs of opposing phase, from low to high frequency, evenly spread where there "
        note += "are more; each scaled by its own largest |weight| (red +, blue -, white 0)"
        words = Words("Hidden units of the first token-mixing MLPs", note, "patch column", "patch row")
        record.figure("units", plots.mosaics([tiles(one, pairs, FIRST) for one in early], words, size=3.6))
    if texts:
        layers, which = choose(texts)
        note = f"{which}; opposing pairs are neighbours, low frequency on top; each layer by its own largest |weight|"
        words = Words("Hidden units of the token-mixing MLPs over text", note, "token read", "hidden unit, sorted")
        orders = [[unit for pair in pairs[one.name] for unit in pair.units] for one in layers]
        panels = [Panel(label(one.name), one.weight[order].cpu()) for one, order in zip(layers, orders)]
        record.figure("filters", plots.heatmaps(panels, words))


def tiles(one: TokenWeights, pairs: dict[str, list[Pair]], most: int) -> Panel:
    """The maps of one layer that are shown: pairs side by side, the rows of a matrix where their patches lie."""
    if one.kind == "matrix" and one.grid is not None:
        chosen, across = centre(one.grid), min(one.grid[1], MIDDLE)
    elif one.kind == "units":
        several = pairs[one.name]
        chosen = [unit for number in spread(len(several), most // 2) for unit in several[number].units]
        across = 2 * math.ceil(math.sqrt(len(chosen)) / 2)
    else:
        chosen = spread(len(one.weight), most)
        across = math.ceil(math.sqrt(len(chosen)))
    return Panel(label(one.name), one.maps[chosen].float().cpu(), across=across)


def square(record: Record, matrices: list[TokenWeights]) -> Section:
    """The matrices over tokens as they are, and as lines over the distance."""
    answer = Answer(record, "matrices")
    lines = [mean_filter(one.weight.double()) for one in matrices]
    longest = max(len(line) // 2 for line in lines)
    offsets = range(-longest, longest + 1)
    rows = [
        (one.name, *(None if abs(d) > len(line) // 2 else float(line[d + len(line) // 2]) for d in offsets))
        for one, line in zip(matrices, lines)
    ]
    about = "w[d], the mean weight from a token to the one d places later; exact for Toeplitz weights."
    record.table("lines", ("name", *map(str, offsets)), rows, about)
    layers, which = choose(matrices)
    text = all(one.grid is None for one in matrices)
    shown = [mean_filter(one.weight.double()) for one in layers]
    kinds = [direction(line)[0] for line in shown]
    note = f"{which}; the mean over each diagonal, scaled by its largest |weight|"
    note += "; ahead of 0 are later tokens" if text else ""
    unit = "tokens" if text else "patches, row by row"
    words = Words("What token mixing reads by distance", note, f"offset to what is read ({unit})", "relative weight")
    titles = [f"{label(one.name)}, {kind}" if text else label(one.name) for one, kind in zip(layers, kinds)]
    panels = [Panel(title, line, kind) for title, line, kind in zip(titles, shown, kinds)]
    record.figure("lines", plots.filter_lines(panels, words, kinds=text))
    note = f"{which}; each by its own largest |weight| (red +, blue -, white 0); T: Toeplitz share of the energy"
    note += "" if text else " on the grid of patches"
    if any(len(one.weight) > plots.SIDE for one in layers):
        note += f"; drawn as {plots.SIDE} x {plots.SIDE} means of equal blocks"
    what, how = ("token", "") if text else ("patch", ", counted row by row")
    words = Words("The matrices over tokens", note, f"{what} that is read{how}", f"{what} that reads{how}")
    titles = [f"{label(one.name)}, T = {toeplitz_share(one.weight, one.grid):.2f}" for one in layers]
    panels = [Panel(title, one.weight.float().cpu()) for title, one in zip(titles, layers)]
    record.figure("matrices", plots.heatmaps(panels, words))
    if not text:
        grid = layers[0].grid
        assert grid is not None, "pictures have a grid"
        note = (
            f"{which}; the mean over the patches that read; each by its own largest |weight| (red +, blue -, white 0)"
        )
        words = Words("What token mixing reads by displacement", note, "patches to the right", "patches down")
        edges = grid[1] - 0.5, grid[0] - 0.5
        panels = [Panel(label(one.name), mean_filter(one.weight.float().cpu(), one.grid)) for one in layers]
        record.figure("kernels", plots.heatmaps(panels, words, (-edges[0], edges[0], edges[1], -edges[1])))
    return answer.section(f"{len(matrices)} matrices over {len(matrices[0].weight)} tokens")


def locality(record: Record, matrices: list[TokenWeights]) -> Section:
    """Toeplitz share, reach and direction of every matrix."""
    answer, rows = Answer(record, "locality"), []
    for one in matrices:
        kind, ahead = direction(mean_filter(one.weight.double())) if one.grid is None else (None, None)
        on_grid = None if one.grid is None else toeplitz_share(one.weight, one.grid)
        shares = toeplitz_share(one.weight), on_grid, chance_share(len(one.weight), one.grid)
        rows.append((one.name, *place(one.name), *shares, reach(one.weight, one.grid), kind, ahead))
    columns = ("name", "stack", "block", "toeplitz", "toeplitz_grid", "chance", "reach", "kind", "ahead")
    about = (
        "toeplitz: share of the energy that depends on the distance alone, in a line and on the grid of patches; "
        "chance: what independent numbers have. reach: mean distance read, in tokens or patches, weighted by the "
        "squared weights. kind: forward where at least 3/4 of the energy beside the token itself lies ahead, backward "
        "where at most 1/4 does, else two-sided; own token where under 5 % lies beside it."
    )
    record.table("locality", columns, rows, about)
    text = matrices[0].grid is None
    numbers = list(range(len(rows)))
    line = [Series("in a line", numbers, [row[3] for row in rows])]
    if not text:
        line.append(Series("on the grid of patches", numbers, [row[4] for row in rows]))
    line.append(Series("independent numbers", numbers, [row[5] for row in rows], dashed=True))
    even = float(distances(len(matrices[0].weight), matrices[0].grid).mean())
    far = [
        Series("this model", numbers, [row[6] or 0.0 for row in rows]),
        Series("equal weights", numbers, [even] * len(rows), dashed=True),
    ]
    charts = [
        Chart("How far the weights depend on distance alone", "Toeplitz share of the energy", line),
        Chart("How far tokens read", f"mean distance read ({'tokens' if text else 'patches'})", far),
    ]
    record.figure("locality", plots.by_depth(charts, "Shape of the matrices over tokens", "token matrix, in order"))
    shares = [row[3 if text else 4] for row in rows]
    said = f"Toeplitz share {min(shares):.2f} to {max(shares):.2f} (chance {rows[0][5]:.2f})"
    kinds = Counter(row[7] for row in rows if row[7])
    return answer.section(said + "".join(f", {count} {kind}" for kind, count in kinds.most_common()))
