"""allmlp train."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import (
    MetricOption,
    app,
    assignments,
    complete_recipe,
    examples,
    is_main_process,
    next_command,
    next_prediction,
    print_results,
    say,
)
from allmlp.errors import UserError

if TYPE_CHECKING:
    from allmlp.resolve import Resolved

WAYS = """\
allmlp train DATA trains on your own data; model and settings are chosen, and printed before it starts:

  allmlp train photos/                      a folder of images per class
  allmlp train reviews.csv                  a table with a column of texts and one of labels
  allmlp train sales.csv --horizon 28       a table with a column of times and columns of numbers
  allmlp train photos/ --minutes 20         longer; also --epochs, --size, and --model NAME or FOLDER

allmlp train RECIPE repeats an experiment:

  allmlp train digits_mixer                 a minute on two CPU cores
  allmlp list recipes                       all of them
  allmlp show digits_mixer                  the settings of one

allmlp train --resume runs/photos           continues a run that was interrupted
allmlp train --help                         all options"""


@app.command(
    epilog=examples(
        "allmlp train photos/",
        "allmlp train reviews.csv --minutes 10",
        "allmlp train sales.csv --horizon 28",
        "allmlp train photos/ --model runs/other --set optim.lr=2e-4",
        "allmlp train digits_mixer --epochs 5",
        "allmlp train cifar10_ablations/conv --set seed=1 --out runs/a",
        "allmlp train experiments.py:my_run",
        "allmlp train --resume runs/a",
        "torchrun --nproc-per-node 8 -m allmlp train cifar10_gmlp --out runs/b",
    )
)
def train(
    source: Annotated[
        str | None,
        typer.Argument(
            help="Data (a folder of images per class, a table of texts and labels, ...), a recipe of `allmlp list "
            "recipes` or NAME/ROW for one run of a table, FILE.py:NAME, or a run.json.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A name of `allmlp list`, or a trained model to start from, such as a folder or timm:NAME."),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training examples.", min=1e-6, max=1e6)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time; the schedule is fitted into it.", min=1e-6, max=1e6)
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Image size in pixels, length of texts in tokens, or look-back of series in steps.", min=1),
    ] = None,
    horizon: Annotated[int | None, typer.Option(help="Number of steps to forecast (time series).", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Any field: optim.lr=2e-3.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps or xpu; default: an accelerator if there is one.")
    ] = None,
    track: Annotated[str, typer.Option(help="Trackers, separated by commas: wandb, mlflow.")] = "",
    metric: MetricOption = None,
) -> None:
    """Train on your own data, or repeat a recipe. Interrupted runs can be resumed."""
    options = (model, epochs, minutes, size)
    overrides = [*(overrides or []), *([] if horizon is None else [f"data.horizon={horizon}"])]
    if source is None and resume is None:
        if overrides or out or any(option is not None for option in options):
            raise UserError("name the data or the recipe to train; `allmlp train` alone shows examples")
        print(WAYS)
        return
    if source is not None and resume is not None:
        raise UserError("name either data or a recipe, or a folder to --resume")
    if resume is not None and (overrides or out or any(option is not None for option in options)):
        raise UserError(
            "--resume continues a run unchanged: it accepts only the options --device, --track and --metric"
        )

    from allmlp.auto import TrainOptions
    from allmlp.callbacks import trackers
    from allmlp.record import read_run
    from allmlp.resolve import resolve
    from allmlp.split_metrics import import_metrics
    from allmlp.training import train

    metrics = import_metrics(metric or [])
    if resume is not None:
        print_results({resume.name: train(read_run(resume), resume, device, trackers(track), metrics)})
        finish(resume, device)
        return
    results = {}
    for name, resolved in resolve(
        str(source), TrainOptions(*options), assignments(overrides or []), device, out
    ).items():
        print_choice(resolved)
        results[name] = train(resolved.run, resolved.folder, device, trackers(track), metrics)
        finish(resolved.folder, device)
    print_results(results)


def print_choice(resolved: Resolved) -> None:
    from allmlp.auto import Choice

    if resolved.reasons and is_main_process():
        table = Choice(resolved.run, resolved.reasons).table()
        say(f"settings for these data and this device; --set changes any of them:\n{table}\n")


def finish(folder: Path, device: str | None) -> None:
    """Write the report of the run, and print where a simple baseline is better and what to do next."""
    if not is_main_process():
        return
    from allmlp.data.preprocessing import SeriesPreprocessing, read_preprocessing
    from allmlp.record import read_record, read_run
    from allmlp.report.page import write_run_report
    from allmlp.tasks.masked_patches import MaskedPatches

    page = write_run_report(folder, device)
    failed = f"warning: no report: {page}; the run is complete: allmlp report {folder} tries again"
    say(f"report: {page}" if isinstance(page, Path) else failed)
    result = read_record(folder).get("result", {})
    values = result.get("validation") or result.get("test") or {}
    if values.get("tfidf_accuracy", 0.0) > values.get("accuracy", 1.0):
        split = "validation" if "validation" in result else "test"
        say(
            f"TF-IDF with logistic regression is better on the {split} split: {values['tfidf_accuracy']:.1%} against "
            f"{values['accuracy']:.1%}; use it, or start from a trained text model with --model"
        )
    if values.get("seasonal_naive_mse", math.inf) < values.get("mse", 0.0):
        say("repeating the last season is a better forecast: use it, or train longer with more --epochs")
    preprocessing = read_preprocessing(folder)
    if isinstance(preprocessing, SeriesPreprocessing) and isinstance(read_run(folder).task, MaskedPatches):
        next_command("train", "TABLE", "--horizon", "STEPS", "--model", folder)
    elif isinstance(preprocessing, SeriesPreprocessing):
        print_backtest(folder, device)
        next_command("predict", folder, "TABLE", "--out", "forecast.csv")
    else:
        next_prediction(folder)


def print_backtest(folder: Path, device: str | None) -> None:
    """Print the errors of the test forecasts by their origin."""
    from allmlp.backtest import as_table, backtest
    from allmlp.record import read_run
    from allmlp.tasks.forecast import Forecast

    if isinstance(read_run(folder).task, Forecast):
        say(f"errors of the test forecasts by their origin:\n{as_table(backtest(folder, device))}")
