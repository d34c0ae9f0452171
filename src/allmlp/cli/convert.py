"""allmlp convert."""

from __future__ import annotations

from typing import Annotated

import typer

from allmlp.cli.app import app, assignments, examples, next_command, say


@app.command(
    epilog=examples(
        "allmlp convert Mixer-B_16.npz mixer/",
        "allmlp convert mixer_b16.google_in1k mixer/",
        "allmlp convert timm:gmlp_s16_224.ra3_in1k gmlp/",
        "allmlp convert google-bert/bert-base-uncased bert/",
        "allmlp convert gmlp.pth gmlp/ --set block.channel.inner.causal=true",
        "allmlp convert mixer/ out.npz --to google",
    )
)
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A weights file or folder of Google, timm, FAIR, Hugging Face or lucidrains, a model folder, a "
            "name of `allmlp list weights`, timm:NAME, or ORGANIZATION/NAME on the Hub."
        ),
    ],
    target: Annotated[str, typer.Argument(help="The model folder to write; with --to a file, for hf a folder.")],
    to: Annotated[str | None, typer.Option(help="The format to write: google, timm, fair, hf or lucidrains.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A field that the file does not state: block.token.num_heads=4.")
    ] = None,
) -> None:
    """Convert weights of other libraries to a model folder, or back."""
    from allmlp.weights.convert import convert

    print(convert(source, target, to, assignments(overrides or []), notify=say))
    if to is None:
        next_command("show", target)
