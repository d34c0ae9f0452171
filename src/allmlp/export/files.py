"""A model folder exported to files, each compared with the model before it is left."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp import __version__
from allmlp.data.inputs import FILE, TOKENIZERS
from allmlp.errors import UserError, one_line
from allmlp.export.aot import run_package, write_package
from allmlp.export.graphs import Graph, graphs
from allmlp.export.int8 import quantise
from allmlp.export.onnx import run_onnx, write_onnx
from allmlp.export.program import as_tuple, run_program, write_program
from allmlp.export.rows import rows
from allmlp.files import write_atomically
from allmlp.spec import to_dict
from allmlp.weights.folder import load

TOLERANCE = 1e-4
INT8_TOLERANCE = 0.25
"""Of the norm of the answers: what is worse is broken, not rounded."""


class Exported(NamedTuple):
    file: Path
    difference: float
    """The largest from the model's own answers, in parts of the largest answer (at least 1); of int8 files the norm of
    the differences in parts of the norm of the answers.
    """
    told: str
    """What it was compared on."""


def export(
    folder: Path, file: Path, *, int8: bool = False, aot: bool = False, on: list[Path] | None = None
) -> list[Exported]:
    """Write the model in `folder` to `file`: .onnx, or .pt2 for torch.export, or compiled with `aot`.

    A model that writes step by step becomes two files, NAME.step.onnx beside NAME.onnx, or NAME.encoder.onnx and
    NAME.step.onnx for a translation. Each is read back and compared with the model on real inputs (those in `on`, or
    such as come along); a file that differs by more than 1e-4 is not left.
    """
    suffix = file.suffix
    if suffix not in (".onnx", ".pt2"):
        raise UserError(f"{file.name}: the kind of file is seen from its name, NAME.onnx or NAME.pt2")
    if int8 and suffix != ".onnx":
        raise UserError("int8 is for ONNX Runtime: name a .onnx file")
    if aot and suffix != ".pt2":
        raise UserError("a package compiled ahead of time is a .pt2 file")
    model = load(folder).float()
    settings = read_settings(folder) | {"allmlp": __version__, "config": json.dumps(to_dict(model.spec))}
    given = rows(model, folder, on or [])
    found = []
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as workshop:
            made = []
            for graph in graphs(model, given):
                target = file.with_suffix(f".{graph.name}{suffix}") if graph.name else file
                place = Path(workshop) / target.name
                difference = make(graph, place, settings | {"graph": graph.name or "model"}, int8, aot)
                made.append((place, target))
                found.append(Exported(target, difference, given.told))
            for place, target in made:
                write_atomically(target, lambda temporary, place=place: os.replace(place, temporary))
    except OSError as reason:
        raise UserError(f"cannot write {file}: {one_line(reason)}") from reason
    return found


def make(graph: Graph, file: Path, settings: dict[str, str], int8: bool, aot: bool) -> float:
    """Write one file and return how far its answers are from the graph's own."""
    if file.suffix == ".onnx":
        write_onnx(graph, file, settings)
        answers = run_onnx(file, graph.calls)
    elif aot:
        write_package(graph, file, settings)
        answers = run_package(file, graph.calls)
    else:
        write_program(graph, file, settings)
        answers = run_program(file, graph.calls)
    with torch.no_grad():
        expected = [as_tuple(graph.module(*call)) for call in graph.calls]
    difference = worst([largest(a, b) for a, b in zip(expected, answers, strict=True)])
    refuse(file, difference, TOLERANCE)
    if int8:
        whole = file.with_suffix(".float.onnx")
        file.rename(whole)
        quantise(whole, file)
        answers = run_onnx(file, graph.calls)
        difference = worst([relative(a, b) for a, b in zip(expected, answers, strict=True)])
        refuse(file, difference, INT8_TOLERANCE)
    return difference


def refuse(file: Path, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:
        raise UserError(
            f"{file.name} would differ from the model by {difference:.1e}, more than {tolerance:g}: not written"
        )


def largest(expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> float:
    """Over all outputs, the largest difference in parts of the output's largest number, or of 1."""
    return worst(
        [
            float((a - b).abs().max() / a.abs().max().clamp(min=1)) if a.shape == b.shape else float("inf")
            for a, b in zip(expected, found, strict=True)
        ]
    )


def worst(differences: list[float]) -> float:
    """The largest; one that is not a number is worse than any."""
    return float(torch.tensor(differences).max())


def relative(expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> float:
    """Of the scores: the norm of the difference in parts of their norm."""
    return float((expected[0] - found[0]).norm() / expected[0].norm().clamp(min=1e-12))


def read_settings(folder: Path) -> dict[str, str]:
    """What lies beside the model, by the name of its file without the suffix: inputs, tokenizer."""
    found: dict[str, str] = {}
    for name in (FILE, *TOKENIZERS):
        if (folder / name).is_file():
            found[name.partition(".")[0]] = (folder / name).read_text(encoding="utf8")
    return found
