"""Translation: beam search against brute force, metrics against sacrebleu, training on a toy language."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import allmlp
from allmlp import training as loop
from allmlp.analysis.attention_maps import alignment, attention_maps, text_input
from allmlp.analysis.target import load_target
from allmlp.cli.analyze import run_examples
from allmlp.data.parallel_corpus import ParallelCorpus, TranslationDataset
from allmlp.data.sampler import Batch, eval_batches
from allmlp.data.tokenizer import TokenizerConfig, load_tokenizer
from allmlp.errors import MissingExtra, UserError
from allmlp.layers.head import LMHead
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.models.seq2seq import resmlp_seq2seq, transformer_seq2seq
from allmlp.optim import AdamW
from allmlp.record import read_record
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.tasks.beam import beam_search
from allmlp.tasks.task import StepContext
from allmlp.tasks.translate import Translation, TranslationMetrics, TranslationModule, translate
from train.runs import small

BOS, EOS = 1, 2
SPECS = {"resmlp": resmlp_seq2seq, "transformer": transformer_seq2seq}


# --- beam search ------------------------------------------------------------------------------------------


def tiny(name: str, seed: int = 0, sharpness: float = 2.0) -> EncoderDecoderModel:
    """A model with six tokens whose predictions are confident and vary with the position."""
    spec = SPECS[name](1, 16, 2, seq_len=8, vocab_size=6)
    spec = spec.replace(tie_embeddings=False, decoder=spec.decoder.replace(head=LMHead(tied=False)))
    model = allmlp.create(spec, seed=seed).eval()
    assert isinstance(model, EncoderDecoderModel)
    with torch.no_grad():
        for weight in (weight for name, weight in model.named_parameters() if "scale" in name):
            weight.fill_(1.0)
        model.get_parameter("decoder.head.proj.weight").mul_(sharpness)
    return model


def sources(*lengths: int, vocab_size: int = 6) -> tuple[Tensor, Tensor]:
    """Rows of nonzero tokens, padded with 0, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return ids * mask, mask


@torch.no_grad()
def next_log_probs(model: EncoderDecoderModel, source: Tensor, words: list[int]) -> Tensor:
    """log p of the next token, without cache."""
    return model(source.unsqueeze(0), torch.tensor([[BOS, *words]]))[0, -1].log_softmax(0)


@torch.no_grad()
def scores(model: EncoderDecoderModel, source: Tensor, lines: list[tuple[int, ...]], alpha: float) -> Tensor:
    """Scores of complete sequences of equal length."""
    ended = torch.tensor([[*line, EOS] for line in lines])
    begun = torch.tensor([[BOS, *line] for line in lines])
    found = model(source.expand(len(lines), -1), begun).log_softmax(2).gather(2, ended.unsqueeze(2))
    return found.sum((1, 2)) / ((5 + ended.shape[1]) / 6) ** alpha


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("name", SPECS)
def test_wide_beam_finds_the_best_of_all_sequences(name: str, alpha: float) -> None:
    model = tiny(name, sharpness=1.0)
    source, mask = sources(3, 5, 1, 8)
    found = beam_search(model, source, mask, BOS, EOS, max_length=4, num_beams=200, length_penalty=alpha)
    words = [word for word in range(6) if word != EOS]
    everything = [list(itertools.product(words, repeat=length)) for length in range(4)]
    assert sum(map(len, everything)) == 156
    for row, keep, answer in zip(source, mask, found):
        scored = [pair for lines in everything for pair in zip(scores(model, row[keep], lines, alpha).tolist(), lines)]
        assert tuple(answer) == max(scored)[1]


