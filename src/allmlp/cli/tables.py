"""allmlp tables."""

from __future__ import annotations

from typing import Annotated

import typer

from allmlp.cli.app import app, examples, next_command, print_json
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp tables",
        "allmlp tables resmlp",
        "allmlp tables --paper transformer",
        "allmlp tables gpu_hours",
        "allmlp tables 'gmlp_table*' --markdown",
    )
)
def tables(
    pattern: Annotated[str, typer.Argument(help="A word in a table's name, or a shell pattern.")] = "*",
    paper: Annotated[str | None, typer.Option(help="Only one paper: mixer, gmlp, resmlp or transformer.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line per cell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the papers' tables with the figures counted and measured by this library.

    Columns marked `here`, and columns that a paper does not have, are this library's.
    """
    from allmlp.report import tables as report

    if markdown + as_csv + as_json > 1:
        raise UserError("choose one of --markdown, --csv and --json")
    selected = report.tables(pattern, paper)
    if as_json:
        print_json([report.as_json(table) for table in selected], indent=2)
    elif as_csv:
        print(report.as_csv(selected), end="")
    else:
        print("\n\n".join(report.markdown(table) if markdown else report.terminal(table) for table in selected))
        if not markdown:
            next_command("list")
