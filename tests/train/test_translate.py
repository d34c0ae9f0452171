"""Translation: beam search against brute force, scores against sacrebleu, a toy language learnt."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp import train as loop
from allmlp.data.order import Step, in_order
from allmlp.data.pairs import Pairs, SentencePairs
from allmlp.data.tokenizer import Tokenize, load
from allmlp.errors import MissingExtra, UserError
from allmlp.layers.head import Vocabulary
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.models.seq2seq import resmlp_seq2seq, transformer_seq2seq
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Cosine
from allmlp.tasks.beam import search
from allmlp.tasks.task import Moment
from allmlp.tasks.translate import Scores, Translation, TranslationModule, translate
from train.runs import small

FIRST, LAST = 1, 2
SPECS = {"resmlp": resmlp_seq2seq, "transformer": transformer_seq2seq}


# --- beam search ------------------------------------------------------------------------------------------


def tiny(name: str, seed: int = 0, sharpness: float = 2.0) -> EncoderDecoderModel:
    """A model of six words whose opinions are strong and differ from place to place."""
    spec = SPECS[name](1, 16, 2, length=8, vocabulary=6)
    spec = spec.replace(share=False, decoder=spec.decoder.replace(head=Vocabulary(tied=False)))
    model = allmlp.create(spec, seed=seed).eval()
    assert isinstance(model, EncoderDecoderModel)
    with torch.no_grad():
        for weight in (weight for name, weight in model.named_parameters() if "scale" in name):
            weight.fill_(1.0)
        model.get_parameter("decoder.head.proj.weight").mul_(sharpness)
    return model


def sources(*lengths: int, vocabulary: int = 6) -> tuple[Tensor, Tensor]:
    """Rows of other words than 0, which pads them, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return ids * mask, mask


@torch.no_grad()
def chances(model: EncoderDecoderModel, source: Tensor, words: list[int]) -> Tensor:
    """log p of the next word, computed from scratch."""
    return model(source.unsqueeze(0), torch.tensor([[FIRST, *words]]))[0, -1].log_softmax(0)


@torch.no_grad()
def scores(model: EncoderDecoderModel, source: Tensor, lines: list[tuple[int, ...]], alpha: float) -> Tensor:
    """Of whole sequences of one length."""
    ended = torch.tensor([[*line, LAST] for line in lines])
    begun = torch.tensor([[FIRST, *line] for line in lines])
    found = model(source.expand(len(lines), -1), begun).log_softmax(2).gather(2, ended.unsqueeze(2))
    return found.sum((1, 2)) / ((5 + ended.shape[1]) / 6) ** alpha


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("name", SPECS)
def test_a_wide_beam_finds_the_best_of_all_sequences(name: str, alpha: float) -> None:
    model = tiny(name, sharpness=1.0)
    source, mask = sources(3, 5, 1, 8)
    found = search(model, source, mask, FIRST, LAST, longest=4, beam=200, alpha=alpha)
    words = [word for word in range(6) if word != LAST]
    everything = [list(itertools.product(words, repeat=length)) for length in range(4)]
    assert sum(map(len, everything)) == 156
    for row, keep, answer in zip(source, mask, found):
        judged = [pair for lines in everything for pair in zip(scores(model, row[keep], lines, alpha).tolist(), lines)]
        assert tuple(answer) == max(judged)[1]


