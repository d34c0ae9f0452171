"""Tables of docs/guides/properties.md, from the records of `properties.py` and `benchmarks/growth.py`."""

from __future__ import annotations

from functools import partial

from results.markdown import percent, table
from results.records import Record, document


def record(name: str) -> Record:
    return document("properties")[name]


def start() -> str:
    found = record("start")
    before, after = max(found["before"]), found["after"]
    return (
        f"Before training, at most {before:.0e} of the gradient of a token's output comes from other tokens; it is "
        f"{percent(min(after), 0)} to {percent(max(after), 0)} in the blocks of the trained model. On digits, it is "
        f"{percent(found['digits'][-1], 0)} after {found['digits_steps'][-1]} steps."
    )


def filters() -> str:
    count = record("filters")["count"]
    return "Of the ten filters, " + ", ".join(f"{count[kind]} are {kind}" for kind in sorted(count)) + "."


def orders() -> str:
    rows = [
        (name, *(f"{size:.2f}" if size > 1e-9 else "0" for size in sizes[1:6]))
        for name, sizes in record("orders").items()
    ]
    return table(["size of the terms of order", *map(str, range(1, 6))], rows)


def padding() -> str:
    found = record("padding")
    rows = [(name, percent(value, 1)) for name, value in found["accuracy"].items()]
    return table(["gMLP on digits as texts", f"accuracy ({found['test_examples']} texts)"], rows)


def reach() -> str:
    found = record("reach")["reach"]
    rows = [(name, *(f"{sum(part) / len(part):.2f}" for part in thirds(ys))) for name, ys in found.items()]
    return table(["reach in patches, mean over blocks", "first third", "middle", "last third"], rows)


def thirds(values: list[float]) -> tuple[list[float], list[float], list[float]]:
    size = max(len(values) // 3, 1)
    return values[:size], values[size:-size], values[-size:]


def sparsity() -> str:
    rows = [(name, percent(own["token"], 0), percent(own["channel"], 0)) for name, own in record("sparsity").items()]
    return table(["weights below a twentieth of the largest", "token mixing", "channel mixing"], rows)


def growth(name: str = "growth") -> str:
    found, costs = document(name), ("macs", "seconds", "memory_bytes", "parameters")
    rows = [
        (layer, found["published"][layer], *(f"{own[cost]:.2f}" for cost in costs))
        for layer, own in found["exponents"].items()
    ]
    lengths = [length for length in found["lengths"] if length >= found["fitted_from"]]
    device = f"one thread of a CPU ({found['device']})" if name == "growth" else f"one {found['device']}"
    words = (
        f"\n\nFitted to {', '.join(map(str, lengths))} tokens of {found['channels']} channels, one layer, forward, "
        f"batch {found['batch']}, {device} ([record](../logs/{name}.json))."
    )
    header = ["layer", "published cost", "operations", "time", "memory", "parameters"]
    return table(header, rows) + words


BLOCKS = {
    f"property-{function.__name__}": function for function in (start, filters, orders, padding, reach, sparsity, growth)
} | {"property-growth-gpu": partial(growth, "growth_gpu")}
