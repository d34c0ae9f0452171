"""The figure of a study: every seed, means with intervals, and differences to the reference row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from allmlp.analysis.figures import COLORS, new_figure, save, styled
from allmlp.errors import MissingExtra
from allmlp.study.statistics import Interval
from allmlp.study.summary import Line, Summary, metric_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(summary: Summary, folder: Path) -> bool:
    """Write figure.png and figure.svg; False if matplotlib is missing or nothing is finished."""
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
    if summary.study.axis:
        figure = costs_figure(summary, lines) if summary.unit else curves_figure(summary, lines)
    else:
        figure = study_figure(summary, lines)
    save(figure, file, file.suffix[1:])
    return file


@styled
def study_figure(summary: Summary, lines: list[Line]) -> Figure:
    differs = any(line.difference is not None for line in lines)
    figure = new_figure(8.0 if differs else 5.0, 0.9 + 0.35 * len(lines))
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
    published = "; diamond: published" if any(line.anchor is not None for line in lines) else ""
    left.set_title(f"mean with 95 % interval; gray: seeds{published}")
    for axis in right:
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set(xlabel=f"difference to {' / '.join(summary.study.references)}", title="equal seeds, 95 % interval")
    figure.suptitle(f"{summary.study.name}: equal {summary.study.compared}", fontsize=9)
    return figure


@styled
def curves_figure(summary: Summary, lines: list[Line]) -> Figure:
    """Means with intervals over the study's axis, a curve for each family."""
    figure = new_figure(5.0, 3.2)
    axis = figure.subplots()
    draw_curves(axis, summary, lines)
    axis.set_title("mean with 95 % interval")
    axis.legend(fontsize=7)
    figure.suptitle(f"{summary.study.name}: equal {summary.study.compared}", fontsize=9)
    return figure


@styled
def costs_figure(summary: Summary, lines: list[Line]) -> Figure:
    """The curves, and their last points over other costs; a staircase joins the models on the Pareto front."""
    figure = new_figure(9.0, 5.2)
    first, *others, last = figure.subplots(2, 3).flat
    colors = draw_curves(first, summary, lines)
    ends = last_points(lines)
    for axis, (title, cost) in zip(others, costs(summary).items(), strict=True):
        points = {name: (x, line.result) for name, line in ends.items() if (x := cost(line)) and line.result}
        for name, (x, value) in points.items():
            axis.errorbar([x], [value.mean], yerr=spread(value), fmt="o", color=colors[name], markersize=5, capsize=3)
        front = pareto_front([(x, value.mean) for x, value in points.values()], more=cost is inference_rate)
        axis.step(*zip(*front), where="post", color=COLORS[7], linewidth=0.8, zorder=0) if front else None
        axis.set_xscale("log")
        axis.set(xlabel=title, ylabel=metric_title(lines)[0])
    last.axis("off")
    last.legend(*first.get_legend_handles_labels(), loc="center")
    figure.suptitle(f"{summary.study.name}: equal {summary.study.compared}, mean with 95 % interval", fontsize=9)
    return figure


def last_points(lines: list[Line]) -> dict[str, Line]:
    """The last line of every curve."""
    points: dict[str, Line] = {}
    for line in lines:
        if line.curve and (line.curve[0] not in points or line.curve[1] > (points[line.curve[0]].curve or ("", 0))[1]):
            points[line.curve[0]] = line
    return points


def inference_rate(line: Line) -> float | None:
    return line.rate


def costs(summary: Summary) -> dict[str, Callable[[Line], float | None]]:
    """Axis titles, and functions from a line to the value shown."""
    return {
        "parameters": lambda line: line.parameters,
        "multiply-adds": lambda line: line.macs,
        "memory of training, bytes": lambda line: line.memory,
        f"{summary.unit}/s of inference": inference_rate,
    }


def pareto_front(points: list[tuple[float, float]], more: bool = False) -> list[tuple[float, float]]:
    """Pareto-optimal points, ordered by x: lower x (with `more`, higher) and higher y are better."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0] if more else point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def draw_curves(axis: Axes, summary: Summary, lines: list[Line]) -> dict[str, str]:
    """Means with intervals; returns the color of every curve."""
    curves: dict[str, list[tuple[float, Interval]]] = {}
    for line in lines:
        if line.curve is not None and line.result is not None:
            curves.setdefault(line.curve[0], []).append((line.curve[1], line.result))
    colors: dict[str, str] = {}
    for number, (name, points) in enumerate(curves.items()):
        xs = [x for x, _ in points]
        halves = [value.half or 0.0 for _, value in points]
        colors[name] = COLORS[number % len(COLORS)]
        options = {"color": colors[name], "markersize": 4, "capsize": 3, "label": name}
        axis.errorbar(xs, [value.mean for _, value in points], yerr=halves, fmt="o-", **options)
    places = sorted({x for points in curves.values() for x, _ in points})
    axis.set_xscale("log")
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()
    axis.set(xlabel=summary.study.axis, ylabel=metric_title(lines)[0])
    return colors


def bar(axis: Axes, value: Interval | None, height: int, color: str) -> None:
    """A mean with its interval, or the mean alone."""
    if value is not None:
        axis.errorbar([value.mean], [height], xerr=spread(value), fmt="o", color=color, markersize=5, capsize=3)


def spread(value: Interval) -> list[float] | None:
    return None if value.half is None else [value.half]
