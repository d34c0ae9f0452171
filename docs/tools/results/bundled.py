"""Accuracy of the bundled CIFAR-10 model at other image sizes, with 8-bit weights and pruned.

ALLMLP_DATA=FOLDER PYTHONPATH=docs/tools python -m results.bundled       # a minute with a GPU

Writes docs/logs/cifar10_bundled.json, or the file given as argument.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from allmlp.analysis.pruning_curve import accuracy, pruning_curve
from allmlp.data.cifar import Cifar10
from allmlp.data.dataset import LabeledImages
from allmlp.errors import MissingExtra
from allmlp.export.files import export
from allmlp.export.onnx import run_onnx
from allmlp.files import write_json_atomically
from allmlp.provenance import environment
from allmlp.tasks.task import Normalize
from allmlp.weights.pretrained import pretrained
from allmlp.weights.resize import resize_model
from results.records import LOGS

MODEL = Path("weights/cifar10")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"interpolate": (24, 40, 48, 64), "tile": (64,)}
ONNX_IMAGES = 2000
"""ONNX Runtime runs on the CPU, on the first so many test images."""


def main(file: Path) -> None:
    dataset = Cifar10().load()
    rows = []
    for row in measurements(LabeledImages(*dataset.test.examples)):
        rows.append(row)
        print(row, flush=True)
    data = {"sha256": dataset.checksum(), "train": len(dataset.train), "test": len(dataset.test)}
    write_json_atomically(file, {"environment": environment(DEVICE), "data": data, "rows": rows})


def measurements(images: LabeledImages) -> Iterator[dict[str, Any]]:
    model, preprocessing = pretrained(str(MODEL), device=DEVICE)
    for point in pruning_curve(model, preprocessing, images):
        if point.method == "none":
            yield row("as it is", 32, point.accuracy, images)
        else:
            about = {"method": point.method, "removed": point.removed}
            yield row("pruned", 32, point.accuracy, images) | about
    for rule, sizes in SIZES.items():
        for size in sizes:
            resized = resize_model(model, img_size=size, rule=rule)  # type: ignore[arg-type]
            yield row(rule, size, accuracy(resized, preprocessing, images), images)
    some = LabeledImages(*(part[:ONNX_IMAGES] for part in images))
    yield row("as it is", 32, accuracy(model, preprocessing, some), some)
    inputs = Normalize(preprocessing.mean, preprocessing.std)(some.images)
    for int8 in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            try:
                export(MODEL, file, int8=int8)
            except MissingExtra as reason:
                print(reason)
                return
            outputs = run_onnx(file, [(batch,) for batch in inputs.split(100)])
            right = torch.cat([logits for (logits,) in outputs]).argmax(1) == some.labels
            what = "ONNX Runtime, int8" if int8 else "ONNX Runtime, float32"
            yield row(what, 32, right.double().mean().item(), some) | {"bytes": file.stat().st_size}


def row(what: str, size: int, right: float, images: LabeledImages) -> dict[str, Any]:
    return {"what": what, "img_size": size, "images": len(images.labels), "accuracy": right}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOGS / "cifar10_bundled.json")
