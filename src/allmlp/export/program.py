"""torch.export: write a graph as a .pt2 file, which torch runs without this library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from allmlp.errors import UserError, one_line
from allmlp.export.graphs import ExportGraph


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of the exporters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trace(graph: ExportGraph) -> ExportedProgram:
    """Trace the graph with torch.export, with a dynamic batch size."""
    sizes = {"batch": Dim("batch", min=1), "past": Dim("past", min=0, max=(graph.max_past or 2) - 1)}
    shapes = tuple({axis: sizes[name] for axis, name in axes.items()} for axes in graph.dynamic_axes)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(graph.module, graph.calls[-1], dynamic_shapes={"tensors": shapes})
    except Exception as reason:  # networks of other packages raise many types
        raise UserError(f"torch.export cannot trace the model: {one_line(reason)}") from reason
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains local paths
    return program


def write_program(graph: ExportGraph, file: Path, settings: Mapping[str, str]) -> None:
    with quiet():
        torch.export.save(trace(graph), file, extra_files=dict(settings))


def run_program(file: Path, calls: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    with quiet():
        module = torch.export.load(file).module()
    with torch.no_grad():
        return [as_tuple(module(*call)) for call in calls]


def as_tuple(output: Tensor | tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)
