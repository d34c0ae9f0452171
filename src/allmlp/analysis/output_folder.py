"""The files of an analysis: figures as PNG and SVG, numbers as CSV and JSON, and analysis.json, which lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from allmlp.analysis.figures import save
from allmlp.errors import writing
from allmlp.files import make_writable, write_atomically, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

INDEX = "analysis.json"
SUFFIXES = (".png", ".svg", ".csv", ".json")


class Section(NamedTuple):
    """One part of an analysis."""

    name: str
    text: str
    """The result in one line, or why the section was skipped."""
    files: tuple[str, ...] = ()
    """Empty for a skipped section."""


class OutputFolder:
    """Writes files atomically into one folder; `close` removes those that an earlier analysis left there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        self.listed = 0
        with writing(f"the analysis to {folder}"):
            make_writable(folder)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], about: str) -> None:
        """NAME.csv and NAME.json with the same rows; floats have six digits, missing values are empty or null."""
        plain = [[round_off(value) for value in row] for row in rows]
        lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in plain)
        head = f'{{"about": {json.dumps(about)},\n "columns": {json.dumps(list(columns))},\n'
        self.write(f"{name}.csv", lambda file: write_csv(file, columns, plain))
        self.write(f"{name}.json", lambda file: file.write_text(f'{head} "rows": [\n  {lines}]}}\n', encoding="utf8"))

    def figure(self, name: str, figure: Figure) -> None:
        """NAME.png and NAME.svg."""
        for kind in ("png", "svg"):
            self.write(f"{name}.{kind}", partial(save, figure, kind=kind))

    def section(self, name: str, text: str) -> Section:
        """A section with every file written since the previous one."""
        files, self.listed = tuple(self.files[self.listed :]), len(self.files)
        return Section(name, text, files)

    def close(self, summary: dict[str, Any]) -> None:
        """Write the index, then remove the files that only the previous index lists."""
        before = self.previous_files()
        text = json.dumps({**summary, "files": self.files}, indent=2) + "\n"
        self.write(INDEX, lambda file: file.write_text(text, encoding="utf8"))
        for name in before - set(self.files):
            (self.folder / name).unlink(missing_ok=True)

    def previous_files(self) -> set[str]:
        try:
            names = json.loads((self.folder / INDEX).read_text(encoding="utf8"))["files"]
            return {name for name in names if Path(name).name == name and Path(name).suffix in SUFFIXES}
        except (OSError, ValueError, TypeError, KeyError):
            return set()

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        with writing(self.folder / name):
            write_atomically(self.folder / name, fill)
        if name != INDEX:
            self.files.append(name)


def cells(matrix: Tensor) -> Iterator[tuple[int, int, float]]:
    """Row, column and value of every entry, for a table."""
    for row, line in enumerate(matrix.tolist()):
        for column, value in enumerate(line):
            yield row, column, value


def round_off(value: Any) -> Any:
    """Six digits of a float; None for NaN and infinity, which a diverged model has."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
