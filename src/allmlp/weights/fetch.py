"""Where a model is: here, among the published weights, or on the Hugging Face hub; and how it gets here.

What is downloaded is there whole and checked, or not at all. It is kept in $ALLMLP_CACHE (~/.cache/allmlp), what comes
from the hub in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from allmlp.data.inputs import FILE, TOKENIZERS, Inputs
from allmlp.errors import UserError, did_you_mean, one_line, require
from allmlp.files import write_atomically
from allmlp.weights.huggingface import CONFIG, PIXELS, WEIGHTS
from allmlp.weights.published import Checkpoint, checkpoints, known

LIMIT = 4 * 2**30
"""Bytes of a download. The largest published model here has 0.9 GiB."""
PIECE = 2**20
HUB = "hf:"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class Place(NamedTuple):
    path: Path
    inputs: Inputs | None = None
    """Where it is known better than from the file."""


def locate(name: str, say: Callable[[str], object] = lambda text: None, **options: Any) -> Place:
    """The file or folder that `name` stands for: a path, a name of `allmlp list weights`, or a model on the hub, for
    which `options` are those of `from_hub`.
    """
    path, repository = Path(name).expanduser(), name.removeprefix(HUB)
    row = checkpoints().get(name) or known(path.name if path.is_file() else repository)
    if row is not None and row.note:
        say(row.note)
    inputs = Inputs(row.pixels.mean, row.pixels.std, crop=row.pixels.crop) if row is not None else None
    if path.exists():
        return Place(path, inputs if path.is_file() else None)
    if row is not None and name == row.name:
        return Place(fetch(row) if row.url else from_hub(row.hub, **options), inputs)
    if name.startswith(HUB) or REPOSITORY.fullmatch(name):
        return Place(from_hub(repository, **options), inputs)
    hint = did_you_mean(name, checkpoints()) or "; name a weights file, a model folder, or one of `allmlp list weights`"
    raise UserError(f"{name} is not there{hint}")


def fetch(row: Checkpoint) -> Path:
    """The file of published weights, downloaded unless it was before."""
    root = Path(os.environ.get("ALLMLP_CACHE") or "~/.cache/allmlp").expanduser()
    file = root / "weights" / row.name / row.file
    if file.is_file():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: download(row, temporary))
    except (OSError, http.client.HTTPException) as reason:
        if isinstance(reason, urllib.error.HTTPError):
            reason.close()  # it is the answer itself, with its connection
        raise UserError(
            f"cannot download {row.url} ({one_line(reason)}); where there is no network, fetch it elsewhere and give "
            f"its path instead of {row.name}"
        ) from None
    return file


def download(row: Checkpoint, file: Path) -> None:
    """Copy what lies at a URL, but no more than the published size; its checksum must fit."""
    limit = LIMIT if row.size is None else row.size + PIECE
    digest, length = hashlib.sha256(), 0
    with urllib.request.urlopen(row.url, timeout=60) as source, open(file, "wb") as target:
        while piece := source.read(PIECE):
            digest.update(piece)
            length += len(piece)
            if length > limit:
                raise UserError(f"{row.url} is larger than the {limit:,} bytes expected; it was not kept")
            target.write(piece)
        announced = source.headers.get("Content-Length") or str(length)
    if announced != str(length):
        raise UserError(f"{row.url} broke off after {length} of {announced} bytes; it was not kept: try again")
    if not digest.hexdigest().startswith(row.sha256):
        raise UserError(
            f"{row.url} has the SHA-256 {digest.hexdigest()[:8]}..., not {row.sha256}...; it was not kept: try again"
        )


def from_hub(
    repository: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The folder of a model on the Hugging Face hub, from its cache where there is no network."""
    hub = require("huggingface_hub", "hub")
    where = {"revision": revision, "token": token, "cache_dir": cache_dir}
    reason: object = "local_files_only is set"
    if not local_files_only:
        try:
            info = hub.HfApi(token=token).model_info(repository, revision=revision, files_metadata=True, timeout=30)
            chosen = choose(repository, {file.rfilename: file.size or 0 for file in info.siblings})
            files = [hub.hf_hub_download(repository, name, force_download=force_download, **where) for name in chosen]
            return Path(files[0]).parent
        except UserError:
            raise
        except Exception as failure:  # it reports missing names, networks and rights in a dozen types
            reason = one_line(failure)
    try:
        return Path(hub.snapshot_download(repository, local_files_only=True, **where))
    except Exception:
        raise UserError(
            f"{repository} is neither a folder here, nor in the hub's cache, nor to be had from the hub ({reason}); "
            f"where there is no network, give the path of a local copy"
        ) from None


def choose(repository: str, sizes: Mapping[str, int]) -> list[str]:
    """The files of a repository that are needed, the weights first."""
    weights = next((name for name in WEIGHTS if name in sizes), None)
    if weights is None:
        raise UserError(f"{repository} on the hub has neither {' nor '.join(WEIGHTS)}")
    chosen = [weights, *(name for name in (CONFIG, FILE, PIXELS, *TOKENIZERS) if name in sizes)]
    if sum(sizes[name] for name in chosen) > LIMIT:
        raise UserError(f"{repository} on the hub has {sizes[weights]:,} bytes; at most {LIMIT:,} are downloaded")
    return chosen
