"""Masked language modeling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import TextDataset, TokenBatch
from allmlp.data.dataset import Dataset, Split, evenly_spaced
from allmlp.data.preprocessing import PREPROCESSING_FILE
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.head import LMHead
from allmlp.layers.stem import TokenEmbed
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate, Spec, from_json, to_json
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule, TokenScores, sum_scores

UNIGRAM_ROWS = 100_000


class MaskedBatch(NamedTuple):
    """Corrupted rows, and the selected tokens that the model has to predict."""

    input_ids: Tensor
    """b s."""
    positions: Tensor
    """b m, of the selected tokens."""
    labels: Tensor
    """b m, original ids of the selected tokens."""
    weights: Tensor
    """b m, 1 for selected tokens and 0 for fillers: rows with padding have fewer selected tokens."""


class Masking(Spec):
    """Select a fraction of the tokens for prediction; most become [MASK], some a random token, the rest stay.

    The number of positions per row is fixed, so shapes are static and the output layer runs on these positions only; in
    rows with padding a proportional part of them counts. With `whole_word_mask` all pieces of a word are selected
    together. Source: Devlin et al., BERT, 2018: 15 %, of which 80 % [MASK], 10 % random, 10 % unchanged.
    """

    mlm_probability: Rate = 0.15
    mask_token_fraction: Rate = 0.8
    random_token_fraction: Rate = 0.1
    whole_word_mask: bool = False

    def check(self) -> None:
        if self.mask_token_fraction + self.random_token_fraction > 1 + 1e-9:
            raise UserError("Masking: mask_token_fraction + random_token_fraction must not exceed 1")

    def num_uniforms(self, seq_len: int) -> int:
        """Uniforms needed per row."""
        return 3 * seq_len

    def num_positions(self, seq_len: int) -> int:
        return max(round(self.mlm_probability * seq_len), 1)

    def apply(self, ids: Tensor, uniforms: Tensor, vocab: MaskingVocab) -> MaskedBatch:
        """Mask rows with uniforms in [0, 1), b num_uniforms(s). A pure function."""
        seq_len = ids.shape[1]
        score, action, replacement = uniforms.split(seq_len, dim=1)
        maskable = ~vocab.special_tokens_mask[ids]
        if self.whole_word_mask:
            score = score.gather(1, word_ids(ids, vocab))
        score, positions = torch.where(maskable, score, -1.0).topk(self.num_positions(seq_len), dim=1)
        num_selected = (self.mlm_probability * maskable.sum(1, keepdim=True)).round().clamp(min=1)
        selected = (score >= 0) & (torch.arange(score.shape[1], device=ids.device) < num_selected)
        if self.whole_word_mask:
            selected = selected & is_whole_word(positions, selected, word_ids(ids, vocab))
        labels = ids.gather(1, positions)
        action, replacement = action.gather(1, positions), replacement.gather(1, positions)
        random = vocab.ordinary[(replacement * len(vocab.ordinary)).long().clamp(max=len(vocab.ordinary) - 1)]
        corrupted = torch.where(action < self.mask_token_fraction + self.random_token_fraction, random, labels)
        corrupted = torch.where(action < self.mask_token_fraction, vocab.mask_token_id, corrupted)
        input_ids = ids.scatter(1, positions, torch.where(selected, corrupted, labels))
        return MaskedBatch(input_ids, positions, labels, selected.float())


class MaskingVocab:
    """Properties of a vocabulary that masking needs, on one device."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device | str = "cpu") -> None:
        self.mask_token_id = tokenizer.mask_token_id
        self.special_tokens_mask = tokenizer.special_tokens_mask.to(device)
        self.continuation_mask = tokenizer.continuation_mask.to(device)
        self.ordinary = (~tokenizer.special_tokens_mask).nonzero().flatten().to(device)
        """Tokens that a random replacement is drawn from."""


def word_ids(ids: Tensor, vocab: MaskingVocab) -> Tensor:
    """Index of the word in its row that each token belongs to, b s."""
    return ((~vocab.continuation_mask[ids]).long().cumsum(1) - 1).clamp(min=0)


