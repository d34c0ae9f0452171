"""Tar shards in the WebDataset layout, local or at any fsspec URL, with random access and without extraction.

The headers of a shard are read once. Offsets and labels are kept in a small index file, so that any example is one
range read, and training resumes exactly.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from allmlp.data.dataset import Data, ImageDataset
from allmlp.data.decode import SUFFIXES, Decode
from allmlp.data.encoded_images import EncodedImages, NumWorkers, image_dataset
from allmlp.data.paths import cache_folder
from allmlp.data.splits import divide
from allmlp.data.tar_members import Member, members
from allmlp.data.text_files import glob_remote, split_commas
from allmlp.errors import UserError, one_line
from allmlp.files import expand_user, read_regular, write_atomically
from allmlp.spec import Rate, Seed, Size
from allmlp.threads import limit

MAX_CLASSES = 1_000_000
MAX_LABEL = 2**24
"""Bytes of a label that are read."""
INDEX_VERSION = 1
MANIFEST = "shards.json"
"""File in a folder written by `allmlp shards`: its settings, and whether it is complete."""
CLASS_NAMES = "classes.txt"
PARSING = threading.Lock()
"""np.load parses Python literals, which may fail in Python 3.11 while another thread does."""


class Shards(Data):
    """Shards with key.jpg (.png, .webp, ...) and key.cls, or else key.json with an integer at `label_key`.

    `path` and `test` are folders, files, patterns (*, ?) or ranges ({0000..0099}), local or URLs, separated by commas;
    shards of `test` are not trained on, also where `path` names them. Without `test`, shards whose names start with
    test are for testing, and those with val for validation, or else for testing; if there are none, `test_fraction` of
    every class is for testing and as much for validation.
    `class_names_file` is a text file with one class name per line. The index is written next to its shard, or else to
    `cache` ($ALLMLP_CACHE, ~/.cache/allmlp).
    """

    path: str
    test: str = ""
    img_size: Size = (224, 224)
    label_key: str = "label"
    class_names_file: str = ""
    cache: str = ""
    test_fraction: Rate = 0.15
    split_seed: Seed = 0
    decode: Decode = Decode()
    num_workers: NumWorkers = 0

    def load(self) -> ImageDataset:
        train, validation, test = find(self.path), [], find(self.test) if self.test else []
        if not self.test:
            train, validation, test = by_name(train)
        tested = {shard.place for shard in test}
        train = [shard for shard in train if shard.place not in tested]
        if not train:
            raise UserError(
                f"no train shards in {self.path}: set data.path and data.test to folders or patterns such as "
                f"shards/train-{{0000..0099}}.tar; `allmlp shards FOLDER shards/` writes them from a folder of classes"
            )
        images, held_out, tests = (self.split(part) if part else None for part in (train, validation, test))
        assert images is not None
        count = int(max(split.labels.max() for split in (images, held_out, tests) if split)) + 1
        classes = read_class_names(self.class_names_file) if self.class_names_file else tuple(map(str, range(count)))
        if count > len(classes):
            raise UserError(
                f"{self.class_names_file} has {len(classes)} class names, but the shards have labels up to {count - 1}"
            )
        if len(classes) == 1:
            raise UserError(f"{self.path} has only one class: at least two are needed")
        if tests:
            return image_dataset((images, held_out, tests), classes, self.decode)
        made = divide(images, self.test_fraction, self.test_fraction, self.split_seed)
        return image_dataset(made, classes, self.decode)

    def split(self, shards: list[Shard]) -> ShardImages:
        with ThreadPoolExecutor(self.num_workers or limit()) as pool:
            indexes = list(pool.map(lambda shard: load_index(shard, self.label_key, self.cache), shards))
        return ShardImages(shards, indexes, self.img_size, self.decode, self.num_workers)


def by_name(shards: list[Shard]) -> tuple[list[Shard], list[Shard], list[Shard]]:
    """Shards for training, validation and testing, by name."""
    names = [(shard, Path(shard.path).name) for shard in shards]
    validation, test = ([shard for shard, name in names if name.startswith(start)] for start in ("val", "test"))
    train = [shard for shard in shards if shard not in (*validation, *test)]
    return (train, validation, test) if test else (train, [], validation)


class Shard(NamedTuple):
    """A tar file, local or on an fsspec file system."""

    path: str
    remote: Any = None

    def __str__(self) -> str:
        return self.remote.unstrip_protocol(self.path) if self.remote else self.path

    @property
    def place(self) -> str:
        """The same for every way to write the path of a file."""
        return str(self) if self.remote else os.path.realpath(self.path)

    def open(self) -> IO[bytes]:
        return self.remote.open(self.path, "rb") if self.remote else open(self.path, "rb")

    def read(self, start: int, size: int) -> bytes:
        if self.remote:
            return self.remote.cat_file(self.path, start=start, end=start + size)
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def stamp(self) -> tuple[int, str]:
        """Size, and a string that changes with the content."""
        if not self.remote:
            status = os.stat(self.path)
            return status.st_size, str(status.st_mtime_ns)
        info, changing = self.remote.info(self.path), ("ETag", "mtime", "LastModified", "created")
        return int(info["size"]), " ".join(str(info.get(key, "")) for key in changing)


class ShardIndex(NamedTuple):
    """Offsets and sizes in bytes, and labels, of the images of a shard (int64, n)."""

    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


class ShardImages(EncodedImages):
    """Images stored as byte ranges of shards. `bounds` are the first example of each shard, and the total."""

    def __init__(
        self,
        shards: list[Shard],
        indexes: list[ShardIndex],
        img_size: tuple[int, int],
        decode: Decode,
        num_workers: int = 0,
    ) -> None:
        offsets, sizes, labels = (np.concatenate(column) for column in zip(*indexes))
        super().__init__(torch.from_numpy(labels), img_size, decode, num_workers)
        self.shards, self.offsets, self.sizes = shards, offsets, sizes
        self.bounds = np.cumsum([0] + [len(entries.labels) for entries in indexes])
        self.is_portable = not any(shard.remote for shard in shards)  # fsspec has threads

    def locate(self, index: int) -> tuple[Shard, int, int]:
        shard = self.shards[np.searchsorted(self.bounds, index, side="right") - 1]
        return shard, int(self.offsets[index]), int(self.sizes[index])

    def read(self, index: int) -> bytes:
        shard, start, size = self.locate(index)
        try:
            data = shard.read(start, size)
        except Exception as reason:  # file systems raise many types; none means a corrupt image
            raise UserError(f"cannot read {shard}: {one_line(reason) or type(reason).__name__}") from reason
        if len(data) != size:
            raise UserError(f"{shard} became shorter while it was in use: restart the run")
        return data

    def name(self, index: int) -> str:
        shard, start, _ = self.locate(index)
        return f"{shard}, image at byte {start}"

    def content(self) -> Iterator[Any]:
        yield "\n".join(Path(shard.path).name for shard in self.shards).encode()
        yield self.sizes
        yield from super().content()


# --- listing --------------------------------------------------------------------------------------------


def find(text: str) -> list[Shard]:
    """List the shards of comma-separated folders, files, patterns and ranges."""
    shards: list[Shard] = []
    for place in split_commas(text):
        for path in [place] if os.path.exists(place) else expand_range(place):
            if "://" in path:
                remote, files = glob_remote(path if path.endswith(".tar") else f"{path.rstrip('/')}/*.tar")
                shards += [Shard(file, remote) for file in files]
            else:
                shards += find_local(path)
    return shards


def expand_range(pattern: str) -> list[str]:
    """train-{08..10}.tar -> train-08.tar, train-09.tar, train-10.tar"""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    first, last = match.groups()
    numbers = range(int(first), int(last) + 1)
    if not 0 < len(numbers) <= 1_000_000:
        raise UserError(f"{match.group()} in {pattern} is not a valid range")
    return [
        path
        for number in numbers
        for path in expand_range(f"{pattern[: match.start()]}{number:0{len(first)}}{pattern[match.end() :]}")
    ]


def find_local(path: str) -> list[Shard]:
    path = str(expand_user(path)) if path.startswith("~") else path
    if os.path.isdir(path):
        manifest = read_manifest(Path(path))
        if manifest is not None and not manifest.get("complete"):
            raise UserError(f"the shards in {path} are not finished: run the same allmlp shards again")
        return [Shard(file) for file in sorted(glob.glob(os.path.join(glob.escape(path), "*.tar")))]
    if os.path.isfile(path):
        return [Shard(path)]
    if glob.has_magic(path):
        return [Shard(file) for file in sorted(glob.glob(path)) if os.path.isfile(file)]
    raise UserError(f"{path} does not exist")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Settings with which the shards of a folder were written; None if `allmlp shards` did not write them."""
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        manifest = json.loads(read_regular(file))
        return manifest if isinstance(manifest, dict) else {}
    except (OSError, ValueError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None


def read_class_names(path: str) -> tuple[str, ...]:
    try:
        names = tuple(filter(None, map(str.strip, expand_user(path).read_text(encoding="utf8").splitlines())))
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read class names from {path}: {one_line(reason)}") from None
    if not names:
        raise UserError(f"{path} has no class names")
    return names


# --- indexing -------------------------------------------------------------------------------------------


def load_index(shard: Shard, label: str, cache: str) -> ShardIndex:
    """The index of a shard: from its index file if up to date, else by scanning the shard."""
    try:
        size, stamp = shard.stamp()
    except Exception as reason:
        raise UserError(f"cannot read {shard}: {one_line(reason) or type(reason).__name__}") from reason
    stamp_text = json.dumps([INDEX_VERSION, size, stamp, label])
    files = index_files(shard, cache)
    for file in files:
        stored = read_index(file, stamp_text, size)
        if stored:
            return stored
    entries = scan(shard, label)
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda temporary: write_index(temporary, stamp_text, entries))
            break
        except OSError:  # read-only or full: try the next file, or go without
            continue
    return entries


