"""Training, evaluation and prediction in one call each: `allmlp.train`, `allmlp.evaluate`, `allmlp.predict`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmlp.errors import UserError, suggest_keywords

if TYPE_CHECKING:
    import numpy as np
    import torch

    from allmlp.callbacks import Callback
    from allmlp.data.dataset import Data
    from allmlp.models.model import Model
    from allmlp.prediction import Prediction, Predictor
    from allmlp.prediction.inputs import Item
    from allmlp.run import Run
    from allmlp.split_metrics import Metric

PathLike = str | os.PathLike[str]


@suggest_keywords
def train(
    run: str | os.PathLike[str] | Run | Data,
    out: PathLike | None = None,
    *,
    model: str | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    size: int | None = None,
    horizon: int | None = None,
    device: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Iterable[Callback] = (),
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """Train on data, a recipe of `allmlp list recipes`, or a `Run`, into the folder `out`; returns the last evaluation.

    >>> allmlp.train("photos/", "runs/photos")
    >>> allmlp.train("digits_mixer", "runs/digits", epochs=5, overrides={"optim.lr": 2e-3})
    >>> allmlp.train("sales.csv", "runs/sales", horizon=28)
    >>> model = allmlp.load("runs/digits")

    `run` and the options are those of the command: a folder of images per class, a table of texts and labels or of
    times and numbers, a recipe, FILE.py:NAME, a run.json, or `Data.of` your own dataset. If an interrupted run is
    called again with the same arguments, it continues from the last checkpoint. `callbacks` are called at steps,
    evaluations, checkpoints and the end. `metrics` maps names to functions of the logits [N, K] and labels [N] of the
    whole evaluated split that return a number: {"f1": f1}.
    """
    from allmlp.auto import TrainOptions
    from allmlp.data.dataset import Data
    from allmlp.resolve import choose, resolve, with_options
    from allmlp.run import Run
    from allmlp.spec import override_all
    from allmlp.training import train as train_run

    overrides = {**(overrides or {}), **({} if horizon is None else {"data.horizon": horizon})}
    options, folder = TrainOptions(model, epochs, minutes, size), None if out is None else Path(out)
    if isinstance(run, (str, os.PathLike)):
        runs = resolve(os.fspath(run), options, overrides, device, folder)
        if len(runs) > 1:
            raise UserError(f"{run} is a table of {len(runs)} runs; train one of them, such as {next(iter(runs))!r}")
        (resolved,) = runs.values()
        return train_run(resolved.run, resolved.folder, device, callbacks, metrics)
    if not isinstance(run, (Run, Data)):
        raise UserError(f"cannot train {type(run).__name__}: give a name, a Run, or your dataset as Data.of(dataset)")
    if folder is None:
        raise UserError(f"{'a Run' if isinstance(run, Run) else 'Data'} needs a folder: train(run, out)")
    if isinstance(run, Run):
        chosen = override_all(with_options(run, options), overrides)
    else:
        chosen, _ = choose(run, options, overrides, device)
    return train_run(chosen, folder, device, callbacks, metrics)


@suggest_keywords
def evaluate(
    model: PathLike,
    data: PathLike | None = None,
    *,
    classes: PathLike | None = None,
    knn: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Evaluate a finished run on its test split, or any model on `data`.

    >>> accuracy = allmlp.evaluate("runs/digits")["accuracy"]
    >>> allmlp.evaluate("allmlp:cifar10", "photos")

    `data` are labeled images, texts or time series in any format of `allmlp train`, or a name such as "cifar10". The
    test split is evaluated, or all examples if there is none; values of series that the model was trained on are left
    out. Classes are matched by name; if names differ, `classes` is a table with the class of the data and the class of
    the model. With `knn`, the features of a run are evaluated by this many nearest neighbors. `metrics` maps names to
    functions, as in `train`; on `data` their logits are log-probabilities of the distinguished classes. `overrides`
    changes fields of `data`, such as {"data.label_column": "rating"}.
    `allmlp.evaluation.evaluate_model` also returns the results of each class, or by the origin of forecasts.
    """
    from allmlp.evaluation import evaluate_model

    return evaluate_model(
        os.fspath(model),
        None if data is None else os.fspath(data),
        classes=None if classes is None else os.fspath(classes),
        knn=knn,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        metrics=metrics,
        overrides=overrides,
    ).metrics


