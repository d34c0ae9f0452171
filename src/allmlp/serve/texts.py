"""A text model as a service: what it was taught is the one thing it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter
from torch import Tensor

from allmlp.data.tokenizer import MASK
from allmlp.errors import UserError
from allmlp.predict import best, open_text
from allmlp.serve.batching import Batcher
from allmlp.serve.schema import (
    Ability,
    Beginning,
    Fillings,
    Masked,
    Named,
    Prediction,
    Question,
    Sentence,
    Source,
    Span,
    Spans,
    Written,
    timing,
    troubles,
)
from allmlp.tasks.causal import write
from allmlp.tasks.glue import label
from allmlp.tasks.mlm import fill_all
from allmlp.tasks.squad import Answer, answer
from allmlp.tasks.translate import translate

ABILITIES: dict[str, Ability] = {
    "text": "fill",
    "classes": "classify",
    "span": "answer",
    "translation": "translate",
}
MOST = 100
"""Words that are named for a [MASK]."""


class Prompt(NamedTuple):
    text: str
    tokens: int = 50
    temperature: float = 0.0
    seed: int | None = None


class TextService:
    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer, self.inputs = open_text(folder)
        self.model.requires_grad_(False)
        self.classes = self.inputs.classes
        causal = self.inputs.gives == "text" and self.model.spec.block.causal
        self.ability: Ability = "generate" if causal else ABILITIES[self.inputs.gives]

    def try_once(self) -> object:
        """The usual work with little to read."""
        return {
            "fill": lambda: self.fill([MASK]),
            "classify": lambda: self.classify([("a", "")]),
            "answer": lambda: self.find([("a", "a")]),
            "translate": lambda: self.translate(["a"]),
            "generate": lambda: self.write([Prompt("")]),
        }[self.ability]()

    # --- one text, checked before it is taken into a batch -----------------------------------------------------------

    def masked(self, text: str) -> str:
        ids = self.tokenizer.encode([text])[0]
        room = self.model.spec.stem.length - 2
        if self.tokenizer.mask not in ids:
            raise UserError("the text has no [MASK] to fill in")
        if len(ids) > room:
            raise UserError(f"the text has {len(ids)} tokens; the model reads {room} at most")
        return text

    # --- a batch ------------------------------------------------------------------------------------------------------

    def fill(self, texts: list[str]) -> list[list[list[tuple[str, float]]]]:
        return fill_all(self.model, self.tokenizer, texts, MOST)

    def classify(self, pairs: list[tuple[str, str]]) -> list[Tensor]:
        return list(label(self.model, self.tokenizer, pairs))

    def find(self, questions: list[tuple[str, str]]) -> list[list[Answer]]:
        return [answer(self.model, self.tokenizer, *question) for question in questions]

    def translate(self, texts: list[str]) -> list[str]:
        return translate(self.model, self.tokenizer, texts)

    def write(self, prompts: list[Prompt]) -> list[str]:
        with torch.inference_mode():
            return [self.tokenizer.decode(self.tokens(prompt)) for prompt in prompts]

    def tokens(self, prompt: Prompt) -> Iterator[int]:
        """Those of the prompt and those that follow it: a word may go on where the prompt ends."""
        yield from self.tokenizer.encode([prompt.text])[0] if prompt.text else ()
        yield from write(self.model, self.tokenizer, prompt.text, prompt.tokens, prompt.temperature, seed=prompt.seed)

    # --- over HTTP ----------------------------------------------------------------------------------------------------

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=troubles(400, 408, 413, 422, 503, 504))
        getattr(self, f"add_{self.ability}")(router, batcher)
        return router

    def add_fill(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/fill", response_model=Fillings)
        async def fill(asked: Masked) -> Any:
            """The likeliest words for every [MASK]."""
            done = await batcher.answer(self.masked, asked.text, self.fill)
            masks = [[Named(name=name, probability=p) for name, p in row[: asked.top]] for row in done.value]
            return Fillings(masks=masks, timing=timing(done))

    def add_classify(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/classify", response_model=Prediction)
        async def classify(asked: Sentence) -> Any:
            """The classes of a sentence, or of a pair of them."""
            done = await batcher.answer(unchanged, (asked.text, asked.context), self.classify)
            (row,) = best(done.value[None], self.classes, asked.top)
            return Prediction(answers=[Named(**found._asdict()) for found in row], timing=timing(done))

    def add_answer(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/answer", response_model=Spans)
        async def find(asked: Question) -> Any:
            """The parts of a text that answer a question."""
            done = await batcher.answer(unchanged, (asked.text, asked.context), self.find, together=False)
            spans = [
                Span(name=found.text, probability=found.probability, start=found.start, end=found.end)
                for found in done.value[: asked.top]
            ]
            return Spans(answers=spans, timing=timing(done))

    def add_translate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/translate", response_model=Written)
        async def translated(asked: Source) -> Any:
            """The sentence in the other language."""
            done = await batcher.answer(unchanged, asked.text, self.translate)
            return Written(text=done.value, timing=timing(done))

    def add_generate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/generate", response_model=Written)
        async def generate(asked: Beginning) -> Any:
            """A beginning and what follows it."""
            prompt = Prompt(asked.text, asked.tokens, asked.temperature, asked.seed)
            done = await batcher.answer(unchanged, prompt, self.write, together=False)
            return Written(text=done.value, timing=timing(done))


def unchanged(item: Any) -> Any:
    return item
