"""Documents from files of all supported formats."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from allmlp.data import text_files
from allmlp.data.corpus import Corpus
from allmlp.data.detect import detect_data
from allmlp.data.text_files import find_files, leave_out, read_documents
from allmlp.errors import UserError

HELLO = "\u05e9\u05dc\u05d5\u05dd 🐑"
PROSE = f"One sheep.\nTwo sheep.\n\n\n  \nRed fish.\n\n{HELLO}\n"
PARAGRAPHS = ["One sheep.\nTwo sheep.", "Red fish.", HELLO]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.xz", ""])
def test_paragraphs_lines_and_whole_files(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"prose{suffix}"
    packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)(PROSE.encode())
    file.write_bytes(packed)
    assert list(read_documents([str(file)])) == PARAGRAPHS
    assert list(read_documents([str(file)], "line")) == ["One sheep.", "Two sheep.", "Red fish.", HELLO]
    assert list(read_documents([str(file)], "document")) == [PROSE.strip()]


def test_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "prose.txt.zst").write_bytes(zstandard.compress(PROSE.encode()))
    assert list(read_documents([str(tmp_path / "prose.txt.zst")])) == PARAGRAPHS


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prose.jsonl"
    file.write_text("\n".join(json.dumps({"text": paragraph, "id": 1}) for paragraph in PARAGRAPHS) + "\n\n")
    assert list(read_documents([str(file)])) == PARAGRAPHS
    with pytest.raises(UserError, match=r"line 1: not a JSON object with a 'body'"):
        list(read_documents([str(file)], text_field="body"))
    with pytest.raises(UserError, match="'id' is not text"):
        list(read_documents([str(file)], text_field="id"))
    file.write_text("{")
    with pytest.raises(UserError, match="line 1: not a JSON object"):
        list(read_documents([str(file)]))


@pytest.mark.parametrize("name", ["a.ndjson", "A.JSONL", "a.json"])
def test_json_of_other_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n".join(["", *(json.dumps({"text": paragraph}) for paragraph in PARAGRAPHS)]))
    assert list(read_documents([str(tmp_path / name)])) == PARAGRAPHS
    with pytest.raises(UserError, match=r"line 2: not a JSON object with a 'body'"):
        list(read_documents([str(tmp_path / name)], text_field="body"))


@pytest.mark.parametrize("indent", [None, 1])
def test_json_arrays(indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PEEKED_CHARS", 5)
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": text, "id": 1} for text in (*PARAGRAPHS, " ")], indent=indent))
    assert list(read_documents([str(file)])) == PARAGRAPHS
    with pytest.raises(UserError, match=r"record 1: 'id' is not text"):
        list(read_documents([str(file)], text_field="id"))


def test_text_in_utf16(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(PARAGRAPHS), encoding="utf-16")
    assert list(read_documents([str(tmp_path / "a.txt")])) == PARAGRAPHS
    assert detect_data(str(tmp_path / "a.txt")) == Corpus(str(tmp_path / "a.txt"))


def test_the_suffix_of_a_compression_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress("\n\n".join(PARAGRAPHS).encode()))
    assert list(read_documents([str(tmp_path / "A.TXT.GZ")])) == PARAGRAPHS


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "prose.parquet")
    parquet.write_table(pyarrow.table({"text": [*PARAGRAPHS, None, " "]}), file)
    assert list(read_documents([file])) == PARAGRAPHS
    with pytest.raises(UserError, match="no column 'body', only text"):
        list(read_documents([file], text_field="body"))
    parquet.write_table(pyarrow.table({"text": [1, 2]}), file)
    with pytest.raises(UserError, match=r"prose\.parquet, row 1: 'text' is not text"):
        list(read_documents([file]))


def test_another_encoding_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every umlaut was lost without a word."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes("Zwei Männer grüßen sich auf der Straße.\n".encode("latin-1"))
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert len(list(read_documents(files))) == 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{files[0]} is not UTF-8 text"]
    caplog.clear()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "c.txt").write_bytes(b"one bad byte \xff" + b" in a long text" * 100)
    (tmp_path / "new" / "d.txt").write_text("ä" * 2**16)  # of which a part is looked at, up to the middle of a letter
    assert len(list(read_documents([str(tmp_path / "new" / name) for name in ("c.txt", "d.txt")]))) == 2
    assert not caplog.records


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xff\xfe bad\n\nnext")
    assert list(read_documents([str(tmp_path / "a.txt")])) == ["good \ufffd\ufffd bad", "next"]
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"words " * 1000)[:60])
    with pytest.raises(UserError, match=r"cannot read .*b\.txt\.xz"):
        list(read_documents([str(tmp_path / "b.txt.xz")]))
    (tmp_path / "photo").write_bytes(b"\x89PNG\r\n\0\0")
    with pytest.raises(UserError, match="photo is not text"):
        list(read_documents([str(tmp_path / "photo")]))


def test_lines_without_end_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_CHARS", 100)
    file = tmp_path / "long.txt"
    file.write_text("word " * 100 + "\n\nend\n")
    found = list(read_documents([str(file)]))
    assert max(map(len, found)) <= 100 and " ".join(found).split() == ["word"] * 100 + ["end"]
    assert max(map(len, read_documents([str(file)], "line"))) <= 100


def test_finding_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = ["a.txt", "b.txt", "sub/c.txt"]
    assert find_files(str(tmp_path)) == [str(tmp_path / name) for name in names]
    assert find_files(str(tmp_path / "*.txt")) == [str(tmp_path / name) for name in names[:2]]
    assert find_files(f"{tmp_path / 'b.txt'}, {tmp_path / 'a.txt'}") == [
        str(tmp_path / "b.txt"),
        str(tmp_path / "a.txt"),
    ]
    with pytest.raises(UserError, match="no text files at"):
        find_files(str(tmp_path / "nothing.txt"))
    with pytest.raises(UserError, match=r"no text to read: set data\.path"):
        find_files(" , ")


def test_hidden_files_are_not_found(tmp_path: Path) -> None:
    """Also those in hidden folders, such as the copies that notebooks keep; unless the pattern names them."""
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "more/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    wanted = [str(tmp_path / "a.txt"), str(tmp_path / "more" / "c.txt")]
    assert find_files(str(tmp_path)) == find_files(f"{tmp_path}/**/*.txt") == wanted
    assert find_files(f"{tmp_path}/.ipynb*/*.txt") == [str(tmp_path / ".ipynb_checkpoints" / "a.txt")]


def test_files_about_the_texts_are_left_out(tmp_path: Path) -> None:
    """README and LICENSE in a folder, with a note; not if they are named, or all there is."""
    for name in ("a.txt", "readme_first.txt", "README.md", "sub/LICENSE.txt", "sub/license_plates.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(f"text {line} of {name}\n\n" for line in range(50)))
    texts = [str(tmp_path / name) for name in ("a.txt", "sub/license_plates.txt")]
    others = ["readme_first.txt", "LICENSE.txt"]
    pattern, readme = f"{tmp_path}/**/*.txt", str(tmp_path / "README.md")
    assert leave_out(find_files(pattern), pattern) == (texts, others)
    assert leave_out(find_files(str(tmp_path)), str(tmp_path))[0] == texts
    assert leave_out([readme], readme) == leave_out([readme], f"{tmp_path}/*.md") == ([readme], [])
    assert leave_out([readme, *texts], f"{readme}, {pattern}") == ([readme, *texts], [])
    data = detect_data(str(tmp_path))
    assert isinstance(data, Corpus)
    loaded = data.replace(cache=str(tmp_path / "cache"), test_fraction=0.3).load()
    assert loaded.notes == ("2 files are not read as text unless named: readme_first.txt, LICENSE.txt",)
    assert "readme" not in loaded.tokenizer.to_json()


def test_urls(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://texts/a.txt.gz", "wb") as file:
        file.write(gzip.compress(PROSE.encode()))
    files = find_files("memory://texts/*.gz")
    assert list(read_documents(files)) == PARAGRAPHS
