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


def over_seeds(records: Sequence[Record], metric: str, scale: float = 100.0, unit: str = " %") -> str:
    """The mean over seeds and half the width of its 95 % interval; one or two values as they are."""
    if not records:
        return NOTHING
    values = [scale * record["result"]["test"][metric] for record in records]
    if len(values) < 3:
        return ", ".join(f"{value:.2f}" for value in values) + unit
    found = interval(values)
    return f"{found.mean:.2f} ± {found.half:.2f}{unit}"


def log(name: str) -> str:
    return f"[log](logs/{name}.jsonl)"
