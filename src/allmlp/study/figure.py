"""The figure of a study: every seed, means with intervals, and differences to the reference row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from allmlp.analysis.figures import COLORS, save, styled
from allmlp.errors import MissingExtra, require
from allmlp.study.statistics import Interval
from allmlp.study.summary import Line, Summary, metric_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(summary: Summary, folder: Path) -> bool:
    """Write figure.png and figure.svg; False where matplotlib is missing or nothing is finished."""
    if not any(line.result for line in summary.lines):
        return False
    try:
        for kind in ("png", "svg"):
            write(summary, folder / f"figure.{kind}")
    except MissingExtra:
        return False
    return True


def write(summary: Summary, file: Path) -> Path:
    """Write the figure of the rows that have a result, in the format of the file's suffix."""
    lines = [line for line in summary.lines if line.result is not None]
    figure = curves_figure(summary, lines) if summary.axis else study_figure(summary, lines)
    save(figure, file, file.suffix[1:])
    return file


@styled
def study_figure(summary: Summary, lines: list[Line]) -> Figure:
    differs = any(line.difference is not None for line in lines)
    size = (8.0 if differs else 5.0, 0.9 + 0.35 * len(lines))
    figure = require("matplotlib.figure", "analysis").Figure(figsize=size, layout="constrained")
    left, *right = figure.subplots(1, 2 if differs else 1, sharey=True, squeeze=False)[0]
    for height, line in enumerate(lines):
        left.plot(list(line.values.values()), [height] * len(line.values), "o", color=COLORS[7], markersize=3, zorder=1)
        bar(left, line.result, height, COLORS[0])
        if line.anchor is not None:
            left.plot(line.anchor, height, "D", color=COLORS[1], markersize=4, fillstyle="none")
        for axis in right:
            bar(axis, line.difference, height, COLORS[2])
    names = [f"{line.row}\n{line.candidate}" if line.candidate else line.row for line in lines]
    left.set_yticks(range(len(lines)), names)
    left.set(ylim=(len(lines) - 0.5, -0.5), xlabel=metric_title(lines)[0])
    left.set_title("mean with 95 % interval; gray: seeds" + ("; diamond: published" if has_anchor(lines) else ""))
    for axis in right:
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set(xlabel=f"difference to {summary.reference}", title="equal seeds, 95 % interval")
    figure.suptitle(f"{summary.name}: equal {summary.compared}", fontsize=9)
    return figure


@styled
def curves_figure(summary: Summary, lines: list[Line]) -> Figure:
    """Means with intervals over the study's axis, a curve for each family."""
    figure = require("matplotlib.figure", "analysis").Figure(figsize=(5.0, 3.2), layout="constrained")
    axis = figure.subplots()
    curves: dict[str, list[tuple[float, Interval]]] = {}
    for line in lines:
        if line.curve is not None and line.result is not None:
            curves.setdefault(line.curve[0], []).append((line.curve[1], line.result))
    for number, (name, points) in enumerate(curves.items()):
        xs = [x for x, _ in points]
        spread = [value.half or 0.0 for _, value in points]
        options = {"color": COLORS[number % len(COLORS)], "markersize": 4, "capsize": 3, "label": name}
        axis.errorbar(xs, [value.mean for _, value in points], yerr=spread, fmt="o-", **options)
    places = sorted({x for points in curves.values() for x, _ in points})
    axis.set_xscale("log")
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()
    axis.set(xlabel=summary.axis, ylabel=metric_title(lines)[0])
    axis.set_title("mean with 95 % interval")
    axis.legend(fontsize=7)
    figure.suptitle(f"{summary.name}: equal {summary.compared}", fontsize=9)
    return figure


def has_anchor(lines: list[Line]) -> bool:
    return any(line.anchor is not None for line in lines)


def bar(axis: Axes, value: Interval | None, height: int, color: str) -> None:
    """A mean with its interval, or the mean alone."""
    if value is not None:
        spread = None if value.half is None else [value.half]
        axis.errorbar([value.mean], [height], xerr=spread, fmt="o", color=color, markersize=5, capsize=3)
