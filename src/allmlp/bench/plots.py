"""Benchmark figures: throughput against cost, roofline, throughput against batch size, scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from allmlp.analysis.figures import COLORS, new_figure, plain_log_ticks, styled
from allmlp.bench.runner import BenchReport, Measurement
from allmlp.bench.timing import quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Value = Callable[[Measurement], float]

LETTERS = 20
"""Of a model's name beside its points; longer ones are cut."""
NAMES = ("throughput", "roofline", "batches", "scaling")
PACKAGES = {"ours": COLORS[0], "timm": COLORS[1], "hf": COLORS[2]}
MODES = {
    "eager": ("o", ":"),
    "compiled": ("s", "--"),
    "channels-last": ("D", "--"),
    "reduce-overhead": ("X", "-."),
    "cuda-graph": ("p", "-."),
    "max-autotune": ("*", "-."),
    "fast": ("^", "-"),
    "fp8": ("P", "-"),
    "onnx": ("v", "-."),
}


def figures(report: BenchReport) -> Iterator[tuple[str, Figure]]:
    """All figures for which the report has data."""
    rows = [row for row in report.rows if row.rate_per_s and row.model == row.cell]
    plain, scaled = [row for row in rows if row.size is None], [row for row in rows if row.size is not None]
    if plain:
        yield "throughput", throughput(report, plain)
    if report.copy_rate and peak(rows):
        yield "roofline", roofline(report, rows)
    if len({row.batch for row in plain}) > 1:
        yield "batches", batches(report, plain)
    if len({row.size for row in scaled}) > 1:
        yield "scaling", scaling(report, scaled)


# --- the figures -------------------------------------------------------------------------------------------


@styled
def throughput(report: BenchReport, rows: list[Measurement]) -> Figure:
    """Throughput against multiply-adds, by batch size and unit; gray lines are fractions of the measured peak."""
    kinds = unique((row.batch, row.unit) for row in rows)
    passes = 3 if rows[0].task == "training" else 1
    factor, prefix = scale(max(map(cost, rows)))
    figure, axes = panels(len(kinds), 3.6, 3.2)
    drawn = [(axis, [row for row in rows if (row.batch, row.unit) == kind]) for axis, kind in zip(axes, kinds)]
    for axis, here in drawn:
        draw(axis, here, lambda row: cost(row) / factor, rate)
        low, high = min(map(cost, here)) / factor / 1.5, max(map(cost, here)) / factor * 1.5
        view = min(map(rate, here)) / 4, max(map(rate, here)) * 1.5
        for mfu in (0.25, 0.5, 1.0) if peak(here) else ():
            ends = [mfu * peak(here) / (2 * passes * factor * x) for x in (low, high)]
            axis.plot((low, high), ends, color="0.75", linewidth=0.7, zorder=0)
            if view[0] < ends[1] < view[1]:
                axis.annotate(f"{mfu:.0%}", (high, ends[1]), color="0.5", fontsize=6, ha="right", va="bottom")
        unit = here[0].unit
        axis.set(xlim=(low, high), ylim=view, title=f"batch {here[0].batch}")
        axis.set(xlabel=f"multiply-adds of one {unit[:-1]} ({prefix})", ylabel=f"{unit}/s")
    finish(report, figure, axes, "Throughput against cost; gray: fractions of the measured peak matmul")
    for axis, here in drawn:
        name_models(axis, here, lambda row: cost(row) / factor, rate)
    return figure


@styled
def roofline(report: BenchReport, rows: list[Measurement]) -> Figure:
    """Achieved FLOP/s against arithmetic intensity, below the measured roofline."""
    factor, prefix = scale(peak(rows))
    top, knee, slope = peak(rows) / factor, peak(rows) / report.copy_rate, report.copy_rate / factor
    every = [intensity(row) for row in rows] + [knee]
    low, high = min(every) / 2, max(every) * 2

    def speed(row: Measurement) -> float:
        return (row.flop_per_s or 0.0) / factor

    sizes = unique(row.batch for row in rows)
    figure, axes = panels(len(sizes), 4.2, 3.2)
    for axis, batch in zip(axes, sizes):
        draw(axis, [row for row in rows if row.batch == batch], intensity, speed, line=report.options.scale is not None)
        axis.plot((low, knee, high), (low * slope, top, top), color="black", linewidth=1.2, label="roof")
        axis.annotate(f"matrix products {top:,.3g} {prefix}FLOP/s", (high, top), ha="right", va="bottom", fontsize=7)
        place = {"xytext": (6, -4), "textcoords": "offset points", "fontsize": 7}
        axis.annotate(f"copy {report.copy_rate / 1e9:,.0f} GB/s", (low, low * slope), **place)
        axis.set(title=f"batch {batch}", xlim=(low, high), ylim=(min(map(speed, rows)) / 5, top * 1.5))
        axis.set(xlabel="operations per byte of the matrix products (FLOP/B)", ylabel=f"achieved ({prefix}FLOP/s)")
    finish(report, figure, axes, "Roofline; matrix and copy rate as measured in the run")
    for axis, batch in zip(axes, sizes):
        name_models(axis, [row for row in rows if row.batch == batch], intensity, speed)
    return figure


