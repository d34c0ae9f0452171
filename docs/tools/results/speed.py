"""Tables about speed, from the records of `allmlp bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from allmlp.bench.timing import speedup
from results.markdown import NOTHING, percent, table
from results.records import BENCHMARKS, LOGS, Record, document

PEERS = ("timm", "hf")
EIGHT_BITS = "ours fp8"
INFERENCE = ("bench_inference", "bench_inference_sizes", "bench_inference_graphs", "bench_inference_8bit")
"""Records of inference at batch 256."""
AGAINST_VIT = ("bench_against_vit_b16", "bench_against_vit_s16")
"""Records of inference at batch 256 with --against a ViT."""
PRETRAINING = {128: "bench_pretraining", 512: "bench_pretraining_512"}
"""Records of masked language modeling, by length."""


class Cell(NamedTuple):
    """One model at one batch size: our fastest side in 16 or 32 bits, and the fastest of another package."""

    model: str
    batch: int
    ours: Record
    peer: Record | None
    sides: dict[str, Record]


def cells(file: Path, rivals: bool = False) -> Iterator[Cell]:
    """The models of a record; with `rivals`, those of --against too."""
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for row in json.loads(file.read_text(encoding="utf8"))["rows"] if file.exists() else []:
        if row["rate_per_s"] and (rivals or row.get("cell", row["model"]) == row["model"]):
            found.setdefault((row["model"], row["batch"]), {})[row["backend"]] = row

    def fastest(sides: dict[str, Record], *packages: str) -> Record | None:
        own = [row for name, row in sides.items() if name.split()[0] in packages and name != EIGHT_BITS]
        return max(own, key=lambda row: row["rate_per_s"], default=None)

    for (model, batch), sides in found.items():
        ours, peer = fastest(sides, "ours"), fastest(sides, *PEERS)
        if ours is not None:
            yield Cell(model, batch, ours, peer, sides)
        elif peer is not None:
            yield Cell(model, batch, peer, None, sides)


def ratio(ours: Record, peer: Record | None, times: str = "calls_s") -> str:
    """How many times as fast: median and quartiles over rounds of what both did in the same round."""
    if peer is None:
        return NOTHING
    found = speedup(ours[times], peer[times])
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def rate(row: Record | None) -> str:
    return NOTHING if row is None else f"{row['rate_per_s']:,.0f}, {row['backend']}"


def gib(row: Record | None) -> str:
    return NOTHING if row is None or not row["memory_bytes"] else f"{row['memory_bytes'] / 2**30:.1f}"


def commands(*names: str) -> str:
    """The commands that have written these records, as a block of code."""
    lines = []
    for name in names:
        command = document(name)["environment"]["command"]
        lines.append("    " + " ".join(command[: command.index("--out")]))
    return "\n".join(lines) + "\n\n"


def inference() -> str:
    rows: list[tuple[str, ...]] = []
    for name in INFERENCE:
        for cell in cells(LOGS / f"{name}.json"):
            eight = cell.sides.get(EIGHT_BITS)
            times, share = ratio(cell.ours, cell.peer), percent(cell.ours["mfu"], 0)
            more = ratio(eight, cell.ours) if eight else ""
            rows.append((cell.model, rate(cell.peer), rate(cell.ours), times, share, more))
    header = ("model, images/s", "timm", "ours", "times", "of peak", "8 bits, times")
    return commands(*INFERENCE) + table(header, rows)


def fp8() -> str:
    rows = []
    for row in document("fp8")["rows"]:
        exact, half, eight = (row[side] for side in ("float32", "bfloat16", "fp8"))
        accuracies = (percent(side["accuracy"]) for side in (exact, half, eight))
        errors = (f"{side['error']:.3f}" for side in (half, eight))
        rows.append((row["model"], f"{row['examples']:,}", *accuracies, percent(eight["agreement"]), *errors))
    header = ("model, data", "examples", "float32", "bfloat16", "FP8", "same class as in float32")
    return table((*header, "error of bfloat16", "of FP8"), rows)


def training() -> str:
    rows = [
        (
            f"{cell.model} ({parameters(cell)})",
            rate(cell.peer),
            rate(cell.ours),
            ratio(cell.ours, cell.peer),
            percent(cell.ours["mfu"], 0),
            f"{gib(cell.ours)}, {gib(cell.peer)}",
        )
        for cell in cells(LOGS / "bench_training.json")
    ]
    header = ("model, images/s", "timm", "ours", "times", "of peak", "GiB, ours and timm")
    return commands("bench_training") + table(header, rows)


def pretraining() -> str:
    rows = []
    for length, name in PRETRAINING.items():
        found = list(cells(LOGS / f"{name}.json", rivals=True))
        bert = next((cell.ours for cell in found if cell.model == "hf:bert_base"), None)
        for cell in found:
            times = NOTHING if cell.ours is bert else ratio(cell.ours, bert)
            share, memory = percent(cell.ours["mfu"], 0), gib(cell.ours)
            rows.append((f"{cell.model} ({parameters(cell)})", str(length), rate(cell.ours), times, share, memory))
    header = ("model", "length", "tokens/s", "times transformers' BERT", "of peak", "GiB")
    return commands(*PRETRAINING.values()) + table(header, rows)


def parameters(cell: Cell) -> str:
    return f"{cell.ours['parameters'] / 1e6:.1f} M"


def latency() -> str:
    """Launch to result on an idle device, the GPU alone, and calls in a row: each against the best of timm in it."""
    rows = []
    for cell in cells(LOGS / "latency_batch1.json"):
        theirs = [row for name, row in cell.sides.items() if name.split()[0] in PEERS]
        waits, alone, calls = (
            min(theirs, key=lambda row, times=times: median(row[times]), default=None)
            for times in ("latencies_s", "device_times_s", "calls_s")
        )
        ms = [NOTHING if side is None else f"{1e3 * median(side['latencies_s']):.2f}" for side in (waits, cell.ours)]
        times = ratio(cell.ours, waits, "latencies_s"), ratio(cell.ours, alone, "device_times_s")
        rows.append((cell.model, *ms, *times, rate(calls), rate(cell.ours)))
    header = ("batch 1", "timm, ms", "ours, ms", "times", "times, GPU alone")
    header = (*header, "timm, images/s in a row", "ours, images/s in a row")
    return commands("latency_batch1") + table(header, rows)


def against_vit() -> str:
    """Our models against a ViT of the same width in the same rounds, timm's and our own."""
    rows = [
        (cell.model, one["peer"], f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})")
        for name in AGAINST_VIT
        for cell in cells(LOGS / f"{name}.json")
        for one in cell.ours.get("ratios", [])
        if one["peer"].startswith("vit") and one["by"] == "rate"
    ]
    return commands(*AGAINST_VIT) + table(("model", "against", "times"), rows)


