"""The papers' tables: published figures next to those counted and measured by this library.

tables.json is written by docs/tools/paper_tables (`make tables`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeAlias

from allmlp.errors import UserError, did_you_mean
from allmlp.models.catalog import matching

FILE = Path(__file__).with_name("tables.json")
NOT_MEASURED, NO_MODEL, NO_RECIPE = "not measured", "no model", "no recipe"
MEASURED_HERE = "Measured here"
"""Section of the rows for models that are not in the paper."""
WIDTH = 100
SYMBOLS = {"n.m.": "not measured", "-": "no such model here, or no recipe for it"}
EAGER = "*"
"""After a figure that was measured in eager mode."""

Figure: TypeAlias = float | str | None
"""Our figure; text if there is none; None in a descriptive column."""


class PaperColumn(NamedTuple):
    name: str
    published: bool
    """Whether the paper has this column."""
    format: str
    """Format of our figures; empty for a descriptive column."""


class PaperRow(NamedTuple):
    section: str
    label: str
    model: str
    published: Sequence[str]
    """One per column, empty where the paper has none."""
    ours: Sequence[Figure]
    eager: Sequence[str] = ()
    """Columns whose figure of ours was measured in eager mode, which is slower than compiled."""


class PaperTable(NamedTuple):
    name: str
    papers: Sequence[str]
    title: str
    source: str
    columns: Sequence[PaperColumn]
    rows: Sequence[PaperRow]
    notes: Sequence[str] = ()

    def text(self, row: PaperRow, column: int, ours: bool) -> str:
        if not ours:
            return row.published[column]
        value = row.ours[column]
        return value or "" if isinstance(value, str | None) else format(value, self.columns[column].format)

    def marked(self, row: PaperRow, column: int, ours: bool) -> str:
        """The text, with a mark if it was measured in eager mode."""
        return self.text(row, column, ours) + EAGER * (ours and self.columns[column].name in row.eager)


def load() -> dict[str, PaperTable]:
    tables = {}
    for entry in json.loads(FILE.read_text(encoding="utf8")):
        columns = [PaperColumn(**column) for column in entry.pop("columns")]
        rows = [PaperRow(**row) for row in entry.pop("rows")]
        tables[entry["name"]] = PaperTable(columns=columns, rows=rows, **entry)
    return tables


def tables(pattern: str = "*", paper: str | None = None) -> list[PaperTable]:
    """The tables whose names match a shell pattern or contain a word, of one paper or of all."""
    by_name = load()
    if paper is not None:
        papers = dict.fromkeys(name for table in by_name.values() for name in table.papers)
        if paper not in papers:
            raise UserError(f"unknown paper {paper!r}: choose one of {', '.join(papers)}")
        by_name = {name: table for name, table in by_name.items() if paper in table.papers}
    chosen = matching(by_name, pattern)
    if not chosen:
        raise UserError(f"no table matches {pattern!r}{did_you_mean(pattern, by_name)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in chosen]


class ShownColumn(NamedTuple):
    """A column of text: the published figures, or ours."""

    heading: str
    number: int
    ours: bool


def columns_of(table: PaperTable, full: bool) -> list[ShownColumn]:
    """All columns, or, for a terminal, without our columns that have no measurements."""
    shown = []
    for number, column in enumerate(table.columns):
        if column.published:
            shown.append(ShownColumn(column.name, number, False))
        if column.format and (full or not is_empty(table, number)):
            shown.append(ShownColumn(f"{column.name}, here" if column.published else column.name, number, True))
    return shown


def is_empty(table: PaperTable, number: int) -> bool:
    """Whether our column has no figures; those of added rows are shown in the published column, if there is one."""
    added = [row for row in table.rows if row.section == MEASURED_HERE]
    return number in unmeasured(table) and (table.columns[number].published or not has_figure(added, number))


def unmeasured(table: PaperTable) -> list[int]:
    """Columns without our figures in the paper's rows."""
    printed = [row for row in table.rows if row.section != MEASURED_HERE]
    return [n for n, column in enumerate(table.columns) if column.format and not has_figure(printed, n)]


