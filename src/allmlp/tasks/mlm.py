"""Masked language modelling: words are hidden, and the model says what they were."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import Text, Texts
from allmlp.data.order import Step
from allmlp.data.source import Splits
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.head import Vocabulary
from allmlp.layers.stem import Tokens
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate, Spec
from allmlp.tasks.task import Losses, Moment, Task, TaskModule


class Masked(NamedTuple):
    """A corrupted row, and what is asked of it."""

    inputs: Tensor
    """b s."""
    positions: Tensor
    """b m, where something is asked."""
    targets: Tensor
    """b m, what stood there."""
    weights: Tensor
    """b m, 1 where the question counts: short rows have fewer."""


class Masking(Spec):
    """A share of the tokens is asked for; of these most become [MASK], some a random token, the rest stay.

    Every row is asked the same number of questions, so that shapes are fixed and the output layer is computed for these
    alone; a row with padding fewer, in proportion. With `whole_words` all pieces of a word are asked together.
    Source: Devlin et al., BERT, 2018: 15 %, of which 80 % [MASK], 10 % random, 10 % unchanged.
    """

    rate: Rate = 0.15
    hidden: Rate = 0.8
    random: Rate = 0.1
    whole_words: bool = False

    def check(self) -> None:
        if self.hidden + self.random > 1 + 1e-9:
            raise UserError("Masking: hidden and random are shares of the same tokens and cannot exceed 1 together")

    def numbers(self, length: int) -> int:
        return 3 * length

    def count(self, length: int) -> int:
        return max(round(self.rate * length), 1)

    def apply(self, ids: Tensor, draws: Tensor, tables: Tables) -> Masked:
        """`draws`: uniform in [0, 1), b numbers(s). A pure function."""
        length = ids.shape[1]
        score, action, other = draws.split(length, dim=1)
        askable = ~tables.special[ids]
        if self.whole_words:
            score = score.gather(1, word_numbers(ids, tables))
        score = torch.where(askable, score, -1.0)
        chosen = score.topk(self.count(length), dim=1)
        wanted = (self.rate * askable.sum(1, keepdim=True)).round().clamp(min=1)
        ranks = torch.arange(chosen.values.shape[1], device=ids.device)
        counts = (chosen.values >= 0) & (ranks < wanted)
        if self.whole_words:
            counts = counts & complete(chosen.indices, counts, word_numbers(ids, tables))
        targets = ids.gather(1, chosen.indices)
        action, other = action.gather(1, chosen.indices), other.gather(1, chosen.indices)
        random = tables.plain[(other * len(tables.plain)).long().clamp(max=len(tables.plain) - 1)]
        kept = torch.where(action < self.hidden + self.random, random, targets)
        shown = torch.where(action < self.hidden, torch.full_like(targets, tables.mask), kept)
        inputs = ids.scatter(1, chosen.indices, torch.where(counts, shown, targets))
        return Masked(inputs, chosen.indices, targets, counts.float())


class Tables:
    """What masking must know of a vocabulary, on one device."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device | str = "cpu") -> None:
        self.mask = tokenizer.mask
        self.special = tokenizer.special.to(device)
        self.continues = tokenizer.continues.to(device)
        self.plain = (~tokenizer.special).nonzero().flatten().to(device)
        """The tokens that can stand in for another."""


def word_numbers(ids: Tensor, tables: Tables) -> Tensor:
    """Which word of its row a token belongs to: b s."""
    return ((~tables.continues[ids]).long().cumsum(1) - 1).clamp(min=0)


def complete(positions: Tensor, counts: Tensor, words: Tensor) -> Tensor:
    """Whether all pieces of a chosen token's word are chosen: the last word may have been cut by the fixed number."""
    chosen = words.gather(1, positions)
    asked = torch.zeros_like(words, dtype=torch.float32).scatter_add_(1, chosen, counts.float())
    pieces = torch.zeros_like(words, dtype=torch.float32).scatter_add_(1, words, torch.ones_like(words).float())
    return asked.gather(1, chosen) >= pieces.gather(1, chosen)


def fixed_draws(ids: Tensor, numbers: int) -> Tensor:
    """Numbers in [0, 1) that depend on the row's tokens alone, b numbers: masks for judging are then the same for every
    model, batch size and number of processes.
    """
    places = torch.arange(1, max(ids.shape[1], numbers) + 1, device=ids.device) * -7046029254386353131
    row = scramble((ids.long() * scramble(places[: ids.shape[1]])).sum(1, keepdim=True))
    return ((scramble(row + places[:numbers]) >> 40) & (2**24 - 1)).float() / 2**24


