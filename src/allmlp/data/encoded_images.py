"""Splits of encoded images that are decoded by workers when they are fetched."""

from __future__ import annotations

import copy
import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Self

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import ImageDataset, LabeledImages, Split, evenly_spaced
from allmlp.data.decode import CorruptImage, Decode, decode_pixels
from allmlp.data.workers import Workers, own_cores
from allmlp.errors import UserError, printable
from allmlp.spec import Range

log = logging.getLogger("allmlp.data")
LOCK = threading.Lock()
"""Held while a corrupt image is counted, or workers are created."""

NumWorkers = Annotated[int, Range(0, 1024)]
"""Threads, or on Linux processes, that read and decode; 0 is one per core."""
MAX_CORRUPT = 0.1
"""Maximum fraction of corrupt images; a single one is always skipped."""
MAX_SKIPS = 100
"""Maximum number of consecutive corrupt images."""
CONTENT_SAMPLES = 64
"""Images whose bytes are part of the checksum of a dataset."""


class EncodedImages:
    """A split of encoded images; subclasses implement `read` and `name`."""

    is_portable = True
    """Whether `read` works in forked processes."""
    warns = True
    """Whether each corrupt image is named in the log; else only `corrupt` lists it."""

    def __init__(self, labels: Tensor, img_size: tuple[int, int], decode: Decode, num_workers: int) -> None:
        self.labels, self.img_size, self.decode, self.num_workers = labels, img_size, decode, num_workers
        self.members: list[int] | None = None
        """Sorted indices of the images that may replace a corrupt one; by default all."""
        self.corrupt: dict[int, str] = {}
        self._workers: Workers | None = None

    def read(self, index: int) -> bytes:
        """Bytes of an image; raises CorruptImage if only this image cannot be read."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def within(self, indices: Tensor) -> Self:
        """The same images for a subset, in which a corrupt image is only replaced by another one of the subset."""
        narrowed = copy.copy(self)
        narrowed.members = indices.sort().values.tolist()
        return narrowed

    @property
    def skipped(self) -> int:
        """Number of corrupt images skipped so far."""
        return len(self.corrupt)

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> LabeledImages:
        used = indices.tolist()
        rows = uniforms.tolist() if uniforms is not None else [None] * len(used)
        pixels, failed = self.workers().map([*zip(used, rows, strict=True)], self.is_portable)
        for position in failed:
            used[position], pixels[position] = self.decode_or_next(used[position], rows[position])
        with torch.inference_mode(False):
            return LabeledImages(torch.from_numpy(pixels), self.labels[torch.tensor(used, dtype=torch.int64)])

    def content(self) -> Iterator[Any]:
        """The labels, and the bytes of a few images; subclasses add names or sizes."""
        yield self.labels.numpy()
        for index in evenly_spaced(len(self), min(len(self), CONTENT_SAMPLES)).tolist():
            try:
                yield self.read(index)
            except CorruptImage:
                continue

    def decode_or_next(self, index: int, uniforms: list[float] | None) -> tuple[int, np.ndarray]:
        """Decode the image at `index`, or the next one that is not corrupt."""
        for _ in range(min(len(self if self.members is None else self.members), MAX_SKIPS)):
            if index not in self.corrupt:
                try:
                    return index, read_pixels(self, (index, uniforms))
                except CorruptImage as reason:
                    with LOCK:
                        if index not in self.corrupt:  # another thread may have found it meanwhile
                            check_corrupt(self.decode, self.name(index), reason, self.skipped + 1, len(self))
                            self.corrupt[index] = str(reason)
                            if self.warns:
                                name = printable(self.name(index))
                                log.warning("skipped %s: %s (%d so far)", name, reason, self.skipped)
            index = self.next_index(index)
        raise UserError(f"{self.name(index)} and the images before it are all corrupt: check data.path")

    def next_index(self, index: int) -> int:
        if self.members is None:
            return (index + 1) % len(self)
        return self.members[bisect_right(self.members, index) % len(self.members)]

    def workers(self) -> Workers:
        """The workers, created on first use."""
        with LOCK:
            if self._workers is None:
                shape, count = (self.decode.channels, *self.img_size), self.num_workers or own_cores()
                self._workers = Workers(partial(read_pixels, self), shape, count)
            return self._workers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}


def image_dataset(
    splits: tuple[Split, Split | None, Split], classes: tuple[str, ...], decode: Decode, notes: Iterable[str] = ()
) -> ImageDataset:
    """The dataset of images for training, validation and testing that are decoded to bytes."""
    (train, validation, test), (mean, std) = splits, decode.statistics()
    return ImageDataset(train, test, classes, mean, std, decode.crop_pct, validation=validation, notes=tuple(notes))


def read_pixels(split: EncodedImages, item: tuple[int, list[float] | None]) -> np.ndarray:
    """Pixels (c h w) of the image with an index, and with the uniforms of its crop."""
    index, uniforms = item
    return decode_pixels(split.read(index), split.img_size, split.decode, uniforms).transpose(2, 0, 1)


def check_corrupt(decode: Decode, name: str, reason: object, corrupt: int, images: int) -> None:
    """Raise an error about a corrupt image if none may be skipped, or if there are more than a tenth of them."""
    if decode.on_corrupt == "error":
        raise CorruptImage(f"{name}: {reason}; repair or remove it, or set data.decode.on_corrupt=skip")
    if corrupt > max(MAX_CORRUPT * images, 1):
        some = f"{corrupt} of {images} images cannot be read, such as {name}"
        raise CorruptImage(f"{some}: {reason}; repair or remove them")
