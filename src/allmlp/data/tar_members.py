"""The files in a tar archive, listed by their headers.

tarfile takes several times as long per header, and keeps all members in memory. Here it reads only unusual headers:
long names, sparse files, large numbers.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

BLOCK = 512
FILES, FOLDER, EXTENDED = (b"0", b"\0"), b"5", b"x"
REPLACES_HEADER = re.compile(rb"(path|size|GNU\.[^=]*)=")
"""In an extended header, whose only content often is a time with fractions of a second."""


class Member(NamedTuple):
    """A file."""

    name: str
    offset: int
    """Of its first byte."""
    size: int


def members(file: IO[bytes]) -> Iterator[Member]:
    """The files of an archive, in order; raises tarfile.TarError if it is truncated or damaged."""
    place = 0
    while True:
        file.seek(place)
        header = file.read(BLOCK)
        size, kind, name = plain_size(header), header[156:157], full_name(header)
        if size is not None and kind in FILES and not name.endswith("/"):
            yield Member(name, place + BLOCK, size)
            place += BLOCK + padded(size)
        elif size is not None and kind == FOLDER:
            place += BLOCK
        elif size is not None and kind == EXTENDED and size <= BLOCK and not REPLACES_HEADER.search(file.read(size)):
            place += BLOCK + padded(size)
        else:
            file.seek(place)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                member, after = tar.next(), tar.offset
            if member is None or after <= place:
                # tarfile treats a damaged header as the end of the archive, which is a block of zeros.
                if header != bytes(BLOCK):
                    raise tarfile.ReadError(f"truncated or damaged at byte {place:,}")
                return
            if member.isfile():
                yield Member(member.name, member.offset_data, member.size)
            place = after


def plain_size(header: bytes) -> int | None:
    """The size in a header; None if it is not a plain number, or if the checksum is wrong."""
    try:
        size, checksum = int(header[124:136].rstrip(b"\0 "), 8), int(header[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    is_whole = len(header) == BLOCK and sum(header) - sum(header[148:156]) + 8 * ord(" ") == checksum
    return size if is_whole and size >= 0 else None


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def full_name(header: bytes) -> str:
    name, prefix = text(header[:100]), text(header[345:500])
    return f"{prefix}/{name}" if prefix else name


def text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(tarfile.ENCODING, "surrogateescape")
