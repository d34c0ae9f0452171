"""Attention maps of a layer for an image or a text, for the web page."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Query
from starlette.requests import Request
from torch import Tensor

from allmlp.analysis.attention_maps import attention_layers, attention_maps, read_by_output, text_input
from allmlp.analysis.module_path import branch
from allmlp.errors import lookup
from allmlp.models.encoder import Encoder
from allmlp.models.grid import stage_number
from allmlp.serve.batching import Batcher, identity
from allmlp.serve.images import ImageService, image_body, uploaded_images
from allmlp.serve.maps import MAX_WEIGHTS, quantize
from allmlp.serve.schema import AttentionRequest, AttentionResponse, error_responses
from allmlp.serve.texts import TextService


class AttentionInput(NamedTuple):
    """A decoded image or a text, and the layer to look at."""

    value: Any
    layer: str
    second: str = ""
    """The second text of a pair."""


def attention_routes(service: ImageService | TextService, batcher: Batcher) -> APIRouter:
    """A route for models with attention; empty for the others."""
    router = APIRouter(responses=error_responses(400, 403, 408, 413, 415, 422, 503, 504))
    layers = attention_layers(service.model)
    Layer = Query(description="The name of a layer.", json_schema_extra={"enum": [*layers]})
    if not layers:
        return router
    if isinstance(service, ImageService):
        find = partial(attend_to_images, service)

        @router.post("/attention", response_model=AttentionResponse, openapi_extra=image_body(many=False))
        async def image_attention(request: Request, layer: str = Layer) -> Any:
            """Get what each head of a layer attends to in an image: the patches that the output is computed from."""
            lookup(layer, layers, "layer")
            ((_, data),), _ = await uploaded_images(request, 1)

            def decode(data: bytes) -> AttentionInput:
                return AttentionInput(service.decode(data), layer)

            return (await batcher.submit(decode, data, find, batched=False, measure=service.measure)).value

    else:
        read = partial(attend_to_texts, service)

        @router.post("/attention", response_model=AttentionResponse)
        async def text_attention(request: AttentionRequest, layer: str = Layer) -> Any:
            """Get what each token of a text or pair attends to, head by head; in a translation, also of its tokens."""
            lookup(layer, layers, "layer")
            one = AttentionInput(request.text, layer, request.text_pair)
            return (await batcher.submit(identity, one, read, batched=False)).value

    return router


def attend_to_images(service: ImageService, items: list[AttentionInput]) -> list[AttentionResponse]:
    spec, responses = service.model.spec, []
    for pixels, layer, _ in items:
        weights = layer_weights(service, layer, service.predictor.collate([pixels]))
        grid = spec.build_contexts[stage_number(spec, layer)].grid if isinstance(spec, Encoder) else None
        rows, columns = grid or service.grid_size
        maps = read_by_output(weights, spec)[:, -rows * columns :].unflatten(1, (rows, columns))
        responses.append(response(layer, maps, [], []))
    return responses


def attend_to_texts(service: TextService, items: list[AttentionInput]) -> list[AttentionResponse]:
    responses = []
    for text, layer, second in items:
        if second:
            inputs = service.predictor.collate([(text, second)])
            tokens = [service.tokenizer.token_text(number) for number in inputs["x"][0].tolist()]
            responses.append(response(layer, layer_weights(service, layer, **inputs), tokens, tokens))
            continue
        read = text_input(service.model, service.tokenizer, text)
        weights = layer_weights(service, layer, *read.inputs)
        rows = columns = read.read
        if layer.startswith("decoder."):
            rows = read.predicted
            if branch(layer) != "cross":  # the decoder reads what it has predicted one position earlier
                columns = [service.tokenizer.token_text(number) for number in read.inputs[1][0].tolist()]
        responses.append(response(layer, weights, rows, columns))
    return responses


def layer_weights(service: ImageService | TextService, layer: str, *inputs: Tensor, **named: Tensor) -> Tensor:
    """Attention weights of the first example: h s t."""
    inputs = tuple(x.to(service.model.dtype) if x.is_floating_point() else x for x in inputs)
    maps = attention_maps(service.model, *inputs, **named)
    return next(one.weights for one in maps if one.name == layer)[0].float().cpu()


def response(layer: str, maps: Tensor, rows: list[str], columns: list[str]) -> AttentionResponse:
    maps = maps[: max(MAX_WEIGHTS // maps[0].numel(), 1)]
    return AttentionResponse(layer=layer, kind="attention", row_tokens=rows, column_tokens=columns, **quantize(maps))
