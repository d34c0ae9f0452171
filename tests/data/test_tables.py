"""Tables: separators, quotes, headers, encodings, JSON, Parquet, and files that are not tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmlp.data import tables
from allmlp.data.tables import is_table, read_table
from allmlp.errors import UserError

ROWS = [
    {"text": 'He said "good, great"; then\tleft', "label": "1"},
    {"text": "two\nlines, one cell", "label": "0"},
    {"text": "", "label": "1"},
    {"text": "Käse 🐑 | naïve", "label": "0"},
]


def rows(file: Path, content: str | bytes) -> list[dict[str, str]]:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_table(file))


def written(separator: str, quoting: int = csv.QUOTE_MINIMAL) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, ("text", "label"), delimiter=separator, quoting=quoting)
    writer.writeheader()
    writer.writerows(ROWS)
    return buffer.getvalue()


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("separator", list(",;\t|"))
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_what_a_csv_writer_wrote(name: str, separator: str, quoting: int, tmp_path: Path) -> None:
    assert rows(tmp_path / name, written(separator, quoting)) == ROWS


@given(st.lists(st.tuples(st.text("ab \"',;\t|\n", max_size=8), st.sampled_from(["x", "y"])), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_csv_written_by_python(tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, str]]) -> None:
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    with open(file, "w", newline="") as target:
        csv.writer(target).writerows([("text", "label"), *cells])
    assert [tuple(row.values()) for row in read_table(file)] == cells


def test_bare_quotes_in_tsv_mean_nothing(tmp_path: Path) -> None:
    """As in GLUE: cells that start with a quote, end with one, or have a lone one."""
    lines = ['"A" is a film\t1', 'He said "no"\t0', '"All of it."\t1', '"never closed\t0', 'an "odd\rcell\t1']
    found = rows(tmp_path / "a.tsv", "sentence\tlabel\n" + "\n".join(lines) + "\n")
    assert [f"{row['sentence']}\t{row['label']}" for row in found] == lines


def test_doubled_quotes_in_tsv(tmp_path: Path) -> None:
    """All quotes are as a CSV writer sets them, so they are not part of the text."""
    found = rows(tmp_path / "a.tsv", 'text\tlabel\n"He said ""no""."\t1\nplain\t0\n')
    assert found == [{"text": 'He said "no".', "label": "1"}, {"text": "plain", "label": "0"}]


def test_bare_quotes_in_csv(tmp_path: Path) -> None:
    found = rows(tmp_path / "a.csv", 'text,label\na 5" pipe,1\n"A" is a film,0\n')
    assert [row["text"] for row in found] == ['a 5" pipe', '"A" is a film']


def test_spaces_between_separators_and_quotes(tmp_path: Path) -> None:
    rows = [f'{n}, "a good, film {n}", {n % 2}' for n in range(9)]
    (tmp_path / "a.csv").write_text("\n".join(["id, text, label", *rows]))
    found = read_table(tmp_path / "a.csv")
    assert found.columns == ("id", "text", "label")
    assert list(found)[3] == {"id": "3", "text": "a good, film 3", "label": "1"}


@pytest.mark.parametrize("hint", ["sep=;\n", "SEP=;\r\n", '"sep=;"\n'])
def test_the_line_in_which_excel_names_the_separator(hint: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(f"{hint}text;label\na film, good;1\na bore;0\n".encode())
    found = read_table(tmp_path / "a.csv")
    assert found.columns == ("text", "label")
    assert list(found) == [{"text": "a film, good", "label": "1"}, {"text": "a bore", "label": "0"}]
    (tmp_path / "a.csv").write_text("sep=;\ntext;label\na;1\nb;0\nc;1\nd;1;2\n")
    with pytest.raises(UserError, match="line 6: 3 columns instead of 2"):
        list(read_table(tmp_path / "a.csv"))


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    """With a comma inside quotes elsewhere, quotes count; the open one must not swallow the rest of the file."""
    with pytest.raises(UserError, match=r"a\.csv, line 6: .*end of data.*quote"):
        rows(tmp_path / "a.csv", 'text,label\n"a, b",1\n"c, d",0\n"e,1\nf,0\ng, h,1\n')


def test_a_quoted_cell_across_the_end_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SAMPLE_CHARS", 30)
    text = "each line, one comma\n" * 20  # without the quotes every line has two cells
    assert rows(tmp_path / "a.csv", f'text,label\n"ab",1\n"{text}",0\n')[1] == {"text": text, "label": "0"}


@pytest.mark.parametrize("line", ["\n", "\r\n", "\r"])
def test_line_ends_and_blank_lines(line: str, tmp_path: Path) -> None:
    content = line.join(["text\tlabel", "", "a\t1", " \t ", "b\t0", "", ""])
    assert [row["text"].strip() for row in rows(tmp_path / "a.tsv", content)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "columns", "count"),
    [
        ("good film,1\nbad film,0\n", ("column_1", "column_2"), 2),
        ("good film,pos\nbad film,neg\nfine film,pos\n", ("column_1", "column_2"), 3),
        (f"{'long ' * 20},pos\nbad,neg\n", ("column_1", "column_2"), 2),
        ("a whole sentence\nanother one\n", ("column_1",), 2),
        ("text\na comma, here\nnone here\n", ("text",), 2),
        (",text,label\n0,a,x\n1,b,y\n", ("column_1", "text", "label"), 2),
        ("text,text,label\na,b,x\n", ("text", "text_2", "label"), 1),
        ("a,a,a_2,a\nv,w,x,y\n", ("a", "a_3", "a_2", "a_4"), 1),
        ("text,label\na,x\ntext,label\nb,y\n", ("text", "label"), 2),  # two files joined by cat
        ("text,label\na b,x\ntext,y\nc d,x\n", ("text", "label"), 3),
        ("Go.,x\nA b.,y\nGo.,z\nc d,y\n", ("column_1", "column_2"), 4),
        (",0,1\n0,a,1\n1,b,0\n", ("column_1", "0", "1"), 2),
        ("0,1\n1984,x\n7 films,y\n2,x\n", ("0", "1"), 3),
        ("date,2019,2020\n2024-01-01,2019,7\n2024-01-02,,8\n", ("date", "2019", "2020"), 2),
        ("1_0,2_0\n3,4\n", ("1_0", "2_0"), 1),
        ("text,label,,\na,x,,\n", ("text", "label", "column_3", "column_4"), 1),
    ],
)
def test_headers(content: str, columns: tuple[str, ...], count: int, tmp_path: Path) -> None:
    assert len(rows(tmp_path / "a.csv", content)) == count
    table = read_table(tmp_path / "a.csv")
    assert table.columns == columns and table.header == any(name[:7] != "column_" for name in columns)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    assert rows(tmp_path / "a.csv", "text,label\nKäse 🐑,1\n".encode(encoding)) == [{"text": "Käse 🐑", "label": "1"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b" \n\n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.csv", "text,label\nKäse,1\n".encode("latin1"), r"is not UTF-8 text \(.*0xe4.*save it as UTF-8"),
        ("a.csv", b"text,label\na\0b,1\n", "line 2: a NUL character"),
        ("a.csv", b"text,label\na,1\nb\n", r"line 3: 1 columns instead of 2"),
        ("a.csv", b"text,label\na,1\nb,c,1\n", r"line 3: 3 columns instead of 2"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2: not a JSON object"),
        ("a.jsonl", b"[" * 100_000, "record 1 is not valid JSON"),
        ("a.json", b'{"data": [\n1]}', "line 1: not a JSON object"),
        ("a.json", b'[{"a": 1}, 2]', "record 2 is not a JSON object"),
        ("a.json", b'[{"a": 1}, {"a": ', "record 2 is not valid JSON"),
        ("a.json", b'[{"a": 1}', "ends within a JSON array"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "no ',' before record 2"),
        ("a.json", b"[]", "has no records"),
        ("a.csv.gz", b"text,label\n", r"cannot read .*a\.csv\.gz"),
        ("a.parquet", b"PAR1", r"cannot read .*a\.parquet"),
        ("a.txt", b"a", "is not a table: its name should end in .csv"),
    ],
)
def test_one_clear_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        rows(tmp_path / name, content)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.csv").mkdir()
    for name in ("a.csv", "a.parquet", "b.csv"):
        with pytest.raises(UserError, match="cannot read"):
            read_table(tmp_path / name)


def test_json_in_every_shape(tmp_path: Path) -> None:
    """The columns are the keys of all records; numbers, truth values, nothing and lists become text."""
    records = [{"text": "a\n[b], {c}", "n": 1, "x": 0.5}, {"text": None, "ok": True, "tags": ["ä", 2]}]
    expected = [
        {"text": "a\n[b], {c}", "n": "1", "x": "0.5", "ok": "", "tags": ""},
        {"text": "", "n": "", "x": "", "ok": "True", "tags": '["ä", 2]'},
    ]
    lines = "\n\n".join(json.dumps(record) for record in records)
    for name, content in {
        "a.jsonl": lines,
        "a.ndjson": lines,
        "a.json": json.dumps(records, indent=2),
        "b.json": json.dumps(records),
        "c.json": lines,
    }.items():
        assert rows(tmp_path / name, content) == expected, name


def test_an_array_of_many_records(tmp_path: Path) -> None:
    """Records lie across the pieces in which the file is read; one is longer than a piece."""
    records = [{"number": number, "text": "x" * (number % 97)} for number in range(5000)] + [{"text": "y" * 200_000}]
    found = rows(tmp_path / "a.json", json.dumps(records))
    assert len(found) == 5001 and found[4096] == {"number": "4096", "text": "x" * (4096 % 97)}
    assert len(found[-1]["text"]) == 200_000


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import datetime

    table = arrow.table(
        {
            "text": ["a", None, "c"],
            "label": [1, 0, 1],
            "score": [0.5, float("nan"), 2.0],
            "day": [datetime.date(2024, 5, day) for day in (1, 2, 3)],
            "image": [b"\x00", b"\x01", b"\x02"],
            "nested": [[1], [2], [3]],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = read_table(tmp_path / "a.parquet")
    assert found.columns == ("text", "label", "score", "day")
    assert list(found)[1] == {"text": "", "label": "0", "score": "", "day": "2024-05-02"}
    assert [row["text"] for row in found] == ["a", "", "c"]
    parquet.write_table(table.select(["image"]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="no columns of text"):
        read_table(tmp_path / "b.parquet")


def test_nanoseconds_in_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    second = 1_704_067_200 * 10**9
    times = [arrow.array([second + 1_500, None], arrow.timestamp("ns", zone)) for zone in (None, "UTC")]
    parquet.write_table(arrow.table(times, names=["plain", "zone"]), tmp_path / "a.parquet")
    assert list(read_table(tmp_path / "a.parquet")) == [
        {"plain": "2024-01-01 00:00:00.000001", "zone": "2024-01-01 00:00:00.000001+00:00"},
        {"plain": "", "zone": ""},
    ]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed(suffix: str, tmp_path: Path) -> None:
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix)
    if pack is None:
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
    assert rows(tmp_path / f"a.csv{suffix}", pack(written(",").encode())) == ROWS
    assert rows(tmp_path / f"a.jsonl{suffix}", pack(b'{"a": 1}\n')) == [{"a": "1"}]


def test_long_texts_that_mention_times(tmp_path: Path) -> None:
    """They are not searched for times, which would take longer than the time limit of a test."""
    text = "at 12:30 in 2024, " * 20_000
    assert [row["label"] for row in rows(tmp_path / "a.csv", f'text,label\n"{text}",1\n"{text}",0\n')] == ["1", "0"]


def test_names() -> None:
    assert all(map(is_table, ["a.csv", "A.TSV", "b.c.jsonl.gz", "s3://b/x.parquet", Path("x.json.zst"), "y.ndjson"]))
    assert not any(map(is_table, ["a.txt", "a.gz", "csv", "a.jpg", "a.csv.zip", "a.tar.gz"]))


def test_memory_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB of rows are read with less than half a megabyte."""
    monkeypatch.setattr(tables, "SAMPLE_CHARS", 2**12)
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + f"{'word ' * 200},1\n" * 4000)
    tracemalloc.start()
    count = sum(1 for _ in read_table(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000 and peak < 2**19
