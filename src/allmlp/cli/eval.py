"""allmlp eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli.app import (
    MetricOption,
    app,
    assignments,
    cell,
    console,
    examples,
    is_main_process,
    next_command,
    plain_table,
    print_json,
    say,
)
from allmlp.cli.job import DTYPES, DeviceOption, torch_dtype
from allmlp.errors import UserError, plural, printable

if TYPE_CHECKING:
    from allmlp.evaluation import Evaluation

MAX_SKIPPED = 5
"""Unreadable files that are listed."""


@app.command(
    "eval",
    epilog=examples(
        "allmlp eval runs/photos",
        "allmlp eval runs/photos other_photos/ --per-class",
        "allmlp eval allmlp:cifar10 cifar10",
        "allmlp eval runs/reviews reviews.csv --json",
        "allmlp eval runs/sales new_sales.csv",
        "allmlp eval runs/reviews --metric metrics.py:f1",
        "allmlp eval timm:mixer_b16_224 photos/ --classes classes.csv",
        "allmlp eval timm:mixer_b16_224 imagenet/val --real real.json",
    ),
)
def eval_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model folder, allmlp:cifar10, a name of `allmlp list weights`, timm:NAME, hf:NAME."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            help="Labeled images or texts or a table of time series, as for `allmlp train`, or a name such as cifar10; "
            "by default the test split of the run."
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(help="Table for names that differ: class of the data, class of the model (empty: leave it out)."),
    ] = None,
    real: Annotated[
        Path | None, typer.Option(help="File real.json: ReaL labels of the validation images of ImageNet.")
    ] = None,
    per_class: Annotated[bool, typer.Option("--per-class", help="Print a table with a row for each class.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    knn: Annotated[
        int | None, typer.Option(help="Evaluate the features of a run by this many nearest neighbors.", min=1)
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; default float32, or the precision of the run.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per batch.", min=1)] = None,
    metric: MetricOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the data: data.label_column=rating.")
    ] = None,
) -> None:
    """Evaluate a trained model on the test split of its run, or on other data.

    Images are resized, cropped and normalized as the model expects. Data without a test split are evaluated as a whole,
    time series without the values that the model was trained on.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from allmlp.evaluation import evaluate_model
    from allmlp.real_labels import evaluate_real_labels
    from allmlp.split_metrics import import_metrics

    screen = Console(stderr=True)
    bar = Progress(
        MofNCompleteColumn(), TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    )
    with bar:
        row = bar.add_task("", total=None)
        options: Any = {
            "device": device,
            "dtype": torch_dtype(dtype),
            "batch_size": batch_size,
            "progress": lambda done, total: bar.update(row, completed=done, total=total),
        }
        if real is not None:
            if data is None or classes is not None or knn is not None or metric or settings:
                raise UserError(
                    "--real needs the folder of the validation images, and no --classes, --knn, --metric or --set"
                )
            evaluation = evaluate_real_labels(model, data, str(real), **options)
        else:
            options |= {"metrics": import_metrics(metric or []), "overrides": assignments(settings or [])}
            evaluation = evaluate_model(model, data, classes=str(classes) if classes else None, knn=knn, **options)
    if not is_main_process():
        return
    if as_json:
        print_json(evaluation.to_json())
        return
    print_evaluation(evaluation, per_class)
    if evaluation.class_results and not per_class:
        given = (word for setting in settings or [] for word in ("--set", setting))
        next_command("eval", model, *([data] if data else []), *given, "--per-class")


def print_evaluation(evaluation: Evaluation, per_class: bool) -> None:
    from allmlp.accuracy import format_accuracy
    from allmlp.backtest import as_table
    from allmlp.log import format_value

    for file in evaluation.skipped[:MAX_SKIPPED]:
        say(f"skipped {file}")
    if len(evaluation.skipped) > MAX_SKIPPED:
        say(f"skipped {len(evaluation.skipped):,} files that cannot be read in all")
    for note in evaluation.notes:
        say(f"note: {note}")
    noun = "forecast" if evaluation.origins else "example"
    print(printable(f"{evaluation.model} on {evaluation.data}: {plural(evaluation.examples, noun)}"))
    if evaluation.left_out:
        are = plural(evaluation.left_out, "example is", "examples are")
        print(f"{are} left out, of classes without a counterpart")
    values = {name: format_value(name, value) for name, value in evaluation.metrics.items()}
    if "accuracy_low" in values:
        values["accuracy"] = format_accuracy(
            round(evaluation.metrics["accuracy"] * evaluation.examples), evaluation.examples
        )
        del values["accuracy_low"], values["accuracy_high"]
    if evaluation.class_results:
        values["calibration_error"] = f"{evaluation.metrics['calibration_error']:.2%}"
    names = {"top5_accuracy": "top-5 accuracy", "calibration_error": "calibration error", "majority": "largest class"}
    width = max(len(names.get(name, name)) for name in values)
    for name, value in values.items():
        print(f"  {names.get(name, name):<{width}}  {value}")
    if evaluation.origins:
        print(f"by their origin:\n{as_table(evaluation.origins)}")
    if evaluation.confusions:
        print("most confused")
        for row in evaluation.confusions:
            share = f"{row.count:,} of {row.examples:,} ({row.count / row.examples:.1%})"
            print(printable(f"  {row.name} as {row.predicted}: {share}"))
    if per_class:
        print_classes(evaluation)


def print_classes(evaluation: Evaluation) -> None:
    table = plain_table(("class",), ("examples", "accuracy", "precision"))
    for row in evaluation.class_results:
        precision = f"{row.correct / row.predicted:.1%}" if row.predicted else "-"
        table.add_row(cell(row.name), f"{row.examples:,}", f"{row.correct / row.examples:.1%}", precision)
    console().print(table)
