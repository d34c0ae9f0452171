"""Rows of several documents that do not see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allmlp
from allmlp import compilation
from allmlp.data.corpus import Corpus
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.tokenizer import SPECIAL_TOKENS, TokenizerConfig
from allmlp.layers import Attention, RelativePositionBias, TinyAttention, TokenLinear
from allmlp.models.gmlp import gmlp_text
from allmlp.models.seq2seq import resmlp_seq2seq
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.translate import Translation
from allmlp.training import train
from test_generate import hub_tokenizer
from train.runs import small
from train.test_train import losses

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]))
    documents = [" ".join(WORDS[: 1 + number % 10] * (1 + number % 3)) for number in range(80)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    place, tokenize = str(folder / "text.txt"), TokenizerConfig(path=str(folder / "vocab.txt"))
    return Corpus(place, place, tokenize, 16, separate_documents=True, cache=str(folder))


def models() -> dict[str, Any]:
    text = gmlp_text(2, 16, 32, seq_len=16, vocab_size=15)
    resmlp = text.replace(block=text.block.replace(token=TokenLinear(), channel=text.block.channel.replace(inner=None)))
    relative = text.block.replace(token=Attention(2, bias=RelativePositionBias()))
    return {
        "gmlp": text,
        "amlp": gmlp_text(2, 16, 32, seq_len=16, vocab_size=15, attention=TinyAttention(8)),
        "resmlp": resmlp,
        "attention": text.replace(block=text.block.replace(token=Attention(2))),
        "relative": text.replace(block=relative),
    }


def test_rows_hold_all_documents_in_order(corpus: Corpus) -> None:
    """Every part once, between [CLS] and [SEP]; fewer rows than without packing, and none could be filled more."""
    dataset, plain = corpus.load(), corpus.replace(separate_documents=False, packing=False).load()
    pad, first = dataset.tokenizer.pad_token_id, dataset.tokenizer.cls_token_id
    rows, single = dataset.train.examples.ids, plain.train.examples.ids
    assert len(rows) < len(single)
    assert torch.equal(rows[rows != pad], single[single != pad])
    assert bool((rows[:, 0] == first).all())
    numbers = dataset.separation(rows)["documents"]
    assert torch.equal(numbers == 0, rows == pad) and int(numbers.max()) > 1
    filled = [(row != pad).sum() for row in rows]
    following = [int((row == first).nonzero()[1] if (row == first).sum() > 1 else (row != pad).sum()) for row in rows]
    assert all(before + after > 16 for before, after in zip(filled, following[1:])), "the next part would have fit"


@pytest.mark.parametrize("name", models())
def test_documents_do_not_see_each_other(name: str) -> None:
    """Other tokens in one document leave the features of the others alone, and change them without separation."""
    model = allmlp.create(models()[name], seed=1).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    ids = torch.randint(5, 15, (1, 16), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[1] * 5 + [2] * 6 + [3] * 3 + [0] * 2])
    other = torch.where(documents == 2, (ids - 4) % 10 + 5, ids)
    same = [model.forward_features(row, documents=documents) for row in (ids, other)]
    assert torch.equal(same[0][:, :5], same[1][:, :5]) and torch.equal(same[0][:, 11:14], same[1][:, 11:14])
    assert not torch.allclose(same[0][:, 5:11], same[1][:, 5:11])
    mixed = [model.forward_features(row) for row in (ids, other)]
    assert not torch.allclose(mixed[0][:, :5], mixed[1][:, :5])


@pytest.mark.parametrize("name", models())
def test_one_document_is_an_ordinary_row(name: str) -> None:
    """The first document of a row has the features it has alone, with padding."""
    model = allmlp.create(models()[name], seed=1).eval()
    ids = torch.randint(5, 15, (1, 16), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[1] * 9 + [2] * 7])
    packed, alone = model.forward_features(ids, documents=documents), model.forward_features(ids, documents == 1)
    torch.testing.assert_close(packed[:, :9], alone[:, :9])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_training(
    causal: bool, compiled: bool, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    model = gmlp_text(2, 16, 32, causal=causal)
    task = CausalLM() if causal else MaskedLM()
    run = small(model=model, task=task, data=corpus, ema_decay=None, batch_size=8)
    results = train(run.replace(compile=compiled), tmp_path / "run", "cpu")
    assert results["perplexity"] < results["unigram_perplexity"] * 2
    if compiled:
        train(run, tmp_path / "eager", "cpu")
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)


def test_a_causal_model_predicts_no_beginnings(corpus: Corpus) -> None:
    dataset = corpus.load()
    model = allmlp.create(CausalLM().configure_model(gmlp_text(1, 16, 32, causal=True), dataset))
    ids = dataset.train.examples.ids[:4].long()
    _, _, real = CausalLM().build(model, dataset).token_losses(model, ids)
    special = torch.tensor([dataset.tokenizer.cls_token_id, dataset.tokenizer.pad_token_id])
    assert torch.equal(real.bool(), ~torch.isin(ids[:, 1:], special)) and (ids[:, 1:] == special[0]).any()


SPECIAL = {"gpt2": ("<|endoftext|>",), "llama": ("<|begin_of_text|>", "<|end_of_text|>")}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", SPECIAL)
def test_an_end_that_is_also_padding_is_predicted(name: str, separate: bool, tmp_path: Path) -> None:
    """With the tokenizers of GPT-2, whose one special token is start, end and padding, and of Llama: once per text."""
    hub_tokenizer(tmp_path, *SPECIAL[name])
    file = tmp_path / "text.txt"
    file.write_text("abc\n\nde\n\nfghijk")
    config = TokenizerConfig(path=str(tmp_path))
    data = Corpus(str(file), str(file), config, 12, packing=separate, separate_documents=separate, cache=str(tmp_path))
    dataset = data.load()
    start, end = dataset.tokenizer.cls_token_id, dataset.tokenizer.sep_token_id
    texts = dataset.tokenizer.encode(["abc", "de", "fghijk"])
    model = allmlp.create(CausalLM().configure_model(gmlp_text(1, 16, 32, causal=True), dataset))
    ids = dataset.train.examples.ids.long()
    module = CausalLM().build(model, dataset)
    _, _, real = module.token_losses(model, ids)
    assert ids[:, 1:][real.bool()].tolist() == [token for text in texts for token in (*text, end)]
    assert module.loss_weight(ids) == real.sum() == 14
    if separate:
        assert ids[0].tolist() == [start, *texts[0], end, start, *texts[1], end, end, end, end]
        assert dataset.separation(ids)["documents"].tolist() == [[1] * 5 + [2] * 4 + [0] * 3, [1] * 8 + [0] * 4]


@pytest.mark.parametrize("name", SPECIAL)
def test_translation_predicts_an_end_that_is_also_padding(name: str, tmp_path: Path) -> None:
    hub_tokenizer(tmp_path, *SPECIAL[name])
    (tmp_path / "pairs.tsv").write_text("de\ten\na\tbcd\nef\tg\n")
    place = str(tmp_path / "pairs.tsv")
    dataset = ParallelCorpus(place, place, tokenizer=TokenizerConfig(path=str(tmp_path)), seq_len=8).load()
    model = allmlp.create(Translation().configure_model(resmlp_seq2seq(1, 16), dataset))
    module, masks = Translation().build(model, dataset), []
    model.register_forward_pre_hook(lambda _, inputs: masks.append(inputs[2]))
    source, target = (part.long() for part in dataset.train.examples[:2])
    _, _, real = module.token_losses(model, source, target, target)
    assert real.sum(1).tolist() == [4, 2] and module.loss_weight(source, target, target) == 6
    assert masks[0].sum(1).tolist() == [2, 3]


def test_what_cannot_separate_documents(corpus: Corpus) -> None:
    mixer = allmlp.create("mixer_nano")
    with pytest.raises(allmlp.UserError, match="TokenMlp mixes all tokens of a row"):
        mixer(torch.rand(1, 3, 32, 32), documents=torch.ones(1, 64, dtype=torch.long))
    with pytest.raises(allmlp.UserError, match="without packing a row has one document"):
        corpus.replace(packing=False)
