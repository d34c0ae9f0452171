"""Accuracy of the bundled CIFAR-10 model at other image sizes, with 8-bit weights and pruned, on a CPU.

ALLMLP_DATA=FOLDER PYTHONPATH=docs/tools python -m results.bundled       # twenty minutes on one core

Writes docs/logs/cifar10_bundled.json after every number, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from allmlp.analysis.pruning_curve import accuracy, pruning_curve
from allmlp.data.cifar import Cifar10
from allmlp.data.dataset import LabeledImages
from allmlp.export.files import export
from allmlp.export.onnx import run_onnx
from allmlp.provenance import environment
from allmlp.tasks.task import Normalize
from allmlp.weights.pretrained import pretrained
from allmlp.weights.resize import resize_model
from results.records import LOGS

MODEL = Path("weights/cifar10")
SIZES = {"interpolate": (24, 40, 48, 64), "tile": (64,)}
IMAGES, PRUNING_IMAGES = 2000, 500
"""The first so many of the test split, in which the classes are in random order."""


def main() -> None:
    dataset = Cifar10().load()
    images = dataset.test.fetch(torch.arange(IMAGES))
    found: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "data": {"sha256": dataset.checksum(), "train": len(dataset.train), "test": len(dataset.test)},
        "rows": [],
    }
    for row in measurements(images):
        found["rows"].append(row)
        print(row, flush=True)
        (LOGS / "cifar10_bundled.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


def measurements(images: LabeledImages) -> Iterator[dict[str, Any]]:
    model, preprocessing = pretrained(str(MODEL))
    yield row("as it is", 32, images, accuracy(model, preprocessing, images))
    for int8 in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            export(MODEL, file, int8=int8)
            inputs = Normalize(preprocessing.mean, preprocessing.std)(images.images)
            outputs = run_onnx(file, [(batch,) for batch in inputs.split(100)])
            right = torch.cat([logits for (logits,) in outputs]).argmax(1) == images.labels
            what = "ONNX Runtime, int8" if int8 else "ONNX Runtime, float32"
            yield row(what, 32, images, right.double().mean().item()) | {"bytes": file.stat().st_size}
    some = LabeledImages(*(part[:PRUNING_IMAGES] for part in images))
    for point in pruning_curve(model, preprocessing, some):
        yield row("pruned", 32, some, point.accuracy) | {"method": point.method, "removed": point.removed}
    for rule, sizes in SIZES.items():
        for size in sizes:
            resized = resize_model(model, img_size=size, rule=rule)  # type: ignore[arg-type]
            yield row(rule, size, images, accuracy(resized, preprocessing, images))


def row(what: str, size: int, images: LabeledImages, right: float) -> dict[str, Any]:
    return {"what": what, "img_size": size, "images": len(images.labels), "accuracy": right}


if __name__ == "__main__":
    main()
