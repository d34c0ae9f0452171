"""Compare runs on one page: a single HTML file without other files or network access.

The contents of a run folder are untrusted: the template escapes all of it, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from allmlp import __version__
from allmlp.accuracy import format_accuracy
from allmlp.device import own_device
from allmlp.errors import UserError, one_line, require, writing
from allmlp.files import RUN, make_writable, write_text_atomically
from allmlp.log import format_duration, format_value, is_percentage
from allmlp.models.zoo import short_name
from allmlp.report.curves import POINTS, better, charts, title
from allmlp.report.filters import Filters, filters
from allmlp.report.images import EmbeddedImage, weights_image
from allmlp.report.predictions import (
    BINS,
    Calibration,
    ConfusedPair,
    Mistake,
    Predictions,
    calibration,
    collect_predictions,
    confusion,
    mistakes,
    most_confused,
)
from allmlp.report.runs import LoggedRun, find, read_logged, settings
from allmlp.report.suspects import SuspectLabels, find_suspects
from allmlp.weights import folder

REPORT = "report.html"
"""Name of the report in the folder of a run."""
EXAMPLES = 2000
"""Test examples that a classifier is evaluated on."""
CELLS = 20
"""With more classes than this the confusion matrix is an image instead of a table."""
DIFFERENCES, LETTERS = 40, 80
"""Rows of the table of settings that differ, and letters per setting."""
COLUMNS = 5
"""Metrics in the table of runs, the most common first; all of them are drawn."""
COLORS = 7
"""Number of colors in the style sheet, distinguishable for color-blind readers; further runs are dashed."""
LETTERS_OF_RECIPE = 50_000
ENVIRONMENT = ("allmlp", "torch", "python", "device", "processes")


class ClassifierReport(NamedTuple):
    """The section of the page about a classifier."""

    class_names: tuple[str, ...]
    examples: int
    total: int
    accuracy: str
    """Accuracy with its interval."""
    matrix: list[list[int]]
    """Confusion matrix; empty if there are too many classes for a table: it is then shown as an image."""
    image: EmbeddedImage | None
    confused: list[ConfusedPair]
    calibration: Calibration
    mistakes: list[Mistake]
    wrong: int
    test_name: str = ""
    """Name of the test file, where there are several."""


class RunDetail(NamedTuple):
    """Details of one run, shown in addition to its row and curves."""

    logged: LoggedRun
    filters: Filters
    classifier: ClassifierReport | None
    missing: str
    """Reason why there is no report on a classifier."""
    suspects: SuspectLabels | None = None
    """Suspect labels, if requested."""


def write_run_report(place: Path, device: str | None = None) -> Path | str:
    """Write report.html into the folder of a finished run; returns the file, or the reason why there is none."""
    try:
        write([place], place / REPORT, device=device)
    except Exception as reason:  # the run is complete without its report
        return one_line(reason) or type(reason).__name__
    return place / REPORT


def write(
    paths: Sequence[Path],
    out: Path,
    examples: int = EXAMPLES,
    suspect_labels: bool = False,
    track: Callable[[Any], Iterable[Any]] = iter,
    device: str | None = None,
) -> tuple[int, list[str]]:
    """Compare the runs in `paths` in the file `out`; returns the number of runs, and what was skipped.

    `examples` is the number of test examples that classifiers are evaluated on; with 0 no data are loaded. With
    `suspect_labels` labels that may be wrong are searched for, see `allmlp.report.suspects`. `track` wraps the
    iteration over runs, for a progress bar. Models run on `device`, by default an accelerator if there is one.
    """
    if suspect_labels and not examples:
        raise UserError("--suspect-labels needs the data, which --examples 0 does not load: leave out one of them")
    place = own_device(device)
    require("jinja2", "analysis")
    runs, skipped = find(paths)
    if not runs:
        raise UserError(f"no run to report on: {skipped[0] if skipped else 'name the folders of runs'}")
    with writing(out):
        make_writable(out.parent)
    details = [
        inspect(read_logged(name, run), place, examples, suspect_labels) for name, run in track(list(runs.items()))
    ]
    page = render(details, skipped)
    with writing(out):
        write_text_atomically(out, page)
    return len(details), skipped


def inspect(logged: LoggedRun, device: torch.device, examples: int, suspect_labels: bool = False) -> RunDetail:
    """Load the model of a run, and its data if it is a classifier."""
    if logged.run is None or logged.state != "finished":
        reason = "the run has not saved a model yet" if logged.run else "run.json cannot be read"
        return RunDetail(logged, Filters([], reason), None, reason)
    try:
        model = folder.load(logged.folder).float()
        seen = filters(model)
    except (UserError, OSError) as reason:
        text = f"the model cannot be loaded: {one_line(reason)}"
        return RunDetail(logged, Filters([], text), None, text)
    if not examples:
        return RunDetail(logged, seen, None, "disabled by --examples 0")
    try:
        predictions = collect_predictions(model.to(device), logged.run, str(logged.folder), examples)
    except (UserError, OSError) as reason:
        return RunDetail(logged, seen, None, one_line(reason))
    suspects = None
    if suspect_labels:
        try:
            suspects = find_suspects(logged.run, logged.folder, device)
        except (UserError, OSError) as reason:  # the rest of the classifier's report is still shown
            suspects = SuspectLabels([], 0, 0, f"Not searched: {one_line(reason)}.")
    return RunDetail(logged, seen, classifier_report(predictions), "", suspects)


def classifier_report(predictions: Predictions) -> ClassifierReport:
    matrix = confusion(predictions)
    fractions = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    small = len(matrix) <= CELLS
    return ClassifierReport(
        predictions.class_names,
        len(predictions.indices),
        predictions.total,
        format_accuracy(predictions.correct, len(predictions.labels)),
        matrix.tolist() if small else [],
        None if small else weights_image(fractions.numpy()),
        most_confused(matrix),
        calibration(predictions),
        mistakes(predictions),
        len(predictions.labels) - predictions.correct,
        predictions.test_name,
    )


# --- the page ---------------------------------------------------------------------------------------------


def page_text(name: str) -> str:
    return (files("allmlp") / name).read_text(encoding="utf8")


@cache
def page_template() -> Any:
    """The compiled template, cached since compiling takes longer than rendering."""
    jinja = require("jinja2", "analysis")
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = lambda value, name: format_value(name, value)
    environment.filters["metric_title"] = title
    environment.filters["clock"] = format_duration
    environment.filters["interval"] = format_accuracy
    return environment.from_string(page_text("report/page/page.html"))


def render(details: Sequence[RunDetail], skipped: Sequence[str] = ()) -> str:
    markup = require("jinja2", "analysis").utils.markupsafe.Markup
    style, script = page_text("theme.css") + page_text("report/page/style.css"), page_text("report/page/page.js")
    runs = [detail.logged for detail in details]
    drawn = charts(runs)
    data = {
        "runs": [{"name": run.name, "epochs": run.epochs_per_step} for run in runs],
        "charts": drawn,
        "colors": COLORS,
    }
    return page_template().render(
        version=__version__,
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        details=details,
        rows=table(details),
        metrics=columns(runs),
        differing=differences(runs),
        drawn=drawn,
        smoothed=[run.name for run in runs if getattr(run.run and run.run.task, "label_smoothing", 0)],
        thinned=any(curve["of"] > len(curve["values"]) for chart in drawn for curve in chart["curves"]),
        points=POINTS,
        bins=BINS,
        colors=COLORS,
        skipped=skipped,
        style=markup(style),
        script=markup(script),
        # Digest of the script exactly as between its tags: the page runs no other script.
        digest=base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
        data=data,
        recipe=recipe,
        run_file=RUN,
    )


class RunRow(NamedTuple):
    """A row of the table of runs."""

    name: str
    state: str
    problems: tuple[str, ...]
    model: str
    input_spec: str
    parameters: int | None
    exact: bool
    data: str
    task: str
    final: dict[str, float]
    best: frozenset[str]
    """Metrics in which no run on the same data and task is better."""
    error: float | None
    """Expected calibration error."""
    steps: int | None
    seconds: float | None
    speed: tuple[float, str] | None


def table(details: Sequence[RunDetail]) -> list[RunRow]:
    rows = []
    for detail in details:
        logged, cost = detail.logged, detail.logged.cost
        rows.append(
            RunRow(
                logged.name,
                logged.state,
                logged.problems,
                short_name(logged.spec),
                logged.spec.input_spec if logged.spec and cost else "",
                cost.parameters if cost else None,
                logged.state == "finished",
                *logged.group,
                logged.final,
                frozenset(),
                detail.classifier.calibration.error if detail.classifier else None,
                logged.steps,
                logged.seconds,
                logged.speed,
            )
        )
    runs = [detail.logged for detail in details]
    return [row._replace(best=frozenset(best_of(run, runs))) for row, run in zip(rows, runs)]


def best_of(run: LoggedRun, runs: Sequence[LoggedRun]) -> Iterable[str]:
    rivals = [one.final for one in runs if run.is_comparable(one)]
    for name, value in run.final.items():
        values = [final[name] for final in rivals if name in final]
        if len(values) > 1 and better(name) and value == (max(values) if better(name) > 0 else min(values)):
            yield name


def columns(runs: Sequence[LoggedRun]) -> list[str]:
    """The evaluated metrics; accuracy and other percentages first, the loss last."""
    counts = Counter(name for run in runs for name in run.final)
    common = [name for name, _ in counts.most_common(COLUMNS)]
    return sorted(common, key=lambda name: (not is_percentage(name), name == "loss"))


def differences(runs: Sequence[LoggedRun]) -> list[tuple[str, list[str | None]]]:
    """Settings in which runs differ, those of the model last: dotted name, and the value in each run, if it has one."""
    configs = [settings(run.config) for run in runs]
    names = dict.fromkeys(name for one in configs for name in one if name)
    compared = [one for one in configs if one]
    rows = [
        (name, [cut(one[name]) if name in one else None for one in configs])
        for name in names
        if len({one.get(name) for one in compared}) > 1
    ]
    return sorted(rows, key=lambda row: row[0].startswith("model"))[:DIFFERENCES]


def cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 4]} ..."


def recipe(logged: LoggedRun) -> dict[str, Any]:
    """The configuration of a run, its environment, and the command that started it."""
    recorded = logged.config.get("environment")
    environment = recorded if isinstance(recorded, dict) else {}
    environment = environment | {"processes": logged.config.get("processes", 1)}
    command = environment.get("command")
    again = ["allmlp", "train", str(logged.folder / RUN), "--out", f"{logged.folder}_again"]
    if (processes := environment["processes"]) != 1:
        again = ["torchrun", "--nproc-per-node", str(processes), "-m", *again]
    text = json.dumps(logged.config.get("run"), indent=1, ensure_ascii=False)
    if len(text) > LETTERS_OF_RECIPE:
        text = f"{text[:LETTERS_OF_RECIPE]} ..."
    return {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "again": shlex.join(again) if logged.run else "",
        "environment": [(name, str(environment[name])) for name in ENVIRONMENT if name in environment],
        "text": text if logged.config else "",
    }
