"""Where datasets lie ($ALLMLP_DATA, else ./data), and how their official files get there."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from allmlp.errors import UserError, one_line
from allmlp.files import write_atomically


def places(path: str, folder: str) -> list[Path]:
    """The folders to search: `path` where one is given, else the dataset's own folder and the one above it."""
    if path:
        return [Path(path).expanduser()]
    root = Path(os.environ.get("ALLMLP_DATA") or "data").expanduser()
    return [root / folder, root]


def name_places(searched: Sequence[Path]) -> str:
    return " or ".join(map(str, searched))


def download(url: str, md5: str, file: Path) -> None:
    """Fetch `url` to `file`: the file is there whole and with this checksum, or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: copy(url, md5, temporary))
    except OSError as reason:
        raise UserError(
            f"cannot download {url} to {file.parent}: {one_line(reason)}; fetch it elsewhere and put it there"
        ) from reason


def copy(url: str, md5: str, file: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=60) as source, open(file, "wb") as target:
        while piece := source.read(2**20):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != md5:
        raise UserError(f"{url} came with md5 {digest.hexdigest()} instead of {md5}; it was not kept: try again")
