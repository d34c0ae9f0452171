"""The tables of a study, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from allmlp.best import MINIMIZED
from allmlp.files import write_csv_atomically, write_text_atomically
from allmlp.log import is_percentage
from allmlp.study.definition import Study
from allmlp.study.records import Record, measured_model
from allmlp.study.runner import Progress, scores
from allmlp.study.statistics import Interval, interval, paired_difference, seconds_to


class Line(NamedTuple):
    """A row of the final table. Values are in the unit of the table: percent, or unscaled."""

    row: str
    candidate: str
    metric: str
    """Metric with its unit."""
    values: dict[int, float]
    """Values by seed."""
    result: Interval | None
    difference: Interval | None
    """Difference to the row's reference, over equal seeds."""
    others: dict[str, Interval]
    """The further metrics that the study reports."""
    floor: float | None
    anchor: float | None
    source: str
    parameters: int | None
    epochs: float | None
    seconds: float | None
    failed: int
    curve: tuple[str, float] | None = None
    macs: int | None = None
    """Multiply-adds of one example."""
    memory: int | None = None
    """Largest GPU memory of a training run, bytes."""
    rate: float | None = None
    """Inference rate per second."""


class TuningLine(NamedTuple):
    row: str
    candidate: str
    metric: str
    result: Interval | None
    failed: int
    chosen: bool


class Summary(NamedTuple):
    study: Study
    lines: list[Line]
    tuning: list[TuningLine]
    data: dict[str, set[str]]
    """Checksums of the data of the final runs by row: one each, unless machines had different data."""
    reached: dict[str, Interval | None]
    """Curve -> seconds of training to the target; None where no seed has reached it."""
    unit: str
    """Unit of the inference rates."""


def summarize(progress: Progress) -> Summary:
    study = progress.study
    finals = {row: runs_of(progress, "final", row, progress.chosen.get(row)) for row in study.rows}
    values = {
        row: {record["seed"]: scale(progress.metric(row)) * progress.value(record) for record in with_result(records)}
        for row, records in finals.items()
    }
    measured = {
        measured_model(one): one["inference"] for records in finals.values() for one in records if "inference" in one
    }
    rates = {key: one["rate_per_s"] for key, one in measured.items()}
    lines = [final_line(progress, row, finals[row], values, rates) for row in study.rows]
    tuning = [
        tuning_line(progress, row, candidate)
        for row in study.rows
        for candidate in dict.fromkeys(trial.candidate for trial in study.tuning_trials(row))
    ]
    data = {
        row: {
            record["data"]["sha256"]
            for record in with_result(records)
            if "data" in record and not record["run"].get("train_per_class")  # which each seed draws anew
        }
        for row, records in finals.items()
    }
    reached = {} if study.target is None else seconds_to_target(progress, finals)
    unit = next((one["unit"] for one in measured.values()), "")
    return Summary(study, lines, tuning, data, reached, unit)


def final_line(
    progress: Progress, row: str, records: list[Record], values: dict[str, dict[int, float]], rates: dict[str, float]
) -> Line:
    """A line of the final table, from all runs of the row; `values` are those of all rows by seed."""
    study, one, metric, finished = progress.study, progress.study.rows[row], progress.metric(row), with_result(records)
    reference = study.reference_of(row)
    floors = [scores(record)[study.floor] for record in finished if study.floor in scores(record)]
    compared = reference and row != reference and metric == progress.metric(reference)
    results = [record["result"] for record in finished]

    def of_results(name: str) -> list[Any]:
        return [result[name] for result in results if name in result]

    return Line(
        row,
        progress.chosen.get(row, ""),
        with_unit(metric),
        values[row],
        interval(list(values[row].values())) if values[row] else None,
        paired_difference(values[row], values[reference]) if compared else None,
        other_metrics(study.also, finished),
        scale(metric) * mean(floors) if floors else None,
        one.anchor,
        one.source,
        next(iter(of_results("parameters")), None),
        mean(result["epochs"] for result in results) if results else None,
        mean(result["seconds"] for result in results) if results else None,
        len(records) - len(finished),
        one.curve,
        next(iter(of_results("macs")), None),
        max(of_results("peak_memory"), default=None),
        next((rates[key] for key in map(measured_model, finished) if key in rates), None),
    )


