"""A picture classifier as a service: what is in a picture, and which of its patches say so."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from fastapi import APIRouter, Query, Request
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from allmlp.analysis.saliency import occlusion, patch_grid
from allmlp.data.decode import Decode, picture
from allmlp.data.inputs import picture_inputs
from allmlp.errors import UserError, lookup
from allmlp.predict import best
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import Problem
from allmlp.serve.schema import Ability, Importance, Named, Prediction, Top, timing, troubles
from allmlp.tasks.task import Pixels
from allmlp.weights.folder import load

PIXELS = 2**25
"""That a file may announce: what a camera gives, and not what would fill the memory."""
SQUARES = 16
"""That are hidden one after the other to see what a picture's class rests on; each costs as much as a prediction."""
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "requestBody": {
        "required": True,
        "description": "A picture: JPEG, PNG, WEBP, BMP, GIF, TIFF or PPM; as it is, or in a form.",
        "content": {
            "application/octet-stream": BINARY,
            "image/jpeg": BINARY,
            "image/png": BINARY,
            "image/webp": BINARY,
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "string", "format": "binary"}},
                    "required": ["file"],
                }
            },
        },
    }
}


class Shown(NamedTuple):
    pixels: Tensor
    """uint8, c h w."""
    label: int | None = None
    """The class that is asked about; the likeliest if none is."""


class Explained(NamedTuple):
    label: int
    probability: float
    importance: Tensor
    """h w, in nats."""


class PictureService:
    ability: Ability = "predict"

    def __init__(self, folder: Path) -> None:
        self.model = load(folder).float().requires_grad_(False)
        self.inputs = picture_inputs(folder)
        size = self.model.spec.image_size
        if size is None:
            raise UserError(f"the model reads {self.model.spec.reads}, not pictures")
        self.size = size
        self.how = Decode(crop=self.inputs.crop, colour="rgb" if len(self.inputs.mean) == 3 else "grey", limit=PIXELS)
        self.scale = Pixels(self.inputs.mean, self.inputs.std)
        outputs = self.try_once()[0]
        if outputs.dim() != 1:
            raise UserError(f"the model in {folder} has no classes: it cannot say what is in a picture")
        self.classes = self.inputs.classes or tuple(map(str, range(len(outputs))))
        self.grid = patch_grid(self.model.spec)

    def try_once(self) -> list[Tensor]:
        """The usual work with nothing to see."""
        return self.classify([Shown(torch.zeros(self.how.channels, *self.size, dtype=torch.uint8))])

    def read(self, data: bytes, label: int | None = None) -> Shown:
        return Shown(picture(data, self.size, self.how), label)

    def classify(self, shown: list[Shown]) -> list[Tensor]:
        """Probabilities of the classes, one row for each picture."""
        with torch.inference_mode():
            return list(self.model(self.batch(shown)).softmax(-1))

    def explain(self, shown: list[Shown]) -> list[Explained]:
        """What hiding a square of each picture costs a class."""
        found = []
        for one, image, chances in zip(shown, self.batch(shown), self.classify(shown)):
            label = int(chances.argmax()) if one.label is None else one.label
            found.append(Explained(label, float(chances[label]), occlusion(self.model, image, label, SQUARES)))
        return found

    def batch(self, shown: list[Shown]) -> Tensor:
        return self.scale(torch.stack([one.pixels for one in shown]))

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=troubles(400, 408, 413, 415, 422, 503, 504))

        @router.post("/predict", response_model=Prediction, openapi_extra=BODY)
        async def predict(request: Request, top: Annotated[Top, Query()] = 5) -> Any:
            """What is in a picture: the likeliest classes with their probabilities."""
            done = await batcher.answer(self.read, await sent_picture(request), self.classify)
            (row,) = best(done.value[None], self.classes, top)
            return Prediction(answers=[Named(**answer._asdict()) for answer in row], timing=timing(done))

        @router.post("/importance", response_model=Importance, openapi_extra=BODY)
        async def importance(
            request: Request,
            name: str | None = Query(
                None,
                description="The class in question; the likeliest if not given.",
                json_schema_extra={"enum": [*self.classes]},
            ),
        ) -> Any:
            """Which patches of a picture the probability of a class rests on."""
            label = None if name is None else lookup(name, {n: i for i, n in enumerate(self.classes)}, "class")
            data = await sent_picture(request)
            read = partial(self.read, label=label)
            done = await batcher.answer(read, data, self.explain, together=False)
            found: Explained = done.value
            rows = [[round(value, 4) for value in row] for row in found.importance.tolist()]
            return Importance(
                name=self.classes[found.label], probability=found.probability, rows=rows, timing=timing(done)
            )

        return router


class InMemory(MultiPartParser):
    """A form whose files are never put on the disk: the whole body is in memory already, and small."""

    spool_max_size = 2**62


async def sent_picture(request: Request) -> bytes:
    """The bytes of the picture: the body, or the first file of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            form = await InMemory(request.headers, request.stream(), max_files=1, max_fields=10).parse()
        except MultiPartException as reason:
            raise Problem(400, reason.message) from None
        files = [value for value in form.values() if not isinstance(value, str)]
        try:
            if not files:
                raise Problem(422, "the form has no file")
            return await files[0].read()
        finally:
            await form.close()
    # The last is what curl calls any body.
    if kind.startswith("image/") or kind in ("", "application/octet-stream", "application/x-www-form-urlencoded"):
        return await request.body()
    raise Problem(415, f"send a picture, as image/... or in a form, not {kind[:100]}")
