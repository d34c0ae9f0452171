"""Splits whose pictures stay encoded where they are and are decoded, in threads, as they are fetched."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
from torch import Tensor

from allmlp.data.decode import BrokenImage, Decode, picture
from allmlp.data.source import Batch
from allmlp.errors import UserError
from allmlp.spec import Range

log = logging.getLogger("allmlp.data")

Workers = Annotated[int, Range(0, 1024)]
"""Threads that read and decode; 0 is one for each core."""
IN_A_ROW = 100


class Encoded:
    """A split of encoded pictures. A subclass says where the bytes of one are."""

    def __init__(self, labels: Tensor, image: tuple[int, int], decode: Decode, workers: int) -> None:
        self.labels, self.image, self.decode, self.workers = labels, image, decode, workers
        self.broken: dict[int, str] = {}
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def read(self, index: int) -> bytes:
        """The encoded picture; BrokenImage if it is this picture's fault that it cannot be read."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def skipped(self) -> int:
        """How many pictures were found broken and left out so far."""
        return len(self.broken)

    def fetch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        wanted = indices.tolist()
        with torch.inference_mode(False):  # threads fill it, which know nothing of the caller's mode
            images = torch.empty(len(wanted), self.decode.channels, *self.image, dtype=torch.uint8)
        numbers = draws.tolist() if draws is not None else [None] * len(wanted)

        def one(position: int) -> int:
            index, pixels = self.readable(wanted[position], numbers[position])
            images[position] = pixels
            return index

        used = list(self.pool().map(one, range(len(wanted))))
        return Batch(images, self.labels[torch.tensor(used, dtype=torch.int64)])

    def readable(self, index: int, draws: list[float] | None) -> tuple[int, Tensor]:
        """The picture at `index`, or the next one that can be read: the same one in every run."""
        for _ in range(min(len(self), IN_A_ROW)):
            if index not in self.broken:
                try:
                    return index, picture(self.read(index), self.image, self.decode, draws)
                except BrokenImage as reason:
                    if self.decode.broken == "error":
                        raise BrokenImage(
                            f"{self.name(index)}: {reason}; repair or remove it, or set data.decode.broken=skip"
                        ) from reason
                    self.broken[index] = str(reason)
                    log.warning("skipped %s: %s (%d so far)", self.name(index), reason, self.skipped)
            index = (index + 1) % len(self)
        raise UserError(f"{self.name(index)} and the pictures before it are all broken: is this the right data?")

    def pool(self) -> ThreadPoolExecutor:
        """The threads, started when first needed and again in a forked process, where they do not live on."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.workers or cores(), thread_name_prefix="decode")
        return self._pool[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
