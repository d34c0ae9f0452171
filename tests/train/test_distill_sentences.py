"""A classifier of sentences that learns from another one: the loss as written, and a teacher that is only asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import train as loop
from allmlp.data.sentences import Sentences
from allmlp.data.tokenizer import Tokenize
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.tasks.distill_sentences import DistillSentences, DistillSentencesModule
from allmlp.tasks.glue import ClassifyText

pytest.importorskip("tokenizers")
LENGTH = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sentences:
    folder = tmp_path_factory.mktemp("reviews")
    rows = [
        f"the {thing} was {word}\t{k}" for thing in ("film", "book", "play") for word, k in (("good", 1), ("bad", 0))
    ]
    (folder / "reviews.tsv").write_text("sentence\tlabel\n" + "\n".join(rows))
    path = str(folder / "reviews.tsv")
    return Sentences(path, path, tokenize=Tokenize(vocabulary=60), length=LENGTH, cache=str(folder))


def run(data: Sentences, task: Any, model: Any = gmlp_text(2, 16, 32), steps: int = 60) -> Run:
    return Run(
        model=model,
        task=task,
        data=data,
        batch=6,
        budget=Budget(steps=steps),
        optim=AdamW(lr=5e-3),
        cadence=Cadence(log=steps, evaluate=steps, save=steps),
    )


@pytest.fixture(scope="module")
def teacher(data: Sentences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that has learnt the reviews with their labels turned round: what it says cannot come from the labels."""
    folder = tmp_path_factory.mktemp("teacher")
    text = Path(data.path).read_text().replace("\t1", "\tx").replace("\t0", "\t1").replace("\tx", "\t0")
    (folder / "turned.tsv").write_text(text)
    turned = data.replace(path=str(folder / "turned.tsv"), test=str(folder / "turned.tsv"))
    result = loop.train(run(turned, ClassifyText(dropout=0.0), bert(2, 24, 2)), folder / "run", "cpu")
    assert result["accuracy"] == 1
    return folder / "run"


def test_the_student_takes_the_teachers_word(data: Sentences, teacher: Path, tmp_path: Path) -> None:
    taught = DistillSentences(str(teacher), ClassifyText(dropout=0.0), share=1.0)
    assert loop.train(run(data, taught), tmp_path / "taught", "cpu")["accuracy"] == 0
    assert loop.train(run(data, taught.replace(share=0.0)), tmp_path / "labels", "cpu")["accuracy"] == 1


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_the_loss_is_the_equation(form: Any, data: Sentences, teacher: Path) -> None:
    dataset = data.open()
    spec = DistillSentences(str(teacher), ClassifyText(dropout=0.0), form, share=0.3, temperature=3.0)
    model = allmlp.create(spec.fit(gmlp_text(2, 16, 32), dataset), seed=1)
    module = spec.build(model, dataset)
    assert isinstance(module, DistillSentencesModule)
    ids, segments, labels, _ = dataset.train.fetch(torch.arange(6))
    ids, segments = ids.long(), segments.long()
    z = model(ids, ids != dataset.tokenizer.pad).double()
    y = allmlp.load(teacher)(ids, ids != dataset.tokenizer.pad, segments=segments).double()
    rows = torch.arange(6)
    if form == "hard":
        wanted = -z.log_softmax(1)[rows, y.argmax(1)].mean()
    else:
        p, q = (y / 3).softmax(1), (z / 3).softmax(1)
        wanted = 9 * (p * (p / q).log()).sum(1).mean()
    wanted = 0.7 * -z.log_softmax(1)[rows, labels].mean() + 0.3 * wanted
    assert float(module.learn(ids, segments, labels).total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_sentences_without_labels_are_learnt_from_the_teacher_alone(
    data: Sentences, teacher: Path, tmp_path: Path
) -> None:
    """A row without a label has the teacher's part of the loss and no other; a batch of such rows is a number too."""
    (tmp_path / "more.txt").write_text("the film was bad\nthe play was good\n")
    dataset = data.replace(unlabelled=str(tmp_path / "more.txt")).open()
    spec = DistillSentences(str(teacher), ClassifyText(dropout=0.0), share=0.3)
    model = allmlp.create(spec.fit(gmlp_text(2, 16, 32), dataset), seed=1)

    def loss(rows: list[int], share: float) -> float:
        taught = spec.replace(share=share).build(model, dataset)
        ids, segments, labels, _ = dataset.train.fetch(torch.tensor(rows))
        return float(taught.learn(ids.long(), segments.long(), labels).total.detach())

    assert loss([6, 7], 0.3) == pytest.approx(0.3 * loss([6, 7], 1.0)) and loss([6, 7], 0.0) == 0
    assert loss([0, 1, 6], 0.3) == pytest.approx(0.7 * loss([0, 1], 0.0) + 0.3 * loss([0, 1, 6], 1.0), rel=1e-5)
    with pytest.raises(allmlp.UserError, match="need a teacher"):
        ClassifyText().build(model, dataset)


def test_the_teacher_is_never_learnt_or_saved(data: Sentences, teacher: Path) -> None:
    dataset = data.open()
    spec = DistillSentences(str(teacher))
    model = allmlp.create(spec.fit(gmlp_text(2, 16, 32), dataset))
    module = spec.build(model, dataset)
    assert {id(weight) for weight in module.parameters()} == {id(weight) for weight in model.parameters()}
    assert set(module.state_dict()) == {f"model.{name}" for name in model.state_dict()}


def test_a_teacher_that_does_not_fit_is_refused(data: Sentences, teacher: Path, tmp_path: Path) -> None:
    dataset = data.open()
    model = allmlp.create(ClassifyText().fit(gmlp_text(2, 16, 32), dataset))
    longer = data.replace(length=40, tokenize=Tokenize(path=str(teacher))).open()
    with pytest.raises(allmlp.UserError, match=r"reads 12 tokens, the rows have 40; set data\.length=12"):
        DistillSentences(str(teacher)).build(model, longer)
    with pytest.raises(allmlp.UserError, match=r"has no inputs\.json"):
        DistillSentences(str(tmp_path)).build(model, dataset)
    (tmp_path / "other.tsv").write_text("sentence\tlabel\nthe film was good\tyes\nthe book was bad\tno\n")
    other = data.replace(path=str(tmp_path / "other.tsv"), test=str(tmp_path / "other.tsv")).open()
    with pytest.raises(allmlp.UserError, match="knows the classes 0, 1, the data have no, yes"):
        DistillSentences(str(teacher)).build(model, other)
