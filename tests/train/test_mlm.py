"""Masked and causal language models: what is hidden, what is asked, and that they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import log
from allmlp import train as loop
from allmlp.cli import main
from allmlp.data.corpus import Corpus
from allmlp.data.tokenizer import Tokenize, Tokenizer
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.tasks.causal import CausalLm, write
from allmlp.tasks.classify import Classify
from allmlp.tasks.mlm import MaskedLm, Masking, Tables, fill, fixed_draws
from train.runs import Blobs, small
from train.test_train import losses, same_weights, train_with_break

pytest.importorskip("tokenizers")
TEXT = ["the unbelievable cat sat on the red mat", "a dog jumped over the blue fence quickly"] * 10


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenize(vocabulary=70).build(TEXT)


def rows(tokenizer: Tokenizer, length: int = 40) -> torch.Tensor:
    ids = [[tokenizer.first, *found[: length - 2], tokenizer.last] for found in tokenizer.encode(TEXT[:2] * 50)]
    return torch.tensor([row + [tokenizer.pad] * (length - len(row)) for row in ids])


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_a_fixed_share_is_asked_and_never_a_special_token(tokenizer: Tokenizer, rate: float) -> None:
    ids, masking, tables = rows(tokenizer), Masking(rate), Tables(tokenizer)
    found = masking.apply(ids, uniform(len(ids), masking.numbers(40)), tables)
    assert found.positions.shape == (100, masking.count(40))
    real = (~tokenizer.special[ids]).sum(1)
    assert torch.equal(found.weights.sum(1), (rate * real).round().clamp(min=1))
    counted = found.weights.bool()
    assert not tokenizer.special[found.targets[counted]].any()
    assert torch.equal(found.targets, ids.gather(1, found.positions))
    untouched = torch.ones_like(ids, dtype=torch.bool).scatter(1, found.positions, ~counted)
    assert torch.equal(found.inputs[untouched], ids[untouched])
    assert all(len(set(row.tolist())) == len(row) for row in found.positions)


def test_eighty_ten_ten(tokenizer: Tokenizer) -> None:
    ids = rows(tokenizer).repeat(40, 1)
    masking = Masking(0.3)
    found = masking.apply(ids, uniform(len(ids), masking.numbers(40)), Tables(tokenizer))
    counted = found.weights.bool()
    shown, asked = found.inputs.gather(1, found.positions)[counted], found.targets[counted]
    hidden, same = (shown == tokenizer.mask).float().mean(), (shown == asked).float().mean()
    assert hidden == pytest.approx(0.8, abs=0.01) and same == pytest.approx(0.1, abs=0.015)
    assert not tokenizer.special[shown[shown != tokenizer.mask]].any()


def test_whole_words_are_asked_together(tokenizer: Tokenizer) -> None:
    ids, masking = rows(tokenizer), Masking(0.4, hidden=1.0, random=0.0, whole_words=True)
    found = masking.apply(ids, uniform(len(ids), masking.numbers(40)), Tables(tokenizer))
    assert found.weights.sum() > 100
    for row, inputs in zip(ids, found.inputs):
        words: list[list[bool]] = []
        for old, new in zip(row.tolist(), inputs.tolist()):
            if tokenizer.special[old]:
                assert old == new
            elif tokenizer.continues[old]:
                words[-1].append(new == tokenizer.mask)
            else:
                words.append([new == tokenizer.mask])
        assert all(len(set(word)) == 1 for word in words)


def test_draws_for_judging_depend_on_the_row_alone() -> None:
    ids = torch.randint(0, 1000, (500, 20), generator=torch.Generator().manual_seed(0))
    draws = fixed_draws(ids, 60)
    assert torch.equal(draws[7:9], fixed_draws(ids[7:9], 60)) and draws.min() >= 0 and draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.01) and draws.var() == pytest.approx(1 / 12, abs=0.005)
    assert len(draws.unique()) > 0.99 * draws.numel()
    swapped = ids.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert (fixed_draws(swapped, 60) != draws).any()


def test_impossible_shares() -> None:
    with pytest.raises(allmlp.UserError, match="cannot exceed 1 together"):
        Masking(hidden=0.8, random=0.3)


# --- training ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Numbers that count on: every token follows from its neighbours."""
    folder = tmp_path_factory.mktemp("corpus")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    text = "\n\n".join(" ".join(names[(start + i) % 10] for i in range(30)) for start in range(10))
    for part in ("train", "test"):
        (folder / f"{part}.txt").write_text(text)
    return Corpus(
        str(folder / "train.txt"), str(folder / "test.txt"), Tokenize(vocabulary=80), 16, cache=str(folder / "cache")
    )


def run(data: Corpus, model: Any, task: Any = MaskedLm(), steps: int = 12, **changes: Any) -> Run:
    plain = Run(
        model=model,
        task=task,
        data=data,
        batch=8,
        budget=Budget(steps=steps),
        optim=AdamW(lr=1e-2),
        clip=1.0,
        cadence=Cadence(log=1, evaluate=6, save=4),
    )
    return plain.replace(**changes)


GMLP = gmlp_text(2, 32, 64)


