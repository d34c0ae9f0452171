"""Text services: one endpoint, chosen by the task the model was trained for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter

from allmlp.data.tokenizer import MASK_TOKEN
from allmlp.errors import UserError
from allmlp.prediction import TextPredictor
from allmlp.serve import schema
from allmlp.serve.batching import Batcher, identity
from allmlp.serve.engine import BatchFunction, BatchResult
from allmlp.tasks import causal_lm
from allmlp.tasks.masked_lm import fill_masks
from allmlp.tasks.translate import translate

ENDPOINTS: dict[str, schema.Endpoint] = {
    "text": "fill",
    "classes": "classify",
    "span": "answer",
    "translation": "translate",
}
MAX_TOP_K = 100


class Prompt(NamedTuple):
    prompt: str
    max_new_tokens: int = 50
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


class TextService:
    def __init__(self, predictor: TextPredictor) -> None:
        self.predictor, self.model, self.tokenizer = predictor, predictor.original, predictor.tokenizer
        self.class_names = predictor.labels
        self.text_columns = predictor.preprocessing.text_columns
        self.classify: BatchFunction = predictor.probabilities
        self.answer: BatchFunction = predictor.answer
        generates = predictor.causal and predictor.task == "text"  # a causal model may also have learned to classify
        self.endpoint: schema.Endpoint = "generate" if generates else ENDPOINTS[predictor.task]
        if self.endpoint == "classify":
            self.classify([("a", "a")])  # raises UserError if the outputs cannot be those of a classifier

    def warm_up(self) -> tuple[BatchFunction, Any]:
        """The function of the endpoint, and a short input."""
        examples: dict[schema.Endpoint, tuple[BatchFunction, Any]] = {
            "fill": (self.fill, MASK_TOKEN),
            "classify": (self.classify, ("a", "a")),
            "answer": (self.answer, ("a", "a")),
            "translate": (self.translate, "a"),
            "generate": (self.generate, Prompt("")),
        }
        return examples[self.endpoint]

    def check_masked(self, text: str) -> str:
        """Check a text with [MASK] before it joins a batch."""
        return self.predictor.decode(text)[0]

    # --- one batch ---------------------------------------------------------------------------------------------------

    def fill(self, texts: list[str]) -> list[list[list[tuple[str, float]]]]:
        return fill_masks(self.model, self.tokenizer, texts, MAX_TOP_K)

    def translate(self, texts: list[str]) -> list[str]:
        return translate(self.model, self.tokenizer, texts)

    def generate(self, prompts: list[Prompt]) -> list[str]:
        with torch.inference_mode():
            return [self.tokenizer.decode(self.tokens(prompt)) for prompt in prompts]

    def tokens(self, prompt: Prompt) -> Iterator[int]:
        """Yield the prompt's tokens and the generated ones; decoded together, since a word may span both."""
        yield from self.tokenizer.encode([prompt.prompt])[0] if prompt.prompt else ()
        yield from causal_lm.generate(self.model, self.tokenizer, **prompt._asdict())

    # --- routes ------------------------------------------------------------------------------------------------------

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=schema.error_responses(400, 403, 408, 413, 422, 503, 504))
        getattr(self, f"add_{self.endpoint}")(router, batcher)
        return router

    def add_fill(self, router: APIRouter, batcher: Batcher) -> None:
        def tokens(result: BatchResult, top_k: int) -> list[list[schema.TokenPrediction]]:
            return [
                [schema.TokenPrediction(token=token, probability=p) for token, p in row[:top_k]] for row in result.value
            ]

        @router.post(
            "/fill",
            response_model=schema.FillResponse | schema.ManyResponse[schema.FilledInput],
            response_model_exclude_none=True,
        )
        async def fill(request: schema.FillBody) -> Any:
            """Predict the token of every [MASK]."""
            if isinstance(request, schema.FillManyRequest):
                results = await batcher.submit_all(self.check_masked, request.texts, self.fill)
                return schema.many_results(
                    results, lambda one: schema.FilledInput(predictions=tokens(one, request.top_k))
                )
            result = await batcher.submit(self.check_masked, request.text, self.fill)
            return schema.FillResponse(predictions=tokens(result, request.top_k), timing=schema.timing(result))

    def add_classify(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post(
            "/classify",
            response_model=schema.ClassificationResponse | schema.ManyResponse[schema.ClassifiedInput],
            response_model_exclude_none=True,
        )
        async def classify(request: schema.ClassifyBody) -> Any:
            """Classify a text or a pair of texts, or many."""
            if isinstance(request, schema.ClassifyManyRequest):
                seconds = request.text_pairs or [""] * len(request.texts)
                if len(seconds) != len(request.texts):
                    raise UserError(f"there are {len(request.texts)} texts, but {len(seconds)} text_pairs")
                results = await batcher.submit_all(identity, [*zip(request.texts, seconds)], self.classify)
                return schema.many_results(
                    results,
                    lambda one: schema.ClassifiedInput(predictions=schema.labels(one, self.class_names, request.top_k)),
                )
            result = await batcher.submit(identity, (request.text, request.text_pair), self.classify)
            return schema.classification(result, self.class_names, request.top_k)

    def add_answer(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/answer", response_model=schema.AnswerResponse)
        async def answer(request: schema.AnswerRequest) -> Any:
            """Find the answer to a question in the context."""
            result = await batcher.submit(identity, (request.question, request.context), self.answer, batched=False)
            answers = [
                schema.AnswerPrediction(answer=best.text, probability=best.probability, start=best.start, end=best.end)
                for best in result.value[: request.top_k]
            ]
            return schema.AnswerResponse(answers=answers, timing=schema.timing(result))

    def add_translate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post(
            "/translate",
            response_model=schema.TextResponse | schema.ManyResponse[schema.TranslatedInput],
            response_model_exclude_none=True,
        )
        async def translate(request: schema.TranslateBody) -> Any:
            """Translate a sentence, or many."""
            if isinstance(request, schema.TranslateManyRequest):
                results = await batcher.submit_all(identity, request.texts, self.translate)
                return schema.many_results(results, lambda one: schema.TranslatedInput(text=one.value))
            result = await batcher.submit(identity, request.text, self.translate)
            return schema.TextResponse(text=result.value, timing=schema.timing(result))

    def add_generate(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post("/generate", response_model=schema.TextResponse)
        async def generate(request: schema.GenerateRequest) -> Any:
            """Continue a prompt; the returned text includes it."""
            prompt = Prompt(**request.model_dump())
            result = await batcher.submit(identity, prompt, self.generate, batched=False)
            return schema.TextResponse(text=result.value, timing=schema.timing(result))