def is_whole_word(positions: Tensor, selected: Tensor, words: Tensor) -> Tensor:
    """Whether all pieces of a selected token's word are selected, b m: the fixed number may truncate the last word."""
    word = words.gather(1, positions)
    num_selected = torch.zeros_like(words, dtype=torch.float32).scatter_add_(1, word, selected.float())
    num_pieces = torch.zeros_like(words, dtype=torch.float32).scatter_add_(1, words, torch.ones_like(words).float())
    return num_selected.gather(1, word) >= num_pieces.gather(1, word)


def fixed_uniforms(ids: Tensor, numbers: int) -> Tensor:
    """Uniforms in [0, 1) that depend on the row's tokens alone, b numbers.

    Masks for evaluation are then the same for every model, batch size and number of processes.
    """
    offsets = torch.arange(1, max(ids.shape[1], numbers) + 1, device=ids.device) * -7046029254386353131
    row = splitmix64((ids.long() * splitmix64(offsets[: ids.shape[1]])).sum(1, keepdim=True))
    return ((splitmix64(row + offsets[:numbers]) >> 40) & (2**24 - 1)).float() / 2**24


def splitmix64(x: Tensor) -> Tensor:
    """Finalizer of splitmix64 in wrapping int64 arithmetic; the masks turn arithmetic shifts into logical ones."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


class MaskedLM(Task):
    """Cross-entropy of the selected tokens.

        L = - mean over the selected positions i of log softmax(E X[i])_label

    `masking` is for training, `eval_masking` for evaluation. mask_padding=False lets padding mix with the text, as in
    the papers.
    """

    dataset_type: ClassVar[type[Dataset]] = TextDataset
    masking: Masking = Masking()
    eval_masking: Masking = Masking()
    mask_padding: bool = True

    def configure_model(self, model: ModelSpec, dataset: TextDataset) -> ModelSpec:
        spec = configure_text_model(model, dataset.tokenizer, dataset.seq_len)
        if not isinstance(spec.head, LMHead) or spec.block.causal:
            raise UserError("masked language modeling needs a bidirectional model with an LMHead")
        return spec

    def build(self, model: Model, dataset: TextDataset) -> TaskModule:
        return MaskedLMModule(self, model, dataset)

    def floors(self, dataset: TextDataset, split: Split) -> dict[str, float]:
        return {"unigram_perplexity": unigram_perplexity(dataset, split)}


def configure_text_model(model: ModelSpec, tokenizer: Tokenizer, seq_len: int) -> Encoder:
    """Set the vocabulary size and sequence length of a text encoder."""
    if not isinstance(model, Encoder) or not isinstance(model.stem, TokenEmbed):
        raise UserError(f"the task needs a model that reads text, not one that reads {model.input_spec}")
    return model.configure(vocab_size=len(tokenizer), seq_len=seq_len)


def with_mask_padding(files: dict[str, str], mask_padding: bool) -> dict[str, str]:
    """The files of a text dataset, with `mask_padding` in its preprocessing."""
    preprocessing = from_json(files[PREPROCESSING_FILE]).replace(mask_padding=mask_padding)
    return files | {PREPROCESSING_FILE: to_json(preprocessing)}


class MaskedLMModule(TaskModule):
    def __init__(self, spec: MaskedLM, model: Model, dataset: TextDataset) -> None:
        super().__init__()
        self.unit = "tokens", dataset.seq_len
        self.spec, self.model, self.seq_len = spec, model, dataset.seq_len
        self.dataset, self.pad_token_id = dataset, dataset.tokenizer.pad_token_id
        self.vocab = MaskingVocab(dataset.tokenizer, model.device)

    @property
    def flops(self) -> int:
        cost = measure(self.model.spec)
        head = sum(part.macs for part in cost.parts if part.name == "head")
        return 6 * (cost.macs - head + head * self.spec.masking.num_positions(self.seq_len) // self.seq_len)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        """The original ids, then a `MaskedBatch`. Masking inside the loss would add another graph to compile."""
        (rows,) = batch.examples
        ids = rows.long()
        uniforms = context.uniform(len(ids), self.spec.masking.num_uniforms(ids.shape[1]))
        return ids, *self.spec.masking.apply(ids, uniforms, self.vocab)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, *masked = inputs
        batch = MaskedBatch(*masked)
        return token_losses(self.model, self.encode(self.model, batch, ids), batch).losses()

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return MaskedBatch(*inputs[1:]).weights.sum()

    def encode(self, model: Model, batch: MaskedBatch, ids: Tensor) -> Tensor:
        """Features of the corrupted rows, b s c."""
        if self.dataset.separate_documents:
            return model.forward_features(batch.input_ids, **self.dataset.separation(ids))
        return model.forward_features(batch.input_ids, (ids != self.pad_token_id) if self.spec.mask_padding else None)

    def evaluate(self, model: Model, batches: Iterable[TokenBatch]) -> Sums:
        masking = self.spec.eval_masking

        def scores(ids: Tensor) -> TokenScores:
            batch = masking.apply(ids, fixed_uniforms(ids, masking.num_uniforms(ids.shape[1])), self.vocab)
            return token_losses(model, self.encode(model, batch, ids), batch)

        return sum_scores((scores(rows.long()) for (rows,) in batches), model.device)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"]), **means}


def token_losses(model: Model, features: Tensor, batch: MaskedBatch) -> TokenScores:
    """Scores of the selected tokens, b m each; the output layer runs on these only."""
    positions = batch.positions.unsqueeze(2).expand(-1, -1, features.shape[2])
    logits = model.forward_head(features.gather(1, positions)).float()  # b m v
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    correct = (logits.argmax(2) == batch.labels).float()
    return TokenScores(loss.view_as(batch.weights) * batch.weights, correct * batch.weights, batch.weights)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def unigram_perplexity(dataset: TextDataset, split: Split) -> float:
    """Perplexity of predicting every token by its frequency in the training rows, special tokens aside.

        p(k) = (count(k) + 1) / sum over j of (count(j) + 1)

    Tokens are counted on at most `UNIGRAM_ROWS` rows, evenly spaced.
    """
    words = ~dataset.tokenizer.special_tokens_mask
    train, evaluated = (
        rows.fetch(evenly_spaced(len(rows), min(len(rows), UNIGRAM_ROWS))).ids.cpu().flatten()
        for rows in (dataset.train, split)
    )
    counts = train.bincount(minlength=len(words))[words].double() + 1
    log_p = torch.zeros(len(words), dtype=torch.float64)
    log_p[words] = (counts / counts.sum()).log()
    return perplexity(-log_p[evaluated.long()][words[evaluated.long()]].mean().item())


def fill_masks(
    model: Model, tokenizer: Tokenizer, texts: list[str], top_k: int = 5
) -> list[list[list[tuple[str, float]]]]:
    """The most probable tokens for each [MASK] of each text, with their probabilities."""
    rows = [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id] for ids in tokenizer.encode(texts)]
    masks = [[position for position, token in enumerate(row) if token == tokenizer.mask_token_id] for row in rows]
    if not all(masks):
        raise UserError("the text has no [MASK] to fill in")
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows], device=model.device)
    real = (torch.arange(width) < lengths[:, None]).to(model.device)
    places = [(row, position) for row, positions in enumerate(masks) for position in positions]
    index = torch.tensor(places, device=model.device)
    with torch.inference_mode():
        features = model.forward_features(ids, None if bool(real.all()) else real)[index[:, 0], index[:, 1]]
        probabilities = model.forward_head(features[None])[0].float().softmax(1)
    best = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
    predictions = iter(
        [(tokenizer.token_text(token), probability) for token, probability in zip(tokens, values)]
        for tokens, values in zip(best.indices.tolist(), best.values.tolist())
    )
    return [[next(predictions) for _ in row] for row in masks]
