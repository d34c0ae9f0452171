"""allmlp list."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Annotated

import typer

from allmlp.cli.app import app, billions, console, examples, millions
from allmlp.errors import UserError, did_you_mean

WIDTH = 100


@app.command(
    "list",
    epilog=examples(
        "allmlp list",
        "allmlp list 'resmlp_s12*'",
        "allmlp list hf: --json",
        "allmlp list recipes cifar10",
        "allmlp list weights",
    ),
)
def list_command(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="A word in the name or a shell pattern; or: recipes, weights.")
    ] = "*",
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="Of recipes or weights: the same.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models with their input, size, cost and published figures; or recipes; or published weights.

    `list recipes` names what `allmlp train` can run, `list weights` what `allmlp convert` can fetch.
    """
    if what == "recipes":
        list_recipes(pattern, as_json)
    elif what == "weights":
        list_weights(pattern, as_json)
    elif pattern != "*":
        raise UserError(f"a second pattern is only for `list recipes` and `list weights`, not for {what!r}")
    else:
        list_models(what, as_json)


def select(names: list[str], pattern: str, noun: str) -> list[str]:
    from allmlp.models.catalog import matching

    found = matching(names, pattern)
    if not found:
        raise UserError(f"no {noun} matches {pattern!r}{did_you_mean(pattern, names)}")
    return found


def list_models(pattern: str, as_json: bool) -> None:
    from allmlp.models.catalog import read_catalog
    from allmlp.plugins import plugins

    catalog = {entry.name: entry for entry in read_catalog()}
    for added in filter(None, (getattr(module, "PRESETS", None) for module in plugins())):
        from allmlp.models.zoo import catalog_entries

        catalog |= {entry.name: entry for entry in catalog_entries(added)}
    entries = [catalog[name] for name in select(list(catalog), pattern, "model")]
    if as_json:
        print(json.dumps([entry._asdict() for entry in entries], indent=2))
        return
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "family", "input"):
        view.add_column(title, no_wrap=True)
    for title in ("parameters", "MACs", "published"):
        view.add_column(title, justify="right", no_wrap=True)
    for entry in entries:
        counts = millions(entry.parameters), billions(entry.macs), entry.published
        view.add_row(entry.name, entry.family, entry.input_spec, *counts)
    console().print(view)


def list_recipes(pattern: str, as_json: bool) -> None:
    from allmlp.recipes import recipes

    texts = {name: recipes()[name].text for name in select(list(recipes()), pattern, "recipe")}
    if as_json:
        print(json.dumps(texts, indent=2))
        return
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        summary = " ".join(text.partition("\n\n")[0].split())
        first, *rest = wrap(summary, WIDTH - width) or [""]
        print(f"{name:<{width}}{first}", *(" " * width + line for line in rest), sep="\n")


def list_weights(pattern: str, as_json: bool) -> None:
    from allmlp.weights.published import published_weights

    rows = [published_weights()[name] for name in select(list(published_weights()), pattern, "weights")]
    if as_json:
        print(json.dumps([row._asdict() | {"normalization": row.normalization._asdict()} for row in rows], indent=2))
        return
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("weights", "description", "normalize"):
        view.add_column(title, no_wrap=True)
    view.add_column("top-1", justify="right", no_wrap=True)
    view.add_column("license", no_wrap=True)
    for row in rows:
        view.add_row(
            row.name,
            row.description,
            row.normalization.name,
            f"{row.top1:.2f}" if row.top1 else "",
            row.license or "unknown",
        )
    console().print(view)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        names = ", ".join(row.name for row in rows if row.note == note)
        print("", *wrap(f"{names}: {note}.", WIDTH), sep="\n")
