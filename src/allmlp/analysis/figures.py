"""The figures of the analysis: functions from numbers to matplotlib figures, and `save`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from allmlp.analysis.saliency import Saliency
from allmlp.errors import require
from allmlp.files import encodable
from allmlp.models.cost import Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")

STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "allmlp",
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""The color-blind safe palette of Okabe and Ito."""
DIRECTIONS = {"forward": COLORS[1], "backward": COLORS[0], "two-sided": COLORS[2], "own token": COLORS[7]}
WEIGHTS = "RdBu_r"
"""Diverging: white is 0, red positive, blue negative."""
ZOOM = 4
"""Pixels per weight in a mosaic."""
SIDE = 128
"""The largest number of rows and columns drawn of a matrix; a larger one is drawn as means over equal blocks."""


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the common style, without a display and without changing matplotlib's global settings."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with require("matplotlib", "analysis").rc_context(STYLE):
            return draw(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, whose parts make room for each other."""
    return require("matplotlib.figure", "analysis").Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path, kind: str) -> None:
    """Write a png or svg file; the same figure gives the same bytes."""
    for text in figure.findobj(require("matplotlib.text", "analysis").Text):
        text.set_text(encodable(text.get_text()))  # matplotlib has no letters for surrogates
    with require("matplotlib", "analysis").rc_context(STYLE):
        figure.savefig(file, format=kind, metadata={"Software": None} if kind == "png" else {"Date": None})


class Panel(NamedTuple):
    """One layer of a figure: a line (n), a matrix (r c) or tiles (n h w)."""

    title: str
    values: Tensor
    direction: str = "two-sided"
    """Direction of a line."""
    across: int = 1
    """Tiles per row."""


class FigureText(NamedTuple):
    """Title, note and axis labels of a figure."""

    title: str
    note: str
    xlabel: str
    ylabel: str


class AxesGrid(NamedTuple):
    figure: Figure
    axes: list[Axes]
    columns: int


def axes_grid(
    count: int, text: FigureText, width: float, height: float, gap: float = 0.3, columns: int = 0, below: float = 0.0
) -> AxesGrid:
    """A figure with `count` axes of this size, row by row, with space above (`gap`) and `below`; sizes in inches."""
    most_columns = columns or (count if count <= 4 else max(4, math.ceil(1.2 * math.sqrt(count * height / width))))
    rows = math.ceil(count / most_columns)
    columns = math.ceil(count / rows)
    left, right, bottom, between = 0.65, 0.2, 0.45, 0.14
    wide = max(left + right + columns * (width + between), 6.0)
    title, note = (textwrap.wrap(line, int(wide * letters)) for line, letters in ((text.title, 13), (text.note, 18)))
    top = 0.2 + 0.17 * len(title) + 0.13 * len(note)
    high = bottom + top + rows * (gap + height + below)
    figure = require("matplotlib.figure", "analysis").Figure(figsize=(wide, high))
    start = left + (wide - left - right - columns * (width + between)) / 2
    axes = []
    for number in range(count):
        row, column = divmod(number, columns)
        x, y = start + column * (width + between), high - top - (row + 1) * (gap + height + below) + below
        axes.append(figure.add_axes((x / wide, y / high, width / wide, height / high)))
    figure.text(0.5, 1 - 0.1 / high, "\n".join(title), ha="center", va="top", size=10)
    under = 1 - (0.15 + 0.17 * len(title)) / high
    # Names of columns, in the note, may have dollar signs.
    figure.text(0.5, under, "\n".join(note), ha="center", va="top", size=7, color="0.35", parse_math=False)
    figure.text((start + columns * (width + between) / 2) / wide, 0.1 / high, text.xlabel, ha="center", va="bottom")
    middle = (axes[0].get_position().y1 + axes[-1].get_position().y0) / 2
    figure.text((start - 0.45) / wide, middle, text.ylabel, ha="center", va="center", rotation=90)
    return AxesGrid(figure, axes, columns)


def hide_axes(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


@styled
def mosaics(layers: Sequence[Panel], text: FigureText, size: float = 1.5) -> Figure:
    """The tiles of each layer, each scaled by its own largest weight."""
    images = [mosaic(layer.values, layer.across) for layer in layers]
    shape = max(image.shape[0] / image.shape[1] for image in images)
    drawn = axes_grid(len(layers), text, size, size * shape)
    for axes, layer, image in zip(drawn.axes, layers, images):
        axes.imshow(image, cmap=WEIGHTS, vmin=-1, vmax=1, interpolation="nearest")
        axes.set_facecolor("0.82")
        axes.set_title(layer.title, pad=3)
        hide_axes(axes)
    return drawn.figure


def mosaic(tiles: Tensor, across: int) -> np.ndarray:
    """n tiles of h x w, `across` per row, ZOOM pixels per weight; the gaps are NaN."""
    tiles = tiles.repeat_interleave(ZOOM, 1).repeat_interleave(ZOOM, 2)
    count, height, width = tiles.shape
    rows, gap = math.ceil(count / across), max(3, min(height, width) // 6)
    canvas = np.full((rows * (height + gap) + gap, across * (width + gap) + gap), np.nan)
    largest = tiles.abs().amax((1, 2), keepdim=True)
    scaled = (tiles / torch.where(largest > 0, largest, 1)).numpy()
    for number, tile in enumerate(scaled):
        y, x = (gap + index * (size + gap) for index, size in zip(divmod(number, across), (height, width)))
        canvas[y : y + height, x : x + width] = tile
    return canvas


@styled
def heatmaps(layers: Sequence[Panel], text: FigureText, centered: bool = False) -> Figure:
    """Matrices, each scaled by its own largest weight; the axes count from 0, or from the middle if `centered`."""
    shape = min(max(layers[0].values.shape[0] / layers[0].values.shape[1], 0.4), 1.6)
    drawn = axes_grid(len(layers), text, 1.5, 1.5 * shape)
    for number, (axes, layer) in enumerate(zip(drawn.axes, layers)):
        limit = float(layer.values.abs().max()) or 1.0
        matrix = shrink(layer.values).numpy()
        rows, columns = layer.values.shape
        right, down = (columns / 2, rows / 2) if centered else (columns - 0.5, rows - 0.5)
        limits = (right - columns, right, down, down - rows)
        axes.imshow(
            matrix / limit, cmap=WEIGHTS, vmin=-1, vmax=1, interpolation="nearest", aspect="auto", extent=limits
        )
        axes.set_title(f"{layer.title}\n|w| $\\leq$ {limit:.2g}", pad=3, size=7, linespacing=1.1)
        outer_ticks(axes, number, layers, drawn.columns)
    return drawn.figure


class LabeledMatrix(NamedTuple):
    title: str
    values: Tensor
    """Non-negative values, r c."""
    rows: Sequence[str]
    columns: Sequence[str]


@styled
def labeled_matrices(panels: Sequence[LabeledMatrix], text: FigureText, labels: int) -> Figure:
    """Matrices side by side, dark for large values, with names at the rows and columns of those up to `labels` wide."""
    widest, highest = (max(panel.values.shape[side] for panel in panels) for side in (1, 0))
    width = max(len(panels) * (1.4 + 0.14 * min(widest, labels)), 6)
    figure = new_figure(width, 1.9 + 0.14 * min(highest, labels))
    note = textwrap.wrap(text.note, 15 * int(figure.get_figwidth()))
    figure.suptitle(text.title + "\n" * len(note), size=10)  # constrained layout leaves room for the note below it
    under = 1 - 0.26 / figure.get_figheight()
    figure.text(0.5, under, "\n".join(note), ha="center", va="top", size=7, color="0.35")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels):
        axes.imshow(shrink(panel.values).numpy(), cmap="Blues", vmin=0, interpolation="nearest", aspect="auto")
        axes.set_title(panel.title)
        axes.set_xlabel(text.xlabel)
        axes.set_ylabel(text.ylabel)
        if 0 < len(panel.columns) <= labels:
            axes.set_xticks(range(len(panel.columns)), panel.columns, rotation=90, size=6, parse_math=False)
        if 0 < len(panel.rows) <= labels:
            axes.set_yticks(range(len(panel.rows)), panel.rows, size=6, parse_math=False)
    return figure


def shrink(matrix: Tensor) -> Tensor:
    """At most SIDE rows and columns, by averaging equal blocks."""
    rows, columns = (min(size, SIDE) for size in matrix.shape)
    return matrix if (rows, columns) == tuple(matrix.shape) else adaptive_avg_pool2d(matrix[None], (rows, columns))[0]


def outer_ticks(axes: Axes, number: int, layers: Sequence[Panel], columns: int) -> None:
    """Tick labels at the left and the lower edge of the figure only, unless the layers differ in size (stages)."""
    axes.locator_params(nbins=3, integer=True)
    axes.tick_params(labelsize=6, length=2, pad=1.5)
    if len({layer.values.shape for layer in layers}) > 1:
        return
    if number % columns:
        axes.set_yticklabels([])
    if number + columns < len(layers):
        axes.set_xticklabels([])


@styled
def filter_lines(layers: Sequence[Panel], text: FigureText, directions: bool) -> Figure:
    """w[d] of each layer by its offset d, scaled by its largest weight; colored by direction if `directions`."""
    drawn = axes_grid(len(layers), text, 1.5, 0.75)
    for number, (axes, layer) in enumerate(zip(drawn.axes, layers)):
        half = len(layer.values) // 2
        scale = float(layer.values.abs().max()) or 1.0
        axes.axhline(0, color="0.8", lw=0.5)
        axes.axvline(0, color="0.8", lw=0.5)
        color = DIRECTIONS[layer.direction] if directions else COLORS[0]
        axes.plot(range(-half, half + 1), layer.values.numpy() / scale, lw=0.7, color=color)
        axes.set_ylim(-1.1, 1.1)
        axes.set_xlim(-half, half)
        axes.set_title(layer.title, pad=2, size=7)
        outer_ticks(axes, number, layers, drawn.columns)
    if directions:
        named = [kind for kind in DIRECTIONS if any(layer.direction == kind for layer in layers)]
        lines = [drawn.axes[0].plot([], [], color=DIRECTIONS[kind], label=kind)[0] for kind in named]
        drawn.figure.legend(handles=lines, loc="lower right", ncols=len(lines), handlelength=1.2)
    return drawn.figure


class Series(NamedTuple):
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Smallest and largest, drawn as a shaded area."""
    dashed: bool = False


class Chart(NamedTuple):
    title: str
    ylabel: str
    series: Sequence[Series]
    log: bool = False
    """Whether to use a logarithmic axis for values that span more than a factor of ten; otherwise it starts at 0."""


@styled
def by_depth(charts: Sequence[Chart], title: str, xlabel: str) -> Figure:
    """Charts side by side over the same depth."""
    most = max(len(chart.series) for chart in charts)
    figure = new_figure(4.6 * len(charts) if len(charts) > 1 else 6, 3.4 + 0.12 * most)
    figure.suptitle(title, size=10, parse_math=False)
    for axes, chart in zip(np.atleast_1d(figure.subplots(1, len(charts))), charts):
        for number, series in enumerate(chart.series):
            dashed = sum(one.dashed for one in chart.series[:number])
            color = ("0.5", "0.8")[dashed % 2] if series.dashed else COLORS[number % len(COLORS)]
            line = "-" if number < len(COLORS) else ":"
            style = {"ls": "--"} if series.dashed else {"ls": line, "marker": "osD^vP*X"[number % 8], "ms": 3}
            axes.plot(series.xs, series.ys, lw=1, color=color, label=series.label, **style)
            if series.band is not None:
                axes.fill_between(series.xs, *series.band, color=color, alpha=0.15, lw=0)
        axes.set_title(chart.title)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(chart.ylabel)
        axes.xaxis.get_major_locator().set_params(integer=True)
        values = [value for series in chart.series for value in series.ys]
        tops = [value for series in chart.series for value in (series.band[1] if series.band else series.ys)]
        if chart.log and max(values) > 10 * min(values) > 0:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis, (1, 2, 5), "g")
        else:
            highest = max(filter(math.isfinite, tops), default=0.0)
            axes.set_ylim(0, 1.05 * highest or None)  # automatic limits cut the marker of the largest value
        if any(series.label for series in chart.series):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def plain_log_ticks(axis: Axis, steps: Sequence[float], form: str) -> None:
    """Ticks at these multiples of the powers of ten, with numbers instead of powers as labels."""
    ticks = require("matplotlib.ticker", "analysis")
    axis.set_major_locator(ticks.LogLocator(subs=steps))
    axis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:{form}}"))
    axis.set_minor_locator(ticks.NullLocator())


