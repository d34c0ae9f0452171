"""preprocessing.json: how inputs are prepared for a model, and the names of its classes or columns."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from allmlp.data.frequency import Frequency
from allmlp.errors import UserError, command, plural
from allmlp.files import CONFIG, RUN, write_atomically, write_text_atomically
from allmlp.spec import Count, Rate, Spec, from_json, to_json

log = logging.getLogger("allmlp.data")

PREPROCESSING_FILE = "preprocessing.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")


class ImagePreprocessing(Spec):
    """Preprocessing of images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Standard deviation of the pixels divided by 255, per channel."""
    class_names: tuple[str, ...] = ()
    crop_pct: Rate = 1.0
    """Center crop, as a fraction of the short side."""
    task: Literal["classes", "values"] = "classes"
    """Output of the head: class scores, or values of a regression."""
    image_column: str = ""
    label_column: str = ""
    """The columns of the table in training; empty if there was none."""


class TextPreprocessing(Spec):
    """Preprocessing of text, with the tokenizer in the same folder."""

    task: Literal["text", "classes", "span", "translation"]
    """Output of the model: tokens, class scores, answer spans or translations."""
    seq_len: Count
    class_names: tuple[str, ...] = ()
    mask_padding: bool = True
    """Whether padding is masked in classification and question answering; a model trained without masking reads rows of
    exactly `seq_len` tokens.
    """
    whole_files: bool = False
    """Whether a text file is one text, as in training; else every line is one."""
    text_columns: tuple[str, ...] = ()
    """The column of texts, and that of second ones, of the table in training; empty if there was none."""
    label_column: str = ""


class SeriesPreprocessing(Spec):
    """Preprocessing of time series: z = (x - mean) / std, of each series and column."""

    columns: tuple[str, ...]
    frequency: Frequency
    ids: tuple[str, ...] = ("",)
    """Ids of the series that the model was trained on; "" for the only series of a table without ids."""
    mean: tuple[tuple[float, ...], ...] = ()
    std: tuple[tuple[float, ...], ...] = ()
    time_column: str = ""
    id_columns: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    seasonal_error: tuple[tuple[float, ...], ...] = ()
    """The unit of MASE for each series and column; 0 if unknown."""
    learned: tuple[tuple[int, int, int], ...] = ()
    """For each series: time of the first step, number of training steps, number of training and validation steps."""

    def check(self) -> None:
        shape = {(len(self.ids), *{len(row) for row in rows}) for rows in (self.mean, self.std) if len(rows)}
        if shape - {(len(self.ids), len(self.columns))} or len({len(self.ids), len(self.mean), len(self.std)}) > 1:
            raise UserError("SeriesPreprocessing needs a mean and a std for each series and column")
        if {len(self.seasonal_error), len(self.learned)} - {0, len(self.ids)}:
            raise UserError("SeriesPreprocessing needs seasonal_error and learned for each series, or for none")


Preprocessing = ImagePreprocessing | TextPreprocessing | SeriesPreprocessing


@cache
def warn_of_single_text(model: str, trained_on: tuple[str, ...]) -> None:
    """Warn, once per model, if it was trained on pairs: not an error, as second texts may be empty in training too."""
    if len(trained_on) > 1:
        log.warning(
            "the model in %s was trained on pairs, %s with %s, and now reads a text without a second one: give it with "
            "--context or --pair-column, from Python as a pair, over HTTP as text_pair",
            *(model, *trained_on[:2]),
        )


def write_preprocessing(folder: Path, preprocessing: Preprocessing) -> None:
    write_text_atomically(folder / PREPROCESSING_FILE, to_json(preprocessing))


def refuse_runs(folder: Path) -> None:
    """Raise UserError for a run that is not finished, which has no model yet, and for a folder of runs."""
    if (folder / RUN).is_file():
        resume = command("train", "--resume", folder)
        raise UserError(f"the run in {folder} is not finished: continue it with {resume}")
    runs = sorted(file.parent for file in folder.glob(f"*/{RUN}"))
    if runs:
        raise UserError(f"{folder} holds {plural(len(runs), 'run')}: name one of them, such as {runs[0]}")


def read_preprocessing(folder: Path) -> Preprocessing:
    file = folder / PREPROCESSING_FILE
    if not file.is_file():
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        refuse_runs(folder)
        if not (folder / CONFIG).is_file():
            raise UserError(f"{folder} is not a model folder: it has no {CONFIG}")
        how = "set model.preprocessing before allmlp.save"
        raise UserError(f"{folder} has no {PREPROCESSING_FILE}, which says how to prepare inputs: {how}")
    try:
        preprocessing = from_json(file.read_bytes())
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None
    if not isinstance(preprocessing, Preprocessing):
        kinds = ", ".join(kind.__name__ for kind in get_args(Preprocessing))
        raise UserError(f"{file} contains {type(preprocessing).__name__}, not one of {kinds}")
    return preprocessing


def known_preprocessing(folder: Path) -> Preprocessing | None:
    """The preprocessing in a model's folder, or None."""
    return read_preprocessing(folder) if (folder / PREPROCESSING_FILE).is_file() else None


def copy_preprocessing(source: Path, target: Path) -> None:
    """Copy preprocessing and tokenizer from one model's folder to another's."""
    preprocessing = known_preprocessing(source)
    if preprocessing is not None:
        write_preprocessing(target, preprocessing)
    copy_tokenizer(source, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer of a model's folder, if it has one, to another folder, replacing the one there."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not names or source.resolve() == target.resolve():
        return
    for name in names:
        data = (source / name).read_bytes()
        write_atomically(target / name, lambda temporary, data=data: temporary.write_bytes(data))
    for name in set(TOKENIZER_FILES).difference(names):
        (target / name).unlink(missing_ok=True)


def image_preprocessing(folder: Path) -> ImagePreprocessing:
    """Read the preprocessing of an image model."""
    preprocessing = read_preprocessing(folder)
    if not isinstance(preprocessing, ImagePreprocessing):
        what = "text" if isinstance(preprocessing, TextPreprocessing) else "time series"
        raise UserError(f"the model in {folder} reads {what}, not images")
    return preprocessing
