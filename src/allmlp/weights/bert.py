"""A BERT as Hugging Face publishes it, as a model of ours; its table of words as a start for another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from allmlp.weights.convert import build, open_place
from allmlp.weights.huggingface import CONFIG, WORDS, read_json, tidy, weights_file
from allmlp.weights.tensors import read


def load_bert(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> Model:
    """The BERT in `folder`, in evaluation mode and single precision, with the head that its weights have."""
    path = Path(folder).expanduser()
    check_bert(path)
    return build(open_place(path), device).float()


def word_embeddings(folder: str | os.PathLike[str]) -> Tensor:
    """The table of words of the BERT in `folder`, v c; nothing else is read."""
    path = Path(folder).expanduser()
    check_bert(path)
    file = weights_file(path)
    table = tidy(read(file)).get(f"{WORDS}.weight")
    if table is None:
        raise UserError(f"{file} has no {WORDS}.weight")
    return table.float()


def check_bert(folder: Path) -> None:
    kind = read_config(folder).get("model_type")
    if kind != "bert":
        raise UserError(f"{folder / CONFIG} has the model_type {kind!r}: only Hugging Face's 'bert' can be read")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, whoever wrote it."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a model folder: it has no {CONFIG}")
    return read_json(folder / CONFIG)


@torch.no_grad()
def start_embeddings(model: Model, folder: str | os.PathLike[str]) -> None:
    """Start the table of words of `model` from that of the BERT in `folder`, which must have as many words.

        E = T                       where the widths are equal
        E = s (T - mean(T)) V       otherwise

    V holds the first principal components of T, and s gives E the standard deviation that the model's own table has.
    A model that is wider than T has zeros in the channels left over.
    """
    table = model.table if isinstance(model, EncoderModel) else None
    if table is None:
        raise UserError("only an encoder of text has a table of words to start")
    source = word_embeddings(folder)
    if len(source) != len(table):
        raise UserError(f"the BERT in {folder} has {len(source)} words, the model {len(table)}: use its tokenizer")
    if source.shape != table.shape:
        source = principal(source, table.shape[1])
        source *= table.std().cpu() / source.std()
    table.copy_(source)


def principal(table: Tensor, width: int) -> Tensor:
    """The rows along their principal components, the largest first and each with its largest weight positive."""
    centred = table.double() - table.double().mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    rows = centred @ (components * largest.sign())
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1])).to(table.dtype)
