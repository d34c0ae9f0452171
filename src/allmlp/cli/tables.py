"""allmlp tables."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp tables",
        "allmlp tables resmlp",
        "allmlp tables --paper 004",
        "allmlp tables gpu_hours --gpus 64 --gpu a100",
        "allmlp tables 'gmlp_table*' --markdown",
    )
)
def tables(
    pattern: Annotated[str, typer.Argument(help="A word in a table's name, or a shell pattern.")] = "*",
    paper: Annotated[str | None, typer.Option(help="Only the tables of one: 000, 001, 002, 003 or 004.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a page.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="One line for each cell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for machines.")] = False,
    gpus: Annotated[int, typer.Option(help="How many, for what a recipe would cost.")] = 8,
    gpu: Annotated[
        str, typer.Option(help="h200, h100 or a100: what recipes would cost on it, what was measured on it.")
    ] = "h200",
) -> None:
    """The papers' tables again: published figures, and beside them what is counted and was measured here.

    Columns that say `here`, or that the paper has not, are ours.
    """
    from allmlp.report import tables_text as text
    from allmlp.report.tables import Setting, tables

    if markdown + as_csv + as_json > 1:
        raise UserError("choose one of --markdown, --csv and --json")
    found = tables(pattern, paper, Setting(gpus, gpu))
    if as_json:
        print(json.dumps([text.as_json(table) for table in found], indent=2))
    elif as_csv:
        print(text.as_csv(found), end="")
    else:
        print("\n\n".join(text.markdown(table) if markdown else text.terminal(table) for table in found))
