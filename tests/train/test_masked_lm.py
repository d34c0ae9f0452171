"""Masked and causal language models: masking, training, evaluation, generation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import log
from allmlp import training as loop
from allmlp.cli import main
from allmlp.data.corpus import Corpus, TokenBatch
from allmlp.data.dataset import InMemory
from allmlp.data.tokenizer import Tokenizer, TokenizerConfig
from allmlp.models.gmlp import gmlp_text
from allmlp.models.gpt2 import gpt2
from allmlp.models.llama import llama
from allmlp.models.mixer import mixer_text
from allmlp.models.model import ModelSpec
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.tasks.causal_lm import CausalLM, generate
from allmlp.tasks.classify import Classify
from allmlp.tasks.masked_lm import MaskedLM, Masking, MaskingVocab, fill_masks, fixed_uniforms
from train.runs import Blobs, language, small
from train.test_train import losses, same_weights, train_interrupted

pytest.importorskip("tokenizers")
TEXT = ["the unbelievable cat sat on the red mat", "a dog jumped over the blue fence quickly"] * 10


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TokenizerConfig(vocab_size=70).build(TEXT)


def rows(tokenizer: Tokenizer, length: int = 40) -> torch.Tensor:
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    ids = [[cls, *found[: length - 2], sep] for found in tokenizer.encode(TEXT[:2] * 50)]
    return torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in ids])


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_fixed_number_of_ordinary_tokens_is_selected(tokenizer: Tokenizer, probability: float) -> None:
    ids, masking = rows(tokenizer), Masking(probability)
    found = masking.apply(ids, uniform(len(ids), masking.num_uniforms(40)), MaskingVocab(tokenizer))
    assert found.positions.shape == (100, masking.num_positions(40))
    real = (~tokenizer.special_tokens_mask[ids]).sum(1)
    assert torch.equal(found.weights.sum(1), (probability * real).round().clamp(min=1))
    selected = found.weights.bool()
    assert not tokenizer.special_tokens_mask[found.labels[selected]].any()
    assert torch.equal(found.labels, ids.gather(1, found.positions))
    untouched = torch.ones_like(ids, dtype=torch.bool).scatter(1, found.positions, ~selected)
    assert torch.equal(found.input_ids[untouched], ids[untouched])
    assert all(len(set(row.tolist())) == len(row) for row in found.positions)


def test_replacements_are_80_10_10(tokenizer: Tokenizer) -> None:
    ids = rows(tokenizer).repeat(40, 1)
    masking = Masking(0.3)
    found = masking.apply(ids, uniform(len(ids), masking.num_uniforms(40)), MaskingVocab(tokenizer))
    selected = found.weights.bool()
    inputs, labels = found.input_ids.gather(1, found.positions)[selected], found.labels[selected]
    masked, same = (inputs == tokenizer.mask_token_id).float().mean(), (inputs == labels).float().mean()
    assert masked == pytest.approx(0.8, abs=0.01) and same == pytest.approx(0.1, abs=0.015)
    assert not tokenizer.special_tokens_mask[inputs[inputs != tokenizer.mask_token_id]].any()


def test_whole_words_are_selected_together(tokenizer: Tokenizer) -> None:
    ids, masking = (
        rows(tokenizer),
        Masking(0.4, mask_token_fraction=1.0, random_token_fraction=0.0, whole_word_mask=True),
    )
    found = masking.apply(ids, uniform(len(ids), masking.num_uniforms(40)), MaskingVocab(tokenizer))
    assert found.weights.sum() > 100
    for row, inputs in zip(ids, found.input_ids):
        words: list[list[bool]] = []
        for old, new in zip(row.tolist(), inputs.tolist()):
            if tokenizer.special_tokens_mask[old]:
                assert old == new
            elif tokenizer.continuation_mask[old]:
                words[-1].append(new == tokenizer.mask_token_id)
            else:
                words.append([new == tokenizer.mask_token_id])
        assert all(len(set(word)) == 1 for word in words)


def test_uniforms_for_evaluation_depend_on_the_row_alone() -> None:
    ids = torch.randint(0, 1000, (500, 20), generator=torch.Generator().manual_seed(0))
    uniforms = fixed_uniforms(ids, 60)
    assert torch.equal(uniforms[7:9], fixed_uniforms(ids[7:9], 60)) and uniforms.min() >= 0 and uniforms.max() < 1
    assert uniforms.mean() == pytest.approx(0.5, abs=0.01) and uniforms.var() == pytest.approx(1 / 12, abs=0.005)
    assert len(uniforms.unique()) > 0.99 * uniforms.numel()
    swapped = ids.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert (fixed_uniforms(swapped, 60) != uniforms).any()


def test_fractions_above_1_are_refused() -> None:
    with pytest.raises(allmlp.UserError, match="must not exceed 1"):
        Masking(mask_token_fraction=0.8, random_token_fraction=0.3)


# --- training ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Rows that count upwards: every token follows from its neighbors."""
    folder = tmp_path_factory.mktemp("corpus")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    text = "\n\n".join(" ".join(names[(start + i) % 10] for i in range(30)) for start in range(10))
    for part in ("train", "test"):
        (folder / f"{part}.txt").write_text(text)
    return Corpus(
        str(folder / "train.txt"),
        str(folder / "test.txt"),
        TokenizerConfig(vocab_size=80),
        16,
        cache=str(folder / "cache"),
    )


