"""Answers of a trained model: to pictures, and to text of every kind it was taught to read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from allmlp.data.inputs import Inputs, TextInputs, picture_inputs, read_inputs
from allmlp.data.pictures import read_pictures
from allmlp.data.tokenizer import Tokenizer
from allmlp.data.tokenizer import load as load_tokenizer
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.tasks.causal import write
from allmlp.tasks.glue import label
from allmlp.tasks.mlm import fill
from allmlp.weights.folder import load


class Answer(NamedTuple):
    name: str
    probability: float | None = None
    """None where the model gives one answer only."""

    def __str__(self) -> str:
        return self.name if self.probability is None else f"{self.name} {self.probability:.1%}"


def predict(folder: Path, files: list[Path], top: int = 5) -> list[list[Answer]]:
    """The `top` classes of each picture, most probable first."""
    model, inputs = load(folder).float(), picture_inputs(folder)
    size = model.spec.image_size
    if size is None:
        raise UserError(f"the model reads {model.spec.reads}, not pictures")
    pictures = read_pictures(files, size, inputs)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    with torch.inference_mode():
        chances = model((pictures.float() / 255 - mean) / std).softmax(dim=1)
    return best(chances, inputs.classes, top)


def best(chances: torch.Tensor, classes: tuple[str, ...], top: int) -> list[list[Answer]]:
    found = chances.topk(min(top, chances.shape[1]))
    names = classes or tuple(map(str, range(chances.shape[1])))
    return [
        [Answer(names[number], chance) for number, chance in zip(numbers, values, strict=True)]
        for numbers, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def reads_text(folder: Path) -> bool:
    return isinstance(read_inputs(folder), TextInputs)


def open_text(folder: Path) -> tuple[Model, Tokenizer, TextInputs]:
    """A text model, its tokenizer, and what it was taught to give."""
    inputs = read_inputs(folder)
    if isinstance(inputs, Inputs):
        raise UserError(f"the model in {folder} reads pictures, not text")
    model, tokenizer = load(folder).float(), load_tokenizer(folder)
    parts = list(model.spec.children())
    vocabulary = next((getattr(part, "vocabulary", None) for part in parts if hasattr(part, "vocabulary")), None)
    if vocabulary != len(tokenizer):
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {vocabulary}: they do not match"
        )
    return model, tokenizer, inputs


def predict_text(folder: Path, text: str, context: str = "", top: int = 5) -> list[list[Answer]]:
    """What the model says to a text: words for every [MASK], classes, an answer from the context, or a translation.

    `context` is the second sentence of a pair, or the text in which the answer to a question stands.
    """
    model, tokenizer, inputs = open_text(folder)
    if inputs.gives == "text":
        if getattr(model.spec, "block", None) is not None and model.spec.block.causal:
            raise UserError(f"the model in {folder} writes text: use allmlp generate")
        return [[Answer(*pair) for pair in row] for row in fill(model, tokenizer, text, top)]
    if inputs.gives == "classes":
        return best(label(model, tokenizer, [(text, context)]), inputs.classes, top)
    if inputs.gives == "span":
        from allmlp.tasks.squad import answer

        if not context:
            raise UserError("a question needs the text in which its answer stands: --context")
        return [[Answer(found.text, found.probability) for found in answer(model, tokenizer, text, context)[:top]]]
    from allmlp.tasks.translate import translate

    return [[Answer(translate(model, tokenizer, [text])[0])]]


def generate(folder: Path, prompt: str, tokens: int, temperature: float, top: int | None, seed: int | None) -> str:
    """The prompt and what the model writes after it."""
    model, tokenizer, inputs = open_text(folder)
    if inputs.gives != "text" or not model.spec.block.causal:
        raise UserError(f"the model in {folder} does not write text: it needs a causal one")
    start = tokenizer.encode([prompt])[0] if prompt else []
    return tokenizer.decode([*start, *write(model, tokenizer, prompt, tokens, temperature, top, seed)])
