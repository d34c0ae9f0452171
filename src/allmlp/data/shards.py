"""Tar shards in the WebDataset layout, local or behind any fsspec URL, read at random without extracting them.

A shard's headers are read once; where its pictures begin and what their labels are is kept in a small index file, so
that any example can be fetched by one range read: the order of a run is arithmetic, and resuming it is exact.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from allmlp.data.decode import SUFFIXES, Decode
from allmlp.data.encoded import Encoded, Workers, cores
from allmlp.data.source import Data, Dataset
from allmlp.errors import UserError, one_line, require
from allmlp.files import write_atomically
from allmlp.spec import Size

MOST_CLASSES = 1_000_000
VERSION = 1


class Shards(Data):
    """key.jpg (.png, .webp, ...) followed or preceded by key.cls or by key.json with a whole number under `label`.

    `path` and `test` name shards: a folder, a file, a pattern (*, ?) or a range ({0000..0099}), local or a URL; commas
    join several. A folder's shards are for testing if their names start with val or test, else for training. `classes`
    is a text file of class names, one a line. An index lies beside its shard, or in `cache` ($ALLMLP_CACHE,
    ~/.cache/allmlp) where that cannot be written.
    """

    path: str
    test: str = ""
    image: Size = (224, 224)
    label: str = "label"
    classes: str = ""
    cache: str = ""
    decode: Decode = Decode()
    workers: Workers = 0

    def open(self) -> Dataset:
        train, test = find(self.path), find(self.test) if self.test else []
        if not self.test:
            test = [shard for shard in train if re.match("val|test", Path(shard.path).name)]
            train = [shard for shard in train if shard not in test]
        for what, listed in (("train", train), ("test", test)):
            if not listed:
                raise UserError(
                    f"no shards to {what} on in {self.path}: set path and test to folders or patterns such as "
                    f"shards/train-{{0000..0099}}.tar"
                )
        seen, unseen = self.split(train), self.split(test)
        count = int(max(seen.labels.max(), unseen.labels.max())) + 1
        classes = read_names(self.classes) if self.classes else tuple(map(str, range(count)))
        if count > len(classes):
            raise UserError(f"{self.classes} names {len(classes)} classes, the shards have labels up to {count - 1}")
        if len(classes) == 1:
            raise UserError(f"{self.path} has one class: there is nothing to tell apart")
        mean, std = self.decode.statistics()
        return Dataset(seen, unseen, classes, mean, std, self.decode.crop)

    def split(self, shards: list[Shard]) -> Ranges:
        with ThreadPoolExecutor(self.workers or cores()) as pool:
            indexes = list(pool.map(lambda shard: index(shard, self.label, self.cache), shards))
        return Ranges(shards, indexes, self.image, self.decode, self.workers)


class Shard(NamedTuple):
    """A tar file: a path, on a remote file system where there is one."""

    path: str
    remote: Any = None

    def __str__(self) -> str:
        return self.remote.unstrip_protocol(self.path) if self.remote else self.path

    def open(self) -> IO[bytes]:
        return self.remote.open(self.path, "rb") if self.remote else open(self.path, "rb")

    def read(self, start: int, size: int) -> bytes:
        if self.remote:
            return self.remote.cat_file(self.path, start=start, end=start + size)
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def stamp(self) -> tuple[int, str]:
        """Its size, and what changes when it does."""
        if not self.remote:
            found = os.stat(self.path)
            return found.st_size, str(found.st_mtime_ns)
        info = self.remote.info(self.path)
        return int(info["size"]), " ".join(
            str(info.get(key, "")) for key in ("ETag", "mtime", "LastModified", "created")
        )


class Index(NamedTuple):
    """Where the pictures of a shard begin, their sizes in bytes and their labels (int64, n)."""

    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


class Ranges(Encoded):
    """Pictures that are byte ranges of shards. `bounds` are the first example of every shard, and the end."""

    def __init__(
        self, shards: list[Shard], indexes: list[Index], image: tuple[int, int], decode: Decode, workers: int = 0
    ) -> None:
        offsets, sizes, labels = (np.concatenate(column) for column in zip(*indexes))
        super().__init__(torch.from_numpy(labels), image, decode, workers)
        self.shards, self.offsets, self.sizes = shards, offsets, sizes
        self.bounds = np.cumsum([0] + [len(entries.labels) for entries in indexes])

    def place(self, index: int) -> tuple[Shard, int, int]:
        shard = self.shards[np.searchsorted(self.bounds, index, side="right") - 1]
        return shard, int(self.offsets[index]), int(self.sizes[index])

    def read(self, index: int) -> bytes:
        shard, start, size = self.place(index)
        try:
            data = shard.read(start, size)
        except Exception as reason:  # what a remote file system raises is its own; it is never the picture's fault
            raise UserError(f"cannot read {shard}: {one_line(reason) or type(reason).__name__}") from reason
        if len(data) != size:
            raise UserError(f"{shard} became shorter while it was in use: start again")
        return data

    def name(self, index: int) -> str:
        shard, start, _ = self.place(index)
        return f"{shard}, picture at byte {start}"


# --- finding --------------------------------------------------------------------------------------------


def find(text: str) -> list[Shard]:
    """The shards that a list of folders, files, patterns and ranges stands for, in the order of their names."""
    found: list[Shard] = []
    for pattern in filter(None, map(str.strip, text.split(","))):
        for path in spread(pattern):
            found += find_remote(path) if "://" in path else find_local(path)
    return found


def spread(pattern: str) -> list[str]:
    """train-{08..10}.tar -> train-08.tar, train-09.tar, train-10.tar"""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    first, last = match.groups()
    numbers = range(int(first), int(last) + 1)
    if not 0 < len(numbers) <= 1_000_000:
        raise UserError(f"{match.group()} in {pattern} is not a range of shards")
    return [
        path
        for number in numbers
        for path in spread(f"{pattern[: match.start()]}{number:0{len(first)}}{pattern[match.end() :]}")
    ]


def find_local(path: str) -> list[Shard]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return [Shard(file) for file in sorted(glob.glob(os.path.join(glob.escape(path), "*.tar")))]
    if os.path.isfile(path):
        return [Shard(path)]
    if glob.has_magic(path):
        return [Shard(file) for file in sorted(glob.glob(path)) if os.path.isfile(file)]
    raise UserError(f"there is no shard {path}")


def find_remote(url: str) -> list[Shard]:
    fsspec = require("fsspec", "train")
    try:
        remote, path = fsspec.core.url_to_fs(url)
        if not path.endswith(".tar"):
            path = f"{path.rstrip('/')}/*.tar"
        return [Shard(file, remote) for file in (sorted(remote.glob(path)) if glob.has_magic(path) else [path])]
    except Exception as reason:  # unknown protocol, missing package, no network
        raise UserError(f"cannot list {url}: {one_line(reason) or type(reason).__name__}") from reason


def read_names(path: str) -> tuple[str, ...]:
    try:
        names = tuple(filter(None, map(str.strip, Path(path).expanduser().read_text(encoding="utf8").splitlines())))
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read class names from {path}: {one_line(reason)}") from None
    if not names:
        raise UserError(f"{path} names no classes")
    return names


# --- indexing -------------------------------------------------------------------------------------------


def index(shard: Shard, label: str, cache: str) -> Index:
    """The index of a shard: from its file if that is of this very shard, else made and written."""
    try:
        size, stamp = shard.stamp()
    except Exception as reason:
        raise UserError(f"cannot read {shard}: {one_line(reason) or type(reason).__name__}") from reason
    mark = json.dumps([VERSION, size, stamp, label])
    files = index_files(shard, cache)
    for file in files:
        stored = load(file, mark, size)
        if stored:
            return stored
    made = scan(shard, size, label)
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda temporary: store(temporary, mark, made))
            break
        except OSError:  # read-only or full: the next place, or no index file at all
            continue
    return made


def index_files(shard: Shard, cache: str) -> list[Path]:
    home = Path(cache or os.environ.get("ALLMLP_CACHE") or "~/.cache/allmlp").expanduser()
    name = str(shard) if shard.remote else os.path.abspath(shard.path)
    away = home / "shards" / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.index"
    return [away] if shard.remote or cache else [Path(f"{shard.path}.index"), away]


def store(file: Path, mark: str, entries: Index) -> None:
    with open(file, "wb") as target:
        np.savez(target, mark=np.frombuffer(mark.encode(), dtype=np.uint8), **entries._asdict())


def load(file: Path, mark: str, size: int) -> Index | None:
    """A stored index, or nothing if it is missing, damaged or of another shard."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as stored:
            if stored["mark"].tobytes() != mark.encode():
                return None
            entries = Index(*(stored[name] for name in Index._fields))
        whole = all(column.dtype == np.int64 and column.shape == entries.labels.shape for column in entries)
        return entries if whole and len(entries.labels) and (entries.offsets + entries.sizes).max() <= size else None
    except Exception:  # whatever is wrong with it, it can be made again
        return None


