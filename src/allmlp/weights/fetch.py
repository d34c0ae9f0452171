"""Find a model by name: a path, published weights, or a model on the Hugging Face Hub; download it if needed.

Downloads are verified and cached in $ALLMLP_CACHE (~/.cache/allmlp); those of the Hub in its own cache.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from allmlp.data.paths import cache_folder
from allmlp.data.preprocessing import PREPROCESSING_FILE, TOKENIZER_FILES, ImagePreprocessing
from allmlp.errors import UserError, did_you_mean, one_line, require
from allmlp.files import expand_user, write_atomically
from allmlp.weights.formats.huggingface import CONFIG, IMAGE_PROCESSOR, INDEXES, WEIGHTS
from allmlp.weights.published import PublishedWeights, find_weights, published_weights

MAX_DOWNLOAD_BYTES = 8 * 2**30
"""Of one file. The largest published weights have 0.9 GiB, the parts of large Llamas almost 5."""
CHUNK = 2**20
HUB_PREFIX = "hf:"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class LocatedModel(NamedTuple):
    path: Path
    preprocessing: ImagePreprocessing | None = None
    """Preprocessing, if the published weights define it."""


def locate(
    name: str, notify: Callable[[str], object] = lambda text: None, others: Iterable[str] = (), **options: Any
) -> LocatedModel:
    """The file or folder of a model: a path, a name of `allmlp list weights`, or a model on the Hub, for which
    `options` are those of `from_hub`. `others` are further names to suggest if there is no such model.
    """
    path, repository = expand_user(name), name.removeprefix(HUB_PREFIX)
    row = published_weights().get(name) or find_weights(path.name if path.is_file() else repository)
    if row is not None and row.note:
        notify(row.note)
    preprocessing = None
    if row is not None:
        stats = row.normalization
        preprocessing = ImagePreprocessing(stats.mean, stats.std, crop_pct=stats.crop_pct)
    if path.exists():
        return LocatedModel(path, preprocessing if path.is_file() else None)
    if row is not None and name == row.name:
        return LocatedModel(fetch(row) if row.url else from_hub(row.hub, **options), preprocessing)
    if name.startswith(HUB_PREFIX) or REPOSITORY.fullmatch(name):
        return LocatedModel(from_hub(repository, **options), preprocessing)
    hint = (
        did_you_mean(name, [*published_weights(), *others])
        or "; name a weights file, a model folder, or one of `allmlp list weights`"
    )
    raise UserError(f"{name} was not found{hint}")


def fetch(row: PublishedWeights) -> Path:
    """The file of published weights, downloaded on first use."""
    file = cache_folder() / "weights" / row.name / row.file
    if file.is_file():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: download(row, temporary))
    except (OSError, http.client.HTTPException) as reason:
        if isinstance(reason, urllib.error.HTTPError):
            reason.close()  # an HTTPError is also the response, with an open connection
        raise UserError(
            f"cannot download {row.url} ({one_line(reason)}); without a network, download it elsewhere and pass "
            f"its path instead of {row.name}"
        ) from None
    return file


def download(row: PublishedWeights, file: Path) -> None:
    """Download a file of at most the published size and verify its checksum."""
    limit = MAX_DOWNLOAD_BYTES if row.size is None else row.size + CHUNK
    digest, length = hashlib.sha256(), 0
    with urllib.request.urlopen(row.url, timeout=60) as source, open(file, "wb") as target:
        while piece := source.read(CHUNK):
            digest.update(piece)
            length += len(piece)
            if length > limit:
                raise UserError(f"{row.url} is larger than the {limit:,} bytes expected; it was discarded")
            target.write(piece)
        announced = source.headers.get("Content-Length") or str(length)
    if announced != str(length):
        raise UserError(f"{row.url} broke off after {length} of {announced} bytes; it was discarded; try again")
    if not digest.hexdigest().startswith(row.sha256):
        raise UserError(
            f"{row.url} has the SHA-256 {digest.hexdigest()[:8]}..., not {row.sha256}...; it was discarded; try again"
        )


def from_hub(
    repository: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The folder of a model on the Hugging Face Hub; without a network, from its cache."""
    hub = require("huggingface_hub", "hub")
    where = {"revision": revision, "token": token, "cache_dir": cache_dir}
    reason: object = "local_files_only is set"
    if not local_files_only:
        try:
            info = hub.HfApi(token=token).model_info(repository, revision=revision, files_metadata=True, timeout=30)
            chosen = select_files(repository, {file.rfilename: file.size or 0 for file in info.siblings})
            files = [hub.hf_hub_download(repository, name, force_download=force_download, **where) for name in chosen]
            return Path(files[0]).parent
        except UserError:
            raise
        except Exception as failure:  # the library raises many types for missing names, networks and permissions
            reason = one_line(failure)
    try:
        return Path(hub.snapshot_download(repository, local_files_only=True, **where))
    except Exception:
        raise UserError(
            f"{repository} is not a local folder, not in the Hub's cache, and cannot be downloaded from the Hub "
            f"({reason}); without a network, pass the path of a local copy"
        ) from None


def select_files(repository: str, sizes: Mapping[str, int]) -> list[str]:
    """The files of a repository to download, the weights first, or the index of their parts."""
    weights = next((name for name in (*WEIGHTS, *INDEXES) if name in sizes), None)
    if weights is None:
        raise UserError(f"{repository} on the Hub has neither {' nor '.join(WEIGHTS)}")
    stem, suffix = weights.split(".")[:2]
    part = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
    chosen = [
        weights,
        *(name for name in sizes if weights in INDEXES and part.fullmatch(name)),
        *(name for name in (CONFIG, PREPROCESSING_FILE, IMAGE_PROCESSOR, *TOKENIZER_FILES) if name in sizes),
    ]
    largest = max(chosen, key=lambda name: sizes[name])
    if sizes[largest] > MAX_DOWNLOAD_BYTES:
        raise UserError(
            f"{largest} of {repository} on the Hub has {sizes[largest]:,} bytes; at most {MAX_DOWNLOAD_BYTES:,} are "
            "downloaded"
        )
    return chosen
