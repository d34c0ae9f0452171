"""allmlp export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples


@app.command(
    epilog=examples(
        "allmlp export mixer/ mixer.onnx",
        "allmlp export mixer/ mixer.onnx --int8 --on photo.jpg",
        "allmlp export runs/translate de-en.onnx",
        "allmlp export mixer/ mixer.pt2",
        "allmlp export mixer/ mixer.pt2 --aot",
    )
)
def export(
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    file: Annotated[Path, typer.Argument(help="NAME.onnx, or NAME.pt2 for torch.export.")],
    int8: Annotated[bool, typer.Option("--int8", help="Eight-bit weights (ONNX): a quarter of the size.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Compile for this machine's processor (.pt2).")] = False,
    on: Annotated[
        list[Path] | None, typer.Option(help="Compare on this picture or text; without, on such as come along.")
    ] = None,
) -> None:
    """A trained model as a file for another runtime, compared with the model before it is left."""
    from allmlp.export.files import export

    for made in export(folder, file, int8=int8, aot=aot, on=on):
        size = made.file.stat().st_size / 1e6
        print(f"{made.file}: {size:.1f} MB, any batch size, differs by {made.difference:.1e} on {made.told}")
