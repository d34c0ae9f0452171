"""CIFAR-10 and CIFAR-100 as their authors publish them, or packed as lossless WebP strips."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from allmlp.data.places import download, name_places, places
from allmlp.data.source import Data, Dataset, Resident
from allmlp.errors import UserError, one_line, require


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CIFAR10 = words("airplane automobile bird cat deer dog frog horse ship truck")
FINE = words("""
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
""")
COARSE = words("""
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2
""")
PIXELS = 3 * 32 * 32
LARGEST = 2**29
DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)

Arrays = tuple[np.ndarray, np.ndarray]
"""Pictures (uint8, n 3 32 32) and labels (n)."""


class Layout(NamedTuple):
    """One of the forms a dataset comes in: the folder in its archive, the files of both splits, how to read one."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[bytes], Arrays]


class Official(NamedTuple):
    """Where the authors keep it."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


class Cifar10(Data):
    """60,000 pictures of 32 x 32 in 10 classes (Krizhevsky 2009).

    `path` is a folder or an archive: the binary or the Python version, extracted or as .tar.gz, or packed zips. Without
    one, $ALLMLP_DATA/cifar10 and $ALLMLP_DATA are searched. `download` fetches the binary version if none is there.
    """

    path: str = ""
    download: bool = False

    def open(self) -> Dataset:
        parts = range(1, 6)
        layouts = [
            Layout(
                "cifar-10-batches-bin",
                tuple(f"data_batch_{part}.bin" for part in parts),
                ("test_batch.bin",),
                lambda data: read_binary(data, label=0, labels=1),
            ),
            Layout(
                "cifar-10-batches-py",
                tuple(f"data_batch_{part}" for part in parts),
                ("test_batch",),
                lambda data: read_pickle(data, "labels"),
            ),
            Layout("cifar10", tuple(f"cifar10-train{part}.zip" for part in parts), ("cifar10-test.zip",), read_packed),
        ]
        official = Official(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
        )
        train, test = load(self.path, "cifar10", layouts, official, self.download, len(CIFAR10))
        mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
        return Dataset(train, test, CIFAR10, mean, std)


class Cifar100(Data):
    """60,000 pictures of 32 x 32 in 100 classes (`labels` fine) or 20 groups of them (coarse). Paths as for Cifar10."""

    path: str = ""
    labels: Literal["fine", "coarse"] = "fine"
    download: bool = False

    def open(self) -> Dataset:
        fine, classes = self.labels == "fine", FINE if self.labels == "fine" else COARSE
        layouts = [
            Layout(
                "cifar-100-binary",
                ("train.bin",),
                ("test.bin",),
                lambda data: read_binary(data, label=int(fine), labels=2),
            ),
            Layout("cifar-100-python", ("train",), ("test",), lambda data: read_pickle(data, f"{self.labels}_labels")),
        ]
        official = Official(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"
        )
        train, test = load(self.path, "cifar100", layouts, official, self.download, len(classes))
        mean, std = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)
        return Dataset(train, test, classes, mean, std)


# --- finding --------------------------------------------------------------------------------------------


def load(
    path: str, name: str, layouts: list[Layout], official: Official, online: bool, classes: int
) -> tuple[Resident, Resident]:
    searched, partial = places(path, name), list[str]()
    archives = official.file.replace("binary", "*")
    found = next(filter(None, (look(place, layouts, archives, partial) for place in searched)), None)
    if found is None and online:
        target = searched[0].parent if searched[0].is_file() else searched[0]
        download(official.url, official.md5, target / official.file)
        found = look_into(target / official.file, layouts)
    if found is None:
        raise UserError(
            f"{partial[0] if partial else f'no {name} in {name_places(searched)}'}: put {official.file} there "
            f"(from {official.url}), set data.path or $ALLMLP_DATA to where it is, or set data.download=true"
        )
    layout, place, read_file = found
    return split(layout, layout.train, place, read_file, classes), split(layout, layout.test, place, read_file, classes)


Found = tuple[Layout, Path, Callable[[str], bytes]]


def look(place: Path, layouts: list[Layout], archives: str, partial: list[str]) -> Found | None:
    """The first layout that is complete at a place; what is incomplete is noted in `partial`."""
    if place.is_file():
        return look_into(place, layouts)
    for layout in layouts:
        for folder in (place / layout.folder, place):
            missing = [name for name in layout.train + layout.test if not (folder / name).is_file()]
            if not missing:
                return layout, folder, lambda name, folder=folder: (folder / name).read_bytes()
            if len(missing) < len(layout.train + layout.test):
                partial.append(f"{folder} is incomplete, {', '.join(missing)} is missing")
    return next(filter(None, (look_into(archive, layouts) for archive in sorted(place.glob(archives)))), None)


def look_into(archive: Path, layouts: list[Layout]) -> Found | None:
    """The layout of a .tar.gz, its files read into memory: nothing is extracted."""
    wanted = {name for layout in layouts for name in layout.train + layout.test}
    content: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in wanted:
                    if member.size > LARGEST:
                        raise UserError(f"{archive}: {name} is too large to be part of this dataset")
                    source = tar.extractfile(member)
                    content[name] = source.read() if source else b""
    except DAMAGED as reason:
        raise UserError(f"{archive} is damaged or not a .tar.gz: {one_line(reason)}; fetch it again") from None
    for layout in layouts:
        if content.keys() >= set(layout.train + layout.test):
            return layout, archive, content.__getitem__
    return None


def split(
    layout: Layout, names: Iterable[str], place: Path, read_file: Callable[[str], bytes], classes: int
) -> Resident:
    images, labels = [], []
    for name in names:
        try:
            pictures, answers = layout.read(read_file(name))
            if not len(pictures) or len(pictures) != len(answers):
                raise UserError(f"holds {len(pictures)} pictures and {len(answers)} labels")
            if answers.min() < 0 or answers.max() >= classes:
                raise UserError(f"has labels outside of 0 to {classes - 1}")
        except (UserError, *DAMAGED) as reason:
            raise UserError(f"{place / name}: {one_line(reason)}") from None
        images.append(torch.from_numpy(pictures))
        labels.append(torch.from_numpy(answers.astype(np.int64)))
    return Resident(torch.cat(images), torch.cat(labels))


# --- reading --------------------------------------------------------------------------------------------


def read_binary(data: bytes, label: int, labels: int) -> Arrays:
    """Records of `labels` bytes and 3,072 pixels, all red before all green before all blue."""
    record = labels + PIXELS
    if not data or len(data) % record:
        raise UserError(f"its {len(data):,} bytes are not a whole number of records of {record}; fetch it again")
    records = np.frombuffer(bytearray(data), dtype=np.uint8).reshape(-1, record)
    return np.ascontiguousarray(records[:, labels:]).reshape(-1, 3, 32, 32), records[:, label].copy()


def read_packed(data: bytes) -> Arrays:
    """A zip of labels.npy and WebP strips, 32 wide, pictures below each other."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > LARGEST:
                raise UserError("is too large to be part of this dataset")
            labels = np.load(io.BytesIO(archive.read("labels.npy")), allow_pickle=False)
            encoded = [archive.read(name) for name in sorted(archive.namelist()) if name.endswith(".webp")]
        with ThreadPoolExecutor() as pool:
            strips = list(pool.map(read_strip, encoded))
    except (KeyError, ValueError, *DAMAGED) as reason:
        raise UserError(f"is damaged: {one_line(reason)}") from None
    if not strips or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError("has no pictures, or its labels are not a list of whole numbers")
    return np.ascontiguousarray(np.concatenate(strips).transpose(0, 3, 1, 2)), labels


