"""Backends: a package's model in an execution mode, named "PACKAGE MODE", such as "timm channels-last".

eager              the model as it is                         fast    allmlp.fast(model)
compiled           torch.compile                              fp8     the same with FP8 channel MLPs
channels-last      the same in torch.channels_last            onnx    ONNX Runtime, on a CPU
reduce-overhead    torch.compile(mode="reduce-overhead")
cuda-graph         compiled, then captured as one CUDA graph
max-autotune       torch.compile(mode="max-autotune")

The last three also run other packages' models in channels_last, in which their convolutions are faster.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.bench.clock import Call
from allmlp.bench.parity import Outputs
from allmlp.bench.peers import PeerGroup
from allmlp.errors import lookup
from allmlp.models.model import Model
from allmlp.train_step import RecordedStep

Forward = Callable[..., Tensor]
PACKAGES = ("ours", "timm", "hf")
CHUNK = 32
"""Chunk size of the float64 reference."""


class PreparedBackend(NamedTuple):
    """A backend ready to run."""

    call: Call
    """The timed call."""
    output: Callable[[], Outputs]
    """The outputs that are checked before timing."""


class Backend(NamedTuple):
    name: str
    build: Callable[[], PreparedBackend]
    tolerance_scale: float = 1.0
    """Factor on the allowed error, for number formats coarser than the timed precision."""


# --- modes of inference ------------------------------------------------------------------------------------


def plain(model: Model, precision: torch.dtype) -> Model:
    """A copy with weights cast to `precision`.

    Weights keep requires_grad: without it torch.matmul multiplies transposed activations by one copy of the matrix per
    example (torch.bmm) in place of one product (torch.mm), which costs timm's ResMLP 4 % and its gMLP 10 % on an H200.
    """
    return copy.deepcopy(model).to(precision).eval()


def fast(model: Model, precision: torch.dtype, batch_size: int | None = None) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), precision, batch_size=batch_size)


def fp8(model: Model, precision: torch.dtype) -> Forward:
    from allmlp.inference import fast

    return fast(model.eval(), torch.float8_e4m3fn)


def onnx(model: Model, precision: torch.dtype) -> Forward:
    """The exported model in ONNX Runtime, with as many threads as torch uses."""
    from allmlp.export.graphs import graphs
    from allmlp.export.onnx import open_session, write_onnx
    from allmlp.export.sample_inputs import SampleInputs

    samples = random_inputs(model, 2)
    if not samples[0].is_floating_point():
        samples = (*samples, torch.ones_like(samples[0], dtype=torch.bool))
    (graph, *_) = graphs(plain(model, precision).requires_grad_(False), SampleInputs(samples, "random inputs"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(graph, file, {})
        session = open_session(str(file), torch.get_num_threads())
    names = [value.name for value in session.get_inputs()]

    def run(x: Tensor) -> Tensor:
        # The graph of a text or a series also takes inputs that are optional in torch: the mask and segments.
        inputs = x, torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.int64)
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=False)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def compiled(model: Model, precision: torch.dtype, mode: str | None = None) -> Forward:
    return torch.compile(plain(model, precision), dynamic=False, mode=mode)


MODES: dict[str, Callable[..., Forward]] = {
    "eager": plain,
    "compiled": compiled,
    "channels-last": compiled,
    "reduce-overhead": partial(compiled, mode="reduce-overhead"),
    "cuda-graph": lambda model, precision: RecordedStep(compiled(model, precision)),
    "max-autotune": partial(compiled, mode="max-autotune"),
    "fast": fast,
    "fp8": fp8,
    "onnx": onnx,
}


def memory_format(package: str, mode: str) -> torch.memory_format:
    """Memory format of a backend; our models read either layout, so their input is unchanged."""
    last = package != "ours" and mode in ("channels-last", "reduce-overhead", "cuda-graph", "max-autotune")
    return torch.channels_last if last else torch.preserve_format


def default_backends(
    packages: Iterable[str], device: torch.device, batch: int, train: bool = False, brief: bool = False
) -> list[str]:
    """Eager and compiled for every package, and faster modes on a GPU. Not max-autotune, which compiles for minutes.

    With `brief` only the fastest of each package, for sweeps over many sizes.
    """
    if device.type != "cuda":
        ours, others = ["eager", "compiled", *([] if train else ["fast", "onnx"])], ["eager", "compiled"]
    elif train:
        ours, others = ["eager", "compiled", "cuda-graph"], ["eager", "compiled", "cuda-graph"]
    else:
        ours, others = ["eager", "compiled", "fast"], ["eager", "compiled", "channels-last", "cuda-graph"]
        others += ["reduce-overhead"] if batch == 1 else []
    if brief:
        ours = ["cuda-graph" if device.type == "cuda" else "compiled"] if train else ["fast"]
        others = others[2:3] or ["compiled"]
    return [f"{package} {mode}" for package in packages for mode in (ours if package == "ours" else others)]


def parse_backend(name: str) -> tuple[str, str]:
    """Package and mode of "timm-channels-last" or "timm channels-last"."""
    package, _, mode = name.replace(" ", "-").partition("-")
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
        layout = memory_format(package, mode)
        model = copy.deepcopy(peer_group.models[package]).to(memory_format=layout)  # type: ignore[call-overload]
        options = {"batch_size": len(inputs[0])} if mode == "fast" else {}
        forward = lookup(mode, MODES, "mode")(model, precision, **options)
        with torch.inference_mode():
            # Copies made later, such as the input of a CUDA graph, must be of the same kind: torch.compile compiles
            # again for tensors of inference mode, which a capture does not survive.
            given = tuple(
                x.to(precision, memory_format=layout, copy=True) if x.is_floating_point() else x.clone() for x in inputs
            )

        def call() -> Tensor:
            with torch.inference_mode():
                return forward(*given)

        return PreparedBackend(call, lambda: call().clone().unbind())

    fp8_scale = torch.finfo(torch.float8_e4m3fn).eps / torch.finfo(precision).eps
    return Backend(name, build, tolerance_scale=fp8_scale if mode == "fp8" else 1.0)


def exact(peer_group: PeerGroup, package: str, inputs: tuple[Tensor, ...]) -> Outputs:
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
        return tuple(squares(tensor) if tensor.dim() == 4 else tensor for tensor in given)


def squares(images: Tensor) -> Tensor:
    """Noise over a 4x4 grid of random colors."""
    colors = torch.randn(*images.shape[:2], 4, 4, device=images.device, dtype=images.dtype)
    return 0.5 * images + interpolate(colors, images.shape[2:])


def unit(inputs: tuple[Tensor, ...]) -> tuple[str, int]:
    """Unit of throughput, and the number of units per example."""
    first: Any = inputs[0]
    if first.is_floating_point():
        return ("images" if first.dim() == 4 else "windows"), 1
    return "tokens", first.shape[1]
