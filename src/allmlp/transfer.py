"""Linear probes of one model on several datasets with few labels, after VTAB (Zhai et al. 2019).

The encoder is frozen. Logistic regression on its features is fitted on `examples` labeled images of each dataset,
balanced over the classes; a fifth of them chooses the L2 penalty, then all of them fit the classifier. It is tested on
the whole test split. VTAB-1k has 1,000 examples of 19 datasets and fine-tunes the model: its numbers differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allmlp.data.dataset import ImageDataset, Split
from allmlp.data.detect import NAMED, detect_data
from allmlp.errors import UserError
from allmlp.head_init import Features, HeadInit, fit_holding_out, sample_classes
from allmlp.labeled_inputs import fit
from allmlp.prediction import ImagePredictor, open_predictor
from allmlp.threads import Threads


@dataclass(frozen=True)
class ProbeResult:
    data: str
    classes: int
    train_examples: int
    test_examples: int
    accuracies: tuple[float, ...]
    """One per seed, which chooses the training examples."""
    majority: float
    """The fraction of the most frequent class of the test split."""

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "accuracy": self.accuracy}


def probe_datasets(
    model: str,
    places: Sequence[str] = (),
    *,
    examples: int = 1000,
    seeds: int = 1,
    device: str | None = None,
    batch_size: int = 64,
    missing: Callable[[str], object] = lambda reason: None,
    progress: Callable[[str], object] = lambda data: None,
) -> list[ProbeResult]:
    """Probe `model` on each of `places`, as for `allmlp eval`; by default on all available datasets of `NAMED`.

    `missing` is called with the reason for each unavailable one.
    """
    predictor = open_predictor(model, device=device)
    if not isinstance(predictor, ImagePredictor):
        raise UserError(f"{model} reads texts: probes on several datasets are for image models")
    results = []
    for place in places or NAMED:
        progress(place)
        try:
            dataset = load_images(place, predictor)
        except UserError as reason:
            if places:
                raise
            missing(f"{place}: {reason}")
            continue
        results.append(probe_dataset(place, dataset, predictor, examples, seeds, batch_size))
    if not results:
        raise UserError(f"none of {', '.join(NAMED)} is here: set ALLMLP_DATA, or name data after the model")
    return results


def load_images(place: str, predictor: ImagePredictor) -> ImageDataset:
    data = detect_data(place)
    if hasattr(data, "decode"):
        data = data.replace(img_size=predictor.img_size, decode=predictor.decoding)
    dataset = data.load()
    if not isinstance(dataset, ImageDataset) or not dataset.class_names:
        raise UserError(f"{place} has no labeled images")
    return dataset


def probe_dataset(
    name: str, dataset: ImageDataset, predictor: ImagePredictor, examples: int, seeds: int, batch_size: int
) -> ProbeResult:
    test, accuracies, used = embed_split(predictor, dataset.test, batch_size), [], 0
    for seed in range(seeds):
        chosen = sample_classes(dataset.train, examples, seed)
        train = embed_split(predictor, chosen, batch_size)
        weights = torch.ones(len(dataset.class_names), dtype=torch.float64)
        probe = fit_holding_out(train, HeadInit().l2, weights, seed)
        predicted = (test.values.double() @ probe.weight.T + probe.bias).argmax(1)
        accuracies.append(float((predicted == test.labels).double().mean()))
        used = len(chosen)
    majority = float(test.labels.bincount().max()) / len(test.labels)
    return ProbeResult(name, len(dataset.class_names), used, len(test.labels), tuple(accuracies), majority)


def embed_split(predictor: ImagePredictor, split: Split, batch_size: int) -> Features:
    threads, features, labels = Threads(active=predictor.device.type == "cpu"), [], []
    for indices in torch.arange(len(split)).split(batch_size):
        batch = split.fetch(indices)  # with the labels of the images that replace corrupt ones
        ready = fit(batch.images, predictor.img_size, predictor.decoding.crop_pct, predictor.decoding.channels)
        with threads:
            features.append(predictor.embed(list(ready)).cpu())
        labels.append(batch.labels.cpu())
    return Features(torch.cat(features), torch.cat(labels))
