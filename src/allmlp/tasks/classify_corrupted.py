"""Image classification, evaluated on corrupted images as well."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from allmlp.data.augment import to_float
from allmlp.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from allmlp.data.dataset import ImageDataset, LabeledImages
from allmlp.data.sampler import Stream, mix_seed
from allmlp.device import sum_dtype
from allmlp.errors import lookup
from allmlp.models.model import Model
from allmlp.spec import Count
from allmlp.tasks.classify import Classify, ClassifyModule, evaluate_classifier
from allmlp.tasks.task import Sums, TaskModule


class ClassifyCorrupted(Classify):
    """Like `Classify`; evaluation also reports accuracy_KIND for every corruption, averaged over `severities`, and
    corrupted_accuracy, the mean over the corruptions (`data.corruptions`).
    """

    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[Count, ...] = SEVERITIES

    def check(self) -> None:
        for kind in self.corruptions:
            lookup(kind, CORRUPTIONS, "corruption")
        for severity in self.severities:
            lookup(str(severity), dict.fromkeys(map(str, SEVERITIES)), "severity")

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return ClassifyCorruptedModule(self, model, dataset)


class ClassifyCorruptedModule(ClassifyModule):
    def evaluate(self, model: Model, batches: Iterable[LabeledImages]) -> Sums:
        spec = self.spec
        assert isinstance(spec, ClassifyCorrupted)
        zero = torch.zeros((), dtype=sum_dtype(model.device), device=model.device)
        sums = dict.fromkeys(("accuracy", "loss", *(f"accuracy_{kind}" for kind in spec.corruptions)), (zero, zero))

        def add(name: str, metric: tuple[Tensor, Tensor]) -> None:
            sums[name] = (sums[name][0] + metric[0], sums[name][1] + metric[1])

        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        kinds, index = list(CORRUPTIONS), rank
        for images, labels in batches:
            plain = evaluate_classifier(model, self.normalize, [LabeledImages(images, labels)], self.keep)
            for name, metrics in plain.items():
                add(name, metrics)
            # Indices as in `eval_batches`, so that noise depends on the image, not on batches and processes.
            indices = range(index, index + size * len(images), size)
            for kind in spec.corruptions:
                for severity in spec.severities:
                    seeds = [mix_seed(Stream.CORRUPTION, one, kinds.index(kind), severity) for one in indices]
                    changed = corrupt(to_float(images), kind, severity, seeds)
                    metrics = evaluate_classifier(model, self.normalize, [LabeledImages(changed, labels)])
                    add(f"accuracy_{kind}", metrics["accuracy"])
            index += size * len(images)
        return sums

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        assert isinstance(self.spec, ClassifyCorrupted)
        corrupted = [means[f"accuracy_{kind}"] for kind in self.spec.corruptions]
        return {**means, "corrupted_accuracy": fmean(corrupted)} if corrupted else means