def plain_search(model: EncoderDecoderModel, source: Tensor, longest: int, beam: int, alpha: float) -> list[int]:
    """The same search for one sentence, without cache, batch and tensors."""
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        grown = [
            (total + float(chance), [*line, word])
            for total, line in alive
            for word, chance in enumerate(chances(model, source, line))
            if length < longest or word == LAST
        ]
        grown.sort(key=lambda pair: -pair[0])
        penalty = ((5 + length) / 6) ** alpha
        ended += [(total / penalty, line[:-1]) for total, line in grown[:beam] if line[-1] == LAST]
        alive = [pair for pair in grown if pair[1][-1] != LAST][:beam]
        best = max(ended, default=(-math.inf, []))[0]
        if len(ended) >= beam or (alive and best >= alive[0][0] / ((5 + longest) / 6) ** alpha):
            break
    return max(ended)[1]


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_reading_step_by_step_is_decoding_from_scratch(name: str, beam: int) -> None:
    lengths = set()
    for seed in range(4):
        model = tiny(name, seed)
        source, mask = sources(2, 6, 4, 8)
        found = search(model, source, mask, FIRST, LAST, longest=7, beam=beam, alpha=0.6)
        for row, keep, answer in zip(source, mask, found):
            assert answer == plain_search(model, row[keep], 7, beam, 0.6)
            lengths.add(len(answer))
    assert len(lengths) > 1


def test_beam_one_is_greedy() -> None:
    model = tiny("transformer")
    source, mask = sources(3, 7)
    for row, keep, answer in zip(source, mask, search(model, source, mask, FIRST, LAST, longest=7, beam=1)):
        words: list[int] = []
        while len(words) < 6 and (word := int(chances(model, row[keep], words).argmax())) != LAST:
            words.append(word)
        assert answer == words


@pytest.mark.parametrize("name", SPECS)
def test_a_sentence_is_translated_alike_alone_and_among_longer_ones(name: str) -> None:
    model = tiny(name)
    source, mask = sources(1, 8, 3, 5)
    together = search(model, source, mask, FIRST, LAST, longest=7)
    for row, keep, answer in zip(source, mask, together):
        assert search(model, row[keep][None], keep[keep][None], FIRST, LAST, longest=7) == [answer]


def test_banned_words_are_not_written() -> None:
    model = tiny("resmlp")
    source, mask = sources(3, 5)
    banned = torch.tensor([True, True, False, False, True, True])
    for answer in search(model, source, mask, FIRST, LAST, 7, banned):
        assert set(answer) <= {3}
    assert search(model, source[:0], mask[:0], FIRST, LAST, 7) == []
    with pytest.raises(UserError, match="beam >= 1"):
        search(model, source, mask, FIRST, LAST, 7, beam=0)


# --- the task ---------------------------------------------------------------------------------------------

WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five", "sechs": "six"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLMLP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Numbers that are translated and said backwards."""
    folder = tmp_path_factory.mktemp("toy")
    chance = random.Random(0)
    for name, count in (("train", 600), ("test", 40)):
        lines = ["de\ten"]
        for _ in range(count):
            words = chance.choices(list(WORDS), k=chance.randint(1, 4))
            lines.append(" ".join(words) + "\t" + " ".join(WORDS[word] for word in reversed(words)))
        (folder / f"{name}.tsv").write_text("\n".join(lines), encoding="utf8")
    return Pairs(
        str(folder / "train.tsv"),
        str(folder / "test.tsv"),
        tokenize=Tokenize("bpe", 300, lowercase=False),
        length=8,
    )


def run(data: Pairs, spec: EncoderDecoder, steps: int) -> Run:
    return Run(
        model=spec,
        task=Translation(),
        data=data,
        batch=64,
        budget=Budget(steps=steps),
        optim=AdamW(lr=1e-2),
        schedule=Cosine(warmup=0.1),
        clip=1.0,
        cadence=Cadence(log=100, evaluate=1000, save=1000),
    )


@pytest.fixture(scope="module")
def learnt(toy: Pairs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("learnt") / "run"
    return out, loop.train(run(toy, resmlp_seq2seq(1, 32, 4), 200), out, "cpu")


def test_a_toy_language_is_learnt(learnt: tuple[Path, dict[str, float]]) -> None:
    out, results = learnt
    assert results["bleu"] > 50 and results["accuracy"] > 0.9, results
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]))
    assert set(results) == {"bleu", "chrf", "perplexity", "loss", "accuracy"}
    assert loop.judge_again(out, "cpu") == pytest.approx(results)
    model, tokenizer = allmlp.load(out).train(), load(out)
    assert translate(model, tokenizer, ["drei eins vier"]) == ["four one three"] and model.training


