"""Benchmark files: bench.csv with a row per backend, bench.json with the environment and every round, figures; or only
one file of numbers.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from allmlp.analysis.figures import save
from allmlp.bench import plots
from allmlp.bench.runner import BenchReport, Measurement, Ratio
from allmlp.bench.scaling import exponent
from allmlp.bench.timing import quartiles
from allmlp.errors import MissingExtra, writing
from allmlp.files import write_atomically, write_csv_atomically, write_text_atomically

NOT_IN_CSV = ("ratios", "calls_s", "latencies_s", "device_times_s")
"""Fields not in the CSV file; of the ratios it has those over timm's best, by throughput and device time (batch 1)."""


RATIO_COLUMNS = ("ratio_over", "ratio_by", "ratio", "ratio_low", "ratio_high")


def headline(row: Measurement) -> Ratio | None:
    """The speedup over timm at its best; on a GPU at batch 1 that of device times, since launches take the rest."""
    return (row.ratio("timm best", "device") if row.batch == 1 else None) or row.ratio("timm best")


def as_dict(report: BenchReport) -> dict[str, Any]:
    return {
        "environment": report.environment,
        "options": dataclasses.asdict(report.options),
        "copy_bytes_per_s": report.copy_rate,
        "skipped": report.skipped,
        "scaling": exponents(report),
        "rows": [row._asdict() | {"ratios": [ratio._asdict() for ratio in row.ratios]} for row in report.rows],
    }


def exponents(report: BenchReport) -> list[dict[str, Any]]:
    """e in time ~ size^e and multiply-adds ~ size^e, for every scaled model and backend."""
    fits = []
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    for row in report.rows:
        if row.size is not None and row.calls_s and row.model == row.cell:
            groups.setdefault((row.model, row.backend, row.batch), []).append(row)
    for (model, backend, batch), rows in groups.items():
        if len(rows) > 1:
            sizes = [float(row.size or 0) for row in rows]
            time = exponent(sizes, [quartiles(row.calls_s).median for row in rows])
            macs = exponent(sizes, [row.macs for row in rows])
            fits.append({"model": model, "backend": backend, "batch": batch, "time": time, "macs": macs})
    return fits


def is_file(out: Path) -> bool:
    """Whether `out` is one file of numbers, by its suffix, and not a folder."""
    return out.suffix in (".csv", ".json") and not out.is_dir()


def write_numbers(report: BenchReport, out: Path) -> None:
    """Write bench.csv and bench.json into the folder `out`, or one of them as the file `out`, atomically."""
    columns, rows = [name for name in Measurement._fields if name not in NOT_IN_CSV], []
    for row in report.rows:
        ratio = headline(row)
        over_timm = [ratio.backend, ratio.by, ratio.median, ratio.low, ratio.high] if ratio else []
        rows.append([*(getattr(row, name) for name in columns), *over_timm])
    text = json.dumps(as_dict(report), indent=1, allow_nan=False, default=str) + "\n"
    files = [out] if is_file(out) else [out / "bench.csv", out / "bench.json"]
    with writing(f"to {out}"):
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".csv":
                write_csv_atomically(file, [*columns, *RATIO_COLUMNS], rows)
            else:
                write_text_atomically(file, text)


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Draw the figures as PNG and SVG if matplotlib is installed; remove stale ones of an earlier run."""
    try:
        charts = dict(plots.figures(report))
    except MissingExtra:
        charts = {}
    drawn = []
    for name in plots.NAMES:
        for kind in ("png", "svg"):
            file = folder / f"{name}.{kind}"
            if name in charts:
                write_atomically(file, partial(save, charts[name], kind=kind))
                drawn.append(file)
            else:
                file.unlink(missing_ok=True)
    return drawn
