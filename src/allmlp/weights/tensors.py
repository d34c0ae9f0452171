"""Read and write tensor files: .npz, .safetensors, and .pth, .pt or .bin.

Untrusted files are safe to read: no code in them is executed, and the sizes they declare are compared with the size of
the file before memory is allocated. Uncompressed files are memory-mapped, so that a tensor is read when it is used.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from allmlp.errors import UserError, one_line
from allmlp.files import write_atomically

SUPPORTED = "supported are .npz, .safetensors, .pth, .pt and .bin"
SLACK_BYTES, MAX_EXPANSION = 2**24, 4
"""Unpacked data may have 16 MiB plus four times its compressed size: trained weights hardly compress. The tensors of a
pickle may have four times the size of the file.
"""
CHUNK = 2**20
MAX_PICKLE_BYTES, MAX_HEADER_BYTES = 2**24, 10**8
"""Maximum size of a pickle without its tensor data, and of a safetensors header (the format's own limit)."""
PLAIN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch \w+Storage|torch (Size|device)"
    r"|torch (bfloat|float|int|uint|bool)\d*"
)
"""The globals in the pickle of a state dict."""
WRAPPERS = ("model", "state_dict")
"""Keys of the weights in a training checkpoint."""
WRAPPED = re.compile(r"(module\.|_orig_mod\.)+")
"""Prefix of all weights that were saved from DataParallel or DDP, as those of CaiT were, or from torch.compile."""


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file; its type is detected from the first bytes."""
    if not file.is_file():
        raise UserError(f"{file} does not exist; name a weights file or a model folder")
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
        # A safetensors file begins with the length of its header, which may look like the magic bytes of another type.
        header = int.from_bytes(start[:8], "little")
        if start.endswith(b"{") and header < file.stat().st_size:
            if header > MAX_HEADER_BYTES:
                raise UserError(f"{file} is not a valid safetensors file: it declares a header of {header:,} bytes")
            return read_safetensors(file)
        if start.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                arrays = any(name.endswith(".npy") for name in archive.namelist())
            return read_npz(file) if arrays else read_pickle(file)
        if start.startswith(b"\x80"):
            return read_pickle(file)
    except UserError as reason:
        # Names in a damaged file may contain any character, including line breaks.
        raise UserError("".join(letter if letter.isprintable() else "?" for letter in str(reason))) from None
    except Exception as reason:  # the readers raise many types for damaged files
        raise UserError(f"{file} is damaged or not a weights file: {one_line(reason)}") from None
    raise UserError(f"{file} is damaged or not a weights file; {SUPPORTED}")


# --- safetensors -------------------------------------------------------------------------------------------


def read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as source:
            return {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    except SafetensorError as reason:
        raise UserError(f"{file} is damaged or not a safetensors file: {one_line(reason)}") from None


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    state = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(file, lambda temporary: save_file(state, temporary, {"format": "pt"}))


# --- numpy -------------------------------------------------------------------------------------------------


def read_npz(file: Path) -> dict[str, Tensor]:
    """The arrays of an .npz file. The header of each is checked before its data are read."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
            raise UserError(f"{file} has a compression that numpy does not use; save it again with numpy.savez")
        if sum(member.file_size for member in members) > SLACK_BYTES + MAX_EXPANSION * file.stat().st_size:
            raise UserError(f"{file} declares far more data than a file of its size can hold; it was rejected")
        arrays: dict[str, Tensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise UserError(f"{file} contains {name} twice")
            with archive.open(member) as stream:
                arrays[name] = torch.from_numpy(read_array(f"{file}: {name}", stream, member.file_size))
    return arrays


def read_array(where: str, stream: IO[bytes], size: int) -> np.ndarray:
    """One floating-point array that has exactly `size` bytes with its header."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise UserError(f"{where} is not an array in version 1.0 of the .npy format")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise UserError(f"{where} has dtype {dtype}; only float16, float32 and float64 are supported")
    length = math.prod(shape) * dtype.itemsize
    if length != size - stream.tell():
        raise UserError(f"{where} declares the shape {list(shape)}, but has {size - stream.tell()} bytes")
    data = np.empty(length, np.uint8)
    for start in range(0, length, CHUNK):
        chunk = stream.read(min(CHUNK, length - start))
        if len(chunk) != min(CHUNK, length - start):
            raise UserError(f"{where} is truncated")
        data[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
    # zipfile verifies the checksum at the end of the stream.
    if stream.read(1):
        raise UserError(f"{where} is longer than it declares")
    array = data.view(dtype).reshape(shape, order="F" if fortran_order else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def write_npz(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Like numpy.savez, but one array at a time. bfloat16, which numpy lacks, is written as float32."""

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, tensor in tensors.items():
                plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, plain.contiguous().numpy(), allow_pickle=False)

    write_atomically(file, write)