@styled
def cost_bars(cost: Cost, name: str) -> Figure:
    parts = cost.parts[::-1]
    figure = new_figure(8, 1.3 + 0.22 * len(parts))
    figure.suptitle(f"Parameters and multiply-adds of {name} by part", size=10, parse_math=False)
    left, right = figure.subplots(1, 2, sharey=True)
    columns = (
        (left, [part.parameters for part in parts], "parameters"),
        (right, [part.macs for part in parts], "multiply-adds per example"),
    )
    for color, (axes, counts, label) in zip(COLORS, columns):
        unit, word = (1e9, "billions") if sum(counts) >= 1e9 else (1e6, "millions")
        axes.barh(range(len(parts)), [count / unit for count in counts], color=color, height=0.7)
        total = max(sum(counts), 1)
        for row, count in enumerate(counts):
            axes.text(count / unit, row, f" {count / total:.1%}", va="center", size=7)
        axes.set_xlim(0, max(*counts, 1) / unit * 1.15)
        axes.set_xlabel(f"{label} ({word})")
    left.set_yticks(range(len(parts)), [part.name for part in parts])
    left.set_ylabel("part")
    return figure


def show_image(axes: Axes, pixels: Tensor) -> None:
    """c h w in [0, 1], RGB or gray."""
    image = pixels.permute(1, 2, 0).numpy()
    axes.imshow(image if image.shape[2] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")


@styled
def saliency_maps(pixels: Tensor, explained: Sequence[Saliency], titles: Sequence[str], side: int = 1) -> Figure:
    """One row per image: the image, occlusion (of `side` x `side` patches), gradient and, if any, class map."""
    columns = ["image", "occlusion", "gradient", *(["class map"] if explained[0].class_map is not None else [])]
    size, aspect = 1.6, pixels.shape[2] / pixels.shape[3]
    occluded = "the patch is occluded" if side == 1 else f"a square of {side} x {side} patches is occluded"
    notes = (
        f"occlusion: log-probability lost when {occluded} (nats; red supports the class, blue opposes it)",
        "gradient: norm of the class logit's gradient, per standard deviation of the pixels",
        "class map: class logit of each patch",
    )
    note = "; ".join(notes[: len(columns) - 1])
    text = FigureText("Which patches the prediction depends on", note, "patch column", "patch row")
    drawn = axes_grid(len(explained) * len(columns), text, size, size * aspect, 0.38, len(columns), below=0.42)
    for row, (one, title) in enumerate(zip(explained, titles)):
        line = drawn.axes[row * len(columns) : (row + 1) * len(columns)]
        show_image(line[0], pixels[row])
        line[0].set_title(title, size=7, pad=3, parse_math=False)  # names of files may have dollar signs
        hide_axes(line[0])
        maps = [(one.occlusion, WEIGHTS), (one.gradient, "magma"), (one.class_map, WEIGHTS)]
        for number, (axes, heading, (values, cmap)) in enumerate(zip(line[1:], columns[1:], maps), start=1):
            assert values is not None, "every image has the same kinds of maps"
            limit = float(values.abs().max()) or 1.0
            lowest = -limit if cmap == WEIGHTS else 0
            image = axes.imshow(values.numpy(), cmap=cmap, vmin=lowest, vmax=limit, interpolation="nearest")
            axes.set_title(heading, size=7, pad=3)
            axes.locator_params(nbins=4, integer=True)
            axes.tick_params(labelsize=6, length=2, pad=1.5)
            if number > 1:
                axes.set_yticklabels([])
            inset = axes.inset_axes((0.0, -0.2 / aspect, 1.0, 0.04 / aspect))
            bar = drawn.figure.colorbar(image, cax=inset, orientation="horizontal")
            bar.ax.tick_params(labelsize=5, length=1.5, pad=1)
            ticks = require("matplotlib.ticker", "analysis")
            bar.locator, bar.formatter = ticks.MaxNLocator(4), ticks.FuncFormatter(lambda value, _: f"{value:.2g}")
            bar.update_ticks()
            bar.outline.set_visible(False)
    return drawn.figure


@styled
def image_rows(rows: Sequence[Sequence[tuple[Tensor, str]]], text: FigureText) -> Figure:
    """Rows of images with captions; the first of each row is framed."""
    columns = max(map(len, rows))
    first = rows[0][0][0]
    drawn = axes_grid(len(rows) * columns, text, 1.1, 1.1 * first.shape[1] / first.shape[2], 0.34, columns)
    for number, axes in enumerate(drawn.axes):
        hide_axes(axes)
        row, column = divmod(number, columns)
        if column >= len(rows[row]):
            continue
        pixels, caption = rows[row][column]
        show_image(axes, pixels)
        axes.set_title(caption, size=6, pad=2, parse_math=False)
        if column == 0:
            for spine in axes.spines.values():
                spine.set(visible=True, color=COLORS[1], linewidth=1.5)
    return drawn.figure
