"""Write the images of a dataset, decoded and resized once, into tar shards."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, ImageDataset, Split, Subset
from allmlp.data.decode import CorruptImage, decode_whole
from allmlp.data.encoded_images import EncodedImages, check_corrupt
from allmlp.data.prefetch import read_ahead
from allmlp.data.resample import resize_short_side
from allmlp.data.shards import CLASS_NAMES, MANIFEST, Shard, load_index, read_manifest
from allmlp.errors import UserError, printable, require
from allmlp.files import lock, write_atomically, write_text_atomically
from allmlp.threads import limit

log = logging.getLogger("allmlp.data")
Format = Literal["raw", "jpeg", "webp"]
SUFFIX = {"raw": "ppm", "jpeg": "jpg", "webp": "webp"}
LONGEST = {"jpeg": 65_500, "webp": 16_383}
"""The longest side, in pixels, that a format can encode."""
SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""Split of a dataset -> prefix of its shard names."""


class Written(NamedTuple):
    images: int
    left_out: int
    """Images that could not be decoded."""


class ShardFormat(NamedTuple):
    size: int
    """Short side in pixels to which larger images are resized."""
    form: Format = "raw"
    """raw pixels (PPM), JPEG or WebP."""
    quality: int = 95
    """Quality of JPEG and WebP."""
    per_shard: int = 5000
    """Images in a shard."""


def write_shards(
    dataset: Dataset, folder: Path, to: ShardFormat, progress: Callable[[str, int], None] = lambda name, images: None
) -> Written:
    """Write train-00000.tar, ..., val-*.tar and test-*.tar with upright RGB images, and the names of the classes.

    Labels and order are those of the dataset. A shard gets its final name when it is complete. An interrupted call can
    be repeated and continues; until then `Shards` refuses the folder. Only a few images per core are in memory.
    `progress` is called with the name of each shard and the number of images so far.
    """
    if not isinstance(dataset, ImageDataset):
        raise UserError("shards hold images, and these data have none")
    for name in dataset.class_names:
        if name.encode("utf8", "ignore").decode("utf8").strip().splitlines() != [name.strip()]:
            raise UserError(f"the class {printable(name)!r} cannot be a line of {CLASS_NAMES}: rename it")
    splits = {name: encoded(getattr(dataset, name)) for name in SPLITS if getattr(dataset, name) is not None}
    settings = to._asdict() | {"data": dataset.checksum()}
    claim(folder, settings)
    images = total = 0
    with lock(folder / f".{MANIFEST}.lock", wait=False):
        names = "".join(f"{name}\n" for name in dataset.class_names)
        write_text_atomically(folder / CLASS_NAMES, names)
        for name, (source, indices) in splits.items():
            for number, some in enumerate(indices.split(to.per_shard)):
                file = folder / f"{SPLITS[name]}-{number:05}.tar"
                total += len(some)
                if not file.exists() and not write_shard(file, source, some.tolist(), number * to.per_shard, to):
                    continue
                images += len(load_index(Shard(str(file)), "label", "").labels)
                progress(file.name, images)
        write_manifest(folder, settings | {"complete": True})
    return Written(images, total - images)


def encoded(split: Split) -> tuple[EncodedImages, Tensor]:
    """The image source of a split, and the indices of its examples."""
    source, indices = (split.split, split.indices) if isinstance(split, Subset) else (split, torch.arange(len(split)))
    if not isinstance(source, EncodedImages):
        raise UserError("these images are already in memory, which is fastest: make shards of image files")
    return source, indices


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Start a folder, or continue one that was started with the same settings."""
    manifest = read_manifest(folder)
    if manifest is None and folder.is_dir() and any(name[0] != "." for name in os.listdir(folder)):
        raise UserError(f"{folder} is not empty: name a new folder for the shards")
    if manifest is not None and (other := [name for name in settings if manifest.get(name) != settings[name]]):
        what = "other images" if "data" in other else f"another {other[0]}"
        raise UserError(f"{folder} has shards of {what}: remove it, or name a new folder")
    if manifest is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, settings | {"complete": False})


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_text_atomically(folder / MANIFEST, text)


def write_shard(file: Path, source: EncodedImages, indices: list[int], first: int, to: ShardFormat) -> int:
    """Write a tar file of key.ppm (.jpg, .webp) and key.cls; images that cannot be decoded are skipped with a warning.
    Returns the number of images; no file is written for none.
    """
    written, workers = 0, source.num_workers or limit()

    def convert(index: int) -> bytes | CorruptImage:
        try:
            pixels = resize_short_side(decode_whole(source.read(index), source.decode), to.size)
        except CorruptImage as reason:
            return reason
        if max(pixels.shape) > LONGEST.get(to.form, math.inf):
            return CorruptImage(f"{pixels.shape[1]} x {pixels.shape[0]} pixels are too long for {to.form}")
        return encode(pixels, to)

    def write(target: Path) -> None:
        nonlocal written
        with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, converted in enumerate(read_ahead(convert, indices, 2 * workers, workers)):
                index = indices[number]
                if isinstance(converted, CorruptImage):
                    source.corrupt[index] = str(converted)
                    check_corrupt(source.decode, source.name(index), converted, source.skipped, len(source))
                    log.warning("left out %s: %s", printable(source.name(index)), converted)
                    continue
                for suffix, data in ((SUFFIX[to.form], converted), ("cls", b"%d" % int(source.labels[index]))):
                    info = tarfile.TarInfo(f"{first + number:09}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                written += 1

    write_atomically(file, write)
    if not written:
        file.unlink()
    return written


def encode(pixels: np.ndarray, to: ShardFormat) -> bytes:
    if to.form == "raw":
        return b"P6\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
    target = io.BytesIO()
    image = require("PIL.Image", "train").fromarray(np.ascontiguousarray(pixels))
    image.save(target, to.form.upper(), quality=to.quality)
    return target.getvalue()
