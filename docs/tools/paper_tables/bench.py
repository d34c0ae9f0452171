"""Measure speed and peak memory of all models of a paper's table on this GPU, at the batch size that the table names.

    PYTHONPATH=docs/tools python -m paper_tables.bench resmlp_table1

writes docs/logs/bench_resmlp_table1.json, which `make tables` reads. Interrupted and run again, it measures the models
that are left and writes a further record, bench_resmlp_table1_2.json. Rows without a preset are left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Container
from pathlib import Path

from allmlp.cli import main
from allmlp.models.zoo import preset
from allmlp.plan.time import cost
from paper_tables.generate import DOCS, published

BACKENDS = {"inference": "ours-eager,ours-fast,hf-eager,hf-channels-last", "training": "ours-cuda-graph"}
"""The fastest of this library and of transformers, and eager ones to compare memory with."""


def arguments(table: str, out: Path, measured: Container[str] = ()) -> list[str]:
    """Of `allmlp`, for one table."""
    found = published()[table]
    names = {row.model for row in found.rows if row.model and not set("@/") & set(row.model)}
    left = (name for name in names if name not in measured)
    models = sorted(left, key=lambda name: (cost(preset(name).spec).macs, name))  # the slow ones last
    sources = [column.source.split() for column in found.columns]
    tasks = {tuple(options) for source, *options in filter(None, sources) if source in ("speed", "memory")}
    task, *batch = max(tasks, key=len)
    words = ["bench", *models, "--batch-size", *(batch or ["256"]), "--backends", BACKENDS[task], "--out", str(out)]
    return words + (["--train"] if task == "training" else [])


def measured_models(files: list[Path]) -> set[str]:
    return {row["model"] for file in files for row in json.loads(file.read_text(encoding="utf8"))["rows"]}


if __name__ == "__main__":
    name, logs = sys.argv[1], DOCS / "logs"
    earlier = sorted(logs.glob(f"bench_{name}*.json"))
    target = logs / (f"bench_{name}_{len(earlier) + 1}.json" if earlier else f"bench_{name}.json")
    with tempfile.TemporaryDirectory() as folder:
        try:
            main(arguments(name, Path(folder), measured_models(earlier)))
        finally:  # of an interrupted run, what was measured
            record = Path(folder, "bench.json")
            if record.is_file():
                target.write_bytes(record.read_bytes())
