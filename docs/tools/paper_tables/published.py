"""A table as a paper prints it, and how each of its columns is computed or measured here."""

from __future__ import annotations

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
    """A preset, or NAME@SIZE, NAME/PATCH; empty where the library has no such model."""
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