def seconds_to_target(progress: Progress, finals: dict[str, list[Record]]) -> dict[str, Interval | None]:
    """Seconds until each curve reaches the target, from the evaluations of its final runs, seed by seed."""
    target, points = progress.study.target or 0.0, dict[str, dict[int, list[tuple[float, float]]]]()
    for row, records in finals.items():
        curve, _ = progress.study.rows[row].curve or ("", 0)
        for record in with_result(records) if curve else []:
            metric, result = progress.metric(row), record["result"]
            last = {"seconds": result["seconds"], metric: progress.value(record)}
            seen = [one for one in result.get("evaluations", ()) if metric in one] or [last]
            # If lower is better, the sign is changed, so that the metric rises to its target.
            sign = -1.0 if metric.endswith(MINIMIZED) else 1.0
            pairs = [(one["seconds"], sign * (scale(metric) * one[metric] - target)) for one in seen]
            points.setdefault(curve, {}).setdefault(record["seed"], []).extend(pairs)
    reached = {
        curve: [seconds for pairs in seeds.values() if (seconds := seconds_to(0.0, pairs)) is not None]
        for curve, seeds in points.items()
    }
    return {curve: interval(seconds) if seconds else None for curve, seconds in reached.items()}


def other_metrics(names: Iterable[str], finished: list[Record]) -> dict[str, Interval]:
    by_metric = {
        name: [scale(name) * scores(record)[name] for record in finished if name in scores(record)] for name in names
    }
    return {name: interval(values) for name, values in by_metric.items() if values}


def at_the_edge(progress: Progress) -> list[str]:
    """Fields for which the smallest or largest of at least three values was chosen: a better one may lie beyond."""
    notes = []
    for row, candidate in progress.chosen.items():
        settings = progress.study.candidates(row)
        for field, text in settings[candidate].items():
            try:
                values = sorted({float(one[field]) for one in settings.values()})
            except (KeyError, ValueError):
                continue
            if len(values) > 2 and float(text) in (values[0], values[-1]):
                notes.append(
                    f"{row}: {field}={text} is the {'smallest' if float(text) == values[0] else 'largest'} tried"
                )
    return notes


def tuning_line(progress: Progress, row: str, candidate: str) -> TuningLine:
    records, metric = runs_of(progress, "tune", row, candidate), progress.metric(row)
    values = [scale(metric) * progress.value(record) for record in with_result(records)]
    result, failed = interval(values) if values else None, len(records) - len(values)
    return TuningLine(row, candidate, with_unit(metric), result, failed, progress.chosen.get(row) == candidate)


def scale(metric: str) -> float:
    return 100.0 if is_percentage(metric) else 1.0


def with_unit(metric: str) -> str:
    return f"{metric} %" if scale(metric) == 100.0 else metric


def runs_of(progress: Progress, purpose: str, row: str, candidate: str | None) -> list[Record]:
    return [record for key, record in progress.done.items() if key[:3] == (purpose, row, candidate)]


def with_result(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if "result" in record]


# --- text ---------------------------------------------------------------------------------------------------


def show_interval(value: Interval | None, signed: bool = False) -> str:
    """95.99 ± 0.12, or 95.99 for fewer than three seeds, whose interval says little."""
    if value is None:
        return ""
    text = f"{value.mean:+.2f}" if signed else f"{value.mean:.2f}"
    return f"{text} ± {value.half:.2f}" if value.half is not None and value.count > 2 else text


def show_number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"


