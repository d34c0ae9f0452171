"""Distillation of text classifiers: the loss against its equation, and a frozen teacher."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import allmlp
from allmlp import parallel
from allmlp import training as loop
from allmlp.data.labeled_text import LabeledText
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.head_init import HeadInit
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW, Sgd
from allmlp.run import Budget, Run
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.distill import distillation_loss
from allmlp.tasks.distill_classify_text import DistillClassifyText, DistillClassifyTextModule
from allmlp.tasks.task import StepContext
from allmlp.train_step import TrainStep

pytest.importorskip("tokenizers")
LENGTH = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> LabeledText:
    folder = tmp_path_factory.mktemp("reviews")
    rows = [
        f"the {thing} was {word}\t{k}" for thing in ("film", "book", "play") for word, k in (("good", 1), ("bad", 0))
    ]
    (folder / "reviews.tsv").write_text("sentence\tlabel\n" + "\n".join(rows))
    path = str(folder / "reviews.tsv")
    return LabeledText(path, path, tokenizer=TokenizerConfig(vocab_size=60), seq_len=LENGTH, cache=str(folder))


def run(data: LabeledText, task: Any, model: Any = gmlp_text(2, 16, 32), steps: int = 60) -> Run:
    return Run(
        model=model,
        task=task,
        data=data,
        batch_size=6,
        budget=Budget(steps=steps),
        optim=AdamW(lr=5e-3),
        log_every=steps,
        eval_every=steps,
        save_every=steps,
    )


@pytest.fixture(scope="module")
def teacher(data: LabeledText, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT trained on swapped labels, so that its predictions cannot come from the student's labels."""
    folder = tmp_path_factory.mktemp("teacher")
    text = Path(data.path).read_text().replace("\t1", "\tx").replace("\t0", "\t1").replace("\tx", "\t0")
    (folder / "swapped.tsv").write_text(text)
    swapped = data.replace(path=str(folder / "swapped.tsv"), test=str(folder / "swapped.tsv"))
    result = loop.train(run(swapped, ClassifyText(dropout=0.0), bert(2, 24, 2)), folder / "run", "cpu")
    assert result["accuracy"] == 1
    return folder / "run"


@pytest.mark.slow
def test_student_follows_the_teacher_with_alpha_1_and_the_labels_with_alpha_0(
    data: LabeledText, teacher: Path, tmp_path: Path
) -> None:
    task = DistillClassifyText(str(teacher), ClassifyText(dropout=0.0), alpha=1.0)
    assert loop.train(run(data, task), tmp_path / "teacher", "cpu")["accuracy"] == 0
    assert loop.train(run(data, task.replace(alpha=0.0)), tmp_path / "labels", "cpu")["accuracy"] == 1


@pytest.mark.parametrize("distillation_type", ["hard", "soft"])
def test_loss_matches_its_equation(distillation_type: Any, data: LabeledText, teacher: Path) -> None:
    dataset = data.load()
    classify = ClassifyText(dropout=0.0, label_smoothing=0.2)
    spec = DistillClassifyText(str(teacher), classify, distillation_type, alpha=0.3, temperature=3.0)
    model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset), seed=1)
    module = spec.build(model, dataset)
    assert isinstance(module, DistillClassifyTextModule)
    ids, segments, labels, _ = dataset.train.fetch(torch.arange(6))
    ids, segments = ids.long(), segments.long()
    z = model(ids, ids != dataset.tokenizer.pad_token_id).double()
    y = allmlp.load(teacher)(ids, ids != dataset.tokenizer.pad_token_id, segments=segments).double()
    rows = torch.arange(6)
    if distillation_type == "hard":
        wanted = -z.log_softmax(1)[rows, y.argmax(1)].mean()
    else:
        p, q = (y / 3).softmax(1), (z / 3).softmax(1)
        wanted = 9 * (p * (p / q).log()).sum(1).mean()
    smoothed = 0.8 * z.log_softmax(1)[rows, labels] + 0.2 * z.log_softmax(1).mean(1)
    wanted = 0.7 * -smoothed.mean() + 0.3 * wanted
    assert float(module.compute_loss(ids, segments, labels).total.detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-5
    )


def test_a_teacher_that_was_trained_to_read_padding_reads_it(data: LabeledText, teacher: Path, tmp_path: Path) -> None:
    reads_padding = shutil.copytree(teacher, tmp_path / "teacher")
    known = read_preprocessing(reads_padding)
    assert isinstance(known, TextPreprocessing)
    write_preprocessing(reads_padding, known.replace(mask_padding=False))
    dataset, spec = data.load(), DistillClassifyText(str(reads_padding), ClassifyText(dropout=0.0), alpha=1.0)
    model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset), seed=1)
    ids, segments, labels, _ = dataset.train.fetch(torch.arange(6))
    ids, segments = ids.long(), segments.long()
    module = spec.build(model, dataset)
    y = allmlp.load(teacher)(ids, segments=segments)
    z = model(ids, ids != dataset.tokenizer.pad_token_id)
    wanted = distillation_loss(z, y, "soft", spec.temperature)
    found = module.compute_loss(ids, segments, labels).total
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    shorter = data.replace(seq_len=LENGTH - 1).load()
    with pytest.raises(allmlp.UserError, match="reads 12 tokens, padding included, the rows have 11"):
        spec.build(model, shorter)


