"""The 1,797 handwritten digits that scikit-learn carries: nothing to download."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.data.source import Data, Dataset, Resident
from allmlp.errors import require
from allmlp.spec import Size

TEST = 297


class Digits(Data):
    """8 x 8 grey digits (UCI optical recognition, test part); 1,500 to train on, 297 to test, always the same."""

    image: Size = (8, 8)

    def open(self) -> Dataset:
        pixels, targets = require("sklearn.datasets", "train").load_digits(return_X_y=True)
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        labels = torch.from_numpy(targets.astype(np.int64))
        if self.image != (8, 8):
            enlarged = interpolate(images.float(), self.image, mode="bilinear", antialias=True)
            images = enlarged.round().clamp(0, 255).to(torch.uint8)
        held = stratified(labels, TEST)
        train, test = Resident(images[~held], labels[~held]), Resident(images[held], labels[held])
        seen = train.examples.images.double() / 255
        return Dataset(train, test, tuple("0123456789"), (seen.mean().item(),), (seen.std(correction=0).item(),))


def stratified(labels: Tensor, count: int) -> Tensor:
    """A mask of `count` examples, each class by its share. Hashes choose, so no version of a library changes it."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    shares = torch.bincount(labels).double() * count / len(labels)
    quota = shares.floor().long()
    quota[(shares - quota).argsort(descending=True, stable=True)[: count - int(quota.sum())]] += 1
    for label, wanted in enumerate(quota.tolist()):
        members = (labels == label).nonzero().flatten().tolist()
        members.sort(key=lambda index: hashlib.sha256(f"digit {index}".encode()).digest())
        held[members[:wanted]] = True
    return held
