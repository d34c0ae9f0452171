"""BERT models of Hugging Face: load one, or initialize the word embeddings of another model from it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from allmlp.errors import UserError
from allmlp.files import expand_user
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from allmlp.weights.convert import build, open_path
from allmlp.weights.formats.huggingface import CONFIG, WORD_EMBEDDINGS, HuggingFace, read_json, read_weights


def load_bert(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> Model:
    """The BERT in `folder` with its head, in evaluation mode and float32."""
    path = expand_user(folder)
    check_bert(path)
    return build(open_path(path), device).float()


def word_embeddings(folder: str | os.PathLike[str]) -> Tensor:
    """The word embeddings of the BERT in `folder`, [V, C]."""
    path = expand_user(folder)
    check_bert(path)
    table = HuggingFace().normalize_keys(read_weights(path)).get(f"{WORD_EMBEDDINGS}.weight")
    if table is None:
        raise UserError(f"{path} has no {WORD_EMBEDDINGS}.weight")
    return table.float()


def check_bert(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a model folder: it has no {CONFIG}")
    kind = read_json(folder / CONFIG).get("model_type")
    if kind != "bert":
        raise UserError(f"{folder / CONFIG} has the model_type {kind!r}: only 'bert' is supported")


@torch.no_grad()
def init_embeddings(model: Model, folder: str | os.PathLike[str]) -> None:
    """Initialize the word embeddings of `model` from the BERT in `folder`, which must have the same vocabulary.

        E = T                       where the widths are equal
        E = s (T - mean(T)) V       otherwise

    V are the first principal components of T; s scales E to the standard deviation of the model's own initialization.
    If the model is wider than T, the remaining channels are zero.
    """
    table = model.embedding if isinstance(model, EncoderModel) else None
    if table is None:
        raise UserError("only text encoders have word embeddings to initialize")
    source = word_embeddings(folder)
    if len(source) != len(table):
        raise UserError(f"the BERT in {folder} has {len(source)} tokens, the model {len(table)}: use its tokenizer")
    if source.shape != table.shape:
        source = principal(source, table.shape[1])
        source *= table.std().cpu() / source.std()
    table.copy_(source)


def principal(table: Tensor, width: int) -> Tensor:
    """Project the rows on their principal components, largest first, each with its largest weight positive."""
    centered = table.double() - table.double().mean(0)
    components = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(1)[:, :width]
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    rows = centered @ (components * largest.sign())
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1])).to(table.dtype)