@pytest.mark.parametrize("model", [GMLP, mixer_text(2, 32, 16, 64)], ids=["gmlp", "mixer"])
def test_it_learns_to_count(data: Corpus, model: Any, tmp_path: Path) -> None:
    cadence = Cadence(log=50, evaluate=250, save=250)
    result = loop.train(run(data, model, steps=250, cadence=cadence), tmp_path, "cpu")
    assert result["perplexity"] < 2.5 and result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    records = log.read(tmp_path / log.METRICS)
    assert records[0]["tokens/s"] > 0
    assert {"tokenizer.json", "inputs.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    assert loop.judge_again(tmp_path, "cpu") == pytest.approx(result)


def test_fill_in_and_write_from_the_command_line(
    data: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cadence = Cadence(log=100, evaluate=300, save=300)
    loop.train(run(data, GMLP, steps=300, cadence=cadence), tmp_path / "mlm", "cpu")
    causal = gmlp_text(2, 32, 64, causal=True)
    loop.train(run(data, causal, CausalLm(), 300, cadence=cadence), tmp_path / "causal", "cpu")

    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert not caught.value.code
        return capsys.readouterr().out

    capsys.readouterr()
    text = "one two [MASK] four five six seven"
    assert command("predict", str(tmp_path / "mlm"), text, "--top", "1").startswith(f"{text}: three")
    written = command("generate", str(tmp_path / "causal"), "--prompt", "four five", "--temperature", "0")
    assert written.startswith("four five six seven eight nine zero one")
    seeded = [command("generate", str(tmp_path / "causal"), "--seed", str(seed)) for seed in (3, 3, 4)]
    assert seeded[0] == seeded[1] and len(seeded[0].split()) > 3
    for arguments, message in (
        (["predict", str(tmp_path / "causal"), "x"], "writes text: use allmlp generate"),
        (["generate", str(tmp_path / "mlm")], "does not write text"),
        (["predict", str(tmp_path / "mlm"), "no gap"], r"has no [MASK]"),
        (["generate", str(tmp_path / "causal"), "--prompt", "one " * 40], "shorten it"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_writing_with_a_cache_is_reading_at_once(data: Corpus) -> None:
    opened = data.open()
    model = allmlp.create(gmlp_text(2, 32, 64, length=16, vocabulary=len(opened.tokenizer), causal=True), seed=0).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    ids = [opened.tokenizer.first, *opened.tokenizer.encode(["one two"])[0]]
    for number in write(model, opened.tokenizer, "one two", 8, temperature=0.0):
        with torch.no_grad():
            scores = model(torch.tensor([ids]))[0, -1]
        scores[[opened.tokenizer.pad, opened.tokenizer.unknown, opened.tokenizer.first, opened.tokenizer.mask]] = -1e9
        assert number == int(scores.argmax())
        ids.append(number)


@pytest.mark.parametrize("task", [MaskedLm(), CausalLm()], ids=repr)
def test_interrupted_in_mid_corpus_it_goes_on(
    data: Corpus, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gmlp_text(2, 32, 64, causal=isinstance(task, CausalLm))
    loop.train(run(data, model, task), tmp_path / "whole", "cpu")
    train_with_break(run(data, model, task), tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def test_judging_does_not_depend_on_the_batch(data: Corpus, tmp_path: Path) -> None:
    loop.train(run(data.replace(mix=False), GMLP), tmp_path, "cpu")
    opened = data.replace(mix=False).like(str(tmp_path)).open()
    model = allmlp.load(tmp_path)
    task = MaskedLm().build(model, opened)
    with torch.no_grad():
        found = [
            task.evaluate(model, [opened.test.fetch(part) for part in torch.arange(len(opened.test)).split(size)])
            for size in (3, 20)
        ]
    for name in found[0]:
        torch.testing.assert_close(torch.stack(found[0][name]), torch.stack(found[1][name]))


def test_padding_never_changes_an_answer(data: Corpus, tmp_path: Path) -> None:
    opened = data.open()
    model = allmlp.create(GMLP.configure(vocabulary=len(opened.tokenizer), length=16), seed=0).eval()
    alone = fill(model, opened.tokenizer, "one [MASK] three")
    ids = [opened.tokenizer.first, *opened.tokenizer.encode(["one [MASK] three"])[0], opened.tokenizer.last]
    padded = torch.tensor([ids + [opened.tokenizer.pad] * (16 - len(ids))])
    with torch.no_grad():
        scores = model(padded, padded != opened.tokenizer.pad)[0, ids.index(opened.tokenizer.mask)].softmax(0)
    assert [word for word, _ in alone[0]] == [opened.tokenizer.word(int(n)) for n in scores.topk(5).indices]


def test_models_and_data_that_do_not_fit(data: Corpus, tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="needs a model that reads text"):
        loop.train(run(data, small().model), tmp_path / "a", "cpu")
    with pytest.raises(allmlp.UserError, match="needs a bidirectional model"):
        loop.train(run(data, gmlp_text(2, 32, 64, causal=True)), tmp_path / "b", "cpu")
    with pytest.raises(allmlp.UserError, match="needs a causal model"):
        loop.train(run(data, GMLP, CausalLm()), tmp_path / "c", "cpu")
    with pytest.raises(allmlp.UserError, match="learns from labelled pictures, not from running text"):
        loop.train(run(data, small().model, Classify()), tmp_path / "d", "cpu")
    with pytest.raises(allmlp.UserError, match="learns from running text, not from labelled pictures"):
        loop.train(run(Blobs(), GMLP), tmp_path / "e", "cpu")  # type: ignore[arg-type]
    loop.train(run(data, GMLP, steps=1), tmp_path / "f", "cpu")
    other = Tokenize(vocabulary=30).build(TEXT)
    (tmp_path / "f" / "tokenizer.json").write_text(other.to_json())
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(tmp_path / "f"), "one [MASK]"])
    assert caught.value.code == 2