def read_strip(data: bytes) -> np.ndarray:
    Image = require("PIL.Image", "train")
    with Image.open(io.BytesIO(data), formats=["WEBP"]) as strip:
        if strip.width != 32 or strip.height % 32:
            raise UserError("a strip is not made of 32 x 32 pictures")
        return np.asarray(strip.convert("RGB")).reshape(-1, 32, 32, 3)


def read_pickle(data: bytes, key: str) -> Arrays:
    """The Python version: a dictionary of an array and lists."""
    try:
        batch = Unpickler(io.BytesIO(data), encoding="latin1").load()
        batch = {name.decode("latin1") if isinstance(name, bytes) else name: value for name, value in batch.items()}
        pixels = batch["data"].pixels()
        labels = np.array(batch[key], dtype=np.int64)
    except UserError:
        raise
    except Exception as reason:  # a damaged pickle can raise anything
        raise UserError(f"is not a CIFAR batch ({type(reason).__name__}: {one_line(reason)}); fetch it again") from None
    return pixels, labels


class Array:
    """Stands for a numpy array in a pickle: holds what it was made of, does nothing."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        _, shape, kind, fortran, data = self.state
        if not isinstance(kind, Kind) or kind.name != "u1" or fortran or len(shape) != 2 or shape[1] != PIXELS:
            raise UserError("does not hold rows of 3,072 bytes")
        data = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape[0], 3, 32, 32)


class Kind:
    """Stands for a numpy dtype."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass


def encode(text: str, _: str = "latin1") -> bytes:
    """Newer Pythons write bytes into old pickles as text to be encoded."""
    return text.encode("latin1")


class Unpickler(pickle.Unpickler):
    """Knows the four names a CIFAR batch is made of, as stand-ins that run nothing; refuses every other one."""

    known = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): Array,
        ("numpy._core.multiarray", "_reconstruct"): Array,
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Kind,
        ("_codecs", "encode"): encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.known[module, name]
        except KeyError:
            raise UserError(f"refused: this pickle wants to run {module}.{name}, no CIFAR batch does") from None
