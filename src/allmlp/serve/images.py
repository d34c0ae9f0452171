"""Image classification service: predictions, and the importance of each patch for a class."""

from __future__ import annotations

import io
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from allmlp.analysis.saliency import occlusion, patch_grid
from allmlp.data.decode import FORMATS, CorruptImage
from allmlp.errors import UserError, lookup, one_line, require
from allmlp.prediction import ImagePredictor
from allmlp.serve import schema
from allmlp.serve.batching import Batcher
from allmlp.serve.engine import BatchFunction

MAX_PIXELS = 2**25
"""Size limit from the file header: enough for camera images, and protection against decompression bombs."""
MAX_SIDE = 2**16
"""The largest side of a JPEG; resizing takes memory in proportion to it."""
OCCLUSION_SQUARES = 16
"""Squares hidden one after the other to measure importance; each costs as much as a prediction."""
FILES = "files"
"""The form field whose images are answered by a list, even for a single image."""
BINARY = {"type": "string", "format": "binary"}


def image_body(*, many: bool) -> dict[str, Any]:
    """The request body for OpenAPI."""
    kinds = ("application/octet-stream", "image/jpeg", "image/png", "image/webp")
    form: dict[str, Any] = {"type": "object", "properties": {"file": BINARY}, "required": ["file"]}
    text = "A JPEG, PNG, WEBP, BMP, GIF, TIFF or PPM image, as the raw body or as the form file `file`"
    if many:
        files = {"type": "array", "items": BINARY, "minItems": 1, "maxItems": schema.MAX_INPUTS}
        form = {"anyOf": [form, {"type": "object", "properties": {FILES: files}, "required": [FILES]}]}
        text += f"; or up to {schema.MAX_INPUTS} images as form files `{FILES}`"
    content = {kind: {"schema": BINARY} for kind in kinds} | {"multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "description": f"{text}.", "content": content}}


class ImageInput(NamedTuple):
    pixels: Tensor
    """uint8, c h w."""
    named: tuple[int, ...]
    """Classes with the requested name, of which the most probable one is explained; empty for all classes."""


class Explanation(NamedTuple):
    label: int
    probability: float
    importance: Tensor
    """h w, in nats."""


class UploadedImage(NamedTuple):
    name: str
    data: bytes


class ImageService:
    endpoint: schema.Endpoint = "predict"

    def __init__(self, predictor: ImagePredictor) -> None:
        self.predictor, self.model = predictor, predictor.original
        self.preprocessing, self.img_size = predictor.preprocessing, predictor.img_size
        if self.preprocessing.task != "classes":
            raise UserError(f"{predictor.name} is not a classifier; only image classifiers can be served")
        predictor.decoding = predictor.decoding.replace(max_pixels=MAX_PIXELS)
        self.classify: BatchFunction = predictor.probabilities
        """Class probabilities of a batch, n k."""
        self.classify([self.warm_up()[1]])  # raises UserError if the outputs cannot be those of a classifier
        self.class_names = predictor.labels
        self.grid_size = patch_grid(self.model.spec)

    def warm_up(self) -> tuple[BatchFunction, Any]:
        """The function of the endpoint, and a black image."""
        return self.classify, torch.zeros(self.predictor.decoding.channels, *self.img_size, dtype=torch.uint8)

    def measure(self, data: bytes) -> int:
        """The number of pixels, from the header; raises CorruptImage if there are too many."""
        Image = require("PIL.Image", "serve")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
        except Exception:  # decoders raise many types on damaged files; decoding reports what is wrong
            return 0
        if max(width, height) > MAX_SIDE:
            raise CorruptImage(f"{width} x {height} pixels exceed {MAX_SIDE:,} on a side")
        return width * height if width * height <= MAX_PIXELS else 0

    def decode(self, data: bytes) -> Tensor:
        return self.predictor.decode(data)

    def decode_to_explain(self, data: bytes, named: tuple[int, ...] = ()) -> ImageInput:
        return ImageInput(self.predictor.decode(data), named)

    def explain(self, inputs: list[ImageInput]) -> list[Explanation]:
        """Measure how much hiding each square of an image lowers the log-probability of a class."""
        explanations = []
        for pixels, named in inputs:
            image = self.predictor.collate([pixels])[0].to(self.model.dtype)
            probabilities = self.classify([pixels])[0]
            chosen = max(named or range(len(probabilities)), key=probabilities.tolist().__getitem__)
            importance = occlusion(self.model, image, chosen, OCCLUSION_SQUARES)
            explanations.append(Explanation(chosen, float(probabilities[chosen]), importance))
        return explanations

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=schema.error_responses(400, 403, 408, 413, 415, 422, 503, 504))
        self.add_predict(router, batcher)
        self.add_importance(router, batcher)
        return router

    def add_predict(self, router: APIRouter, batcher: Batcher) -> None:
        @router.post(
            "/predict",
            response_model=schema.ClassificationResponse | schema.ManyResponse[schema.ClassifiedInput],
            response_model_exclude_none=True,
            openapi_extra=image_body(many=True),
        )
        async def predict(request: Request, top_k: Annotated[schema.TopK, Query()] = 5) -> Any:
            """Classify an image, or several: the most probable classes with their probabilities.

            Images in the form field `files` are answered by a list of results, where an error is the result of its
            file.
            """
            images, many = await uploaded_images(request, min(schema.MAX_INPUTS, batcher.max_concurrency))
            data = [image.data for image in images]
            if not many:
                result = await batcher.submit(self.decode, data[0], self.classify, measure=self.measure)
                return schema.classification(result, self.class_names, top_k)
            results = await batcher.submit_all(self.decode, data, self.classify, measure=self.measure)
            names = [image.name for image in images]
            return schema.many_results(
                results,
                lambda one: schema.ClassifiedInput(predictions=schema.labels(one, self.class_names, top_k)),
                names,
            )

    def add_importance(self, router: APIRouter, batcher: Batcher) -> None:
        # Several classes may have one name: ImageNet has a crane that flies and one that lifts.
        named: dict[str, tuple[int, ...]] = {}
        for number, name in enumerate(self.class_names):
            named[name] = (*named.get(name, ()), number)

        @router.post("/importance", response_model=schema.ImportanceResponse, openapi_extra=image_body(many=False))
        async def importance(
            request: Request,
            label: str | None = Query(
                None,
                description="The class to explain; by default the most probable one.",
                json_schema_extra={"enum": [*named]},
            ),
        ) -> Any:
            """Measure the importance of each patch of an image for the probability of a class."""
            indices = () if label is None else lookup(label, named, "class")
            ((_, data),), _ = await uploaded_images(request, 1)
            decode = partial(self.decode_to_explain, named=indices)
            result = await batcher.submit(decode, data, self.explain, batched=False, measure=self.measure)
            explanation: Explanation = result.value
            return schema.ImportanceResponse(
                label=self.class_names[explanation.label],
                probability=explanation.probability,
                importance=[[round(value, 4) for value in row] for row in explanation.importance.tolist()],
                timing=schema.timing(result),
            )


class InMemoryMultiPartParser(MultiPartParser):
    """Never spools files to disk: the body is already in memory, and its size is limited."""

    spool_max_size = 2**62


async def uploaded_images(request: Request, most: int) -> tuple[list[UploadedImage], bool]:
    """The encoded images, from the raw body or the files of a form, and whether a list is requested."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        parser = InMemoryMultiPartParser(request.headers, request.stream(), max_files=most, max_fields=10)
        try:
            form = await parser.parse()
        except MultiPartException as reason:
            raise HTTPException(400, reason.message) from None
        files = [(field, value) for field, value in form.multi_items() if not isinstance(value, str)]
        try:
            if not files:
                raise HTTPException(422, "the form has no file")
            images = [UploadedImage(one_line(file.filename or ""), await file.read()) for _, file in files]
            return images, len(files) > 1 or files[0][0] == FILES
        finally:
            await form.close()
    # x-www-form-urlencoded is curl's default for --data-binary.
    if kind.startswith("image/") or kind in ("", "application/octet-stream", "application/x-www-form-urlencoded"):
        return [UploadedImage("", await request.body())], False
    raise HTTPException(415, f"send an image, as image/* or as a form file, not {kind[:100]}")
