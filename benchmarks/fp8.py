"""Predictions of models in FP8, compared with float32 and bfloat16 on test data.

    python benchmarks/fp8.py --cifar10 data/cifar10 --imdb data/imdb.tsv --out docs/logs/fp8.json

The bundled gMLP on CIFAR-10, the bundled aMLP for sentiment on IMDb reviews that fill its 128 tokens, and a ResMLP
trained here on scikit-learn's digits. Without a GPU of compute capability 8.9 or higher the definitions of the kernels
compute: channel MLPs are rounded to FP8 in the same places, and everything else is float32. bfloat16 is the model in
eager mode.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import allmlp
from allmlp.data.cifar import Cifar10
from allmlp.data.dataset import InMemory
from allmlp.data.digits import Digits
from allmlp.files import write_json_atomically
from allmlp.inference.gpu_fp8 import GpuFp8Encoder
from allmlp.kernels.unit_rows.reference import FP8
from allmlp.models.encoder import EncoderModel
from allmlp.provenance import environment
from allmlp.recipes import runs

BATCH = 100


class Test(NamedTuple):
    name: str
    model: EncoderModel
    inputs: list[Any]
    labels: Tensor


def images(name: str, model: EncoderModel, part: InMemory, count: int) -> Test:
    pixels = [image.permute(1, 2, 0).squeeze(2).numpy() for image in part.examples.images[:count]]
    return Test(name, model, pixels, part.examples.labels[:count])


def tests(options: argparse.Namespace) -> Iterator[Test]:
    cifar10: Any = Cifar10(str(options.cifar10)).load().test
    yield images("gMLP, CIFAR-10", load("allmlp:cifar10"), cifar10, options.examples)
    text = load("allmlp:text")
    with options.imdb.open(encoding="utf8", newline="\n") as file:
        reviews = [line.rstrip("\n").split("\t", 1) for line in file]
    rows = [(int(rating), review) for rating, review in reviews if is_long(text, review)]
    rows = rows[: options.examples]
    labels = torch.tensor([int(rating > 5) for rating, _ in rows])
    yield Test("aMLP, IMDb", text, [review for _, review in rows], labels)
    with tempfile.TemporaryDirectory() as folder:
        allmlp.train(runs("digits_resmlp")["digits_resmlp"], Path(folder) / "run")
        digits: Any = Digits().load().test
        yield images("ResMLP, digits", load(str(Path(folder) / "run")), digits, options.examples)


def is_long(model: EncoderModel, text: str) -> bool:
    """Whether a text fills the model's tokens: fast models read no padding."""
    return bool(allmlp.transform(model, [text])["mask"].all())


def load(name: str) -> EncoderModel:
    model = allmlp.load(name).eval().float()
    assert isinstance(model, EncoderModel)
    return model


def logits(model: torch.nn.Module, original: EncoderModel, inputs: list[Any], dtype: torch.dtype) -> Tensor:
    """Of `model`, with the inputs preprocessed for `original`."""
    found = []
    for start in range(0, len(inputs), BATCH):
        batch = allmlp.transform(original, inputs[start : start + BATCH])
        with torch.no_grad():
            found.append(model(batch["x"]) if isinstance(batch, dict) else model(batch.to(dtype)))
    return torch.cat(found).float()


def compare(test: Test, device: torch.device) -> dict[str, Any]:
    model = test.model.to(device)
    exact = logits(model, model, test.inputs, torch.float32)
    if device.type == "cuda":
        side, dtype = allmlp.fast(model, FP8), torch.bfloat16
    else:
        side, dtype = GpuFp8Encoder(model, torch.float32), torch.float32
    sides = {
        "float32": exact,
        "bfloat16": logits(copy.deepcopy(model).bfloat16(), model, test.inputs, torch.bfloat16),
        "fp8": logits(side, model, test.inputs, dtype),
    }
    row: dict[str, Any] = {"model": test.name, "examples": len(test.inputs)}
    for name, found in sides.items():
        row[name] = {
            "accuracy": (found.argmax(1).cpu() == test.labels).float().mean().item(),
            "agreement": (found.argmax(1) == exact.argmax(1)).float().mean().item(),
            "error": ((found - exact).norm() / exact.norm()).item(),
        }
        print(f"{test.name:16} {name:9}", *(f"{key} {value:.4f}" for key, value in row[name].items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True, help="folder of the images")
    parser.add_argument("--imdb", type=Path, required=True, help="reviews, one a line after its rating and a tab")
    parser.add_argument("--examples", type=int, default=10_000, help="at most so many of each test split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    record = {"environment": environment(device), "rows": [compare(test, device) for test in tests(options)]}
    if options.out:
        write_json_atomically(options.out, record)


if __name__ == "__main__":
    sys.exit(main())
