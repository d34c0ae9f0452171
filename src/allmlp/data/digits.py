"""The 1,797 handwritten digits in scikit-learn, without a download."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.errors import require
from allmlp.spec import Size

TEST_SIZE = 297


class Digits(Data):
    """8 x 8 gray digits (UCI optical recognition, test part): 1,500 for training and a fixed 297 for testing."""

    img_size: Size = (8, 8)

    def load(self) -> ImageDataset:
        pixels, targets = read_digits()
        images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
        labels = torch.from_numpy(targets.astype(np.int64))
        if self.img_size != (8, 8):
            enlarged = interpolate(images.float(), self.img_size, mode="bilinear", antialias=True)
            images = enlarged.round().clamp(0, 255).to(torch.uint8)
        test_mask = stratified_mask(labels, TEST_SIZE)
        train, test = InMemory(images[~test_mask], labels[~test_mask]), InMemory(images[test_mask], labels[test_mask])
        pixels_01 = train.examples.images.double() / 255
        mean, std = pixels_01.mean().item(), pixels_01.std(correction=0).item()
        return ImageDataset(train, test, tuple("0123456789"), (mean,), (std,))


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Gray levels from 0 to 16, n 64, and labels, n, as returned by scikit-learn's load_digits."""
    package = find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else None
    if file is None or not file.is_file():
        return require("sklearn.datasets", "train").load_digits(return_X_y=True)
    table = np.loadtxt(file, delimiter=",")  # importing scikit-learn takes seconds
    return table[:, :-1], table[:, -1]


def stratified_mask(labels: Tensor, count: int) -> Tensor:
    """A mask of `count` examples in proportion to the classes, chosen by hashes so that it never changes."""
    test_mask = torch.zeros(len(labels), dtype=torch.bool)
    exact = torch.bincount(labels).double() * count / len(labels)
    quota = exact.floor().long()
    quota[(exact - quota).argsort(descending=True, stable=True)[: count - int(quota.sum())]] += 1
    for label, number in enumerate(quota.tolist()):
        members = (labels == label).nonzero().flatten().tolist()
        members.sort(key=lambda index: hashlib.sha256(f"digit {index}".encode()).digest())
        test_mask[members[:number]] = True
    return test_mask
