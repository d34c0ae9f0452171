"""Text services: one endpoint, chosen by the task the model was trained for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter
from torch import Tensor

from allmlp.data.tokenizer import MASK_TOKEN
from allmlp.errors import UserError
from allmlp.prediction import check_classes, open_text
from allmlp.serve.batching import Batcher
from allmlp.serve.schema import (
    AnswerPrediction,
    AnswerRequest,
    AnswerResponse,
    ClassificationResponse,
    ClassifyRequest,
    Endpoint,
    FillRequest,
    FillResponse,
    GenerateRequest,
    TextResponse,
    TokenPrediction,
    TranslateRequest,
    classification,
    error_responses,
    timing,
)
from allmlp.tasks import causal_lm
from allmlp.tasks.classify_text import classify_texts
from allmlp.tasks.masked_lm import fill_masks
from allmlp.tasks.question_answering import PredictedAnswer, answer_question
from allmlp.tasks.translate import translate

ENDPOINTS: dict[str, Endpoint] = {
    "text": "fill",
    "classes": "classify",
    "span": "answer",
    "translation": "translate",
}
MAX_TOP_K = 100


class Prompt(NamedTuple):
    text: str
    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int | None = None


class TextService:
    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer, self.preprocessing = open_text(folder)
        self.model.requires_grad_(False)
        self.class_names = self.preprocessing.class_names
        task = self.preprocessing.task
        causal = task == "text" and self.model.spec.block.causal
        self.endpoint: Endpoint = "generate" if causal else ENDPOINTS[task]
        if self.endpoint == "classify":
            check_classes(folder, torch.stack(self.classify([("a", "")])), self.class_names)

    def warm_up(self) -> object:
        """Run the model on a short input."""
        return {
            "fill": lambda: self.fill([MASK_TOKEN]),
            "classify": lambda: self.classify([("a", "")]),
            "answer": lambda: self.answer([("a", "a")]),
            "translate": lambda: self.translate(["a"]),
            "generate": lambda: self.generate([Prompt("")]),
        }[self.endpoint]()

    def check_masked(self, text: str) -> str:
        """Check a text with [MASK] before it joins a batch."""
        ids = self.tokenizer.encode([text])[0]
        max_tokens = self.model.spec.stem.seq_len - 2
        if self.tokenizer.mask_token_id not in ids:
            raise UserError("the text has no [MASK] to fill in")
        if len(ids) > max_tokens:
            raise UserError(f"the text has {len(ids)} tokens; the model reads at most {max_tokens}")
        return text

    # --- one batch ---------------------------------------------------------------------------------------------------

    def fill(self, texts: list[str]) -> list[list[list[tuple[str, float]]]]:
        return fill_masks(self.model, self.tokenizer, texts, MAX_TOP_K)

    def classify(self, pairs: list[tuple[str, str]]) -> list[Tensor]:
        return list(classify_texts(self.model, self.tokenizer, pairs))

    def answer(self, questions: list[tuple[str, str]]) -> list[list[PredictedAnswer]]:
        return [answer_question(self.model, self.tokenizer, *question) for question in questions]

    def translate(self, texts: list[str]) -> list[str]:
        return translate(self.model, self.tokenizer, texts)

    def generate(self, prompts: list[Prompt]) -> list[str]:
        with torch.inference_mode():
            return [self.tokenizer.decode(self.tokens(prompt)) for prompt in prompts]

    def tokens(self, prompt: Prompt) -> Iterator[int]:
        """Yield the prompt's tokens and the generated ones; decoded together, since a word may span both."""
        yield from self.tokenizer.encode([prompt.text])[0] if prompt.text else ()
        yield from causal_lm.generate(
            self.model, self.tokenizer, prompt.text, prompt.max_new_tokens, prompt.temperature, seed=prompt.seed
        )

    # --- routes ------------------------------------------------------------------------------------------------------

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=error_responses(400, 408, 413, 422, 503, 504))
        getattr(self, f"add_{self.endpoint}")(router, batcher)
        return router

    def add_fill(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/fill", response_model=FillResponse)
        async def fill(request: FillRequest) -> Any:
            """Predict the token of every [MASK]."""
            result = await batcher.submit(self.check_masked, request.text, self.fill)
            predictions = [
                [TokenPrediction(token=token, probability=p) for token, p in row[: request.top_k]]
                for row in result.value
            ]
            return FillResponse(predictions=predictions, timing=timing(result))

    def add_classify(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/classify", response_model=ClassificationResponse)
        async def classify(request: ClassifyRequest) -> Any:
            """Classify a text or a pair of texts."""
            result = await batcher.submit(identity, (request.text, request.text_pair), self.classify)
            return classification(result, self.class_names, request.top_k)

    def add_answer(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/answer", response_model=AnswerResponse)
        async def answer(request: AnswerRequest) -> Any:
            """Find the answer to a question in the context."""
            result = await batcher.submit(identity, (request.question, request.context), self.answer, batched=False)
            answers = [
                AnswerPrediction(answer=found.text, probability=found.probability, start=found.start, end=found.end)
                for found in result.value[: request.top_k]
            ]
            return AnswerResponse(answers=answers, timing=timing(result))

    def add_translate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/translate", response_model=TextResponse)
        async def translate(request: TranslateRequest) -> Any:
            """Translate a sentence."""
            result = await batcher.submit(identity, request.text, self.translate)
            return TextResponse(text=result.value, timing=timing(result))

    def add_generate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/generate", response_model=TextResponse)
        async def generate(request: GenerateRequest) -> Any:
            """Continue a prompt; the returned text includes it."""
            prompt = Prompt(request.prompt, request.max_new_tokens, request.temperature, request.seed)
            result = await batcher.submit(identity, prompt, self.generate, batched=False)
            return TextResponse(text=result.value, timing=timing(result))


def identity(item: Any) -> Any:
    return item
