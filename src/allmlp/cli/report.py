"""allmlp report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from allmlp.cli.app import app, examples, next_command
from allmlp.cli.job import DeviceOption
from allmlp.errors import UserError, plural


@app.command(
    epilog=examples(
        "allmlp report runs/*",
        "allmlp report runs/a runs/b --out compared.html --examples 0",
        "allmlp report runs/a --suspect-labels",
    )
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not, or folders that contain them.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write, or a folder for report.html.")] = Path(
        "report.html"
    ),
    max_examples: Annotated[
        int,
        typer.Option(
            "--examples",
            help="Test examples to evaluate each classifier on, for the confusion matrix, calibration and mistakes; "
            "fewer for a large model. 0 loads no data.",
            min=0,
        ),
    ] = 2000,
    suspect_labels: Annotated[
        bool,
        typer.Option(
            "--suspect-labels",
            help="Search for wrong labels by cross-validation of a linear classifier on the features of the model that "
            "the run started from.",
        ),
    ] = False,
    device: DeviceOption = None,
) -> None:
    """Show a run, or compare several, on one self-contained HTML page: results, curves, mistakes, filters, settings."""
    from rich.console import Console
    from rich.progress import track

    from allmlp.report.page import REPORT, write
    from allmlp.report.runs import find

    screen = Console(stderr=True)
    quiet = not screen.is_terminal

    def progress(items: Any) -> Iterable[Any]:
        return track(items, "Reading", console=screen, transient=True, disable=quiet)

    if out.is_dir() or not out.suffix:
        out /= REPORT
    elif out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"the report is an HTML page: call it {out.with_suffix('.html')}, or name a folder for it")
    count, skipped = write(runs, out, max_examples, suspect_labels, progress, device)
    for reason in skipped:
        print(f"skipped: {reason}")
    print(f"{plural(count, 'run')}, {out.stat().st_size / 1e6:.2f} MB: {out}")
    next_command("analyze", next(iter(find(runs)[0].values())) if count == 1 else "RUN")
