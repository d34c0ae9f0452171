"""Answers and features as files: CSV, JSON lines, Parquet, .npy, and folders of Parquet parts.

A file is written completely or not at all. A folder is filled part by part, by any number of processes; a repeated call
continues with the missing parts.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allmlp.errors import UserError, one_line, require
from allmlp.files import encodable, finite, write_atomically
from allmlp.prediction.answers import Prediction
from allmlp.prediction.inputs import Item
from allmlp.prediction.stream import Answer, chunks

Record = dict[str, Any]
FEATURES = "features"
"""The column of a Parquet file of features."""
ROW_GROUP = 10_000
"""Rows that are written to a Parquet file together."""
SETTINGS, INPUTS = b"allmlp.settings", b"allmlp.inputs"
"""Metadata of a part: its settings, and a checksum of the names of its inputs."""


class AnswerTable(NamedTuple):
    """Conversion of predictions to rows: input, kept columns, label, probability, label_2, probability_2, ..., error.

    The answer of a regression is a column per value. With `probabilities`, a column per class has its probability. A
    kept column with the name of one of these is `input_NAME`. An answer that is less probable than `threshold` has no
    label.
    """

    labels: tuple[str, ...]
    """Names of classes or values, as far as known."""
    is_regression: bool
    top_k: int
    keep: tuple[str, ...] = ()
    threshold: float = 0.0
    probabilities: bool = False

    @property
    def columns(self) -> dict[str, type]:
        answer: dict[str, type] = {}
        if self.is_regression:
            answer = dict.fromkeys(self.labels, float)
        for number in () if self.is_regression else range(1, self.top_k + 1):
            answer |= {ranked("label", number): str, ranked("probability", number): float}
        if self.probabilities:
            answer |= {f"p({label})": float for label in self.labels}
        return {"input": str, **dict.fromkeys(map(self.kept_name, self.keep), str), **answer, "error": str}

    def kept_name(self, column: str) -> str:
        numbers = self.labels if self.is_regression else (f"p({label})" for label in self.labels if self.probabilities)
        return f"input_{column}" if column in numbers else column

    def start(self, answer: Answer) -> Record:
        """Cells before the answer."""
        return {
            "input": encodable(answer.item.name),
            **{self.kept_name(name): encodable(cell) for name, cell in answer.item.columns.items()},
        }

    def records(self, answer: Answer) -> Iterator[Record]:
        start = self.start(answer)
        if answer.error:
            yield {**start, "error": encodable(answer.error)}
        for row in answer.value or ():
            record: Record = dict(start)
            if self.is_regression:
                record |= {one.label: one.value for one in row}
            else:
                for number, one in enumerate(row[: self.top_k], 1):
                    record |= {ranked("label", number): one.label, ranked("probability", number): one.probability}
                record["label"] = self.label(row)
            if self.probabilities:
                record |= {f"p({name})": probability for name, probability in by_name(row).items()}
            yield record

    def label(self, row: list[Any]) -> str | None:
        """The best prediction, or None if it is not probable enough or there is none."""
        if not row:
            return None
        probability = row[0].probability
        return row[0].label if probability is None or probability >= self.threshold else None

    def objects(self, answer: Answer) -> Iterator[Record]:
        """The same for JSON, with predictions as a list."""
        start = self.start(answer)
        if answer.error:
            yield {**start, "error": encodable(answer.error)}
        for row in answer.value or ():
            label = {} if self.is_regression else {"label": self.label(row)}
            best = row if self.is_regression else row[: self.top_k]
            more = {"probabilities": by_name(row)} if self.probabilities else {}
            yield {**start, **label, "predictions": [one.to_json() for one in best], **more}


def by_name(row: list[Prediction]) -> dict[str, float]:
    """Probabilities by class; those of classes with one name, such as the two cranes of ImageNet, are added up."""
    probabilities: dict[str, float] = {}
    for prediction in row:
        probabilities[prediction.label] = probabilities.get(prediction.label, 0.0) + (prediction.probability or 0.0)
    return probabilities


def ranked(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


# --- one file -----------------------------------------------------------------------------------------------


def write_answers(file: Path, table: AnswerTable, answers: Iterable[Answer]) -> None:
    """Write .csv, .tsv, .jsonl or .parquet, by the suffix."""
    records = chain.from_iterable(map(table.records, answers))
    writers: dict[str, Callable[[Path], None]] = {
        ".csv": lambda temporary: write_csv(temporary, table.columns, records, ","),
        ".tsv": lambda temporary: write_csv(temporary, table.columns, records, "\t"),
        ".jsonl": lambda temporary: write_json_lines(temporary, chain.from_iterable(map(table.objects, answers))),
        ".parquet": lambda temporary: write_parquet(temporary, table.columns, records),
    }
    write_file(file, writers)


def write_features(file: Path, keep: tuple[str, ...], answers: Iterable[Answer]) -> None:
    """Write .npy, with the names of the inputs in .names.csv beside it, or .parquet with both."""
    columns = {"input": str, **dict.fromkeys(keep, str)}
    used = (answer for answer in answers if not answer.error)

    def write_npy(temporary: Path) -> None:
        shape = 0, 0
        with open(temporary, "wb") as target:

            def save(answer: Answer) -> Record:
                nonlocal shape
                if not shape[0]:
                    write_header(target, (0, len(answer.value)))
                shape = shape[0] + 1, len(answer.value)
                target.write(np.asarray(answer.value, dtype="<f4").tobytes())
                return feature_record(answer)

            write_atomically(names_file(file), lambda names: write_csv(names, columns, map(save, used), ","))
            target.seek(0)
            write_header(target, shape)

    records = ({**feature_record(answer), FEATURES: answer.value} for answer in used)
    writers: dict[str, Callable[[Path], None]] = {
        ".npy": write_npy,
        ".parquet": lambda temporary: write_parquet(temporary, {**columns, FEATURES: np.ndarray}, records),
    }
    write_file(file, writers)


def feature_record(answer: Answer) -> Record:
    cells = {name: encodable(cell) for name, cell in answer.item.columns.items()}
    return {"input": encodable(answer.item.name), **cells}


def names_file(file: Path) -> Path:
    return file.with_suffix(".names.csv")


def write_header(target: Any, shape: tuple[int, int]) -> None:
    """The header of a .npy file; numpy leaves room in it for the number of rows to grow."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(target, header)


