"""Small models on one CPU core: ours against convnets and a ViT in ONNX Runtime, and the bundled model in 8 bits.

python benchmarks/edge.py --out docs/logs/edge.json                                 minutes, most of them for exports
ALLMLP_DATA=FOLDER python benchmarks/edge.py --images 2000 --out docs/logs/edge.json          with CIFAR-10
python benchmarks/edge.py --rows small --seconds 0.2                                a trial

Models of a row have about the same multiply-adds, which are counted alike for all, and random weights: speed only. Each
runs in PyTorch eager, in ONNX Runtime in float32 and int8, and ours as `allmlp.fast` fuses it. Int8 is dynamic
quantization of matrix products, and of convolutions static quantization with ranges of random images. Times are those
of one thread, in interleaved rounds of which all sides have a turn; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import allmlp
from allmlp.bench.clock import ThreadClock
from allmlp.bench.peers import timm_peer
from allmlp.bench.timing import Failure, Timing, time_interleaved
from allmlp.data.cifar import Cifar10
from allmlp.errors import UserError, require
from allmlp.export.graphs import graphs
from allmlp.export.int8 import quantize
from allmlp.export.onnx import write_onnx
from allmlp.export.sample_inputs import SampleInputs
from allmlp.files import write_json_atomically
from allmlp.models.model import Model
from allmlp.models.torchvision import define_missing_operators
from allmlp.provenance import environment
from allmlp.tasks.task import Normalize
from allmlp.weights.bundled import BUNDLED
from allmlp.weights.pretrained import pretrained

COARSE = {"stem.patch_size": "32", "width": "128", "depth": "6", "block.channel.hidden": "512"}
NARROW = {"width": "184", "depth": "6", "block.channel.hidden": "736"}
ROWS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "small": [("resmlp_s12", COARSE), ("timm:mobilenetv3_small_100", {})],
    "middle": [("resmlp_s12", NARROW), ("timm:efficientnet_lite0", {})],
    "large": [("gmlp_ti16", {}), ("timm:vit_tiny_patch16_224", {})],
}
Forward = Callable[[Tensor], Tensor]


def onnx(model: Model, kinds: tuple[str, ...]) -> dict[str, Forward]:
    """Sessions of one thread: "onnx" in float32, "int8" dynamic, "static int8" for convolutions too."""
    (graph, *_) = graphs(model, SampleInputs(model.dummy_inputs(2), "random images"))
    runtime = require("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    found: dict[str, Forward] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        write_onnx(graph, file, {})
        for kind in kinds:
            if kind == "int8":
                quantize(file, target)
            elif kind == "static int8":
                quantize_static(file, target, model)
            opened = str(file if kind == "onnx" else target)
            session = runtime.InferenceSession(opened, options, providers=["CPUExecutionProvider"])
            found[kind] = lambda x, session=session: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
    return found


def quantize_static(file: Path, target: Path, model: Model) -> None:
    tools = require("onnxruntime.quantization", "export")

    class Images(tools.CalibrationDataReader):
        left: ClassVar = [{"images": model.dummy_inputs(4)[0].numpy()} for _ in range(2)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    logging.disable(logging.WARNING)
    tools.quantize_static(str(file), str(target), Images(), per_channel=True)
    logging.disable(logging.NOTSET)


def sides(name: str, model: Model) -> dict[str, Forward]:
    is_convolutional = name.startswith("timm:") and "vit" not in name
    found = {"eager": model} | onnx(model, ("onnx", "static int8" if is_convolutional else "int8"))
    # For single examples it would choose ONNX Runtime, which is here already.
    return found if name.startswith("timm:") else found | {"fused": allmlp.fast(model, batch_size=2)}


def macs(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(x)
    return counter.get_total_flops() // 2 // len(x)


def timed(calls: dict[str, Forward], x: Tensor, seconds: float) -> dict[str, Timing]:
    def call(forward: Forward) -> Tensor:
        with torch.inference_mode():
            return forward(x)

    found = time_interleaved({name: lambda one=one: call(one) for name, one in calls.items()}, ThreadClock(), seconds)
    if failed := [f"{name} failed: {one.note}" for name, one in found.items() if isinstance(one, Failure)]:
        raise UserError(failed[0])
    return found  # type: ignore[return-value]


def measure(row: str, batch: int, seconds: float) -> list[dict[str, Any]]:
    models = {name: allmlp.create(name, overrides=changes, seed=0).eval() for name, changes in ROWS[row]}
    calls = {(name, side): forward for name, model in models.items() for side, forward in sides(name, model).items()}
    (x,) = next(iter(models.values())).dummy_inputs(batch)
    times = timed({f"{name} {side}": forward for (name, side), forward in calls.items()}, x, seconds)
    rows = []
    for name, side in calls:
        found, one = times[f"{name} {side}"], models[name]
        about = {"row": row, "model": name, "overrides": dict(ROWS[row])[name], "side": side}
        about |= {"macs": macs(one, x), "parameters": one.describe().parameters}
        rows.append(about | {"calls_s": list(found.calls)})
        print(f"{row:8}{name:30}{side:12}{1e3 * found.call.median:8.2f} ms", flush=True)
    return rows


def bundled(images: int, seconds: float) -> dict[str, Any]:
    """The bundled gMLP: accuracy of int8 and float32 on the first test images, and speed against timm in eager mode."""
    model, preprocessing = pretrained(BUNDLED)
    pixels, labels = (part[:images] for part in Cifar10().load().test.examples)
    inputs = Normalize(preprocessing.mean, preprocessing.std)(pixels)
    fused, small = allmlp.fast(model, batch_size=8), allmlp.fast(model, torch.int8)
    calls = {"timm eager": timm_peer(model).eval(), "fused": fused, "int8": small}
    found = {name: list(timing.calls) for name, timing in timed(calls, inputs[:8], seconds).items()}
    guesses = {name: torch.cat([calls[name](one).argmax(1) for one in inputs.split(50)]) for name in ("fused", "int8")}
    right = {name: int((guess == labels).sum()) for name, guess in guesses.items()}
    print(f"of {images} images correct: {right}")
    return {"images": images, "right": right, "batch": 8, "calls_s": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per side")
    parser.add_argument("--images", type=int, default=0, help="test images to evaluate the bundled model on")
    parser.add_argument("--out", type=Path, help="file for the record (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    define_missing_operators()
    names = options.rows.split(",") if options.rows else []
    rows = [side for name in names for side in measure(name, options.batch_size, options.seconds)]
    record = {"environment": environment(torch.device("cpu")), "batch": options.batch_size, "rows": rows}
    if options.images:
        record["bundled"] = bundled(options.images, options.seconds)
    if options.out:
        write_json_atomically(options.out, record)


if __name__ == "__main__":
    main()
