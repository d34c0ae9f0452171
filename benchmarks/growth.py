"""How time, memory and operations of one layer grow with the length of the sequence, by the way it mixes tokens.

python benchmarks/growth.py --out docs/logs/growth.json --figure docs/images/growth.png         on a CPU
python benchmarks/growth.py --device cuda --channels 256 --lengths 1024,2048,4096,8192,16384 --out growth_gpu.json
python benchmarks/growth.py --lengths 16,32,64 --channels 8 --seconds 0.01                      a trial

Each layer maps S tokens of C channels to as many, without its norm and residual connection. Times are medians of
interleaved rounds of the forward pass, on a CPU those of its one thread. Memory is the largest number of bytes in
tensors that the forward pass makes, on a GPU that of the allocator, workspaces included. Operations are multiply-adds
of matrix products and convolutions. An exponent e, cost ~ S^e, is the slope of the least-squares line through the
logarithms from `fitted_from` on: below, the terms that grow slower still matter.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from allmlp.analysis.figures import COLORS, save, styled
from allmlp.bench.clock import CudaClock, ThreadClock
from allmlp.bench.machine import PeakMemory
from allmlp.bench.scaling import exponent
from allmlp.bench.timing import Timing, time_interleaved
from allmlp.errors import UserError, require
from allmlp.files import write_atomically, write_json_atomically
from allmlp.layers import Attention, Context, Dense, Init, SpatialGatingUnit, Toeplitz, TokenConv, TokenLstm, TokenMlp
from allmlp.layers.context import BuildContext
from allmlp.provenance import environment

COSTS = ("macs", "seconds", "memory_bytes", "parameters")
HEADS, HIDDEN, ROWS = 4, 256, 8
"""Heads of attention, hidden units of the token MLP, rows of the image that a convolution reads the tokens as."""


class Layer(NamedTuple):
    """A way to mix tokens; `published` is its cost for n tokens of d channels, a kernel of k, d_s hidden units."""

    spec: Any
    published: str
    explicit: bool = False
    """Compute attention weights as a matrix, not block by block."""


LAYERS = {
    "self-attention": Layer(Attention(HEADS), "n^2 d"),
    "self-attention, weights stored": Layer(Attention(HEADS), "n^2 d", explicit=True),
    "recurrence (LSTM)": Layer(TokenLstm(), "n d^2"),
    "convolution 3x3": Layer(TokenConv("full"), "k n d^2"),
    "spatial gate": Layer(SpatialGatingUnit("split", Dense()), "n^2 d"),
    "spatial gate, Toeplitz": Layer(SpatialGatingUnit("split", Toeplitz()), "n^2 d"),
    "token MLP": Layer(TokenMlp(HIDDEN), "n d_s d"),
}


class TensorMemory(TorchDispatchMode):
    """The bytes of all tensors that operations make, and of those alive at the same time at most."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return made

    def free(self, size: int) -> None:
        self.alive -= size


