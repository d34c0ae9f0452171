"""allmlp probe."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from allmlp.cli.app import app, cell, console, examples, plain_table, print_json, say
from allmlp.cli.job import DeviceOption
from allmlp.errors import printable


@app.command(
    epilog=examples(
        "allmlp probe allmlp:image --device cuda",
        "allmlp probe runs/photos digits cifar10 --examples 100 --seeds 3",
        "allmlp probe runs/photos other_photos/ --json",
    )
)
def probe(
    model: Annotated[str, typer.Argument(help="A run, a model folder, or a name as for `allmlp eval`.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Labeled images, as for `allmlp eval`; by default all named datasets in $ALLMLP_DATA."),
    ] = None,
    num_examples: Annotated[int, typer.Option("--examples", help="Training images of each dataset.", min=2)] = 1000,
    seeds: Annotated[int, typer.Option(help="Draws of the training images.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    device: DeviceOption = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 64,
) -> None:
    """Test the features of an image model on several datasets with few labels: one linear probe each.

    Only the probes are trained, not the model. The table is like that of VTAB, for the datasets that you have.
    """
    from rich.console import Console

    from allmlp.transfer import probe_datasets

    with Console(stderr=True).status("") as status:
        results = probe_datasets(
            model,
            data or (),
            examples=num_examples,
            seeds=seeds,
            device=device,
            batch_size=batch_size,
            missing=lambda reason: say(f"left out {reason}"),
            progress=lambda name: status.update(printable(name)),
        )
    mean = statistics.mean(result.accuracy for result in results)
    if as_json:
        print_json({"model": model, "mean": mean, "results": [result.to_json() for result in results]})
        return
    table = plain_table(("data",), ("classes", "train", "test", "largest class", "accuracy"))
    for result in results:
        spread = f" +- {statistics.stdev(result.accuracies):.2%}" if seeds > 1 else ""
        counts = (f"{count:,}" for count in (result.classes, result.train_examples, result.test_examples))
        table.add_row(cell(result.data), *counts, f"{result.majority:.2%}", f"{result.accuracy:.2%}{spread}")
    table.add_row(f"mean of {len(results)}", "", "", "", "", f"{mean:.2%}")
    console().print(table)
