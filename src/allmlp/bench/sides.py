"""What competes: a package's model in a mode, PACKAGE MODE.

ours fast      allmlp.fast(model)                          timm graphs    torch.compile(mode="reduce-overhead")
ours fp8       the same with 8-bit channel MLPs            hf compiled    torch.compile
ours onnx      ONNX Runtime, on a CPU
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.bench.agree import Parts
from allmlp.bench.clock import Call
from allmlp.bench.peers import Subject
from allmlp.errors import lookup, require
from allmlp.models.model import Model

Forward = Callable[..., Tensor]
PACKAGES = ("ours", "timm", "hf")
CHUNK = 32
"""Examples at a time in float64."""


class Entry(NamedTuple):
    """A side that is ready."""

    call: Call
    """What is timed."""
    answer: Callable[[], Parts]
    """What is compared with the others before that."""


class Side(NamedTuple):
    name: str
    build: Callable[[], Entry]
    coarse: float = 1.0
    """How much coarser its numbers are than those of the precision that is timed: its error may be as much larger."""


# --- modes of inference ------------------------------------------------------------------------------------


def plain(model: Model, precision: torch.dtype) -> Model:
    """A copy whose weights are rounded once, here."""
    return copy.deepcopy(model).to(precision).eval().requires_grad_(False)


def fast(model: Model, precision: torch.dtype) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), precision)


def fp8(model: Model, precision: torch.dtype) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), torch.float8_e4m3fn)


def onnx(model: Model, precision: torch.dtype) -> Forward:
    """The model as `allmlp export` writes it, in ONNX Runtime with as many threads as torch has."""
    from allmlp.export.graphs import graphs
    from allmlp.export.onnx import write_onnx
    from allmlp.export.rows import Rows

    (graph, *_) = graphs(plain(model, precision), Rows(example(model, 2), "random inputs"))
    runtime = require("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(graph, file, {})
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        given = dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return run


MODES: dict[str, Callable[[Model, torch.dtype], Forward]] = {
    "eager": plain,
    "compiled": lambda model, precision: torch.compile(plain(model, precision), dynamic=False),
    "graphs": lambda model, precision: torch.compile(plain(model, precision), dynamic=False, mode="reduce-overhead"),
    "fast": fast,
    "fp8": fp8,
    "onnx": onnx,
}


def default_sides(
    packages: Iterable[str], device: torch.device, batch: int, train: bool = False, brief: bool = False
) -> list[str]:
    """Every package as it is and compiled. CUDA graphs are what timm is best with at batch 1, and how we train.

    `brief` is the quickest of each alone, for runs over many sizes.
    """
    cuda = device.type == "cuda"
    best = {"ours": "compiled" if train else "fast"}
    more = {
        "ours": (["graphs"] if cuda else []) if train else (["fast"] if cuda else ["fast", "onnx"]),
        "timm": ["graphs"] if cuda and batch == 1 and not train else [],
    }
    found = []
    for package in packages:
        modes = ["eager", "compiled", *more.get(package, [])]
        found += [f"{package} {mode}" for mode in ([best.get(package, "compiled")] if brief else modes)]
    return found


def side_of(name: str) -> tuple[str, str]:
    """Package and mode of "ours-fast" or "ours fast"."""
    package, _, mode = name.replace("-", " ").partition(" ")
    lookup(package, dict.fromkeys(PACKAGES), "package of a side")
    lookup(mode, MODES, "mode of a side")
    return package, mode


def wanted_sides(names: Iterable[str], subject: Subject) -> list[str]:
    """Those of `names` whose package has the model."""
    return [" ".join(side) for side in map(side_of, names) if side[0] in subject.models]


# --- inference ---------------------------------------------------------------------------------------------


def inference(subject: Subject, name: str, inputs: tuple[Tensor, ...], precision: torch.dtype) -> Side:
    package, _, mode = name.partition(" ")

    def build() -> Entry:
        forward = lookup(mode, MODES, "mode of a side")(subject.models[package], precision)
        given = tuple(tensor.to(precision) if tensor.is_floating_point() else tensor for tensor in inputs)

        def call() -> Tensor:
            with torch.inference_mode():
                return forward(*given)

        return Entry(call, lambda: call().clone().unbind())

    eight = torch.finfo(torch.float8_e4m3fn).eps / torch.finfo(precision).eps
    return Side(name, build, coarse=eight if mode == "fp8" else 1.0)


def exact(subject: Subject, package: str, inputs: tuple[Tensor, ...]) -> Parts:
    """The answers in float64, example by example."""
    model = copy.deepcopy(subject.models[package]).double().eval()
    rows: list[Tensor] = []
    with torch.inference_mode():
        for piece in zip(*(tensor.split(CHUNK) for tensor in inputs)):
            given = [tensor.double() if tensor.is_floating_point() else tensor for tensor in piece]
            rows += model(*given).float().unbind()
    return rows


def example(model: Model, batch: int) -> tuple[Tensor, ...]:
    """Inputs that differ from each other: noise alone would average out over the tokens, and all answers be one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = model.example(batch)
        return tuple(squares(tensor) if tensor.is_floating_point() else tensor for tensor in given)


def squares(images: Tensor) -> Tensor:
    """Noise in front of sixteen coloured squares."""
    coarse = torch.randn(*images.shape[:2], 4, 4, device=images.device, dtype=images.dtype)
    return 0.5 * images + interpolate(coarse, images.shape[2:])


def unit(inputs: tuple[Tensor, ...]) -> tuple[str, int]:
    """What speed is counted in, and how many of them an example has."""
    first: Any = inputs[0]
    return ("images", 1) if first.is_floating_point() else ("tokens", first.shape[1])
