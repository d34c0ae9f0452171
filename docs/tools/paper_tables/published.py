"""A table as a paper prints it, and how each of its columns is computed or measured here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class PublishedColumn(NamedTuple):
    name: str
    source: str = ""
    """Our figure: "measured" is looked up in the logs, anything else is a function of `generate.SOURCES` with its
    arguments; empty where the column only describes."""
    published: bool = True
    """Whether the paper has this column."""
    format: str = ""
    """Of our figure; by default that of its source."""
    reason: str = ""
    """Why rows of the paper have no figure of ours; by default that of its source (`generate.REASONS`)."""


class PublishedRow(NamedTuple):
    label: str
    model: str = ""
    """A preset, or NAME@SIZE, NAME/PATCH, NAME+MIXER; empty where the library has no such model."""
    recipe: str = ""
    """The recipe that trains it as published, if there is one."""
    cells: tuple[str, ...] = ()
    """As printed, one for each published column; empty where the paper prints a dash."""
    section: str = ""


class PublishedTable(NamedTuple):
    name: str
    papers: str
    """Subjects for `allmlp tables --paper`, separated by blanks."""
    title: str
    source: str
    columns: tuple[PublishedColumn, ...]
    rows: tuple[PublishedRow, ...]
    notes: tuple[str, ...] = ()


class Cell(NamedTuple):
    """What a GPU measures for a row: speed and memory of a model, in one task and at one batch size."""

    model: str
    """As in `PublishedRow`."""
    task: str
    batch: int

    @property
    def preset(self) -> str:
        return self.model.partition("@")[0]

    @property
    def size(self) -> str:
        """Of the image, or of the sequence; empty for the model's own."""
        return self.model.partition("@")[2]

    @property
    def package(self) -> str:
        """As `allmlp bench` calls it."""
        return self.model.partition(":")[0] if ":" in self.model else "ours"


def cell_of(column: PublishedColumn, row: PublishedRow) -> Cell | None:
    found = re.fullmatch(r"(?:speed|memory) (\w+) (\d+)", column.source)
    return Cell(row.model, found[1], int(found[2])) if found and row.model else None


def cells_of(table: PublishedTable) -> Iterator[Cell]:
    for row in table.rows:
        yield from filter(None, (cell_of(column, row) for column in table.columns))


def read(text: str) -> tuple[PublishedRow, ...]:
    """Parse one row per line: label | model [recipe] | cell | cell ...; a line starting with # begins a section."""
    rows, section = [], ""
    for line in text.strip().splitlines():
        if line.lstrip().startswith("#"):
            section = line.strip(" #")
            continue
        label, model, *cells = (part.strip() for part in line.split("|"))
        name, _, recipe = model.partition(" ")
        rows.append(PublishedRow(label, name, recipe, tuple("" if cell == "-" else cell for cell in cells), section))
    return tuple(rows)


PARAMETERS, MACS = PublishedColumn("params M", "parameters"), PublishedColumn("MACs G", "macs")
ADDED_MACS = MACS._replace(published=False)


def measured(*names: str, reason: str) -> tuple[PublishedColumn, ...]:
    return tuple(PublishedColumn(name, "measured", reason=reason) for name in names)
