"""Benchmark files: bench.csv with a row per backend, bench.json with the environment, figures."""

from __future__ import annotations

import csv
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from allmlp.analysis.figures import save
from allmlp.bench import plots
from allmlp.bench.runner import BenchReport, Measurement
from allmlp.bench.scaling import exponent
from allmlp.errors import MissingExtra, UserError, one_line
from allmlp.files import write_atomically

PER_ROUND = ("latencies_s", "calls_s")
"""Columns that the CSV file leaves out."""


def as_dict(report: BenchReport) -> dict[str, Any]:
    return {
        "environment": report.environment,
        "options": dataclasses.asdict(report.options),
        "copy_bytes_per_s": report.copy_rate,
        "skipped": report.skipped,
        "scaling": exponents(report),
        "rows": [row._asdict() for row in report.rows],
    }


def exponents(report: BenchReport) -> list[dict[str, Any]]:
    """e in time ~ size^e and multiply-adds ~ size^e, for every scaled model and backend."""
    found = []
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    for row in report.rows:
        if row.size is not None and row.call_s:
            groups.setdefault((row.model, row.backend, row.batch), []).append(row)
    for (model, backend, batch), rows in groups.items():
        if len(rows) > 1:
            sizes = [float(row.size or 0) for row in rows]
            time = exponent(sizes, [row.call_s or 0.0 for row in rows])
            macs = exponent(sizes, [row.macs for row in rows])
            found.append({"model": model, "backend": backend, "batch": batch, "time": time, "macs": macs})
    return found


def write_numbers(report: BenchReport, folder: Path) -> None:
    """Write bench.csv and bench.json atomically."""

    def as_csv(file: Path) -> None:
        with open(file, "w", encoding="utf8", newline="") as target:
            writer = csv.writer(target)
            columns = [name for name in Measurement._fields if name not in PER_ROUND]
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


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Draw the figures as PNG and SVG if matplotlib is installed; remove stale ones of an earlier run."""
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
