"""Text classification: from scratch, from a pretrained language model, at another sequence length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import parallel
from allmlp import training as loop
from allmlp.callbacks import Callback
from allmlp.cli import main
from allmlp.data.corpus import Corpus
from allmlp.data.labeled_text import LabeledText
from allmlp.data.tokenizer import SPECIAL_TOKENS, TokenizerConfig, load_tokenizer
from allmlp.layers import ClassifierHead, FirstTokenPool
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.optim import AdamW
from allmlp.prediction import open_predictor
from allmlp.run import Budget, Run
from allmlp.tasks.classify_text import ClassifyText, classify_texts
from allmlp.tasks.masked_lm import MaskedLM
from tiny import randomize
from train.runs import one_special_token
from train.test_train import losses

pytest.importorskip("tokenizers")
GMLP = gmlp_text(2, 32, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reviews labeled by one word, pairs labeled by the second sentence, and plain text with the same words."""
    folder = tmp_path_factory.mktemp("glue")
    things = ["film", "book", "play", "song", "cake"]
    reviews = [f"the {thing} was {word}\t{label}" for thing in things for word, label in (("good", 1), ("awful", 0))]
    (folder / "reviews.tsv").write_text("sentence\tlabel\n" + "\n".join(reviews))
    pairs = [f"{a} is here\t{b} is here\t{'sweet' if b == 'cake' else 'dry'}" for a in things for b in things]
    (folder / "pairs.tsv").write_text("sentence1\tsentence2\tlabel\n" + "\n".join(pairs))
    text = "\n\n".join(row.split("\t")[0] for row in reviews) + "\n\n" + "\n\n".join(pairs).replace("\t", " ")
    (folder / "text.txt").write_text(text)
    return folder


def run(folder: Path, file: str, model: Any = GMLP, steps: int = 80, **changes: Any) -> Run:
    path = str(folder / file)
    plain = Run(
        model=model,
        task=ClassifyText(dropout=0.0),
        data=LabeledText(path, path, tokenizer=TokenizerConfig(vocab_size=80), seq_len=16, cache=str(folder)),
        batch_size=10,
        budget=Budget(steps=steps),
        optim=AdamW(lr=5e-3),
        max_grad_norm=1.0,
        log_every=40,
        eval_every=steps,
        save_every=steps,
    )
    return plain.replace(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GMLP, bert(2, 32, 2)], ids=["gmlp", "bert"])
def test_learns_sentences_and_predicts(
    model: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loop.train(run(folder, "reviews.tsv", model), tmp_path, "cpu")["accuracy"] == 1.0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path), "the cake was awful", "--json"])
    ((best, other),) = [found["predictions"] for found in json.loads(capsys.readouterr().out)]
    assert best["label"] == "0" and best["probability"] + other["probability"] == pytest.approx(1)


@pytest.mark.slow
def test_sentence_pairs_with_segments(folder: Path, tmp_path: Path) -> None:
    result = loop.train(
        run(folder, "pairs.tsv", bert(2, 32, 2), 100, task=ClassifyText(pool=FirstTokenPool())), tmp_path, "cpu"
    )
    assert result["accuracy"] > 0.9
    model, tokenizer = allmlp.load(tmp_path), load_tokenizer(tmp_path)
    probabilities = classify_texts(
        model, tokenizer, [("film is here", "cake is here"), ("cake is here", "film is here")]
    )
    assert probabilities.argmax(1).tolist() == [1, 0]


@torch.no_grad()
def test_loss_matches_its_equation(folder: Path) -> None:
    plain = run(folder, "pairs.tsv", bert(2, 32, 2))
    dataset, task = plain.data.load(), ClassifyText(FirstTokenPool(), dropout=0.0, label_smoothing=0.2)
    model = allmlp.create(task.configure_model(plain.model, dataset), seed=0)
    ids, segments, labels, _ = dataset.train.fetch(torch.arange(8))
    found = task.build(model, dataset).compute_loss(ids.long(), segments.long(), labels)
    terms, correct = [], []
    for row, segment, label in zip(ids.long(), segments.long(), labels):
        real = row != dataset.tokenizer.pad_token_id
        log_p = model(row[real][None], segments=segment[real][None])[0].log_softmax(0)
        terms.append(-0.8 * log_p[label] - 0.2 * log_p.mean())
        correct.append(log_p.argmax() == label)
    torch.testing.assert_close(found.total, torch.stack(terms).mean())
    torch.testing.assert_close(found.metrics["accuracy"], torch.stack(correct).float().mean())


