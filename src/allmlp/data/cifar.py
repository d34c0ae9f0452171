"""CIFAR-10 and CIFAR-100 in the published formats, or packed as lossless WebP strips."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from allmlp.data.columns import is_image_name
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.data.paths import download, join_paths, search_paths
from allmlp.errors import UserError, one_line, require
from allmlp.files import expand_user


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE_CLASSES = split_words("""
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
""")
COARSE_CLASSES = split_words("""
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2
""")
SITE = "https://www.cs.toronto.edu/~kriz"
PARTS = range(1, 6)
PIXELS = 3 * 32 * 32
MAX_MEMBER_BYTES = 2**29
DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)

Arrays = tuple[np.ndarray, np.ndarray]
"""Images (uint8, n 3 32 32) and labels (n)."""


class FileLayout(NamedTuple):
    """A published format: folder in the archive, files of both splits, function that reads one."""

    folder: str
    train: list[str]
    test: list[str]
    read: Callable[[bytes], Arrays]


def packed_layout(name: str, label_file: str) -> FileLayout:
    train = [f"{name}-train{part}.zip" for part in PARTS]
    return FileLayout(name, train, [f"{name}-test.zip"], partial(read_packed, label_file=label_file))


class Archive(NamedTuple):
    """The archive on the authors' site."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


class Cifar10(Data):
    """60,000 images of 32 x 32 pixels in 10 classes (Krizhevsky 2009).

    `path` is a folder or an archive: the binary or the Python version, extracted or as .tar.gz, or packed zips. Without
    it, $ALLMLP_DATA/cifar10 and $ALLMLP_DATA are folders. `download` gets the binary version if none is found.
    """

    path: str = ""
    download: bool = False

    def load(self) -> ImageDataset:
        batches = [f"data_batch_{part}" for part in PARTS]
        binary = partial(read_binary, label=0, labels=1)
        layouts = [
            FileLayout("cifar-10-batches-bin", [f"{name}.bin" for name in batches], ["test_batch.bin"], binary),
            FileLayout("cifar-10-batches-py", batches, ["test_batch"], partial(read_pickle, key="labels")),
            packed_layout("cifar10", "labels.npy"),
        ]
        archive = Archive(f"{SITE}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
        train, test = load(self.path, "cifar10", layouts, archive, self.download, len(CIFAR10_CLASSES))
        mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
        return ImageDataset(train, test, CIFAR10_CLASSES, mean, std)


class Cifar100(Data):
    """60,000 images of 32 x 32 pixels in 100 fine or 20 coarse classes. Paths as for Cifar10."""

    path: str = ""
    labels: Literal["fine", "coarse"] = "fine"
    download: bool = False

    def load(self) -> ImageDataset:
        fine, class_names = self.labels == "fine", FINE_CLASSES if self.labels == "fine" else COARSE_CLASSES
        binary = partial(read_binary, label=int(fine), labels=2)
        pickled = partial(read_pickle, key=f"{self.labels}_labels")
        layouts = [
            FileLayout("cifar-100-binary", ["train.bin"], ["test.bin"], binary),
            FileLayout("cifar-100-python", ["train"], ["test"], pickled),
            packed_layout("cifar100", "labels.npy" if fine else "coarse.npy"),
        ]
        archive = Archive(f"{SITE}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")
        train, test = load(self.path, "cifar100", layouts, archive, self.download, len(class_names))
        mean, std = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)
        return ImageDataset(train, test, class_names, mean, std)


# --- files --------------------------------------------------------------------------------------------


def load(
    path: str, name: str, layouts: list[FileLayout], archive: Archive, online: bool, num_classes: int
) -> tuple[InMemory, InMemory]:
    folders, incomplete = search_paths(path, name), list[str]()
    archives = archive.file.replace("binary", "*")
    opened = next(filter(None, (find_layout(folder, layouts, archives, incomplete) for folder in folders)), None)
    if opened is None and online:
        target = folders[0].parent if folders[0].is_file() else folders[0]
        download(archive.url, archive.md5, target / archive.file)
        opened = open_archive(target / archive.file, layouts)
    if opened is None:
        has_images = path and any(is_image_name(file.name) for file in expand_user(path).rglob("*"))
        raise UserError(
            f"{incomplete[0] if incomplete else f'no {name} in {join_paths(folders)}'}: put {archive.file} there "
            f"(from {archive.url}), set data.path or $ALLMLP_DATA to its folder, or set data.download=true"
            + (f"; for its own images: --set data=ImageFolder --set data.path={path}" if has_images else "")
        )
    layout, place, read_file = opened
    train, test = (split(layout, names, place, read_file, num_classes) for names in (layout.train, layout.test))
    return train, test


OpenLayout = tuple[FileLayout, Path, Callable[[str], bytes]]


def find_layout(place: Path, layouts: list[FileLayout], archives: str, incomplete: list[str]) -> OpenLayout | None:
    """The first complete layout in a folder or archive; messages about incomplete ones are added to `incomplete`."""
    if place.is_file():
        return open_archive(place, layouts)
    for layout in layouts:
        for folder in (place / layout.folder, place):
            missing = [name for name in layout.train + layout.test if not (folder / name).is_file()]
            if not missing:
                return layout, folder, lambda name, folder=folder: (folder / name).read_bytes()
            if len(missing) < len(layout.train + layout.test):
                incomplete.append(f"{folder} is incomplete, without {', '.join(missing)}")
    return next(filter(None, (open_archive(archive, layouts) for archive in sorted(place.glob(archives)))), None)


