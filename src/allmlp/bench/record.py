"""The files of a benchmark: bench.csv with a row for every side, bench.json with the environment too, figures."""

from __future__ import annotations

import csv
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from allmlp.analysis.plots import save
from allmlp.bench import plots
from allmlp.bench.contest import Report, Row
from allmlp.bench.grow import exponent
from allmlp.errors import MissingExtra, UserError, one_line
from allmlp.files import write_atomically

ROUNDS = ("alone_s", "turns_s")
"""What a table has no place for."""


def as_dict(report: Report) -> dict[str, Any]:
    return {
        "environment": report.environment,
        "options": dataclasses.asdict(report.options),
        "copy_bytes_per_s": report.copy_rate,
        "left_out": report.left_out,
        "growth": exponents(report),
        "rows": [row._asdict() for row in report.rows],
    }


def exponents(report: Report) -> list[dict[str, Any]]:
    """Of every model that was grown and every side of it: e in time ~ size^e, and in multiply-adds ~ size^e."""
    found = []
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in report.rows:
        if row.size is not None and row.call_s:
            groups.setdefault((row.model, row.side, row.batch), []).append(row)
    for (model, side, batch), rows in groups.items():
        if len(rows) > 1:
            sizes = [float(row.size or 0) for row in rows]
            time = exponent(sizes, [row.call_s or 0.0 for row in rows])
            macs = exponent(sizes, [row.macs for row in rows])
            found.append({"model": model, "side": side, "batch": batch, "time": time, "macs": macs})
    return found


def write_numbers(report: Report, folder: Path) -> None:
    """bench.csv and bench.json, each whole or not at all."""

    def as_csv(file: Path) -> None:
        with open(file, "w", encoding="utf8", newline="") as target:
            writer = csv.writer(target)
            columns = [name for name in Row._fields if name not in ROUNDS]
            writer.writerow(columns)
            values = [[getattr(row, name) for name in columns] for row in report.rows]
            writer.writerows([["" if value is None else value for value in row] for row in values])

    text = json.dumps(as_dict(report), indent=1, allow_nan=False, default=str) + "\n"
    files = {
        folder / "bench.csv": as_csv,
        folder / "bench.json": lambda file: file.write_text(text, encoding="utf8"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, fill in files.items():
            write_atomically(file, fill)
    except OSError as reason:
        raise UserError(f"cannot write to {folder}: {one_line(reason)}") from None


def draw(report: Report, folder: Path) -> list[Path]:
    """The figures as PNG and SVG; none where matplotlib is missing. Those of an earlier run that this one lacks go."""
    try:
        found = dict(plots.figures(report))
    except MissingExtra:
        found = {}
    drawn = []
    for name in plots.NAMES:
        for kind in ("png", "svg"):
            file = folder / f"{name}.{kind}"
            if name in found:
                write_atomically(file, partial(save, found[name], kind=kind))
                drawn.append(file)
            else:
                file.unlink(missing_ok=True)
    return drawn
