"""A language model that learns from a teacher: the loss as written, and a teacher that is only asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp import train as loop
from allmlp.data.corpus import Corpus, Texts
from allmlp.data.tokenizer import Tokenize
from allmlp.layers import Classes, Mean
from allmlp.models.cost import measure
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import Model
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.tasks.distill_text import DistillText, DistillTextModule, distance
from allmlp.tasks.mlm import MaskedLm, Masking
from allmlp.weights.bert import load_bert, word_embeddings
from train.runs import small
from train.test_train import losses, same_weights

pytest.importorskip("tokenizers")
LENGTH, STUDENT = 12, gmlp_text(2, 16, 32)
MASKED = MaskedLm(Masking(0.3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Rows of one document each, so that some are padded."""
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = [f"sheep number {number} jumps over the fence" + " again" * (number % 7) for number in range(60)]
    (folder / "train.txt").write_text("\n\n".join(paragraphs))
    (folder / "test.txt").write_text("sheep jumps again\n\nover the fence")
    return Corpus(
        str(folder / "train.txt"),
        str(folder / "test.txt"),
        Tokenize(vocabulary=100),
        LENGTH,
        mix=False,
        cache=str(folder / "cache"),
    )


@pytest.fixture(scope="module")
def texts(data: Corpus) -> Texts:
    return data.open()