def build(layer: Layer, length: int, channels: int) -> tuple[nn.Module, tuple[int, ...]]:
    """The module, and the widths of its inputs."""
    ctx = BuildContext(length, channels, Init(), (ROWS, length // ROWS))
    if isinstance(layer.spec, SpatialGatingUnit):  # reads twice as many hidden channels, and the block's input
        return layer.spec.build(ctx, 2 * channels), (2 * channels, channels)
    return layer.spec.build(ctx), (channels,)


def forward(layer: Layer, module: nn.Module, inputs: list[Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH) if layer.explicit else nullcontext():
            return module(*inputs, Context())

    return call


def macs(layer: Layer, length: int, channels: int) -> int:
    with torch.device("meta"):
        module, widths = build(layer, length, channels)
        inputs = [torch.empty(1, length, width) for width in widths]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(*inputs, Context())
    return counter.get_total_flops() // 2


def measure(
    lengths: list[int], channels: int, batch: int, device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    rows, clock = [], CudaClock() if device.type == "cuda" else ThreadClock()
    for length in lengths:
        calls, memory, counts = {}, {}, {}
        for name, layer in LAYERS.items():
            torch.manual_seed(0)
            module, widths = build(layer, length, channels)
            module = module.to(device).eval().requires_grad_(False)
            inputs = [torch.randn(batch, length, width, device=device) for width in widths]
            calls[name] = forward(layer, module, inputs)
            memory[name] = peak_memory(calls[name], [*inputs, *module.parameters()], device)
            counts[name] = sum(parameter.numel() for parameter in module.parameters())
        for name, timing in time_interleaved(calls, clock, seconds).items():
            if not isinstance(timing, Timing):
                raise UserError(f"{name} with {length} tokens failed: {timing.note}")
            found = {"layer": name, "length": length, "macs": batch * macs(LAYERS[name], length, channels)}
            rows.append(found | timed(timing) | {"memory_bytes": memory[name], "parameters": counts[name]})
    return rows


def timed(timing: Timing) -> dict[str, float]:
    found = timing.call
    return {"seconds": found.median, "seconds_low": found.low, "seconds_high": found.high}


def peak_memory(call: Callable[[], Tensor], existing: list[Tensor], device: torch.device) -> int:
    if device.type == "cuda":
        return PeakMemory(device).peak(call) or 0
    with TensorMemory(existing) as counter:
        call()
    return counter.peak


def fit(rows: list[dict[str, Any]], start: int) -> dict[str, dict[str, float]]:
    """The exponents of every layer: 0 where the cost does not grow."""
    found: dict[str, dict[str, float]] = {}
    for name in LAYERS:
        own = [row for row in rows if row["layer"] == name and row["length"] >= start]
        lengths = [row["length"] for row in own]
        found[name] = {
            cost: round(exponent(lengths, [max(row[cost], 1) if cost != "seconds" else row[cost] for row in own]), 3)
            for cost in COSTS
        }
    return found


@styled
def figure(record: dict[str, Any]) -> Any:
    drawn = require("matplotlib.figure", "analysis").Figure(figsize=(9.6, 3.7), layout="constrained")
    drawn.suptitle(f"Growth with length: one layer, {record['channels']} channels, {record['device']}", size=10)
    titles = {"macs": "multiply-adds", "seconds": "time of the forward pass (s)", "memory_bytes": "memory (bytes)"}
    for axes, (cost, title) in zip(drawn.subplots(1, 3), titles.items()):
        for number, name in enumerate(LAYERS):
            own = [row for row in record["rows"] if row["layer"] == name]
            slope = record["exponents"][name][cost]
            line = "--" if LAYERS[name].explicit else "-"
            label = f"{name}: {slope:.2f}" if cost == "seconds" else None
            xs, ys = [row["length"] for row in own], [row[cost] for row in own]
            axes.loglog(xs, ys, line, marker="osD^vP*"[number], ms=3, lw=1, color=COLORS[number], label=label)
        axes.set_title(title)
        axes.set_xlabel("tokens")
        axes.set_xticks(record["lengths"], [str(length) for length in record["lengths"]])
        axes.minorticks_off()
    drawn.legend(loc="outside lower center", ncols=4, title="layer and exponent of its time")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096", help=f"multiples of {ROWS}")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per layer and length")
    parser.add_argument("--out", type=Path, help="file for the record (JSON)")
    parser.add_argument("--figure", type=Path, help="file for the figure (PNG)")
    parser.add_argument("--record", type=Path, help="draw an earlier record instead of measuring")
    options = parser.parse_args()
    record = json.loads(options.record.read_text(encoding="utf8")) if options.record else measured(options)
    for name, found in record["exponents"].items():
        print(f"{name:32}" + "".join(f"{cost} {value:5.2f}   " for cost, value in found.items()))
    if options.out:
        write_json_atomically(options.out, record)
    if options.figure:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.figure, lambda file: save(figure(record), file, "png"))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    device, lengths = torch.device(options.device), [int(length) for length in options.lengths.split(",")]
    rows = measure(lengths, options.channels, options.batch_size, device, options.seconds)
    start = lengths[-min(3, len(lengths))]
    where = environment(device)
    return {
        "what": "growth of one layer with the number of tokens: cost ~ length^exponent from `fitted_from` on",
        "device": where["device"],
        "channels": options.channels,
        "batch": options.batch_size,
        "lengths": lengths,
        "fitted_from": start,
        "published": {name: layer.published for name, layer in LAYERS.items()},
        "exponents": fit(rows, start),
        "rows": rows,
        "environment": where,
    }


if __name__ == "__main__":
    main()
