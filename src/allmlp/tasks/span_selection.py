"""Span selection: pretraining for question answering on plain text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import PassageDataset, TokenBatch
from allmlp.data.dataset import Dataset
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import Tokenizer
from allmlp.layers.head import QAHead
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count
from allmlp.tasks.masked_lm import configure_text_model, fixed_uniforms, with_mask_padding
from allmlp.tasks.question_answering import span_logits
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule, TokenScores, sum_scores
from allmlp.tasks.word_overlap import FUNCTION_WORDS


class SpanSelection(Task):
    """A span that occurs twice in a passage: one occurrence becomes the question, the other is the answer.

        [CLS] words [MASK] words [SEP] passage without these words [SEP]
        L = - (log sum over answers of softmax(start)_first + log sum over answers of softmax(end)_last) / 2

    The question is a part of the passage of `question_length` tokens, cut out around one occurrence, which becomes
    [MASK]; all other occurrences are answers. Spans are whole words of at most `max_span_length` tokens that neither
    begin nor end with punctuation, a letter or an English function word; spans are chosen with probability proportional
    to their length. Input and head are those of `QuestionAnswering`, which can start from the resulting model. Sources:
    Ram et al., Few-Shot Question Answering by Pretraining Span Selection (Splinter), 2021; Glass et al., Span Selection
    Pre-training for Question Answering, 2020.
    """

    dataset_type: ClassVar[type[Dataset]] = PassageDataset
    question_length: Count = 32
    max_span_length: Count = 10
    mask_padding: bool = True

    def configure_model(self, model: ModelSpec, dataset: PassageDataset) -> ModelSpec:
        return configure_text_model(model, dataset.tokenizer, dataset.seq_len).replace(pool=None, head=QAHead())

    def build(self, model: Model, dataset: PassageDataset) -> TaskModule:
        return SpanSelectionModule(self, model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        return with_mask_padding(dataset.files(), self.mask_padding)

    def num_uniforms(self, seq_len: int) -> int:
        """Uniforms needed per row."""
        return seq_len + 1

    def apply(self, ids: Tensor, uniforms: Tensor, vocab: SpanVocab) -> SpanBatch:
        """Choose a span in each row, b s, and turn it into a question. A pure function."""
        score, place = uniforms[:, :-1], uniforms[:, -1:]
        lengths = self.recurring_spans(ids, vocab)
        # The argmax of u^(1 / length) selects a span with probability proportional to its length.
        weighted = torch.where(lengths > 0, score.clamp(min=1e-9).log() / lengths, -torch.inf)
        has_span = (lengths > 0).any(1, keepdim=True)
        first = torch.where(has_span, weighted.argmax(1, keepdim=True), 1)  # b 1
        length = lengths.gather(1, first).clamp(min=1)
        return self.make_question(ids, first, length, place, has_span, vocab)

    def recurring_spans(self, ids: Tensor, vocab: SpanVocab) -> Tensor:
        """Length of the longest span that starts at each token and recurs outside of its question, else 0: b s."""
        seq_len = ids.shape[1]
        content, words = vocab.content[ids], ~vocab.continuation[ids]
        last = content & F.pad(words[:, 1:], (0, 1), value=True)  # of a word
        place = torch.arange(seq_len, device=ids.device)
        far = (place[:, None] - place).abs() >= self.question_length + self.max_span_length
        equal = (ids[:, :, None] == ids[:, None, :]) & vocab.ordinary[ids][:, :, None]  # b s s
        # A span with an equal content word before it is part of a longer one.
        preceded = F.pad((equal & content[:, :, None])[:, :-1, :-1], (1, 0, 1, 0))
        same = equal & (content & words)[:, :, None] & far & ~preceded
        lengths = torch.zeros_like(ids)
        for size in range(1, self.max_span_length + 1):
            ends = F.pad(last[:, size - 1 :], (0, size - 1))
            recurs = (same & ends[:, None, :]).any(2) & ends
            lengths = torch.where(recurs, size, lengths)
            same = same & F.pad(equal[:, size:, size:], (0, size, 0, size))
        return lengths

    def make_question(
        self, ids: Tensor, first: Tensor, length: Tensor, place: Tensor, has_span: Tensor, vocab: SpanVocab
    ) -> SpanBatch:
        """Make a question around the span of `length` tokens at `first`, replaced by [MASK]; `place` in [0, 1) is its
        relative position in the question. All are b 1. Rows without a span (`has_span`) get weight 0.
        """
        seq_len = ids.shape[1]
        last = (ids != vocab.pad_token_id).sum(1, keepdim=True) - 1  # [SEP]
        before = (place * (self.question_length - length + 1).clamp(min=1)).long()
        begin = (first - before).clamp(min=1)
        end = torch.minimum(torch.maximum(begin + self.question_length, first + length), last)
        cut, kept = end - begin, end - begin - length + 1
        position = torch.arange(seq_len, device=ids.device).expand_as(ids)
        asked, read = position - 1, position - kept - 2  # index of the token in question and passage
        question = begin + asked + torch.where(asked > first - begin, length - 1, 0)
        passage = 1 + read + torch.where(1 + read < begin, 0, cut)
        in_question, in_passage = (asked >= 0) & (asked < kept), (read >= 0) & (passage < seq_len)
        source = torch.where(in_question, question, torch.where(in_passage, passage, 0)).clamp(0, seq_len - 1)
        rows = torch.where(in_question | in_passage, ids.gather(1, source), vocab.pad_token_id)
        rows = torch.where(in_question & (asked == first - begin), vocab.mask_token_id, rows)
        rows = torch.where(position == 0, vocab.cls_token_id, rows)
        rows = torch.where(position == kept + 1, vocab.sep_token_id, rows)

        occurs = (position + length <= begin) | (position >= end)
        for offset in range(self.max_span_length):
            token = ids.gather(1, (first + offset).clamp(max=seq_len - 1))
            here = F.pad(ids[:, offset:], (0, offset), value=-1)
            occurs = occurs & ((here == token) | (offset >= length))
        ended = occurs.gather(1, (position - length + 1).clamp(min=0)) & (position >= length - 1)
        starts, ends = (part.gather(1, source) & in_passage & has_span for part in (occurs, ended))
        nowhere = (position == 0) & ~has_span
        segments = (read >= 0) & (rows != vocab.pad_token_id)
        return SpanBatch(rows, segments.long(), starts | nowhere, ends | nowhere, has_span.squeeze(1).float())


class SpanBatch(NamedTuple):
    """Questions and passages, padded on the right."""

    ids: Tensor
    """b s."""
    segments: Tensor
    """b s: 1 in the passage."""
    starts: Tensor
    """bool, b s: the first tokens of the answers."""
    ends: Tensor
    """bool, b s: their last tokens."""
    weights: Tensor
    """b: 0 for rows in which no span recurs."""


class SpanVocab:
    """Properties of a vocabulary that span selection needs, on one device."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device | str = "cpu") -> None:
        self.pad_token_id, self.mask_token_id = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.cls_token_id, self.sep_token_id = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.ordinary = ~tokenizer.special_tokens_mask.to(device)
        self.continuation = tokenizer.continuation_mask.to(device)
        tokens = [tokenizer.token_text(number) for number in range(len(tokenizer))]
        words = [token.removeprefix("##").lstrip("▁ ").lower() for token in tokens]
        content = [word.isalnum() and word not in FUNCTION_WORDS for word in words]
        letters = [len(word) == 1 and not word.isdigit() for word in words]
        single = torch.tensor(letters, device=device) & ~self.continuation
        self.content = torch.tensor(content, device=device) & self.ordinary & ~single
        """Neither punctuation nor a function word nor a single letter, such as the s after an apostrophe."""


