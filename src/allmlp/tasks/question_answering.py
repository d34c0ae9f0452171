"""Extractive question answering: the answer is a span of the context (SQuAD v1.1 and v2.0)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Dataset
from allmlp.data.sampler import Batch
from allmlp.data.squad import (
    SquadDataset,
    SquadEvalBatch,
    TokenizedContext,
    TokenizedQuestion,
    WindowConfig,
    clean,
    eval_batch,
)
from allmlp.data.tokenizer import Tokenizer
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.layers.head import QAHead
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count
from allmlp.tasks.masked_lm import configure_text_model, with_mask_padding
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule
from allmlp.tasks.word_overlap import best_answer, best_sentence

THRESHOLDS = tuple(number / 2 for number in range(-20, 21))
"""Values of `null_score_diff_threshold` that `best_f1` is searched over."""


class QuestionAnswering(Task):
    """Cross-entropy of the first and of the last token of the answer, over the tokens that are not padding.

        L = - (log softmax(start)_first + log softmax(end)_last) / 2

    The prediction is the span of at most `max_answer_length` tokens, over all windows of a question, with the greatest
    start[i] + end[j]. If some test questions have no answer, the prediction is empty where

        min over windows of (start[0] + end[0]) - max over spans of (start[i] + end[j]) > null_score_diff_threshold

    `n_best_size` is the number of predictions kept per question. mask_padding=False lets padding mix with the text, as
    in the papers. Source: Devlin et al., BERT, 2018, sections 4.2 and 4.3.
    """

    dataset_type: ClassVar[type[Dataset]] = SquadDataset
    max_answer_length: Count = 30
    n_best_size: Count = 20
    null_score_diff_threshold: float = 0.0
    mask_padding: bool = True

    def configure_model(self, model: ModelSpec, dataset: SquadDataset) -> ModelSpec:
        return configure_text_model(model, dataset.tokenizer, dataset.seq_len).replace(pool=None, head=QAHead())

    def build(self, model: Model, dataset: SquadDataset) -> TaskModule:
        return QuestionAnsweringModule(self, model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        return with_mask_padding(dataset.files(), self.mask_padding)

    def floors(self, dataset: SquadDataset, split: object) -> dict[str, float]:
        """Scores of the answers and of the whole sentences found by `allmlp.tasks.word_overlap`; also of empty answers
        if some questions have no answer.
        """
        scores = []
        for question in dataset.test_questions:
            answers, context = [gold.text for gold in question.answers], question.context.text
            answer, sentence = best_answer(question.text, context), best_sentence(question.text, context)
            scores.append((f1(answer, answers), exact_match(answer, answers), f1(sentence, answers), f1("", answers)))
        overlap, exact, sentence, empty = map(fmean, zip(*scores))
        baselines = {"overlap_f1": overlap, "overlap_exact_match": exact, "sentence_f1": sentence}
        return baselines | ({"empty_f1": empty} if empty else {})


class QuestionAnsweringModule(TaskModule):
    def __init__(self, spec: QuestionAnswering, model: Model, dataset: SquadDataset) -> None:
        super().__init__()
        self.unit = "tokens", dataset.seq_len
        check_qa_model(model, dataset.tokenizer, dataset.seq_len)
        self.spec, self.model, self.tokenizer = spec, model, dataset.tokenizer
        self.windows, self.questions = dataset.windows, dataset.test_questions
        self.version_2 = any(not question.answers for question in dataset.test_questions)
        """Whether some test questions have no answer."""

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        ids, segments, start, end = batch.examples
        return ids.long(), segments.long(), start, end

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, segments, first, last = inputs
        return span_loss(*self.logits(self.model, ids, segments), first, last)

    def logits(self, model: Model, ids: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        return span_logits(model, ids, segments, self.tokenizer, self.spec.mask_padding)

    def evaluate(self, model: Model, batches: Iterable[SquadEvalBatch]) -> Sums:
        rows = [score for batch in batches for score in self.score_questions(model, batch)]
        table = torch.tensor(rows, dtype=sum_dtype(model.device)).view(-1, len(QuestionScore._fields)).to(model.device)
        null_score_diff, exact, f1, null_f1, has_answer = table.unbind(1)
        everything = torch.ones_like(has_answer)

        def total(score: Tensor, threshold: float, weights: Tensor = everything) -> tuple[Tensor, Tensor]:
            score = torch.where(null_score_diff > threshold, null_f1, score) if self.version_2 else score
            return (score * weights).sum(), weights.sum()

        threshold = self.spec.null_score_diff_threshold
        sums = {"exact_match": total(exact, threshold), "f1": total(f1, threshold)}
        if not self.version_2:
            return sums
        sums["has_answer_f1"] = total(f1, threshold, has_answer)
        sums["no_answer_f1"] = total(f1, threshold, 1 - has_answer)
        return sums | {threshold_name(value): total(f1, value) for value in THRESHOLDS}

    def score_questions(self, model: Model, batch: SquadEvalBatch) -> list[QuestionScore]:
        """Score the best non-empty prediction of each question, and the empty one."""
        predictions = predict_spans(self.spec, model, batch, self.tokenizer, n_best_size=1)
        columns = (part.tolist() for part in (batch.question_index, *predictions))
        scores = []
        for number, (logit,), (position,), null_logit in zip(*columns):
            question = self.questions[number]
            text = span_text(question, self.windows, position)[0] if logit > -torch.inf else ""
            answers = [gold.text for gold in question.answers]
            exact, overlap, null_f1 = exact_match(text, answers), f1(text, answers), f1("", answers)
            scores.append(QuestionScore(null_logit - logit, exact, overlap, null_f1, float(bool(answers))))
        return scores

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        if not self.version_2:
            return means
        f1_at = {value: means[threshold_name(value)] for value in THRESHOLDS}
        best = max(f1_at, key=lambda value: (f1_at[value], -abs(value)))
        kept = {name: mean for name, mean in means.items() if name not in map(threshold_name, THRESHOLDS)}
        return kept | {"best_f1": f1_at[best], "best_threshold": best}


def threshold_name(threshold: float) -> str:
    return f"f1 at {threshold:+}"


class QuestionScore(NamedTuple):
    """Scores of the best non-empty prediction for a question, and of the empty one."""

    null_score_diff: float
    """Score of the empty prediction minus that of the best span."""
    exact: float
    f1: float
    null_f1: float
    """F1, and exact match, of the empty prediction."""
    has_answer: float
    """1 if the question has an answer, else 0."""


# --- prediction -------------------------------------------------------------------------------------------------


def check_qa_model(model: Model, tokenizer: Tokenizer, seq_len: int) -> None:
    spec = model.spec
    if not isinstance(spec, Encoder) or not isinstance(spec.stem, TokenEmbed) or not isinstance(spec.head, QAHead):
        raise UserError("the model has no QAHead: train it with task=QuestionAnswering")
    if spec.stem.vocab_size != len(tokenizer):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {spec.stem.vocab_size}: "
            "use the tokenizer in the model's folder"
        )
    if seq_len > spec.stem.seq_len:
        raise UserError(f"the model reads {spec.stem.seq_len} tokens at most, not {seq_len}: lower data.seq_len")


def span_logits(
    model: Model, ids: Tensor, segments: Tensor, tokenizer: Tokenizer, mask_padding: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits of the first and the last token of the answer, n s each; -inf at padding."""
    real = ~tokenizer.padding(ids)
    mask = real if mask_padding else None
    options = {"segments": segments} if (model.spec.stem.segments or 0) > 1 else {}
    # Call the whole model, not its parts: FSDP gathers weights in the module's own forward.
    logits = model(ids, mask, **options).float().masked_fill(~real.unsqueeze(2), -torch.inf)  # n s 2
    start, end = logits.unbind(2)
    return start, end


