"""allmlp export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples, next_for_head


@app.command(
    epilog=examples(
        "allmlp export mixer/ mixer.onnx",
        "allmlp export mixer/ mixer.onnx --int8 --on photo.jpg",
        "allmlp export runs/translate de-en.onnx",
        "allmlp export mixer/ mixer.pt2",
        "allmlp export mixer/ mixer.pt2 --aot",
        "allmlp export mixer/ mixer.pt2 --device cuda",
    )
)
def export(
    folder: Annotated[Path, typer.Argument(help="A model folder, or a bundled model such as allmlp:cifar10.")],
    file: Annotated[Path, typer.Argument(help="NAME.onnx, or NAME.pt2 for torch.export.")],
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to int8 (.onnx): a quarter of the size.")] = False,
    aot: Annotated[
        bool, typer.Option("--aot", help="Compile ahead of time for this CPU, or the GPU of --device (.pt2).")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Device of a .pt2 file: cpu, cuda, cuda:1, mps or xpu; .onnx files run on any.")
    ] = "cpu",
    on: Annotated[
        list[Path] | None, typer.Option(help="Image or text file to compare outputs on; default: bundled inputs.")
    ] = None,
) -> None:
    """Export a trained model to ONNX or torch.export, and compare the outputs of the file with the model's."""
    from allmlp.export.files import export

    for exported in export(folder, file, int8=int8, aot=aot, on=on, device=device):
        size = exported.file.stat().st_size / 1e6
        print(
            f"{exported.file}: {size:.1f} MB, any batch size, "
            f"differs by {exported.difference:.1e} on {exported.compared_on}"
        )
    next_for_head(folder, "serve", folder)
