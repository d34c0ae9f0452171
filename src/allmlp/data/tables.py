"""Tables with cells of text: CSV, TSV, JSON lines, a JSON array, Parquet; local or at any fsspec URL.

Rows are read one after another, so that a table of any size needs little memory. Text is UTF-8 (or UTF-16 with a byte
order mark) and may be compressed (.gz, .xz, .zst).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from allmlp.data.frequency import is_time
from allmlp.data.text_files import JSON_SUFFIXES, MAX_RECORD_CHARS, json_array, open_parquet, open_text, parse_object
from allmlp.errors import UserError, one_line, require

COMPRESSED = (".gz", ".xz", ".zst")
SEPARATORS = {".csv": ",;\t|", ".tsv": "\t,;|"}
TABLE_SUFFIXES = (*SEPARATORS, *JSON_SUFFIXES, ".parquet")
SAMPLE_CHARS = 2**20
"""Separator, quotes and header are found in this much of a file."""
SAMPLE_RECORDS = 1000
"""The columns of JSON are the keys of this many records."""
NO_SEPARATOR = "\x1f"
"""Separator of a table with one column: a character that no text has."""
COMMA_NUMBER = re.compile(r"\s*[+-]?[$€£¥]?(\d+|\d{1,3}([. \xa0\u202f]\d{3})+)(,\d+)?[ \xa0\u202f]?[%$€£¥]?\s*")
"""A number as it is written with decimal commas: 1.234,56, 1 234,56 or 12,50 €."""
THOUSANDS = re.compile(r"\s*[+-]?[$€£¥]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?[ \xa0]?[%$€£¥]?\s*")
CLEARLY_THOUSANDS = re.compile(r".*(,.*,|\.|[$€£¥])")
"""Several groups, a decimal point, or money, which has no three decimals."""
SEPARATOR_HINT = re.compile(r'\A"?sep=."?(\r?\n|\r|\Z)', re.IGNORECASE)
MAX_NAME = 64
"""A longer first cell is not the name of a column."""
COMPARED_CELLS = 50
"""Cells of a column that are compared with its first one."""
MISSING = ("", "nan", "na", "n/a", "#n/a", "null", "none", "-", "--", ".", "?")

csv.field_size_limit(MAX_RECORD_CHARS)

TableRow = dict[str, str]


class Table:
    """Rows of a file. Every iteration reads the file again; missing values are empty strings."""

    def __init__(
        self,
        file: str,
        columns: tuple[str, ...],
        rows: Callable[[], Iterator[TableRow]],
        header: bool = True,
        decimal_comma: bool = False,
    ):
        self.file, self.columns, self.rows = file, columns, rows
        self.header = header
        """Whether the file names its columns; if not, they are called column_1, column_2, ..."""
        self.decimal_comma = decimal_comma
        """Whether some numbers are written as 1,5 or 1.234,5."""

    def __iter__(self) -> Iterator[TableRow]:
        return self.rows()


def is_table(path: str | Path) -> bool:
    """Whether a file is a table by its name."""
    return table_suffix(path) in TABLE_SUFFIXES


def table_suffix(path: str | Path) -> str:
    """Suffix in lower case, ignoring one of compression."""
    name = PurePosixPath(str(path).lower())
    return PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def read_table(file: str | Path, nested: Collection[str] = ()) -> Table:
    """Open a table of any format. Columns are known at once, rows are read by iterating. Lists and objects are read as
    JSON; those of a Parquet file, which may hold features or images, only in the columns `nested`.
    """
    file, suffix = str(file), table_suffix(file)
    if suffix not in TABLE_SUFFIXES:
        raise UserError(f"{file} is not a table: its name should end in {', '.join(TABLE_SUFFIXES)}")
    if suffix == ".parquet":
        return read_parquet(file, nested)
    return read_json(file) if suffix in JSON_SUFFIXES else read_separated(file, SEPARATORS[suffix])


@contextmanager
def open_strictly(file: str, newline: str) -> Iterator[IO[str]]:
    """Open a text file; UserError while reading if it is not text."""
    try:
        with open_text(file, newline, "strict") as text:
            yield text
    except UnicodeError as reason:
        raise UserError(f"{file} is not UTF-8 text ({one_line(reason)}): save it as UTF-8") from None


def read_lines(text: IO[str], file: str) -> Iterator[str]:
    """Lines with their ends."""
    for number, line in enumerate(iter(lambda: text.readline(MAX_RECORD_CHARS + 1), ""), 1):
        if len(line) > MAX_RECORD_CHARS:
            raise UserError(f"{file}, line {number}: more than {MAX_RECORD_CHARS:,} characters in a line")
        if "\0" in line:
            raise UserError(f"{file}, line {number}: a NUL character; the file is damaged or not text")
        yield line if number > 1 else without_hint(line)


def without_hint(text: str) -> str:
    """Text without Excel's first line such as sep=; the line stays, blank, to keep the line numbers."""
    return SEPARATOR_HINT.sub(r"\1", text)


