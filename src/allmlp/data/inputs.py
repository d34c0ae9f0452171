"""How something becomes a model's input and what the answers are called: inputs.json beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from allmlp.errors import UserError
from allmlp.files import RUN, write_atomically
from allmlp.spec import Count, Rate, Spec, from_json, to_json

FILE = "inputs.json"
TOKENIZERS = ("tokenizer.json", "vocab.txt")


class Inputs(Spec):
    """Pictures."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the pixels divided by 255, per colour channel."""
    classes: tuple[str, ...] = ()
    crop: Rate = 1.0
    """The share of the short side that is kept when a picture is brought to the model's size."""


class TextInputs(Spec):
    """Text, for the tokenizer in the file beside."""

    gives: Literal["text", "classes", "span", "translation"]
    """What the model was taught to give back."""
    length: Count
    classes: tuple[str, ...] = ()


def write_inputs(folder: Path, inputs: Inputs | TextInputs) -> None:
    write_atomically(folder / FILE, lambda temporary: temporary.write_text(to_json(inputs), encoding="utf8"))


def refuse_unfinished(folder: Path) -> None:
    """The folder of a run has its model and inputs when the run has ended: if they are missing, it has not."""
    if (folder / RUN).is_file():
        raise UserError(f"the run in {folder} is not finished; go on with: allmlp train --resume {folder}")


def read_inputs(folder: Path) -> Inputs | TextInputs:
    file = folder / FILE
    if not file.is_file():
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        refuse_unfinished(folder)
        raise UserError(f"{folder} has no {FILE}, so how to prepare an input for it is not known")
    try:
        inputs = from_json(file.read_bytes())
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    if not isinstance(inputs, (Inputs, TextInputs)):
        raise UserError(f"{file} describes a {type(inputs).__name__}, not inputs")
    return inputs


def carry_inputs(source: Path, target: Path, length: int | None = None) -> None:
    """Lay beside the model in `target` what lies beside the one in `source`: its inputs, for text of another length
    where that is given, and its tokenizer.
    """
    if (source / FILE).is_file():
        inputs = read_inputs(source)
        if length is not None and isinstance(inputs, TextInputs):
            inputs = inputs.replace(length=length)
        write_inputs(target, inputs)
    for name in TOKENIZERS:
        if (source / name).is_file():
            data = (source / name).read_bytes()
            write_atomically(target / name, lambda temporary, data=data: temporary.write_bytes(data))


def picture_inputs(folder: Path) -> Inputs:
    """Those of a model that reads pictures."""
    inputs = read_inputs(folder)
    if not isinstance(inputs, Inputs):
        raise UserError(f"the model in {folder} reads text, not pictures")
    return inputs