def open_archive(archive: Path, layouts: list[FileLayout]) -> OpenLayout | None:
    """The layout of a .tar.gz, whose files are read into memory."""
    names = {name for layout in layouts for name in layout.train + layout.test}
    content: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in names:
                    if member.size > MAX_MEMBER_BYTES:
                        raise UserError(f"{archive}: {name} is too large for this dataset")
                    source = tar.extractfile(member)
                    content[name] = source.read() if source else b""
    except DAMAGED as reason:
        raise UserError(f"{archive} is damaged or not a .tar.gz: {one_line(reason)}; download it again") from None
    complete = (layout for layout in layouts if content.keys() >= {*layout.train, *layout.test})
    return next(((layout, archive, content.__getitem__) for layout in complete), None)


def split(
    layout: FileLayout, names: Iterable[str], place: Path, read_file: Callable[[str], bytes], num_classes: int
) -> InMemory:
    images, labels = [], []
    for name in names:
        try:
            part_images, part_labels = layout.read(read_file(name))
            if not len(part_images) or len(part_images) != len(part_labels):
                raise UserError(f"has {len(part_images)} images and {len(part_labels)} labels")
            if part_labels.min() < 0 or part_labels.max() >= num_classes:
                raise UserError(f"has labels outside 0 to {num_classes - 1}")
        except (UserError, *DAMAGED) as reason:
            raise UserError(f"{place / name}: {one_line(reason)}") from None
        images.append(torch.from_numpy(part_images))
        labels.append(torch.from_numpy(part_labels.astype(np.int64)))
    return InMemory(torch.cat(images), torch.cat(labels))


# --- reading --------------------------------------------------------------------------------------------


def read_binary(data: bytes, label: int, labels: int) -> Arrays:
    """Records of `labels` bytes and 3,072 pixels in the order red, green, blue."""
    record = labels + PIXELS
    if not data or len(data) % record:
        raise UserError(f"its {len(data):,} bytes are not a multiple of the record size {record}; download it again")
    records = np.frombuffer(bytearray(data), dtype=np.uint8).reshape(-1, record)
    return np.ascontiguousarray(records[:, labels:]).reshape(-1, 3, 32, 32), records[:, label].copy()


def read_packed(data: bytes, label_file: str) -> Arrays:
    """A zip of labels and WebP strips of vertically stacked images."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_MEMBER_BYTES:
                raise UserError("is too large for this dataset")
            labels = np.load(io.BytesIO(archive.read(label_file)), allow_pickle=False)
            encoded = [archive.read(name) for name in sorted(archive.namelist()) if name.endswith(".webp")]
        with ThreadPoolExecutor() as pool:
            strips = list(pool.map(read_strip, encoded))
    except (KeyError, ValueError, *DAMAGED) as reason:
        raise UserError(f"is damaged: {one_line(reason)}") from None
    if not strips or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError("has no images, or its labels are not a list of integers")
    return np.ascontiguousarray(np.concatenate(strips).transpose(0, 3, 1, 2)), labels


def read_strip(data: bytes) -> np.ndarray:
    Image = require("PIL.Image", "train")
    with Image.open(io.BytesIO(data), formats=["WEBP"]) as strip:
        if strip.width != 32 or strip.height % 32:
            raise UserError("a strip does not consist of 32 x 32 images")
        return np.asarray(strip.convert("RGB")).reshape(-1, 32, 32, 3)


def read_pickle(data: bytes, key: str) -> Arrays:
    """The Python version: a pickled dictionary of an array and lists."""
    try:
        batch = Unpickler(io.BytesIO(data), encoding="latin1").load()
        batch = {name.decode("latin1") if isinstance(name, bytes) else name: value for name, value in batch.items()}
        pixels = batch["data"].pixels()
        labels = np.array(batch[key], dtype=np.int64)
    except UserError:
        raise
    except Exception as reason:  # damaged pickles raise many types
        kind = type(reason).__name__
        raise UserError(f"is not a CIFAR batch ({kind}: {one_line(reason)}); download it again") from None
    return pixels, labels


class ArrayStub:
    """Replaces a numpy array in a pickle and only keeps its state."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        _, shape, kind, fortran, data = self.state
        if not isinstance(kind, DtypeStub) or kind.name != "u1" or fortran or len(shape) != 2 or shape[1] != PIXELS:
            raise UserError("does not contain rows of 3,072 bytes")
        data = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape[0], 3, 32, 32)


class DtypeStub:
    """Replaces a numpy dtype in a pickle."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass


def encode(text: str, _: str = "latin1") -> bytes:
    """Old pickle protocols store bytes as text to be encoded."""
    return text.encode("latin1")


class Unpickler(pickle.Unpickler):
    """Resolves the names in a CIFAR batch to inert stubs and refuses all others."""

    allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): ArrayStub,
        ("numpy._core.multiarray", "_reconstruct"): ArrayStub,
        ("numpy", "ndarray"): ArrayStub,
        ("numpy", "dtype"): DtypeStub,
        ("_codecs", "encode"): encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise UserError(f"refused: the pickle refers to {module}.{name}, which no CIFAR batch does") from None
