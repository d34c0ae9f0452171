"""allmlp predict, allmlp generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp predict photo.jpg",
        "allmlp predict runs/a photo.jpg",
        "allmlp predict runs/a photos/*.png --top 3 --json",
        "allmlp predict runs/mlm 'the cat [MASK] on the mat'",
        "allmlp predict runs/squad 'Who sat on the mat?' --context 'The cat sat on the mat.'",
    )
)
def predict(
    things: Annotated[
        list[str],
        typer.Argument(
            help="Picture files, or texts; a folder in front is the model, else the CIFAR-10 model that comes along."
        ),
    ],
    context: Annotated[str, typer.Option(help="The second sentence of a pair, or the text that has the answer.")] = "",
    top: Annotated[int, typer.Option(help="How many classes or words to name.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """What a trained model says: classes of pictures and texts, words for [MASK], answers, translations."""
    from allmlp.predict import predict, predict_text, reads_text
    from allmlp.weights.pretrained import shipped

    folder = Path(things.pop(0)) if Path(things[0]).is_dir() else shipped()
    if not things:
        raise UserError(f"name a picture or a text for the model in {folder}")
    if reads_text(folder):
        answers = {thing: predict_text(folder, thing, context, top) for thing in things}
    else:
        answers = dict(zip(things, ([row] for row in predict(folder, [Path(thing) for thing in things], top))))
    if as_json:
        rows = {thing: [[answer._asdict() for answer in row] for row in found] for thing, found in answers.items()}
        print(json.dumps({thing: found[0] if len(found) == 1 else found for thing, found in rows.items()}))
        return
    for thing, found in answers.items():
        for row in found:
            print(f"{thing}:", "  ".join(map(str, row)))


@app.command(
    epilog=examples("allmlp generate runs/causal --prompt Once", "allmlp generate runs/causal --temperature 0")
)
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model.")],
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(help="How many to write at most.", min=1)] = 50,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws.", min=0.0)] = 0.8,
    top: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest only.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="The same text again.")] = None,
) -> None:
    """Write text, token by token."""
    from allmlp.predict import generate

    print(generate(model, prompt, tokens, temperature, top, seed))
