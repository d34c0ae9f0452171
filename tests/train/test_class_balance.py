"""Class weights in the loss of images and texts, and the simple baseline of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from allmlp.data.labeled_text import LabeledText, LabeledTextDataset
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.models.gmlp import gmlp_text
from allmlp.models.zoo import create
from allmlp.tasks.classify import cross_entropy
from allmlp.tasks.classify_text import ClassifyText, ClassifyTextModule
from allmlp.tasks.tfidf import read_texts, tfidf_correct

WORDS = {"good": ("fine", "nice"), "bad": ("dull", "poor")}


@pytest.fixture
def data(tmp_path: Path) -> LabeledTextDataset:
    """Four times as many good as bad sentences, with a second one that tells nothing."""
    pytest.importorskip("tokenizers")
    rows = [
        f"it was {WORDS[mood][k % 2]} {k}\twe saw {k}\t{mood}"
        for mood, n in (("good", 40), ("bad", 10))
        for k in range(n)
    ]
    (tmp_path / "a.tsv").write_text("\n".join(["sentence1\tsentence2\tlabel", *rows]))
    tokenizer = TokenizerConfig(vocab_size=200)
    return LabeledText(str(tmp_path / "a.tsv"), tokenizer=tokenizer, seq_len=24, cache=str(tmp_path)).load()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_of_an_example_is_multiplied_by_its_weight(loss: str) -> None:
    logits, targets = torch.randn(5, 3), torch.rand(5, 3).softmax(1)
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])
    alone = torch.stack([cross_entropy(logits[k : k + 1], targets[k : k + 1], loss) for k in range(5)])
    torch.testing.assert_close(cross_entropy(logits, targets, loss, weights), (weights * alone).mean())
    torch.testing.assert_close(
        cross_entropy(logits, targets, loss, torch.ones(5)), cross_entropy(logits, targets, loss)
    )


def test_classes_of_texts_weigh_alike_with_class_balance_1(data: LabeledTextDataset) -> None:
    task = ClassifyText(class_balance=1.0, dropout=0.0)
    model = create(task.configure_model(gmlp_text(1, 8, 16, seq_len=24), data), seed=0)
    module = task.build(model, data)
    assert isinstance(module, ClassifyTextModule)
    ids, segments, labels, _ = data.train.fetch(torch.arange(len(data.train)))
    losses = F.cross_entropy(module.logits(model, ids.long(), segments.long()), labels, reduction="none")
    found = module.compute_loss(ids.long(), segments.long(), labels).total
    means = [losses[labels == label].mean() for label in range(2)]
    torch.testing.assert_close(found, torch.stack(means).mean())
    assert abs(found - losses.mean()) > 1e-4


def test_tfidf_reads_both_texts_and_is_a_floor(data: LabeledTextDataset) -> None:
    pytest.importorskip("sklearn")
    first, second = read_texts(data.test.examples, data.tokenizer)  # type: ignore[attr-defined]
    assert all(text.startswith("it was") and "saw" not in text for text in first)
    assert all(text.startswith("we saw") for text in second)
    assert tfidf_correct(data, data.test).all()  # type: ignore[arg-type]
    floors = ClassifyText(tfidf=True).floors(data, data.test)  # type: ignore[arg-type]
    assert floors["tfidf_accuracy"] == 1.0 > floors["majority"]
    # it learns from the training split: with its labels exchanged, everything is wrong
    train = data.train.examples  # type: ignore[attr-defined]
    wrong = replace(data, train=type(data.train)(*train._replace(labels=1 - train.labels), batch_type=type(train)))  # type: ignore[call-arg]
    assert not tfidf_correct(wrong, data.test).any()  # type: ignore[arg-type]
