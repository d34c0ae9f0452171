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
        "allmlp predict runs/a photos/*.png --top-k 3 --json",
        "allmlp predict runs/mlm 'the cat [MASK] on the mat'",
        "allmlp predict runs/squad 'Who sat on the mat?' --context 'The cat sat on the mat.'",
    )
)
def predict(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Image files or texts. A model folder may come first; default: the bundled CIFAR-10 model."
        ),
    ],
    context: Annotated[
        str, typer.Option(help="The second sentence of a pair, or the paragraph that contains the answer.")
    ] = "",
    top_k: Annotated[int, typer.Option(help="Number of classes or tokens to print.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of input and predictions.")] = False,
) -> None:
    """Predict with a trained model: classes or values of images, classes of texts, tokens for [MASK], answers,
    translations.
    """
    from allmlp.prediction import predict_images, predict_text, reads_text
    from allmlp.weights.pretrained import bundled

    folder = Path(inputs.pop(0)) if Path(inputs[0]).is_dir() else bundled()
    if not inputs:
        raise UserError(f"give an image file or a text for the model in {folder}")
    if reads_text(folder):
        rows = [(text, row) for text in inputs for row in predict_text(folder, text, context, top_k)]
    else:
        rows = list(zip(inputs, predict_images(folder, [Path(file) for file in inputs], top_k), strict=True))
    if as_json:
        print(json.dumps([{"input": name, "predictions": [one.to_json() for one in row]} for name, row in rows]))
        return
    for name, row in rows:
        print(f"{name}:", "  ".join(map(str, row)))


@app.command(
    epilog=examples("allmlp generate runs/causal --prompt Once", "allmlp generate runs/causal --temperature 0")
)
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model.")],
    prompt: Annotated[str, typer.Option(help="Start of the text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.", min=1)] = 50,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.", min=0.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens only.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, for repeatable text.")] = None,
) -> None:
    """Generate text with a causal language model."""
    from allmlp.prediction import generate

    print(generate(model, prompt, max_new_tokens, temperature, top_k, seed))
