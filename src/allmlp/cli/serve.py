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
    folder: Annotated[
        Path | None, typer.Argument(help="The model's folder; the CIFAR-10 model that comes along if not given.")
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    batch: Annotated[int, typer.Option(help="Requests that go through the model together, at most.", min=1)] = 16,
    queue: Annotated[int, typer.Option(help="Requests that are taken on at a time; others get 503.", min=1)] = 128,
    timeout: Annotated[float, typer.Option(help="Seconds for a request before it gets 504.", min=0.1)] = 20.0,
    threads: Annotated[int | None, typer.Option(help="Of the model; one a core if not given.", min=1)] = None,
) -> None:
    """Put a model behind a web page and an HTTP interface, on this machine alone unless told otherwise."""
    # Threads that spin while they wait would take the core that answers requests. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for module in ("fastapi", "uvicorn", "python_multipart", "PIL.Image"):
        require(module, "serve")
    from allmlp.serve.server import run
    from allmlp.weights.pretrained import shipped

    run(folder or shipped(), host, port, batch, queue, timeout, threads)