def run(data: Corpus, model: Any, task: Any = MaskedLM(), steps: int = 12, **changes: Any) -> Run:
    plain = Run(
        model=model,
        task=task,
        data=data,
        batch_size=8,
        budget=Budget(steps=steps),
        optim=AdamW(lr=1e-2),
        max_grad_norm=1.0,
        log_every=1,
        eval_every=6,
        save_every=4,
    )
    return plain.replace(**changes)


GMLP = gmlp_text(2, 32, 64)


@torch.no_grad()
def test_losses_match_their_equations(data: Corpus) -> None:
    """With padded rows; mean over the selected tokens, and over the tokens that have a next one."""
    opened = data.replace(packing=False, seq_len=40).load()
    ids = opened.train.fetch(torch.arange(6)).ids.long()
    ids[1, 20:], ids[4, 7:] = opened.tokenizer.pad_token_id, opened.tokenizer.pad_token_id
    rows = [row[row != opened.tokenizer.pad_token_id] for row in ids]
    masked_lm, causal_lm = MaskedLM(Masking(0.3)), CausalLM()
    model = allmlp.create(masked_lm.configure_model(GMLP, opened), seed=0).eval()
    task, numbers = masked_lm.build(model, opened), uniform(6, masked_lm.masking.num_uniforms(40))
    found = masked_lm.masking.apply(ids, numbers, MaskingVocab(opened.tokenizer))
    terms = []
    for row, inputs, positions, weights in zip(rows, found.input_ids, found.positions, found.weights):
        log_p = model(inputs[None, : len(row)])[0].log_softmax(1)
        terms += [-log_p[i, row[i]] for i in positions[weights.bool()].tolist()]
    assert len(terms) < found.weights.numel()
    torch.testing.assert_close(task.compute_loss(ids, *found).total, torch.stack(terms).mean())
    model = allmlp.create(causal_lm.configure_model(gmlp_text(2, 32, 64, causal=True), opened), seed=0).eval()
    terms = [-model(row[None])[0].log_softmax(1)[i, row[i + 1]] for row in rows for i in range(len(row) - 1)]
    torch.testing.assert_close(causal_lm.build(model, opened).compute_loss(ids).total, torch.stack(terms).mean())


RARELY = {"log_every": 50, "eval_every": 1000, "save_every": 1000}


