"""allmlp serve."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from allmlp.cli.app import app, examples
from allmlp.cli.job import DeviceOption, torch_dtype
from allmlp.errors import require


@app.command(
    epilog=examples(
        "allmlp serve",
        "allmlp serve runs/photos runs/reviews --port 8080",
        "allmlp serve small=runs/a large=timm:mixer_b16_224 --device cuda",
        "curl --data-binary @photo.jpg http://127.0.0.1:8000/predict",
        "curl -F files=@a.jpg -F files=@b.jpg http://127.0.0.1:8000/models/photos/predict",
    )
)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Model folders or names, or NAME=MODEL to choose the name in URLs; by default the bundled models.",
            metavar="MODEL",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; by default bfloat16 for fast models on a GPU, else float32. "
            "Forecasts of time series are always computed in float32."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Largest number of inputs per forward pass; 128 on a GPU, 16 on a CPU.", min=1)
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Inputs in flight; further ones get 503. Eight batches by default.", min=1)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds before a request gets 504.", min=0.1, max=86_400)] = 20.0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a model; by default chosen by measurement.", min=1)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name that the server answers for, such as that of a proxy; * for any."),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Site whose pages may use the server, such as https://example.org; * for any."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded-For header names the client."),
    ] = None,
) -> None:
    """Serve models over HTTP with a web page, by default on localhost only."""
    # Spinning OpenMP threads would starve the event loop. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for module in ("fastapi", "uvicorn", "httptools", "python_multipart", "prometheus_client", "PIL.Image"):
        require(module, "serve")
    from allmlp.serve.server import run
    from allmlp.weights.bundled import BUNDLED, BUNDLED_TEXT, bundled_models

    run(
        models or [name for name in (BUNDLED, BUNDLED_TEXT) if name in bundled_models()],
        host,
        port,
        device=device,
        dtype=torch_dtype(dtype),
        batch_size=batch_size,
        max_concurrency=max_concurrency,
        timeout=timeout,
        threads=threads,
        more_hosts=allowed_host or (),
        origins=allowed_origin or (),
        trusted_proxies=trusted_proxy or (),
    )
