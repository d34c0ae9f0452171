"""Suspect labels: examples that a classifier trained on the others assigns to another class.

The features of a frozen model are classified by logistic regression in k-fold cross-validation. An example with label y
is suspected where the most probable class j is much more probable:

    p_j >= RATIO p_y

See Northcutt et al., Confident Learning: Estimating Uncertainty in Dataset Labels, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.accuracy import format_accuracy, wilson_interval
from allmlp.analysis.target import affordable_images
from allmlp.analysis.token_filters import evenly_spaced
from allmlp.data.dataset import Split, labels_of, subset
from allmlp.errors import UserError
from allmlp.head_init import Features, HeadInit, class_weights_of, features_of, fit_linear
from allmlp.models.model import Model
from allmlp.report.images import EmbeddedImage
from allmlp.report.predictions import evaluator, file_name, viewer
from allmlp.run import Run
from allmlp.tasks.task import TaskModule
from allmlp.weights import folder
from allmlp.weights.start import open_start, transfer

FOLDS = 5
MAX_EXAMPLES, MIN_EXAMPLES = 5000, 500
"""Maximum number of classified examples, and the minimum, even for slow models."""
MAX_SHOWN = 24
RATIO = 10


class SuspectLabel(NamedTuple):
    split: str
    """train, validation or test."""
    index: int
    label: int
    probability: float
    """Probability of the label."""
    suggested: int
    suggested_probability: float
    image: EmbeddedImage | None
    text: str
    """Text of the example, if there is no image."""
    file: str


class SuspectLabels(NamedTuple):
    found: list[SuspectLabel]
    """At most MAX_SHOWN, the least probable label first."""
    count: int
    examples: int
    about: str


def find_suspects(run: Run, place: Path, device: torch.device) -> SuspectLabels:
    """Find suspect labels among the examples of all splits of a run; for large data, among evenly spaced ones."""
    model, source = frozen_model(run, place)
    dataset, task = evaluator(model.to(device), run, str(place))
    everything = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    splits = {name: split for name, split in everything.items() if split is not None}
    chosen = choose_examples(splits, affordable_images(model, MAX_EXAMPLES, least=MIN_EXAMPLES))
    parts = []
    for name, split in splits.items():
        indices = torch.tensor([index for where, index in chosen if where == name], dtype=torch.int64)
        if len(indices):
            parts.append(features_of(model, task, subset(split, indices)))
    features = Features(*(torch.cat(tensors) for tensors in zip(*parts)))
    probabilities = out_of_fold(features, task)
    right = int((probabilities.argmax(1) == features.labels).sum())
    about = f"{FOLDS}-fold cross-validation of a logistic regression on the features of {source}, accuracy "
    about += format_accuracy(right, len(chosen))
    suggested = suspects(probabilities, features.labels)
    if wilson_interval(right, len(chosen))[0] <= int(features.labels.bincount().max()) / len(chosen):
        suggested.fill_(-1)
        about += ": the features do not tell the classes apart, so that nothing can be said about the labels"
    label_probabilities = probabilities[torch.arange(len(chosen)), features.labels]
    rows = (suggested >= 0).nonzero().flatten()
    suspect_labels = []
    for row in rows[label_probabilities[rows].argsort(stable=True)][:MAX_SHOWN].tolist():
        (name, index), other = chosen[row], int(suggested[row])
        shown = viewer(dataset, splits[name])(index)
        image, text = (shown, "") if isinstance(shown, EmbeddedImage) else (None, shown)
        values = float(label_probabilities[row]), other, float(probabilities[row, other])
        file = file_name(splits[name], index)
        suspect_labels.append(SuspectLabel(name, index, int(features.labels[row]), *values, image, text, file))
    return SuspectLabels(suspect_labels, len(rows), len(chosen), f"{about}.")


def choose_examples(splits: Mapping[str, Split], most: int) -> list[tuple[str, int]]:
    """The split and index of at most this many labeled examples, evenly spaced."""
    labels = {name: labels_of(split).cpu() for name, split in splits.items()}
    labeled = [(name, index) for name, some in labels.items() for index in (some >= 0).nonzero().flatten().tolist()]
    return [labeled[number] for number in evenly_spaced(len(labeled), most)]


def frozen_model(run: Run, place: Path) -> tuple[Model, str]:
    """The model that the run started from, else the trained one, which has seen the training labels."""
    model = folder.load(place).float()
    if run.init_from:
        try:
            transfer(model, open_start(run.init_from))
            return model, f"{run.init_from}, the frozen model that the run started from"
        except (UserError, OSError):
            pass
    return model, "the trained model, which may have learned wrong labels of the training split by heart"


def out_of_fold(features: Features, task: TaskModule) -> Tensor:
    """Class probabilities of every example by a classifier that was not fitted on it, n k.

    Copies of an example are in the same fold. The penalty is chosen on the first fold.
    """
    fold, penalties, probabilities = folds(features), HeadInit().l2, []
    order = []
    for number in fold.unique().tolist():
        rows, others = (fold == number).nonzero().flatten(), (fold != number).nonzero().flatten()
        held_out = features.take(rows)
        probe = fit_linear(features.take(others), held_out, penalties, class_weights_of(task))
        penalties = (probe.l2,)
        probabilities.append((held_out.values.double() @ probe.weight.T + probe.bias).softmax(1))
        order.append(rows)
    return torch.cat(probabilities)[torch.cat(order).argsort()]


def folds(features: Features) -> Tensor:
    """The fold of each example, stratified by class."""
    unique, group = features.values.unique(dim=0, return_inverse=True)
    if len(unique) < 2 * FOLDS:
        raise UserError(f"--suspect-labels needs at least {2 * FOLDS} different examples, not {len(unique)}")
    label = torch.zeros(len(unique), dtype=torch.int64).scatter_(0, group, features.labels)
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(0))
    order = order[label[order].argsort(stable=True)]
    fold = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) % FOLDS)
    return fold[group]


def suspects(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Likely class of each example with a suspect label; -1 for the others, n.

    Classes of fewer than FOLDS examples are left out.
    """
    counts = labels.bincount(minlength=probabilities.shape[1])
    best, suggested = probabilities.masked_fill(counts < FOLDS, 0).max(1)
    likely = best >= RATIO * probabilities[torch.arange(len(labels)), labels]
    return torch.where(likely & (counts[labels] >= FOLDS), suggested, -1)
