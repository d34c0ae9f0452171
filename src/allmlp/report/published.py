"""A table as a paper prints it: columns, rows, and how this library answers each of them."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    name: str
    answer: str = ""
    """How the library answers: a name in `tables.ANSWERS`; "measured" is looked up; nothing if the column describes."""
    printed: bool = True
    """Whether the paper has it; else the answer stands alone."""


class Row(NamedTuple):
    label: str
    model: str = ""
    """The library's: a name of the zoo, NAME@SIZE at another size of input; empty where it has none."""
    recipe: str = ""
    """What trains it as published, where the library has that."""
    cells: tuple[str, ...] = ()
    """As printed, one for each printed column; empty where the paper has none."""
    section: str = ""


class Published(NamedTuple):
    name: str
    title: str
    source: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def read(text: str) -> tuple[Row, ...]:
    """Rows, one a line: label | model [recipe] | cell | cell ...; a line that starts with # begins a section."""
    rows, section = [], ""
    for line in text.strip().splitlines():
        if line.lstrip().startswith("#"):
            section = line.strip(" #")
            continue
        label, model, *cells = (part.strip() for part in line.split("|"))
        name, _, recipe = model.partition(" ")
        rows.append(Row(label, name, recipe, tuple("" if cell == "-" else cell for cell in cells), section))
    return tuple(rows)


PARAMETERS, MACS = Column("params M", "parameters"), Column("MACs G", "macs")


def measured(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "measured") for name in names)
