"""allmlp predict, allmlp generate."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli import job as shared
from allmlp.cli.app import app, cell, console, examples, next_command
from allmlp.cli.job import PredictionJob
from allmlp.errors import UserError, plural, printable
from allmlp.files import finite

if TYPE_CHECKING:
    from allmlp.prediction.forecast import Forecaster, SeriesForecast
    from allmlp.prediction.inputs import Item
    from allmlp.prediction.output import AnswerTable
    from allmlp.prediction.stream import Answer

MAX_ROWS = 50
"""Rows of the table on a terminal."""
MIN_NAME = 20
"""Characters of an input in it, however narrow the terminal is."""


@app.command(
    epilog=examples(
        "allmlp predict photo.jpg",
        "allmlp predict runs/photos new_photos/ --out answers.csv",
        "allmlp predict runs/text reviews.csv --column review --threshold 0.8",
        "allmlp predict runs/mlm 'the cat [MASK] on the mat'",
        "allmlp predict runs/sales sales.csv --out forecast.csv",
        "allmlp predict runs/squad 'Who sat on the mat?' --context 'The cat sat on the mat.'",
        "torchrun --nproc-per-node 8 -m allmlp predict runs/photos 's3://bucket/*.tar' --out answers/",
    )
)
def predict(
    inputs: shared.ModelAndInputs,
    context: shared.ContextOption = "",
    column: shared.ColumnOption = "",
    pair_column: shared.PairOption = "",
    keep: shared.KeepOption = None,
    top_k: Annotated[
        int | None, typer.Option(help="Classes or tokens per input; default 5, in a table file 1.", min=1)
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add the probability of every class.")] = False,
    threshold: Annotated[
        float, typer.Option(help="Leave the label empty where its probability is lower.", min=0, max=1)
    ] = 0.0,
    out: Annotated[
        str | None, typer.Option(help="Write a .csv, .tsv, .jsonl or .parquet file, or Parquet parts into a FOLDER/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of input and predictions.")] = False,
    batch_size: shared.BatchOption = None,
    device: shared.DeviceOption = None,
    dtype: shared.DtypeOption = None,
    fast: shared.FastOption = None,
    part_size: shared.PartOption = None,
) -> None:
    """Predict with a trained model: classes or values of images, classes of texts, tokens for [MASK], answers,
    translations, the next values of time series.

    Inputs that cannot be used are reported and skipped; the exit code is then 1.
    """
    if as_json and out is not None:
        raise UserError("--json prints the answers, --out writes them: choose one, or --out FILE.jsonl")
    if is_forecaster(inputs[0]):
        others = {"--context": context, "--column": column, "--pair-column": pair_column, "--keep": keep}
        others |= {"--top-k": top_k, "--probabilities": probabilities, "--threshold": threshold}
        others |= {"--batch-size": batch_size, "--dtype": dtype, "--fast": fast, "--part-size": part_size}
        if given := [name for name, value in others.items() if value]:
            raise UserError(f"{given[0]} is not for forecasts: {inputs[0]} forecasts time series")
        forecast(inputs, out, as_json, device)
        return
    from allmlp.prediction.inputs import Columns
    from allmlp.prediction.output import AnswerTable, write_answers
    from allmlp.prediction.stream import predictions

    columns = Columns(column, pair_column, tuple(keep or ()))
    job = PredictionJob(inputs, columns, context, device, dtype, fast, out, part_size)
    predictor, labels = job.predictor, job.predictor.labels
    if probabilities and predictor.task != "classes":
        raise UserError(f"the model in {predictor.name} has no classes: --probabilities is for classifiers")
    if threshold and predictor.task in ("values", "translation"):
        raise UserError(f"the model in {predictor.name} gives no probabilities, which --threshold needs")
    in_columns = out is not None and not out.endswith(".jsonl")
    top_k = min(top_k or (1 if in_columns else 5), len(labels) if predictor.task == "classes" else sys.maxsize)
    table = AnswerTable(
        labels, predictor.task == "values", top_k, tuple(columns.kept.values()), threshold, probabilities
    )
    counts: Counter[str] = Counter()
    job.next = () if as_json else ("serve", job.model)

    def answers(items: Iterable[Item]) -> Iterator[Answer]:
        for answer in job.watch(predictions(predictor, items, len(labels) if probabilities else top_k, batch_size)):
            if predictor.task == "classes":
                counts.update(table.label(row) or "unsure" for row in answer.value or ())
            yield answer

    if job.is_folder:
        job.write_parts(
            table.columns,
            lambda items: chain.from_iterable(map(table.records, answers(items))),
            ("predict", *table, context),
        )
    elif out is not None:
        write_answers(Path(out), table, answers(job.items))
    elif as_json:
        print_objects(chain.from_iterable(map(table.objects, answers(job.items))))
    elif sys.stdout.isatty():
        print_table(table, answers(job.items), job)
    else:
        print_lines(table, answers(job.items))
    job.finish(counts)


def is_forecaster(name: str) -> bool:
    """Whether this is the folder of a model of time series."""
    file = Path(name) / "preprocessing.json"
    return os.path.isfile(file) and b'"SeriesPreprocessing"' in file.read_bytes()


def forecast(inputs: list[str], out: str | None, as_json: bool, device: str | None) -> None:
    """Forecast the series of a table; with `out` as a table, and a figure beside it."""
    from allmlp.prediction.forecast import Forecaster, draw_forecasts, write_forecasts

    model, *tables = inputs
    if not tables:
        raise UserError(f"name the table to forecast: allmlp predict {model} TABLE.csv --out forecast.csv")
    forecaster = Forecaster(model, device)
    forecasts = forecaster.forecast(*tables)
    preprocessing = forecaster.preprocessing
    if out is not None:
        shown = write_forecasts(forecasts, forecaster, Path(out))
        steps = f"{plural(forecaster.horizon, 'step')} of {preprocessing.frequency}"
        print(f"wrote {out}: {steps} after the last of each series")
        draw_forecasts(shown, forecaster, Path(out).with_suffix(".png"))
        print(f"wrote {Path(out).with_suffix('.png')}")
        next_command("serve", model)
        return
    if as_json:
        print_objects(objects_of(forecasts, forecaster))
        return
    for one in forecasts:
        for stamp, values in zip(one.stamps, one.values):
            numbers = "  ".join(f"{name} {value:.7g}" for name, value in zip(preprocessing.columns, values))
            print(printable("  ".join(filter(None, (one.id, stamp, numbers)))))


def objects_of(forecasts: Iterable[SeriesForecast], forecaster: Forecaster) -> Iterator[dict[str, Any]]:
    preprocessing = forecaster.preprocessing
    for one in forecasts:
        values: dict[str, Any] = {"id": one.id, "times": one.stamps}
        values["values"] = dict(zip(preprocessing.columns, one.values.T.tolist()))
        if one.quantiles is not None:
            values["quantiles"] = {
                f"{level:g}": dict(zip(preprocessing.columns, one.quantiles[..., place].T.tolist()))
                for place, level in enumerate(forecaster.levels)
            }
        yield values


def print_objects(objects: Iterable[dict[str, Any]]) -> None:
    """A list, printed while it is made."""
    before = "["
    for one in objects:
        print(before + json.dumps(finite(one)), end="", flush=True)
        before = ",\n "
    print("]" if before != "[" else "[]")


def print_lines(table: AnswerTable, answers: Iterable[Answer]) -> None:
    """For other programs: a line per answer, whole."""
    for answer in answers:
        for row in answer.value or ():
            unsure = ["unsure:"] if table.label(row) is None else []
            name = " ".join(answer.item.name.split("\n"))  # a line per answer, whatever the name of a file has in it
            print(printable(f"{name}: {'  '.join([*unsure, *map(str, row)])}"), flush=True)


def print_table(table: AnswerTable, answers: Iterable[Answer], job: PredictionJob) -> None:
    """For a terminal: the first answers, in lines that fit."""
    from rich.table import Table

    rows: list[tuple[str, str, str, list[str]]] = []
    count = 0
    for answer in answers:
        for row in answer.value or ():
            count += 1
            if count <= MAX_ROWS:
                rows.append((" ".join(answer.item.name.split()), *cells(table, row)))
    screen, show = console(), Table(job.inputs.reads.removesuffix("s"), "answer", "", box=None, pad_edge=False)
    longest, answer_width = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    name_width = min(longest, max(MIN_NAME, screen.width - answer_width - 30))
    room = screen.width - name_width - max(answer_width, 6) - 6 - 3 * 2
    if any(fitting(others, room) for *_, others in rows):
        show.add_column("then", style="dim")
    for name, label, chance, others in rows:
        kept = shorten(name, name_width, job.inputs.reads == "images" or job.inputs.whole_files)
        show.add_row(*map(cell, [kept, label, f"{chance:>6}", fitting(others, room)][: len(show.columns)]))
    for column in show.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    screen.print(show)
    if count > MAX_ROWS:
        print(f"... and {count - MAX_ROWS:,} more")
        job.next = ("predict", *job.arguments, "--out", "answers.csv")


def shorten(name: str, width: int, is_path: bool) -> str:
    """The beginning of a text, the end of a path."""
    if len(name) <= width:
        return name
    return f"...{name[3 - width :]}" if is_path else f"{name[: width - 3]}..."


def cells(table: AnswerTable, row: list[Any]) -> tuple[str, str, list[str]]:
    """Answer, probability, and the next predictions."""
    if table.is_regression:
        return "  ".join(map(str, row)), "", []
    probability = row[0].probability if row else None
    chance = "" if probability is None else f"{probability:.1%}"
    return table.label(row) or "unsure", chance, [str(one) for one in row[1:]]


def fitting(words: list[str], room: int) -> str:
    """As many of the words as fit."""
    while words and len("  ".join(words)) > room:
        words = words[:-1]
    return "  ".join(words)


@app.command(
    epilog=examples(
        "allmlp generate runs/causal --prompt Once",
        "allmlp generate runs/causal --temperature 0",
        "allmlp generate runs/causal --prompt 'The cat' --top-p 0.9 --seed 0",
        "allmlp generate runs/causal --prompt 'The cat' --dtype bfloat16",
    )
)
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model.")],
    prompt: Annotated[str, typer.Option(help="Start of the text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.", min=1)] = 50,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.", min=0.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens only.", min=1)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the fewest most probable tokens that have this probability.", min=0.0, max=1.0),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, for repeatable text.", min=0, max=2**63 - 1)] = None,
    device: shared.DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default float32.")] = None,
) -> None:
    """Generate text with a causal language model, printed as it is generated."""
    from allmlp.prediction import generate

    for piece in generate(model, prompt, max_new_tokens, temperature, top_k, top_p, seed, device, dtype):
        print(printable(piece), end="", flush=True)
    print()
