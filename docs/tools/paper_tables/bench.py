"""Measure speed and peak memory of all models of a paper's table on this GPU, at the batch size that the table names.

    PYTHONPATH=docs/tools python -m paper_tables.bench resmlp_table1

writes docs/logs/bench_resmlp_table1.json, which `make tables` reads. Rows without a preset are left out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from allmlp.cli import main
from allmlp.models.zoo import preset
from allmlp.plan.time import cost
from paper_tables.generate import DOCS, published

BACKENDS = {"inference": "ours-eager,ours-fast,hf-eager,hf-channels-last", "training": "ours-cuda-graph"}
"""The fastest of this library and of transformers, and eager ones to compare memory with."""


def arguments(table: str, out: Path) -> list[str]:
    """Of `allmlp`, for one table."""
    found = published()[table]
    names = {row.model for row in found.rows if row.model and not set("@/") & set(row.model)}
    models = sorted(names, key=lambda name: (cost(preset(name).spec).macs, name))  # the slow ones last
    sources = [column.source.split() for column in found.columns]
    tasks = {tuple(options) for source, *options in filter(None, sources) if source in ("speed", "memory")}
    task, *batch = max(tasks, key=len)
    words = ["bench", *models, "--batch-size", *(batch or ["256"]), "--backends", BACKENDS[task], "--out", str(out)]
    return words + (["--train"] if task == "training" else [])


if __name__ == "__main__":
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            main(arguments(name, Path(folder)))
        finally:  # of an interrupted run, what was measured
            record = Path(folder, "bench.json")
            if record.is_file():
                (DOCS / "logs" / f"bench_{name}.json").write_bytes(record.read_bytes())