def test_odd_sentences_are_survived(learnt: tuple[Path, dict[str, float]]) -> None:
    model, tokenizer = allmlp.load(learnt[0]), load(learnt[0])
    odd = ["", "   ", "zwei " * 1000, "😀 👩‍👩‍👧", "שלום עולם", "\x00\n\t", "drei eins vier"]
    found = translate(model, tokenizer, odd, beam=2)
    assert len(found) == len(odd) and found[0] == "" and found[-1] == "four one three"
    assert translate(model, tokenizer, odd[::-1] * 20, beam=2) == found[::-1] * 20
    assert translate(model, tokenizer, []) == []
    with pytest.raises(UserError, match="into a list"):
        translate(model, tokenizer, "drei")  # type: ignore[arg-type]


def test_the_transformer_learns_too(toy: Pairs, tmp_path: Path) -> None:
    results = loop.train(run(toy, transformer_seq2seq(1, 32, 4), 20), tmp_path / "run", "cpu")
    assert results["loss"] < 4 and 0 <= results["bleu"] <= 100


def module(
    data: Pairs, task: Translation = Translation(), name: str = "resmlp"
) -> tuple[TranslationModule, SentencePairs]:
    dataset = data.open()
    model = allmlp.create(task.fit(SPECS[name](1, 32, 4), dataset), seed=0).eval()
    built = task.build(model, dataset)
    assert isinstance(built, TranslationModule)
    return built.eval(), dataset


def judged(task: TranslationModule, dataset: SentencePairs, batch: int, world: int = 1) -> dict[str, float]:
    """What the loop makes of several processes' sums."""
    with torch.no_grad():
        parts = [
            task.evaluate(task.model, in_order(dataset.test, batch, torch.device("cpu"), rank, world))
            for rank in range(world)
        ]
    sums = {name: [float(sum(part[name][side] for part in parts)) for side in (0, 1)] for name in parts[0]}
    return task.summary({name: total / max(count, 1) for name, (total, count) in sums.items()})


@pytest.mark.parametrize("name", SPECS)
def test_batches_and_processes_do_not_matter(toy: Pairs, name: str) -> None:
    task, dataset = module(toy, Translation(beam=2), name)
    expected = judged(task, dataset, 64)
    assert judged(task, dataset, 7) == pytest.approx(expected)
    assert judged(task, dataset, 9, world=3) == pytest.approx(expected)


def test_only_some_are_translated_while_training(toy: Pairs) -> None:
    task, dataset = module(toy, Translation(beam=1, judged=7))
    some = judged(task, dataset, 5)
    assert judged(task, dataset, 5, world=2) == pytest.approx(some)
    numbers = dataset.test.fetch(torch.arange(7))
    found = Scores().count(
        translate(task.model, dataset.tokenizer, [dataset.tokenizer.decode(row) for row in numbers.source.tolist()], 1),
        [dataset.references[number] for number in numbers.number.tolist()],
    )
    assert {name: some[name] for name in ("bleu", "chrf")} == pytest.approx(Scores().total(found))
    finished = Translation(judged=7).judge(task.model, dataset)
    assert isinstance(finished, TranslationModule) and finished.judged == len(dataset.test)
    held = dataset.hold_out(20)
    again = Translation(judged=5).build(task.model, held)
    numbers = held.test.fetch(torch.arange(20)).number
    assert isinstance(again, TranslationModule) and int((numbers <= again.last).sum()) == again.judged == 5


