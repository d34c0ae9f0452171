"""allmlp report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples


@app.command(epilog=examples("allmlp report runs/*", "allmlp report runs/a runs/b --out report.html --examples 0"))
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not, or folders of such folders.")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    asked: Annotated[
        int,
        typer.Option(
            "--examples",
            help="Test examples to ask each classifier about, for confusions, calibration and mistakes; fewer of a "
            "large model. 0 opens no data.",
            min=0,
        ),
    ] = 2000,
) -> None:
    """Compare runs on one page that opens anywhere: results, curves, filters, mistakes, the exact recipes."""
    from rich.console import Console
    from rich.progress import track

    from allmlp.report.page import write

    screen = Console(stderr=True)
    quiet = not screen.is_terminal
    count, left_out = write(
        runs, out, asked, lambda found: track(found, "Reading", console=screen, transient=True, disable=quiet)
    )
    for reason in left_out:
        print(f"left out: {reason}")
    print(f"{count} {'run' if count == 1 else 'runs'}, {out.stat().st_size / 1e6:.2f} MB: {out}")