def has_figure(rows: Sequence[PaperRow], number: int) -> bool:
    return any(row.ours[number] not in ("", NOT_MEASURED, NO_MODEL) for row in rows)


# --- for people ------------------------------------------------------------------------------------------


def terminal(table: PaperTable) -> str:
    columns = columns_of(table, full=False)
    body = [[abbreviated(table, row, column) for column in columns] for row in table.rows]
    heads = [column.heading.replace(",", "") for column in columns]
    widths = [max(map(len, [*head.split(), *(row[i] for row in body)])) for i, head in enumerate(heads)]
    wrapped = [wrap(head, width) for head, width in zip(heads, widths, strict=True)]
    height = max(map(len, wrapped))
    label = max(len(row.label) for row in table.rows)
    above = zip(*([""] * (height - len(head)) + head for head in wrapped), strict=True)
    lines = [f"{table.name}: {table.title}", f"({table.source})", "", *(align("", label, row, widths) for row in above)]
    section = ""
    for row, cells in zip(table.rows, body, strict=True):
        if row.section != section:
            section = row.section
            lines.append(f"-- {section}")
        lines.append(align(row.label, label, cells, widths))
    missing = [table.columns[number].name for number in unmeasured(table)]
    about = [f"Not measured for the paper's rows: {', '.join(missing)}."] if missing else []
    about += [f"{symbol}: {words}." for symbol, words in SYMBOLS.items() if any(symbol in cells for cells in body)]
    notes = [text for note in (*about, *table.notes) for text in wrap(note, WIDTH)]
    return "\n".join([*lines, "", *notes]).rstrip()


def abbreviated(table: PaperTable, row: PaperRow, column: ShownColumn) -> str:
    text = table.marked(row, column.number, column.ours)
    if row.section == MEASURED_HERE:
        moved = not column.ours and column.number in unmeasured(table)
        text = table.text(row, column.number, ours=True) if moved else text
        return "" if text == NOT_MEASURED else text
    if text == NOT_MEASURED:
        return "" if column.number in unmeasured(table) else "n.m."
    return "-" if text in (NO_MODEL, NO_RECIPE) else text


def align(label: str, width: int, cells: Sequence[str], widths: list[int]) -> str:
    return (
        f"{label:<{width}}" + "".join(f"  {text:>{size}}" for text, size in zip(cells, widths, strict=True))
    ).rstrip()


def markdown(table: PaperTable) -> str:
    columns = columns_of(table, full=True)
    lines = [f"### {table.title}", "", f"`{table.name}`: {table.source}.", ""]
    lines.append("| | " + " | ".join(column.heading for column in columns) + " |")
    lines.append("|---|" + "---:|" * len(columns))
    section = ""
    for row in table.rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{section}** |" + " |" * len(columns))
        lines.append(f"| {row.label} | " + " | ".join(table.marked(row, c.number, c.ours) for c in columns) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)]).rstrip()


# --- for programs ----------------------------------------------------------------------------------------


def as_csv(tables: list[PaperTable]) -> str:
    """One line for each cell that is not empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "section", "row", "model", "column", "published", "here", "mode"])
    for table in tables:
        for row in table.rows:
            for number, column in enumerate(table.columns):
                both = row.published[number], table.text(row, number, ours=True)
                if any(both):
                    mode = "eager" if column.name in row.eager else ""
                    writer.writerow([table.name, row.section, row.label, row.model, column.name, *both, mode])
    return text.getvalue()


def as_json(table: PaperTable) -> dict[str, Any]:
    """The table as JSON, with our figures as unrounded numbers, or as text if there is none."""
    rows = []
    for row in table.rows:
        cells: dict[str, dict[str, Any]] = {}
        for column, published, ours in zip(table.columns, row.published, row.ours, strict=True):
            here = {} if ours is None else {"here": ours}
            mode = {"mode": "eager"} if column.name in row.eager else {}
            cells[column.name] = {"published": published or None} | here | mode
        rows.append({"section": row.section, "row": row.label, "model": row.model or None, "cells": cells})
    head = {"name": table.name, "title": table.title, "source": table.source}
    return {**head, "rows": rows, "notes": list(table.notes)}
