"""allmlp train, allmlp eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, assignments, examples, print_results
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp train digits_mixer",
        "allmlp train cifar10_gmlp --set optim.lr=2e-3 --out runs/a",
        "allmlp train cifar10_ablations/conv --set seed=1",
        "allmlp train --resume runs/a",
        "torchrun --nproc-per-node 8 -m allmlp train cifar10_gmlp --out runs/b",
    )
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A name from `allmlp list recipes`; NAME/ROW is one run of a table.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/RECIPE if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Any field: optim.lr=2e-3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
) -> None:
    """Train a recipe, in one process or under torchrun. A run that was interrupted can be resumed."""
    from allmlp import recipes
    from allmlp.spec import override_all
    from allmlp.training import read_run, train

    if (recipe is None) == (resume is None):
        raise UserError("name either a recipe or a folder to --resume")
    if resume is not None and (overrides or out):
        raise UserError("--resume continues a run unchanged: it takes neither --set nor --out")
    if resume is not None:
        print_results({resume.name: train(read_run(resume), resume, device)})
        return
    results = {}
    for name, run in recipes.runs(str(recipe)).items():
        changed = override_all(run, assignments(overrides or []))
        folder = out / name.partition("/")[2] if out else Path("runs") / name
        results[name] = train(changed, folder, device)
    print_results(results)


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
