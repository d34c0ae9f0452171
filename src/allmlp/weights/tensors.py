"""Files of tensors: .npz, .safetensors, and .pth, .pt or .bin, in and out.

A file from elsewhere is read without running what is in it, and never takes much more memory than it has bytes: what it
claims is compared with its size first. Plain files are mapped, so that a tensor is read when it is used.
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

FILES = ".npz, .safetensors and .pth, .pt or .bin can be read"
ROOM, RATIO = 2**24, 4
"""What grows when it is unpacked may have 16 MiB and four times its own size: trained weights hardly compress."""
PIECE = 2**20
NAMES, HEADER = 2**24, 10**8
"""Bytes of a pickle without the numbers in it, and of a safetensors header: this is the format's own bound."""
PLAIN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch \w+Storage|torch (Size|device)"
    r"|torch (bfloat|float|int|uint|bool)\d*"
)
"""What the pickle of a state dict is made of."""
WRAPPERS = ("model", "state_dict")
"""Where a training checkpoint keeps the weights."""


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, whose kind its first bytes tell."""
    if not file.is_file():
        raise UserError(f"{file} is not there; name a weights file or a model folder")
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
        # A safetensors file begins with the length of its header, whose bytes may look like anything.
        header = int.from_bytes(start[:8], "little")
        if start.endswith(b"{") and header < file.stat().st_size:
            if header > HEADER:
                raise UserError(f"{file} is no safetensors file: it claims {header:,} bytes of names")
            return read_safetensors(file)
        if start.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                arrays = any(name.endswith(".npy") for name in archive.namelist())
            return read_npz(file) if arrays else read_pickle(file)
        if start.startswith(b"\x80"):
            return read_pickle(file)
    except UserError as reason:
        # A name in a damaged file may hold anything, a line break too.
        raise UserError("".join(letter if letter.isprintable() else "?" for letter in str(reason))) from None
    except Exception as reason:  # what the readers raise for damaged bytes is of a dozen kinds
        raise UserError(f"{file} is damaged or not a weights file: {one_line(reason)}") from None
    raise UserError(f"{file} is not a weights file; {FILES}")


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
    """The arrays of an .npz file. Each header is checked before its numbers are read."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
            raise UserError(f"{file} is compressed as numpy never does it; save it again with numpy.savez")
        if sum(member.file_size for member in members) > ROOM + RATIO * file.stat().st_size:
            raise UserError(f"{file} claims far more numbers than a file of its size can hold; it is refused")
        arrays: dict[str, Tensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise UserError(f"{file} has {name} twice")
            with archive.open(member) as stream:
                arrays[name] = torch.from_numpy(read_array(f"{file}: {name}", stream, member.file_size))
    return arrays


def read_array(where: str, stream: IO[bytes], size: int) -> np.ndarray:
    """One array of plain floats that is exactly `size` bytes with its header."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise UserError(f"{where} is not a plain array")
    shape, columns_first, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise UserError(f"{where} holds {dtype} numbers, not weights; float16, float32 and float64 can be read")
    length = math.prod(shape) * dtype.itemsize
    if length != size - stream.tell():
        raise UserError(f"{where} claims the shape {list(shape)}, but has {size - stream.tell()} bytes")
    numbers = np.empty(length, np.uint8)
    for start in range(0, length, PIECE):
        piece = stream.read(min(PIECE, length - start))
        if len(piece) != min(PIECE, length - start):
            raise UserError(f"{where} is cut short")
        numbers[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    # The checksum is compared where a stream ends.
    if stream.read(1):
        raise UserError(f"{where} is longer than it says")
    array = numbers.view(dtype).reshape(shape, order="F" if columns_first else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def write_npz(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """As numpy.savez, one array after the other. bfloat16, which numpy does not know, is written as float32."""

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, tensor in tensors.items():
                plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, plain.contiguous().numpy(), allow_pickle=False)

    write_atomically(file, write)


# --- pickles -----------------------------------------------------------------------------------------------


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a .pth, .pt or .bin file, which may lie under `model` or `state_dict`.

    A pickle can run code when it is read. Only torch's own reader for plain tensors sees one here, and only a file in
    which nothing but plain tensors is named.
    """
    zipped = zipfile.is_zipfile(file)
    if zipped:
        check_archive(file)
    else:
        with file.open("rb") as stream:
            for _ in range(4):  # a magic number, the version, the kind of machine, the state dict
                check_pickle(file, stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of, it also refuses
            # A file of before torch 1.6 is not a zip archive and cannot be mapped into memory.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} is damaged or holds more than weights; loading it could run code, so it is refused"
        ) from None
    tensors = unwrap(content)
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(f"{file} holds no state dict: save model.state_dict()")
    return check_tensors(file, tensors)


def check_archive(file: Path) -> None:
    """torch stores its records as they are: a compressed one could grow without bound. Every checksum must fit."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise UserError(f"{file} is compressed, as torch never writes it; it is refused")
        damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{file} is damaged: the checksum of {damaged} does not fit")
        for record in records:
            if record.filename.endswith(".pkl"):
                if record.file_size > NAMES:
                    raise UserError(f"{file} has more than names and shapes beside its numbers; it is refused")
                check_pickle(file, io.BytesIO(archive.read(record)))


def check_pickle(file: Path, stream: IO[bytes]) -> None:
    """Walk through one pickle without obeying it: whom it would call, and how many numbers it claims."""
    size, start, claimed = file.stat().st_size, stream.tell(), 0
    for code, argument, place in pickletools.genops(stream):
        if code.name == "GLOBAL" and not PLAIN.fullmatch(str(argument)):
            raise more_than_weights(file, str(argument).replace(" ", "."))
        if code.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            raise more_than_weights(file, argument or "a call")
        # What stands between a mark and its use is ("storage", its type, its name, "cpu", how many numbers).
        claimed = 0 if code.name == "MARK" else max(claimed, argument if isinstance(argument, int) else 0)
        if code.name == "BINPERSID" and claimed > size:
            raise UserError(f"{file} is damaged: it claims {claimed:,} numbers, more than the file holds")
        if place is not None and place - start > NAMES:
            raise UserError(f"{file} has more than names and shapes before its numbers; it is refused")


def more_than_weights(file: Path, what: object) -> UserError:
    return UserError(f"{file} holds more than plain tensors ({what}); loading it could run code, so it is refused")


def unwrap(content: Any) -> Any:
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            return content[name]
    return content


def check_tensors(file: Path, tensors: dict[Any, Any]) -> dict[str, Tensor]:
    """Plain tensors by name, and no more numbers than the file has room for: a view can repeat one for ever."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"{file}: {name!r} is not a tensor; save model.state_dict()")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{file}: {name} is not a plain tensor")
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > file.stat().st_size:
        raise UserError(f"{file} is damaged: its tensors claim more numbers than the file holds")
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # Two names may stand for one tensor; each gets its own.
        pointer = tensor.untyped_storage().data_ptr()
        found[name] = tensor.detach().clone() if pointer in seen else tensor.detach()
        seen.add(pointer)
    return found


def write_pickle(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A part of a larger tensor is copied, for torch would write the whole."""
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format) if is_part(tensor) else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    write_atomically(file, lambda temporary: torch.save(state, temporary))


def is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