class SpanSelectionModule(TaskModule):
    def __init__(self, spec: SpanSelection, model: Model, dataset: PassageDataset) -> None:
        super().__init__()
        self.unit = "tokens", dataset.seq_len
        self.spec, self.model = spec, model
        self.tokenizer, self.vocab = dataset.tokenizer, SpanVocab(dataset.tokenizer, model.device)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        ids = batch.examples.ids.long()
        return self.spec.apply(ids, context.uniform(len(ids), self.spec.num_uniforms(ids.shape[1])), self.vocab)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        return self.score(self.model, SpanBatch(*inputs)).losses()

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return SpanBatch(*inputs).weights.sum()

    def score(self, model: Model, batch: SpanBatch) -> TokenScores:
        """Scores of the rows, b each."""
        logits = span_logits(model, batch.ids, batch.segments, self.tokenizer, self.spec.mask_padding)
        loss, correct = torch.zeros_like(batch.weights), batch.weights > 0
        for scores, answers in zip(logits, (batch.starts, batch.ends), strict=True):
            right = scores.masked_fill(~answers, -torch.inf).logsumexp(1)
            loss = loss + (scores.logsumexp(1) - right) / 2
            correct = correct & answers.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
        return TokenScores(loss * batch.weights, correct.float(), batch.weights)

    def evaluate(self, model: Model, batches: Iterable[TokenBatch]) -> Sums:
        """Evaluate on spans that depend on the rows alone, so they are the same for every model and batch size."""

        def score(ids: Tensor) -> TokenScores:
            uniforms = fixed_uniforms(ids, self.spec.num_uniforms(ids.shape[1]))
            return self.score(model, self.spec.apply(ids, uniforms, self.vocab))

        sums = sum_scores((score(rows.long()) for (rows,) in batches), model.device)
        return {"accuracy": sums["accuracy"], **sums}  # the first metric chooses the best step
