"""The section on attention: maps of each head, entropy and distance by depth, rollout, source-target alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from allmlp.analysis import figures
from allmlp.analysis.attention_maps import (
    AttentionMap,
    TextInput,
    alignment,
    attention_layers,
    attention_maps,
    entropy,
    largest_entropy,
    mean_distance,
    read_by_output,
    rollout,
)
from allmlp.analysis.figures import Chart, FigureText, LabeledMatrix, Panel, Series
from allmlp.analysis.output_folder import OutputFolder, Section, cells
from allmlp.analysis.target import AnalysisTarget, NamedImages
from allmlp.analysis.toeplitz import Grid
from allmlp.analysis.token_filters import evenly_spaced, token_weights
from allmlp.errors import plural
from allmlp.layers.token_roles import token_parameters
from allmlp.models.encoder import Encoder
from allmlp.models.external import ExternalModel
from allmlp.models.grid import stage_number
from allmlp.models.model import ModelSpec

LAYERS, HEADS, SIDE = 24, 16, 48
"""Maximum numbers of layers, of heads per layer, and of rows per head in the figure of heads."""
LABELS = 40
"""Maps over at most this many tokens are labeled with the tokens."""


class HeadStatistics(NamedTuple):
    """A row of the table: one head of one layer, mean over the inputs."""

    name: str
    stack: str
    block: int | None
    branch: str
    head: int
    entropy: float
    largest_entropy: float
    distance: float | None
    """None for attention to the encoder and class attention: there is no distance to another text or a class token."""


def attention_section(
    target: AnalysisTarget, output: OutputFolder, images: NamedImages | None, texts: Sequence[TextInput]
) -> Section:
    model = target.model
    if isinstance(model, ExternalModel):
        return Section("attention", "not known for a network of another package")
    if not attention_layers(model):
        unknown = dict.fromkeys(type(one.layer).__name__ for one in token_parameters(model) if one.role == "attention")
        text = f"not known for {', '.join(unknown)}, which has no attention_weights"
        return Section("attention", text if unknown else "the model has no attention")
    if texts and images is None:
        inputs, read = [text.inputs for text in texts], plural(len(texts), "text")
    else:
        given, read = target.example_inputs(images)
        inputs, read = [given], read + ("; give texts as arguments" if images is None and target.tokenizer else "")
    maps_by_input = [attention_maps(model, *one) for one in inputs]
    rows = head_statistics(maps_by_input, model.spec)
    about = (
        "entropy: of the weights of a query, in nats, mean over queries and inputs; largest_entropy: that of equal "
        "weights. distance: mean distance attended to, in tokens or patches."
    )
    output.table("attention", HeadStatistics._fields, rows, f"{about} Input: {read}.")
    blocks = [row for row in rows if row.branch != "pool"]
    if blocks:
        draw_depth(output, blocks, maps_by_input[0], model.spec, read)
    draw_heads(output, maps_by_input[0], model.spec)
    mixed = [one for one in maps_by_input[0] if one.branch == "token" and one.stack != "decoder"]
    if mixed and not any(token_weights(model)) and len({one.weights.shape for one in mixed}) == 1:
        pooled = [one.weights for one in maps_by_input[0] if one.branch == "pool"]
        rolled = rollout([one.weights for one in mixed], pooled)
        draw_rollout(output, rolled, attention_grid(mixed[0], model.spec), model.spec, images, texts)
    if texts and texts[0].predicted:
        draw_alignment(output, [alignment(maps)[0] for maps in maps_by_input], texts)
    return output.section("attention", f"{summary(rows)} ({read})")


def attention_grid(one: AttentionMap, spec: ModelSpec | None) -> Grid | None:
    """The patches over which a layer attends, in the grid of its stage; class tokens are before them."""
    return spec.build_contexts[stage_number(spec, one.name)].grid if isinstance(spec, Encoder) else None


def head_statistics(maps_by_input: Sequence[list[AttentionMap]], spec: ModelSpec | None) -> list[HeadStatistics]:
    rows = []
    for same in zip(*maps_by_input):  # one layer for every input
        weights = [one.weights for one in same]
        entropies = torch.stack([entropy(one) for one in weights]).mean(0).tolist()
        largest = sum(map(largest_entropy, weights)) / len(weights)
        far: list[float | None] = [None] * len(entropies)
        if same[0].branch not in ("cross", "pool"):
            grid = attention_grid(same[0], spec)
            far = list(torch.stack([mean_distance(one, grid) for one in weights]).mean(0).tolist())
        name, stack, block, kind, _ = same[0]
        for head, (one, distance) in enumerate(zip(entropies, far)):
            rows.append(HeadStatistics(name, stack, block, kind, head, one, largest, distance))
    return rows


def layer_label(one: AttentionMap) -> str:
    """decoder cross block 3."""
    cross = "cross" if one.branch == "cross" else ""
    return one.name if one.block is None else " ".join(filter(None, (one.stack, cross, f"block {one.block}")))


def draw_depth(
    output: OutputFolder, rows: list[HeadStatistics], maps: list[AttentionMap], spec: ModelSpec | None, read: str
) -> None:
    """Entropy and distance of the heads, block by block."""
    kinds = dict.fromkeys((row.stack, row.branch) for row in rows)

    def series(stack: str, kind: str, field: str) -> Series:
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row.stack, row.branch) == (stack, kind):
                values.setdefault(row.block or 0, []).append(getattr(row, field))
        lines = list(values.values())
        name = {"token": "self-attention", "cross": "attention to the source", "channel": "tiny attention"}
        label = f"{stack} {name.get(kind, kind)}".strip()
        return Series(label, list(values), [sum(v) / len(v) for v in lines], ([*map(min, lines)], [*map(max, lines)]))

    blocks = sorted({row.block or 0 for row in rows})
    largest = {row.block or 0: row.largest_entropy for row in reversed(rows)}  # of the first layer of each block
    equal = Series("equal weights", blocks, [largest[block] for block in blocks], dashed=True)
    entropies = [series(stack, kind, "entropy") for stack, kind in kinds]
    charts = [Chart("Entropy, shaded from smallest to largest head", "nats", [*entropies, equal])]
    self_attention = [pair for pair in kinds if pair[1] != "cross"]
    if self_attention:
        # The first map of each block.
        first = {one.block or 0: one for one in reversed(maps) if (one.stack, one.branch) in self_attention}
        # For a causal model, over the tokens visible to each query.
        equals = [mean_distance((one.weights > 0).double(), attention_grid(one, spec)).mean() for one in first.values()]
        uniform = Series("equal weights", [*first], [float(one) for one in equals], dashed=True)
        far = [series(stack, kind, "distance") for stack, kind in self_attention]
        unit = "patches" if attention_grid(maps[0], spec) else "tokens"
        charts.append(
            Chart("Distance, shaded from nearest to farthest head", f"mean distance ({unit})", [*far, uniform])
        )
    output.figure("attention", figures.by_depth(charts, f"Attention by depth ({read})", "block"))


def draw_heads(output: OutputFolder, maps: list[AttentionMap], spec: ModelSpec) -> None:
    """The maps of every head for the first input."""
    panels = []
    for one in [maps[index] for index in evenly_spaced(len(maps), LAYERS)]:
        heads = one.weights[0, evenly_spaced(one.weights.shape[1], HEADS)].float().cpu()
        grid = attention_grid(one, spec)
        if grid:
            heads = read_by_output(heads, spec)[:, -grid[0] * grid[1] :].unflatten(1, grid)
        elif max(heads.shape[1:]) > SIDE:
            heads = adaptive_avg_pool2d(heads, (min(heads.shape[1], SIDE), min(heads.shape[2], SIDE)))
        panels.append(Panel(layer_label(one), heads, across=math.ceil(math.sqrt(len(heads)))))
    if attention_grid(maps[0], spec):
        what, axes = (
            "where the output looks: the row of the class token, or the mean over all patches",
            ("patch column", "patch row"),
        )
    else:
        what, axes = "row i is what token i attends to", ("token read", "token that reads")
    note = f"the first input; a tile is one head, {what}; each scaled by its largest weight (white 0)"
    output.figure("heads", figures.mosaics(panels, FigureText("Attention of each head, by layer", note, *axes)))


def draw_rollout(
    output: OutputFolder,
    rolled: Tensor,
    grid: Grid | None,
    spec: ModelSpec,
    images: NamedImages | None,
    texts: Sequence[TextInput],
) -> None:
    """Attention through all layers: over the patches of the images, or between the tokens of the first text."""
    note = "attention of all layers multiplied, half of each layer the skip connection (Abnar and Zuidema, 2020)"
    if grid is None:
        labels = texts[0].read if texts else []
        rows = labels if rolled.shape[1] == rolled.shape[2] else ["class token"]
        text = FigureText("Attention rollout", f"{note}; rows sum to 1", "token of the input", "token of the output")
        panel = LabeledMatrix("first text" if texts else "random input", rolled[0].float().cpu(), rows, labels)
        output.figure("rollout", figures.labeled_matrices([panel], text, LABELS))
        return
    maps = read_by_output(rolled, spec)[:, -grid[0] * grid[1] :].unflatten(1, grid).float().cpu()
    columns = ("image", "row", "column", "rollout")
    names = images.names if images else ("random input",)
    values = [(name, *cell) for name, one in zip(names, maps) for cell in cells(one)]
    output.table("rollout", columns, values, "The share of each patch in the output by attention rollout.")
    if images is None:
        return
    bright = interpolate(maps[:, None], images.pixels.shape[2:], mode="nearest")
    seen = images.pixels * bright / bright.amax((1, 2, 3), keepdim=True)
    rows = [[(image, name), (dark, "rollout")] for image, name, dark in zip(images.pixels, images.names, seen)]
    text = FigureText("Attention rollout", f"{note}; bright patches have the largest share", "", "")
    output.figure("rollout", figures.image_rows(rows, text))


def draw_alignment(output: OutputFolder, alignments: list[Tensor], texts: Sequence[TextInput]) -> None:
    """Draw which source tokens the decoder attends to when predicting each target token."""
    rows = [
        (number, position, text.predicted[position], column, text.read[column], value)
        for number, (weights, text) in enumerate(zip(alignments, texts))
        for position, column, value in cells(weights[: len(text.predicted)])
    ]
    columns = ("text", "target position", "target", "source position", "source", "weight")
    output.table("alignment", columns, rows, "Attention of the decoder to the source, mean over blocks and heads.")
    panels = [
        LabeledMatrix(f"text {number + 1}", weights.float().cpu(), text.predicted, text.read)
        for number, (weights, text) in enumerate(zip(alignments, texts))
    ]
    note = "attention to the source when a target token is predicted, mean over blocks and heads; rows sum to 1"
    text = FigureText("Source-target alignment", note, "source token", "target token")
    output.figure("alignment", figures.labeled_matrices(panels[:4], text, LABELS))


def summary(rows: list[HeadStatistics]) -> str:
    """Entropy and distance of the first and the last block in words."""

    def span(several: list[HeadStatistics], field: str) -> str:
        means = []
        for block in (several[0].block, several[-1].block):
            values = [getattr(row, field) for row in several if row.block == block]
            means.append(sum(values) / len(values))
        return f"{means[0]:.2f} to {means[1]:.2f}"

    blocks, pooled = ([row for row in rows if (row.branch == "pool") == inside] for inside in (False, True))
    self_attention, parts = [row for row in blocks if row.branch != "cross"], []
    if blocks:
        text = f"entropy {span(blocks, 'entropy')} nats from the first to the last block"
        equal = " to ".join(dict.fromkeys(span(blocks, "largest_entropy").split(" to ")))
        text += f" (equal weights {equal})"
        parts.append(f"{text}, distance {span(self_attention, 'distance')}" if self_attention else text)
    if pooled:
        mean = sum(row.entropy for row in pooled) / len(pooled)
        parts.append(f"class attention: entropy {mean:.2f} nats (equal weights {pooled[0].largest_entropy:.2f})")
    return "; ".join(parts)
