"""Choice of the engine of `fast`: one table, by device, compute capability and installed packages.

kernels     our kernels in a CUDA graph: Triton, for products over tokens Gluon on Hopper
fused       matrix products in another order, with few passes over memory, on a CPU
compiled    torch.compile
onnx        ONNX Runtime, on a CPU
eager       the model as it is
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from allmlp.device import has_cpp_compiler
from allmlp.kernels import HAS_TRITON, has_old_triton

Engine = Literal["kernels", "fused", "compiled", "onnx", "eager"]


class Capabilities(NamedTuple):
    device: str
    """cpu, cuda (also of AMD), mps or xpu."""
    compute: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA GPU."""
    amd: bool = False
    triton: bool = False
    """Whether Triton is installed, with the C compiler that it needs."""
    old_triton: bool = False
    """Whether Triton is too old for our kernels."""
    compiler: bool = False
    """Whether torch.compile finds a C++ compiler, which it needs on a CPU."""
    onnx: bool = False
    """Whether ONNX Runtime and the packages that write ONNX files are installed."""

    @classmethod
    def of(cls, device: torch.device) -> Capabilities:
        if device.type == "cuda":
            compute = torch.cuda.get_device_capability(device)
            return cls("cuda", compute, torch.version.hip is not None, HAS_TRITON, has_old_triton())
        onnx = all(map(find_spec, ("onnx", "onnxscript", "onnxruntime")))
        return cls(device.type, compiler=has_cpp_compiler(), onnx=onnx)


class Rule(NamedTuple):
    applies: Callable[[Capabilities], bool]
    engines: tuple[Engine, ...]
    """In order of preference; fast(model, measure=True) times them all."""
    reason: str
    """Of the first engine."""


SMALL_ON_A_CPU = Rule(
    lambda c: c.device == "cpu" and c.onnx,
    ("onnx", "fused", "eager", "compiled"),
    "measured fastest on a CPU for one example at a time of a small model",
)
"""A small call spends much of its time between operators; ONNX Runtime spends the least there."""
RULES = (
    Rule(lambda c: c.device == "cpu", ("fused", "eager", "compiled", "onnx"), "the blocks are fused for a CPU"),
    Rule(lambda c: c.device != "cuda", ("eager",), "there are no kernels for this kind of device"),
    Rule(lambda c: not c.triton, ("eager",), "kernels and torch.compile need Triton and a C compiler (gcc)"),
    Rule(lambda c: c.amd, ("compiled", "eager"), "the kernels have instructions of NVIDIA GPUs"),
    Rule(lambda c: c.old_triton, ("compiled", "eager"), "the kernels need Triton 3.6 or newer"),
    Rule(lambda c: c.compute < (8, 0), ("compiled", "eager"), "the kernels need a GPU of compute capability 8.0"),
    Rule(
        lambda c: c.compute == (9, 0),
        ("kernels", "compiled"),
        "measured faster than torch.compile on a GPU of this capability",
    ),
    Rule(
        lambda c: True,
        ("compiled", "kernels"),
        "the kernels have not been measured on this capability: measure=True compares them",
    ),
)
"""The first rule that applies is used."""


class EngineChoice(NamedTuple):
    engine: Engine
    reason: str
    alternatives: tuple[Engine, ...] = ()
    """Other engines that can run the model here."""


def choose(
    capabilities: Capabilities, can_fuse: bool, can_export: bool = False, is_small: bool = False
) -> EngineChoice:
    """Choose the engine.

    `can_fuse`: the model's blocks can be fused; `can_export`: ONNX Runtime can run it; `is_small`: a call takes one
    example and few operations.
    """
    rules = (SMALL_ON_A_CPU, *RULES) if can_export and is_small else RULES
    rule = next(rule for rule in rules if rule.applies(capabilities))
    is_possible = {
        "kernels": can_fuse,
        "fused": can_fuse,
        "compiled": capabilities.device != "cpu" or capabilities.compiler,
        "onnx": can_export and capabilities.onnx,
        "eager": True,
    }
    first, *others = (engine for engine in rule.engines if is_possible[engine])
    reason = rule.reason if first == rule.engines[0] else "blocks of this kind are not fused"
    return EngineChoice(first, reason, tuple(others))
