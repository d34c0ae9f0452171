"""Tables as text: for a terminal of 100 columns, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from allmlp.report.tables import HERE, NO_RECIPE, NOT_HERE, NOT_MEASURED, Line, Table

WIDTH = 100
SIGNS = {"n.m.": "not measured", "-": "no such model here, or no recipe for it"}


class Shown(NamedTuple):
    """A column of text: of the paper, or ours beside it."""

    heading: str
    number: int
    ours: bool


def columns_of(table: Table, whole: bool) -> list[Shown]:
    """All columns; or, for a terminal, without those of ours in which nothing was measured."""
    found = []
    for number, column in enumerate(table.columns):
        if column.printed:
            found.append(Shown(column.name, number, False))
        if column.answer and (whole or not left_out(table, number)):
            found.append(Shown(f"{column.name}, here" if column.printed else column.name, number, True))
    return found


def left_out(table: Table, number: int) -> bool:
    """A column of ours without a measurement; what our own rows have goes to the paper's column, if it has one."""
    own = [cell(line, number, ours=True) for line in table.lines if line.section == HERE]
    return number in unmeasured(table) and (table.columns[number].printed or not any(map(is_figure, own)))


def is_figure(text: str) -> bool:
    return text not in ("", NOT_MEASURED, NOT_HERE)


def unmeasured(table: Table) -> list[int]:
    """Columns in which none of the paper's rows has a measurement."""
    printed = [line for line in table.lines if line.section != HERE]
    return [
        number
        for number, column in enumerate(table.columns)
        if column.answer and not any(is_figure(cell(line, number, ours=True)) for line in printed)
    ]


def cell(line: Line, number: int, ours: bool) -> str:
    if not ours:
        return line.printed[number] or ""
    found = line.here[number]
    return found.text if found else ""


# --- for people ------------------------------------------------------------------------------------------


def terminal(table: Table) -> str:
    """Sections are lines of their own; what was measured on other models than the paper's stands below its rows."""
    columns = columns_of(table, whole=False)
    body = [[brief(table, line, column) for column in columns] for line in table.lines]
    heads = [column.heading.replace(",", "") for column in columns]
    widths = [max(map(len, [*head.split(), *(row[i] for row in body)])) for i, head in enumerate(heads)]
    wrapped = [wrap(head, width) for head, width in zip(heads, widths, strict=True)]
    tall = max(map(len, wrapped))
    label = max(len(line.label) for line in table.lines)
    above = zip(*([""] * (tall - len(head)) + head for head in wrapped), strict=True)
    lines = [f"{table.name}: {table.title}", f"({table.source})", "", *(align("", label, row, widths) for row in above)]
    section = ""
    for line, row in zip(table.lines, body, strict=True):
        if line.section != section:
            section = line.section
            lines.append(f"-- {section}")
        lines.append(align(line.label, label, row, widths))
    missing = [table.columns[number].name for number in unmeasured(table)]
    said = f"Not measured for the paper's rows: {', '.join(missing)}." if missing else ""
    signs = [f"{sign}: {words}." for sign, words in SIGNS.items() if any(sign in row for row in body)]
    notes = [text for note in (said, *signs, *table.notes) if note for text in wrap(note, WIDTH)]
    return "\n".join([*lines, "", *notes]).rstrip()


def brief(table: Table, line: Line, column: Shown) -> str:
    """A measurement of our own row stands in the paper's column where ours is left out."""
    text = cell(line, column.number, column.ours)
    if line.section == HERE:
        collapsed = not column.ours and column.number in unmeasured(table)
        text = cell(line, column.number, ours=True) if collapsed else text
        return "" if text == NOT_MEASURED else text
    if text == NOT_MEASURED:
        return "" if column.number in unmeasured(table) else "n.m."
    return "-" if text in (NOT_HERE, NO_RECIPE) else text


def align(label: str, width: int, cells: Sequence[str], widths: list[int]) -> str:
    return (
        f"{label:<{width}}" + "".join(f"  {text:>{size}}" for text, size in zip(cells, widths, strict=True))
    ).rstrip()


def markdown(table: Table) -> str:
    columns = columns_of(table, whole=True)
    lines = [f"### {table.title}", "", f"`{table.name}`: {table.source}.", ""]
    lines.append("| | " + " | ".join(column.heading for column in columns) + " |")
    lines.append("|---|" + "---:|" * len(columns))
    section = ""
    for line in table.lines:
        if line.section != section:
            section = line.section
            lines.append(f"| **{section}** |" + " |" * len(columns))
        lines.append(f"| {line.label} | " + " | ".join(cell(line, c.number, c.ours) for c in columns) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)]).rstrip()


# --- for machines ----------------------------------------------------------------------------------------


def as_csv(tables: list[Table]) -> str:
    """One line for each cell that has something in it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "section", "row", "model", "column", "published", "here"])
    for table in tables:
        for line in table.lines:
            for number, column in enumerate(table.columns):
                both = line.printed[number] or "", cell(line, number, ours=True)
                if any(both):
                    writer.writerow([table.name, line.section, line.label, line.model, column.name, *both])
    return text.getvalue()


def as_json(table: Table) -> dict[str, Any]:
    """Figures of our own as numbers, in their full precision; in words where there is none."""
    rows = []
    for line in table.lines:
        cells: dict[str, dict[str, Any]] = {}
        for number, column in enumerate(table.columns):
            cells[column.name] = {"published": line.printed[number] or None}
            here = line.here[number]
            if here is not None:
                cells[column.name]["here"] = here.text if here.value is None else here.value
        rows.append({"section": line.section, "row": line.label, "model": line.model or None, "cells": cells})
    head = {"name": table.name, "title": table.title, "source": table.source}
    return {**head, "rows": rows, "notes": list(table.notes)}
