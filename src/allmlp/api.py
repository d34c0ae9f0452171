"""Training, evaluation and prediction in one call each: `allmlp.train`, `allmlp.evaluate`, `allmlp.predict`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmlp.errors import UserError, suggest_keywords

if TYPE_CHECKING:
    from allmlp.prediction import Prediction
    from allmlp.run import Run

PathLike = str | os.PathLike[str]


@suggest_keywords
def train(
    run: str | Run, out: PathLike, *, device: str | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Train a recipe of `allmlp list recipes`, or a `Run`, into the folder `out`; returns the final evaluation.

    >>> allmlp.train("digits_mixer", "runs/digits", overrides={"budget.epochs": 5})
    >>> model = allmlp.load("runs/digits")

    Called again with the same arguments, it continues from the last checkpoint.
    """
    from allmlp import recipes
    from allmlp.spec import override_all
    from allmlp.training import train as train_run

    if isinstance(run, str):
        found = recipes.runs(run)
        if len(found) > 1:
            raise UserError(f"{run} is a table of {len(found)} runs; train one of them, such as {next(iter(found))!r}")
        (run,) = found.values()
    return train_run(override_all(run, overrides or {}), out, device)


@suggest_keywords
def evaluate(folder: PathLike, *, device: str | None = None, knn: int | None = None) -> dict[str, float]:
    """Evaluate the model of a finished run on its test split; with `knn`, its features by so many nearest neighbors.

    >>> accuracy = allmlp.evaluate("runs/digits")["accuracy"]
    """
    from allmlp.tasks.probe import KnnEval
    from allmlp.training import evaluate_checkpoint

    return evaluate_checkpoint(Path(folder), device, KnnEval(knn) if knn else None)


@suggest_keywords
def predict(
    folder: PathLike, inputs: PathLike | Sequence[PathLike], *, context: str = "", top_k: int = 5
) -> list[list[Prediction]]:
    """The `top_k` predictions for image files, or for texts, by the model in `folder`; the most probable first.

    >>> [[best, *others]] = allmlp.predict("runs/cifar10", "cat.jpg")
    >>> print(best.label, best.probability)

    There is one list per input; a text with several [MASK] tokens has one per mask. `context` is the second sentence of
    a pair, or the paragraph that contains the answer to a question.
    """
    from allmlp.prediction import predict_images, predict_text, reads_text

    inputs = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    if not reads_text(Path(folder)):
        return predict_images(Path(folder), [Path(file) for file in inputs], top_k)
    return [row for text in inputs for row in predict_text(Path(folder), str(text), context, top_k)]
