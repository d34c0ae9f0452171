"""The web page and its samples, read once: no request names a file."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from allmlp.serve.schema import Ability, Sample, Samples, troubles

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "png": "image/png"}
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
TEXTS: dict[Ability, list[dict[str, str]]] = {
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
            "text": "What mixes information between patches?",
            "context": "MLP-Mixer has two kinds of layers. Channel-mixing MLPs act on each patch alone; token-mixing "
            "MLPs let patches exchange information.",
        }
    ],
    "translate": [{"text": "Ein Mann fährt Fahrrad."}, {"text": "Zwei Hunde spielen im Schnee."}],
    "generate": [{"text": "Return the"}, {"text": "Once upon a time"}],
}


def page_files() -> dict[str, Response]:
    """Path -> what is sent for it."""
    folder = files("allmlp.serve") / "page"
    found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    found |= {f"samples/{entry.name}": entry.read_bytes() for entry in (folder / "samples").iterdir()}
    return {
        "/" + ("" if name == "index.html" else name): Response(
            data, media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS
        )
        for name, data in found.items()
        if name.rpartition(".")[2] in TYPES
    }


def samples(served: dict[str, Response], ability: Ability, classes: tuple[str, ...]) -> Samples:
    """For a picture model the pictures of its own classes; where it has none of them, all."""
    pictures = [path for path in served if path.startswith("/samples/")] if ability == "predict" else []
    own = [path for path in pictures if label(path) in classes]
    return Samples(
        pictures=[Sample(name=label(path), url=path) for path in sorted(own or pictures)],
        texts=TEXTS.get(ability, []),
    )


def label(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].partition("-")[2]


def page_routes(served: dict[str, Response]) -> APIRouter:
    router = APIRouter(include_in_schema=False, responses=troubles(404))
    for path, response in served.items():
        router.add_api_route(path, constant(response), methods=["GET"])
    return router


def constant(response: Response) -> Any:
    async def send() -> Response:
        return response

    return send
