"""allmlp list."""

from __future__ import annotations

import json
from textwrap import shorten, wrap
from typing import Annotated

import typer

from allmlp.cli.app import app, billions, console, examples, millions
from allmlp.errors import UserError, did_you_mean


@app.command(
    "list", epilog=examples("allmlp list", "allmlp list 'resmlp_s12*'", "allmlp list hf: --json", "allmlp list weights")
)
def list_command(
    pattern: Annotated[
        str, typer.Argument(help="A word in the name, or a shell pattern; or recipes; or weights.")
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for machines.")] = False,
) -> None:
    """The zoo: every model, what it reads, its size and cost, and the figure its paper prints.

    `list recipes` names the runs of `allmlp train`, `list weights` the published weights of `allmlp convert`.
    """
    if pattern in ("recipes", "weights"):
        list_recipes(as_json) if pattern == "recipes" else list_weights(as_json)
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


def list_weights(as_json: bool) -> None:
    from allmlp.weights.published import checkpoints

    rows = checkpoints().values()
    if as_json:
        print(json.dumps([row._asdict() | {"pixels": row.pixels._asdict()} for row in rows], indent=2))
        return
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("weights", "what they are", "pixels"):
        view.add_column(title, no_wrap=True)
    view.add_column("top-1", justify="right", no_wrap=True)
    view.add_column("licence", no_wrap=True)
    for row in rows:
        view.add_row(
            row.name, row.what, row.pixels.name, f"{row.top1:.2f}" if row.top1 else "", row.licence or "not known"
        )
    console().print(view)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        names = ", ".join(row.name for row in rows if row.note == note)
        print("", *wrap(f"{names}: {note}.", 100), sep="\n")