@suggest_keywords
def transform(model: PathLike | Model, inputs: Any, *, context: str = "") -> Any:
    """Preprocess images or texts, as `allmlp.predict` does, into a batch for a model, on its device and in its dtype.

    >>> model = allmlp.load("runs/cifar10")
    >>> logits = model(allmlp.transform(model, ["cat.jpg", "dog.jpg"]))

    Images become a tensor [N, C, H, W]: resized, cropped, normalized. Texts become the keyword arguments of the model,
    each [N, S]: ids `x`, `mask` and, if used, `segments`, as in `model(**model.transform("a text"))`.
    """
    predictor, items = open_items(model, inputs, context)
    decoded: list[Any] = []
    for item in items:
        try:
            decoded.append(predictor.read(item.source))
        except UserError as reason:
            raise UserError(f"{item.name}: {reason}") from reason
    if not decoded:
        raise UserError(f"there are no {predictor.reads}")
    batch = predictor.collate(decoded)
    return batch if isinstance(batch, dict) else batch.to(predictor.original.dtype)


@suggest_keywords
def predict(
    model: PathLike | Model,
    inputs: Any,
    *,
    context: str = "",
    top_k: int = 5,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int | None = None,
    fast: bool = False,
) -> list[list[Prediction]]:
    """Return the `top_k` predictions for images or texts, the most probable first.

    >>> [[best, *others]] = allmlp.predict("runs/cifar10", "cat.jpg")
    >>> print(best.label, best.probability)
    >>> answers = allmlp.predict("runs/text", ["a wonderful film", "a waste of time"])

    `model` is a model, a folder or a name. Images are files, folders, patterns, PIL images, or uint8 pixels (arrays
    [H, W, C], tensors [C, H, W]). For a text model, a string is a text, a tuple of two strings a pair of texts, and a
    `Path` a table or text file. The result is one list per input, or one per mask for a text with several [MASK]
    tokens. `context` is the second sentence of a pair, or the paragraph that contains the answer to a question.
    `device`, `dtype`, `batch_size` and `fast` are those of `allmlp predict`; by default, a loaded model predicts on its
    own device and in its own dtype. It is never modified.
    """
    from allmlp.prediction.stream import predictions, values

    predictor, items = open_items(model, inputs, context, device=device, dtype=dtype, fast=fast)
    return [row for rows in values(predictions(predictor, items, top_k, batch_size)) for row in rows]


@suggest_keywords
def embed(
    model: PathLike | Model,
    inputs: Any,
    *,
    context: str = "",
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: int | None = None,
    fast: bool = False,
) -> np.ndarray:
    """Return the features of images or texts that the classifier reads, pooled over the tokens: float32, [N, C].

    >>> features = allmlp.embed("runs/cifar10", "photos/")

    The arguments are those of `allmlp.predict`.
    """
    import numpy as np

    from allmlp.prediction.stream import features, values

    predictor, items = open_items(model, inputs, context, device=device, dtype=dtype, fast=fast)
    rows = list(values(features(predictor, items, batch_size)))
    if not rows:
        raise UserError(f"there are no {predictor.reads}")
    return np.stack(rows)


def open_items(model: PathLike | Model, inputs: Any, context: str, **options: Any) -> tuple[Predictor, Iterable[Item]]:
    """The predictor of a model, and what it reads."""
    from allmlp.prediction import inputs_of, open_predictor
    from allmlp.prediction.inputs import as_items

    predictor = open_predictor(model, **options)
    return predictor, as_items(inputs, inputs_of(predictor.preprocessing), context)
