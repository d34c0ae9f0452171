"""Translation: trained with teacher forcing, evaluated by beam search with BLEU and chrF."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Dataset, InMemory, Split
from allmlp.data.parallel_corpus import TranslationBatch, TranslationDataset, source_ids
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import Tokenizer
from allmlp.device import sum_dtype, upload
from allmlp.errors import UserError, require
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count, Range, Rate
from allmlp.tasks.beam import MAX_LENGTH_PENALTY, beam_search
from allmlp.tasks.masked_lm import perplexity
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule, TokenScores

BATCH_SIZE = 64
"""Sentences that `translate` decodes together."""


class Translation(Task):
    """Cross-entropy of every target token, given the source and the previous target tokens, with label smoothing e.

        L = - mean over t of sum_k q_k log softmax(logits[t])_k,   q = (1 - e) onehot(y[t + 1]) + e / V

    Evaluation decodes by beam search (`num_beams`, `length_penalty`) and reports sacrebleu's BLEU and chrF; with
    several test files, bleu is that of the first and NAME_bleu that of each other one. During training only the first
    `eval_pairs` test pairs are decoded, all if None. `word_dropout` is the fraction of source and target input tokens
    replaced by [MASK] in training, a regularizer for small data. Sources: Vaswani et al., 2017 (smoothing, beam
    search); Wu et al., 2016 (length penalty); Sennrich et al., 2016 (word dropout).
    """

    dataset_type: ClassVar[type[Dataset]] = TranslationDataset
    label_smoothing: Rate = 0.1
    word_dropout: Rate = 0.0
    num_beams: Count = 4
    length_penalty: Annotated[float, Range(0.0, MAX_LENGTH_PENALTY)] = 0.6
    eval_pairs: Count | None = None

    @property
    def against_fsdp(self) -> str:
        return "beam search takes a different number of steps on each process"

    def configure_model(self, model: ModelSpec, dataset: TranslationDataset) -> ModelSpec:
        if not isinstance(model, EncoderDecoder):
            raise UserError(f"translation needs an encoder-decoder model, not one that reads {model.input_spec}")
        return model.configure(vocab_size=len(dataset.tokenizer), seq_len=dataset.seq_len)

    def build(self, model: Model, dataset: TranslationDataset) -> TaskModule:
        return TranslationModule(self, model, dataset)

    def build_evaluator(self, model: Model, dataset: TranslationDataset) -> TaskModule:
        return self.replace(eval_pairs=None).build(model, dataset)

    def floors(self, dataset: TranslationDataset, split: InMemory) -> dict[str, float]:
        """BLEU of the untranslated source sentences: names and numbers are the same in both languages."""
        source, _, reference = split.examples
        copies = [dataset.tokenizer.decode(row) for row in source.tolist()]
        metrics = TranslationMetrics()
        sums = metrics.statistics(copies, [dataset.references[number] for number in reference.tolist()])
        return {"copy_bleu": metrics.compute(sums)["bleu"]}


class TranslationModule(TaskModule):
    def __init__(self, spec: Translation, model: Model, dataset: TranslationDataset) -> None:
        super().__init__()
        self.unit = "tokens", dataset.tokens_per_pair
        self.spec, self.model = spec, check_translation_model(model, dataset.tokenizer)
        self.metrics, self.evaluates_part = TranslationMetrics(), spec.eval_pairs is not None
        self.tokenizer, self.references = dataset.tokenizer, dataset.references
        max_tokens = self.model.spec.encoder.stem.tokens
        if dataset.seq_len > max_tokens:
            raise UserError(
                f"the rows have {dataset.seq_len} tokens, the model reads {max_tokens}: set data.seq_len={max_tokens}"
            )
        splits = [split for split in (dataset.validation, dataset.test) if split is not None]
        self.eval_splits = [EvalSplit.of(split, spec.eval_pairs) for split in splits]
        self.test_sets = dataset.test_sets
        self.evaluated = self.eval_splits[-1]
        """The split that was evaluated last."""

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        source, target, _ = (part.long() for part in batch.examples)
        if not self.spec.word_dropout:
            return source, target, target
        lengths = [source.shape[1], target.shape[1]]
        source_uniforms, target_uniforms = context.uniform(len(source), sum(lengths)).split(lengths, dim=1)
        return self.drop_words(source, source_uniforms), target, self.drop_words(target, target_uniforms)

    def drop_words(self, ids: Tensor, uniforms: Tensor) -> Tensor:
        """Replace tokens by [MASK]; special tokens stay."""
        words = ~upload(self.tokenizer.special_tokens_mask, ids.device)[ids]
        return torch.where((uniforms < self.spec.word_dropout) & words, self.tokenizer.mask_token_id, ids)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        source, target, target_input = inputs
        return self.token_losses(self.model, source, target, target_input, self.spec.label_smoothing).losses()

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return self.predicted(inputs[1]).sum()

    def predicted(self, target: Tensor) -> Tensor:
        """Whether the next token is to be predicted, for every token but the last, b t-1."""
        return ~self.tokenizer.padding(target)[:, 1:]

    def token_losses(
        self, model: Model, source: Tensor, target: Tensor, target_input: Tensor, label_smoothing: float = 0.0
    ) -> TokenScores:
        """Scores of the next tokens, weighted by whether they are real, b t-1 each.

        `target_input` is the decoder's input, possibly with words dropped. It is padded on the right, which the decoder
        does not see.
        """
        logits = model(source, target_input[:, :-1], ~self.tokenizer.padding(source)).float()
        labels, real = target[:, 1:], self.predicted(target).float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=label_smoothing
        ).view_as(real)
        return TokenScores(loss * real, (logits.argmax(2) == labels).float() * real, real)

    def evaluate(self, model: Model, batches: Iterable[TranslationBatch]) -> Sums:
        sums = torch.zeros(3, dtype=sum_dtype(model.device), device=model.device)
        statistics = torch.zeros(max(len(self.test_sets), 1), len(TranslationMetrics.names) + 1, dtype=torch.float64)
        batches = iter(batches)
        first = next(batches)
        self.evaluated = self.split_of(first.reference_index)
        for source, target, reference in chain([first], batches):
            losses = self.token_losses(model, source.long(), target.long(), target.long())
            sums += torch.stack([part.sum() for part in losses])
            for number, part in enumerate(self.parts()):
                decoded = (reference >= part.first) & (reference <= part.last)
                statistics[number] += self.statistics(model, source[decoded].long(), reference[decoded].tolist())
        loss_sum, correct, count = sums
        means = {"loss": (loss_sum, count), "accuracy": (correct, count)}
        for part, (*totals, pairs) in zip(self.parts(), statistics.to(sums.dtype).to(model.device)):
            means |= {f"{part.prefix}{name}": (total, pairs) for name, total in zip(TranslationMetrics.names, totals)}
        return means

    def split_of(self, reference: Tensor) -> EvalSplit:
        """The split of these pairs; a process without pairs, if there are fewer than processes, asks the others."""
        newest = torch.tensor(int(reference[0]) if len(reference) else -1, device=reference.device)
        if dist.is_initialized():
            dist.all_reduce(newest, dist.ReduceOp.MAX)
        return [split for split in self.eval_splits if split.first <= int(newest)][-1]

    def parts(self) -> list[DecodedPart]:
        """Decoded pairs of the last evaluated split, by test file."""
        pairs, first, last = self.evaluated
        if not self.test_sets or first < self.test_sets[0][1]:
            return [DecodedPart("", first, last, pairs)]
        ends = [*(start - 1 for _, start in self.test_sets[1:]), last]
        prefixes = ["", *(f"{name}_" for name, _ in self.test_sets[1:])]
        ranges = zip(prefixes, (start for _, start in self.test_sets), (min(end, last) for end in ends))
        return [DecodedPart(prefix, start, end, end - start + 1) for prefix, start, end in ranges if start <= end]

    def statistics(self, model: Model, source: Tensor, references: list[int]) -> Tensor:
        """Sums of `TranslationMetrics` over these pairs, and the number of pairs."""
        texts = translate_rows(model, self.tokenizer, source, self.spec.num_beams, self.spec.length_penalty)
        sums = self.metrics.statistics(texts, [self.references[index] for index in references])
        return torch.tensor([*sums, len(texts)], dtype=torch.float64)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        scores: dict[str, float] = {}
        for part in self.parts():
            sums = [round(means.pop(f"{part.prefix}{name}") * part.pairs) for name in TranslationMetrics.names]
            scores |= {f"{part.prefix}{name}": score for name, score in self.metrics.compute(sums).items()}
        return {**scores, "perplexity": perplexity(means["loss"]), **means}


class DecodedPart(NamedTuple):
    """Decoded pairs of a test file: prefix of its metric names, and `reference_index` of the first and last pair."""

    prefix: str
    first: int
    last: int
    pairs: int


class EvalSplit(NamedTuple):
    """The first `pairs` of a split, which are decoded, with `reference_index` of the first and last of them."""

    pairs: int
    first: int
    last: int

    @classmethod
    def of(cls, split: Split, limit: int | None) -> EvalSplit:
        pairs = min(limit or len(split), len(split))
        return cls(pairs, *split.fetch(torch.tensor([0, pairs - 1])).reference_index.tolist())


class TranslationMetrics:
    """Corpus BLEU and chrF from statistics that can be summed over sentences, batches and processes.

    BLEU: words of hypothesis and reference, matching and total n-grams, n = 1 to 4. chrF: character n-grams of
    hypothesis and reference and matching ones, n = 1 to 6.
    """

    names = tuple(f"{metric} {number}" for metric, numbers in (("bleu", 10), ("chrf", 18)) for number in range(numbers))

    def __init__(self) -> None:
        metrics = require("sacrebleu.metrics", "text")
        self.bleu, self.chrf = metrics.BLEU(force=True), metrics.CHRF()

    def statistics(self, texts: list[str], references: list[str]) -> list[int]:
        if not texts:
            return [0] * len(self.names)
        tables = [metric._extract_corpus_statistics(texts, [references]) for metric in (self.bleu, self.chrf)]
        return [sum(column) for rows in tables for column in zip(*rows)]

    def compute(self, sums: list[int]) -> dict[str, float]:
        return {
            "bleu": self.bleu._compute_score_from_stats(sums[:10]).score,
            "chrf": self.chrf._compute_score_from_stats(sums[10:]).score,
        }


def check_translation_model(model: Model, tokenizer: Tokenizer) -> EncoderDecoderModel:
    """Raise unless the model is an encoder-decoder with the tokenizer's vocabulary."""
    if not isinstance(model, EncoderDecoderModel):
        raise UserError(f"translation needs an encoder-decoder model, not one that reads {model.spec.input_spec}")
    for side in (model.spec.encoder, model.spec.decoder):
        if isinstance(side.stem, TokenEmbed) and side.stem.vocab_size != len(tokenizer):
            raise UserError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {side.stem.vocab_size}: "
                f"use the tokenizer in the model's folder"
            )
    return model


