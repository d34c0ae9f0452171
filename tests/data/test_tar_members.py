"""Files of tar archives: the same as tarfile finds, whatever else is in the archive."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from allmlp.data import tar_members
from allmlp.data.tar_members import members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def archive(format: int, **options: Any) -> bytes:
    """An archive with all that a header can say."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=format, **options) as tar:

        def add(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: Any) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, size
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(bytes(range(256)) * 5))

        add("folder/", kind=tarfile.DIRTYPE)
        add("folder", kind=tarfile.DIRTYPE)
        for size in (0, 1, 511, 512, 513, 1100):
            add(f"./folder/{size}.jpg", size)
        add("old", 3, tarfile.AREGTYPE)
        add("old/", kind=tarfile.AREGTYPE)
        add("link", kind=tarfile.SYMTYPE, linkname="folder/1.jpg")
        add("hard.jpg", kind=tarfile.LNKTYPE, linkname="folder/1.jpg")
        add("pipe", kind=tarfile.FIFOTYPE)
        add("caf\u00e9 \u4e2d \udce9.jpg", 7)
        add(f"{'long' * 30}/{'n' * 60}.jpg", 5)
        if format != tarfile.USTAR_FORMAT:
            add(f"{'x' * 300}.jpg", 6)
            add("large owner", 9, uid=2**40 if format == tarfile.GNU_FORMAT else 2**20)
        if format == tarfile.PAX_FORMAT:
            add("when", 10, mtime=1.5)
            add("short", 10, pax_headers={"path": "replaced.jpg"})
            add("comment", 11, pax_headers={"comment": "c" * 600})
        add("last", 12)
    return content.getvalue()


@pytest.mark.parametrize("format", FORMATS)
def test_members_are_those_of_tarfile(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"pax_headers": {"comment": "of all"}} if format == "pax" else {}
    content = archive(FORMATS[format], **options)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(one.name, one.offset_data, one.size) for one in tar if one.isfile()]
    assert [*members(io.BytesIO(content))] == expected and len(expected) >= 10
    with monkeypatch.context() as patch:
        patch.setattr(tar_members, "plain_size", lambda header: None)
        assert [*members(io.BytesIO(content))] == expected


def test_usual_members_do_not_need_tarfile(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size, info.mtime = 5, 1.5 if number else 0
            tar.addfile(info, io.BytesIO(b"12345"))
    opened = []
    taropen = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **options: (opened.append(1), taropen(**options))[1])
    assert [one.name for one in members(content)] == ["0.jpg", "1.jpg", "2.jpg"] and len(opened) == 1  # at the end


def test_damaged_archives() -> None:
    content = archive(tarfile.GNU_FORMAT)
    ends = {one.offset + one.size for one in members(io.BytesIO(content))}
    for end in (0, 100, 512, 700, *ends, 2048):
        with pytest.raises(tarfile.TarError):
            list(members(io.BytesIO(content[:end])))
    with pytest.raises(tarfile.TarError, match="truncated or damaged at byte 1,024"):
        list(members(io.BytesIO(content[:1024] + b"\x01" + content[1025:])))
    negative = tarfile.TarInfo("endless.jpg").tobuf(tarfile.GNU_FORMAT)
    for size in (-1024, -512):
        info = tarfile.TarInfo("endless.jpg")
        info.size = size
        with pytest.raises(tarfile.TarError):
            list(members(io.BytesIO(negative + info.tobuf(tarfile.GNU_FORMAT))))
