"""Checkpoints of FSDP runs: every process writes its shards, in the background, through torch.distributed.checkpoint.

The files are those of `FileSystemWriter`; each process computes the checksum of its own. They can be read by another
number of processes, with or without FSDP.
"""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from allmlp.errors import UserError, one_line
from allmlp.files import digest

METADATA, CHECKSUM = ".metadata", ".sha256"
ALLOWED = {
    "torch": {"Size", "device", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""Globals allowed in the pickled metadata; no other function or class is called."""


class CheckedWriter(FileSystemWriter):
    """Writes the checksum of every shard next to it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            file = Path(self.path) / name
            file.with_name(name + CHECKSUM).write_text(digest(file), encoding="utf8")
        return written


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of the metadata of a checkpoint")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads metadata without executing code from manipulated files; tensors are read with `weights_only` anyway."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            return MetadataUnpickler(file).load()


def start_writing(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], group: dist.ProcessGroup) -> Future[Any]:
    """Copy the tensors of this process to main memory, and write them into `folder` while training continues.

    All processes have finished when the first one has. `group` is a separate process group, since writing threads
    communicate at the same time as training threads.
    """
    return dcp.async_save(flatten(parts), storage_writer=CheckedWriter(folder), process_group=group)  # type: ignore[return-value]


def flatten(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def checksums(folder: Path) -> dict[str, str]:
    """Checksums of a folder that all processes have written to, by file name."""
    files = sorted(folder.glob(f"*{CHECKSUM}"))
    sums = {file.name.removesuffix(CHECKSUM): file.read_text(encoding="utf8") for file in files}
    for file in files:
        file.unlink()
    return sums | {METADATA: digest(folder / METADATA)}


def stored_parts(folder: Path) -> dict[str, dict[str, TensorStorageMetadata]]:
    """Shape and dtype of the tensors of a checkpoint, by part."""
    try:
        entries = SafeReader(folder).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, AttributeError, EOFError) as reason:
        raise UserError(f"cannot read the checkpoint {folder}: {one_line(reason)}") from None
    parts = defaultdict[str, dict[str, TensorStorageMetadata]](dict)
    for key, entry in entries.items():
        part, _, name = key.partition("/")
        if isinstance(entry, TensorStorageMetadata):
            parts[part][name] = entry
    return parts


def read_into(folder: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Fill tensors in place, sharded or whole."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads all shards
        dcp.load(flatten(parts), storage_reader=SafeReader(folder))
