"""allmlp serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import require


@app.command(
    epilog=examples(
        "allmlp serve",
        "allmlp serve runs/mlm --port 8080",
        "curl --data-binary @photo.jpg http://127.0.0.1:8000/predict",
    )
)
def serve(
    folder: Annotated[Path | None, typer.Argument(help="Model folder; by default the bundled CIFAR-10 model.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    batch_size: Annotated[int, typer.Option(help="Maximum number of requests per forward pass.", min=1)] = 16,
    max_concurrency: Annotated[int, typer.Option(help="Requests in flight; further ones get 503.", min=1)] = 128,
    timeout: Annotated[float, typer.Option(help="Seconds before a request gets 504.", min=0.1)] = 20.0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the model; by default one per core.", min=1)
    ] = None,
) -> None:
    """Serve a model over HTTP with a web page, by default on localhost only."""
    # Spinning OpenMP threads would starve the event loop. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "PIL.Image"):
        require(module, "serve")
    from allmlp.serve.server import run
    from allmlp.weights.pretrained import bundled

    run(folder or bundled(), host, port, batch_size, max_concurrency, timeout, threads)
