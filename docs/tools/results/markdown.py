"""Tables and numbers as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allmlp.study.statistics import interval
from results.records import Record

NOTHING = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def over_seeds(values: Sequence[float], digits: int, seeds: int | None = None) -> str:
    """The mean and half the width of its 95 % interval; one or two values as they are. With the number of values if it
    is not `seeds`."""
    if not values:
        return NOTHING
    count = "" if seeds in (None, len(values)) else f" (n={len(values)})"
    if len(values) < 3:
        return ", ".join(f"{value:.{digits}f}" for value in values) + count
    found = interval(values)
    return f"{found.mean:.{digits}f} ± {found.half:.{digits}f}{count}"


def accuracy(records: Sequence[Record], metric: str = "accuracy") -> str:
    """Of runs that differ by their seed, on the test split."""
    values = [100 * record["result"]["test"][metric] for record in records]
    return f"{over_seeds(values, 2)} %" if values else NOTHING


def log(name: str) -> str:
    return f"[log](logs/{name}.jsonl)"
