"""Classification of sentences and sentence pairs: SST-2, MNLI, RTE and similar data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Dataset, InMemory, labels_of
from allmlp.data.labeled_text import LabeledTextBatch, LabeledTextDataset, join_pairs
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import Tokenizer
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead, PooledHead
from allmlp.layers.pool import FirstTokenPool, MeanPool, Pool
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate
from allmlp.tasks.classify import balanced_weights, majority_accuracy
from allmlp.tasks.masked_lm import configure_text_model, with_mask_padding
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule
from allmlp.tasks.tfidf import tfidf_correct


class ClassifyText(Task):
    """Softmax over the classes, from the pooled features: the mean, or the first token as in BERT.

        L = - log softmax(W pool(X) + b)_label

    mask_padding=False lets padding mix with the text, as in the papers. With `class_balance` the loss of an example is
    multiplied by the weight of its class, see `classify.balanced_weights`.
    """

    dataset_type: ClassVar[type[Dataset]] = LabeledTextDataset
    pool: Pool = MeanPool()
    dropout: Rate = 0.1
    label_smoothing: Rate = 0.0
    mask_padding: bool = True
    class_balance: Rate = 0.0
    """0 gives all examples the same weight, 1 all classes."""
    tfidf: bool = False
    """Also report the accuracy of TF-IDF with logistic regression; needs scikit-learn."""

    def configure_model(self, model: ModelSpec, dataset: LabeledTextDataset) -> ModelSpec:
        spec = configure_text_model(model, dataset.tokenizer, dataset.seq_len)
        return spec.replace(pool=self.pool, head=ClassifierHead(len(dataset.class_names), dropout=self.dropout))

    def build(self, model: Model, dataset: LabeledTextDataset) -> TaskModule:
        if dataset.unlabeled:
            raise UserError("unlabeled sentences need a teacher: use task=DistillClassifyText or unset data.unlabeled")
        return ClassifyTextModule(self, model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        return with_mask_padding(dataset.files(), self.mask_padding)

    def floors(self, dataset: LabeledTextDataset, split: InMemory) -> dict[str, float]:
        train, (_, _, labels, part) = labels_of(dataset.train), split.examples
        parts, prefixes = part.unique().tolist(), ["", *(f"{name}_" for name in dataset.test_names[1:])]
        baselines = {f"{prefixes[k]}majority": majority_accuracy(train, labels[part == k]) for k in parts}
        if self.tfidf:
            correct = tfidf_correct(dataset, split).double()
            baselines |= {f"{prefixes[k]}tfidf_accuracy": correct[part.cpu() == k].mean().item() for k in parts}
        return baselines


class ClassifyTextModule(TaskModule):
    unit = ("texts", 1)
    keeps_outputs = True
    class_weights: Tensor

    def __init__(self, spec: ClassifyText, model: Model, dataset: LabeledTextDataset) -> None:
        super().__init__()
        self.spec, self.model, self.split_names = spec, model, dataset.test_names
        self.tokenizer = dataset.tokenizer
        weights = balanced_weights(dataset, len(dataset.class_names), spec.class_balance)
        self.register_buffer("class_weights", weights, persistent=False)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        ids, segments, labels, _ = batch.examples
        return ids.long(), segments.long(), labels

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, segments, labels = inputs
        logits = self.logits(self.model, ids, segments)
        smoothing, balanced = self.spec.label_smoothing, self.spec.class_balance > 0
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none" if balanced else "mean")
        loss = (self.class_weights[labels] * loss).mean() if balanced else loss
        return Losses(loss, {"accuracy": (logits.argmax(1) == labels).float().mean()})

    def logits(self, model: Model, ids: Tensor, segments: Tensor) -> Tensor:
        return class_logits(model, ids, segments, ~self.tokenizer.padding(ids) if self.spec.mask_padding else None)

    def evaluate(self, model: Model, batches: Iterable[LabeledTextBatch]) -> Sums:
        names = ["accuracy", *(f"{name}_accuracy" for name in self.split_names[1:])]
        correct = torch.zeros(len(names), dtype=sum_dtype(model.device), device=model.device)
        count, loss_sum = torch.zeros_like(correct), torch.zeros_like(correct[0])
        for ids, segments, labels, part in batches:
            logits = self.logits(model, ids.long(), segments.long())
            correct.index_add_(0, part, (logits.argmax(1) == labels).to(count.dtype))
            count.index_add_(0, part, torch.ones_like(part, dtype=count.dtype))
            loss_sum += F.cross_entropy(logits, labels, reduction="sum")
            self.keep(logits, labels, part)
        return {**dict(zip(names, zip(correct, count))), "loss": (loss_sum, count.sum())}


def class_logits(model: Model, ids: Tensor, segments: Tensor, mask: Tensor | None) -> Tensor:
    """Logits, n k; segments are passed only to models that distinguish them."""
    options = {"segments": segments} if (model.spec.stem.segments or 0) > 1 else {}
    return model(ids, mask, **options).float()


def encode_pairs(
    model: Model, tokenizer: Tokenizer, texts: list[tuple[str, str]], mask_padding: bool = True
) -> tuple[Tensor, Tensor]:
    """Ids and segments of sentence pairs, n s, padded to the longest one, or to the model's length if padding is not
    masked; the second sentence may be empty. White space around a sentence is left out, as in training.
    """
    stripped = [(first.strip(), second.strip()) for first, second in texts]
    joined = join_pairs(stripped, tokenizer, model.spec.stem.tokens)
    ids, segments = (part.to(model.device).long() for part in joined)
    width = int((~tokenizer.padding(ids)).sum(1).max()) if mask_padding else ids.shape[1]
    return ids[:, :width], segments[:, :width]


def classify_texts(
    model: Model, tokenizer: Tokenizer, texts: list[tuple[str, str]], mask_padding: bool = True
) -> Tensor:
    """Class probabilities, n k, of sentence pairs; the second sentence may be empty."""
    spec = model.spec
    pooled = isinstance(spec, Encoder) and isinstance(spec.pool, (FirstTokenPool, MeanPool))
    if not pooled or not isinstance(spec.head, (ClassifierHead, PooledHead)):
        raise UserError("the model does not classify text")
    ids, segments = encode_pairs(model, tokenizer, texts, mask_padding)
    mask = ~tokenizer.padding(ids) if mask_padding else None
    with torch.inference_mode():
        return class_logits(model, ids, segments, mask).softmax(1)
