"""Translation: teacher forcing to learn it, beam search to do it, BLEU and chrF to judge it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from allmlp.data.order import Step
from allmlp.data.pairs import SentencePairs, Translated, source_row
from allmlp.data.source import Splits
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError, require
from allmlp.layers.stem import Tokens
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count, NonNegative, Rate
from allmlp.tasks.beam import search
from allmlp.tasks.mlm import perplexity
from allmlp.tasks.task import Losses, Moment, Task, TaskModule

AT_ONCE = 64
"""Sentences that are translated together."""


class Translation(Task):
    """Cross-entropy of every target token, given the source and the target before it, against smoothed labels.

        L = - mean over t of sum_k q_k log softmax(logits[t])_k,   q = (1 - smoothing) onehot(y[t + 1]) + smoothing / V

    Judged by beam search: BLEU and chrF as sacrebleu has them. While training, only the first `judged` test pairs are
    translated; none is all. `word_dropout` is the share of tokens, read and already written, that the model does not
    get to see while it learns, so that it cannot learn sentences by heart. Sources: Vaswani et al., 2017 (smoothing,
    beam, alpha); Wu et al., 2016 (alpha); Sennrich et al., 2016 (word dropout).
    """

    reads: ClassVar[type[Splits]] = SentencePairs
    smoothing: Rate = 0.1
    word_dropout: Rate = 0.0
    beam: Count = 4
    alpha: NonNegative = 0.6
    judged: Count | None = None

    def fit(self, model: ModelSpec, dataset: SentencePairs) -> ModelSpec:
        if not isinstance(model, EncoderDecoder):
            raise UserError(f"translation needs an encoder with a decoder, not a model that reads {model.reads}")
        return model.configure(vocabulary=len(dataset.tokenizer), length=dataset.length)

    def build(self, model: Model, dataset: SentencePairs) -> TaskModule:
        return TranslationModule(self, model, dataset)

    def judge(self, model: Model, dataset: SentencePairs) -> TaskModule:
        return self.replace(judged=None).build(model, dataset)


class TranslationModule(TaskModule):
    def __init__(self, spec: Translation, model: Model, dataset: SentencePairs) -> None:
        super().__init__()
        self.spec, self.model, self.scores = spec, translator(model, dataset.tokenizer), Scores()
        self.tokenizer, self.references, self.tokens = dataset.tokenizer, dataset.references, dataset.tokens
        reads = self.model.spec.encoder.stem.tokens
        if dataset.length > reads:
            raise UserError(f"pairs of {dataset.length} tokens are too long for the model: set data.length={reads}")
        self.judged = min(spec.judged or len(dataset.test), len(dataset.test))
        self.last = int(dataset.test.fetch(torch.tensor([self.judged - 1])).number)
        """The number of the last test pair that is translated."""

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.tokens

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        if isinstance(next(self.model.parameters()), DTensor):
            raise UserError("processes translate in different numbers of steps, unlike sharding=fsdp; use sharding=ddp")
        source, target, _ = (part.long() for part in step.batch)
        if not self.spec.word_dropout:
            return source, target, target
        draws = moment.uniform(len(source), source.shape[1] + target.shape[1]).split(
            [source.shape[1], target.shape[1]], dim=1
        )
        return self.drop(source, draws[0]), target, self.drop(target, draws[1])

    def drop(self, ids: Tensor, draws: Tensor) -> Tensor:
        """Words give way to [MASK]; what marks a sentence's ends stays."""
        words = ~self.tokenizer.special.to(ids.device)[ids]
        return torch.where((draws < self.spec.word_dropout) & words, self.tokenizer.mask, ids)

    def learn(self, *inputs: Tensor) -> Losses:
        source, target, shown = inputs
        wrong, right, real = self.predict(self.model, source, target, shown, self.spec.smoothing)
        total = real.sum().clamp(min=1)
        return Losses(wrong.sum() / total, {"accuracy": right.sum() / total})

    def predict(
        self, model: Model, source: Tensor, target: Tensor, shown: Tensor, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy, correctness, and whether there is a next token; b t-1 each. `shown` is the target as the model
        reads it. Padding lies on the right, where no real token of the target looks.
        """
        logits = model(source, shown[:, :-1], source != self.tokenizer.pad).float()
        following = target[:, 1:]
        real = (following != self.tokenizer.pad).float()
        wrong = F.cross_entropy(
            logits.flatten(0, 1), following.flatten(), reduction="none", label_smoothing=smoothing
        ).view_as(real)
        return wrong * real, (logits.argmax(2) == following).float() * real, real

    def evaluate(self, model: Model, batches: Iterable[Translated]) -> dict[str, tuple[Tensor, Tensor]]:
        sums = torch.zeros(3, dtype=torch.float64, device=model.device)
        matches = torch.zeros(len(Scores.names) + 1, dtype=torch.float64)
        for source, target, number in batches:
            told = self.predict(model, source.long(), target.long(), target.long())
            sums += torch.stack([part.sum() for part in told]).double()
            chosen = number <= self.last
            matches += self.matches(model, source[chosen].long(), number[chosen].tolist())
        *found, pairs = matches.to(model.device)
        means = {"loss": (sums[0], sums[2]), "accuracy": (sums[1], sums[2])}
        return means | {name: (total, pairs) for name, total in zip(Scores.names, found)}

    def matches(self, model: Model, source: Tensor, numbers: list[int]) -> Tensor:
        """The sums of `Scores` over these pairs, and how many pairs they are."""
        texts = write(model, self.tokenizer, source, self.spec.beam, self.spec.alpha)
        found = self.scores.count(texts, [self.references[number] for number in numbers])
        return torch.tensor([*found, len(texts)], dtype=torch.float64)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        sums = [round(means[name] * self.judged) for name in Scores.names]
        told = {name: mean for name, mean in means.items() if name not in Scores.names}
        return {**self.scores.total(sums), "perplexity": perplexity(means["loss"]), **told}


class Scores:
    """BLEU and chrF of a corpus from numbers that can be added up over sentences, batches and processes.

    BLEU counts the words of both sides, and the n-grams that match and that there are, n = 1 to 4; chrF the character
    n-grams of both sides and those that match, n = 1 to 6.
    """

    names = tuple(f"{score} {number}" for score, numbers in (("bleu", 10), ("chrf", 18)) for number in range(numbers))

    def __init__(self) -> None:
        metrics = require("sacrebleu.metrics", "text")
        self.bleu, self.chrf = metrics.BLEU(force=True), metrics.CHRF()

    def count(self, texts: list[str], references: list[str]) -> list[int]:
        if not texts:
            return [0] * len(self.names)
        counted = [score._extract_corpus_statistics(texts, [references]) for score in (self.bleu, self.chrf)]
        return [sum(column) for rows in counted for column in zip(*rows)]

    def total(self, sums: list[int]) -> dict[str, float]:
        bleu, chrf = sums[:10], sums[10:]
        return {
            "bleu": self.bleu._compute_score_from_stats(bleu).score,
            "chrf": self.chrf._compute_score_from_stats(chrf).score,
        }


def translator(model: Model, tokenizer: Tokenizer) -> EncoderDecoderModel:
    """The model, if it can translate and the tokenizer is its own."""
    if not isinstance(model, EncoderDecoderModel):
        raise UserError(f"translation needs an encoder with a decoder, not a model that reads {model.spec.reads}")
    for side in (model.spec.encoder, model.spec.decoder):
        if isinstance(side.stem, Tokens) and side.stem.vocabulary != len(tokenizer):
            raise UserError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {side.stem.vocabulary}: "
                f"use the tokenizer that lies beside the model"
            )
    return model


@torch.no_grad()
def translate(model: Model, tokenizer: Tokenizer, sentences: list[str], beam: int = 4, alpha: float = 0.6) -> list[str]:
    """Translations of sentences, of which the model reads as much as it can; nothing becomes nothing."""
    if isinstance(sentences, str):
        raise UserError("translate takes a list of sentences: put the one into a list")
    length, training = translator(model, tokenizer).spec.encoder.stem.tokens, model.training
    rows = [source_row(ids, tokenizer, length) for ids in tokenizer.encode(sentences)]
    found = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # alike lengths need little padding
    model.eval()
    try:
        for start in range(0, len(order), AT_ONCE):
            chosen = order[start : start + AT_ONCE]
            width = len(rows[chosen[-1]])
            ids = [rows[number] + [tokenizer.pad] * (width - len(rows[number])) for number in chosen]
            texts = write(model, tokenizer, torch.tensor(ids, device=model.device), beam, alpha)
            for number, text in zip(chosen, texts):
                found[number] = text
    finally:
        model.train(training)
    return found


def write(model: Model, tokenizer: Tokenizer, source: Tensor, beam: int, alpha: float) -> list[str]:
    """Translations of rows, b s; a row that has nothing but [SEP] stays empty."""
    assert isinstance(model, EncoderDecoderModel)
    mask = source != tokenizer.pad
    full = mask.sum(dim=1) > 1
    width = int(mask.sum(dim=1).max()) if len(source) else 0
    banned = tokenizer.special.to(source.device)
    banned = banned & (torch.arange(len(banned), device=source.device) != tokenizer.last)
    # The last position of the decoder is never taught: a target is one token longer than what the decoder reads of it.
    longest = model.spec.decoder.stem.tokens - 1
    ends = tokenizer.first, tokenizer.last
    found = iter(search(model, source[full, :width], mask[full, :width], *ends, longest, banned, beam, alpha))
    return [tokenizer.decode(next(found)).strip() if some else "" for some in full.tolist()]
