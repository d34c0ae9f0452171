"""How a picture becomes a model's input and what the answers are called: inputs.json beside the weights."""

from __future__ import annotations

from pathlib import Path

from allmlp.errors import UserError
from allmlp.files import write_atomically
from allmlp.spec import Rate, Spec, from_json, to_json

FILE = "inputs.json"


class Inputs(Spec):
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the pixels divided by 255, per colour channel."""
    classes: tuple[str, ...] = ()
    crop: Rate = 1.0
    """The share of the short side that is kept when a picture is brought to the model's size."""


def write_inputs(folder: Path, inputs: Inputs) -> None:
    write_atomically(folder / FILE, lambda temporary: temporary.write_text(to_json(inputs), encoding="utf8"))


def read_inputs(folder: Path) -> Inputs:
    file = folder / FILE
    if not file.is_file():
        raise UserError(f"{folder} has no {FILE}, so how to prepare a picture for it is not known")
    try:
        inputs = from_json(file.read_bytes())
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    if not isinstance(inputs, Inputs):
        raise UserError(f"{file} describes a {type(inputs).__name__}, not inputs")
    return inputs