def plain_search(
    model: EncoderDecoderModel, source: Tensor, max_length: int, num_beams: int, alpha: float
) -> list[int]:
    """The same search for one sentence, without cache and batching."""
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, max_length + 1):
        grown = [
            (total + float(chance), [*line, word])
            for total, line in alive
            for word, chance in enumerate(next_log_probs(model, source, line))
            if length < max_length or word == EOS
        ]
        grown.sort(key=lambda pair: -pair[0])
        penalty = ((5 + length) / 6) ** alpha
        ended += [(total / penalty, line[:-1]) for total, line in grown[:num_beams] if line[-1] == EOS]
        alive = [pair for pair in grown if pair[1][-1] != EOS][:num_beams]
        best = max(ended, default=(-math.inf, []))[0]
        if len(ended) >= num_beams or (alive and best >= alive[0][0] / ((5 + max_length) / 6) ** alpha):
            break
    return max(ended)[1]


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_cached_batched_search_matches_plain_search(name: str, beam: int) -> None:
    lengths = set()
    for seed in range(4):
        model = tiny(name, seed)
        source, mask = sources(2, 6, 4, 8)
        found = beam_search(model, source, mask, BOS, EOS, max_length=7, num_beams=beam, length_penalty=0.6)
        for row, keep, answer in zip(source, mask, found):
            assert answer == plain_search(model, row[keep], 7, beam, 0.6)
            lengths.add(len(answer))
    assert len(lengths) > 1


def test_one_beam_is_greedy() -> None:
    model = tiny("transformer")
    source, mask = sources(3, 7)
    for row, keep, answer in zip(source, mask, beam_search(model, source, mask, BOS, EOS, max_length=7, num_beams=1)):
        words: list[int] = []
        while len(words) < 6 and (word := int(next_log_probs(model, row[keep], words).argmax())) != EOS:
            words.append(word)
        assert answer == words


@pytest.mark.parametrize("name", SPECS)
def test_padding_and_batching_do_not_change_the_result(name: str) -> None:
    model = tiny(name)
    source, mask = sources(1, 8, 3, 5)
    together = beam_search(model, source, mask, BOS, EOS, max_length=7)
    for row, keep, answer in zip(source, mask, together):
        assert beam_search(model, row[keep][None], keep[keep][None], BOS, EOS, max_length=7) == [answer]


def test_suppressed_tokens_are_not_generated() -> None:
    model = tiny("resmlp")
    source, mask = sources(3, 5)
    suppressed = torch.tensor([True, True, False, False, True, True])
    for answer in beam_search(model, source, mask, BOS, EOS, 7, suppressed):
        assert set(answer) <= {3}
    assert beam_search(model, source[:0], mask[:0], BOS, EOS, 7) == []


def test_searches_that_are_refused() -> None:
    model, (source, mask) = tiny("resmlp"), sources(3, 5)
    with pytest.raises(UserError, match="length_penalty from 0 to 10, not 1 and 10000"):
        beam_search(model, source, mask, BOS, EOS, max_length=4, num_beams=1, length_penalty=1e4)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="the output of the model is NaN"):  # not an empty text
        beam_search(model, source, mask, BOS, EOS, max_length=4, num_beams=1)
    with pytest.raises(UserError, match="num_beams >= 1"):
        beam_search(model, source, mask, BOS, EOS, 7, num_beams=0)


# --- the task ---------------------------------------------------------------------------------------------

WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five", "sechs": "six"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLMLP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ParallelCorpus:
    """Numbers, translated and reversed."""
    folder = tmp_path_factory.mktemp("toy")
    chance = random.Random(0)
    for name, count in (("train", 600), ("test", 40)):
        lines = ["de\ten"]
        for _ in range(count):
            words = chance.choices(list(WORDS), k=chance.randint(1, 4))
            lines.append(" ".join(words) + "\t" + " ".join(WORDS[word] for word in reversed(words)))
        (folder / f"{name}.tsv").write_text("\n".join(lines), encoding="utf8")
    return ParallelCorpus(
        str(folder / "train.tsv"),
        str(folder / "test.tsv"),
        tokenizer=TokenizerConfig("bpe", 300, lowercase=False),
        seq_len=8,
    )