def in_millions(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def final_table(summary: Summary, brief: bool = False) -> list[list[str]]:
    """Header and rows of the final table, without columns that are empty; `brief` fits a terminal."""
    title, several = metric_title(summary.lines)
    header = ["row", "setting", "parameters", "M multiply-adds", "GiB of memory", f"{summary.unit}/s of inference"]
    if brief:
        header[2:] = ["M params", "M MACs", "GiB", f"{summary.unit}/s"]
    header += ["seeds", "epochs", "seconds", "metric", title, f"to {' / '.join(summary.study.references)}"]
    header += [*map(with_unit, summary.study.also), "floor", "anchor", "failed"]
    rows = [
        [
            line.row,
            line.candidate,
            show_number(line.parameters, ",.0f") if not brief else show_number(in_millions(line.parameters), ",.3g"),
            show_number(in_millions(line.macs), ",.4g"),
            show_number(None if line.memory is None else line.memory / 2**30),
            show_number(line.rate, ",.0f"),
            str(len(line.values)),
            show_number(line.epochs, ".4g"),
            show_number(line.seconds, ".0f"),
            line.metric if several else "",
            show_interval(line.result),
            show_interval(line.difference, signed=True),
            *(show_interval(line.others.get(name)) for name in summary.study.also),
            show_number(line.floor),
            f"{show_number(line.anchor)} {f'({line.source})' if line.source and not brief else ''}".strip(),
            str(line.failed or ""),
        ]
        for line in summary.lines
    ]
    return without_empty([header, *rows])


def tuning_table(summary: Summary) -> list[list[str]]:
    title, several = metric_title(summary.tuning)
    header = ["row", "setting", "runs", "metric", f"validation {title}", "failed", "chosen"]
    rows = [
        [
            line.row,
            line.candidate,
            str(line.result.count if line.result else 0),
            line.metric if several else "",
            show_interval(line.result),
            str(line.failed or ""),
            "yes" if line.chosen else "",
        ]
        for line in summary.tuning
    ]
    return without_empty([header, *rows])


def target_table(summary: Summary) -> list[list[str]]:
    """Seconds of training in which each curve reaches the target, over the seeds that reach it."""
    title = f"seconds of training to {show_target(summary)}"
    rows = [[curve, show_interval(value), str(value.count if value else 0)] for curve, value in summary.reached.items()]
    return [["", title, "seeds that reach it"], *rows]


def show_target(summary: Summary) -> str:
    unit = " %" if metric_title(summary.lines)[0].endswith("%") else ""
    return f"{summary.study.target:g}{unit}"


def metric_title(lines: Sequence[Line | TuningLine]) -> tuple[str, bool]:
    """Heading of the results, and whether rows have different metrics."""
    metrics = {line.metric for line in lines if line.metric}
    return (metrics.pop(), False) if len(metrics) == 1 else ("result", bool(metrics))


def without_empty(table: list[list[str]]) -> list[list[str]]:
    kept = [index for index in range(len(table[0])) if any(row[index] for row in table[1:])]
    return [[row[index] for index in kept] for row in table]


def markdown(table: list[list[str]]) -> str:
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def write(summary: Summary, folder: Path) -> None:
    """Write table.md, and table.csv with one line per final run."""
    study = summary.study
    how = "Mean over seeds, from three on ± half a 95 % interval (Student's t)."
    text = f"# {study.name}\n\nEqual {study.compared}. {how}\n\n"
    text += markdown(final_table(summary))
    if summary.tuning:
        text += f"\nChosen on validation:\n\n{markdown(tuning_table(summary))}"
    if summary.reached:
        text += f"\n{markdown(target_table(summary))}"
    write_text_atomically(folder / "table.md", text)
    names = ("parameters", "macs", "memory", "rate")
    costs = attrgetter(*names)
    rows = [
        [line.row, line.candidate, seed, line.metric, value, line.floor, line.anchor, *costs(line)]
        for line in summary.lines
        for seed, value in line.values.items()
    ]
    header = ["row", "setting", "seed", "metric", "value", "floor", "anchor", *names]
    write_csv_atomically(folder / "table.csv", header, rows)