@pytest.fixture(scope="module")
def trained(data: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A masked language model that can count, and its evaluation."""
    out = tmp_path_factory.mktemp("masked")
    return out, loop.train(run(data, GMLP, steps=150, **RARELY), out, "cpu")


@pytest.mark.slow
def test_learns_to_count(trained: tuple[Path, dict[str, float]]) -> None:
    out, result = trained
    assert result["perplexity"] < 2.5 and result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    records = log.read_metrics(out / log.METRICS)
    assert records[0]["tokens/s"] > 0
    assert {"tokenizer.json", "preprocessing.json", "model.safetensors"} <= {file.name for file in out.iterdir()}
    assert loop.evaluate_checkpoint(out, "cpu") == pytest.approx(result)


@pytest.mark.slow
def test_mixer_learns_to_count(data: Corpus, tmp_path: Path) -> None:
    result = loop.train(run(data, mixer_text(2, 32, 16, 64), steps=250, **RARELY), tmp_path, "cpu")
    assert result["perplexity"] < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt2(2, 32, 2, 32, 64), llama(2, 32, 48, 4, 2, 32, 64)], ids=["GPT-2", "Llama"])
def test_causal_transformers_learn_to_count(model: ModelSpec, data: Corpus, tmp_path: Path) -> None:
    result = loop.train(run(data, model, CausalLM(), 150, **RARELY), tmp_path, "cpu")
    assert result["perplexity"] < 2.5


@pytest.mark.slow
def test_predict_and_generate_from_the_command_line(
    data: Corpus, trained: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked, _ = trained
    causal = gmlp_text(2, 32, 64, causal=True)
    loop.train(run(data, causal, CausalLM(), 150, **RARELY), tmp_path / "causal", "cpu")

    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert not caught.value.code
        return capsys.readouterr().out

    capsys.readouterr()
    text = "one two [MASK] four five six seven"
    assert command("predict", str(masked), text, "--top-k", "1").startswith(f"{text}: three")
    written = command("generate", str(tmp_path / "causal"), "--prompt", "four five", "--temperature", "0")
    assert written.startswith("four five six seven eight nine zero one")
    seeded = [command("generate", str(tmp_path / "causal"), "--seed", str(seed)) for seed in (3, 3, 4)]
    assert seeded[0] == seeded[1] and len(seeded[0].split()) > 3
    # The most probable token alone, whatever the temperature.
    for sampled in (["--top-p", "1e-9"], ["--top-k", "1"]):
        hot = ["--prompt", "four five", "--temperature", "5", *sampled]
        assert command("generate", str(tmp_path / "causal"), *hot) == written
    for arguments, message in (
        (["predict", str(tmp_path / "causal"), "x"], "is a causal language model: use allmlp generate"),
        (["generate", str(masked)], "not a causal language model"),
        (["predict", str(masked), "no gap"], r"has no [MASK]"),
        (["generate", str(tmp_path / "causal"), "--prompt", "one " * 40], "shorten it"),
        (["generate", str(tmp_path / "causal"), "--top-p", "0"], "top_p must be above 0 and at most 1, not 0"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_generation_with_cache_matches_full_forward(data: Corpus) -> None:
    opened = data.load()
    model = allmlp.create(
        gmlp_text(2, 32, 64, seq_len=16, vocab_size=len(opened.tokenizer), causal=True), seed=0
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    tokenizer = opened.tokenizer
    ids = [tokenizer.cls_token_id, *tokenizer.encode(["one two"])[0]]
    forbidden = tokenizer.special_tokens_mask.clone()
    forbidden[tokenizer.sep_token_id] = False
    for number in generate(model, tokenizer, "one two", 8, temperature=0.0):
        with torch.no_grad():
            scores = model(torch.tensor([ids]))[0, -1].masked_fill(forbidden, -torch.inf)
        assert number == int(scores.argmax())
        ids.append(number)


@pytest.mark.parametrize("task", [MaskedLM(), CausalLM()], ids=repr)
def test_resume_is_exact(data: Corpus, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gmlp_text(2, 32, 64, causal=isinstance(task, CausalLM))
    loop.train(run(data, model, task), tmp_path / "whole", "cpu")
    train_interrupted(run(data, model, task), tmp_path / "cut", monkeypatch)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def test_evaluation_does_not_depend_on_the_batch_size(data: Corpus, tmp_path: Path) -> None:
    loop.train(run(data.replace(packing=False), GMLP), tmp_path, "cpu")
    opened = data.replace(packing=False).for_model(str(tmp_path)).load()
    model = allmlp.load(tmp_path)
    task = MaskedLM().build(model, opened)
    with torch.no_grad():
        found = [
            task.evaluate(model, [opened.test.fetch(part) for part in torch.arange(len(opened.test)).split(size)])
            for size in (3, 20)
        ]
    for name in found[0]:
        torch.testing.assert_close(torch.stack(found[0][name]), torch.stack(found[1][name]))


def test_padding_does_not_change_predictions(data: Corpus, tmp_path: Path) -> None:
    opened = data.load()
    model = allmlp.create(GMLP.configure(vocab_size=len(opened.tokenizer), seq_len=16), seed=0).eval()
    (alone,) = fill_masks(model, opened.tokenizer, ["one [MASK] three"])
    tokenizer = opened.tokenizer
    ids = [tokenizer.cls_token_id, *tokenizer.encode(["one [MASK] three"])[0], tokenizer.sep_token_id]
    padded = torch.tensor([ids + [opened.tokenizer.pad_token_id] * (16 - len(ids))])
    with torch.no_grad():
        logits = model(padded, padded != tokenizer.pad_token_id)[0, ids.index(tokenizer.mask_token_id)]
    assert [word for word, _ in alone[0]] == [opened.tokenizer.id_to_token(int(n)) for n in logits.topk(5).indices]


def test_predicted_tokens_of_bytes_are_text() -> None:
    tokenizer = TokenizerConfig("bpe", 280).build(["un été chaud"] * 20)
    model = allmlp.create(GMLP.configure(vocab_size=len(tokenizer), seq_len=16), seed=0).eval()
    ((found,),) = fill_masks(model, tokenizer, ["un [MASK]"], len(tokenizer))
    assert " été" in [token for token, _ in found]


def test_unsuitable_models_and_data_are_refused(data: Corpus, tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="needs a model that reads text"):
        loop.train(run(data, small().model), tmp_path / "a", "cpu")
    with pytest.raises(allmlp.UserError, match="needs a bidirectional model"):
        loop.train(run(data, gmlp_text(2, 32, 64, causal=True)), tmp_path / "b", "cpu")
    with pytest.raises(allmlp.UserError, match="needs a causal model"):
        loop.train(run(data, GMLP, CausalLM()), tmp_path / "c", "cpu")
    with pytest.raises(allmlp.UserError, match="Classify needs labeled images, not "):
        loop.train(run(data, small().model, Classify()), tmp_path / "d", "cpu")
    with pytest.raises(allmlp.UserError, match=r"MaskedLM needs .*, not labeled images"):
        loop.train(run(Blobs(), GMLP), tmp_path / "e", "cpu")  # type: ignore[arg-type]
    loop.train(run(data, GMLP, steps=1), tmp_path / "f", "cpu")
    other = TokenizerConfig(vocab_size=30).build(TEXT)
    (tmp_path / "f" / "tokenizer.json").write_text(other.to_json())
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(tmp_path / "f"), "one [MASK]"])
    assert caught.value.code == 2


def test_unigram_perplexity_is_the_floor() -> None:
    """Ten equally frequent words: perplexity ten, and the entropy of their frequencies where they are not."""
    dataset = language().data.load()
    assert MaskedLM().floors(dataset, dataset.test) == {"unigram_perplexity": pytest.approx(10)}
    ids = dataset.train.examples.ids.clone()
    ids[:, 1:9] = 5  # eight of ten words are the first
    skewed = replace(dataset, train=InMemory(ids, batch_type=TokenBatch))
    counts = ids[:, 1:-1].flatten().bincount(minlength=15)[5:].double() + 1
    expected = math.exp(-(counts / counts.sum()).log().mean().item())
    assert MaskedLM().floors(skewed, dataset.test)["unigram_perplexity"] == pytest.approx(expected) and expected > 10
