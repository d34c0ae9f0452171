"""Streaming of the records of a JSON array."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from allmlp.errors import UserError

MAX_CHARS = 2**24
"""A longer record is an error, and so is a longer line or cell of a table."""


def json_array(text: IO[str], file: str, buffer: str = "") -> Iterator[dict[str, Any]]:
    """Yield the objects of an array without reading all of it into memory; `buffer` is the part already read."""
    decoder, number, size = json.JSONDecoder(), 0, 2**16
    mark = "["
    while True:
        buffer = buffer.lstrip()
        if not buffer and not (buffer := text.read(size)):
            raise UserError(f"{file} ends within a JSON array")
        if not (buffer := buffer.lstrip()):
            continue
        if buffer[0] == "]" and mark != "[":
            return
        if mark:
            if buffer[0] != mark:
                raise UserError(f"{file}: no {mark!r} before record {number + 1} of a JSON array")
            buffer, mark = buffer[1:], ""
            continue
        try:
            record, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError):
            more = text.read(max(len(buffer), size)) if len(buffer) <= MAX_CHARS else ""
            if not more:
                raise UserError(f"{file}: record {number + 1} is not valid JSON") from None
            buffer += more
            continue
        number += 1
        if not isinstance(record, dict):
            raise UserError(f"{file}: record {number} is not a JSON object")
        yield record
        buffer, mark = buffer[end:], ","