@torch.no_grad()
def translate(
    model: Model, tokenizer: Tokenizer, sentences: list[str], num_beams: int = 4, length_penalty: float = 0.6
) -> list[str]:
    """Translate sentences, cut to the model's sequence length; an empty one stays empty. White space around a sentence
    is left out, as in training.
    """
    if isinstance(sentences, str):
        raise UserError("translate takes a list of sentences, not a string")
    seq_len, training = check_translation_model(model, tokenizer).spec.encoder.stem.tokens, model.training
    rows = [source_ids(ids, tokenizer, seq_len) for ids in tokenizer.encode([*map(str.strip, sentences)])]
    translations = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))  # similar lengths need little padding
    model.eval()
    try:
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            width = len(rows[chosen[-1]])
            ids = [rows[number] + [tokenizer.pad_token_id] * (width - len(rows[number])) for number in chosen]
            texts = translate_rows(model, tokenizer, torch.tensor(ids, device=model.device), num_beams, length_penalty)
            for number, text in zip(chosen, texts):
                translations[number] = text
    finally:
        model.train(training)
    return translations


def translate_rows(
    model: Model, tokenizer: Tokenizer, source: Tensor, num_beams: int, length_penalty: float
) -> list[str]:
    """Translate token rows, b s; a row with nothing but [SEP] stays empty."""
    assert isinstance(model, EncoderDecoderModel)
    mask = ~tokenizer.padding(source)
    lengths = mask.sum(dim=1)
    filled = lengths > 1
    width = int(lengths.max()) if len(source) else 0
    suppress_tokens = tokenizer.special_tokens_mask.to(source.device).clone()
    suppress_tokens[tokenizer.sep_token_id] = False
    # Training shifts the target by one, so the decoder's last position is never trained.
    max_length = model.spec.decoder.stem.tokens - 1
    rows, real, ends = source[filled, :width], mask[filled, :width], (tokenizer.cls_token_id, tokenizer.sep_token_id)
    sequences = iter(beam_search(model, rows, real, *ends, max_length, suppress_tokens, num_beams, length_penalty))
    return [tokenizer.decode(next(sequences)).strip() if some else "" for some in filled.tolist()]
