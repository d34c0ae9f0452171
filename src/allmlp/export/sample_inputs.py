"""Sample inputs for comparing an exported file with the model."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.data.decode import read_images
from allmlp.data.docstrings import iter_docstrings
from allmlp.data.preprocessing import ImagePreprocessing, known_preprocessing
from allmlp.data.tokenizer import Tokenizer, load_tokenizer
from allmlp.errors import MissingExtra, UserError, plural, require
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import Model
from allmlp.tasks.task import Normalize

COUNT = 6


class SampleInputs(NamedTuple):
    tensors: tuple[Tensor, ...]
    """Images [N, C, H, W]; or token ids and the mask of the real ones [N, S]."""
    description: str

    def to(self, device: torch.device) -> SampleInputs:
        return self._replace(tensors=tuple(tensor.to(device) for tensor in self.tensors))


def sample_inputs(model: Model, folder: Path, files: list[Path]) -> SampleInputs:
    """The images or texts in `files`, preprocessed for the model in `folder`. Without files: crops of scikit-learn's
    two photographs, or docstrings of the standard library; if these are missing, random inputs.
    """
    if model.spec.input_size is not None:
        samples = images(model, folder, files, model.spec.input_size)
    elif isinstance(model.spec, (Encoder, EncoderDecoder)):
        samples = texts(model, folder, files)
    elif files:
        raise UserError(f"--on takes images or texts, and the model reads {model.spec.input_spec}: leave it out")
    else:
        samples = SampleInputs(model.dummy_inputs(COUNT), "random inputs")
    if len(samples.tensors[0]) == 1:
        # torch.export specializes on a batch size of 1.
        return samples._replace(tensors=tuple(torch.cat([tensor, tensor]) for tensor in samples.tensors))
    return samples


def images(model: Model, folder: Path, files: list[Path], size: tuple[int, int]) -> SampleInputs:
    (example,) = model.dummy_inputs(COUNT)
    saved = known_preprocessing(folder)
    channels = example.shape[1]
    is_usable = isinstance(saved, ImagePreprocessing) and len(saved.mean) == channels
    preprocessing = saved if is_usable else ImagePreprocessing((0.5,) * channels, (0.5,) * channels)
    assert isinstance(preprocessing, ImagePreprocessing)
    if files and channels not in (1, 3):
        raise UserError(f"--on takes images of 1 or 3 channels, and the model reads {channels}: leave it out")
    try:
        if files:
            pixels, description = read_images(files, size, preprocessing), plural(len(files), "image")
        else:
            pixels, description = photo_crops(size, channels), f"{COUNT} crops of photographs"
    except MissingExtra:
        if files:
            raise
        return SampleInputs((example,), "random inputs (scikit-learn, which has photographs, is not installed)")
    return SampleInputs((Normalize(preprocessing.mean, preprocessing.std, size)(pixels),), description)


def photo_crops(size: tuple[int, int], channels: int) -> Tensor:
    """Square crops of scikit-learn's photographs at several positions and sizes, in [0, 1], [N, C, H, W]."""
    require("PIL.Image", "train")
    photographs = require("sklearn.datasets", "train").load_sample_images().images
    crops = []
    for number in range(COUNT):
        photograph = torch.tensor(photographs[number % len(photographs)]).permute(2, 0, 1)
        side = photograph.shape[1] // (1 + number // 2)
        left = (photograph.shape[2] - side) * number // COUNT
        crop = photograph[:, photograph.shape[1] - side :, left : left + side].unsqueeze(0).float().div(255)
        crops.append(torch.nn.functional.interpolate(crop, size, mode="bicubic", antialias=True).clamp(0, 1))
    pixels = torch.cat(crops)
    return pixels if channels == 3 else pixels.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)


def texts(model: Model, folder: Path, files: list[Path]) -> SampleInputs:
    ids = model.dummy_inputs(COUNT)[0]
    count, seq_len = ids.shape
    mask = torch.arange(seq_len) < torch.linspace(2, seq_len, count).round().view(-1, 1)
    tokenizer = matching_tokenizer(folder, model)
    if tokenizer is None and files:
        raise UserError(f"{folder} has no tokenizer to read the texts of --on with: leave it out")
    if tokenizer is None:
        return SampleInputs((ids, mask), "random tokens (the folder has no tokenizer)")
    lines = [read_text(file) for file in files] or list(islice(iter_docstrings(), COUNT))
    ids = torch.full((len(lines), seq_len), tokenizer.pad_token_id)
    for row, encoded in zip(ids, tokenizer.encode(lines)):
        whole = torch.tensor([tokenizer.cls_token_id, *encoded, tokenizer.sep_token_id])[:seq_len]
        row[: len(whole)] = whole
    return SampleInputs(
        (ids, ids != tokenizer.pad_token_id), f"{len(lines)} {'texts' if files else 'docstrings of Python'}"
    )


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf8")
    except OSError as reason:
        raise UserError(f"cannot read {file}: {reason.strerror}") from None
    except UnicodeError:
        raise UserError(f"{file} is not UTF-8 text, which the model reads") from None


def matching_tokenizer(folder: Path, model: Model) -> Tokenizer | None:
    """The tokenizer in the folder, if its vocabulary has the model's size."""
    try:
        tokenizer = load_tokenizer(folder)
    except UserError:
        return None
    sizes = [part.vocab_size for part in model.spec.children() if hasattr(part, "vocab_size")]
    return tokenizer if len(tokenizer) in sizes else None
