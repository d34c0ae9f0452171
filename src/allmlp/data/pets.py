"""Oxford-IIIT Pets in the official layout."""

from __future__ import annotations

import re
from pathlib import Path

from allmlp.data.dataset import ImageDataset
from allmlp.data.image_files import FileSplit, ImageFileData, LabeledFile
from allmlp.data.paths import join_paths, search_paths
from allmlp.errors import UserError

LISTS = {"train": "trainval.txt", "test": "test.txt"}


class OxfordPets(ImageFileData):
    """37 breeds of cats and dogs, 3,680 images for training and 3,669 for testing (Parkhi et al. 2012).

    `path` has the folders images and annotations of the two archives on the authors' site; without it,
    $ALLMLP_DATA/pets and $ALLMLP_DATA are searched.
    """

    path: str = ""

    def load(self) -> ImageDataset:
        places = search_paths(self.path, "pets")
        root = next((place for place in places if is_pets(place)), None)
        if root is None:
            raise UserError(
                f"{join_paths(places)} has no annotations/trainval.txt: extract images.tar.gz and annotations.tar.gz "
                "of https://www.robots.ox.ac.uk/~vgg/data/pets there"
            )
        lists = {split: read_list(root / "annotations" / file) for split, file in LISTS.items()}
        names = dict(sorted({number: breed for rows in lists.values() for _, breed, number in rows}.items()))
        order = {number: label for label, number in enumerate(names)}
        splits = {
            split: FileSplit(root / "images", [LabeledFile(f"{image}.jpg", order[number]) for image, _, number in rows])
            for split, rows in lists.items()
        }
        return self.build(splits, tuple(names.values()), [])


def is_pets(folder: Path) -> bool:
    return all((folder / "annotations" / name).is_file() for name in LISTS.values())


def read_list(file: Path) -> list[tuple[str, str, int]]:
    """Name of the image, breed and its number from lines such as "Abyssinian_100 1 1 1"."""
    rows = []
    for line in file.read_text(encoding="utf8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(([^\s/\\]+)_\d+)\s+(\d+)\s+\d+\s+\d+\s*", line)
        if match is None:
            raise UserError(f"{file}: {line[:80]!r} is not of the form NAME CLASS SPECIES BREED")
        rows.append((match[1], match[2].replace("_", " "), int(match[3])))
    return rows