def write_file(file: Path, writers: dict[str, Callable[[Path], None]]) -> None:
    if file.suffix not in writers:
        raise UserError(f"--out {file}: the name must end in {', '.join(writers)}, or in / for a folder of parts")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, writers[file.suffix])
    except OSError as reason:
        raise UserError(f"cannot write {file}: {reason.strerror or one_line(reason)}") from reason


def write_csv(file: Path, columns: Iterable[str], records: Iterable[Record], separator: str) -> None:
    with open(file, "w", encoding="utf8", errors="backslashreplace", newline="") as target:
        names = list(columns)
        # A carriage return ends a row for readers, but before Python 3.13 it is only quoted if all cells are.
        writers = [
            csv.DictWriter(target, names, delimiter=separator, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        ]
        for row in chain([dict(zip(names, names))], records):
            writers[any("\r" in cell for cell in row.values() if isinstance(cell, str))].writerow(row)


def write_json_lines(file: Path, objects: Iterable[Record]) -> None:
    with open(file, "w", encoding="utf8") as target:
        for one in objects:
            target.write(json.dumps(finite(one), ensure_ascii=False) + "\n")


def write_parquet(
    file: Path, columns: dict[str, type], records: Iterable[Record], metadata: dict[bytes, bytes] | None = None
) -> None:
    pa, pq = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    types = {str: pa.string(), float: pa.float64(), np.ndarray: pa.list_(pa.float32())}
    schema = pa.schema([(encodable(name), types[kind]) for name, kind in columns.items()], metadata)
    plain = ({encodable(name): encodable(cell) for name, cell in row.items()} for row in records)
    with pq.ParquetWriter(file, schema) as writer:
        for rows in chunks(plain, ROW_GROUP):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))


# --- a folder of parts --------------------------------------------------------------------------------------


class PartWriter(NamedTuple):
    """A folder of Parquet files, each with the answers to `size` consecutive inputs.

    Process `rank` of `processes` writes the parts whose number is rank modulo processes. An existing part is not
    rewritten if its inputs have the same names. `settings` contain everything that the answers depend on: a folder
    written with others is refused.
    """

    folder: Path
    size: int
    settings: dict[str, Any]
    rank: int = 0
    processes: int = 1

    def write(
        self,
        items: Iterable[Item],
        columns: dict[str, type],
        answer: Callable[[Iterable[Item]], Iterable[Record]],
        skipped: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write the missing parts of this process; `skipped` is called with the number of inputs done before."""
        self.prepare()
        count = 0
        for number, part in enumerate(chunks(items, self.size)):
            count = number + 1
            if number % self.processes != self.rank:
                continue
            file, checksum = self.folder / f"part-{number:06}.parquet", names_checksum(part)
            if (self.metadata(file) or {}).get(INPUTS) == checksum:
                skipped(len(part))
                continue
            metadata = {SETTINGS: json.dumps(self.settings).encode(), INPUTS: checksum}
            write = partial(write_parquet, columns=columns, records=answer(part), metadata=metadata)
            write_file(file, {".parquet": write})
        for file in self.files() if count and self.rank == 0 else ():
            if int(file.stem.removeprefix("part-")) >= count:
                file.unlink()  # part of inputs that no longer exist

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("part-[0-9]*.parquet"))

    def prepare(self) -> None:
        require("pyarrow.parquet", "parquet")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise UserError(f"cannot write to {self.folder}: {reason.strerror}") from reason
        written = next((metadata for metadata in map(self.metadata, self.files()) if metadata is not None), None)
        if written is None:
            return
        settings = json.loads(written.get(SETTINGS, b"{}"))
        changed = ", ".join(name for name in self.settings if settings.get(name) != self.settings[name])
        if changed:
            raise UserError(f"{self.folder} holds answers of other settings ({changed}): name another folder")

    def metadata(self, file: Path) -> dict[bytes, bytes] | None:
        """Metadata of a part; None if it is missing or damaged, so that it is written anew."""
        try:
            return require("pyarrow.parquet", "parquet").read_metadata(file).metadata or {}
        except Exception:  # of many types
            return None


def names_checksum(items: Iterable[Item]) -> bytes:
    checksum = hashlib.sha256()
    for item in items:
        checksum.update(json.dumps([item.name, dict(item.columns)]).encode() + b"\n")
    return checksum.hexdigest().encode()