def scan(shard: Shard, size: int, label: str) -> Index:
    """Read a shard's headers and labels."""
    samples: dict[str, dict[str, tuple[int, int] | int]] = {}
    try:
        with shard.open() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                key, suffix = divide(member.name)
                if not member.isfile() or not suffix:
                    continue
                sample = samples.setdefault(key, {})
                if suffix in SUFFIXES:
                    if "image" in sample:
                        raise UserError(f"{shard}: {key} has two pictures")
                    sample["image"] = member.offset_data, member.size
                elif suffix in (".cls", ".json"):
                    source = tar.extractfile(member)
                    sample["label"] = read_label(source.read(2**24) if source else b"", suffix, label, shard, member)
            # tarfile takes a damaged header for the end: the end is a block of zeros.
            file.seek(tar.offset)
            if tar.offset > size or file.read(512) != bytes(512):
                raise tarfile.ReadError(f"it breaks off at byte {tar.offset:,} of {size:,}")
    except UserError:
        raise
    except Exception as reason:  # tarfile and remote file systems raise many kinds
        hint = "; compressed shards cannot be read at random" if "gz" in str(shard) else ""
        raise UserError(f"{shard} is damaged or not a tar file: {one_line(reason)}{hint}") from reason
    rows = [(*sample["image"], sample["label"]) for sample in samples.values() if len(sample) == 2]  # type: ignore[misc]
    if not rows:
        raise UserError(f"{shard} has no pictures with labels: it needs key.jpg and key.cls or key.json")
    return Index(*np.array(rows, dtype=np.int64).T.copy())


def divide(name: str) -> tuple[str, str]:
    """WebDataset's rule: the key ends at the first dot of the file's name; its last part says what it is."""
    folder, _, file = name.rpartition("/")
    key, dot, _ = file.partition(".")
    return f"{folder}/{key}", os.path.splitext(file)[1].lower() if dot and key else ""


def read_label(data: bytes, suffix: str, name: str, shard: Shard, member: tarfile.TarInfo) -> int:
    try:
        value = int(data) if suffix == ".cls" else json.loads(data)[name]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_CLASSES:
            return value
        raise ValueError(f"{value!r} is not a class number")
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise UserError(f"{shard}: no label in {member.name}: {type(reason).__name__} {one_line(reason)}") from None
