"""allmlp embed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli import job as shared
from allmlp.cli.app import app, cell, console, examples, plain_table, print_json
from allmlp.cli.job import PredictionJob, split_model
from allmlp.errors import UserError

if TYPE_CHECKING:
    from allmlp.prediction.inputs import Item
    from allmlp.prediction.neighbors import Match


@app.command(
    epilog=examples(
        "allmlp embed runs/photos photos/ --out features.npy",
        "allmlp embed runs/photos photos/ --near query.jpg",
        "allmlp embed runs/photos features.npy --near query.jpg --top-k 10",
        "allmlp embed runs/text reviews.csv --out features.parquet",
    )
)
def embed(
    inputs: shared.ModelAndInputs,
    out: Annotated[
        str | None, typer.Option(help="Write .npy and the names into .names.csv, or .parquet, or parts into a FOLDER/.")
    ] = None,
    near: Annotated[
        str | None,
        typer.Option(help="Print the inputs most similar to this file or text (cosine). INPUTS may be saved features."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Number of nearest inputs.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the nearest inputs as JSON.")] = False,
    context: shared.ContextOption = "",
    column: shared.ColumnOption = "",
    pair_column: shared.PairOption = "",
    keep: shared.KeepOption = None,
    batch_size: shared.BatchOption = None,
    device: shared.DeviceOption = None,
    dtype: shared.DtypeOption = None,
    fast: shared.FastOption = None,
    part_size: shared.PartOption = None,
) -> None:
    """Compute the pooled features that the classifier reads, of images or texts, or search for the nearest ones."""
    import numpy as np

    from allmlp.prediction.inputs import Columns
    from allmlp.prediction.neighbors import are_features, collect, nearest, read_features
    from allmlp.prediction.output import FEATURES, feature_record, write_features
    from allmlp.prediction.stream import features

    if (out is None) == (near is None):
        raise UserError("embed needs either --out, to write the features, or --near, to search them")
    model, places = split_model(inputs)
    columns = Columns(column, pair_column, tuple(keep or ()))
    kept = tuple(columns.kept.values())
    if missing := [place for place in places if place.endswith(".npy") and not Path(place).is_file()]:
        raise UserError(f"there is no file {missing[0]}")  # a model of texts would read the name as one
    saved = near is not None and len(places) == 1 and are_features(Path(places[0]))
    if saved and len(inputs) == 1:  # features of different models cannot be compared, even if they are of one size
        raise UserError(f"name the model of these features: allmlp embed MODEL {places[0]} --near QUERY")
    job = PredictionJob(
        [model, near] if saved and near is not None else inputs, columns, context, device, dtype, fast, out, part_size
    )
    predictor = job.predictor

    def answers(items: Iterable[Item]) -> Iterator[Any]:
        return job.watch(features(predictor, items, batch_size))

    if near is not None:
        query = job.single(near)
        (value,) = features(predictor, [query])
        if value.error:
            raise UserError(f"{near}: {value.error}")
        bank = read_features(Path(places[0])) if saved else collect(answers(job.items))
        print_matches(nearest(value.value, bank, top_k, query.name), job.inputs.reads, as_json)
    elif job.is_folder:
        job.write_parts(
            {"input": str, **dict.fromkeys(kept, str), FEATURES: np.ndarray},
            lambda items: ({**feature_record(one), FEATURES: one.value} for one in answers(items) if not one.error),
            ("embed", kept, context),
        )
    else:
        write_features(Path(out or ""), kept, answers(job.items))
    job.next = ("embed", model, out, "--near", "QUERY") if out is not None else ()
    job.finish()


def print_matches(matches: list[Match], reads: str, as_json: bool) -> None:
    if as_json:
        print_json([match._asdict() for match in matches])
        return
    table = plain_table(("cosine", reads.removesuffix("s")))
    for match in matches:
        table.add_row(f"{match.cosine:.4f}", cell(match.name))
    console().print(table)