@styled
def batches(report: BenchReport, rows: list[Measurement]) -> Figure:
    """Throughput against batch size, a panel per model."""
    models = unique(row.model for row in rows)
    figure, axes = panels(len(models), 3.4, 2.8)
    for axis, model in zip(axes, models):
        here = [row for row in rows if row.model == model]
        draw(axis, here, lambda row: row.batch, rate, line=True, bars="rate")
        axis.set(title=model, xlabel="batch size", ylabel=f"{here[0].unit}/s")
    finish(report, figure, axes, "Speed against batch size; bars are quartiles")
    for axis in axes:
        sizes = unique(row.batch for row in rows)
        axis.set_xticks(sizes, list(map(str, sizes)))
    return figure


@styled
def scaling(report: BenchReport, rows: list[Measurement]) -> Figure:
    """Time per example against the scaled size, a panel per model; gray is the growth of multiply-adds."""
    models, what, batch = unique(row.model for row in rows), report.options.scale, max(row.batch for row in rows)
    figure, axes = panels(len(models), 3.4, 2.8)
    ticks = []
    for axis, model in zip(axes, models):
        here = [row for row in rows if row.model == model and row.batch == batch]
        draw(axis, here, lambda row: row.size or 0, milliseconds, line=True, bars="time")
        costs = {row.size or 0: row.macs for row in here}
        last = min((row for row in here if row.size == max(costs)), key=milliseconds)
        line = [milliseconds(last) * macs / last.macs for macs in costs.values()]
        axis.plot(list(costs), line, color="0.6", linewidth=0.8, zorder=0, label="as multiply-adds")
        axis.set(title=model, xlabel=what, ylabel=f"ms of one example, batch {batch}")
        ticks.append(list(costs))
    finish(report, figure, axes, f"Scaling with {what}; bars are quartiles")
    for axis, sizes in zip(axes, ticks):
        axis.set_xticks(sizes, list(map(str, sizes)))
    return figure


# --- what a row says ---------------------------------------------------------------------------------------


def rate(row: Measurement) -> float:
    return row.rate_per_s or 0.0


def intensity(row: Measurement) -> float:
    return row.flop_per_byte


def milliseconds(row: Measurement) -> float:
    """Time per example in back-to-back calls."""
    return 1e3 * quartiles(row.calls_s).median / row.batch


def cost(row: Measurement) -> float:
    """Multiply-adds of one image or token, forward."""
    return (row.flop_per_s or 0.0) / rate(row) / (6 if row.task == "training" else 2)


def peak(rows: list[Measurement]) -> float:
    """Median of the peak matmul rates timed with these rows."""
    rates = sorted(row.peak_flop_per_s for row in rows if row.peak_flop_per_s)
    return rates[len(rates) // 2] if rates else 0.0


# --- how it is drawn ---------------------------------------------------------------------------------------


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def scale(largest: float) -> tuple[float, str]:
    return next(
        (factor, prefix) for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1, "")) if largest >= factor
    )


def panels(count: int, wide: float, high: float) -> tuple[Figure, list[Axes]]:
    """At most three panels in a row."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = new_figure(wide * columns + 0.6, high * rows + 0.9)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def draw(axis: Axes, rows: list[Measurement], x: Value, y: Value, line: bool = False, bars: str = "") -> None:
    """Color by package, marker and dash by mode; lines join the rows of one model."""
    axis.set(xscale="log", yscale="log")
    for model, backend in unique((row.model, row.backend) for row in rows):
        points = [row for row in rows if (row.model, row.backend) == (model, backend)]
        package, _, mode = backend.partition(" ")
        marker, dash = MODES[mode]
        look = {"color": PACKAGES[package], "marker": marker, "markersize": 4, "label": backend, "linewidth": 0.9}
        style = {**look, "linestyle": dash if line else "none"}
        ends = [error_bar(row, bars) for row in points] if bars else []
        height = [[y(row) * end[i] for row, end in zip(points, ends)] for i in (0, 1)] if bars else None
        axis.errorbar([x(row) for row in points], [y(row) for row in points], height, **style)


def error_bar(row: Measurement, of: str) -> tuple[float, float]:
    """Relative distance of the quartiles below and above the median of a time or a rate."""
    median, low, high = quartiles(row.calls_s)
    return (1 - median / high, median / low - 1) if of == "rate" else (1 - low / median, high / median - 1)


def finish(report: BenchReport, figure: Figure, axes: list[Axes], title: str) -> None:
    """Add the title, one legend below all panels and plain tick labels, then lay out."""
    for axis in axes:
        for one, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
            steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
            plain_log_ticks(one, steps, ",.12g")
        axis.tick_params(labelsize=7)
    options = report.options
    device = report.environment.get("device", options.device)
    task = "training step" if options.train else "inference"
    figure.suptitle(f"{title}\n{task}, {options.precision}, {device}", fontsize=9)
    entries = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 7))
    figure.draw_without_rendering()


def name_models(axis: Axes, rows: list[Measurement], x: Value, y: Value) -> None:
    """Put each model's name upright below its lowest point, shifted right where names would overlap."""
    points = 72 / axis.figure.dpi
    placed: list[tuple[float, float]] = []
    lowest = [min((row for row in rows if row.model == name), key=y) for name in unique(row.model for row in rows)]
    for row in sorted(lowest, key=x):
        across, up = axis.transData.transform((x(row), y(row))) * points
        aside = 0
        while any(abs(across + aside - other) < 7 and abs(up - height) < 45 for other, height in placed):
            aside += 1
        placed.append((across + aside, up))
        place = {"xytext": (aside, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
        name = row.model if len(row.model) <= LETTERS else f"{row.model[: LETTERS - 3]}..."
        axis.annotate(name, (x(row), y(row)), fontsize=6.5, rotation=90, **place)
