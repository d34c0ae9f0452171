"""Causal language modeling, and text generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import TextDataset, TokenBatch
from allmlp.data.dataset import Dataset, Split
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.layers.head import LMHead
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import check_seed
from allmlp.tasks.masked_lm import configure_text_model, perplexity, unigram_perplexity
from allmlp.tasks.task import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Losses,
    StepContext,
    Sums,
    Task,
    TaskModule,
    TokenScores,
    sum_scores,
)


class CausalLM(Task):
    """Cross-entropy of every token given those before it.

        L = - mean over i of log softmax(E X[i])_{id[i + 1]}

    Padding and the first token of a document are not predicted.
    """

    dataset_type: ClassVar[type[Dataset]] = TextDataset

    def configure_model(self, model: ModelSpec, dataset: TextDataset) -> ModelSpec:
        spec = configure_text_model(model, dataset.tokenizer, dataset.seq_len)
        if not isinstance(spec.head, LMHead) or not spec.block.causal:
            raise UserError("causal language modeling needs a causal model with an LMHead")
        return spec

    def build(self, model: Model, dataset: TextDataset) -> TaskModule:
        return CausalLMModule(model, dataset)

    def floors(self, dataset: TextDataset, split: Split) -> dict[str, float]:
        return {"unigram_perplexity": unigram_perplexity(dataset, split)}


class CausalLMModule(TaskModule):
    def __init__(self, model: Model, dataset: TextDataset) -> None:
        super().__init__()
        self.unit = "tokens", dataset.seq_len
        self.model, self.dataset = model, dataset

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        (ids,) = batch.examples
        return (ids.long(),)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        return self.token_losses(self.model, inputs[0]).losses()

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return self.predicted(inputs[0]).sum()

    def predicted(self, ids: Tensor) -> Tensor:
        """Whether the next token is to be predicted, for every token but the last, b s-1."""
        tokenizer = self.dataset.tokenizer
        return ~(tokenizer.padding(ids) | tokenizer.starts(ids))[:, 1:]

    def token_losses(self, model: Model, ids: Tensor) -> TokenScores:
        """Scores of the next tokens, weighted by whether they are real, b s-1 each.

        Padding is on the right, which a causal model does not see, so no mask is needed. The first token of the next
        document is not predicted.
        """
        inputs, labels, real = ids[:, :-1], ids[:, 1:], self.predicted(ids).float()
        logits = model(inputs, **self.dataset.separation(inputs)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(real)
        return TokenScores(loss * real, (logits.argmax(2) == labels).float() * real, real)

    def evaluate(self, model: Model, batches: Iterable[TokenBatch]) -> Sums:
        return sum_scores((self.token_losses(model, ids.long()) for (ids,) in batches), model.device)

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"]), **means}


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 50,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Generate the tokens after the prompt, one by one, until [SEP], the end of a turn or the model's sequence length.

    temperature=0 is greedy; `top_k` samples from the k most probable tokens only, `top_p` from the smallest set whose
    probabilities, at this temperature, sum to it. Errors are raised by the call itself, not by the first iteration.
    """
    low, high = MIN_TEMPERATURE, MAX_TEMPERATURE
    if temperature and not low <= temperature <= high:
        raise UserError(f"temperature must be 0, for the most probable token, or between {low} and {high:g}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, not {top_p:g}")
    if seed is not None:
        check_seed(seed)
    seq_len = model.spec.stem.seq_len
    ids = [tokenizer.cls_token_id, *(tokenizer.encode([prompt])[0] if prompt else [])]
    if len(ids) >= seq_len:
        raise UserError(f"the prompt has {len(ids) - 1} tokens, the model reads {seq_len} in all: shorten it")
    generator = torch.Generator(model.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    return continue_text(model, tokenizer, ids, min(max_new_tokens, seq_len - len(ids)), choose)


@torch.inference_mode()
def continue_text(
    model: Model, tokenizer: Tokenizer, ids: list[int], count: int, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield at most `count` tokens after `ids`, each chosen from its logits."""
    # [SEP], which ends the text, is the only special token that may be generated.
    suppressed = sorted(tokenizer.special_ids - {tokenizer.sep_token_id})
    cache, new_ids = Cache(), torch.tensor([ids], device=model.device)
    for _ in range(count):
        logits = model(new_ids, cache=cache)[0, -1].float()
        check_output(logits)
        logits[suppressed] = -torch.inf
        logits[len(tokenizer) :] = -torch.inf  # of a vocabulary padded to a round size
        token = choose(logits)
        if token in tokenizer.stop_token_ids:
            return
        yield token
        new_ids = torch.tensor([[token]], device=model.device)


def check_output(logits: Tensor) -> None:
    if logits.isnan().any():
        raise UserError("the output of the model is NaN: it has diverged, or its dtype has too small a range")


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if not temperature:
        return int(logits.argmax())
    probabilities = truncate((logits / temperature).softmax(0), top_k, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def truncate(probabilities: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set all but the most probable tokens to zero, without renormalizing."""
    if top_k is not None and top_k < len(probabilities):
        kept = probabilities.topk(top_k)  # of equal ones only as many as asked for
        probabilities = torch.zeros_like(probabilities).scatter(0, kept.indices, kept.values)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = (ordered.cumsum(0) - ordered) / ordered.sum()
        # The most probable one stays, also where `top_p` is 0 in float32.
        probabilities = probabilities.index_fill(0, order[1:][before[1:] >= top_p], 0)
    return probabilities


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Decode tokens as they arrive, in whole words: a word, or a single character, may consist of several tokens."""
    seen: list[int] = []
    shown = 0
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        end = max(text.rfind(" "), text.rfind("\n"))
        if end > shown:
            yield text[shown:end]
            shown = end
    yield tokenizer.decode(seen)[shown:]
