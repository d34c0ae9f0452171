"""allmlp list."""

from __future__ import annotations

import json
from textwrap import shorten
from typing import Annotated

import typer

from allmlp.cli.app import app, billions, console, examples, millions
from allmlp.errors import UserError, did_you_mean


@app.command("list", epilog=examples("allmlp list", "allmlp list 'resmlp_s12*'", "allmlp list hf: --json"))
def list_command(
    pattern: Annotated[str, typer.Argument(help="A word in the name, or a shell pattern.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for machines.")] = False,
) -> None:
    """The zoo: every model, what it reads, its size and cost, and the figure its paper prints."""
    if pattern == "recipes":
        list_recipes(as_json)
        return
    from allmlp.models.catalog import matching, rows

    table = {row.name: row for row in rows()}
    names = matching(table, pattern)
    if not names:
        raise UserError(f"no model matches {pattern!r}{did_you_mean(pattern, table)}")
    if as_json:
        print(json.dumps([table[name]._asdict() for name in names], indent=2))
        return
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "family", "reads"):
        view.add_column(title, no_wrap=True)
    for title in ("parameters", "MACs", "published"):
        view.add_column(title, justify="right", no_wrap=True)
    for row in map(table.__getitem__, names):
        view.add_row(row.name, row.family, row.reads, millions(row.parameters), billions(row.macs), row.published)
    console().print(view)


def list_recipes(as_json: bool) -> None:
    from allmlp.recipes import recipes

    texts = {recipe.name: recipe.text for recipe in recipes().values()}
    if as_json:
        print(json.dumps(texts, indent=2))
        return
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        print(f"{name:<{width}}{shorten(text.splitlines()[0], 100 - width, placeholder=' ...')}")
