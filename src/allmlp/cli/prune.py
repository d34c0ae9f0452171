"""allmlp prune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp prune mixer/ pruned/ --share 0.5",
        "allmlp prune runs/a --curve --data Cifar10 --pictures 2000 --figure curve.png",
    )
)
def prune(
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    target: Annotated[Path | None, typer.Argument(help="The folder to write.")] = None,
    share: Annotated[float | None, typer.Option(help="The share of every matrix over tokens to set to zero.")] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Print accuracies as CSV instead of writing a model.")] = False,
    data: Annotated[str | None, typer.Option(help="For the curve: Cifar10, or any data of labelled pictures.")] = None,
    pictures: Annotated[int, typer.Option(help="Test pictures for the curve.", min=1)] = 500,
    figure: Annotated[Path | None, typer.Option(help="Draw the curve into this .png or .svg file.")] = None,
) -> None:
    """Set the smallest weights over tokens to zero; or measure what that, low rank and empty blocks would cost."""
    if curve:
        if data is None or target is not None or share is not None:
            raise UserError("--curve takes --data (such as Cifar10) and writes no model: no target, no --share")
        print_curve(folder, data, pictures, figure)
        return
    if target is None or share is None or data is not None or figure is not None:
        raise UserError("name a folder to write and a --share to remove, or ask for a --curve")
    from allmlp.weights.folder import load, save
    from allmlp.weights.prune import prune

    model = load(folder)
    prune(model, share)
    save(model, target, like=folder)
    print(f"{target}: {share:.0%} of every matrix over tokens is zero")


def print_curve(folder: Path, data: str, count: int, file: Path | None) -> None:
    from allmlp.analysis import plots, pruning
    from allmlp.weights.pretrained import pretrained

    if file is not None and file.suffix not in (".png", ".svg"):
        raise UserError(f"a figure is a .png or .svg file, not {file.name}")
    model, inputs = pretrained(str(folder))
    points = []
    print("way,removed,accuracy")
    for point in pruning.curve(model, inputs, pruning.first_pictures(data, count)):
        print(f"{point.way},{point.removed:.2f},{point.accuracy:.4f}", flush=True)
        points.append(point)
    if file is not None:
        plots.save(pruning.figure(points), file, file.suffix[1:])
