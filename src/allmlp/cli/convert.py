"""allmlp convert."""

from __future__ import annotations

from typing import Annotated

import typer

from allmlp.cli.app import app, examples


@app.command(
    epilog=examples(
        "allmlp convert Mixer-B_16.npz mixer/",
        "allmlp convert resmlp_12_no_dist.pth resmlp/",
        "allmlp convert timm:gmlp_s16_224.ra3_in1k gmlp/",
        "allmlp convert mixer/ out.npz --to google",
    )
)
def convert(
    source: Annotated[str, typer.Argument(help="A file of Google, timm or FAIR, timm:NAME, or a model folder.")],
    target: Annotated[str, typer.Argument(help="A model folder, or with --to a file.")],
    to: Annotated[str | None, typer.Option(help="The layout to write: google, timm or fair.")] = None,
) -> None:
    """Published image weights into a model folder, with the same output; and back."""
    from allmlp.weights.convert import convert

    print(convert(source, target, to))