def test_every_test_file_has_its_own_accuracy(folder: Path, tmp_path: Path) -> None:
    both = f"{folder / 'reviews.tsv'},{tmp_path / 'mismatched.tsv'}"
    (tmp_path / "mismatched.tsv").write_text("sentence\tlabel\nthe film was good\t0\nthe film was awful\t1\n")
    plain = run(folder, "reviews.tsv")
    result = loop.train(plain.replace(data=plain.data.replace(test=both)), tmp_path / "run", "cpu")
    assert result["accuracy"] == 1.0 and result["mismatched_accuracy"] == 0.0


def test_fine_tuning_takes_model_and_tokenizer_from_init_from(folder: Path, tmp_path: Path) -> None:
    text = str(folder / "text.txt")
    corpus = Corpus(text, text, TokenizerConfig(vocab_size=90), 24, cache=str(folder))
    pretraining = run(folder, "", GMLP, 20, task=MaskedLM(), data=corpus)
    loop.train(pretraining, tmp_path / "mlm", "cpu")
    tuning = run(folder, "reviews.tsv", None, 1, init_from=str(tmp_path / "mlm"), optim=AdamW(lr=0.0))
    loop.train(tuning, tmp_path / "tuned", "cpu")
    before, after = allmlp.load(tmp_path / "mlm"), allmlp.load(tmp_path / "tuned")
    assert load_tokenizer(tmp_path / "tuned") == load_tokenizer(tmp_path / "mlm") and after.spec.stem.seq_len == 16
    assert torch.equal(before.stem.embedding.weight, after.stem.embedding.weight)
    wide, narrow = (model.blocks[1].channel.mix.inner.proj for model in (before, after))
    assert torch.equal(wide.matrix()[:16, :16], narrow.matrix()) and torch.equal(wide.bias[:16], narrow.bias)
    assert "accuracy" in loop.evaluate_checkpoint(tmp_path / "tuned", "cpu")
    with pytest.raises(allmlp.UserError, match="the run has no model"):
        loop.train(run(folder, "reviews.tsv", None), tmp_path / "none", "cpu")


def test_every_test_file_has_its_own_majority(folder: Path, tmp_path: Path) -> None:
    """Three of four training labels are 1: right for half of the first file, and for a quarter of the second. Files
    of one name, up to its first dot, are numbered.
    """
    files = {"train": "1 1 1 0", "first": "1 0", "second": "0 0 0 1", "second.more": "1"}
    for name, labels in files.items():
        rows = [f"{name} {number}\t{label}" for number, label in enumerate(labels.split())]
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows))
    tests = ",".join(str(tmp_path / f"{name}.tsv") for name in [*files][1:])
    data = run(folder, "reviews.tsv").data.replace(path=str(tmp_path / "train.tsv"), test=tests, cache=str(tmp_path))
    dataset = data.load()
    floors = ClassifyText().floors(dataset, dataset.test)
    assert floors == {"majority": 0.5, "second_majority": 0.25, "second_2_majority": 1.0}


@pytest.mark.parametrize("mask_padding", [True, False])
def test_predictions_read_padding_as_the_training_did(folder: Path, tmp_path: Path, mask_padding: bool) -> None:
    """One at a time and in batches of other lengths; features too."""
    task = ClassifyText(dropout=0.0, mask_padding=mask_padding)
    trained = run(folder, "reviews.tsv", steps=10, task=task)
    loop.train(trained, tmp_path, "cpu")
    model, dataset = allmlp.load(tmp_path), trained.data.for_model(str(tmp_path)).load()
    module = task.build_evaluator(model, dataset).eval()
    ids, segments, _, _ = dataset.test.fetch(torch.arange(len(dataset.test)))
    wanted = module.logits(model, ids.long(), segments.long()).softmax(1).detach()  # type: ignore[attr-defined]
    texts = [row.split("\t")[0] for row in (folder / "reviews.tsv").read_text().splitlines()[1:]]
    found = open_predictor(tmp_path, device="cpu")
    single = torch.cat([found.probabilities([(text, "")]) for text in texts])
    torch.testing.assert_close(single, wanted)
    torch.testing.assert_close(found.probabilities([(text, "") for text in texts]), wanted)
    features = model.head(found.embed([(texts[0], "")]).clone())  # type: ignore[operator]
    torch.testing.assert_close(features.softmax(1).detach(), wanted[:1])


def test_white_space_around_a_text_does_not_count(folder: Path) -> None:
    """Training leaves it out; tokenizers other than WordPiece have tokens for it."""
    rows = (folder / "pairs.tsv").read_text().splitlines()[1:5]
    pairs = [(first, second) for first, second, _ in (row.split("\t") for row in rows)]
    words = TokenizerConfig("bpe", vocab_size=300).build([text for pair in pairs for text in pair])
    spec = gmlp_text(2, 32, 64, seq_len=24, vocab_size=len(words))
    model = allmlp.create(spec.replace(pool=FirstTokenPool(), head=ClassifierHead(3)), seed=0).eval()
    randomize(model)
    wanted = classify_texts(model, words, pairs)
    found = classify_texts(model, words, [(f"  {first}\n", f"\t{second} ") for first, second in pairs])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    single = classify_texts(model, words, [(first, "") for first, _ in pairs])
    assert (single - wanted).abs().max() > 1e-4
    blank = classify_texts(model, words, [(first, " \n") for first, _ in pairs])
    torch.testing.assert_close(blank, single, rtol=0, atol=0)


