"""Oxford Flowers-102 in the official layout."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from allmlp.data.dataset import ImageDataset
from allmlp.data.image_files import FileSplit, ImageFileData, LabeledFile
from allmlp.data.paths import join_paths, search_paths
from allmlp.errors import MissingExtra, UserError, one_line, require
from allmlp.files import read_regular

LABELS, SPLITS = "imagelabels.mat", "setid.mat"
MAX_BYTES = 2**26


class Flowers102(ImageFileData):
    """102 species of flowers, 1,020 images for training, 1,020 for validation and 6,149 for testing (Nilsback 2008).

    `path` has the folder jpg and the files imagelabels.mat and setid.mat; without it, $ALLMLP_DATA/flowers102 and
    $ALLMLP_DATA are searched. Classes are numbers from 1. As in published transfer results, the validation images are
    trained on too, unless `train_on_val` is false.
    """

    path: str = ""
    train_on_val: bool = True

    def load(self) -> ImageDataset:
        places = search_paths(self.path, "flowers102")
        root = next((place for place in places if is_flowers(place)), None)
        if root is None:
            raise UserError(
                f"{join_paths(places)} has no {LABELS} and {SPLITS}: put them and the folder jpg of "
                "https://www.robots.ox.ac.uk/~vgg/data/flowers/102 there"
            )
        labels = read_mat(root / LABELS).get("labels", np.zeros(0)).astype(int).ravel()
        sets = {name: numbers.astype(int).ravel() for name, numbers in read_mat(root / SPLITS).items()}
        if not {"trnid", "valid", "tstid"} <= sets.keys() or not labels.size:
            raise UserError(f"{root}: {LABELS} needs the variable labels, {SPLITS} needs trnid, valid and tstid")
        classes = sorted(set(labels.tolist()))

        def split(*names: str) -> FileSplit:
            chosen = np.concatenate([sets[name] for name in names]).tolist()
            if not all(1 <= number <= len(labels) for number in chosen):
                raise UserError(f"{root / SPLITS} names images that {LABELS} has no label of")
            labeled = [(number, classes.index(int(labels[number - 1]))) for number in chosen]
            return FileSplit(root / "jpg", [LabeledFile(f"image_{number:05d}.jpg", label) for number, label in labeled])

        splits = {"train": split("trnid", "valid") if self.train_on_val else split("trnid"), "test": split("tstid")}
        splits |= {} if self.train_on_val else {"validation": split("valid")}
        return self.build(splits, tuple(map(str, classes)), [])


def is_flowers(folder: Path) -> bool:
    return (folder / LABELS).is_file() and (folder / SPLITS).is_file()


def read_mat(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a MAT file of level 5 (MATLAB's save -v6 and -v7), by name."""
    data = read_regular(file, MAX_BYTES)
    if data[126:128] not in (b"IM", b"MI"):
        raise UserError(f"{file} is not a MAT file of level 5")
    try:
        arrays = require("scipy.io", "train").loadmat(io.BytesIO(data))
    except MissingExtra:
        raise
    except Exception as reason:  # scipy raises many types on damaged files
        raise UserError(f"{file} is damaged: {one_line(reason)}") from None
    return {name: array for name, array in arrays.items() if not name.startswith("__")}
