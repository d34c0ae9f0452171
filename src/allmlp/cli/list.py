"""allmlp list."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Annotated

import typer

from allmlp.cli.app import app, billions, console, examples, millions, next_command, plain_table, print_described, width
from allmlp.errors import UserError, did_you_mean


@app.command(
    "list",
    epilog=examples(
        "allmlp list",
        "allmlp list 'resmlp_s12*'",
        "allmlp list hf: --json",
        "allmlp list recipes cifar10",
        "allmlp list studies glue",
        "allmlp list weights",
    ),
)
def list_command(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="A word in model names, a pattern, or: recipes, studies, weights.")
    ] = "*",
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            help="For recipes and studies, words in the name or description; for weights, a word in the name or a "
            "shell pattern.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models with input, size, cost and published figures; or recipes; studies; or published weights.

    `list recipes` lists what `allmlp train` can run, `list studies` what `allmlp study` can, and `list weights` what
    `allmlp convert` can download.
    """
    words = words or []
    if what in ("recipes", "studies"):
        list_declared(what, words, as_json)
        return
    if len(words) > (what == "weights"):
        raise UserError(
            "more words are only for `list recipes`, `list studies` and `list weights`, not for "
            f"{' '.join([what, *words])!r}"
        )
    if what == "weights":
        list_weights(words[0] if words else "*", as_json)
    else:
        list_models(what, as_json)


def select(names: list[str], pattern: str, noun: str) -> list[str]:
    from allmlp.models.catalog import matching

    selected = matching(names, pattern)
    if not selected:
        others = ("recipes", "studies", "weights") if noun == "model" else ()
        hint = did_you_mean(pattern, [*others, *names])
        if others and not hint:
            hint = " (recipes, studies and weights: `allmlp list recipes`, `list studies`, `list weights`)"
        raise UserError(f"no {noun} {'match' if noun == 'weights' else 'matches'} {pattern!r}{hint}")
    return selected


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
    view = plain_table(("model", "family", "input"), ("parameters", "MACs", "published"), overflow="fold")
    for entry in entries:
        counts = millions(entry.parameters), billions(entry.macs), entry.published
        view.add_row(entry.name, entry.family, entry.input_spec, *counts)
    console().print(view)
    next_command("show", entries[0].name)


def list_declared(what: str, words: list[str], as_json: bool) -> None:
    """Recipes or studies with these words."""
    from allmlp.models.catalog import matching
    from allmlp.recipes import recipes
    from allmlp.studies import studies

    declared = recipes() if what == "recipes" else studies()
    texts = {name: one.text for name, one in declared.items()}
    for word in words:
        named = matching(texts, word)
        texts = {name: text for name, text in texts.items() if name in named or word.lower() in text.lower()}
    if not texts:
        noun = "recipe" if what == "recipes" else "study"
        raise UserError(f"no {noun} matches {' '.join(words)!r}{did_you_mean(words[0], declared)}")
    if as_json:
        print(json.dumps(texts, indent=2))
        return
    print_described(texts, width())
    next_command("show" if what == "recipes" else "study", next(iter(texts)))


def list_weights(pattern: str, as_json: bool) -> None:
    from allmlp.weights.bundled import bundled_weights
    from allmlp.weights.published import published_weights

    bundled = {row.name: row for row in bundled_weights()}
    names = select([*bundled, *published_weights()], pattern, "weights")
    bundled_rows = [bundled[name] for name in names if name in bundled]
    rows = [published_weights()[name] for name in names if name not in bundled]
    if as_json:
        published = [row._asdict() | {"normalization": row.normalization._asdict()} for row in rows]
        print(json.dumps([*(row._asdict() for row in bundled_rows), *published], indent=2))
        return
    if bundled_rows:
        texts = {
            row.name: f"{row.description}, {row.result}; bundled, {row.size / 2**20:.1f} MiB" for row in bundled_rows
        }
        print_described(texts, width())
    if not rows:
        next_command("predict", bundled_rows[0].name, "INPUT")
        return
    view = plain_table(("weights", "description", "normalize"), ("top-1",), overflow="fold")
    view.add_column("license", overflow="fold")
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
        print("", *wrap(f"{names}: {note}.", width()), sep="\n")
    next_command("convert", rows[0].name, "FOLDER")
