"""The ASGI application: the model's endpoints, the web page, and error handling."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from allmlp import __version__
from allmlp.analysis.token_filters import token_weights
from allmlp.data.preprocessing import ImagePreprocessing, read_preprocessing
from allmlp.errors import UserError, lookup, one_line
from allmlp.serve.batching import Batcher
from allmlp.serve.images import ImageService
from allmlp.serve.limits import Application, LimitMiddleware, RequestLimits
from allmlp.serve.maps import layer_maps, layers
from allmlp.serve.metrics import Metrics
from allmlp.serve.page import page_files, page_routes, samples
from allmlp.serve.schema import HealthResponse, MapsResponse, ModelInfo, SamplesResponse, error_responses
from allmlp.serve.texts import TextService

Service = ImageService | TextService


def load_service(folder: Path) -> Service:
    """Load the model of a folder."""
    return ImageService(folder) if isinstance(read_preprocessing(folder), ImagePreprocessing) else TextService(folder)


def create_app(
    service: Service, name: str, batcher: Batcher | None = None, limits: RequestLimits = RequestLimits()
) -> Application:
    """Create the ASGI application of a model, with routes only for what the model can do."""
    batcher = batcher or Batcher()
    metrics = Metrics(batcher)
    batcher.on_batch = metrics.on_batch
    pages = page_files()
    info = model_info(service, name, limits)
    weights = {one.name: one for one in token_weights(service.model)}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.stop()

    app = FastAPI(
        title=f"allmlp: {name}",
        version=__version__,
        description="HTTP API of an all-MLP model.",
        lifespan=lifespan,
        docs_url=None,  # would load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(service.routes(batcher))
    app.include_router(page_routes(pages))
    add_error_handlers(app)

    @app.get("/model")
    async def model() -> ModelInfo:
        """Describe the served model."""
        return info

    @app.get("/samples")
    async def sample_inputs() -> SamplesResponse:
        """List sample inputs."""
        return samples(pages, service.endpoint, service.class_names)

    if weights:
        cached = cache(lambda layer: layer_maps(weights[layer]))

        @app.get("/maps", responses=error_responses(422))
        def maps(
            layer: str = Query(description="The name of a layer.", json_schema_extra={"enum": [*weights]}),
        ) -> MapsResponse:
            """Get the token-mixing weights of a layer."""
            return cached(lookup(layer, weights, "layer").name)

    @app.get("/health", responses={503: {"model": HealthResponse, "description": "The server is shutting down."}})
    async def health() -> Any:
        """Check whether the server accepts requests."""
        status = "draining" if batcher.draining else "ok"
        state = HealthResponse(status=status, model=name, in_flight=batcher.in_flight)
        return JSONResponse(state.model_dump(), 503) if batcher.draining else state

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> PlainTextResponse:
        """Get Prometheus metrics."""
        return PlainTextResponse(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    paths = {*pages, *app.openapi()["paths"], "/openapi.json"}
    return LimitMiddleware(app, paths, batcher.rejection, lambda: batcher.draining, metrics.on_response, limits)


def model_info(service: Service, name: str, limits: RequestLimits) -> ModelInfo:
    images = service if isinstance(service, ImageService) else None
    return ModelInfo(
        name=name,
        endpoint=service.endpoint,
        input_spec=service.model.spec.input_spec,
        num_parameters=sum(parameter.numel() for parameter in service.model.parameters()),
        img_size=images.img_size if images else None,
        crop_pct=images.preprocessing.crop_pct if images else 1.0,
        grid_size=images.grid_size if images else None,
        class_names=list(service.class_names),
        layers=layers(service.model),
        max_body_bytes=limits.max_body,
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
    async def validation_error(_request: Request, reason: RequestValidationError) -> JSONResponse:
        faults = [f"{'.'.join(map(str, fault['loc'][1:])) or 'the body'}: {fault['msg']}" for fault in reason.errors()]
        return error(422, "; ".join(faults))

    @app.exception_handler(Exception)
    async def internal_error(_request: Request, _reason: Exception) -> JSONResponse:
        # The traceback goes to the log only.
        return error(500, "internal server error")