def run(data: ParallelCorpus, spec: EncoderDecoder, steps: int) -> Run:
    return Run(
        model=spec,
        task=Translation(),
        data=data,
        batch_size=64,
        budget=Budget(steps=steps),
        optim=AdamW(lr=1e-2),
        schedule=CosineSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        log_every=100,
        eval_every=1000,
        save_every=1000,
    )


@pytest.fixture(scope="module")
def trained(toy: ParallelCorpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, loop.train(run(toy, resmlp_seq2seq(1, 32, 4), 300), out, "cpu")


@pytest.mark.slow
def test_learns_a_toy_language(trained: tuple[Path, dict[str, float]]) -> None:
    out, results = trained
    assert results["bleu"] > 50 and results["accuracy"] > 0.9, results
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]))
    assert set(results) == {"bleu", "chrf", "perplexity", "loss", "accuracy", "copy_bleu"}
    assert loop.evaluate_checkpoint(out, "cpu") == pytest.approx(results)
    model, tokenizer = allmlp.load(out).train(), load_tokenizer(out)
    assert translate(model, tokenizer, ["drei eins vier"]) == ["four one three"] and model.training


@pytest.mark.slow
def test_attention_aligns_each_word_with_its_translation(trained: tuple[Path, dict[str, float]]) -> None:
    """The toy language is reversed: the first word is translated from the last."""
    model, tokenizer = allmlp.load(trained[0]), load_tokenizer(trained[0])
    read = text_input(model, tokenizer, "drei eins vier zwei")
    best = alignment(attention_maps(model, *read.inputs))[0].argmax(1).tolist()
    pairs = [(read.read[source][1:], target[1:]) for source, target in zip(best, read.predicted[:-1])]
    assert sum(WORDS.get(source) == target for source, target in pairs) >= 3, pairs


@pytest.mark.slow
def test_analysis_reads_the_test_sentences_of_the_run(
    toy: ParallelCorpus, trained: tuple[Path, dict[str, float]]
) -> None:
    images, texts, note = run_examples(trained[0], load_target(str(trained[0])), None)
    known = {line.partition("\t")[0] for line in Path(toy.test).read_text(encoding="utf8").splitlines()}
    assert images is None and not note and texts and {text.strip() for text in texts} <= known


@pytest.mark.slow
def test_unusual_sentences(trained: tuple[Path, dict[str, float]]) -> None:
    model, tokenizer = allmlp.load(trained[0]), load_tokenizer(trained[0])
    odd = ["", "   ", "zwei " * 1000, "😀 👩‍👩‍👧", "שלום עולם", "\x00\n\t", "drei eins vier"]
    found = translate(model, tokenizer, odd, num_beams=2)
    assert len(found) == len(odd) and found[0] == "" and found[-1] == "four one three"
    assert translate(model, tokenizer, odd[::-1] * 20, num_beams=2) == found[::-1] * 20
    assert translate(model, tokenizer, []) == []
    assert translate(model, tokenizer, ["   drei eins vier \n\n"], num_beams=2) == ["four one three"], "as in training"
    with pytest.raises(UserError, match="takes a list of sentences"):
        translate(model, tokenizer, "drei")  # type: ignore[arg-type]


@pytest.mark.slow
def test_transformer_trains(toy: ParallelCorpus, tmp_path: Path) -> None:
    results = loop.train(run(toy, transformer_seq2seq(1, 32, 4), 20), tmp_path / "run", "cpu")
    assert results["loss"] < 4 and 0 <= results["bleu"] <= 100


def module(
    data: ParallelCorpus, task: Translation = Translation(), name: str = "resmlp"
) -> tuple[TranslationModule, TranslationDataset]:
    dataset = data.load()
    model = allmlp.create(task.configure_model(SPECS[name](1, 32, 4), dataset), seed=0).eval()
    built = task.build(model, dataset)
    assert isinstance(built, TranslationModule)
    return built.eval(), dataset