def cpu(name: str = "cpu") -> str:
    rows = []
    for cell in cells(BENCHMARKS / f"{name}.json"):
        assert cell.peer is not None
        others = [cell.sides.get(f"ours {mode}") for mode in ("eager", "compiled", "fast", "onnx")]
        sides = [f"{ratio(one, cell.peer)}, {percent(one['mfu'], 0)}" if one else NOTHING for one in others]
        peer = f"{cell.peer['backend'].split()[1]}, {percent(cell.peer['mfu'], 0)}"
        rows.append((f"{cell.model}, batch {cell.batch}", peer, *sides))
    what = "times as fast as timm, and share of the matrix rate"
    return table((what, "timm", "ours eager", "compiled", "ours fast", "ours in ONNX Runtime"), rows)


def edge(name: str = "edge") -> str:
    """Small models at about equal multiply-adds on one core: every side in milliseconds, and the fastest of each."""
    found = document(name)["rows"]
    rows = []
    for size in dict.fromkeys(row["row"] for row in found):
        models: dict[str, dict[str, Record]] = {}
        for row in found:
            if row["row"] == size:
                models.setdefault(row["model"], {})[row["side"]] = row
        ours, peer = (min(sides.values(), key=lambda row: median(row["calls_s"])) for sides in models.values())
        for model, sides in models.items():
            one = next(iter(sides.values()))
            times = [
                f"{1e3 * median(sides[side]['calls_s']):.1f}" if side in sides else NOTHING
                for side in ("eager", "fused", "onnx", "int8", "static int8")
            ]
            changes = ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in one["overrides"].items())
            about = f"{one['macs'] / 1e6:,.0f} M", f"{one['parameters'] / 1e6:.1f} M"
            named = f"{model}, {changes}" if changes else model
            rows.append((named, *about, *times, ratio(ours, peer) if one["model"] == ours["model"] else ""))
    header = ("model, ms", "multiply-adds", "parameters", "eager", "fused", "ONNX Runtime", "int8", "static int8")
    return table((*header, "times as fast as the other, fastest of each"), rows)


