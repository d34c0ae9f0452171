"""The simple baseline of text classification: TF-IDF and logistic regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import InMemory
from allmlp.data.labeled_text import LabeledTextBatch, LabeledTextDataset
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import require


def tfidf_correct(dataset: LabeledTextDataset, split: InMemory) -> Tensor:
    """Whether the baseline, fitted on the training split, classifies each example of `split` correctly: bool, n.

    Features are words and word pairs with logarithmic counts, separate for the two texts of a pair. Like the model, the
    baseline reads texts truncated to the model's length.
    """
    text = require("sklearn.feature_extraction.text", "train")
    linear = require("sklearn.linear_model", "train")
    sparse = require("scipy.sparse", "train")
    train = dataset.train.examples  # type: ignore[attr-defined]
    labeled = (train.labels >= 0).nonzero().flatten()
    train_texts = read_texts(LabeledTextBatch(*(column[labeled] for column in train)), dataset.tokenizer)
    test_texts = read_texts(split.examples, dataset.tokenizer)
    columns: list[tuple[Any, Any]] = []
    for fitted, tested in zip(train_texts, test_texts):
        if any(fitted):
            # Any run of letters or digits is a word: sklearn's own pattern drops words of one character.
            words = text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
            columns.append((words.fit_transform(fitted), words.transform(tested)))
    inputs, tests = (sparse.hstack(parts).tocsr() for parts in zip(*columns))
    model = linear.LogisticRegression(C=10, max_iter=1000)
    model.fit(inputs, train.labels[labeled].cpu().numpy())
    return torch.from_numpy(np.equal(model.predict(tests), split.examples.labels.cpu().numpy()))


def read_texts(batch: LabeledTextBatch, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """First and second text of each example; the second is empty if there is none."""
    segments = batch.segments.cpu().bool()
    ids = batch.ids.cpu()
    sides = (ids.masked_fill(hidden, tokenizer.pad_token_id).tolist() for hidden in (segments, ~segments))
    first, second = (tokenizer.tokenizer.decode_batch(rows, skip_special_tokens=True) for rows in sides)
    return first, second
