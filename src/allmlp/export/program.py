"""torch.export: a graph as a .pt2 file that torch runs without this library's code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from allmlp.errors import UserError, one_line
from allmlp.export.graphs import Graph


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporters tell about their own insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trace(graph: Graph) -> ExportedProgram:
    """The graph as torch.export sees it, for batches of any size."""
    sizes = {"batch": Dim("batch", min=1), "past": Dim("past", min=0, max=(graph.longest or 2) - 1)}
    shapes = tuple({axis: sizes[name] for axis, name in axes.items()} for axes in graph.free)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(graph.module, graph.calls[-1], dynamic_shapes={"tensors": shapes})
    except Exception as reason:  # of many kinds, for a network of another package
        raise UserError(f"torch.export cannot follow the model: {one_line(reason)}") from reason
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the files of this machine
    return program


def write_program(graph: Graph, file: Path, settings: Mapping[str, str]) -> None:
    with quiet():
        torch.export.save(trace(graph), file, extra_files=dict(settings))


def run_program(file: Path, calls: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    with quiet():
        module = torch.export.load(file).module()
    with torch.no_grad():
        return [as_tuple(module(*call)) for call in calls]


def as_tuple(found: Tensor | tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)