def read_sample(file: str) -> tuple[str, bool]:
    """The start of a file, up to the end of a line, and whether it is the whole file."""
    with open_strictly(file, "") as text:
        sample = text.read(SAMPLE_CHARS)
        if not sample.strip():
            raise UserError(f"{file} is empty")
        return without_hint(sample) + text.readline(MAX_RECORD_CHARS), not text.read(1)


# --- CSV and TSV ----------------------------------------------------------------------------------------


class CellFormat(NamedTuple):
    """Format of lines: how they are split into cells."""

    separator: str
    quoted: bool
    newline: str = ""
    """As for `open`; quoted cells may contain line ends of any kind."""
    spaced: bool = False
    """Whether quotes may follow a space: 1, "a, b" has two cells."""


def read_separated(file: str, separators: str) -> Table:
    cell_format, sample = sniff(file, separators)
    header = has_header(sample)
    names = [" ".join(name.split()) if header else "" for name in sample[0]]
    columns = tuple(unique([name or f"column_{number}" for number, name in enumerate(names, 1)]))

    def rows() -> Iterator[TableRow]:
        with open_strictly(file, cell_format.newline) as text:
            numbered_rows = split_cells(read_lines(text, file), cell_format, file)
            for number, cells in numbered_rows:
                if header and cells == sample[0]:  # also further down, where files were joined
                    continue
                if len(cells) != len(columns):
                    while len(cells) > len(columns) and not cells[-1]:
                        cells.pop()
                    if len(cells) != len(columns):
                        raise UserError(f"{file}, line {number}: {len(cells)} columns instead of {len(columns)}")
                yield dict(zip(columns, cells))

    return Table(file, columns, rows, header, has_decimal_commas(cell_format.separator, sample))


