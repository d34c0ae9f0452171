"""Image classification service: predictions, and the importance of each patch for a class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from allmlp.analysis.saliency import occlusion, patch_grid
from allmlp.data.decode import Decode, decode_image
from allmlp.data.preprocessing import image_preprocessing
from allmlp.errors import UserError, lookup
from allmlp.prediction import check_classes
from allmlp.serve.batching import Batcher
from allmlp.serve.schema import (
    ClassificationResponse,
    Endpoint,
    ImportanceResponse,
    TopK,
    classification,
    error_responses,
    timing,
)
from allmlp.tasks.task import Normalize
from allmlp.weights.folder import load

MAX_PIXELS = 2**25
"""Size limit from the file header: enough for camera images, and protection against decompression bombs."""
OCCLUSION_SQUARES = 16
"""Squares hidden one after the other to measure importance; each costs as much as a prediction."""
BINARY = {"schema": {"type": "string", "format": "binary"}}
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "A JPEG, PNG, WEBP, BMP, GIF, TIFF or PPM image, as the raw body or as a form file.",
        "content": {
            "application/octet-stream": BINARY,
            "image/jpeg": BINARY,
            "image/png": BINARY,
            "image/webp": BINARY,
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"file": BINARY["schema"]}, "required": ["file"]}
            },
        },
    }
}


class ImageInput(NamedTuple):
    pixels: Tensor
    """uint8, c h w."""
    label: int | None = None
    """The class to explain; None means the most probable one."""


class Explanation(NamedTuple):
    label: int
    probability: float
    importance: Tensor
    """h w, in nats."""


class ImageService:
    endpoint: Endpoint = "predict"

    def __init__(self, folder: Path) -> None:
        self.model = load(folder).float().requires_grad_(False)
        self.preprocessing = image_preprocessing(folder)
        img_size = self.model.spec.input_size
        if img_size is None:
            raise UserError(f"the model in {folder} is not an image model (input: {self.model.spec.input_spec})")
        self.img_size = img_size
        color = "rgb" if len(self.preprocessing.mean) == 3 else "gray"
        self.decoding = Decode(crop_pct=self.preprocessing.crop_pct, color=color, max_pixels=MAX_PIXELS)
        self.normalize = Normalize(self.preprocessing.mean, self.preprocessing.std)
        if self.preprocessing.task != "classes":
            raise UserError(f"the model in {folder} is not a classifier; only image classifiers can be served")
        outputs = torch.stack(self.warm_up())
        check_classes(folder, outputs, self.preprocessing.class_names)
        self.class_names = self.preprocessing.class_names or tuple(map(str, range(outputs.shape[1])))
        self.grid_size = patch_grid(self.model.spec)

    def warm_up(self) -> list[Tensor]:
        """Run the model on a black image."""
        return self.classify([ImageInput(torch.zeros(self.decoding.channels, *self.img_size, dtype=torch.uint8))])

    def decode(self, data: bytes, label: int | None = None) -> ImageInput:
        return ImageInput(decode_image(data, self.img_size, self.decoding), label)

    def classify(self, inputs: list[ImageInput]) -> list[Tensor]:
        """Class probabilities of each image."""
        with torch.inference_mode():
            return list(self.model(self.collate(inputs)).softmax(-1))

    def explain(self, inputs: list[ImageInput]) -> list[Explanation]:
        """Measure how much hiding each square of an image lowers the log-probability of a class."""
        found = []
        for one, image, probabilities in zip(inputs, self.collate(inputs), self.classify(inputs)):
            label = int(probabilities.argmax()) if one.label is None else one.label
            importance = occlusion(self.model, image, label, OCCLUSION_SQUARES)
            found.append(Explanation(label, float(probabilities[label]), importance))
        return found

    def collate(self, inputs: list[ImageInput]) -> Tensor:
        return self.normalize(torch.stack([one.pixels for one in inputs]))

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=error_responses(400, 408, 413, 415, 422, 503, 504))

        @router.post("/predict", response_model=ClassificationResponse, openapi_extra=IMAGE_BODY)
        async def predict(request: Request, top_k: Annotated[TopK, Query()] = 5) -> Any:
            """Classify an image: the most probable classes with their probabilities."""
            result = await batcher.submit(self.decode, await image_bytes(request), self.classify)
            return classification(result, self.class_names, top_k)

        @router.post("/importance", response_model=ImportanceResponse, openapi_extra=IMAGE_BODY)
        async def importance(
            request: Request,
            label: str | None = Query(
                None,
                description="The class to explain; by default the most probable one.",
                json_schema_extra={"enum": [*self.class_names]},
            ),
        ) -> Any:
            """Measure the importance of each patch of an image for the probability of a class."""
            index = None if label is None else lookup(label, {n: i for i, n in enumerate(self.class_names)}, "class")
            decode = partial(self.decode, label=index)
            result = await batcher.submit(decode, await image_bytes(request), self.explain, batched=False)
            found: Explanation = result.value
            return ImportanceResponse(
                label=self.class_names[found.label],
                probability=found.probability,
                importance=[[round(value, 4) for value in row] for row in found.importance.tolist()],
                timing=timing(result),
            )

        return router


class InMemoryMultiPartParser(MultiPartParser):
    """Never spools files to disk: the body is already in memory, and its size is limited."""

    spool_max_size = 2**62


async def image_bytes(request: Request) -> bytes:
    """The encoded image: the raw body, or the first file of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            form = await InMemoryMultiPartParser(request.headers, request.stream(), max_files=1, max_fields=10).parse()
        except MultiPartException as reason:
            raise HTTPException(400, reason.message) from None
        files = [value for value in form.values() if not isinstance(value, str)]
        try:
            if not files:
                raise HTTPException(422, "the form has no file")
            return await files[0].read()
        finally:
            await form.close()
    # x-www-form-urlencoded is curl's default for --data-binary.
    if kind.startswith("image/") or kind in ("", "application/octet-stream", "application/x-www-form-urlencoded"):
        return await request.body()
    raise HTTPException(415, f"send an image, as image/* or as a form file, not {kind[:100]}")
