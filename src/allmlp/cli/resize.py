"""allmlp resize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp resize mixer/ bigger/ --image 448",
        "allmlp resize mixer/ bigger/ --image 448 --rule tile",
        "allmlp resize gmlp/ wide/ --image 160x256",
        "allmlp resize bert/ longer/ --length 512",
    )
)
def resize(
    source: Annotated[Path, typer.Argument(help="A model folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    image: Annotated[str | None, typer.Option(help="New image size: 448 or 160x256 (height x width).")] = None,
    length: Annotated[int | None, typer.Option(help="New longest text, in tokens.", min=1)] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="interpolate (any size), or tile: copies of the weights, for multiples of the size, as Mixer's paper."
        ),
    ] = None,
) -> None:
    """A trained model for another image size or length of text: its weights over tokens are resized."""
    from allmlp.models.grid import RULES
    from allmlp.spec import parse
    from allmlp.weights.folder import load, read_spec, save

    if (image is None) == (length is None):
        raise UserError("name one new size: --image 448, or --length 512")
    if rule is not None and rule not in RULES:
        raise UserError(f"--rule is {' or '.join(RULES)}, not {rule!r}")
    how: Any = rule
    size = None if image is None else parse(image, tuple[int, int], "--image")
    model = load(source, image=size, length=length, rule=how)
    save(model, target, like=source)
    print(f"{target}: {read_spec(source).reads} -> {model.spec.reads}")
