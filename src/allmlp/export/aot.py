"""AOTInductor: compile a graph ahead of time for this CPU or GPU, as a .pt2 package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from allmlp.device import has_cpp_compiler
from allmlp.errors import UserError, one_line
from allmlp.export.graphs import ExportGraph
from allmlp.export.program import as_tuple, quiet, trace


def write_package(graph: ExportGraph, file: Path, settings: Mapping[str, str]) -> None:
    if not has_cpp_compiler():
        raise UserError("compiling ahead of time needs a C++ compiler (g++); without --aot a .pt2 file needs none")
    from torch._inductor import aoti_compile_and_package

    configs = {"aot_inductor.metadata": dict(settings)}
    try:
        with quiet(), torch.no_grad():
            aoti_compile_and_package(trace(graph), package_path=str(file), inductor_configs=configs)
    except Exception as reason:  # of the C++ compiler or of Inductor
        raise UserError(f"the model could not be compiled ahead of time: {one_line(reason)}") from reason


def run_package(file: Path, calls: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    from torch._inductor import aoti_load_package

    with quiet(), torch.no_grad():
        module = aoti_load_package(str(file))
        return [as_tuple(module(*call)) for call in calls]
