"""Measure speed and peak memory of the models of papers' tables on this GPU, at the batch size that each table names.

    PYTHONPATH=docs/tools python -m paper_tables.bench mixer_table1 gmlp_table2 --minutes 9

Every model of all given tables runs eagerly first, then in the mode in which its package is fastest, each time from the
cheapest model of a table to the most expensive one: when the time is up, an eager row is better than none. The records
docs/logs/bench_TABLE.json, bench_TABLE_2.json ... are written after every model; `make tables` reads them. Called
again, it measures what no record of this device has. A model that fails or takes longer than LIMIT is recorded with
that reason, which the table prints, and is not tried again in that mode; delete the record to do so. Rows without a
preset are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from allmlp.bench.outputs import as_dict
from allmlp.bench.runner import BenchOptions, BenchReport, Measurement
from allmlp.errors import lookup
from allmlp.files import write_json_atomically, write_text_atomically
from allmlp.models.zoo import preset
from allmlp.provenance import environment
from paper_tables.generate import DOCS, macs_of, published
from paper_tables.measurements import PRECISION, attempts
from paper_tables.published import Cell, cells_of

COMMAND = [sys.executable, "-m", "allmlp"]
FASTEST = {"ours": "fast", "hf": "channels-last", "timm": "channels-last"}
"""Modes of inference; in training it is cuda-graph for all."""
LIMIT = 240.0
"""Seconds for one model in one mode; what takes longer does so to compile."""
POLL = 0.2
"""Seconds."""


class Portion(NamedTuple):
    """Where and until when to measure."""

    logs: Path
    device: torch.device
    end: float
    """On the clock of `time.monotonic`."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.end


def measure(table: str, eager: bool, portion: Portion) -> None:
    """All models of a table in one mode, as far as the time goes."""
    for group in groups(table, eager, portion):
        left = group
        while left and not portion.is_over():
            left = run(left, eager, new_record(table, portion.logs), portion)


def groups(table: str, eager: bool, portion: Portion) -> list[list[Cell]]:
    """What is left, in groups that one `allmlp bench` can measure. Only what runs eagerly is compiled."""
    name = environment(portion.device)["device"]
    files = sorted({*(DOCS / "logs").glob("bench*.json"), *portion.logs.glob("bench*.json")})
    tried: dict[tuple[Cell, bool], bool] = {}
    for one in attempts(files):
        if one.device == name:
            tried[one.cell, one.eager] = tried.get((one.cell, one.eager), False) or one.rate is not None
    cells = dict.fromkeys(cells_of(lookup(table, published(), "table")))
    other = not eager  # an eager row is needed unless there is a compiled one, and the other way around
    left = [cell for cell in cells if (cell, eager) not in tried and tried.get((cell, other), False) is other]
    found: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in sorted(left, key=lambda cell: (macs_of(cell.model), cell)):
        found.setdefault((cell.package, cell.size, cell.task, cell.batch), []).append(cell)
    return list(found.values())


def new_record(table: str, logs: Path) -> Path:
    numbers = range(1, len(list(logs.glob(f"bench_{table}*.json"))) + 2)
    names = (logs / f"bench_{table}{f'_{number}' if number > 1 else ''}.json" for number in numbers)
    return next(file for file in names if not file.exists())


def backend(cell: Cell, eager: bool) -> str:
    return f"{cell.package} {'eager' if eager else 'cuda-graph' if cell.task == 'training' else FASTEST[cell.package]}"


def arguments(cells: list[Cell], eager: bool) -> list[str]:
    """Of `allmlp`, for cells of one group."""
    first = cells[0]
    words = ["bench", *(cell.preset for cell in cells), "--batch-size", str(first.batch)]
    words += ["--backends", backend(first, eager).replace(" ", "-", 1)]
    words += ["--precision", PRECISION, *(["--train"] if first.task == "training" else [])]
    if first.size:
        words += ["--seq-len" if preset(first.preset).spec.input_size is None else "--img-size", first.size]
    return words