# --- pickles -----------------------------------------------------------------------------------------------


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a .pth, .pt or .bin file, possibly under the key `model` or `state_dict`.

    Unpickling can run code. The pickle is scanned first, and rejected if it refers to anything but plain tensors; then
    it is loaded by torch with weights_only=True.
    """
    zipped = zipfile.is_zipfile(file)
    if zipped:
        check_archive(file)
    else:
        with file.open("rb") as stream:
            for _ in range(4):  # magic number, protocol version, system info, state dict
                check_pickle(file, stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch also raises errors for what it warns about
            # Files from before torch 1.6 are not zip archives and cannot be memory-mapped.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} is damaged or contains more than weights; loading it could run code, so it was rejected"
        ) from None
    tensors = unwrap(content)
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(f"{file} contains no state dict: save model.state_dict()")
    check_tensors(file, tensors)
    return copy_tied(tensors)


def check_archive(file: Path) -> None:
    """Reject compressed records, which torch never writes and which could expand without bound; verify checksums."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise UserError(f"{file} is compressed, which torch.save never does; it was rejected")
        damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{file} is damaged: the checksum of {damaged} does not match")
        for record in records:
            if record.filename.endswith(".pkl"):
                if record.file_size > MAX_PICKLE_BYTES:
                    raise UserError(f"{file} has a pickle of {record.file_size:,} bytes; it was rejected")
                check_pickle(file, io.BytesIO(archive.read(record)))


def check_pickle(file: Path, stream: IO[bytes]) -> None:
    """Scan one pickle without executing it: which globals it refers to, and how many elements it declares."""
    size, start, declared = file.stat().st_size, stream.tell(), 0
    for code, argument, position in pickletools.genops(stream):
        if code.name == "GLOBAL" and not PLAIN.fullmatch(str(argument)):
            raise more_than_weights(file, str(argument).replace(" ", "."))
        if code.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            raise more_than_weights(file, argument or "a call")
        # Between MARK and BINPERSID: ("storage", type, name, "cpu", number of elements).
        declared = 0 if code.name == "MARK" else max(declared, argument if isinstance(argument, int) else 0)
        if code.name == "BINPERSID" and declared > size:
            raise UserError(f"{file} is damaged: it declares {declared:,} elements, more than the file holds")
        if position is not None and position - start > MAX_PICKLE_BYTES:
            raise UserError(f"{file} has a pickle of more than {MAX_PICKLE_BYTES:,} bytes; it was rejected")


def more_than_weights(file: Path, what: object) -> UserError:
    return UserError(f"{file} contains more than plain tensors ({what}); loading it could run code, so it was rejected")


def unwrap(content: Any) -> Any:
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
            break
    if isinstance(content, dict) and content and all(WRAPPED.match(str(name)) for name in content):
        return {WRAPPED.sub("", str(name), count=1): tensor for name, tensor in content.items()}
    return content


def check_tensors(file: Path, tensors: dict[Any, Any]) -> None:
    """Check that all values are plain tensors, and that their total size is plausible for the file: an expanded view
    may claim any size, and tied tensors are stored once.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"{file}: {name!r} is not a tensor; save model.state_dict()")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{file}: {name} is not a plain tensor")
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MAX_EXPANSION * file.stat().st_size:
        raise UserError(f"{file} is damaged: its tensors declare more elements than the file holds")


def copy_tied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without gradient; those that share their storage with an earlier one are copied."""
    independent: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        independent[name] = tensor.detach().clone() if pointer in seen else tensor.detach()
        seen.add(pointer)
    return independent


def write_pickle(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with torch.save; views of larger tensors are copied, since torch would write the whole storage."""
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format) if is_view(tensor) else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    write_atomically(file, lambda temporary: torch.save(state, temporary))


def is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
