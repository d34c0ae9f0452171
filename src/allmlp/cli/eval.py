"""allmlp eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples, print_results


@app.command("eval", epilog=examples("allmlp eval runs/a", "allmlp eval runs/a --knn 20"))
def eval_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    knn: Annotated[
        int | None, typer.Option(help="Evaluate its features by this many nearest neighbors.", min=1)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Evaluate a trained model on its test split."""
    from allmlp.tasks.probe import KnnEval
    from allmlp.training import evaluate_checkpoint

    print_results({str(run): evaluate_checkpoint(run, device, KnnEval(knn) if knn else None)})
