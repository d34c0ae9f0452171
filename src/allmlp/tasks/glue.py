"""Classification of sentences and of pairs of sentences: SST-2, MNLI, RTE and the like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.order import Step
from allmlp.data.sentences import Labelled, LabelledSentences, join
from allmlp.data.source import Splits
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.head import Classes
from allmlp.layers.pool import First, Mean, Pool
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate
from allmlp.tasks.mlm import fit_text
from allmlp.tasks.task import Losses, Moment, Task, TaskModule


class ClassifyText(Task):
    """Softmax over the classes of one vector per text: the first token's, as BERT, or the mean of all.

        L = - log softmax(W pool(X) + b)_label

    Padding is hidden from the model unless `mask_padding` is off, which is the papers' way.
    """

    reads: ClassVar[type[Splits]] = LabelledSentences
    pool: Pool = Mean()
    dropout: Rate = 0.1
    smoothing: Rate = 0.0
    mask_padding: bool = True

    def fit(self, model: ModelSpec, dataset: LabelledSentences) -> ModelSpec:
        spec = fit_text(model, dataset.tokenizer, dataset.length)
        return spec.replace(pool=self.pool, head=Classes(len(dataset.classes), dropout=self.dropout))

    def build(self, model: Model, dataset: LabelledSentences) -> TaskModule:
        if dataset.unlabelled:
            raise UserError("sentences without labels need a teacher, task=DistillSentences: leave data.unlabelled out")
        return ClassifyTextModule(self, model, dataset)


class ClassifyTextModule(TaskModule):
    def __init__(self, spec: ClassifyText, model: Model, dataset: LabelledSentences) -> None:
        super().__init__()
        self.spec, self.model, self.parts = spec, model, dataset.parts
        self.pad = dataset.tokenizer.pad

    @property
    def unit(self) -> tuple[str, int]:
        return "texts", 1

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        ids, segments, labels, _ = step.batch
        return ids.long(), segments.long(), labels

    def learn(self, *inputs: Tensor) -> Losses:
        ids, segments, labels = inputs
        logits = self.scores(self.model, ids, segments)
        right = (logits.argmax(1) == labels).float().mean()
        return Losses(F.cross_entropy(logits, labels, label_smoothing=self.spec.smoothing), {"accuracy": right})

    def scores(self, model: Model, ids: Tensor, segments: Tensor) -> Tensor:
        mask = (ids != self.pad) if self.spec.mask_padding else None
        return classify(model, ids, segments, mask)

    def evaluate(self, model: Model, batches: Iterable[Labelled]) -> dict[str, tuple[Tensor, Tensor]]:
        names = ["accuracy", *(f"{name}_accuracy" for name in self.parts[1:])]
        right = torch.zeros(len(names), dtype=torch.float64, device=model.device)
        seen, wrong = torch.zeros_like(right), torch.zeros((), dtype=torch.float64, device=model.device)
        for ids, segments, labels, part in batches:
            logits = self.scores(model, ids.long(), segments.long())
            right.index_add_(0, part, (logits.argmax(1) == labels).double())
            seen.index_add_(0, part, torch.ones_like(part).double())
            wrong += F.cross_entropy(logits, labels, reduction="sum")
        return {**dict(zip(names, zip(right, seen))), "loss": (wrong, seen.sum())}


def classify(model: Model, ids: Tensor, segments: Tensor, mask: Tensor | None) -> Tensor:
    stem = model.spec.stem
    if stem.segments:
        return model(ids, mask, segments=segments).float()
    return model(ids, mask).float()


def label(model: Model, tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> Tensor:
    """Probabilities of the classes, n k, for sentences or pairs of them (the second may be empty)."""
    spec = model.spec
    if not isinstance(spec, Encoder) or not isinstance(spec.head, Classes) or not isinstance(spec.pool, (First, Mean)):
        raise UserError("the model does not classify text")
    firsts, seconds = (tokenizer.encode([pair[side] for pair in texts]) for side in (0, 1))
    rows = [join(a, b, tokenizer, spec.stem.tokens) for a, b in zip(firsts, seconds)]
    ids, segments = (torch.tensor([row[side] for row in rows], device=model.device) for side in (0, 1))
    with torch.inference_mode():
        return classify(model, ids, segments, ids != tokenizer.pad).softmax(1)