def scramble(x: Tensor) -> Tensor:
    """splitmix64's finaliser in wrapping 64-bit arithmetic; the masks make signed shifts logical ones."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


class MaskedLm(Task):
    """Cross-entropy of the hidden tokens.

        L = - mean over the asked positions i of log softmax(E X[i])_target

    `masking` is for training; a model is judged at 15 %. Padding is hidden from the model unless `mask_padding` is off,
    which is the papers' way.
    """

    reads: ClassVar[type[Splits]] = Texts
    masking: Masking = Masking()
    judged: Masking = Masking()
    mask_padding: bool = True

    def fit(self, model: ModelSpec, dataset: Texts) -> ModelSpec:
        spec = fit_text(model, dataset.tokenizer, dataset.length)
        if not isinstance(spec.head, Vocabulary) or spec.block.causal:
            raise UserError("masked language modelling needs a bidirectional model with a Vocabulary head")
        return spec

    def build(self, model: Model, dataset: Texts) -> TaskModule:
        return MaskedLmModule(self, model, dataset)


def fit_text(model: ModelSpec, tokenizer: Tokenizer, length: int) -> Encoder:
    """An encoder of text with the tokenizer's vocabulary, for rows of this length."""
    if not isinstance(model, Encoder) or not isinstance(model.stem, Tokens):
        raise UserError(f"the task needs a model that reads text, not one that reads {model.reads}")
    return model.configure(vocabulary=len(tokenizer), length=length)


class MaskedLmModule(TaskModule):
    def __init__(self, spec: MaskedLm, model: Model, dataset: Texts) -> None:
        super().__init__()
        self.spec, self.model, self.length = spec, model, dataset.length
        self.pad = dataset.tokenizer.pad
        self.tables = Tables(dataset.tokenizer, model.device)

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.length

    @property
    def flops(self) -> int:
        cost = measure(self.model.spec)
        head = sum(part.macs for part in cost.parts if part.name == "head")
        return 6 * (cost.macs - head + head * self.spec.masking.count(self.length) // self.length)

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        (ids,) = step.batch
        return ids.long(), moment.uniform(len(ids), self.spec.masking.numbers(ids.shape[1]))

    def learn(self, *inputs: Tensor) -> Losses:
        ids, draws = inputs
        asked = self.spec.masking.apply(ids, draws, self.tables)
        loss, accuracy = mean_answer(self.model, self.read(self.model, asked, ids), asked)
        return Losses(loss, {"accuracy": accuracy})

    def read(self, model: Model, asked: Masked, ids: Tensor) -> Tensor:
        """Features of the corrupted rows, b s c."""
        return model.forward_features(asked.inputs, (ids != self.pad) if self.spec.mask_padding else None)

    def evaluate(self, model: Model, batches: Iterable[Text]) -> dict[str, tuple[Tensor, Tensor]]:
        sums = torch.zeros(3, dtype=torch.float64, device=model.device)
        for (rows,) in batches:
            ids = rows.long()
            draws = fixed_draws(ids, self.spec.judged.numbers(ids.shape[1]))
            asked = self.spec.judged.apply(ids, draws, self.tables)
            wrong, right = answer(model, self.read(model, asked, ids), asked)
            sums += torch.stack([wrong.sum(), right.sum(), asked.weights.sum()]).double()
        return {"loss": (sums[0], sums[2]), "accuracy": (sums[1], sums[2])}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"]), **means}


def answer(model: Model, features: Tensor, asked: Masked) -> tuple[Tensor, Tensor]:
    """Cross-entropy and correctness of every question that counts, b m: the output layer runs for these alone."""
    places = asked.positions.unsqueeze(2).expand(-1, -1, features.shape[2])
    logits = model.forward_head(features.gather(1, places)).float()  # b m v
    wrong = F.cross_entropy(logits.flatten(0, 1), asked.targets.flatten(), reduction="none")
    right = (logits.argmax(2) == asked.targets).float()
    return wrong.view_as(asked.weights) * asked.weights, right * asked.weights


def mean_answer(model: Model, features: Tensor, asked: Masked) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy of the questions that count."""
    total = asked.weights.sum().clamp(min=1)
    wrong, right = answer(model, features, asked)
    return wrong.sum() / total, right.sum() / total


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def fill(model: Model, tokenizer: Tokenizer, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
    """The likeliest words for every [MASK] of a text, with their probabilities."""
    return fill_all(model, tokenizer, [text], top)[0]


def fill_all(model: Model, tokenizer: Tokenizer, texts: list[str], top: int = 5) -> list[list[list[tuple[str, float]]]]:
    """The same for several texts that are read together."""
    rows = [[tokenizer.first, *ids, tokenizer.last] for ids in tokenizer.encode(texts)]
    places = [[place for place, number in enumerate(row) if number == tokenizer.mask] for row in rows]
    if not all(places):
        raise UserError("the text has no [MASK] to fill in")
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows], device=model.device)
    real = (torch.arange(width) < lengths[:, None]).to(model.device)
    asked = torch.tensor([(number, place) for number, row in enumerate(places) for place in row], device=model.device)
    with torch.inference_mode():
        features = model.forward_features(ids, None if bool(real.all()) else real)[asked[:, 0], asked[:, 1]]
        chances = model.forward_head(features[None])[0].float().softmax(1)
    best = chances.topk(min(top, chances.shape[1]), dim=1)
    words = iter(
        [(tokenizer.word(number), chance) for number, chance in zip(numbers, values)]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist())
    )
    return [[next(words) for _ in row] for row in places]
