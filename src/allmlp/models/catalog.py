"""The zoo as a table that can be read without torch: zoo.json, written by `make zoo`, checked by a test."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("zoo.json")


class Row(NamedTuple):
    name: str
    family: str
    reads: str
    parameters: int
    macs: int
    published: str
    about: str


def rows() -> list[Row]:
    return [Row(**row) for row in json.loads(FILE.read_text(encoding="utf8"))]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match a shell pattern, or contain a word."""
    pattern = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def count_all() -> list[Row]:
    """Build and count every preset (on the meta device)."""
    from allmlp.models.cost import measure
    from allmlp.models.zoo import presets

    table = []
    for name, preset in presets().items():
        cost, printed = measure(preset.spec), preset.published
        text = "" if printed is None else f"{printed.parameters} M" + (f", {printed.macs} G" if printed.macs else "")
        table.append(Row(name, preset.family, preset.spec.reads, cost.parameters, cost.macs, text, preset.about))
    return table


def write() -> None:
    table: list[dict[str, Any]] = [row._asdict() for row in count_all()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf8")
