"""Folders of datasets ($ALLMLP_DATA, default ./data) and of caches, and downloads."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from allmlp.errors import UserError, one_line
from allmlp.files import expand_user, lock, write_atomically


def search_paths(path: str, folder: str) -> list[Path]:
    """Folders to search: `path` if given, else the folder of the dataset and its parent."""
    if path:
        return [expand_user(path)]
    root = expand_user(os.environ.get("ALLMLP_DATA") or "data")
    return [root / folder, root]


def join_paths(paths: Sequence[Path]) -> str:
    return " or ".join(map(str, paths))


def cache_folder(path: str = "") -> Path:
    """`path` if given, else $ALLMLP_CACHE or ~/.cache/allmlp."""
    return expand_user(path or os.environ.get("ALLMLP_CACHE") or "~/.cache/allmlp")


def write_once(place: Path, write: Callable[[], None]) -> None:
    """Write a file or folder of a cache unless it is there; one process writes, the others wait."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with lock(place.with_suffix(".lock")):
            if not place.exists():
                write()
    except OSError as reason:
        raise UserError(f"cannot write {place}: {one_line(reason)}; set data.cache to another folder") from reason


def download(url: str, md5: str, file: Path) -> None:
    """Download `url` to `file`, which appears only when the download is complete and its checksum correct."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: fetch(url, md5, temporary))
    except OSError as reason:
        raise UserError(
            f"cannot download {url} to {file.parent}: {one_line(reason)}; download it elsewhere and copy it there"
        ) from reason


def fetch(url: str, md5: str, file: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=60) as source, open(file, "wb") as target:
        while piece := source.read(2**20):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != md5:
        raise UserError(f"{url} has md5 {digest.hexdigest()} instead of {md5}: download it again")
