"""Answers as spans of a text: where they start and where they end (SQuAD v1.1 and v2.0)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.order import Step
from allmlp.data.source import Splits
from allmlp.data.squad import Asked, Frame, Question, Questions, ask, clean, passage, readable
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.head import Span
from allmlp.layers.stem import Tokens
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count
from allmlp.tasks.mlm import fit_text
from allmlp.tasks.task import Losses, Moment, Task, TaskModule

THRESHOLDS = tuple(number / 2 for number in range(-20, 21))
"""Null thresholds among which the best is told."""


class AnswerSpan(Task):
    """Cross-entropy of the first and of the last token of the answer, over the tokens that are not padding.

        L = - (log softmax(start)_first + log softmax(end)_last) / 2

    The answer is the span of at most `longest` tokens, over all windows of the question, with the greatest
    start[i] + end[j]. Where some test questions are impossible it is none if

        min over the windows of (start[0] + end[0])  -  max over the spans of (start[i] + end[j])  >  threshold

    `best` answers are given where more than one is asked for. Padding is hidden from the model unless `mask_padding` is
    off, which is the papers' way. Source: Devlin et al., BERT, 2018, sections 4.2 and 4.3.
    """

    reads: ClassVar[type[Splits]] = Questions
    longest: Count = 30
    best: Count = 20
    threshold: float = 0.0
    mask_padding: bool = True

    def fit(self, model: ModelSpec, dataset: Questions) -> ModelSpec:
        return fit_text(model, dataset.tokenizer, dataset.length).replace(pool=None, head=Span())

    def build(self, model: Model, dataset: Questions) -> TaskModule:
        return AnswerSpanModule(self, model, dataset)


class AnswerSpanModule(TaskModule):
    def __init__(self, spec: AnswerSpan, model: Model, dataset: Questions) -> None:
        super().__init__()
        check_reader(model, dataset.tokenizer, dataset.length)
        self.spec, self.model, self.pad = spec, model, dataset.tokenizer.pad
        self.frame, self.questions = dataset.frame, dataset.asked
        self.nullable = any(not question.answers for question in dataset.asked)

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.frame.length

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        ids, segments, start, end = step.batch
        return ids.long(), segments.long(), start, end

    def learn(self, *inputs: Tensor) -> Losses:
        ids, segments, first, last = inputs
        start, end = scores(self.spec, self.model, ids, segments, self.pad)
        right = (start.argmax(1) == first) & (end.argmax(1) == last)
        loss = (F.cross_entropy(start, first) + F.cross_entropy(end, last)) / 2
        return Losses(loss, {"accuracy": right.float().mean()})

    def evaluate(self, model: Model, batches: Iterable[Asked]) -> dict[str, tuple[Tensor, Tensor]]:
        rows = [mark for asked in batches for mark in self.marks(model, asked)]
        marks = torch.tensor(rows, dtype=torch.float64, device=model.device).view(-1, len(Mark._fields))
        margin, exact, f1, null, possible = marks.unbind(1)
        all_of_them = torch.ones_like(margin)

        def told(mark: Tensor, threshold: float, among: Tensor = all_of_them) -> tuple[Tensor, Tensor]:
            given = torch.where(margin > threshold, null, mark) if self.nullable else mark
            return (given * among).sum(), among.sum()

        own = self.spec.threshold
        sums = {"exact_match": told(exact, own), "f1": told(f1, own)}
        if not self.nullable:
            return sums
        sums |= {"has_answer_f1": told(f1, own, possible), "no_answer_f1": told(f1, own, 1 - possible)}
        return sums | {grid_name(threshold): told(f1, threshold) for threshold in THRESHOLDS}

    def marks(self, model: Model, asked: Asked) -> list[Mark]:
        """What the answers to a batch of questions are worth."""
        found = search(self.spec, model, asked, self.pad, best=1)
        marks = []
        for number, (score,), (place,), null in zip(asked.number.tolist(), *(part.tolist() for part in found)):
            question = self.questions[number]
            text = quote(question, self.frame, place)[0] if score > -torch.inf else ""
            right = [gold.text for gold in question.answers]
            marks.append(
                Mark(null - score, exact_match(text, right), f1(text, right), f1("", right), float(bool(right)))
            )
        return marks

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        if not self.nullable:
            return means
        grid = {value: means[grid_name(value)] for value in THRESHOLDS}
        best = max(grid, key=lambda value: (grid[value], -abs(value)))
        told = {name: mean for name, mean in means.items() if name not in map(grid_name, THRESHOLDS)}
        return told | {"best_f1": grid[best], "best_threshold": best}


def grid_name(threshold: float) -> str:
    return f"f1 at {threshold:+}"


class Mark(NamedTuple):
    """What the best answer to a question is worth, and what no answer is."""

    margin: float
    """How much more likely no answer is than the best one, as a difference of scores."""
    exact: float
    f1: float
    null: float
    """F1, and exact match, of no answer."""
    possible: float
    """1 where the question has an answer."""


# --- finding answers --------------------------------------------------------------------------------------------


def check_reader(model: Model, tokenizer: Tokenizer, length: int) -> None:
    spec = model.spec
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, Tokens) or not isinstance(spec.head, Span):
        raise UserError("the model does not answer questions: it has no Span head; train it with the task AnswerSpan")
    if spec.stem.vocabulary != len(tokenizer):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {spec.stem.vocabulary}: use the tokenizer that "
            "lies beside the model"
        )
    if length > spec.stem.length:
        raise UserError(f"the model reads {spec.stem.length} tokens at most, not {length}: lower data.length")


def scores(spec: AnswerSpan, model: Model, ids: Tensor, segments: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """How likely an answer starts and ends at each token, n s; minus infinity at padding."""
    real = ids != pad
    mask = real if spec.mask_padding else None
    told = {"segments": segments} if (model.spec.stem.segments or 0) > 1 else {}
    # The whole model, not its parts: a sharded one gathers its weights when it is called.
    logits = model(ids, mask, **told).float().masked_fill(~real.unsqueeze(2), -torch.inf)  # n s 2
    start, end = logits.unbind(2)
    return start, end


class Found(NamedTuple):
    """The best spans of each question, the best first."""

    scores: Tensor
    """b k; minus infinity where there are fewer than k."""
    places: Tensor
    """b k 3: window, and the positions in it of the first and the last token."""
    null: Tensor
    """b, the score of no answer."""


def search(spec: AnswerSpan, model: Model, asked: Asked, pad: int, best: int) -> Found:
    """The best of all spans of all windows."""
    real = (asked.ids != pad).any(2)  # b w
    start, end = scores(spec, model, asked.ids[real].long(), asked.segments[real].long(), pad)
    none = start.new_full(real.shape, torch.inf)
    none[real] = start[:, 0] + end[:, 0]
    values, places = spans(
        start.masked_fill(~asked.starts[real], -torch.inf), end.masked_fill(~asked.ends[real], -torch.inf), spec, best
    )  # n k, n k 2
    value = start.new_full((*real.shape, values.shape[1]), -torch.inf)
    place = places.new_zeros((*real.shape, values.shape[1], 3))
    value[real] = values
    place[real] = torch.cat([real.nonzero()[:, 1:, None].expand(-1, values.shape[1], -1), places], dim=2)
    top = value.flatten(1).topk(min(best, value[:1].numel() or best), dim=1)
    return Found(top.values, place.flatten(1, 2).gather(1, top.indices[..., None].expand(-1, -1, 3)), none.amin(1))


def spans(start: Tensor, end: Tensor, spec: AnswerSpan, best: int) -> tuple[Tensor, Tensor]:
    """The best spans of each window: start[i] + end[j], n k, and (i, j) with i <= j < i + longest, n k 2."""
    longest = min(spec.longest, end.shape[1])
    ahead = F.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # n s l
    top = (start.unsqueeze(2) + ahead).flatten(1).topk(min(best, end.shape[1] * longest), dim=1)
    first = top.indices // longest
    return top.values, torch.stack([first, first + top.indices % longest], dim=2)


def quote(question: Question, frame: Frame, place: Sequence[int]) -> tuple[str, int, int]:
    """The text between two positions of a window, and where it begins and ends in the context."""
    window, first, last = place
    shift = frame.parts(question)[window].start - question.offset
    passage = question.passage
    start, stop = passage.spans[first + shift][0], passage.spans[last + shift][1]
    # Some tokenizers count the space before a word as part of it.
    text = passage.text[start:stop]
    start += len(text) - len(text.lstrip())
    return text.strip(), start, start + len(text.strip())


@dataclass(frozen=True)
class Answer:
    """A part of the context, from character `start` to `end`; the empty one says that the answer is not there."""

    text: str
    probability: float
    """Among the answers that are given."""
    start: int
    end: int


@torch.inference_mode()
def answer(
    model: Model,
    tokenizer: Tokenizer,
    question: str,
    context: str,
    spec: AnswerSpan = AnswerSpan(),
    frame: Frame | None = None,
    impossible: bool = False,
) -> list[Answer]:
    """The best answers to one question, the best first.

    With `impossible` the empty answer is one of them, and the first where the threshold says so.
    """
    frame = frame or Frame.of(model.spec.stem.length)
    frame.check()
    check_reader(model, tokenizer, frame.length)
    words = readable(tokenizer.encode([clean(question)])[0][: frame.question], tokenizer)
    asked = Question(words, passage(clean(context), tokenizer))
    tensors = Asked(*(tensor.to(model.device) for tensor in ask([asked], tokenizer, frame)))
    found = search(spec, model, tensors, tokenizer.pad, spec.best)
    pairs = [
        (score, quote(asked, frame, place))
        for score, place in zip(found.scores[0].tolist(), found.places[0].tolist())
        if score > -torch.inf
    ]
    if impossible:
        pairs = sorted([*pairs, (found.null.item() - spec.threshold, ("", 0, 0))], key=lambda pair: -pair[0])
    chances = torch.tensor([score for score, _ in pairs], dtype=torch.float64).softmax(0).tolist()
    return [Answer(text, chance, start, end) for chance, (_, (text, start, end)) in zip(chances, pairs)]


# --- judging them ------------------------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """As the official script compares: lower case, no punctuation, no articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def worth_comparing(answers: Sequence[str]) -> list[str]:
    """The right answers, normalised; an empty one where there is none."""
    return [text for text in map(normalise, answers) if text] or [""]


def exact_match(guess: str, answers: Sequence[str]) -> float:
    return float(normalise(guess) in worth_comparing(answers))


def f1(guess: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words, for the right answer that fits best."""
    return max(overlap(normalise(guess).split(), text.split()) for text in worth_comparing(answers))


def overlap(guess: list[str], right: list[str]) -> float:
    if not guess or not right:
        return float(guess == right)
    same = sum((Counter(guess) & Counter(right)).values())
    return 2 * same / (len(guess) + len(right))
