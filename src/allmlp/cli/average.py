"""allmlp average."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples, next_for_head
from allmlp.cli.job import DeviceOption
from allmlp.errors import UserError, plural


@app.command(
    epilog=examples(
        "allmlp average runs/a --last 2 --out averaged/",
        "allmlp average runs/a runs/b --out soup/",
        "allmlp average runs/a runs/b --out soup/ --device cpu",
    )
)
def average(
    folders: Annotated[list[Path], typer.Argument(help="Runs or model folders of one spec; one run with --last.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    last: Annotated[int | None, typer.Option(help="Average this many checkpoints of one run.", min=2)] = None,
    device: DeviceOption = None,
) -> None:
    """Average the weights of models, or of the last checkpoints of a run.

    If the first folder is a run, the average and every model are evaluated on its test split, or on its held-out
    examples.
    """
    from allmlp.averaging import average_checkpoints, average_models

    is_run = (folders[0] / "run.json").is_file()
    if device is not None and not is_run:
        raise UserError(
            f"--device is for evaluations, and {folders[0]} is not a run with data to evaluate: leave it out"
        )
    if last is not None:
        if len(folders) > 1:
            raise UserError("--last averages the checkpoints of one run: name one folder")
        average_checkpoints(folders[0], last, out)
    else:
        average_models(folders, out)
    print(f"{out}: the average of {plural(last, 'checkpoint') if last else plural(len(folders), 'model')}")
    if is_run:
        from allmlp.log import format_values
        from allmlp.training import evaluate_checkpoint

        for one in (*folders, out):
            print(f"{one}  {format_values(evaluate_checkpoint(folders[0], device, model=one))}")
    next_for_head(out, "eval", out, "DATA")
