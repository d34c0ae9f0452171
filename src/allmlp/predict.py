"""Answers of a trained model: for pictures, and for the test split of the run that made it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from allmlp.data.decode import Decode, picture
from allmlp.data.inputs import picture_inputs
from allmlp.errors import UserError
from allmlp.weights.folder import load


class Answer(NamedTuple):
    name: str
    probability: float


def predict(folder: Path, files: list[Path], top: int = 5) -> list[list[Answer]]:
    """The `top` classes of each picture, most probable first."""
    model, inputs = load(folder).float(), picture_inputs(folder)
    size = model.spec.image_size
    if size is None:
        raise UserError(f"the model reads {model.spec.reads}, not pictures")
    how = Decode(crop=inputs.crop, colour="rgb" if len(inputs.mean) == 3 else "grey")
    pictures = []
    for file in files:
        try:
            pictures.append(picture(file.read_bytes(), size, how))
        except UserError as reason:
            raise UserError(f"{file}: {reason}") from None
        except OSError as reason:
            raise UserError(f"cannot read {file}: {reason.strerror}") from None
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (inputs.mean, inputs.std))
    with torch.inference_mode():
        chances = model((torch.stack(pictures).float() / 255 - mean) / std).softmax(dim=1)
    best = chances.topk(min(top, chances.shape[1]))
    names = inputs.classes or tuple(map(str, range(chances.shape[1])))
    return [
        [Answer(names[number], chance) for number, chance in zip(numbers, values, strict=True)]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
