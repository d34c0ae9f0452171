"""Export a model folder to files, each compared with the model."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp import __version__
from allmlp.data.preprocessing import PREPROCESSING_FILE, TOKENIZER_FILES
from allmlp.device import own_device
from allmlp.errors import UserError, writing
from allmlp.export.aot import run_package, write_package
from allmlp.export.graphs import ExportGraph, graphs
from allmlp.export.int8 import quantize
from allmlp.export.onnx import run_onnx, write_onnx
from allmlp.export.program import as_tuple, run_program, write_program
from allmlp.export.sample_inputs import sample_inputs
from allmlp.files import write_atomically
from allmlp.spec import to_dict
from allmlp.weights.bundled import model_path
from allmlp.weights.folder import load

TOLERANCE = 1e-4
INT8_TOLERANCE = 0.25
"""Relative to the norm of the outputs: rounding stays far below."""


class ExportedFile(NamedTuple):
    file: Path
    difference: float
    """Largest absolute difference from the model's outputs, relative to the largest output (at least 1); for int8 files
    the norm of the differences relative to the norm of the outputs.
    """
    compared_on: str
    """The inputs of the comparison, in words."""


def export(
    folder: Path,
    file: Path,
    *,
    int8: bool = False,
    aot: bool = False,
    on: list[Path] | None = None,
    device: str = "cpu",
) -> list[ExportedFile]:
    """Write the model in `folder` to `file`: .onnx, or .pt2 for torch.export on a `device`, or compiled for it (`aot`).

    A causal model becomes two files, NAME.onnx and NAME.step.onnx; a translation model NAME.encoder.onnx and
    NAME.step.onnx. Each is read back and compared with the model on real inputs (`on`, or bundled ones); a file that
    differs by more than 1e-4 is not written.
    """
    suffix, place = file.suffix, own_device(device)
    check_options(file, place, int8, aot)
    folder = model_path(folder)
    model = load(folder)
    settings = read_settings(folder) | {"allmlp": __version__, "config": json.dumps(to_dict(model.spec))}
    samples = sample_inputs(model, folder, on or []).to(place)
    model = model.to(place)
    exported = []
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as staging:
            made = []
            for graph in graphs(model, samples):
                target = file.with_suffix(f".{graph.name}{suffix}") if graph.name else file
                staged = Path(staging) / target.name
                difference = write_and_compare(graph, staged, settings | {"graph": graph.name or "model"}, int8, aot)
                made.append((staged, target))
                exported.append(ExportedFile(target, difference, samples.description))
            for staged, target in made:
                write_atomically(target, lambda temporary, staged=staged: os.replace(staged, temporary))
    return exported


def check_options(file: Path, place: torch.device, int8: bool, aot: bool) -> None:
    """Raise UserError for options that a file of this suffix does not have."""
    if file.suffix not in (".onnx", ".pt2"):
        raise UserError(f"{file.name}: the suffix must be .onnx or .pt2")
    if int8 and file.suffix != ".onnx":
        raise UserError("int8 requires a .onnx file")
    if aot and file.suffix != ".pt2":
        raise UserError("ahead-of-time compilation requires a .pt2 file")
    if place.type != "cpu" and file.suffix == ".onnx":
        raise UserError("a .onnx file is not bound to a device: leave out --device, and choose where it is run")
    if place.type not in ("cpu", "cuda") and aot:
        raise UserError(f"torch compiles ahead of time for CPUs and CUDA GPUs, not for {place.type}: leave out --aot")


def write_and_compare(graph: ExportGraph, file: Path, settings: dict[str, str], int8: bool, aot: bool) -> float:
    """Write one file; returns the difference of its outputs from those of the graph."""
    if file.suffix == ".onnx":
        write_onnx(graph, file, settings)
        outputs = run_onnx(file, graph.calls)
    elif aot:
        write_package(graph, file, settings)
        outputs = run_package(file, graph.calls)
    else:
        write_program(graph, file, settings)
        outputs = run_program(file, graph.calls)
    with torch.no_grad():
        expected = [as_tuple(graph.module(*call)) for call in graph.calls]
    difference = worst([max_error(a, b) for a, b in zip(expected, outputs, strict=True)])
    check_difference(file, difference, TOLERANCE)
    if int8:
        float_file = file.with_suffix(".float.onnx")
        file.rename(float_file)
        quantize(float_file, file)
        outputs = run_onnx(file, graph.calls)
        difference = worst([relative_error(a, b) for a, b in zip(expected, outputs, strict=True)])
        check_difference(file, difference, INT8_TOLERANCE)
    return difference


def check_difference(file: Path, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:
        raise UserError(
            f"{file.name} would differ from the model by {difference:.1e}, more than {tolerance:g}: not written"
        )


def max_error(expected: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
    """The largest difference over all outputs, relative to the output's largest value (at least 1)."""
    return worst(
        [
            float((a - b).abs().max() / a.abs().max().clamp(min=1)) if a.shape == b.shape else float("inf")
            for a, b in zip(expected, outputs, strict=True)
        ]
    )


def worst(differences: list[float]) -> float:
    """The largest value; NaN counts as the largest."""
    return float(torch.tensor(differences).max())


def relative_error(expected: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
    """The norm of the difference of the logits, relative to their norm."""
    return float((expected[0] - outputs[0]).norm() / expected[0].norm().clamp(min=1e-12))


def read_settings(folder: Path) -> dict[str, str]:
    """Files next to the model by stem: preprocessing, tokenizer."""
    settings: dict[str, str] = {}
    for name in (PREPROCESSING_FILE, *TOKENIZER_FILES):
        if (folder / name).is_file():
            settings[name.partition(".")[0]] = (folder / name).read_text(encoding="utf8")
    return settings