def split_cells(lines: Iterable[str], cell_format: CellFormat, file: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank."""
    if not cell_format.quoted:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line.rstrip("\r\n").split(cell_format.separator)
        return
    reader = csv.reader(lines, delimiter=cell_format.separator, strict=True, skipinitialspace=cell_format.spaced)
    try:
        for cells in reader:
            if "".join(cells).strip():
                yield reader.line_num, cells
    except csv.Error as reason:
        raise UserError(
            f"{file}, line {reader.line_num}: {reason}; a quote inside quotes must be doubled, and the cell closed"
        ) from None


def sniff(file: str, separators: str) -> tuple[CellFormat, list[list[str]]]:
    """The format in which most rows at the start of a file have as many cells as the first one, and these rows.

    If these are fewer than half in every format, the table has one column. Among equals, the first separator and quotes
    win. In files with tabs, quotes often have no meaning (GLUE); they win only if placed as by a CSV writer.
    """
    text, whole = read_sample(file)
    newline = "\n" if "\n" in text else "\r"
    best, fraction, chosen = CellFormat(NO_SEPARATOR, False, newline), 0.0, list[list[str]]()
    for separator in (*separators, NO_SEPARATOR):
        if fraction == 1 or (separator == NO_SEPARATOR and chosen):
            break
        formats = [CellFormat(separator, True), CellFormat(separator, False, newline)]
        parsed = [parse_sample(text, cell_format, file, whole) for cell_format in formats]
        if separator == "\t" and not writes_quotes(parsed[1][0]):
            formats, parsed = formats[::-1], parsed[::-1]
        if f'{separator} "' in text:
            formats.append(CellFormat(separator, True, spaced=True))
            parsed.append(parse_sample(text, formats[-1], file, whole))
        for cell_format, (rows, failed) in zip(formats, parsed):
            if rows and (len(rows[0]) > 1 or separator == NO_SEPARATOR):
                equal = sum(len(row) == len(rows[0]) for row in rows) / (len(rows) + failed)
                if equal > fraction and equal >= 0.5:
                    best, fraction, chosen = cell_format, equal, rows
    if not chosen:
        raise UserError(f"{file} is not a table: its first line has no columns")
    return best, chosen


def parse_sample(text: str, cell_format: CellFormat, file: str, whole: bool) -> tuple[list[list[str]], bool]:
    """Rows up to the first one that does not fit the format, and whether there is such a row."""
    rows: list[list[str]] = []
    try:
        for _, cells in split_cells(io.StringIO(text, newline=cell_format.newline), cell_format, file):
            rows.append(cells)
    except UserError as reason:
        return rows, whole or "unexpected end" not in str(reason)  # a quoted cell may go on after the sample
    return rows, False


def writes_quotes(rows: list[list[str]]) -> bool:
    """Whether cells split without regard to quotes look as if written by a CSV writer.

    That is, every cell with a quote is enclosed in quotes, and some cell has doubled quotes inside or all cells of its
    column are enclosed.
    """
    inner = [
        cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else '"'
        for row in rows
        for cell in row
        if '"' in cell
    ]
    if any('"' in cell.replace('""', "") for cell in inner):
        return False
    return any('""' in cell for cell in inner) or any(all('"' in cell for cell in column) for column in zip(*rows[1:]))


def has_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: its cells are short, not numbers, and do not occur below.

    Numbers are names too if they count from 0 (as those of a data frame without names) above words, or are beside a
    word above numbers or times.
    """
    first, below = rows[0], [row for row in rows[1:] if row != rows[0]]
    if any(len(cell) > MAX_NAME for cell in first) or (len(first) == 1 and " " in first[0].strip()):
        return False
    columns = [[row[place] for row in below if len(row) > place and row[place].strip()] for place in range(len(first))]
    named = [(cell, column) for cell, column in zip(first, columns) if cell.strip() and column]
    if any(not is_value(cell) and all(map(is_value, column[:COMPARED_CELLS])) for cell, column in named):
        return True
    counted = [cell for cell in first if cell.strip()] == [str(number) for number in range(len(named))]
    if counted and any(not any(map(is_number, column)) for _, column in named):
        return True
    repeated = any(cell in column and not is_title(cell, column) for cell, column in named)
    return not repeated and not any(map(is_number, first))


def has_decimal_commas(separator: str, rows: list[list[str]]) -> bool:
    """Whether commas in numbers are decimal ones. 1,234 may be either: thousands, unless semicolons separate the cells,
    and wherever 1,234.5, 1,234,567 or $1,234 is in the table.
    """
    marked = [cell for row in rows for cell in row if "," in cell] if separator != "," else []
    grouped = list(filter(THOUSANDS.fullmatch, marked))
    if any(map(CLEARLY_THOUSANDS.match, grouped)):
        return False
    decimal = sum(map(bool, map(COMMA_NUMBER.fullmatch, marked)))
    return decimal > (0 if separator == ";" else len(grouped))


def is_value(cell: str) -> bool:
    """Whether a cell is a number, a time or missing."""
    return is_number(cell) or cell.strip().casefold() in MISSING or is_time(cell)


def is_title(cell: str, column: Sequence[str]) -> bool:
    """Whether a cell is a name such as text above cells most of which have several words."""
    return cell.isidentifier() and cell.islower() and 2 * sum(" " in other.strip() for other in column) > len(column)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return any(map(str.isdigit, text)) and "_" not in text


def unique(names: Sequence[str]) -> Iterator[str]:
    """Make names unique by appending a number to repeated ones."""
    taken, seen = set(names), set[str]()
    for name in names:
        unique_name = name if name not in seen else next(new for i in count(2) if (new := f"{name}_{i}") not in taken)
        taken.add(unique_name)
        seen.add(name)
        yield unique_name


def test_names(files: Sequence[str]) -> tuple[str, ...]:
    """Names of test files, up to the first dot. Metrics of the first have no name, those of the others differ."""
    first, *others = (Path(file).name.partition(".")[0] for file in files)
    return first, *unique(others)


# --- JSON -----------------------------------------------------------------------------------------------


def read_json(file: str) -> Table:
    sample, _ = read_sample(file)
    read_records = json_array if sample.lstrip().startswith("[") else json_lines

    def records() -> Iterator[dict[str, Any]]:
        with open_strictly(file, "\n") as text:
            yield from read_records(text, file)

    columns = tuple(dict.fromkeys(name for record in islice(records(), SAMPLE_RECORDS) for name in record))
    if not columns:
        raise UserError(f"{file} has no records with columns")
    return Table(file, columns, lambda: ({name: as_text(row.get(name)) for name in columns} for row in records()))


def json_lines(text: IO[str], file: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_lines(text, file), 1):
        if line.strip():
            record = parse_object(line)
            if not isinstance(record, dict):
                raise UserError(f"{file}, line {number}: not a JSON object; a table has one per line or a list of them")
            yield record


def as_text(value: Any) -> str:
    """A value as cell text: None and NaN are empty, lists and objects are JSON."""
    if value is None or value != value:  # noqa: PLR0124
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


# --- Parquet --------------------------------------------------------------------------------------------


def read_parquet(file: str, nested: Collection[str] = ()) -> Table:
    """Read columns of text, numbers, dates and booleans; binary columns and other nested ones are skipped."""
    arrow = require("pyarrow", "parquet")
    types = arrow.types

    def to_microseconds(column: Any) -> Any:
        """Times without nanoseconds, which Python has not."""
        nanoseconds = types.is_timestamp(column.type) and column.type.unit == "ns"
        return column.cast(arrow.timestamp("us", column.type.tz), safe=False) if nanoseconds else column

    with open_parquet(file) as parquet:
        kinds = {field.name: field.type for field in parquet.schema_arrow}
    skipped = (types.is_nested, types.is_binary, types.is_large_binary)
    columns = [name for name, kind in kinds.items() if name in nested or not any(skip(kind) for skip in skipped)]
    if not columns:
        raise UserError(f"{file} has no columns of text or numbers")

    def rows() -> Iterator[TableRow]:
        with open_parquet(file) as parquet:
            for batch in parquet.iter_batches(1024, columns=columns):
                for values in zip(*(to_microseconds(column).to_pylist() for column in batch.columns)):
                    yield dict(zip(columns, map(as_text, values)))

    return Table(file, tuple(columns), rows)
