"""Run folders for reports: trained for a few steps, unfinished, and damaged."""

from __future__ import annotations

import json
from pathlib import Path

from allmlp.data.dataset import Data, ImageDataset
from allmlp.run import Run
from allmlp.spec import to_dict
from allmlp.training import train
from train.runs import Blobs, small

EVIL = "<script>document.title = 'caught'</script>"
LIVELY = "<img src=x onerror=\"document.title='caught'\">"


class NamedBlobs(Data):
    """Blobs with class names that are markup, one of them not UTF-8."""

    def load(self) -> ImageDataset:
        blobs = Blobs().load()
        return ImageDataset(blobs.train, blobs.test, (EVIL, LIVELY, "'c\"", "d & d\udce9"), blobs.mean, blobs.std)


def trained(folder: Path, run: Run | None = None) -> Path:
    train(run or small(), folder, "cpu")
    return folder


def written(folder: Path, records: list[dict[str, object]], run: Run | None = None) -> Path:
    """An unfinished run: no model."""
    folder.mkdir(parents=True)
    environment = {"torch": "2.0", "device": EVIL, "command": ["allmlp", "train", LIVELY]}
    record = {"run": to_dict(run or small()), "environment": environment}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [json.dumps({"kind": "train", "step": 1, "time": 0.0} | one) for one in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def curve(steps: int, name: str = "loss") -> list[dict[str, object]]:
    return [{"step": step, "time": 1000.0 + step, name: 1 / step, "epoch": step / 10} for step in range(1, steps + 1)]