def index_files(shard: Shard, cache: str) -> list[Path]:
    name = str(shard) if shard.remote else os.path.abspath(shard.path)
    cached = cache_folder(cache) / "shards" / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.index"
    return [cached] if shard.remote or cache else [Path(f"{shard.path}.index"), cached]


def write_index(file: Path, stamp_text: str, entries: ShardIndex) -> None:
    with open(file, "wb") as target:
        np.savez(target, stamp_text=np.frombuffer(stamp_text.encode(), dtype=np.uint8), **entries._asdict())


def read_index(file: Path, stamp_text: str, size: int) -> ShardIndex | None:
    """A stored index, or None if it is missing, damaged or outdated."""
    try:
        data = io.BytesIO(file.read_bytes())
        with PARSING, np.load(data, allow_pickle=False) as stored:
            if stored["stamp_text"].tobytes() != stamp_text.encode():
                return None
            entries = ShardIndex(*(stored[name] for name in ShardIndex._fields))
        whole = all(column.dtype == np.int64 and column.shape == entries.labels.shape for column in entries)
        return entries if whole and len(entries.labels) and (entries.offsets + entries.sizes).max() <= size else None
    except Exception:  # damaged: it is rebuilt
        return None


def scan(shard: Shard, label: str) -> ShardIndex:
    """Read a shard's headers and labels."""
    samples: dict[str, dict[str, Any]] = {}
    try:
        with shard.open() as file:
            for member in members(file):
                key, suffix = split_name(member.name)
                if not suffix:
                    continue
                sample = samples.setdefault(key, {})
                if suffix in SUFFIXES:
                    if "image" in sample:
                        raise UserError(f"{shard}: {key} has two images")
                    sample["image"] = member.offset, member.size
                elif suffix in (".cls", ".json"):
                    file.seek(member.offset)
                    content = file.read(min(member.size, MAX_LABEL))
                    sample[suffix] = read_label(content, suffix, label, shard, member)
    except UserError:
        raise
    except Exception as reason:  # tarfile and file systems raise many types
        hint = "; compressed shards have no random access: decompress it" if "gz" in str(shard) else ""
        raise UserError(f"{shard} is damaged or not a tar file: {one_line(reason)}{hint}") from reason
    labeled = [sample for sample in samples.values() if "image" in sample and len(sample) > 1]
    # Beside key.cls, key.json may have anything.
    rows = [(*sample["image"], sample.get(".cls", sample.get(".json"))) for sample in labeled]
    for *_, label_or_fault in rows:
        if isinstance(label_or_fault, UserError):
            raise label_or_fault
    if not rows:
        raise UserError(f"{shard} has no labeled images: it needs key.jpg and key.cls or key.json")
    return ShardIndex(*np.array(rows, dtype=np.int64).T.copy())


def split_name(name: str) -> tuple[str, str]:
    """Key and suffix; in WebDataset the key ends at the first dot of the file name."""
    folder, _, file = name.rpartition("/")
    key, dot, _ = file.partition(".")
    return f"{folder}/{key}", os.path.splitext(file)[1].lower() if dot and key else ""


def read_label(data: bytes, suffix: str, name: str, shard: Shard, member: Member) -> int | UserError:
    """A label, or what is wrong with it."""
    try:
        value = int(data) if suffix == ".cls" else json.loads(data)[name]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CLASSES:
            return value
        raise ValueError(f"{value!r} is not a class index")
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        return UserError(f"{shard}: no label in {member.name}: {type(reason).__name__} {one_line(reason)}")