def evaluated(task: TranslationModule, dataset: TranslationDataset, batch: int, world: int = 1) -> dict[str, float]:
    """Metrics as the loop computes them from the sums of several processes."""
    with torch.no_grad():
        parts = [
            task.evaluate(task.model, eval_batches(dataset.test, batch, torch.device("cpu"), rank, world))
            for rank in range(world)
        ]
    sums = {name: [float(sum(part[name][side] for part in parts)) for side in (0, 1)] for name in parts[0]}
    return task.summary({name: total / max(count, 1) for name, (total, count) in sums.items()})


@pytest.mark.parametrize("name", SPECS)
def test_evaluation_does_not_depend_on_batch_size_or_processes(toy: ParallelCorpus, name: str) -> None:
    task, dataset = module(toy, Translation(num_beams=2), name)
    expected = evaluated(task, dataset, 64)
    assert evaluated(task, dataset, 7) == pytest.approx(expected)
    assert evaluated(task, dataset, 9, world=3) == pytest.approx(expected)


def test_only_eval_pairs_are_decoded_during_training(toy: ParallelCorpus) -> None:
    task, dataset = module(toy, Translation(num_beams=1, eval_pairs=7))
    some = evaluated(task, dataset, 5)
    assert evaluated(task, dataset, 5, world=2) == pytest.approx(some)
    numbers = dataset.test.fetch(torch.arange(7))
    found = TranslationMetrics().statistics(
        translate(task.model, dataset.tokenizer, [dataset.tokenizer.decode(row) for row in numbers.source.tolist()], 1),
        [dataset.references[number] for number in numbers.reference_index.tolist()],
    )
    assert {name: some[name] for name in ("bleu", "chrf")} == pytest.approx(TranslationMetrics().compute(found))
    finished = Translation(eval_pairs=7).build_evaluator(task.model, dataset)
    assert isinstance(finished, TranslationModule) and finished.evaluated.pairs == len(dataset.test)
    held = dataset.split_validation(20)
    again = Translation(eval_pairs=5).build(task.model, held)
    numbers = held.test.fetch(torch.arange(20)).reference_index
    assert isinstance(again, TranslationModule)
    assert int((numbers <= again.evaluated.last).sum()) == again.evaluated.pairs == 5


def test_the_result_of_a_run_is_of_all_pairs(toy: ParallelCorpus, tmp_path: Path) -> None:
    """However few were decoded during training, to choose the weights."""
    lines = Path(toy.test).read_text().splitlines()
    (tmp_path / "val.tsv").write_text("\n".join(lines[:12]) + "\n")
    for name, data in (("tested", toy), ("chosen", toy.replace(val=str(tmp_path / "val.tsv")))):
        task = Translation(num_beams=1, eval_pairs=2)
        few = run(data, resmlp_seq2seq(1, 32, 4), 20).replace(task=task, keep_best=name == "chosen")
        results = loop.train(few, tmp_path / name, "cpu")
        assert results == pytest.approx(loop.evaluate_checkpoint(tmp_path / name, "cpu"))
        whole, dataset = module(data.replace(test=data.val or data.test, val=""), Translation(num_beams=1))
        whole.model.load_state_dict(allmlp.load(tmp_path / name).state_dict())
        found = next(iter(read_record(tmp_path / name)["result"].values()))
        assert found["chrf"] == pytest.approx(evaluated(whole, dataset, 5)["chrf"])


def test_validation_file(toy: ParallelCorpus, tmp_path: Path) -> None:
    """Evaluated during training, the test file at the end alone; each has its own references and number of pairs."""
    lines = Path(toy.test).read_text().splitlines()
    (tmp_path / "val.tsv").write_text("\n".join(lines[:12]) + "\n")
    data = toy.replace(val=str(tmp_path / "val.tsv"))
    results = loop.train(run(data, resmlp_seq2seq(1, 32, 4), 20), tmp_path / "run", "cpu")
    record = read_record(tmp_path / "run")
    assert record["data"]["validation"] == 11 and record["data"]["test"] == len(lines) - 1
    assert record["result"]["test"] == pytest.approx(results) == loop.evaluate_checkpoint(tmp_path / "run", "cpu")
    task, dataset = module(data.replace(test=data.val, val=""), Translation())
    task.model.load_state_dict(allmlp.load(tmp_path / "run").state_dict())
    found = record["result"]["validation"]
    assert found["chrf"] == pytest.approx(evaluated(task, dataset, 5)["chrf"]) and found["chrf"] != results["chrf"]


