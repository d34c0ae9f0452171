"""Images that are decoded once and kept in memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from allmlp.data.dataset import Data, ImageDataset, InMemory, Split
from allmlp.errors import UserError

CHUNK = 1024


class Decoded(Data):
    """The images of `source`, decoded once as for evaluation and kept in memory, on the device of the model.

    For small images and many epochs. Random crops are then done by the task (`RandomResizedCrop`).
    """

    source: Data

    def load(self) -> ImageDataset:
        dataset = self.source.load()
        if not isinstance(dataset, ImageDataset):
            raise UserError(f"Decoded needs a source of images, not {type(self.source).__name__}")
        validation = None if dataset.validation is None else decode(dataset.validation)
        return replace(dataset, train=decode(dataset.train), test=decode(dataset.test), validation=validation)


def decode(split: Split) -> InMemory:
    """All examples of a split, in chunks, so that memory holds them only once."""
    images, labels = split.fetch(torch.arange(1))
    images = images.new_empty(len(split), *images.shape[1:])
    labels = labels.new_empty(len(split))
    for indices in torch.arange(len(split)).split(CHUNK):
        images[indices], labels[indices] = split.fetch(indices)
    return InMemory(images, labels)
