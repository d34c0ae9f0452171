"""Real inputs of a model, on which an exported file is compared with it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.docstrings import parse
from allmlp.data.inputs import FILE, Inputs, read_inputs
from allmlp.data.pictures import read_pictures
from allmlp.data.tokenizer import Tokenizer
from allmlp.data.tokenizer import load as load_tokenizer
from allmlp.errors import MissingExtra, UserError, require
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import Model
from allmlp.tasks.task import Pixels

COUNT = 6


class Rows(NamedTuple):
    tensors: tuple[Tensor, ...]
    """Images [N, C, H, W]; or token ids and the mask of the real ones [N, S]."""
    told: str
    """What they are, in words."""


def rows(model: Model, folder: Path, files: list[Path]) -> Rows:
    """The pictures or texts in `files`, as the model in `folder` reads them. Without files: cuts of the two photographs
    that come with scikit-learn, or docstrings of Python's own library; where these are not to be had, random inputs.
    """
    if model.spec.image_size is not None:
        found = images(model, folder, files, model.spec.image_size)
    elif isinstance(model.spec, (Encoder, EncoderDecoder)):
        found = texts(model, folder, files)
    else:
        found = Rows(model.example(COUNT), "random inputs")
    if len(found.tensors[0]) == 1:
        # torch.export takes the size 1 for a fixed one.
        return found._replace(tensors=tuple(torch.cat([tensor, tensor]) for tensor in found.tensors))
    return found


def images(model: Model, folder: Path, files: list[Path], size: tuple[int, int]) -> Rows:
    (example,) = model.example(COUNT)
    found = read_inputs(folder) if (folder / FILE).is_file() else None
    channels = example.shape[1]
    known = isinstance(found, Inputs) and len(found.mean) == channels
    inputs = found if known else Inputs((0.5,) * channels, (0.5,) * channels)
    assert isinstance(inputs, Inputs)
    try:
        if files and channels in (1, 3):
            pixels, told = read_pictures(files, size, inputs), f"{len(files)} pictures"
        else:
            pixels, told = cuts(size, channels), f"{COUNT} cuts of two photographs"
    except MissingExtra:
        if files:
            raise
        return Rows((example,), "random inputs (scikit-learn, which brings photographs, is not installed)")
    return Rows((Pixels(inputs.mean, inputs.std, size)(pixels),), told)


def cuts(size: tuple[int, int], channels: int) -> Tensor:
    """Squares of different places and sizes, cut out of scikit-learn's photographs: uint8 or in [0, 1], n c h w."""
    require("PIL.Image", "train")
    photographs = require("sklearn.datasets", "train").load_sample_images().images
    found = []
    for number in range(COUNT):
        photograph = torch.tensor(photographs[number % len(photographs)]).permute(2, 0, 1)
        side = photograph.shape[1] // (1 + number // 2)
        left = (photograph.shape[2] - side) * number // COUNT
        cut = photograph[:, photograph.shape[1] - side :, left : left + side].unsqueeze(0).float().div(255)
        found.append(torch.nn.functional.interpolate(cut, size, mode="bicubic", antialias=True).clamp(0, 1))
    pixels = torch.cat(found)
    return pixels if channels == 3 else pixels.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)


def texts(model: Model, folder: Path, files: list[Path]) -> Rows:
    ids = model.example(COUNT)[0]
    count, length = ids.shape
    mask = torch.arange(length) < torch.linspace(2, length, count).round().view(-1, 1)
    tokenizer = own_tokenizer(folder, model)
    if tokenizer is None:
        return Rows((ids, mask), "random tokens (the folder has no tokenizer)")
    try:
        given = [file.read_text(encoding="utf8") for file in files]
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read a text to compare on: {reason}") from None
    lines = given or list(islice(parse(), COUNT))
    ids = torch.full((len(lines), length), tokenizer.pad)
    for row, found in zip(ids, tokenizer.encode(lines)):
        whole = torch.tensor([tokenizer.first, *found, tokenizer.last])[:length]
        row[: len(whole)] = whole
    return Rows((ids, ids != tokenizer.pad), f"{len(lines)} {'texts' if given else 'docstrings of Python'}")


def own_tokenizer(folder: Path, model: Model) -> Tokenizer | None:
    """The tokenizer beside the model, if it has the model's vocabulary."""
    try:
        tokenizer = load_tokenizer(folder)
    except UserError:
        return None
    return tokenizer if len(tokenizer) in vocabularies(model) else None


def vocabularies(model: Model) -> Iterator[int]:
    for part in model.spec.children():
        if hasattr(part, "vocabulary"):
            yield part.vocabulary
