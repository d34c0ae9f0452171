"""Sampling against transformers, and text that is streamed while it is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

import allmlp
from allmlp.cli.app import next_prediction
from allmlp.data.preprocessing import TextPreprocessing, write_preprocessing
from allmlp.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from allmlp.models.gmlp import gmlp_text
from allmlp.models.gpt2 import gpt2
from allmlp.prediction import generate as generate_from
from allmlp.prediction.predictor import check_vocabulary
from allmlp.tasks.causal_lm import continue_text, generate, sample, stream_text, truncate
from allmlp.weights.convert import convert
from command import run
from folders import text_folder


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.9), (None, 0.3), (5, None), (5, 0.6), (100, 1e-9), (3, 1.0)])
def test_the_kept_tokens_are_those_of_transformers(top_k: int | None, top_p: float | None) -> None:
    transformers = pytest.importorskip("transformers")
    for seed in range(20):
        logits = 3 * torch.randn(40, generator=torch.Generator().manual_seed(seed))
        expected = logits[None]
        if top_k is not None:
            expected = transformers.TopKLogitsWarper(top_k)(None, expected)
        if top_p is not None:
            expected = transformers.TopPLogitsWarper(top_p)(None, expected)
        found = truncate(logits.softmax(0), top_k, top_p)
        torch.testing.assert_close(found / found.sum(), expected[0].softmax(0))


def test_samples_follow_the_tempered_probabilities() -> None:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor([2.0, 1.0, 0.0, -1.0])
    found = torch.tensor([sample(logits, 2.0, 3, None, generator) for _ in range(4000)]).bincount(minlength=4) / 4000
    expected = torch.tensor([1.0, 0.5, 0.0, -torch.inf]).softmax(0)
    assert found[3] == 0 and (found - expected).abs().max() < 0.03


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_streamed_pieces_are_the_whole_text(algorithm: str) -> None:
    texts = ["Don't stop, it's über 100 %!", "naïve café: 日本語 and 🙂 signs", "a line\nanother  line"]
    tokenizer = TokenizerConfig(algorithm, vocab_size=300, lowercase=False).build(texts * 3)
    for text in texts:
        (ids,) = tokenizer.encode([text])
        pieces = list(stream_text(tokenizer, ids))
        assert "".join(pieces) == tokenizer.decode(ids)
        assert len(pieces) >= 3 and "\ufffd" not in "".join(pieces)
    assert list(stream_text(tokenizer, [])) == [""]


def test_text_comes_while_it_is_generated() -> None:
    tokenizer = TokenizerConfig(vocab_size=60).build(["one two three four five"] * 3)
    (ids,) = tokenizer.encode(["one two three four"])
    source = iter(ids)
    assert next(stream_text(tokenizer, source)) == "one" and list(source)


def hub_tokenizer(folder: Path, *special: str) -> None:
    """Bytes as tokens, and a GPT-2's or Llama's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = HubTokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens(list(special))
    built.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "special", [("<|endoftext|>",), ("<|begin_of_text|>", "<|end_of_text|>")], ids=["gpt2", "llama"]
)
def test_tokenizers_of_causal_models(special: tuple[str, ...], tmp_path: Path) -> None:
    hub_tokenizer(tmp_path, *special)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.cls_token_id == 256 and tokenizer.sep_token_id == 255 + len(special)
    assert tokenizer.special_tokens_mask.nonzero().flatten().tolist() == list(range(256, 256 + len(special)))
    with pytest.raises(allmlp.UserError, match=r"has no \[MASK\]"):
        _ = tokenizer.mask_token_id


