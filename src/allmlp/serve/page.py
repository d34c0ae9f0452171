"""The web page and its sample inputs, loaded at startup: request paths never reach the file system."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from allmlp.serve.schema import Endpoint, SampleImage, SamplesResponse, error_responses

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "png": "image/png"}
TEXTS: dict[Endpoint, list[dict[str, str]]] = {
    "fill": [
        {"text": "Return the [MASK] of the list."},
        {"text": "The capital of France is [MASK]."},
        {"text": "The [MASK] sat on the [MASK]."},
    ],
    "classify": [
        {"text": "A charming, moving and often funny film."},
        {"text": "The plot is thin and the jokes fall flat."},
    ],
    "answer": [
        {
            "question": "What mixes information between patches?",
            "context": "MLP-Mixer has two kinds of layers. Channel-mixing MLPs act on each patch alone; token-mixing "
            "MLPs let patches exchange information.",
        }
    ],
    "translate": [{"text": "Ein Mann fährt Fahrrad."}, {"text": "Zwei Hunde spielen im Schnee."}],
    "generate": [{"prompt": "Return the"}, {"prompt": "Once upon a time"}],
}
PAIRS = [
    {"text": "A man is playing a guitar.", "text_pair": "Someone is making music."},
    {"text": "A man is playing a guitar.", "text_pair": "The stage is empty."},
]
"""For classifiers of pairs."""


def page_files() -> dict[str, Response]:
    """Map each path to its response."""
    folder = files("allmlp.serve") / "page"
    contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    contents["style.css"] = (files("allmlp") / "theme.css").read_bytes() + contents["style.css"]
    contents |= {f"samples/{entry.name}": entry.read_bytes() for entry in (folder / "samples").iterdir()}
    return {
        "/" + ("" if name == "index.html" else name): Response(
            data, media_type=TYPES[name.rpartition(".")[2]], headers={"cache-control": "no-cache"}
        )
        for name, data in contents.items()
        if name.rpartition(".")[2] in TYPES
    }


def samples(
    pages: dict[str, Response], endpoint: Endpoint, class_names: tuple[str, ...], text_columns: tuple[str, ...] = ()
) -> SamplesResponse:
    """List sample inputs; for an image model those of its classes, or all if there are none."""
    images = [path for path in pages if path.startswith("/samples/")] if endpoint == "predict" else []
    matching = [path for path in images if label(path) in class_names]
    sample_images = [SampleImage(label=label(path), url=path) for path in sorted(matching or images)]
    pairs = endpoint == "classify" and len(text_columns) > 1
    return SamplesResponse(images=sample_images, texts=PAIRS if pairs else TEXTS.get(endpoint, []))


def label(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].partition("-")[2]


def page_routes(pages: dict[str, Response]) -> APIRouter:
    router = APIRouter(include_in_schema=False, responses=error_responses(404))
    for path, response in pages.items():
        router.add_api_route(path, constant(response), methods=["GET"])
    return router


def constant(response: Response) -> Any:
    async def send() -> Response:
        return response

    return send