def test_scores_are_those_of_sacrebleu() -> None:
    import sacrebleu

    texts = ["the cat sat on the mat .", "a dog", "", "one two three four five six", "nothing like it"]
    references = ["the cat sat on a mat.", "a dog barks", "silence", "one two three four five six", "x"]
    scores = Scores()
    halves = [scores.count(texts[:2], references[:2]), scores.count([], []), scores.count(texts[2:], references[2:])]
    for chosen, sums in ((5, [sum(column) for column in zip(*halves)]), (2, halves[0])):
        assert scores.total(sums) == pytest.approx(
            {
                "bleu": sacrebleu.corpus_bleu(texts[:chosen], [references[:chosen]]).score,
                "chrf": sacrebleu.corpus_chrf(texts[:chosen], [references[:chosen]]).score,
            }
        )


@torch.no_grad()
def test_the_loss_is_of_real_tokens_alone(toy: Pairs) -> None:
    task, dataset = module(toy)
    batch = dataset.train.fetch(torch.arange(5))
    inputs = task.prepare(Step(0, 0.0, torch.arange(5), batch), Moment(0.0, torch.Generator()))
    loss, shown = task.learn(*inputs)
    pad, losses, right = dataset.tokenizer.pad, [], []
    for padded in zip(batch.source.long(), batch.target.long()):
        source, target = (row[row != pad] for row in padded)
        chance = task.model(source[None], target[None, :-1])[0].log_softmax(1)
        losses += (-0.9 * chance.gather(1, target[1:, None])[:, 0] - 0.1 * chance.mean(1)).tolist()
        right += (chance.argmax(1) == target[1:]).tolist()
    assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert float(shown["accuracy"]) == pytest.approx(sum(right) / len(right))
    assert task.unit == ("tokens", dataset.tokens)


def test_word_dropout_hides_words_alone(toy: Pairs) -> None:
    task, dataset = module(toy)
    batch = dataset.train.fetch(torch.arange(20))
    step, moment = Step(0, 0.0, torch.arange(20), batch), Moment(0.0, torch.Generator().manual_seed(1))
    whole = task.prepare(step, moment)
    task.spec = task.spec.replace(word_dropout=0.3)
    source, target, shown = task.prepare(step, moment)
    special = dataset.tokenizer.special
    assert torch.equal(target, whole[1])
    for before, after in ((whole[0], source), (target, shown)):
        hidden = before != after
        assert (after[hidden] == dataset.tokenizer.mask).all() and not special[before[hidden]].any()
        assert 0.2 < float(hidden.sum() / (~special[before]).sum()) < 0.4


def test_a_tokenizer_of_another_model_is_refused(toy: Pairs, learnt: tuple[Path, dict[str, float]]) -> None:
    model = allmlp.load(learnt[0])
    other = toy.replace(tokenize=toy.tokenize.replace(vocabulary=270)).open()
    for attempt in (
        lambda: translate(model, other.tokenizer, ["eins"]),
        lambda: Translation().build(model, other),
    ):
        with pytest.raises(UserError, match=r"tokenizer has 270 tokens and the model 300: use the tokenizer"):
            attempt()
    with pytest.raises(UserError, match=r"set data\.length=8"):
        Translation().build(model, toy.replace(length=20).like(str(learnt[0])).open())


def test_the_wrong_model_or_data_are_refused(toy: Pairs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs an encoder with a decoder"):
        Translation().fit(allmlp.create("bert_tiny").spec, toy.open())
    with pytest.raises(UserError, match="needs an encoder with a decoder"):
        translate(allmlp.create("bert_tiny"), toy.open().tokenizer, ["eins"])
    with pytest.raises(UserError, match="Translation learns from pairs of sentences, not from labelled pictures"):
        loop.train(small(task=Translation()), tmp_path / "run", "cpu")


def test_without_sacrebleu_one_line_says_so(toy: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sacrebleu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with pytest.raises(MissingExtra, match=r"^this needs sacrebleu: pip install 'allmlp\[text\]'$"):
        module(toy)


class Hidden:
    """An importer for which sacrebleu is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "sacrebleu":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
