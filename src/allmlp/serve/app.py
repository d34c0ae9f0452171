"""The ASGI application: the endpoints of the models, the web page, and error handling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from allmlp import __version__
from allmlp.analysis.token_filters import token_weights
from allmlp.errors import UserError, lookup, one_line
from allmlp.prediction import ImagePredictor, open_predictor
from allmlp.prediction.forecast import Forecaster, series_folder
from allmlp.serve.attention import attention_routes
from allmlp.serve.batching import Batcher
from allmlp.serve.images import ImageService
from allmlp.serve.limits import Application, LimitMiddleware, RequestLimits
from allmlp.serve.maps import layer_maps, layers
from allmlp.serve.metrics import Metrics
from allmlp.serve.page import page_files, page_routes, samples
from allmlp.serve.schema import MAX_INPUTS, HealthResponse, MapsResponse, ModelInfo, SamplesResponse, error_responses
from allmlp.serve.series import SeriesService
from allmlp.serve.texts import TextService

Service = ImageService | TextService | SeriesService


def load_service(model: str | Path, device: str | None = "cpu", dtype: torch.dtype | None = None) -> Service:
    """Load a model by its folder or name."""
    if folder := series_folder(model):
        return SeriesService(Forecaster(folder, device))
    predictor = open_predictor(model, device=device, dtype=dtype, fast=True)
    return ImageService(predictor) if isinstance(predictor, ImagePredictor) else TextService(predictor)


def create_app(
    services: Mapping[str, Service],
    batcher: Batcher | None = None,
    limits: RequestLimits = RequestLimits(),
    hosts: frozenset[str] | None = None,
    origins: Sequence[str] = (),
) -> Application:
    """Create the ASGI application of models by name, with routes only for what they can do.

    The routes of a model start with /models/NAME; those of the first one are also at the root. `hosts` are the names
    that the server answers for; None for all. Pages of `origins` may use it.
    """
    batcher = batcher or Batcher()
    metrics = Metrics(batcher)
    batcher.engine.on_batch = metrics.on_batch
    pages = page_files()
    models = [model_info(service, name, limits, batcher) for name, service in services.items()]

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.stop()

    app = FastAPI(
        title=f"allmlp: {', '.join(services)}",
        version=__version__,
        description="HTTP API of all-MLP models.",
        lifespan=lifespan,
        docs_url=None,  # would load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    for number, (info, service) in enumerate(zip(models, services.values(), strict=True)):
        router = model_routes(service, info, batcher, pages)
        if number == 0:
            app.include_router(router)
        app.include_router(router, prefix=f"/{info.path}")
    app.include_router(page_routes(pages))
    app.include_router(server_routes(models, batcher, metrics))
    add_error_handlers(app)
    paths = {*pages, *app.openapi()["paths"], "/openapi.json"}
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["GET", "POST"], allow_headers=["*"])
    return LimitMiddleware(
        app, paths, batcher.rejection, lambda: batcher.draining, metrics.on_response, limits, hosts, origins
    )


def server_routes(models: list[ModelInfo], batcher: Batcher, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/models")
    async def list_models() -> list[ModelInfo]:
        """Describe the served models."""
        return models

    @router.get("/health", responses={503: {"model": HealthResponse, "description": "The server is shutting down."}})
    async def health() -> Any:
        """Check whether the server accepts requests."""
        status, names = "draining" if batcher.draining else "ok", [model.name for model in models]
        state = HealthResponse(status=status, models=names, in_flight=batcher.in_flight)
        return JSONResponse(state.model_dump(), 503) if batcher.draining else state

    @router.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> PlainTextResponse:
        """Get Prometheus metrics."""
        return PlainTextResponse(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def model_routes(service: Service, info: ModelInfo, batcher: Batcher, pages: dict[str, Response]) -> APIRouter:
    router = APIRouter(tags=[info.name])
    router.include_router(service.routes(batcher))
    if not isinstance(service, SeriesService):
        router.include_router(attention_routes(service, batcher))
    weights = {one.name: one for one in token_weights(service.model)}

    @router.get("/model")
    async def model() -> ModelInfo:
        """Describe the model."""
        return info

    @router.get("/samples")
    async def sample_inputs() -> SamplesResponse:
        """List sample inputs."""
        return samples(pages, service.endpoint, service.class_names, tuple(info.text_columns))

    if weights:
        cached = cache(lambda layer: layer_maps(weights[layer]))

        @router.get("/maps", responses=error_responses(422))
        def maps(
            layer: str = Query(description="The name of a layer.", json_schema_extra={"enum": [*weights]}),
        ) -> MapsResponse:
            """Get the token-mixing weights of a layer."""
            return cached(lookup(layer, weights, "layer").name)

    return router


def model_info(service: Service, name: str, limits: RequestLimits, batcher: Batcher) -> ModelInfo:
    images = service if isinstance(service, ImageService) else None
    text_columns = service.text_columns if isinstance(service, TextService) else ()
    series = service.predictor.preprocessing if isinstance(service, SeriesService) else None
    return ModelInfo(
        name=name,
        endpoint=service.endpoint,
        input_spec=service.model.spec.input_spec,
        num_parameters=sum(parameter.numel() for parameter in service.model.parameters()),
        img_size=images.img_size if images else None,
        crop_pct=images.preprocessing.crop_pct if images else 1.0,
        grid_size=images.grid_size if images else None,
        class_names=list(service.class_names),
        text_columns=list(text_columns),
        columns=list(series.columns) if series else [],
        time_column=series.time_column if series else "",
        id_columns=list(series.id_columns) if series else [],
        layers=layers(service.model),
        max_body_bytes=limits.max_body,
        max_inputs=min(MAX_INPUTS, batcher.max_concurrency),
        path=f"models/{name}",
        device=str(service.predictor.device),
        version=__version__,
    )


def add_error_handlers(app: FastAPI) -> None:
    """Return every error as one line in `detail`, without echoing the request."""

    def error(status: int, detail: object, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"detail": one_line(detail)}, status, headers)

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, reason: HTTPException) -> JSONResponse:
        return error(reason.status_code, reason.detail, dict(reason.headers or {}))

    @app.exception_handler(UserError)
    async def user_error(_request: Request, reason: UserError) -> JSONResponse:
        return error(422, reason)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, reason: RequestValidationError) -> JSONResponse:
        faults = []
        for fault in reason.errors():
            place = [str(part) for part in fault["loc"][1:] if part not in ("one", "many")]  # tags of a union
            message = fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "json_invalid":  # its place is that of the fault in the text
                return error(422, f"the body is not valid JSON at character {place[0]}: {fault['ctx']['error']}")
            faults.append(f"{'.'.join(place) or 'the body'}: {message}")
        if isinstance(reason.body, bytes) and "json" not in request.headers.get("content-type", ""):
            return error(422, "the body is not read as JSON: send it with the header Content-Type: application/json")
        return error(422, "; ".join(faults))

    @app.exception_handler(Exception)
    async def internal_error(_request: Request, _reason: Exception) -> JSONResponse:
        # The traceback goes to the log only.
        return error(500, "internal server error")