def test_generation_equals_that_of_transformers(tmp_path: Path) -> None:
    """A GPT-2 with its tokenizer, converted: the same text, greedily."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=257, n_positions=40, n_embd=16, n_layer=2, n_head=2, eos_token_id=256)
    peer = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in peer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    peer.save_pretrained(tmp_path / "theirs")
    hub_tokenizer(tmp_path / "theirs", "<|endoftext|>")
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    tokenizer = load_tokenizer(tmp_path / "ours")
    ids = [256, *tokenizer.encode(["ab"])[0]]
    found = peer.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=256)[0, 3:].tolist()
    expected = found[: found.index(256)] if 256 in found else found
    assert expected == list(generate(allmlp.load(tmp_path / "ours"), tokenizer, "ab", 12, temperature=0))
    written = "".join(generate_from(tmp_path / "ours", "ab", 12, temperature=0))
    assert written == tokenizer.decode([*ids[1:], *expected]) and len(expected) > 3


@pytest.mark.parametrize("family", ["gpt2_tiny", "llama_tiny"])
@pytest.mark.parametrize(
    ("special", "start", "ends", "pad"),
    [
        (("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), 258, 259, 256),
        (("<|endoftext|>",), 256, 256, None),
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), 256, [257, 258], None),
        ((), None, None, None),
    ],
    ids=["ours", "gpt2", "llama", "none"],
)
def test_a_model_for_transformers_knows_the_tokens_that_start_and_end_a_text(
    family: str, special: tuple[str, ...], start: int, ends: int | list[int], pad: int, tmp_path: Path
) -> None:
    """By default transformers starts and ends texts with the ids of the published models."""
    transformers = pytest.importorskip("transformers")
    model = allmlp.create(family, overrides={"stem.vocab_size": 261, "depth": 1})
    allmlp.save(model, tmp_path / "ours")
    if special:
        hub_tokenizer(tmp_path / "ours", *special)
    convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="hf")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (start, ends, pad)


def test_the_end_of_a_turn_ends_the_text_and_padding_is_never_chosen(tmp_path: Path) -> None:
    hub_tokenizer(tmp_path, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    tokenizer = load_tokenizer(tmp_path)
    model = gpt2(1, 8, 2, 9, 320).build().eval()
    check_vocabulary(model, tokenizer, "a folder")
    for vocab_size in (258, 300, 64 * 30):
        with pytest.raises(allmlp.UserError, match=f"has 259 tokens, the model {vocab_size}: they do not match"):
            check_vocabulary(gpt2(1, 8, 2, 9, vocab_size).build(), tokenizer, "a folder")

    with pytest.raises(allmlp.UserError, match="they do not match"):  # of a model that fills in words, all are chosen
        check_vocabulary(gmlp_text(1, 8, 8, vocab_size=320).build(), tokenizer, "a folder")

    def choose(logits: Tensor) -> int:
        assert len(logits) == 320 and logits[259:].isinf().all() and logits[:256].isfinite().all()
        return next(chosen)

    for stop in (257, 258):
        chosen = iter([3, 4, stop, 5])
        assert list(continue_text(model, tokenizer, [256], 8, choose)) == [3, 4]


def test_the_end_of_a_turn_ends_the_text_in_transformers_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf = pytest.importorskip("allmlp.hf")
    model = gpt2(1, 8, 2, 9, 320).build()
    allmlp.save(model, tmp_path)
    hub_tokenizer(tmp_path, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    wrapped, scores = hf.wrap(tmp_path), torch.zeros(320)

    def prefer(module: object, given: object, found: Any) -> None:
        found.logits.copy_(scores.expand_as(found.logits))

    wrapped.register_forward_hook(prefer)
    for best, expected in (([258, 65], [258]), ([257, 65], [257]), ([256, 300, 65], [65] * 8)):
        scores.zero_()[best] = torch.arange(len(best), 0, -1).float()
        assert wrapped.generate(torch.tensor([[256]]), do_sample=False, max_new_tokens=8)[0, 1:].tolist() == expected
    wrapped.save_pretrained(tmp_path / "saved")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [257, 258]


def test_settings_of_sampling_are_checked() -> None:
    tokenizer: Tokenizer = TokenizerConfig(vocab_size=40).build(["one two"])
    model = gpt2(1, 8, 2, 9, len(tokenizer)).build().eval()
    for settings, message in (
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"temperature": 1e-9}, "temperature must be 0"),
        ({"temperature": 1e-300}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
    ):
        with pytest.raises(allmlp.UserError, match=message):
            generate(model, tokenizer, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "causal", "command"),
    [
        ("text", True, "generate {} --prompt TEXT"),
        ("text", False, "predict {} 'TEXT WITH [MASK]'"),
        ("classes", True, "predict {} TEXT"),
        ("span", False, "predict {} QUESTION --context TEXT"),
    ],
)
def test_the_next_command_is_one_of_the_model(
    task: Any, causal: bool, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allmlp.save(allmlp.create("gpt2_tiny", overrides={"block.token.causal": causal}), tmp_path)
    write_preprocessing(tmp_path, TextPreprocessing(task, 128))
    next_prediction(tmp_path)
    (tmp_path / "preprocessing.json").unlink()
    next_prediction(tmp_path)
    assert capsys.readouterr().err == f"next: allmlp {command.format(tmp_path)}\nnext: allmlp show {tmp_path}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "inf"), "temperature must be 0"),
        (("--prompt", 9 * "one "), "shorten it"),
        (("--dtype", "int8"), "not in int8"),
        (("--device", "toaster"), "toaster"),
    ],
    ids=["temperature", "prompt", "dtype", "device"],
)
def test_an_error_comes_before_any_text(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = TokenizerConfig(vocab_size=40).build(["one two"])
    allmlp.save(gpt2(1, 8, 2, 9, len(tokenizer)).build(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf8")
    write_preprocessing(tmp_path, TextPreprocessing("text", 9))
    code, out, err = run(capsys, "generate", tmp_path, "--prompt", "one two", *options)
    assert code == 2 and not out and message in err and err.count("\n") == 1


def test_a_tiny_top_p_leaves_the_most_probable_token() -> None:
    probabilities = torch.tensor([0.2, 0.5, 0.3])
    assert truncate(probabilities, None, 1e-300).tolist() == [0.0, 0.5, 0.0]
    assert int((truncate(torch.full((4,), 0.25), 1, None) > 0).sum()) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_has_diverged_is_named(
    temperature: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = text_folder(tmp_path, "causal")
    model = allmlp.load(folder)
    with torch.no_grad():
        next(model.norm.parameters()).fill_(torch.nan)  # type: ignore[operator, union-attr]
    allmlp.save(model, folder)
    code, out, err = run(capsys, "generate", folder, "--prompt", "cat", "--temperature", temperature)
    assert code == 2 and err.count("\n") == 1 and "the output of the model is NaN" in err and not out.strip()