def run(cells: list[Cell], eager: bool, record: Path, portion: Portion) -> list[Cell]:
    """Measure the cells of one group in a process of its own; returns those after one that could not be measured."""
    with tempfile.TemporaryDirectory() as folder:
        made, output = Path(folder, "bench.json"), Path(folder, "output.txt")
        words = [*COMMAND, *arguments(cells, eager), "--device", str(portion.device), "--out", folder]
        with open(output, "wb") as target:
            # A group of processes, since torch.compile starts workers.
            process = subprocess.Popen(words, stdout=target, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            done, failure = watch(process, cells, made, record, portion)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        last = (output.read_text(encoding="utf8", errors="replace").strip().splitlines() or [""])[-1]
    if done == len(cells) or (portion.is_over() and not failure):
        return []
    if process.returncode == 2:  # no fault of the model: wrong words, or no GPU
        sys.exit(last)
    failure = failure or f"failed: {last or f'ended with code {process.returncode}'}"
    add_failure(record, cells, done, eager, failure, portion.device)
    return cells[done + 1 :]


def watch(
    process: subprocess.Popen[bytes], cells: list[Cell], made: Path, record: Path, portion: Portion
) -> tuple[int, str]:
    """Copy what is measured until the process ends, a model takes too long, or the time is over.

    Returns the number of measured cells, and why the next one is given up.
    """
    done, since, ended = 0, time.monotonic(), False
    while not ended:
        time.sleep(POLL)
        ended = process.poll() is not None  # before the last look at its record
        text = made.read_text(encoding="utf8") if made.is_file() else '{"rows": []}'
        if len(rows := json.loads(text)["rows"]) > done:
            # Its command names a folder "bench" instead of the temporary one.
            write_text_atomically(record, text.replace(json.dumps(str(made.parent)), '"bench"'))
            for row in rows[done:]:
                rate = f"{row['rate_per_s']:,.0f} {row['unit']}/s" if row["rate_per_s"] else row["note"]
                print(f"{row['model']}, {row['backend']}, batch {row['batch']}: {rate}", flush=True)
            done, since = len(rows), time.monotonic()
        if not ended and done < len(cells) and time.monotonic() - since > LIMIT:
            return done, f"took more than {LIMIT / 60:g} minutes"
        if portion.is_over():
            break
    return done, ""


def add_failure(record: Path, cells: list[Cell], done: int, eager: bool, reason: str, device: torch.device) -> None:
    """Add a row without a rate to the record, which may have none yet."""
    cell, name = cells[done], backend(cells[done], eager)
    size = int(cell.size) if cell.size else None
    text = preset(cell.preset).spec.input_size is None
    options = BenchOptions(
        tuple(one.preset for one in cells),
        (cell.batch,),
        str(device),
        PRECISION,
        cell.task == "training",
        backends=(name,),
        img_size=None if text else size,
        seq_len=size if text else None,
    )
    empty = as_dict(BenchReport(options, environment(device), 0.0, [], {}))
    found = json.loads(record.read_text(encoding="utf8")) if record.is_file() else empty
    row = Measurement(cell.preset, cell.preset, None, cell.task, name, cell.batch, "", note=reason)
    write_json_atomically(record, {**found, "rows": [*found["rows"], row._asdict()]})
    print(f"{cell.model}, {name}, batch {cell.batch}: {reason}", flush=True)


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="paper_tables.bench", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "tables", nargs="+", choices=[name for name, table in published().items() if [*cells_of(table)]]
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time, to go on later")
    parser.add_argument("--out", type=Path, default=DOCS / "logs", help="folder of the records (default: docs/logs)")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(None if words is None else [*words])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the measuring process too
    given.out.mkdir(parents=True, exist_ok=True)
    portion = Portion(given.out, torch.device(given.device), time.monotonic() + 60 * given.minutes)
    for eager in (True, False):
        for table in given.tables:
            measure(table, eager, portion)
    left = sum(
        len(group) for table in given.tables for eager in (True, False) for group in groups(table, eager, portion)
    )
    print(f"{left} left" if left else "nothing left")


if __name__ == "__main__":
    main()