def test_unlabeled_sentences_have_the_loss_of_the_teacher_only(
    data: LabeledText, teacher: Path, tmp_path: Path
) -> None:
    """Also in a batch without any label."""
    (tmp_path / "more.txt").write_text("the film was bad\nthe play was good\n")
    dataset = data.replace(unlabeled=str(tmp_path / "more.txt")).load()
    spec = DistillClassifyText(str(teacher), ClassifyText(dropout=0.0), alpha=0.3)
    model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset), seed=1)

    def loss(rows: list[int], alpha: float) -> float:
        module = spec.replace(alpha=alpha).build(model, dataset)
        ids, segments, labels, _ = dataset.train.fetch(torch.tensor(rows))
        return float(module.compute_loss(ids.long(), segments.long(), labels).total.detach())

    assert loss([6, 7], 0.3) == pytest.approx(0.3 * loss([6, 7], 1.0)) and loss([6, 7], 0.0) == 0
    assert loss([0, 1, 6], 0.3) == pytest.approx(0.7 * loss([0, 1], 0.0) + 0.3 * loss([0, 1, 6], 1.0), rel=1e-5)
    with pytest.raises(allmlp.UserError, match="need a teacher"):
        ClassifyText().build(model, dataset)
    evaluated = spec.build_evaluator(model, dataset).evaluate(model, [dataset.test.fetch(torch.arange(6))])
    assert evaluated["accuracy"][1] == 6


def test_labels_of_micro_batches_and_processes_have_equal_weights(
    data: LabeledText, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of the sentences beside them have none; in the last process, no sentence has one."""
    (tmp_path / "more.txt").write_text("the film was bad\nthe play was good\nthe book was good\n")
    dataset = data.replace(unlabeled=str(tmp_path / "more.txt")).load()
    spec = DistillClassifyText(str(teacher), ClassifyText(dropout=0.0), alpha=0.3)
    model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset), seed=1)
    module = spec.build(model, dataset).eval()

    def gradient(rows: list[int], parts: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
        module.zero_grad()
        indices = torch.tensor(rows)
        context = StepContext(0.5, torch.Generator(), rank, size)
        batches = module.prepare_batches(Batch(0, 0.0, indices, dataset.train.fetch(indices)).split(parts), context)
        step = TrainStep(module, Sgd().build(module), parallel.World(rank, size, torch.device("cpu")))
        losses = step.backward(batches)
        gradients = torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])
        return gradients, torch.stack([losses.total, *losses.metrics.values()])

    rows = [0, 1, 2, 6, 7, 8]
    for found, expected in zip(gradient(rows, 3), gradient(rows, 1), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.fill_(1.0))  # the fractions of both: 1 and 0
    halves = [gradient(rows[:3], 1, 0, 2), gradient(rows[3:], 1, 1, 2)]
    monkeypatch.undo()
    for found, expected in zip(map(torch.stack, zip(*halves)), gradient(rows, 1), strict=True):
        torch.testing.assert_close(found.mean(0), expected, rtol=1e-4, atol=1e-6)


def test_the_head_is_fitted_on_the_labeled_sentences(data: LabeledText, teacher: Path, tmp_path: Path) -> None:
    """As it would be without the others, which come last."""
    (tmp_path / "more.txt").write_text("the film was bad\nthe play was good\n")
    spec = DistillClassifyText(str(teacher), ClassifyText(dropout=0.0))
    fitted = []
    for dataset in (data.load(), data.replace(unlabeled=str(tmp_path / "more.txt")).load()):
        model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset), seed=1)
        fitted.append(HeadInit().initialize(model, spec.build(model, dataset), dataset, seed=0).weight)
    torch.testing.assert_close(fitted[1], fitted[0])


def test_teacher_is_neither_trained_nor_saved(data: LabeledText, teacher: Path) -> None:
    dataset = data.load()
    spec = DistillClassifyText(str(teacher))
    model = allmlp.create(spec.configure_model(gmlp_text(2, 16, 32), dataset))
    module = spec.build(model, dataset)
    assert {id(weight) for weight in module.parameters()} == {id(weight) for weight in model.parameters()}
    assert set(module.state_dict()) == {f"model.{name}" for name in model.state_dict()}


def test_unsuitable_teachers_are_refused(data: LabeledText, teacher: Path, tmp_path: Path) -> None:
    dataset = data.load()
    model = allmlp.create(ClassifyText().configure_model(gmlp_text(2, 16, 32), dataset))
    longer = data.replace(seq_len=40, tokenizer=TokenizerConfig(path=str(teacher))).load()
    with pytest.raises(allmlp.UserError, match=r"reads 12 tokens, the rows have 40: set data\.seq_len=12"):
        DistillClassifyText(str(teacher)).build(model, longer)
    with pytest.raises(allmlp.UserError, match=r"is not a model folder"):
        DistillClassifyText(str(tmp_path)).build(model, dataset)
    (tmp_path / "other.tsv").write_text("sentence\tlabel\nthe film was good\tyes\nthe book was bad\tno\n")
    other = data.replace(path=str(tmp_path / "other.tsv"), test=str(tmp_path / "other.tsv")).load()
    with pytest.raises(allmlp.UserError, match="has the classes 0, 1, the data have no, yes"):
        DistillClassifyText(str(teacher)).build(model, other)
