"""allmlp prune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples, next_for_head
from allmlp.cli.job import DeviceOption
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp prune mixer/ pruned/ --fraction 0.5",
        "allmlp prune runs/a runs/a_pruned --fraction 0.9",
        "allmlp prune runs/a --curve --data cifar10 --images 2000 --figure curve.png",
    )
)
def prune(
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    target: Annotated[Path | None, typer.Argument(help="The folder to write.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Fraction of the weights of every token-mixing matrix to set to zero.")
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Print accuracies as CSV instead of writing a model.")] = False,
    data: Annotated[str | None, typer.Option(help="With --curve: images, as for eval: digits, a folder.")] = None,
    images: Annotated[int, typer.Option(help="With --curve: number of test images.", min=1)] = 500,
    figure: Annotated[Path | None, typer.Option(help="With --curve: plot it to this .png or .svg file.")] = None,
    device: DeviceOption = None,
) -> None:
    """Set the smallest token-mixing weights to zero, or measure accuracy under pruning and low rank (--curve)."""
    if curve:
        if data is None or target is not None or fraction is not None:
            raise UserError("--curve needs --data (digits, a folder) and writes no model: no target, no --fraction")
        print_curve(folder, data, images, figure, device)
        return
    if target is None or fraction is None or any(option is not None for option in (data, figure, device)):
        raise UserError("give a folder to write and a --fraction to remove, or --curve with its options")
    from allmlp.weights.folder import load, save
    from allmlp.weights.pruning import prune, token_matrices

    model = load(folder, dtype=None)
    before = sum(int(matrix.count_nonzero()) for matrix in token_matrices(model).values())
    prune(model, fraction)
    save(model, target, like=folder)
    left = sum(int(matrix.count_nonzero()) for matrix in token_matrices(model).values())
    print(f"{target}: {left:,} of {before:,} token-mixing weights are left")
    next_for_head(target, "eval", target, "DATA")


def print_curve(folder: Path, data: str, count: int, file: Path | None, device: str | None) -> None:
    from allmlp.analysis.figures import save
    from allmlp.analysis.pruning_curve import draw_curve, load_test_images, pruning_curve
    from allmlp.device import own_device
    from allmlp.weights.pretrained import pretrained

    if file is not None and file.suffix not in (".png", ".svg"):
        raise UserError(f"a figure is a .png or .svg file, not {file.name}")
    model, preprocessing = pretrained(str(folder), device=own_device(device))
    if preprocessing.task != "classes":
        raise UserError(f"the model in {folder} outputs {preprocessing.task}, not classes: it has no accuracy")
    points = []
    test_images = load_test_images(data, count, preprocessing.class_names, model.spec.input_size)
    print("method,removed,accuracy")
    for point in pruning_curve(model, preprocessing, test_images):
        print(f"{point.method},{point.removed:.2f},{point.accuracy:.4f}", flush=True)
        points.append(point)
    if file is not None:
        save(draw_curve(points), file, file.suffix[1:])
