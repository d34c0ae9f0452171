"""Answers as spans: the official marks, the search over all windows, and a toy set that a tiny model learns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import train as loop
from allmlp.data.order import in_order
from allmlp.data.squad import Frame, Squad
from allmlp.data.tokenizer import SPECIAL, Tokenize, Tokenizer, load
from allmlp.layers.head import Span
from allmlp.models.bert import bert
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import Model
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.tasks.squad import THRESHOLDS, AnswerSpan, answer, exact_match, f1, normalise
from train.runs import Blobs, small

WORDS = ["who", "marks", "x", "far", "near", "sun", "moon", "tree", "river", "stone", "bird", "fish", "rain", "snow"]
CONTENT = WORDS[3:]
FRAME = {"length": 16, "stride": 4, "question": 3}
CPU = torch.device("cpu")


# --- the official script's marks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "answers", "exact", "overlap"),
    [
        ("The Cat!", ["cat"], 1.0, 1.0),
        ("an  apple, a day", ["apple day"], 1.0, 1.0),
        ("U.S.", ["US"], 1.0, 1.0),
        ("theatre", ["atre"], 0.0, 0.0),  # an article is a whole word
        ("Denver Broncos", ["Broncos"], 0.0, 2 / 3),
        ("in the 10th century", ["10th century", "the 10th and 11th centuries"], 0.0, 0.8),
        ("the the cat cat", ["cat"], 0.0, 2 / 3),  # words count as often as they stand there
        ("dog", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
        ("the", [], 1.0, 1.0),  # nothing is left of it
        ("", ["a"], 1.0, 1.0),  # nor of this right answer
        ("cat", ["", "Cat."], 1.0, 1.0),
        ("«École»", ["école"], 0.0, 0.0),  # only ASCII punctuation is dropped
    ],
)
def test_marks_are_those_of_the_official_script(guess: str, answers: list[str], exact: float, overlap: float) -> None:
    assert exact_match(guess, answers) == exact
    assert f1(guess, answers) == pytest.approx(overlap)


def test_normalised_text_has_single_spaces() -> None:
    assert normalise(" A  man,\ta plan. The canal ") == "man plan canal"


# --- a toy set: the answer is the word after x ----------------------------------------------------------------


def paragraph(draw: random.Random, words: int, impossible: bool) -> dict[str, Any]:
    text = draw.choices(CONTENT, k=words)
    place = draw.randrange(words - 1)
    right = text[place + 1]
    if not impossible:
        text[place] = "x"
    context = " ".join(text)
    start = len(" ".join(text[: place + 1])) + 1
    found = [] if impossible else [{"text": right, "answer_start": start}]
    question = {"id": "", "question": "who marks", "answers": found, "is_impossible": impossible}
    return {"context": context, "qas": [question]}


def toy(folder: Path, impossible: float = 0.0, words: int = 18, examples: int = 400) -> Squad:
    """Contexts of two or three windows."""
    draw = random.Random(0)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *WORDS]), encoding="utf8")
    for name, count in (("train", examples), ("test", 50)):
        paragraphs = [paragraph(draw, draw.randint(3, words), draw.random() < impossible) for _ in range(count)]
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return Squad(
        str(folder / "train.json"),
        str(folder / "test.json"),
        Tokenize(path=str(vocabulary)),
        cache=str(folder),
        **FRAME,
    )


def tiny() -> Encoder:
    return gmlp_text(2, 32, 64, length=16, vocabulary=64)


def tiny_bert() -> Encoder:
    """This one tells question and context apart by their segments."""
    return bert(2, 32, 2, length=16, vocabulary=64)


def lesson(data: Squad, **changes: Any) -> Run:
    run = Run(
        model=tiny(),
        task=AnswerSpan(longest=4, best=5),
        data=data,
        batch=64,
        budget=Budget(steps=100),
        optim=AdamW(lr=5e-3),
        clip=1.0,
        cadence=Cadence(log=100, evaluate=100, save=100),
    )
    return run.replace(**changes)


def reader(data: Squad, model: Encoder | None = None, **options: Any) -> tuple[Model, Any]:
    """A model whose weights are noise, so that no two spans have the same score, and its task."""
    task, dataset = AnswerSpan(**options), data.open()
    found = allmlp.create(task.fit(model or tiny(), dataset), seed=1)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return found.eval(), task.build(found, dataset).eval()


@pytest.mark.parametrize("model", [tiny(), tiny_bert()], ids=["gmlp", "bert"])
def test_the_best_answers_are_the_best_of_all_spans(tmp_path: Path, model: Encoder) -> None:
    data = toy(tmp_path, words=24, examples=4)
    found, module = reader(data, model, longest=4, best=7)
    tokenizer = load(data.tokenize.path)
    for question in module.questions[:10]:
        context = question.passage.text
        given = answer(found, tokenizer, "who marks", context, module.spec, data.frame)
        expected = brute_force(found, tokenizer, context, longest=4)[:7]
        assert [(one.start, one.end) for one in given] == [(start, end) for _, start, end in expected]
        assert [one.text for one in given] == [context[start:end] for _, start, end in expected]
        chances = torch.tensor([score for score, _, _ in expected]).softmax(0)
        torch.testing.assert_close(torch.tensor([one.probability for one in given]), chances, rtol=1e-4, atol=1e-5)


def brute_force(model: Model, tokenizer: Tokenizer, context: str, longest: int) -> list[tuple[float, int, int]]:
    """Every span of every window, one window at a time, without padding."""
    question = tokenizer.encode(["who marks"])[0]
    ids, offsets = tokenizer.spans(context)
    room = FRAME["length"] - len(question) - 3
    begins = [0]
    while begins[-1] + room < len(ids):
        begins.append(begins[-1] + FRAME["stride"])
    spans = []
    for begin in begins:
        part = ids[begin : begin + room]
        row = [tokenizer.first, *question, tokenizer.last, *part, tokenizer.last]
        head = len(question) + 2
        segments = torch.tensor([[0] * head + [1] * (len(part) + 1)])
        with torch.no_grad():
            scores = model(torch.tensor([row]), segments=segments if model.spec.stem.segments else None)[0].tolist()
        for first in range(len(part)):
            around = min(first, len(part) - 1 - first) + 0.01 * len(part)
            for last in range(first, min(first + longest, len(part))):
                score = scores[head + first][0] + scores[head + last][1]
                spans.append((begin + first, begin + last, around, -begin, score))
    home = {first: max(span[2:4] for span in spans if span[0] == first) for first in range(len(ids))}
    kept = [(score, first, last) for first, last, *place, score in spans if tuple(place) == home[first]]
    return [(score, offsets[first][0], offsets[last][1]) for score, first, last in sorted(kept, reverse=True)]


def judged(module: Any, model: Model, split: Any, batch: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    with torch.no_grad():
        return module.evaluate(model, in_order(split, batch, CPU, rank, world))


@pytest.mark.parametrize("impossible", [0.0, 0.5])
def test_marks_depend_neither_on_the_batch_nor_on_the_processes(tmp_path: Path, impossible: float) -> None:
    data = toy(tmp_path, impossible, examples=4)
    model, module = reader(data)
    split = data.open().test
    whole = judged(module, model, split, 50)
    for batch in (1, 7):
        assert judged(module, model, split, batch) == whole
    shares = [judged(module, model, split, 7, rank, 3) for rank in range(3)]
    for name, (total, count) in whole.items():
        torch.testing.assert_close(sum(share[name][0] for share in shares), total)
        torch.testing.assert_close(sum(share[name][1] for share in shares), count)


def test_the_null_threshold_decides(tmp_path: Path) -> None:
    data = toy(tmp_path, 0.5, examples=4)
    model, module = reader(data)
    split = data.open().test

    def marks(threshold: float) -> dict[str, float]:
        module.spec = module.spec.replace(threshold=threshold)
        sums = judged(module, model, split, 16)
        return module.summary({name: (total / count).item() for name, (total, count) in sums.items()})

    never, always = marks(1e4), marks(-1e4)
    impossible = sum(not question.answers for question in module.questions) / len(module.questions)
    assert never["no_answer_f1"] == always["has_answer_f1"] == 0
    assert always["no_answer_f1"] == 1
    assert always["f1"] == always["exact_match"] == pytest.approx(impossible)
    table = {threshold: marks(threshold)["f1"] for threshold in THRESHOLDS}
    own = marks(0.0)
    assert own["best_f1"] == max(table.values()) == table[own["best_threshold"]]
    share = len([question for question in module.questions if question.answers]) / len(module.questions)
    assert own["f1"] == pytest.approx(own["has_answer_f1"] * share + own["no_answer_f1"] * (1 - share))
    assert set(own) == {"exact_match", "f1", "has_answer_f1", "no_answer_f1", "best_f1", "best_threshold"}


def test_a_tiny_model_learns_where_the_answer_is(tmp_path: Path) -> None:
    data = toy(tmp_path)
    result = loop.train(lesson(data), tmp_path / "run", "cpu")
    assert set(result) == {"exact_match", "f1"}
    assert result["exact_match"] > 0.9
    assert loop.judge_again(tmp_path / "run", "cpu") == pytest.approx(result)
    model, tokenizer = allmlp.load(tmp_path / "run"), load(tmp_path / "run")
    context = "moon  far tree x RIVER, bird"
    best = answer(model, tokenizer, "who marks", context)[0]
    assert (best.text, best.probability > 0.5) == ("RIVER", True)
    assert context[best.start : best.end] == "RIVER"
    # On from there with a tokenizer that has other words: refused, not misread.
    other = tmp_path / "other.txt"
    other.write_text("\n".join([*SPECIAL, *WORDS, "more"]))
    again = lesson(data.replace(tokenize=Tokenize(path=str(other))), init_from=str(tmp_path / "run"))
    with pytest.raises(allmlp.UserError, match=r"stem\.embedding\.weight"):
        loop.train(again, tmp_path / "again", "cpu")
    with pytest.raises(allmlp.UserError, match="20 tokens and the model 19"):
        answer(model, load(other), "who marks", context)


def test_a_tiny_model_learns_when_there_is_none(tmp_path: Path) -> None:
    data = toy(tmp_path, impossible=0.4)
    result = loop.train(lesson(data, hold_out=60), tmp_path / "run", "cpu")
    assert result["best_f1"] > 0.9 and result["no_answer_f1"] > 0.8
    model, tokenizer = allmlp.load(tmp_path / "run"), load(tmp_path / "run")
    options = {"spec": AnswerSpan(threshold=result["best_threshold"]), "impossible": True}
    assert answer(model, tokenizer, "who marks", "moon far tree bird", **options)[0].text == ""
    found = answer(model, tokenizer, "who marks", "moon far x tree bird", **options)
    assert found[0].text == "tree"
    assert sum(one.probability for one in found) == pytest.approx(1)
    assert sorted(found, key=lambda one: -one.probability) == found


# --- what a user can get wrong ----------------------------------------------------------------------------------


def test_any_question_and_context_can_be_given(tmp_path: Path) -> None:
    data = toy(tmp_path, examples=4)
    model, _ = reader(data)
    tokenizer = load(data.tokenize.path)
    for context in ("", "   ", "\u200d"):
        assert answer(model, tokenizer, "who", context) == []
        only = answer(model, tokenizer, "who", context, impossible=True)
        assert [(one.text, one.probability) for one in only] == [("", 1.0)]
    for context in ("😀 sun שלום x", "x", "\ud83d sun", "[PAD] [CLS] sun", "sun " * 200):
        for question in ("", "who " * 50, "😀", "[PAD]"):
            found = answer(model, tokenizer, question, context)
            assert 0 < len(found) <= 20
            assert sum(one.probability for one in found) == pytest.approx(1)
            assert all(0 <= one.start < one.end <= len(context) for one in found)


def test_the_loss_reads_no_padding(tmp_path: Path) -> None:
    data = toy(tmp_path, words=4, examples=8)
    dataset = data.open()
    model, module = reader(data, tiny_bert())
    batch = dataset.train.fetch(torch.arange(8))
    loss = module.learn(batch.ids.long(), batch.segments.long(), batch.start, batch.end).total
    terms = []
    for ids, segments, first, last in zip(*batch):
        real = ids != dataset.tokenizer.pad
        start, end = model(ids[real][None], segments=segments[real][None].long())[0].log_softmax(0).unbind(1)
        terms.append(-(start[first] + end[last]) / 2)
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-4, atol=1e-4)
    loss.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_what_cannot_answer_is_refused(tmp_path: Path) -> None:
    data = toy(tmp_path, examples=4)
    dataset, task = data.open(), AnswerSpan()
    assert task.fit(tiny(), dataset).head == Span()
    for name in ("resmlp_nano", "resmlp_seq2seq_tiny"):
        with pytest.raises(allmlp.UserError, match="a model that reads text"):
            task.fit(allmlp.create(name).spec, dataset)
    with pytest.raises(allmlp.UserError, match="Span head"):
        task.build(allmlp.create(tiny()), dataset)
    with pytest.raises(allmlp.UserError, match="lies beside the model"):
        task.build(allmlp.create(tiny().replace(head=Span())), dataset)
    short = tiny().configure(vocabulary=len(dataset.tokenizer), length=8).replace(head=Span())
    with pytest.raises(allmlp.UserError, match="8 tokens at most"):
        task.build(allmlp.create(short), dataset)
    with pytest.raises(allmlp.UserError, match="no room"):
        answer(reader(data)[0], dataset.tokenizer, "who", "sun", frame=Frame(16, 14, 3))
    with pytest.raises(allmlp.UserError, match="learns from questions, not from labelled pictures"):
        task.accept(Blobs().open())
    with pytest.raises(allmlp.UserError, match="learns from labelled pictures, not from questions"):
        small().task.accept(dataset)
