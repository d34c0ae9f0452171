"""One question of an analysis and its answer in short, with the files that hold it."""

from __future__ import annotations

from typing import NamedTuple

from allmlp.analysis.record import Record


class Section(NamedTuple):
    name: str
    text: str
    """The answer in short, or why it was left out."""
    files: tuple[str, ...] = ()
    """None where it was left out."""


class Answer:
    """Collects the files that one section writes."""

    def __init__(self, record: Record, name: str) -> None:
        self.record, self.name, self.start = record, name, len(record.files)

    def section(self, text: str) -> Section:
        return Section(self.name, text, tuple(self.record.files[self.start :]))