def edge_int8(name: str = "edge") -> str:
    """The bundled model on one core: speed against timm in eager mode, and accuracy."""
    found = document(name)["bundled"]
    eager, rows = {"calls_s": found["calls_s"]["timm eager"]}, []
    for side, times in found["calls_s"].items():
        right = found["right"].get(side)
        correct = NOTHING if right is None else f"{right:,} of {found['images']:,}"
        rows.append((side, f"{1e3 * median(times):.0f}", ratio({"calls_s": times}, eager), correct))
    return table((f"batch {found['batch']}", "ms", "times timm eager", "test images classified correctly"), rows)


def feeding(name: str = "feeding") -> str:
    """Images from shards: processor time of each stage, what workers prepare together, the share of the speed on
    tensors that each use reaches, and the cores that would feed training at the speed per core of the most workers."""
    found = document(name)
    uses = [use for use in ("train", "eval", "predict") if use in found["rows"][0]]
    stages = ("read", "decode", "resize", "store")
    rows = []
    for row in found["rows"]:
        times = [row["stages_ms"][stage] for stage in stages]
        cells = [f"{row['bytes'] / 1e3:,.0f}", *(f"{time:.2f}" for time in times)]
        cells += [f"{rate:,.0f}" for rate in row["workers"].values()]
        for use in uses:
            fed, tensors = row[use]["fed"], row[use]["tensors"]
            cells.append(f"{fed:,.0f} of {tensors:,.0f}, {percent(fed / tensors, 0)}")
        if uses:
            most, rate = list(row["workers"].items())[-1]
            cells.append(f"{row['train']['tensors'] * int(most) / rate:.0f}")
        rows.append((row["source"], *cells))
    workers = ["images/s of 1 worker", *(f"of {count}" for count in found["rows"][0]["workers"] if count != "1")]
    header = ("kB", *(f"{stage}, ms" for stage in stages), *workers)
    words = ""
    if text := found.get("text"):
        times = text["packed_per_s"] / text["tokenized_per_s"]
        words = f"\n\nText: {times:,.0f} times as many tokens per second are read from a file of tokens as "
        words += f"{text['threads']:.0f} threads tokenize."
    return table(("images from", *header, *uses, *(["cores to feed train"] if uses else [])), rows) + words


BLOCKS = {
    "feeding": feeding,
    "feeding-cpu": partial(feeding, "feeding_cpu"),
    "edge": edge,
    "edge-int8": edge_int8,
    "edge-x86": partial(edge, "edge_x86"),
    "edge-x86-int8": partial(edge_int8, "edge_x86"),
    "bench-inference": inference,
    "bench-vit": against_vit,
    "fp8": fp8,
    "bench-training": training,
    "bench-pretraining": pretraining,
    "bench-latency": latency,
    "bench-cpu": cpu,
    "bench-cpu-x86": partial(cpu, "cpu_x86"),
}