def test_several_test_files(toy: ParallelCorpus, tmp_path: Path) -> None:
    """Each is scored as if it were the only one; the loss is that of all."""
    lines = Path(toy.test).read_text().splitlines()
    for name, part in (("late", lines[1:11]), ("hard", lines[11:])):
        (tmp_path / f"{name}.tsv").write_text("\n".join([lines[0], *part]) + "\n")
    data = toy.replace(test=f"{tmp_path}/late.tsv,{tmp_path}/hard.tsv")
    task, dataset = module(data, Translation(num_beams=1))
    found = evaluated(task, dataset, 7)
    assert evaluated(task, dataset, 7, world=2) == pytest.approx(found)
    for name, prefix in (("late", ""), ("hard", "hard_")):
        alone, only = module(toy.replace(test=f"{tmp_path}/{name}.tsv"), Translation(num_beams=1))
        expected = evaluated(alone, only, 7)
        assert {key: found[f"{prefix}{key}"] for key in ("bleu", "chrf")} == pytest.approx(
            {key: expected[key] for key in ("bleu", "chrf")}
        )
    assert not [key for key in found if key.startswith("late_")] and "hard_loss" not in found


def test_fewer_validation_pairs_than_processes(
    toy: ParallelCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without pairs sums the metrics of the others, in their order, and finds the same scores."""
    lines = Path(toy.test).read_text().splitlines()
    for name, part in (("val", lines[1:3]), ("late", lines[1:11]), ("hard", lines[11:])):
        (tmp_path / f"{name}.tsv").write_text("\n".join([lines[0], *part]) + "\n")
    data = toy.replace(val=f"{tmp_path}/val.tsv", test=f"{tmp_path}/late.tsv,{tmp_path}/hard.tsv")
    task, dataset = module(data, Translation(num_beams=1))
    assert dataset.validation is not None
    first = int(dataset.validation.fetch(torch.tensor([0])).reference_index)
    with torch.no_grad():
        expected = task.evaluate(task.model, eval_batches(dataset.validation, 7, torch.device("cpu")))
    means = {name: float(total) / float(count) for name, (total, count) in expected.items()}
    scores = task.summary(dict(means))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda values, op: values.fill_(max(int(values), first)))
    idle, _ = module(data, Translation(num_beams=1))
    with torch.no_grad():
        batches = eval_batches(dataset.validation, 7, torch.device("cpu"), rank=2, world_size=3)
        found = idle.evaluate(idle.model, batches)
    assert [*found] == [*expected] and not any(float(count) for _, count in found.values())
    assert idle.summary(means) == scores


def test_copying_the_source_is_the_floor(toy: ParallelCorpus, tmp_path: Path) -> None:
    import sacrebleu

    pairs = [("eins zwei zwei drei vier", "eins zwei zwei drei four"), ("sechs", "six")]
    (tmp_path / "names.tsv").write_text("de\ten\n" + "\n".join(map("\t".join, pairs)))
    dataset = toy.replace(test=str(tmp_path / "names.tsv"), seq_len=32).load()
    expected = sacrebleu.corpus_bleu([pair[0] for pair in pairs], [[pair[1] for pair in pairs]], force=True).score
    assert expected > 50
    assert Translation().floors(dataset, dataset.test) == {"copy_bleu": pytest.approx(expected)}


def test_metrics_match_sacrebleu() -> None:
    import sacrebleu

    texts = ["the cat sat on the mat .", "a dog", "", "one two three four five six", "nothing like it"]
    references = ["the cat sat on a mat.", "a dog barks", "silence", "one two three four five six", "x"]
    metrics = TranslationMetrics()
    halves = [
        metrics.statistics(texts[:2], references[:2]),
        metrics.statistics([], []),
        metrics.statistics(texts[2:], references[2:]),
    ]
    for chosen, sums in ((5, [sum(column) for column in zip(*halves)]), (2, halves[0])):
        assert metrics.compute(sums) == pytest.approx(
            {
                "bleu": sacrebleu.corpus_bleu(texts[:chosen], [references[:chosen]]).score,
                "chrf": sacrebleu.corpus_chrf(texts[:chosen], [references[:chosen]]).score,
            }
        )


@torch.no_grad()
def test_loss_matches_its_equation_without_padding(toy: ParallelCorpus) -> None:
    task, dataset = module(toy)
    batch = dataset.train.fetch(torch.arange(5))
    inputs = task.prepare_batch(Batch(0, 0.0, torch.arange(5), batch), StepContext(0.0, torch.Generator()))
    loss, shown = task.compute_loss(*inputs)
    pad, losses, right = dataset.tokenizer.pad_token_id, [], []
    for padded in zip(batch.source.long(), batch.target.long()):
        source, target = (row[row != pad] for row in padded)
        chance = task.model(source[None], target[None, :-1])[0].log_softmax(1)
        losses += (-0.9 * chance.gather(1, target[1:, None])[:, 0] - 0.1 * chance.mean(1)).tolist()
        right += (chance.argmax(1) == target[1:]).tolist()
    assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert float(shown["accuracy"]) == pytest.approx(sum(right) / len(right))
    assert task.unit == ("tokens", dataset.tokens_per_pair)


def test_word_dropout_masks_words_only(toy: ParallelCorpus) -> None:
    task, dataset = module(toy)
    batch = dataset.train.fetch(torch.arange(20))
    step, context = Batch(0, 0.0, torch.arange(20), batch), StepContext(0.0, torch.Generator().manual_seed(1))
    whole = task.prepare_batch(step, context)
    task.spec = task.spec.replace(word_dropout=0.3)
    source, target, shown = task.prepare_batch(step, context)
    special = dataset.tokenizer.special_tokens_mask
    assert torch.equal(target, whole[1])
    for before, after in ((whole[0], source), (target, shown)):
        hidden = before != after
        assert (after[hidden] == dataset.tokenizer.mask_token_id).all() and not special[before[hidden]].any()
        assert 0.2 < float(hidden.sum() / (~special[before]).sum()) < 0.4


@pytest.mark.slow
def test_tokenizer_of_another_model_is_refused(toy: ParallelCorpus, trained: tuple[Path, dict[str, float]]) -> None:
    model = allmlp.load(trained[0])
    other = toy.replace(tokenizer=toy.tokenizer.replace(vocab_size=270)).load()
    for attempt in (
        lambda: translate(model, other.tokenizer, ["eins"]),
        lambda: Translation().build(model, other),
    ):
        with pytest.raises(UserError, match=r"tokenizer has 270 tokens and the model 300: use the tokenizer"):
            attempt()
    with pytest.raises(UserError, match=r"set data\.seq_len=8"):
        Translation().build(model, toy.replace(seq_len=20).for_model(str(trained[0])).load())


def test_unsuitable_models_and_data_are_refused(toy: ParallelCorpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs an encoder-decoder model"):
        Translation().configure_model(allmlp.create("bert_tiny").spec, toy.load())
    with pytest.raises(UserError, match="needs an encoder-decoder model"):
        translate(allmlp.create("bert_tiny"), toy.load().tokenizer, ["eins"])
    with pytest.raises(UserError, match=r"Translation needs .*, not labeled images"):
        loop.train(small(task=Translation()), tmp_path / "run", "cpu")


def test_missing_sacrebleu_is_reported(toy: ParallelCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sacrebleu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with pytest.raises(MissingExtra, match=r"^this needs sacrebleu: pip install 'allmlp\[text\]'$"):
        module(toy)


class Hidden:
    """A finder that hides sacrebleu."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "sacrebleu":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
