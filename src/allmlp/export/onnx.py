"""ONNX: write a graph as an .onnx file, which ONNX Runtime runs without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, from_numpy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.onnx import OnnxExporterError, ONNXProgram
from torch.onnx import export as export_onnx

from allmlp.errors import UserError, one_line, require
from allmlp.export.graphs import ExportGraph
from allmlp.export.program import quiet, trace

MAX_WEIGHT_BYTES = 2**31 - 2**24
"""An ONNX file is limited to 2 GiB."""


def write_onnx(graph: ExportGraph, file: Path, settings: Mapping[str, str]) -> None:
    """Write a graph as an ONNX file; `settings`, such as the preprocessing of the inputs, become its metadata."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "export")
    size = sum(weight.nbytes for weight in graph.module.parameters())
    if size > MAX_WEIGHT_BYTES:
        raise UserError(
            f"{size / 2**30:.1f} GiB of weights exceed the 2 GiB of an ONNX file: export a .pt2 file instead"
        )
    # Decompose attention: the outputs of torch's fused kernels have another memory layout.
    try:
        with quiet(), sdpa_kernel(SDPBackend.MATH):
            program = export_onnx(
                trace(graph), input_names=graph.inputs, output_names=graph.outputs, dynamo=True, verbose=False
            )
    except OnnxExporterError as reason:
        raise UserError(f"the model cannot be written as ONNX: {one_line(reason.__cause__ or reason)}") from reason
    assert isinstance(program, ONNXProgram)
    name_axes(program, graph)
    strip(program)
    program.model.metadata_props.update(settings)
    program.save(file)


def name_axes(program: ONNXProgram, graph: ExportGraph) -> None:
    """Name dynamic axes `batch` and `past` instead of s11 and s81."""
    inner = program.model.graph
    names: dict[str, str] = {}
    for value, axes in zip(inner.inputs, graph.dynamic_axes, strict=True):
        names |= {str(value.shape[axis]): name for axis, name in axes.items() if value.shape is not None}
    for value in (*inner.inputs, *inner.outputs):
        for axis, size in enumerate(value.shape or ()):
            if value.shape is not None and not isinstance(size, int):
                value.shape[axis] = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(size))


def strip(program: ONNXProgram) -> None:
    """Remove source locations, which contain local paths."""
    inner = program.model.graph
    for node in inner:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*inner.inputs, *inner.outputs, *inner.initializers.values()):
        value.metadata_props.clear()


def open_session(model: str | bytes, num_threads: int = 0) -> Any:
    """A model, by its file or contents, in ONNX Runtime; 0 threads: as many as it chooses."""
    runtime = require("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = num_threads
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_onnx(file: Path, calls: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Outputs computed by ONNX Runtime."""
    session = open_session(str(file))
    names = [value.name for value in session.get_inputs()]
    results = []
    for call in calls:
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, call, strict=True)})
        results.append(tuple(from_numpy(output) for output in outputs))
    return results
