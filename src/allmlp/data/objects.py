"""Data that exist as Python objects: a torch Dataset, a table of `datasets`, a list of pairs (`Data.of`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmlp.data.dataset import Data, ImageDataset, LabeledImages, Split, Subset
from allmlp.data.decode import Decode, crop_and_resize
from allmlp.data.splits import split_by_group
from allmlp.errors import UserError, one_line, require
from allmlp.spec import Count, Rate, Size

INPUT_KEYS = ("image", "img", "pixel_values", "input")
LABEL_KEYS = ("label", "labels", "target", "fine_label")
CONTENT_SAMPLES = 64
"""Items that are part of the checksum."""


class Objects(NamedTuple):
    """Indexable collections of items: pairs (image, label), or mappings with an image and a label."""

    train: Any
    test: Any
    validation: Any
    class_names: tuple[str, ...]


OBJECTS: dict[ObjectData, Objects] = {}
"""The objects of every spec that `Data.of` has made in this process."""


class ObjectData(Data):
    """Labeled images given as objects; made by `Data.of`.

    A run that is trained on it records name and sizes only. To resume, call `Data.of` with the same objects again.
    Images are PIL images or uint8 arrays [H, W, C], which are cropped and resized as files are, or tensors [C, H, W]:
    uint8, or float as the model is to see them.
    """

    name: str
    examples: Count
    test_examples: int = 0
    img_size: Size = (224, 224)
    test_fraction: Rate = 0.15
    split_seed: int = 0
    decode: Decode = Decode()

    @staticmethod
    def of_objects(
        train: Any,
        test: Any = None,
        *,
        validation: Any = None,
        class_names: Sequence[str] = (),
        img_size: int | tuple[int, int] | None = None,
        name: str = "",
        decode: Decode = Decode(),
    ) -> ObjectData:
        """The spec of data that are given as objects."""
        for part in filter(lambda part: part is not None, (train, test, validation)):
            if not hasattr(part, "__getitem__") or not hasattr(part, "__len__"):
                raise UserError(f"{type(part).__name__} has no length or cannot be indexed: give a map-style dataset")
            if not len(part):
                raise UserError(f"{type(part).__name__} is empty")
        first = read_item(train, 0, name or type(train).__name__)
        size = img_size or own_size(first.image)
        spec = ObjectData(
            name or f"{type(train).__module__}.{type(train).__qualname__}",
            len(train),
            0 if test is None else len(test),
            (size, size) if isinstance(size, int) else tuple(size),
            decode=decode if color_channels(first.image) == 3 else decode.replace(color="gray"),
        )
        names = tuple(class_names) or known_classes(train)
        known = OBJECTS.get(spec)
        if known is not None and known.train is not train:
            raise UserError(f"two datasets of {len(train)} examples are called {spec.name!r}: give each a name=")
        OBJECTS[spec] = Objects(train, test, validation, names)
        return spec

    def load(self) -> ImageDataset:
        if self not in OBJECTS:
            raise UserError(
                f"the data {self.name!r} are Python objects, which a run does not keep: pass them again, "
                "allmlp.train(run.replace(data=Data.of(dataset)), out)"
            )
        objects = OBJECTS[self]
        whole = self.split(objects.train)
        names = objects.class_names or tuple(map(str, range(int(whole.labels.max()) + 1)))
        given = [None if part is None else self.split(part) for part in (objects.validation, objects.test)]
        for split in filter(None, (whole, *given)):
            check_labels(split, names)
        train, validation, test = (whole, *given) if given[1] else self.divide(whole)
        assert test is not None
        first = whole.fetch(torch.tensor([0])).images
        plain = (0.0,) * first.shape[1], (1.0,) * first.shape[1]
        mean, std = plain if first.is_floating_point() else self.decode.statistics()
        return ImageDataset(train, test, names, mean, std, self.decode.crop_pct, validation=validation)

    def split(self, items: Any) -> ObjectImages:
        return ObjectImages(items, self.name, self.img_size, self.decode)

    def divide(self, split: ObjectImages) -> tuple[Split, Split, Split]:
        labels = split.labels.tolist()
        numbers = list(range(len(labels)))
        found = split_by_group(
            labels, numbers, list(map(str, numbers)), self.test_fraction, self.test_fraction, self.split_seed
        )
        train, validation, test = (Subset(split, torch.tensor(indices)) for indices in found)
        return train, validation, test


class Item(NamedTuple):
    image: Any
    label: int


def read_item(items: Any, index: int, name: str) -> Item:
    """One item of any of the forms, or a UserError that says what was found."""
    where = f"item {index} of {name}"
    try:
        item = items[index]
    except UserError:
        raise
    except Exception as reason:  # the user's own code
        raise UserError(f"{where}: {type(reason).__name__}: {one_line(reason)}") from reason
    if isinstance(item, Mapping):
        keys = [next((key for key in known if key in item), None) for known in (INPUT_KEYS, LABEL_KEYS)]
        if None in keys:
            raise UserError(f"{where} has the keys {', '.join(map(str, item))}: it needs image and label")
        image, label = (item[key] for key in keys)
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        image, label = item
    else:
        raise UserError(f"{where} is {type(item).__name__}: expected (image, label), or a mapping with both")
    try:
        return Item(image, int(label))
    except (TypeError, ValueError):
        raise UserError(f"{where} has the label {label!r}: expected the number of a class") from None


def own_size(image: Any) -> tuple[int, int]:
    """Height and width of an image of any form."""
    if isinstance(image, Tensor):
        return int(image.shape[-2]), int(image.shape[-1])
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    if hasattr(image, "height"):
        return image.height, image.width
    raise UserError(f"an image is a PIL image, an array [H, W, C] or a tensor [C, H, W], not {type(image).__name__}")


def color_channels(image: Any) -> int:
    if isinstance(image, Tensor):
        return image.shape[0]
    if isinstance(image, np.ndarray):
        return image.shape[2] if image.ndim == 3 else 1
    return 1 if image.mode in ("L", "1", "I", "I;16") else 3


def known_classes(items: Any) -> tuple[str, ...]:
    """Class names, where torchvision's or Hugging Face's datasets have them."""
    for feature in (getattr(items, "features", None) or {}).values():
        if getattr(feature, "names", None):
            return tuple(feature.names)
    return tuple(map(str, getattr(items, "classes", ())))


class ObjectImages:
    """A split whose examples are items of an object. Items are read in threads, as the loop needs them."""

    def __init__(self, items: Any, name: str, img_size: tuple[int, int], decode: Decode) -> None:
        self.items, self.name, self.img_size, self.decode = items, name, img_size, decode

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def labels(self) -> Tensor:
        """From `targets` as torchvision has them, the label column of a table, or else all items."""
        targets = getattr(self.items, "targets", None)
        columns = getattr(self.items, "column_names", ())
        column = next((key for key in LABEL_KEYS if key in columns), None)
        if targets is None and column is not None:
            targets = self.items[column]
        if targets is None:
            targets = [read_item(self.items, index, self.name).label for index in range(len(self))]
        return torch.as_tensor(targets).long()

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> LabeledImages:
        rows = uniforms.tolist() if uniforms is not None else [None] * len(indices)
        found = [self.read(index, row) for index, row in zip(indices.tolist(), rows)]
        return LabeledImages(torch.stack([image for image, _ in found]), torch.tensor([label for _, label in found]))

    def read(self, index: int, uniforms: list[float] | None) -> tuple[Tensor, int]:
        image, label = read_item(self.items, index, self.name)
        if isinstance(image, Tensor):
            if image.dim() != 3 or tuple(image.shape[1:]) != self.img_size:
                height, width = self.img_size
                raise UserError(
                    f"item {index} of {self.name} is a tensor {list(image.shape)}, but the first one "
                    f"[C, {height}, {width}]: resize the tensors in the dataset, or return PIL images"
                )
            return image, label
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8:
                raise UserError(f"item {index} of {self.name} is a {image.dtype} array: use uint8, or a float tensor")
            image = require("PIL.Image", "train").fromarray(image.squeeze())
        return crop_and_resize(image, self.img_size, self.decode, uniforms), label

    def content(self) -> Iterator[Any]:
        yield f"{self.name} {len(self)}".encode()
        for index in torch.linspace(0, len(self) - 1, min(CONTENT_SAMPLES, len(self))).long().tolist():
            image, label = self.read(index, None)
            yield label.to_bytes(8, "little", signed=True)
            yield image.contiguous().numpy()


def check_labels(split: ObjectImages, class_names: tuple[str, ...]) -> None:
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= len(class_names):
        raise UserError(
            f"{split.name} has the label {low if low < 0 else high}, but there are {len(class_names)} classes, 0 to "
            f"{len(class_names) - 1}"
        )
    if len(class_names) < 2:
        raise UserError(f"{split.name} has only one class: at least two are needed")
