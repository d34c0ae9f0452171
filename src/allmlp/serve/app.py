"""The application: what can be asked of the served model, and how everything that goes wrong is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from allmlp import __version__
from allmlp.analysis.filters import token_weights
from allmlp.data.inputs import Inputs, read_inputs
from allmlp.errors import UserError, lookup, one_line
from allmlp.serve.batching import Batcher, Refused, TooLate
from allmlp.serve.limits import Allowed, Application, Limits, Problem, busy
from allmlp.serve.maps import layer_maps, layers
from allmlp.serve.metrics import CONTENT_TYPE, Metrics
from allmlp.serve.page import page_files, page_routes, samples
from allmlp.serve.pictures import PictureService
from allmlp.serve.schema import Facts, Health, Maps, Samples, troubles
from allmlp.serve.texts import TextService

Service = PictureService | TextService


def open_service(folder: Path) -> Service:
    """The model of a folder, in memory."""
    return PictureService(folder) if isinstance(read_inputs(folder), Inputs) else TextService(folder)


def application(
    service: Service, name: str, batcher: Batcher | None = None, allowed: Allowed = Allowed()
) -> Application:
    """A served model as an ASGI application; what it cannot do has no route."""
    batcher, metrics = batcher or Batcher(), Metrics()
    batcher.on_batch = metrics.on_batch
    served = page_files()
    known = describe(service, name, allowed)
    weights = {one.name: one for one in token_weights(service.model)}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.stop()

    app = FastAPI(
        title=f"allmlp: {name}",
        version=__version__,
        description="One all-MLP model, asked over HTTP.",
        lifespan=lifespan,
        docs_url=None,  # its page would be fetched from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(service.routes(batcher))
    app.include_router(page_routes(served))
    answer_problems(app)

    @app.get("/model")
    async def model() -> Facts:
        """The model that is served."""
        return known

    @app.get("/samples")
    async def sample_inputs() -> Samples:
        """Things to try."""
        return samples(served, service.ability, service.classes)

    if weights:
        made = cache(lambda layer: layer_maps(weights[layer]))

        @app.get("/maps", responses=troubles(422))
        def maps(
            layer: str = Query(description="The name of a layer.", json_schema_extra={"enum": [*weights]}),
        ) -> Maps:
            """Token-mixing weights of a layer."""
            return made(lookup(layer, weights, "layer").name)

    @app.get("/health", responses={503: {"model": Health, "description": "The server is shutting down."}})
    async def health() -> Any:
        """Whether requests are taken on."""
        state = Health(status="draining" if batcher.draining else "ok", model=name, in_flight=batcher.inside)
        return JSONResponse(state.model_dump(), 503) if batcher.draining else state

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metric_lines() -> PlainTextResponse:
        """Counters for Prometheus."""
        text = metrics.text(batcher.inside, batcher.capacity, batcher.accepted)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    paths = {*served, *app.openapi()["paths"], "/openapi.json"}
    return Limits(app, paths, batcher.refusal, lambda: batcher.draining, metrics.on_response, allowed)


def describe(service: Service, name: str, allowed: Allowed) -> Facts:
    picture = service if isinstance(service, PictureService) else None
    return Facts(
        name=name,
        ability=service.ability,
        reads=service.model.spec.reads,
        parameters=sum(parameter.numel() for parameter in service.model.parameters()),
        size=picture.size if picture else None,
        crop=picture.inputs.crop if picture else 1.0,
        grid=picture.grid if picture else None,
        classes=list(service.classes),
        layers=layers(service.model),
        body_limit=allowed.body,
        version=__version__,
    )


def answer_problems(app: FastAPI) -> None:
    """Every error is one line in `detail`; nothing that was sent is sent back."""

    def problem(status: int, detail: object, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"detail": one_line(detail)}, status, headers)

    @app.exception_handler(Problem)
    async def told(_request: Request, reason: Problem) -> JSONResponse:
        return problem(reason.status, reason.detail, reason.headers)

    @app.exception_handler(Refused)
    async def refused(_request: Request, reason: Refused) -> JSONResponse:
        known = busy(reason)
        return problem(known.status, known.detail, known.headers)

    @app.exception_handler(TooLate)
    async def late(_request: Request, reason: TooLate) -> JSONResponse:
        return problem(504, reason)

    @app.exception_handler(UserError)
    async def wrong(_request: Request, reason: UserError) -> JSONResponse:
        return problem(422, reason)

    @app.exception_handler(RequestValidationError)
    async def misshapen(_request: Request, reason: RequestValidationError) -> JSONResponse:
        faults = [f"{'.'.join(map(str, fault['loc'][1:])) or 'the body'}: {fault['msg']}" for fault in reason.errors()]
        return problem(422, "; ".join(faults))

    @app.exception_handler(Exception)
    async def mistaken(_request: Request, _reason: Exception) -> JSONResponse:
        # Ours; what happened goes to the log alone.
        return problem(500, "the server made a mistake")

    @app.exception_handler(HTTPException)
    async def standard(_request: Request, reason: HTTPException) -> JSONResponse:
        return problem(reason.status_code, reason.detail, dict(reason.headers or {}))