@pytest.fixture(scope="module")
def teacher(texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT as transformers saves it, of another width and length."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("teacher")
    config = transformers.BertConfig(
        vocab_size=len(texts.tokenizer),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=20,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(texts.tokenizer.to_json())
    return folder


def run(data: Corpus, task: Any, **changes: Any) -> Run:
    plain = Run(
        model=STUDENT,
        task=task,
        data=data,
        batch=8,
        budget=Budget(steps=8),
        optim=AdamW(lr=1e-2),
        clip=1.0,
        ema=0.9,
        cadence=Cadence(log=1, evaluate=8, save=3),
    )
    return plain.replace(**changes)


def student(texts: Texts) -> Model:
    return allmlp.create(MASKED.fit(STUDENT, texts), seed=0)


def module(task: DistillText, texts: Texts) -> DistillTextModule:
    torch.manual_seed(1)
    built = task.build(student(texts), texts)
    assert isinstance(built, DistillTextModule)
    return built


def batch(texts: Texts) -> tuple[Tensor, Tensor]:
    ids = texts.train.fetch(torch.arange(12)).ids.long()
    assert (ids == texts.tokenizer.pad).any()
    return ids, torch.rand(12, MASKED.masking.numbers(LENGTH), generator=torch.Generator().manual_seed(0))


def test_the_loss_is_as_written(texts: Texts, teacher: Path) -> None:
    task, (ids, draws) = module(DistillText(str(teacher), MASKED, share=0.3), texts), batch(texts)
    found = task.learn(ids, draws)
    labelled = MASKED.build(task.model, texts).learn(ids, draws)
    inputs = MASKED.masking.apply(ids, draws, task.tables).inputs
    asked, cosines = load_bert(teacher), []
    for row, masked in zip(ids, inputs):
        length = int((row != texts.tokenizer.pad).sum())
        features = task.model.forward_features(masked[None, :length])[0]
        for x, t in zip(features @ task.project.weight.T, asked.forward_features(row[None, :length])[0]):
            cosines.append(x @ t / (x.norm() * t.norm()))
    expected = 0.7 * labelled.total + 0.3 * (1 - torch.stack(cosines)).mean()
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(found.shown["masked"], labelled.total)
    torch.testing.assert_close(found.shown["accuracy"], labelled.shown["accuracy"])
    torch.testing.assert_close(found.shown["agreement"], torch.stack(cosines).mean())


def test_distance_knows_only_real_positions() -> None:
    x, real = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    noise = torch.where(real[..., None], 0.0, torch.randn(2, 3, 4))
    assert distance(2 * x, x + noise, real).item() == pytest.approx(0.0, abs=1e-6)
    assert distance(-x, x + noise, real).item() == pytest.approx(2.0, abs=1e-6)


def test_without_a_share_it_is_masked_language_modelling(texts: Texts, teacher: Path) -> None:
    ids, draws = batch(texts)
    expected = MASKED.build(student(texts), texts).learn(ids, draws)
    for name in ("", str(teacher)):
        found = DistillText(name, MASKED, share=0.0).build(student(texts), texts).learn(ids, draws)
        assert torch.equal(found.total, expected.total) and torch.equal(
            *(x.shown["accuracy"] for x in (found, expected))
        )


def test_gradients_reach_the_student_and_the_map_alone(texts: Texts, teacher: Path) -> None:
    task = module(DistillText(str(teacher), MASKED, share=1.0), texts)
    task.train().learn(*batch(texts)).total.backward()
    idle = [name for name, weight in task.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not idle, idle
    asked = list(task.teacher.model.parameters())
    assert not any(weight.requires_grad or weight.grad is not None for weight in asked)
    assert {name.partition(".")[0] for name in task.state_dict()} == {"model", "project"}
    assert not task.teacher.model.training


def test_the_cost_has_the_teacher_in_it(texts: Texts, teacher: Path) -> None:
    task = module(DistillText(str(teacher), MASKED), texts)
    alone = MASKED.build(task.model, texts).flops
    reading = load_bert(teacher).spec.replace(head=None).configure(length=LENGTH)
    assert task.flops == alone + 2 * measure(reading).macs + 6 * LENGTH * 16 * 24


def test_it_compiles_as_one_graph(texts: Texts, teacher: Path) -> None:
    task = module(DistillText(str(teacher), MASKED), texts)
    inputs = batch(texts)
    compiled = torch.compile(task.learn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs).total, task.learn(*inputs).total)


def test_it_goes_on_after_a_break_and_is_judged_without_the_teacher(
    data: Corpus, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = run(data, DistillText(str(teacher), MASKED, embeddings=str(teacher)))
    loop.train(plan, tmp_path / "whole", "cpu")
    original = loop.backward

    def dies(run: Any, world: Any, wrapped: Any, example: Any, moment: Any) -> Any:
        if example.number == 4:
            raise RuntimeError("the process dies here")
        return original(run, world, wrapped, example, moment)

    monkeypatch.setattr(loop, "backward", dies)
    with pytest.raises(RuntimeError, match="dies here"):
        loop.train(plan, tmp_path / "cut", "cpu")
    monkeypatch.setattr(loop, "backward", original)
    before = loop.train(plan, tmp_path / "cut", "cpu")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    monkeypatch.setattr("allmlp.tasks.distill_text.TextTeacher", None)
    monkeypatch.setattr("allmlp.tasks.distill_text.start_embeddings", None)
    assert loop.judge_again(tmp_path / "cut", "cpu") == before


def test_a_student_comes_closer_to_one_of_our_own_models(data: Corpus, tmp_path: Path) -> None:
    wide = gmlp_text(2, 24, 32)
    loop.train(run(data, MASKED, model=wide), tmp_path / "teacher", "cpu")
    task = DistillText(str(tmp_path / "teacher"), MASKED, share=1.0)
    loop.train(run(data, task, budget=Budget(steps=40), ema=None), tmp_path / "student", "cpu")
    found = losses(tmp_path / "student")
    assert found[40] < 0.5 * found[1]


def test_embeddings_alone(texts: Texts, teacher: Path) -> None:
    model = allmlp.create(MASKED.fit(gmlp_text(1, 24, 16), texts), seed=0)
    DistillText("", MASKED, share=0.0, embeddings=str(teacher)).build(model, texts)
    assert torch.equal(model.table, word_embeddings(teacher))


# --- what does not fit ----------------------------------------------------------------------------------------


def test_teachers_that_do_not_fit(texts: Texts, teacher: Path, tmp_path: Path) -> None:
    def learn_from(place: Path, message: str, rows: Texts = texts) -> None:
        with pytest.raises(allmlp.UserError, match=message) as caught:
            DistillText(str(place)).build(student(texts), rows)
        assert "\n" not in str(caught.value)

    def keep(name: str, model: Any) -> Path:
        allmlp.save(allmlp.create(model), tmp_path / name)
        return tmp_path / name

    learn_from(tmp_path / "nowhere", r"nowhere is not a model folder: it has no config.json")
    pooled = gmlp_text(1, 8, 8).replace(pool=Mean(), head=Classes(3))
    learn_from(keep("classes", pooled), "classes is not a language model")
    learn_from(keep("pictures", small().model), "pictures is not a language model")
    bare = keep("bare", MASKED.fit(STUDENT, texts))
    learn_from(bare, r"bare has neither tokenizer.json nor vocab.txt")
    other = Tokenize(vocabulary=60).build(["other words stand here"])
    (bare / "tokenizer.json").write_text(other.to_json())
    learn_from(bare, r"bare has other words than the data; set data.tokenize.path=.*bare")
    few = keep("few", gmlp_text(1, 8, 8, vocabulary=9))
    (few / "tokenizer.json").write_text(texts.tokenizer.to_json())
    learn_from(few, "few knows 9 words, its tokenizer has more")
    longer = Texts(texts.train, texts.test, texts.tokenizer, 21)
    learn_from(teacher, "reads 20 tokens, the rows have 21; set data.length=20 or less", longer)


def test_words_in_another_order_are_other_words(texts: Texts, teacher: Path, tmp_path: Path) -> None:
    """A vocabulary of the same size, kept as BERT's own vocab.txt."""
    words = [texts.tokenizer.word(number) for number in range(len(texts.tokenizer))]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((teacher / file).read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    both = DistillText(str(tmp_path), embeddings=str(tmp_path))
    assert isinstance(both.build(student(texts), texts), DistillTextModule)
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    for task in (both, both.replace(embeddings=""), both.replace(share=0.0)):
        with pytest.raises(allmlp.UserError, match="has other words than the data"):
            task.build(student(texts), texts)


def test_foreign_and_damaged_teachers(texts: Texts, teacher: Path, tmp_path: Path) -> None:
    for file in teacher.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(allmlp.UserError, match="is damaged or not a safetensors file"):
        DistillText(str(tmp_path)).build(student(texts), texts)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "roberta"}))
    with pytest.raises(allmlp.UserError, match="has the model_type 'roberta'"):
        DistillText(str(tmp_path)).build(student(texts), texts)


def test_a_teacher_is_needed_unless_its_share_is_zero() -> None:
    with pytest.raises(allmlp.UserError, match=r"DistillText.teacher is empty: name a model's folder, or set share=0"):
        DistillText("")
