"""The part of `auto` that chooses the trained model to start from: the one whose features suit the data best."""

from __future__ import annotations

import torch

from allmlp.data.dataset import Dataset, ImageDataset
from allmlp.data.preprocessing import ImagePreprocessing, Preprocessing, SeriesPreprocessing, TextPreprocessing
from allmlp.data.series import SeriesDataset
from allmlp.errors import plural
from allmlp.head_init import HeadInit
from allmlp.models.zoo import create
from allmlp.run import Run
from allmlp.spec import hints, override
from allmlp.weights.start import Start, transfer

PROBE_EXAMPLES = 600
SMALL_VALIDATION = 300
"""With fewer examples, the standard error of an accuracy of 90 % is about two points or more."""


def fits(preprocessing: Preprocessing, dataset: Dataset) -> bool:
    """Whether a model with this preprocessing accepts such data."""
    if isinstance(dataset, ImageDataset):
        return isinstance(preprocessing, ImagePreprocessing) and len(preprocessing.mean) == len(dataset.mean)
    if isinstance(dataset, SeriesDataset):
        return isinstance(preprocessing, SeriesPreprocessing)
    return isinstance(preprocessing, TextPreprocessing)


def reads(preprocessing: Preprocessing) -> str:
    """What a model with this preprocessing accepts, in a few words."""
    if isinstance(preprocessing, ImagePreprocessing):
        return f"images with {plural(len(preprocessing.mean), 'channel')}"
    return "time series" if isinstance(preprocessing, SeriesPreprocessing) else "texts"


def compare_starts(run: Run, dataset: Dataset, starts: list[Start], device: torch.device) -> tuple[Start, str]:
    """The start whose frozen features classify held-out examples best, and the reason."""
    scores = {start.name: probe_accuracy(run, start, device) for start in starts}
    best = max(starts, key=lambda start: scores[start.name])
    others = ", ".join(f"{name} {score:.1%}" for name, score in scores.items() if name != best.name)
    where = "in cross-validation" if is_small(dataset) else "on the validation split"
    return best, f"best linear probe {where}: {scores[best.name]:.1%} (others: {others})"


def probe_accuracy(run: Run, start: Start, device: torch.device) -> float:
    """Accuracy of logistic regression on the features of `start`, fitted on a part of the data."""
    run = adapt_data(run, start, start.model.spec.input_size)
    dataset = run.select(run.data.for_model(start.folder).load())
    model = create(run.task.configure_model(start.model.spec, dataset), seed=0, device=device)
    transfer(model, start)
    task = run.task.build(model, dataset).to(device)
    if is_small(dataset):
        return HeadInit().cross_validate(model, task, dataset, seed=0, examples=PROBE_EXAMPLES)
    return HeadInit().fit(model, task, dataset, seed=0, examples=PROBE_EXAMPLES).accuracy


def is_small(dataset: Dataset) -> bool:
    """Whether the validation split is too small to distinguish models that differ by a few points."""
    return len(dataset.validation or ()) < SMALL_VALIDATION


def adapt_data(run: Run, start: Start, size: tuple[int, int] | None) -> Run:
    """The run with images of this size, normalized as for the start."""
    preprocessing, changes = start.preprocessing, hints(type(run.data))
    if size is not None and "img_size" in changes:
        run = override(run, "data.img_size", size)
    if isinstance(preprocessing, ImagePreprocessing) and "decode" in changes:
        run = override(run, "data.decode.mean", preprocessing.mean)
        run = override(run, "data.decode.std", preprocessing.std)
        run = override(run, "data.decode.crop_pct", preprocessing.crop_pct)
    return run