def test_predictions_of_pairs_with_one_token_for_every_special_one(folder: Path, tmp_path: Path) -> None:
    """The tokenizers of GPT-2 have no padding token: the one that ends a text also separates texts and fills rows."""
    one_special_token((folder / "pairs.tsv").read_text(), tmp_path / "tokenizer.json")
    data = run(folder, "pairs.tsv").data.replace(tokenizer=TokenizerConfig(path=str(tmp_path)))
    dataset, task = data.load(), ClassifyText(dropout=0.0)
    model = allmlp.create(task.configure_model(gmlp_text(2, 32, 64, causal=True), dataset)).eval()
    ids, segments, _, _ = dataset.test.fetch(torch.arange(4))
    ids, segments = ids.long(), segments.long()
    wanted = task.build(model, dataset).eval().logits(model, ids, segments).softmax(1).detach()  # type: ignore[operator]
    pairs = [row.split("\t")[:2] for row in (folder / "pairs.tsv").read_text().splitlines()[1:5]]
    found = classify_texts(model, dataset.tokenizer, [(first, second) for first, second in pairs])
    torch.testing.assert_close(found, wanted)
    seen = torch.arange(ids.shape[1]) < torch.tensor(
        [[3 + sum(map(len, dataset.tokenizer.encode(pair)))] for pair in pairs]
    )
    torch.testing.assert_close(model(ids, seen).softmax(1).detach(), wanted)


class StopAfterSaving(Callback):
    def on_save(self, step: int, folder: Path) -> None:
        if step == 5:
            raise KeyboardInterrupt


def test_a_resumed_run_keeps_its_tokenizer(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the cache has another one, because it was trained again on another machine."""
    (tmp_path / "reviews.tsv").write_text((folder / "reviews.tsv").read_text())
    wanted = run(tmp_path, "reviews.tsv", steps=10, save_every=5, log_every=1)
    loop.train(wanted, tmp_path / "whole", "cpu")
    with pytest.raises(KeyboardInterrupt):
        loop.train(wanted, tmp_path / "resumed", "cpu", [StopAfterSaving()])
    for file in (tmp_path / "tokenizers").glob("*.json"):
        record = json.loads(file.read_text())
        words = {word: number for word, number in record["model"]["vocab"].items() if word not in SPECIAL_TOKENS}
        record["model"]["vocab"] |= dict(zip(words, reversed(words.values())))
        file.write_text(json.dumps(record))
    assert wanted.data.load().tokenizer != load_tokenizer(tmp_path / "whole")
    loop.train(wanted, tmp_path / "resumed", "cpu")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole") and not caplog.text
    given = tmp_path / "given"
    given.mkdir()
    (given / "tokenizer.json").write_text(wanted.data.load().tokenizer.to_json())
    record = json.loads((tmp_path / "resumed" / "run.json").read_text())
    record["run"]["data"]["tokenizer"]["path"] = str(given)
    (tmp_path / "resumed" / "run.json").write_text(json.dumps(record))
    other = wanted.replace(data=wanted.data.replace(tokenizer=wanted.data.tokenizer.replace(path=str(given))))
    with pytest.raises(allmlp.UserError, match="is no longer the one"):
        loop.train(other, tmp_path / "resumed", "cpu")


def test_a_resumed_run_tells_that_its_data_have_changed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reviews.tsv").write_text((folder / "reviews.tsv").read_text())
    wanted = run(tmp_path, "reviews.tsv", steps=10, save_every=5)
    with pytest.raises(KeyboardInterrupt):
        loop.train(wanted, tmp_path / "run", "cpu", [StopAfterSaving()])
    with open(tmp_path / "reviews.tsv", "a") as table:
        table.write("\nthe cake was good\t1")
    loop.train(wanted, tmp_path / "run", "cpu")
    assert "the data have changed since the run began: examples were 10 train, 10 test, and are 11" in caplog.text


def test_nodes_with_different_tokenizers_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_another_node(world: parallel.World, value: Any) -> Any:
        return "another" if isinstance(value, str) else value

    monkeypatch.setattr(parallel.World, "broadcast", from_another_node)
    with pytest.raises(allmlp.UserError, match=r"set data.cache to a folder that all nodes share"):
        loop.train(run(folder, "reviews.tsv", steps=1), tmp_path, "cpu")
