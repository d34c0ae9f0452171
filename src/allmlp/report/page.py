"""Runs compared on one page: a single HTML file that needs nothing beside it and no network.

What a run's files say is text of strangers: the template escapes all of it, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from allmlp import __version__
from allmlp.errors import UserError, one_line, require
from allmlp.files import RUN, write_atomically
from allmlp.log import clock, show
from allmlp.report.curves import POINTS, better, charts, is_share
from allmlp.report.filters import Filters, filters
from allmlp.report.judged import (
    BINS,
    Calibration,
    Confused,
    Judged,
    Mistake,
    calibration,
    confused,
    confusion,
    judge,
    mistakes,
)
from allmlp.report.pictures import Picture, weights_picture
from allmlp.report.runs import Entry, describe, find, read_entry, settings
from allmlp.weights import folder

EXAMPLES = 2000
"""Test examples that a classifier is asked about."""
CELLS = 20
"""Up to so many classes a confusion matrix is a table; with more it is a picture."""
DIFFERENCES, LETTERS = 40, 80
"""Rows of the table of settings that differ, and letters of a setting in it."""
COLUMNS = 8
"""Metrics in the table of runs, the commonest first; all of them are drawn."""
LETTERS_OF_RECIPE = 50_000
ENVIRONMENT = ("allmlp", "torch", "python", "device", "processes")


class Classes(NamedTuple):
    """What the page shows of a classifier."""

    names: tuple[str, ...]
    examples: int
    total: int
    accuracy: float
    matrix: list[list[int]]
    """Empty where there are too many classes for a table; then there is a picture."""
    picture: Picture | None
    confused: list[Confused]
    calibration: Calibration
    mistakes: list[Mistake]
    wrong: int


class Detail(NamedTuple):
    """What the page shows of one run beside its row and its curves."""

    entry: Entry
    filters: Filters
    classes: Classes | None
    left_out: str
    """Why there is nothing about classes."""


def write(
    paths: Sequence[Path], out: Path, examples: int = EXAMPLES, track: Callable[[Any], Iterable[Any]] = iter
) -> tuple[int, list[str]]:
    """Compare the runs in `paths` in the file `out`. How many there are, and what was left out.

    `examples` is how many test examples a classifier is asked about; with 0 no data are opened. `track` watches the
    runs go by.
    """
    require("jinja2", "analysis")
    found, left_out = find(paths)
    if not found:
        raise UserError(f"there is no run to report on: {left_out[0] if left_out else 'name the folders of runs'}")
    details = [study(read_entry(name, place), examples) for name, place in track(list(found.items()))]
    page = render(details, left_out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write_text(page, encoding="utf8"))
    except OSError as reason:
        raise UserError(f"cannot write {out}: {one_line(reason)}") from None
    return len(details), left_out


def study(entry: Entry, examples: int) -> Detail:
    """Open the model of a run, and its data where it classifies; what cannot be had is said."""
    if entry.run is None or entry.state != "finished":
        reason = "the run has kept no model yet" if entry.run else "what was run is not known"
        return Detail(entry, Filters([], reason), None, reason)
    try:
        model = folder.load(entry.folder).float()
        seen = filters(model)
    except (UserError, OSError) as reason:
        text = f"its model cannot be opened: {one_line(reason)}"
        return Detail(entry, Filters([], text), None, text)
    if not examples:
        return Detail(entry, seen, None, "left out: no examples were asked for (--examples 0)")
    try:
        judged = judge(model.to(device()), entry.run, str(entry.folder), examples)
    except (UserError, OSError) as reason:
        return Detail(entry, seen, None, one_line(reason))
    return Detail(entry, seen, classes_of(judged), "")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def classes_of(judged: Judged) -> Classes:
    matrix = confusion(judged)
    share = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    small = len(matrix) <= CELLS
    return Classes(
        judged.classes,
        len(judged.numbers),
        judged.total,
        judged.accuracy,
        matrix.tolist() if small else [],
        None if small else weights_picture(share.numpy()),
        confused(matrix),
        calibration(judged),
        mistakes(judged),
        int((judged.chances.argmax(1) != judged.labels).sum()),
    )


# --- the page ---------------------------------------------------------------------------------------------


def render(details: Sequence[Detail], left_out: Sequence[str] = ()) -> str:
    jinja = require("jinja2", "analysis")
    place = files("allmlp.report") / "page"
    texts = {name: (place / name).read_text(encoding="utf8") for name in ("page.html", "style.css", "page.js")}
    environment = jinja.Environment(
        loader=jinja.DictLoader(texts),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = lambda value, name: show(name, value)
    environment.filters["clock"] = clock
    entries = [detail.entry for detail in details]
    drawn = charts(entries)
    data = {
        "runs": [{"name": entry.name, "epochs": entry.epochs_per_step} for entry in entries],
        "charts": drawn,
    }
    return environment.get_template("page.html").render(
        version=__version__,
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        details=details,
        rows=table(details),
        metrics=columns(entries),
        differing=differences(entries),
        drawn=drawn,
        thinned=any(curve["of"] > len(curve["values"]) for chart in drawn for curve in chart["curves"]),
        points=POINTS,
        bins=BINS,
        left_out=left_out,
        style=jinja.utils.markupsafe.Markup(texts["style.css"]),
        script=jinja.utils.markupsafe.Markup(texts["page.js"]),
        # Of the script as it stands between its tags: the page runs this one and no other.
        digest=base64.b64encode(hashlib.sha256(f"\n{texts['page.js']}".encode()).digest()).decode(),
        data=data,
        recipe=recipe,
        run_file=RUN,
    )


class Row(NamedTuple):
    """A line of the table of runs."""

    name: str
    state: str
    faults: tuple[str, ...]
    model: str
    reads: str
    parameters: int | None
    exact: bool
    data: str
    task: str
    final: dict[str, float]
    best: frozenset[str]
    """Metrics in which no run on the same data and task is better."""
    error: float | None
    """Of its calibration."""
    steps: int | None
    seconds: float | None
    speed: tuple[float, str] | None


def table(details: Sequence[Detail]) -> list[Row]:
    rows = []
    for detail in details:
        entry, run = detail.entry, detail.entry.run
        cost = entry.cost
        rows.append(
            Row(
                entry.name,
                entry.state,
                entry.faults,
                describe(entry.spec),
                entry.spec.reads if entry.spec and cost else "",
                cost.parameters if cost else None,
                entry.state == "finished",
                type(run.data).__name__ if run else "",
                type(run.task).__name__ if run else "",
                entry.final,
                frozenset(),
                detail.classes.calibration.error if detail.classes else None,
                entry.steps,
                entry.seconds,
                entry.speed,
            )
        )
    return [row._replace(best=frozenset(best_of(row, rows))) for row in rows]


def best_of(row: Row, rows: Sequence[Row]) -> Iterable[str]:
    rivals = [one for one in rows if (one.data, one.task) == (row.data, row.task)]
    for name, value in row.final.items():
        values = [one.final[name] for one in rivals if name in one.final]
        if row.task and len(values) > 1 and better(name):
            best = max(values) if better(name) > 0 else min(values)
            if value == best:
                yield name


def columns(entries: Sequence[Entry]) -> list[str]:
    """What runs are judged by; accuracy and its like in front."""
    counts = Counter(name for entry in entries for name in entry.final)
    common = [name for name, _ in counts.most_common(COLUMNS)]
    return sorted(common, key=lambda name: (not is_share(name), name == "loss"))


def differences(entries: Sequence[Entry]) -> list[tuple[str, list[str | None]]]:
    """The settings in which runs differ, those of the model last: dotted name, and the value of each run (None where it
    has no such field).
    """
    known = [settings(entry.record) for entry in entries]
    names = dict.fromkeys(name for one in known for name in one if name)
    compared = [one for one in known if one]
    rows = [
        (name, [cut(one[name]) if name in one else None for one in known])
        for name in names
        if len({one.get(name) for one in compared}) > 1
    ]
    return sorted(rows, key=lambda row: row[0].startswith("model"))[:DIFFERENCES]


def cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 4]} ..."


def recipe(entry: Entry) -> dict[str, Any]:
    """What a run was told, its surroundings, and the command that made it."""
    command = entry.record.get("command")
    if isinstance(command, list):
        command = " ".join(["allmlp", *(shlex.quote(str(word)) for word in command[1:])])
    text = json.dumps(entry.record.get("run"), indent=1, ensure_ascii=False)
    if len(text) > LETTERS_OF_RECIPE:
        text = f"{text[:LETTERS_OF_RECIPE]} ..."
    return {
        "command": command if isinstance(command, str) else "",
        "environment": [(name, str(entry.record[name])) for name in ENVIRONMENT if name in entry.record],
        "text": text if entry.record else "",
    }
