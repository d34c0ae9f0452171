"""Causal language modelling: the next word, and text written word by word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import Text, Texts
from allmlp.data.order import Step
from allmlp.data.source import Splits
from allmlp.data.tokenizer import Tokenizer
from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.layers.head import Vocabulary
from allmlp.models.model import Model, ModelSpec
from allmlp.tasks.mlm import fit_text, perplexity
from allmlp.tasks.task import Losses, Moment, Task, TaskModule


class CausalLm(Task):
    """Cross-entropy of every token given those before it.

    L = - mean over i of log softmax(E X[i])_{id[i + 1]}
    """

    reads: ClassVar[type[Splits]] = Texts

    def fit(self, model: ModelSpec, dataset: Texts) -> ModelSpec:
        spec = fit_text(model, dataset.tokenizer, dataset.length)
        if not isinstance(spec.head, Vocabulary) or not spec.block.causal:
            raise UserError("causal language modelling needs a causal model with a Vocabulary head")
        return spec

    def build(self, model: Model, dataset: Texts) -> TaskModule:
        return CausalLmModule(model, dataset)


class CausalLmModule(TaskModule):
    def __init__(self, model: Model, dataset: Texts) -> None:
        super().__init__()
        self.model, self.length, self.pad = model, dataset.length, dataset.tokenizer.pad

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.length

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        (ids,) = step.batch
        return (ids.long(),)

    def learn(self, *inputs: Tensor) -> Losses:
        wrong, right, real = self.predict(self.model, inputs[0])
        total = real.sum().clamp(min=1)
        return Losses(wrong.sum() / total, {"accuracy": right.sum() / total})

    def predict(self, model: Model, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy, correctness, and whether there is a next token; b s-1 each. Padding lies on the right, where
        no real token looks.
        """
        logits, targets = model(ids[:, :-1]).float(), ids[:, 1:]
        real = (targets != self.pad).float()
        wrong = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(real)
        return wrong * real, (logits.argmax(2) == targets).float() * real, real

    def evaluate(self, model: Model, batches: Iterable[Text]) -> dict[str, tuple[Tensor, Tensor]]:
        sums = torch.zeros(3, dtype=torch.float64, device=model.device)
        for (ids,) in batches:
            sums += torch.stack([part.sum() for part in self.predict(model, ids.long())]).double()
        return {"loss": (sums[0], sums[2]), "accuracy": (sums[1], sums[2])}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"]), **means}


@torch.inference_mode()
def write(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str = "",
    tokens: int = 50,
    temperature: float = 1.0,
    top: int | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Tokens that follow the prompt, one at a time, until [SEP] or as many as the model can read.

    temperature=0 takes the likeliest; `top` draws from so many of the likeliest only.
    """
    length = model.spec.stem.length
    ids = [tokenizer.first, *(tokenizer.encode([prompt])[0] if prompt else [])]
    if len(ids) >= length:
        raise UserError(f"the prompt has {len(ids) - 1} tokens, the model reads {length} in all: shorten it")
    generator = torch.Generator(model.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    cache, new = Cache(), torch.tensor([ids], device=model.device)
    for _ in range(min(tokens, length - len(ids))):
        scores = model(new, cache=cache)[0, -1].float()
        scores[[tokenizer.pad, tokenizer.unknown, tokenizer.first, tokenizer.mask]] = -torch.inf
        number = draw(scores, temperature, top, generator)
        if number == tokenizer.last:
            return
        yield number
        new = torch.tensor([[number]], device=model.device)


def draw(scores: Tensor, temperature: float, top: int | None, generator: torch.Generator) -> int:
    if not temperature:
        return int(scores.argmax())
    if top is not None:
        scores = torch.where(scores >= scores.topk(min(top, len(scores))).values[-1], scores, -torch.inf)
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator))
