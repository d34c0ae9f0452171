"""Backends: a package's model in an execution mode, named "PACKAGE MODE".

ours fast      allmlp.fast(model)                          timm graphs    torch.compile(mode="reduce-overhead")
ours fp8       the same with FP8 channel MLPs              hf compiled    torch.compile
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

from allmlp.bench.clock import Call
from allmlp.bench.parity import Parts
from allmlp.bench.peers import PeerGroup
from allmlp.errors import lookup, require
from allmlp.models.model import Model

Forward = Callable[..., Tensor]
PACKAGES = ("ours", "timm", "hf")
CHUNK = 32
"""Chunk size of the float64 reference."""


class PreparedBackend(NamedTuple):
    """A backend that is built."""

    call: Call
    """The timed call."""
    output: Callable[[], Parts]
    """The outputs that are checked before timing."""


class Backend(NamedTuple):
    name: str
    build: Callable[[], PreparedBackend]
    tolerance_scale: float = 1.0
    """Factor on the allowed error, for number formats coarser than the timed precision."""


# --- modes of inference ------------------------------------------------------------------------------------


def plain(model: Model, precision: torch.dtype) -> Model:
    """A copy with weights cast to `precision`."""
    return copy.deepcopy(model).to(precision).eval().requires_grad_(False)


def fast(model: Model, precision: torch.dtype) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), precision)


def fp8(model: Model, precision: torch.dtype) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), torch.float8_e4m3fn)


def onnx(model: Model, precision: torch.dtype) -> Forward:
    """The exported model in ONNX Runtime, with as many threads as torch uses."""
    from allmlp.export.graphs import graphs
    from allmlp.export.onnx import write_onnx
    from allmlp.export.sample_inputs import SampleInputs

    (graph, *_) = graphs(plain(model, precision), SampleInputs(random_inputs(model, 2), "random inputs"))
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


def default_backends(
    packages: Iterable[str], device: torch.device, batch: int, train: bool = False, brief: bool = False
) -> list[str]:
    """Eager and compiled for every package; CUDA graphs for timm at batch 1 and for our training.

    With `brief` only the fastest of each package, for sweeps over many sizes.
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


def parse_backend(name: str) -> tuple[str, str]:
    """Package and mode of "ours-fast" or "ours fast"."""
    package, _, mode = name.replace("-", " ").partition(" ")
    lookup(package, dict.fromkeys(PACKAGES), "package")
    lookup(mode, MODES, "mode")
    return package, mode


def select_backends(names: Iterable[str], peer_group: PeerGroup) -> list[str]:
    """The backends among `names` whose package has the model."""
    return [" ".join(backend) for backend in map(parse_backend, names) if backend[0] in peer_group.models]


# --- inference ---------------------------------------------------------------------------------------------


def inference(peer_group: PeerGroup, name: str, inputs: tuple[Tensor, ...], precision: torch.dtype) -> Backend:
    package, _, mode = name.partition(" ")

    def build() -> PreparedBackend:
        forward = lookup(mode, MODES, "mode")(peer_group.models[package], precision)
        given = tuple(tensor.to(precision) if tensor.is_floating_point() else tensor for tensor in inputs)

        def call() -> Tensor:
            with torch.inference_mode():
                return forward(*given)

        return PreparedBackend(call, lambda: call().clone().unbind())

    fp8_scale = torch.finfo(torch.float8_e4m3fn).eps / torch.finfo(precision).eps
    return Backend(name, build, tolerance_scale=fp8_scale if mode == "fp8" else 1.0)


def exact(peer_group: PeerGroup, package: str, inputs: tuple[Tensor, ...]) -> Parts:
    """Outputs in float64, one part per example."""
    model = copy.deepcopy(peer_group.models[package]).double().eval()
    rows: list[Tensor] = []
    with torch.inference_mode():
        for piece in zip(*(tensor.split(CHUNK) for tensor in inputs)):
            given = [tensor.double() if tensor.is_floating_point() else tensor for tensor in piece]
            rows += model(*given).float().unbind()
    return rows


def random_inputs(model: Model, batch: int) -> tuple[Tensor, ...]:
    """Inputs that differ between examples: pure noise averages out over tokens and gives equal outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = model.dummy_inputs(batch)
        return tuple(squares(tensor) if tensor.is_floating_point() else tensor for tensor in given)


def squares(images: Tensor) -> Tensor:
    """Noise over a 4x4 grid of random colors."""
    tolerance_scale = torch.randn(*images.shape[:2], 4, 4, device=images.device, dtype=images.dtype)
    return 0.5 * images + interpolate(tolerance_scale, images.shape[2:])


def unit(inputs: tuple[Tensor, ...]) -> tuple[str, int]:
    """The unit of throughput, and how many of them one example has."""
    first: Any = inputs[0]
    return ("images", 1) if first.is_floating_point() else ("tokens", first.shape[1])
