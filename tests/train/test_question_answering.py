"""Extractive question answering: official metrics, span search over all windows, and a toy dataset."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import training as loop
from allmlp.analysis.target import load_target
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.data.sampler import eval_batches
from allmlp.data.squad import Squad, WindowConfig
from allmlp.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, load_tokenizer
from allmlp.layers.head import QAHead
from allmlp.models.bert import bert
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import Model
from allmlp.optim import AdamW
from allmlp.prediction import TextPredictor, open_predictor
from allmlp.run import Budget, Run
from allmlp.tasks.distill_question_answering import DistillQuestionAnswering
from allmlp.tasks.question_answering import (
    THRESHOLDS,
    QuestionAnswering,
    answer_question,
    exact_match,
    f1,
    normalize_answer,
)
from allmlp.tasks.word_overlap import best_answer, best_sentence
from allmlp.weights.bundled import model_path
from tiny import randomize
from train.runs import Blobs, one_special_token, small

WORDS = ["who", "marks", "x", "far", "near", "sun", "moon", "tree", "river", "stone", "bird", "fish", "rain", "snow"]
CONTENT = WORDS[3:]
WINDOWS = {"seq_len": 16, "doc_stride": 4, "max_query_length": 3}
CPU = torch.device("cpu")


# --- metrics of the official script ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("The Cat!", ["cat"], 1.0, 1.0),
        ("an  apple, a day", ["apple day"], 1.0, 1.0),
        ("U.S.", ["US"], 1.0, 1.0),
        ("theatre", ["atre"], 0.0, 0.0),  # an article is a whole word
        ("Denver Broncos", ["Broncos"], 0.0, 2 / 3),
        ("in the 10th century", ["10th century", "the 10th and 11th centuries"], 0.0, 0.8),
        ("the the cat cat", ["cat"], 0.0, 2 / 3),  # repeated words count
        ("dog", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
        ("the", [], 1.0, 1.0),  # empty after normalization
        ("", ["a"], 1.0, 1.0),  # and so is this answer
        ("cat", ["", "Cat."], 1.0, 1.0),
        ("«École»", ["école"], 0.0, 0.0),  # only ASCII punctuation is dropped
    ],
)
def test_metrics_match_the_official_script(prediction: str, answers: list[str], exact: float, overlap: float) -> None:
    assert exact_match(prediction, answers) == exact
    assert f1(prediction, answers) == pytest.approx(overlap)


def test_normalized_text_has_single_spaces() -> None:
    assert normalize_answer(" A  man,\ta plan. The canal ") == "man plan canal"


# --- toy data: the answer is the word after x ----------------------------------------------------------------


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
    vocab_size = folder / "vocab.txt"
    vocab_size.write_text("\n".join([*SPECIAL_TOKENS, *WORDS]), encoding="utf8")
    for name, count in (("train", examples), ("test", 50)):
        paragraphs = [paragraph(draw, draw.randint(3, words), draw.random() < impossible) for _ in range(count)]
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return Squad(
        str(folder / "train.json"),
        str(folder / "test.json"),
        TokenizerConfig(path=str(vocab_size)),
        cache=str(folder),
        **WINDOWS,
    )


def tiny() -> Encoder:
    return gmlp_text(2, 32, 64, seq_len=16, vocab_size=64)


def tiny_bert() -> Encoder:
    """With segment embeddings for question and context."""
    return bert(2, 32, 2, seq_len=16, vocab_size=64)


def run_of(data: Squad, **changes: Any) -> Run:
    run = Run(
        model=tiny(),
        task=QuestionAnswering(max_answer_length=4, n_best_size=5),
        data=data,
        batch_size=64,
        budget=Budget(steps=100),
        optim=AdamW(lr=5e-3),
        max_grad_norm=1.0,
        log_every=100,
        eval_every=100,
        save_every=100,
    )
    return run.replace(**changes)


def reader(data: Squad, model: Encoder | None = None, **options: Any) -> tuple[Model, Any]:
    """A model with random weights, so that no two spans have the same score, and its task module."""
    task, dataset = QuestionAnswering(**options), data.load()
    found = allmlp.create(task.configure_model(model or tiny(), dataset), seed=1)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return found.eval(), task.build(found, dataset).eval()


@pytest.mark.parametrize("model", [tiny(), tiny_bert()], ids=["gmlp", "bert"])
def test_predictions_are_the_best_of_all_spans(tmp_path: Path, model: Encoder) -> None:
    data = toy(tmp_path, words=24, examples=4)
    found, module = reader(data, model, max_answer_length=4, n_best_size=7)
    tokenizer = load_tokenizer(data.tokenizer.path)
    for question in module.questions[:10]:
        context = question.context.text
        predicted = answer_question(found, tokenizer, "who marks", context, module.spec, data.windows)
        expected = brute_force(found, tokenizer, context, max_length=4)[:7]
        assert [(one.start, one.end) for one in predicted] == [(start, end) for _, start, end in expected]
        assert [one.text for one in predicted] == [context[start:end] for _, start, end in expected]
        probabilities = torch.tensor([score for score, _, _ in expected]).softmax(0)
        torch.testing.assert_close(
            torch.tensor([one.probability for one in predicted]), probabilities, rtol=1e-4, atol=1e-5
        )


def brute_force(model: Model, tokenizer: Tokenizer, context: str, max_length: int) -> list[tuple[float, int, int]]:
    """Every span of every window, one window at a time, without padding."""
    question = tokenizer.encode(["who marks"])[0]
    ids, offsets = tokenizer.encode_with_offsets(context)
    room = WINDOWS["seq_len"] - len(question) - 3
    begins = [0]
    while begins[-1] + room < len(ids):
        begins.append(begins[-1] + WINDOWS["doc_stride"])
    spans = []
    for begin in begins:
        part = ids[begin : begin + room]
        row = [tokenizer.cls_token_id, *question, tokenizer.sep_token_id, *part, tokenizer.sep_token_id]
        head = len(question) + 2
        segments = torch.tensor([[0] * head + [1] * (len(part) + 1)])
        with torch.no_grad():
            scores = model(torch.tensor([row]), segments=segments if model.spec.stem.segments else None)[0].tolist()
        for first in range(len(part)):
            around = min(first, len(part) - 1 - first) + 0.01 * len(part)
            for last in range(first, min(first + max_length, len(part))):
                score = scores[head + first][0] + scores[head + last][1]
                spans.append((begin + first, begin + last, around, -begin, score))
    home = {first: max(span[2:4] for span in spans if span[0] == first) for first in range(len(ids))}
    kept = [(score, first, last) for first, last, *place, score in spans if tuple(place) == home[first]]
    return [(score, offsets[first][0], offsets[last][1]) for score, first, last in sorted(kept, reverse=True)]


def evaluated(module: Any, model: Model, split: Any, batch: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    with torch.no_grad():
        return module.evaluate(model, eval_batches(split, batch, CPU, rank, world))


@pytest.mark.parametrize("impossible", [0.0, 0.5])
def test_evaluation_does_not_depend_on_batch_size_or_processes(tmp_path: Path, impossible: float) -> None:
    data = toy(tmp_path, impossible, examples=4)
    model, module = reader(data)
    split = data.load().test
    whole = evaluated(module, model, split, 50)
    for batch in (1, 7):
        assert evaluated(module, model, split, batch) == whole
    parts = [evaluated(module, model, split, 7, rank, 3) for rank in range(3)]
    for name, (total, count) in whole.items():
        torch.testing.assert_close(sum(part[name][0] for part in parts), total)
        torch.testing.assert_close(sum(part[name][1] for part in parts), count)


def test_null_score_diff_threshold(tmp_path: Path) -> None:
    data = toy(tmp_path, 0.5, examples=4)
    model, module = reader(data)
    split = data.load().test

    def metrics(threshold: float) -> dict[str, float]:
        module.spec = module.spec.replace(null_score_diff_threshold=threshold)
        sums = evaluated(module, model, split, 16)
        return module.summary({name: (total / count).item() for name, (total, count) in sums.items()})

    never, always = metrics(1e4), metrics(-1e4)
    impossible = sum(not question.answers for question in module.questions) / len(module.questions)
    assert never["no_answer_f1"] == always["has_answer_f1"] == 0
    assert always["no_answer_f1"] == 1
    assert always["f1"] == always["exact_match"] == pytest.approx(impossible)
    table = {threshold: metrics(threshold)["f1"] for threshold in THRESHOLDS}
    own = metrics(0.0)
    assert own["best_f1"] == max(table.values()) == table[own["best_threshold"]]
    possible = len([question for question in module.questions if question.answers]) / len(module.questions)
    assert own["f1"] == pytest.approx(own["has_answer_f1"] * possible + own["no_answer_f1"] * (1 - possible))
    assert set(own) == {"exact_match", "f1", "has_answer_f1", "no_answer_f1", "best_f1", "best_threshold"}


@pytest.mark.slow
def test_tiny_model_learns_to_find_the_answer(tmp_path: Path) -> None:
    data = toy(tmp_path)
    result = loop.train(run_of(data), tmp_path / "run", "cpu")
    assert set(result) == {"exact_match", "f1", "overlap_f1", "overlap_exact_match", "sentence_f1"}
    assert result["exact_match"] > 0.9
    assert loop.evaluate_checkpoint(tmp_path / "run", "cpu") == pytest.approx(result)
    model, tokenizer = allmlp.load(tmp_path / "run"), load_tokenizer(tmp_path / "run")
    context = "moon  far tree x RIVER, bird"
    best = answer_question(model, tokenizer, "who marks", context)[0]
    assert (best.text, best.probability > 0.5) == ("RIVER", True)
    assert context[best.start : best.end] == "RIVER"
    # A tokenizer with another vocabulary is refused.
    other = tmp_path / "other.txt"
    other.write_text("\n".join([*SPECIAL_TOKENS, *WORDS, "more"]))
    again = run_of(data.replace(tokenizer=TokenizerConfig(path=str(other))), init_from=str(tmp_path / "run"))
    with pytest.raises(allmlp.UserError, match=r"stem\.embedding\.weight"):
        loop.train(again, tmp_path / "again", "cpu")
    with pytest.raises(allmlp.UserError, match="20 tokens and the model 19"):
        answer_question(model, load_tokenizer(other), "who marks", context)


@pytest.mark.slow
def test_tiny_model_learns_that_there_is_no_answer(tmp_path: Path) -> None:
    data = toy(tmp_path, impossible=0.4)
    result = loop.train(run_of(data, val_size=60), tmp_path / "run", "cpu")
    assert result["best_f1"] > 0.9 and result["no_answer_f1"] > 0.8 and 0.2 < result["empty_f1"] < 0.6
    model, tokenizer = allmlp.load(tmp_path / "run"), load_tokenizer(tmp_path / "run")
    options = {
        "spec": QuestionAnswering(null_score_diff_threshold=result["best_threshold"]),
        "handle_impossible_answer": True,
    }
    assert answer_question(model, tokenizer, "who marks", "moon far tree bird", **options)[0].text == ""
    found = answer_question(model, tokenizer, "who marks", "moon far x tree bird", **options)
    assert found[0].text == "tree"
    assert sum(one.probability for one in found) == pytest.approx(1)
    assert sorted(found, key=lambda one: -one.probability) == found


CONTEXT = "The bridge opened in 1932, after ten years. It was designed by John Bradfield of Sydney. Toll is paid."


@pytest.mark.parametrize(
    ("question", "sentence", "answer"),
    [
        ("When was the bridge opened?", "The bridge opened in 1932, after ten years.", "1932"),
        ("Who designed it?", "It was designed by John Bradfield of Sydney.", "John Bradfield"),
        ("What is paid?", "Toll is paid.", "Toll"),
        ("Toll is paid?", "Toll is paid.", "Toll is paid."),
    ],
)
def test_answers_without_a_model(question: str, sentence: str, answer: str) -> None:
    assert best_sentence(question, CONTEXT) == sentence and best_answer(question, CONTEXT) == answer


def test_one_token_for_every_special_one(tmp_path: Path) -> None:
    """With the tokenizers of GPT-2, [CLS], the answer of windows without one, is not padding."""
    one_special_token(" ".join(WORDS), tmp_path / "tokenizer.json")
    data = toy(tmp_path, examples=20).replace(tokenizer=TokenizerConfig(path=str(tmp_path / "tokenizer.json")))
    data = data.replace(seq_len=24, doc_stride=8)
    assert 0 in data.load().train.fetch(torch.arange(20)).start
    result = loop.train(run_of(data, budget=Budget(steps=2)), tmp_path / "run", "cpu")
    found = open_predictor(tmp_path / "run", device="cpu").predict([("who x", "far x near sun")])
    assert result["f1"] >= 0 and found[0][0][0].label


# --- a teacher --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Squad, Path]:
    """A BERT of a few steps, and its data."""
    folder = tmp_path_factory.mktemp("teacher")
    data = toy(folder, words=9, examples=40)
    loop.train(run_of(data, model=tiny_bert(), budget=Budget(steps=3)), folder / "run", "cpu")
    return data, folder / "run"


def test_analysis_reads_the_first_window_of_a_question(teacher: tuple[Squad, Path]) -> None:
    data, folder = teacher
    split = data.load().test
    texts = load_target(str(folder)).sample_texts(split, 5)
    first = split.fetch(torch.tensor([0])).ids[0, 0]
    assert len(texts) == 5 and texts[0] == load_tokenizer(folder).decode(first.tolist())


@pytest.mark.parametrize("mask_padding", [True, False])
def test_distillation_loss_matches_its_equation(
    teacher: tuple[Squad, Path], mask_padding: bool, tmp_path: Path
) -> None:
    """Also of a teacher that was trained to read padding."""
    data, folder = teacher[0], shutil.copytree(teacher[1], tmp_path / "teacher")
    known = read_preprocessing(folder)
    assert isinstance(known, TextPreprocessing)
    confident = allmlp.load(folder)
    randomize(confident, spread=0.5)
    allmlp.save(confident, folder)
    write_preprocessing(folder, known.replace(mask_padding=mask_padding))
    dataset, spec = data.load(), DistillQuestionAnswering(str(folder), alpha=0.3, temperature=3.0)
    model, _ = reader(data)
    module = spec.build(model, dataset)
    batch = dataset.train.fetch(torch.arange(8))
    ids, segments = batch.ids.long(), batch.segments.long()
    student = model(ids, ids != 0)
    large = allmlp.load(folder)(ids, (ids != 0) if mask_padding else None, segments=segments)
    wanted = []
    for number in range(8):
        real = ids[number] != dataset.tokenizer.pad_token_id
        for side, label in enumerate((batch.start, batch.end)):
            own, other = student[number, real, side].double(), large[number, real, side].double()
            p, q = (other / 3).softmax(0), (own / 3).softmax(0)
            cross_entropy = -own.log_softmax(0)[label[number]]
            wanted.append(0.7 * cross_entropy + 0.3 * 9 * (p * (p / q).log()).sum())
    losses = module.compute_loss(ids, segments, batch.start, batch.end)
    assert losses.total.item() == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-4)
    losses.total.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    assert not any(name.startswith("teacher") for name, _ in module.named_parameters())
    assert module.flops > QuestionAnswering().build(model, dataset).flops


def test_a_student_is_trained_saved_and_evaluated_without_its_teacher(
    teacher: tuple[Squad, Path], tmp_path: Path
) -> None:
    data, folder = teacher
    run = run_of(data, task=DistillQuestionAnswering(str(folder)), budget=Budget(steps=2))
    result = loop.train(run, tmp_path / "run", "cpu")
    gone = run.task.replace(teacher="elsewhere")
    assert loop.evaluate_checkpoint(tmp_path / "run", "cpu", gone.answer) == pytest.approx(result)
    assert {"f1", "overlap_f1"} <= set(result)


def test_unsuitable_teachers_of_questions(teacher: tuple[Squad, Path], tmp_path: Path) -> None:
    data, folder = teacher
    other = toy(tmp_path, examples=4)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS, "more"]), encoding="utf8")
    for changed, reason in {
        other: "another vocabulary",
        data.replace(seq_len=32, max_query_length=3): "reads 16 tokens, the windows have 32",
    }.items():
        dataset = changed.load()
        model = allmlp.create(QuestionAnswering().configure_model(tiny(), dataset))
        with pytest.raises(allmlp.UserError, match=reason):
            DistillQuestionAnswering(str(folder)).build(model, dataset)
    with pytest.raises(allmlp.UserError, match="does not answer questions"):
        DistillQuestionAnswering(str(model_path("allmlp:text"))).build(reader(data)[0], data.load())


# --- unusual inputs and errors ----------------------------------------------------------------------------------


def test_unusual_questions_and_contexts(tmp_path: Path) -> None:
    data = toy(tmp_path, examples=4)
    model, _ = reader(data)
    tokenizer = load_tokenizer(data.tokenizer.path)
    for context in ("", "   ", "\u200d"):
        assert answer_question(model, tokenizer, "who", context) == []
        only = answer_question(model, tokenizer, "who", context, handle_impossible_answer=True)
        assert [(one.text, one.probability) for one in only] == [("", 1.0)]
    for context in ("😀 sun שלום x", "x", "\ud83d sun", "[PAD] [CLS] sun", "sun " * 200):
        for question in ("", "who " * 50, "😀", "[PAD]"):
            found = answer_question(model, tokenizer, question, context)
            assert 0 < len(found) <= 20
            assert sum(one.probability for one in found) == pytest.approx(1)
            assert all(0 <= one.start < one.end <= len(context) for one in found)


def test_loss_ignores_padding(tmp_path: Path) -> None:
    data = toy(tmp_path, words=4, examples=8)
    dataset = data.load()
    model, module = reader(data, tiny_bert())
    batch = dataset.train.fetch(torch.arange(8))
    loss = module.compute_loss(batch.ids.long(), batch.segments.long(), batch.start, batch.end).total
    terms = []
    for ids, segments, first, last in zip(*batch):
        real = ids != dataset.tokenizer.pad_token_id
        start, end = model(ids[real][None], segments=segments[real][None].long())[0].log_softmax(0).unbind(1)
        terms.append(-(start[first] + end[last]) / 2)
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-4, atol=1e-4)
    loss.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_unsuitable_models_and_data_are_refused(tmp_path: Path) -> None:
    data = toy(tmp_path, examples=4)
    dataset, task = data.load(), QuestionAnswering()
    assert task.configure_model(tiny(), dataset).head == QAHead()
    for name in ("resmlp_nano", "resmlp_seq2seq_tiny"):
        with pytest.raises(allmlp.UserError, match="a model that reads text"):
            task.configure_model(allmlp.create(name).spec, dataset)
    with pytest.raises(allmlp.UserError, match="QAHead"):
        task.build(allmlp.create(tiny()), dataset)
    with pytest.raises(allmlp.UserError, match="use the tokenizer in the model's folder"):
        task.build(allmlp.create(tiny().replace(head=QAHead())), dataset)
    short = tiny().configure(vocab_size=len(dataset.tokenizer), seq_len=8).replace(head=QAHead())
    with pytest.raises(allmlp.UserError, match="8 tokens at most"):
        task.build(allmlp.create(short), dataset)
    with pytest.raises(allmlp.UserError, match="no room"):
        answer_question(reader(data)[0], dataset.tokenizer, "who", "sun", windows=WindowConfig(16, 14, 3))
    with pytest.raises(allmlp.UserError, match=r"needs .*, not labeled images"):
        task.check_dataset(Blobs().load())
    with pytest.raises(allmlp.UserError, match="Classify needs labeled images, not "):
        small().task.check_dataset(dataset)


@pytest.mark.parametrize("mask_padding", [True, False])
def test_answers_read_padding_as_the_training_did(tmp_path: Path, mask_padding: bool) -> None:
    data = toy(tmp_path, words=4, examples=20)
    task = QuestionAnswering(mask_padding=mask_padding)
    loop.train(run_of(data, task=task, budget=Budget(steps=1), batch_size=8), tmp_path / "run", "cpu")
    found = open_predictor(tmp_path / "run", device="cpu")
    assert isinstance(found, TextPredictor)
    question = ("who marks", "moon far tree")
    wanted = answer_question(allmlp.load(tmp_path / "run"), found.tokenizer, *question, task)
    assert found.answer([question]) == [wanted]
    assert found.predict([question], 1)[0][0][0].probability == wanted[0].probability