def span_loss(start: Tensor, end: Tensor, first: Tensor, last: Tensor) -> Losses:
    """Cross-entropy of the first and last tokens, and the fraction of spans with both correct."""
    correct = (start.argmax(1) == first) & (end.argmax(1) == last)
    loss = (F.cross_entropy(start, first) + F.cross_entropy(end, last)) / 2
    return Losses(loss, {"accuracy": correct.float().mean()})


class SpanPredictions(NamedTuple):
    """The best spans of each question, best first."""

    scores: Tensor
    """b k; -inf where there are fewer than k spans."""
    positions: Tensor
    """b k 3: window, and the positions of the first and the last token in it."""
    null_score: Tensor
    """b, score of the empty prediction."""


def predict_spans(
    spec: QuestionAnswering, model: Model, batch: SquadEvalBatch, tokenizer: Tokenizer, n_best_size: int
) -> SpanPredictions:
    """The best spans over all windows of each question."""
    real = (batch.ids != tokenizer.pad_token_id).any(2)  # b w
    ids, segments = batch.ids[real].long(), batch.segments[real].long()
    start, end = span_logits(model, ids, segments, tokenizer, spec.mask_padding)
    null_score = start.new_full(real.shape, torch.inf)
    null_score[real] = start[:, 0] + end[:, 0]
    start = start.masked_fill(~batch.starts[real], -torch.inf)
    end = end.masked_fill(~batch.ends[real], -torch.inf)
    window_scores, window_spans = best_spans(start, end, spec.max_answer_length, n_best_size)  # n k, n k 2
    k = window_scores.shape[1]
    scores = start.new_full((*real.shape, k), -torch.inf)
    positions = window_spans.new_zeros((*real.shape, k, 3))
    scores[real] = window_scores
    positions[real] = torch.cat([real.nonzero()[:, 1:, None].expand(-1, k, -1), window_spans], dim=2)
    best = scores.flatten(1).topk(min(n_best_size, scores[:1].numel() or n_best_size), dim=1)
    index = best.indices[..., None].expand(-1, -1, 3)
    return SpanPredictions(best.values, positions.flatten(1, 2).gather(1, index), null_score.amin(1))


