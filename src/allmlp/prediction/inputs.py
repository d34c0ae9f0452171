"""Inputs named by a user: files, folders, patterns, tables, shards, URLs, standard input and plain texts.

Everything is listed lazily and in a fixed order, so that millions of inputs need little memory and two processes see
the same ones.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from allmlp.data.columns import (
    IMAGE_COLUMNS,
    TEXT_COLUMNS,
    TEXT_PAIR_COLUMNS,
    guess_texts,
    is_image_name,
    named_column,
    sample_columns,
)
from allmlp.data.decode import SUFFIXES
from allmlp.data.shards import Shard, expand_range
from allmlp.data.tables import Table, is_table, read_table, table_suffix
from allmlp.data.tar_members import members
from allmlp.data.text_files import file_system, read_documents
from allmlp.errors import UserError, one_line
from allmlp.files import expand_user
from allmlp.prediction.predictor import ModelInputs, Reads

STDIN = "-"
TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.xz", ".txt.zst")
SHARD_SUFFIX = ".tar"
PEEKED_ROWS = 20
"""Rows whose image files are looked up before the others are listed."""
OWN_COLUMNS = re.compile(r"input|features|error|predictions|probabilities|(label|probability)(_\d+)?")
"""Names of columns of the output."""


class Item(NamedTuple):
    """One input."""

    name: str
    """The path, or the text itself."""
    source: Any
    """Argument of `Predictor.decode`."""
    columns: Mapping[str, str] = MappingProxyType({})
    """Cells of a table row that are copied to the answer."""


class ShardPart(NamedTuple):
    """A file in a shard; called, it returns its bytes."""

    shard: Shard
    offset: int
    size: int

    def __call__(self) -> bytes:
        return fetch(partial(self.shard.read, self.offset, self.size))


class Columns(NamedTuple):
    """Columns of tables; where they are not named, they are found by common names."""

    input: str = ""
    pair: str = ""
    keep: tuple[str, ...] = ()
    """Columns that are copied to the answer."""

    @property
    def kept(self) -> dict[str, str]:
        """For each kept column of the table, its name in the output, where `label` becomes `input_label`."""
        return {name: self.kept_name(name) if OWN_COLUMNS.fullmatch(name) else name for name in self.keep}

    def kept_name(self, column: str) -> str:
        new = f"input_{column}"
        return self.kept_name(new) if new in self.keep else new


class Inputs:
    """The inputs for a model that reads images or texts; every iteration lists them again.

    An image model takes image files, tables with a column of paths, and WebDataset shards; in folders, images and
    shards are found at any depth. A text model takes tables with a column of texts, text files with one text per line
    (or one text per file, with `whole_files`), and anything else as a text. `context` is the second text of every text
    that has none of its own. If the texts are `questions`, a column called context holds the second texts; a classifier
    is not trained on such a column. In tables that have the columns `trained_on`, these are read.
    """

    def __init__(
        self,
        arguments: Iterable[str],
        reads: Reads,
        columns: Columns = Columns(),
        context: str = "",
        questions: bool = True,
        whole_files: bool = False,
        trained_on: tuple[str, ...] = (),
    ) -> None:
        self.reads, self.columns, self.context, self.questions = reads, columns, context, questions
        self.whole_files, self.trained_on = whole_files, trained_on
        self.places = [(argument, self.resolve(argument)) for argument in arguments]

    def __iter__(self) -> Iterator[Item]:
        for argument, items in self.places:
            is_empty = True
            for item in items():
                is_empty = False
                yield item
            if is_empty:
                raise UserError(f"{'standard input' if argument == STDIN else argument} has no {self.reads}")

    @property
    def repeatable(self) -> bool:
        return all(argument != STDIN for argument, _ in self.places)

    @property
    def may_have_tables(self) -> bool:
        """Whether the inputs may include a table; in folders, only tables of texts."""
        return any(
            is_table(argument)
            or "://" in argument
            or glob.has_magic(argument)
            or (self.reads == "texts" and os.path.isdir(expand_user(argument)))
            for argument, _ in self.places
        )

    def resolve(self, argument: str) -> Callable[[], Iterator[Item]]:
        """Check that an argument exists; its contents are listed later."""
        if argument == STDIN:
            return self.lines
        one_word = not any(letter.isspace() for letter in argument)
        if "://" in argument and one_word:
            return lambda: chain.from_iterable(map(self.remote_items, expand_range(argument)))
        path = str(expand_user(argument)) if argument.startswith("~") else argument
        if os.path.isdir(path) or os.path.isfile(path):
            return lambda: self.local_items(path)
        if self.reads == "images" or one_word:
            patterns = expand_range(path) if self.reads == "images" or looks_like_file(path) else [path]
            paths = [name for pattern in patterns for name in sorted(glob.glob(pattern, recursive=True))]
            if paths:
                return lambda: chain.from_iterable(map(self.local_items, paths))
        if self.reads == "texts" and not looks_like_file(argument):
            return lambda: iter([Item(argument, (argument, self.context))])
        hint = f"; if it is a text, write it to standard input: allmlp predict MODEL {STDIN}"
        raise UserError(f"there is no file {argument}{hint if self.reads == 'texts' else ''}")

    def lines(self) -> Iterator[Item]:
        try:
            for line in map(str.strip, sys.stdin):
                if "\0" in line:
                    kind = "names of images" if self.reads == "images" else "texts"
                    raise UserError(f"standard input is not text: {STDIN} reads {kind}, one per line")
                if line:
                    yield Item(line, (line, self.context)) if self.reads == "texts" else image_item(line)
        except UnicodeDecodeError as reason:
            raise UserError(f"standard input is not UTF-8 text: {one_line(reason)}") from reason

    # --- local -----------------------------------------------------------------------------------------------

    def local_items(self, path: str) -> Iterator[Item]:
        return self.folder_items(path) if os.path.isdir(path) else self.file_items(path)

    def folder_items(self, folder: str) -> Iterator[Item]:
        for place, folders, files in os.walk(folder, onerror=cannot_list):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith(".") and self.is_wanted(name):
                    yield from self.file_items(os.path.join(place, name))

    def is_wanted(self, name: str) -> bool:
        """Whether a file in a folder is read, judged by name alone."""
        if self.reads == "images":
            return is_image_or_shard(name)
        return is_table(name) or name.lower().endswith(TEXT_SUFFIXES)

    def file_items(self, path: str) -> Iterator[Item]:
        if is_table(path):
            return self.rows(open_table(path))
        if path.lower().endswith(SHARD_SUFFIX):
            return self.members(Shard(path))
        if self.reads == "images":
            return iter([image_item(path)])
        if is_image_name(path):
            raise UserError(f"{path} is an image; the model reads texts")
        return self.documents(path)

    def documents(self, file: str) -> Iterator[Item]:
        if self.whole_files:
            yield Item(file, lambda: (next(read_documents([file], "document"), ""), self.context))
            return
        for text in read_documents([file], "line"):
            yield Item(text, (text, self.context))

    # --- object stores ---------------------------------------------------------------------------------------

    def remote_items(self, url: str) -> Iterator[Item]:
        store, path = file_system(url)
        try:
            if glob.has_magic(path):
                files = sorted(store.glob(path))
            else:
                files = self.remote_folder(store, path) if store.isdir(path) else [path]
            for file in files:
                name = store.unstrip_protocol(file)
                if is_table(file):
                    yield from self.rows(open_table(name))
                elif file.lower().endswith(SHARD_SUFFIX):
                    yield from self.members(Shard(file, store))
                elif self.reads == "images":
                    yield Item(name, partial(fetch, partial(store.cat_file, file)))
                else:
                    yield from self.documents(name)
        except (UserError, GeneratorExit):
            raise
        except Exception as reason:  # unknown protocol, missing package, no network, no such file
            raise UserError(f"cannot read {url}: {one_line(reason) or type(reason).__name__}") from reason

    def remote_folder(self, store: Any, path: str) -> Iterator[str]:
        for place, _, files in store.walk(path):
            yield from (f"{place}/{name}" for name in sorted(files) if self.is_wanted(name))

    # --- tables and shards -----------------------------------------------------------------------------------

    def rows(self, table: Table) -> Iterator[Item]:
        kept = self.columns.kept
        for column in kept:
            named_column(table.columns, column, (), table.file)

        def columns(row: Mapping[str, str]) -> dict[str, str]:
            return {kept[column]: row[column] for column in kept}

        if self.reads == "images":
            find = image_finder(table, image_column(table, self.columns.input, self.trained_on))
            for row in table:
                yield image_item(find(row), columns(row))
            return
        column, pair = text_columns(table, self.columns, self.questions, self.trained_on)
        for number, row in enumerate(table, 1):
            source = row[column], (row[pair] if pair else "") or self.context
            yield Item(row[column] or f"{table.file}, row {number}", source, columns(row))

    def members(self, shard: Shard) -> Iterator[Item]:
        """Images, or texts, of a tar file; only its headers are read now."""
        suffixes = SUFFIXES if self.reads == "images" else frozenset({".txt"})
        try:
            with shard.open() as file:
                for member in members(file):
                    if os.path.splitext(member.name)[1].lower() in suffixes:
                        yield Item(f"{shard}/{member.name}", ShardPart(shard, member.offset, member.size))
        except (OSError, tarfile.TarError) as reason:
            raise UserError(f"{shard} is damaged or not a tar file: {one_line(reason)}") from reason


def looks_like_file(argument: str) -> bool:
    """Whether this seems to be a file name: one word with a slash, or with the suffix of an image, table or text."""
    if any(letter.isspace() for letter in argument):
        return False
    is_known = is_image_or_shard(argument) or is_table(argument) or argument.lower().endswith(TEXT_SUFFIXES)
    return "/" in argument or is_known


def is_image_or_shard(name: str) -> bool:
    return is_image_name(name) or name.lower().endswith(SHARD_SUFFIX)


def guess_reads(argument: str) -> Reads:
    """Guess whether inputs given without a model are images or texts."""
    path = str(expand_user(argument)) if argument.startswith("~") else argument
    if argument == STDIN:
        raise UserError("standard input needs a model: allmlp predict MODEL -")
    if os.path.isdir(path):
        has_images = any(is_image_name(name) for _, _, names in os.walk(path) for name in names)
        return "images" if has_images else "texts"
    if os.path.isfile(path) and is_table(path):
        return "images" if any(sample.is_image for sample in sample_columns(read_table(path))) else "texts"
    is_other_file = os.path.isfile(path) and not path.lower().endswith(TEXT_SUFFIXES)
    return "images" if is_image_or_shard(path) or is_other_file or "://" in argument else "texts"


def image_item(path: str, columns: Mapping[str, str] = MappingProxyType({})) -> Item:
    return Item(path, partial(fetch, partial(read_url, path)) if "://" in path else Path(path), columns)


def cannot_list(reason: OSError) -> NoReturn:
    raise UserError(f"cannot list {reason.filename}: {reason.strerror}") from reason


def fetch(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except Exception as reason:  # file systems raise many types
        raise UserError(f"cannot read it: {one_line(reason) or type(reason).__name__}") from reason


def read_url(url: str) -> bytes:
    store, path = file_system(url)
    return store.cat_file(path)


def open_table(file: str) -> Table:
    """A table, or the questions of a SQuAD file as one."""
    if table_suffix(file) == ".json":
        from allmlp.data.squad import is_squad, question_table

        if is_squad(file):
            return question_table(file)
    return read_table(file)


# --- columns ------------------------------------------------------------------------------------------------


def image_column(table: Table, requested: str, trained_on: tuple[str, ...]) -> str:
    """The requested column, else that of training, else one with names of image files, else one with a common name,
    else one whose values are names of images without their suffix.
    """
    if trained_on and not requested and trained_on[0] in table.columns:
        return trained_on[0]
    samples = [] if requested else sample_columns(table)
    column = next((sample.name for sample in samples if sample.is_image), None)
    column = column or named_column(table.columns, requested, IMAGE_COLUMNS, table.file)
    if column is None and "://" not in table.file:
        from allmlp.data.image_table import FileFinder, stem_column

        column = stem_column(samples, FileFinder(Path(table.file).parent))
    if column is None:
        raise UserError(f"{table.file}: none of {', '.join(table.columns)} names image files: set --column")
    return column


def image_finder(table: Table, column: str) -> Callable[[Mapping[str, str]], str]:
    """A function that returns the image file of a row. If files are not found by path, suffixes and folders may be
    missing, as in tables for training.
    """
    folder = os.path.dirname(table.file)

    def direct(row: Mapping[str, str]) -> str:
        path = row[column].strip()
        return f"{folder}/{path}" if folder and "://" not in path and not os.path.isabs(path) else path

    first = [direct(row) for row in islice(table, PEEKED_ROWS)]
    if all("://" in path or os.path.isfile(path) for path in first):
        return direct  # without a look at every file: they may be millions
    from allmlp.data.image_table import FileFinder

    finder = FileFinder(Path(folder))
    return lambda row: finder.find(row[column].strip()) or direct(row)


def text_columns(
    table: Table, requested: Columns, questions: bool, trained_on: tuple[str, ...]
) -> tuple[str, str | None]:
    """The columns of texts and of second texts, if there are any: those of training, else by name, else by content."""
    if trained_on and not (requested.input or requested.pair) and {*trained_on} <= {*table.columns}:
        return trained_on[0], trained_on[1] if len(trained_on) > 1 else None
    first = named_column(table.columns, requested.input, TEXT_COLUMNS, table.file)
    pairs = (*TEXT_PAIR_COLUMNS, "context") if questions else TEXT_PAIR_COLUMNS
    second = named_column(table.columns, requested.pair, pairs, table.file, taken=(first,))
    if first is None:
        samples = [sample for sample in sample_columns(table) if sample.name != second]
        first, *others = guess_texts(samples, 2 - bool(second), table, "--column")
        second = second or next(iter(others), None)
    return first, second


# --- from Python --------------------------------------------------------------------------------------------


def as_items(inputs: Any, kind: ModelInputs, context: str = "") -> Iterator[Item]:
    """The inputs of a call from Python: one or a sequence. Paths may be anything that the command line takes.

    For a text model a string is a text, whatever it looks like, a pair of strings is a pair, and a `Path` is a file. A
    pair alone is one input of a model that was trained on pairs, and two texts for others or with a `context`.
    """
    reads, reads_pairs = kind.reads, not context and (kind.questions or len(kind.trained_on) > 1)
    is_array = getattr(inputs, "ndim", 4) < 4
    is_pair = reads_pairs and isinstance(inputs, tuple) and [*map(type, inputs)] == [str, str]
    single = isinstance(inputs, (str, os.PathLike, bytes)) or hasattr(inputs, "getexif") or is_array or is_pair
    try:
        sources = iter([inputs] if single else inputs)
    except TypeError:
        raise UserError(f"the inputs must be {reads}, not {type(inputs).__name__}") from None
    for number, source in enumerate(sources):
        if isinstance(source, os.PathLike) or (isinstance(source, str) and reads == "images"):
            yield from Inputs([os.fspath(source)], reads, Columns(), context, *kind[1:])
        elif isinstance(source, str):
            yield Item(source, (source, context))
        else:
            yield Item(source[0] if isinstance(source, tuple) else f"input {number}", source)
