"""The model list that can be read without torch: zoo.json, written by `make zoo` and checked by a test."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("zoo.json")


class CatalogEntry(NamedTuple):
    name: str
    family: str
    input_spec: str
    parameters: int
    macs: int
    published: str
    about: str


def read_catalog() -> list[CatalogEntry]:
    return [CatalogEntry(**entry) for entry in json.loads(FILE.read_text(encoding="utf8"))]


def write_catalog(entries: Iterable[CatalogEntry]) -> None:
    lines = ",\n".join(f"  {json.dumps(entry._asdict())}" for entry in entries)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf8")


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Names that match a shell pattern or contain a word."""
    pattern = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