def best_spans(start: Tensor, end: Tensor, max_answer_length: int, n_best_size: int) -> tuple[Tensor, Tensor]:
    """Best spans per window: start[i] + end[j], n k, and (i, j) with i <= j < i + max_answer_length, n k 2."""
    length = min(max_answer_length, end.shape[1])
    ahead = F.pad(end, (0, length - 1), value=-torch.inf).unfold(1, length, 1)  # n s l
    best = (start.unsqueeze(2) + ahead).flatten(1).topk(min(n_best_size, end.shape[1] * length), dim=1)
    first = best.indices // length
    return best.values, torch.stack([first, first + best.indices % length], dim=2)


def span_text(question: TokenizedQuestion, windows: WindowConfig, position: Sequence[int]) -> tuple[str, int, int]:
    """Text of a span, and its first and end character in the context."""
    window, first, last = position
    shift = windows.split(question)[window].start - question.offset
    context = question.context
    start, stop = context.offsets[first + shift][0], context.offsets[last + shift][1]
    # Some tokenizers include the space before a word.
    text = context.text[start:stop]
    start += len(text) - len(text.lstrip())
    return text.strip(), start, start + len(text.strip())


@dataclass(frozen=True)
class PredictedAnswer:
    """The characters `start` to `end` of the context; empty if the context has no answer."""

    text: str
    probability: float
    """Relative to the other predictions of the question."""
    start: int
    end: int


@torch.inference_mode()
def answer_question(
    model: Model,
    tokenizer: Tokenizer,
    question: str,
    context: str,
    spec: QuestionAnswering = QuestionAnswering(),
    windows: WindowConfig | None = None,
    handle_impossible_answer: bool = False,
) -> list[PredictedAnswer]:
    """The best answers to a question, most probable first.

    With `handle_impossible_answer` the empty answer is among them.
    """
    windows = windows or WindowConfig.for_seq_len(model.spec.stem.seq_len)
    windows.check()
    check_qa_model(model, tokenizer, windows.seq_len)
    words, text = tokenizer.encode([clean(question)])[0][: windows.max_query_length], clean(context)
    encoded = TokenizedQuestion(words, TokenizedContext(text, *tokenizer.encode_with_offsets(text)))
    batch = SquadEvalBatch(*(tensor.to(model.device) for tensor in eval_batch([encoded], tokenizer, windows)))
    predictions = predict_spans(spec, model, batch, tokenizer, spec.n_best_size)
    scored = [
        (score, span_text(encoded, windows, position))
        for score, position in zip(predictions.scores[0].tolist(), predictions.positions[0].tolist())
        if score > -torch.inf
    ]
    if handle_impossible_answer:
        scored.append((predictions.null_score.item() - spec.null_score_diff_threshold, ("", 0, 0)))
        scored.sort(key=lambda pair: -pair[0])
    probabilities = torch.tensor([score for score, _ in scored], dtype=torch.float64).softmax(0).tolist()
    return [PredictedAnswer(text, p, start, end) for p, (_, (text, start, end)) in zip(probabilities, scored)]


# --- metrics of the official evaluation script ------------------------------------------------------------------


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def normalized_answers(answers: Sequence[str]) -> list[str]:
    """The non-empty normalized answers, or one empty answer if there are none."""
    return [text for text in map(normalize_answer, answers) if text] or [""]


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    return float(normalize_answer(prediction) in normalized_answers(answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words, maximum over the answers."""
    return max(word_f1(normalize_answer(prediction).split(), text.split()) for text in normalized_answers(answers))


def word_f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))
