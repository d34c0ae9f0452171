"""Data that exist as Python objects: a torch Dataset, a table of `datasets`, a list of tuples (`Data.of`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from allmlp.data.columns import LABEL_COLUMNS, TEXT_COLUMNS, TEXT_PAIR_COLUMNS, is_image_name, label_order
from allmlp.data.dataset import Data, ImageDataset, LabeledImages, evenly_spaced
from allmlp.data.decode import CorruptImage, Decode, as_tensor, crop_and_resize
from allmlp.data.encoded_images import image_dataset
from allmlp.data.labeled_text import LabeledText, LabeledTextDataset, TextExample
from allmlp.data.splits import divide, listing
from allmlp.data.tokenizer import TextData, TokenizerConfig
from allmlp.errors import UserError, did_you_mean, one_line, require
from allmlp.spec import Count, Rate, Size

IMAGE_KEYS = ("image", "img", "pixel_values", "input")
LABEL_KEYS = (*LABEL_COLUMNS, "fine_label")
CONTENT_SAMPLES = 64
"""Items that are part of the checksum."""
COLOR_SAMPLES = 8
"""Items that are searched for a colored image; the first alone may be gray by chance."""
MAX_CLASSES = 1_000_000


class Objects(NamedTuple):
    """Indexable collections of items, see `read_item`."""

    train: Any
    test: Any
    validation: Any
    class_names: tuple[str, ...]


NEWEST: dict[tuple[str, int, int], Objects] = {}
"""Objects last passed to `Data.of` in this process, by name and sizes, for runs read from their folder."""


class ObjectData(Data, abstract=True):
    """Labeled examples given as Python objects; created by `Data.of`.

    The spec and its copies hold the objects. A run records only name and sizes: to resume it in another process, call
    `Data.of` with the same objects again.
    """

    name: str
    examples: Count
    test_examples: int = 0

    @property
    def objects(self) -> Objects:
        objects = getattr(self, "_objects", None) or NEWEST.get((self.name, self.examples, self.test_examples))
        if objects is None:
            raise UserError(
                f"the data {self.name!r} are Python objects, which a run does not keep: pass them again, "
                "allmlp.train(run.replace(data=Data.of(dataset)), out)"
            )
        return objects

    def hold(self, objects: Objects) -> Self:
        NEWEST[self.name, self.examples, self.test_examples] = objects
        object.__setattr__(self, "_objects", objects)
        return self

    def replace(self, **changes: Any) -> Self:
        objects, copied = getattr(self, "_objects", None), super().replace(**changes)
        if objects is not None:
            object.__setattr__(copied, "_objects", objects)
        return copied


def of_objects(
    train: Any,
    test: Any = None,
    *,
    validation: Any = None,
    class_names: Sequence[str] = (),
    name: str = "",
    img_size: int | tuple[int, int] | None = None,
    decode: Decode | None = None,
    tokenizer: str | os.PathLike[str] | TokenizerConfig | None = None,
    seq_len: int | None = None,
) -> Data:
    """Implementation of `Data.of`."""
    for part in (train, *(part for part in (test, validation) if part is not None)):
        kind = type(part).__name__
        if isinstance(part, Mapping):
            keys = ", ".join(map(str, part))
            raise UserError(f"{kind} is a mapping, of {keys}: pass its splits, Data.of(train, test)")
        if not hasattr(part, "__getitem__") or not hasattr(part, "__len__"):
            raise UserError(f"{kind} has no length or cannot be indexed: give a map-style dataset")
        if not len(part):
            raise UserError(f"{kind} is empty")
    name = name or f"{type(train).__module__}.{type(train).__qualname__}"
    first = read_item(train, 0, name).content
    sizes = len(train), 0 if test is None else len(test)
    is_text = isinstance(first, str)
    other = {"img_size": img_size, "decode": decode} if is_text else {"tokenizer": tokenizer, "seq_len": seq_len}
    for option, value in other.items():
        if value is not None:
            raise UserError(f"{name} has {'texts' if is_text else 'images'}, for which there is no {option}")
    if is_text:
        path = tokenizer if isinstance(tokenizer, TokenizerConfig) or tokenizer is None else os.fspath(tokenizer)
        config = TokenizerConfig(path=path) if isinstance(path, str) else path or TokenizerConfig()
        spec: ObjectData = ObjectTextData(name, *sizes, tokenizer=config, seq_len=128 if seq_len is None else seq_len)
    else:
        size, decode = img_size or own_size(first), decode or Decode()
        shape = (size, size) if isinstance(size, int) else tuple(size)
        some = evenly_spaced(len(train), min(len(train), COLOR_SAMPLES)).tolist()
        colored = any(color_channels(read_item(train, index, name).content) >= 3 for index in some)
        decode = decode if colored else decode.replace(color="gray")
        spec = ObjectImageData(name, *sizes, img_size=shape, decode=decode)
    return spec.hold(Objects(train, test, validation, tuple(class_names) or known_classes(train)))


# --- items --------------------------------------------------------------------------------------------------


class LabeledItem(NamedTuple):
    content: Any
    """A text or an image."""
    second: Any
    """The second text of a pair; None if there is none."""
    label: Any


def read_item(items: Any, index: int, name: str) -> LabeledItem:
    """Read an item in any of the accepted forms; UserError for others."""
    where = f"item {index} of {name}"
    try:
        item = items[index]
    except UserError:
        raise
    except Exception as reason:  # the user's own code
        raise UserError(f"{where}: {type(reason).__name__}: {one_line(reason)}") from reason
    if isinstance(item, Mapping):
        content = next((key for key in (*IMAGE_KEYS, *TEXT_COLUMNS) if key in item), None)
        label = next((key for key in LABEL_KEYS if key in item), None)
        if content is None or label is None:
            raise UserError(f"{where} has the keys {', '.join(map(str, item))}: it needs image or text, and label")
        second = next((key for key in TEXT_PAIR_COLUMNS if key in item and key != content), None)
        labeled = LabeledItem(item[content], item[second] if second else None, item[label])
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        labeled = LabeledItem(item[0], None, item[1])
    elif isinstance(item, (tuple, list)) and len(item) == 3 and isinstance(item[0], str):
        labeled = LabeledItem(*item)
    else:
        raise UserError(
            f"{where} is {type(item).__name__}: expected (image, label), (text, label) or (text, text_pair, label), "
            "or a mapping with these"
        )
    if isinstance(labeled.content, str) and is_image_name(labeled.content) and " " not in labeled.content:
        raise UserError(f"{where} has the name of an image file, {labeled.content}: return the image itself")
    return labeled


def class_number(label: Any, where: str) -> int:
    try:
        number = int(label)
        if number == label and abs(number) < MAX_CLASSES:
            return number
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise UserError(f"{where} has the label {label!r}: expected the number of a class")


def check_number(number: int, class_names: tuple[str, ...], where: str) -> None:
    if not 0 <= number < len(class_names):
        raise UserError(
            f"{where} has the label {number}, but there are {len(class_names)} classes, 0 to {len(class_names) - 1}"
        )


def known_classes(items: Any) -> tuple[str, ...]:
    """Class names of torchvision and Hugging Face datasets; other values of attributes with these names are ignored."""
    features, classes = getattr(items, "features", None), getattr(items, "classes", None)
    features = features if isinstance(features, Mapping) else {}
    label = next((key for key in LABEL_KEYS if key in features), None)
    for column in features if label is None else (label,):  # the names of another column are not those of the labels
        if getattr(features[column], "names", None):
            return tuple(features[column].names)
    names = [*classes] if isinstance(classes, (list, tuple, Mapping, np.ndarray)) else []
    are_names = all(isinstance(name, (str, tuple)) for name in names) and len({*map(str, names)}) == len(names)
    return tuple(map(str, names)) if are_names else ()


def empty_class_note(labels: Sequence[str], class_names: tuple[str, ...]) -> list[str]:
    """A note about classes without examples, which a wrong label number can cause."""
    used = set(labels)
    empty = [name for name in class_names if name not in used]
    return [f"{len(empty)} of {len(class_names)} classes have no example: {listing(empty)}"] if empty else []


# --- texts --------------------------------------------------------------------------------------------------


class ObjectTextData(ObjectData, TextData):
    """Labeled texts or pairs of texts given as objects.

    Labels are numbers of classes or their names. The other fields are those of `LabeledText`.
    """

    test_fraction: Rate = 0.15
    val_fraction: Rate | None = None
    split_seed: int = 0
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: Count = 128
    cache: str = ""

    def load(self) -> LabeledTextDataset:
        train, test, validation, names = self.objects
        items = read_texts(train, self.name)
        names = names or class_names_of([item.label for item in items], self.name)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{self.name} has two classes called {twice[0]!r}: give them different class_names")
        rows = name_labels(items, self.name, names)
        if len({row.label for row in rows}) < 2:
            raise UserError(f"{self.name} has only one class: at least two are needed")
        given = [
            [] if part is None else name_labels(read_texts(part, self.name), self.name, names)
            for part in (validation, test)
        ]
        fields = ("test_fraction", "val_fraction", "split_seed", "tokenizer", "seq_len", "cache")
        table = LabeledText(self.name, **{field: getattr(self, field) for field in fields})
        notes = empty_class_note([row.label for row in rows], names)
        return table.assemble(rows, given[0], [(self.name, given[1])] if test is not None else [], [], notes, names)


def read_texts(items: Any, name: str) -> list[LabeledItem]:
    """Read all items, with strings as texts and numbers or strings as labels."""
    labeled = []
    for index in range(len(items)):
        where, (first, second, label) = f"item {index} of {name}", read_item(items, index, name)
        second = "" if second is None else second
        for text in (first, second):
            if not isinstance(text, str):
                raise UserError(f"{where} has {type(text).__name__} as text: expected a string")
        if not first.strip():
            raise UserError(f"{where} has an empty text: leave it out")
        label = label if isinstance(label, str) else class_number(label, where)
        labeled.append(LabeledItem(first.strip(), second.strip(), label))
    return labeled


def class_names_of(labels: list[int | str], name: str) -> tuple[str, ...]:
    """Class names for data without any: the distinct labels if they are strings, else all numbers up to the largest."""
    for index, label in enumerate(labels):
        if type(label) is not type(labels[0]):
            raise UserError(
                f"item {index} of {name} has the label {label!r}, item 0 {labels[0]!r}: use only numbers or only names"
            )
    if isinstance(labels[0], str):
        return tuple(sorted({str(label) for label in labels}, key=label_order))
    return tuple(map(str, range(max(int(label) for label in labels) + 1)))


def name_labels(items: list[LabeledItem], name: str, class_names: tuple[str, ...]) -> list[TextExample]:
    rows = []
    for index, (first, second, label) in enumerate(items):
        where = f"item {index} of {name}"
        if isinstance(label, int):
            check_number(label, class_names, where)
        elif label not in class_names:
            raise UserError(f"{where} has the unknown label {label!r}{did_you_mean(label, class_names)}")
        rows.append(TextExample(first, second, class_names[label] if isinstance(label, int) else label))
    return rows


# --- images -------------------------------------------------------------------------------------------------


class ObjectImageData(ObjectData):
    """Labeled images given as objects.

    Images are PIL images or uint8 pixels (arrays [H, W, C], tensors [C, H, W]), which are cropped and resized like
    files, or float tensors [C, H, W], which are passed to the model unchanged.
    """

    img_size: Size = (224, 224)
    test_fraction: Rate = 0.15
    split_seed: int = 0
    decode: Decode = Decode()

    def load(self) -> ImageDataset:
        objects = self.objects
        whole = self.split(objects.train)
        names = objects.class_names or tuple(map(str, range(int(whole.labels.max()) + 1)))
        validation, test = (None if part is None else self.split(part) for part in (objects.validation, objects.test))
        for split in filter(None, (whole, validation, test)):
            split.check_labels(names)
        if len(whole.labels.unique()) < 2:
            raise UserError(f"{self.name} has only one class: at least two are needed")
        first = whole.fetch(torch.tensor([0])).images
        for split in filter(None, (validation, test)):
            split.form = whole.form
        val_fraction = 0.0 if validation else self.test_fraction
        parts = (whole, None, test) if test else divide(whole, val_fraction, self.test_fraction, self.split_seed)
        notes = empty_class_note([names[label] for label in whole.labels.unique().tolist()], names)
        dataset = image_dataset((parts[0], validation or parts[1], parts[2]), names, self.decode, notes)
        if first.is_floating_point():  # as the model reads them
            dataset = replace(dataset, mean=(0.0,) * first.shape[1], std=(1.0,) * first.shape[1])
        return dataset

    def split(self, items: Any) -> ObjectImages:
        return ObjectImages(items, self.name, self.img_size, self.decode)


def own_size(image: Any) -> tuple[int, int]:
    """Height and width of an image of any form."""
    if isinstance(image, Tensor):
        return int(image.shape[-2]), int(image.shape[-1])
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    if hasattr(image, "height"):
        return image.height, image.width
    raise UserError(
        f"an item holds {type(image).__name__}: expected a PIL image, an array [H, W, C], a tensor [C, H, W] or a text"
    )


def color_channels(image: Any) -> int:
    if isinstance(image, Tensor):
        return image.shape[0]
    if isinstance(image, np.ndarray):
        return image.shape[2] if image.ndim == 3 else 1
    return 1 if getattr(image, "mode", "") in ("L", "1", "I", "I;16") else 3


class ObjectImages:
    """A split whose examples are items of a collection, read in threads on demand."""

    def __init__(self, items: Any, name: str, img_size: tuple[int, int], decode: Decode) -> None:
        self.items, self.name, self.img_size, self.decode = items, name, img_size, decode
        self.form: tuple[torch.dtype, int] | None = None
        """Dtype and number of channels of the first image that was read."""

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def labels(self) -> Tensor:
        """Labels from torchvision's `targets`, else from the label column of a table, else from all items."""
        raw = getattr(self.items, "target_transform", None) is None
        targets = getattr(self.items, "targets", None) if raw else None
        columns = getattr(self.items, "column_names", ())
        column = next((key for key in LABEL_KEYS if isinstance(columns, (list, tuple)) and key in columns), None)
        if targets is None and column is not None:
            targets = self.items[column]
        if targets is None:
            targets = [read_item(self.items, index, self.name).label for index in range(len(self))]
        elif len(targets) != len(self):
            raise UserError(f"{self.name} has {len(self)} items, but {len(targets)} targets")
        return torch.tensor([class_number(label, self.where(index)) for index, label in enumerate(targets)])

    def check_labels(self, class_names: tuple[str, ...]) -> None:
        for index in ((self.labels < 0) | (self.labels >= len(class_names))).nonzero().flatten().tolist():
            check_number(int(self.labels[index]), class_names, self.where(index))

    def where(self, index: int) -> str:
        return f"item {index} of {self.name}"

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> LabeledImages:
        rows = uniforms.tolist() if uniforms is not None else [None] * len(indices)
        images = torch.stack([self.read(index, row) for index, row in zip(indices.tolist(), rows)])
        return LabeledImages(images, self.labels[indices])

    def read(self, index: int, uniforms: list[float] | None) -> Tensor:
        (image, _, label), where = read_item(self.items, index, self.name), self.where(index)
        expected = int(self.labels[index])
        if class_number(label, where) != expected:
            before = f"{expected} before, or in its targets"
            raise UserError(f"{where} has the label {label}, but {before}: labels must not vary")
        if isinstance(image, Tensor):
            is_pixels = image.dtype == torch.uint8
            if image.dim() != 3 or (not is_pixels and tuple(image.shape[1:]) != self.img_size):
                height, width = self.img_size
                raise UserError(
                    f"{where} is a tensor {list(image.shape)}, not [C, {height}, {width}]: resize the tensors in the "
                    "dataset, or return PIL images"
                )
            if not is_pixels and not image.is_floating_point():
                raise UserError(f"{where} is a tensor of {image.dtype}: use uint8 for pixels, or a float tensor")
            if not is_pixels:
                image = image.float()  # models do not take float64, numpy's default
                self.check_form(image, where)
                return image
            image = image.movedim(0, -1).numpy()
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8:
                raise UserError(f"{where} is a {image.dtype} array: use uint8, or a float tensor")
            image = self.to_image(image, where)
        elif not hasattr(image, "getexif"):
            raise UserError(f"{where} is {type(image).__name__}, but item 0 is an image")
        try:
            image.load()  # whole: an opened JPEG would keep the reduced size at which a crop is decoded
            pixels = as_tensor(crop_and_resize(image, self.img_size, self.decode, uniforms))
        except (OSError, CorruptImage) as reason:
            raise UserError(f"{where}: {one_line(reason)}") from reason
        self.check_form(pixels, where)
        return pixels

    def to_image(self, pixels: np.ndarray, where: str) -> Any:
        try:
            return require("PIL.Image", "train").fromarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels)
        except (TypeError, ValueError):
            raise UserError(f"{where} has pixels of the shape {list(pixels.shape)}, which is not an image") from None

    def check_form(self, image: Tensor, where: str) -> None:
        """Raise UserError unless all images have the same channels and dtype, on which normalization depends."""
        form = image.dtype, len(image)
        if self.form is None:
            self.form = form
        if form != self.form:
            kinds = [f"{dtype} with {count} channels" for dtype, count in (form, self.form)]
            kind, others = (kind.removeprefix("torch.") for kind in kinds)
            raise UserError(f"{where} is {kind}, others are {others}: all images must be alike")

    def content(self) -> Iterator[Any]:
        yield f"{self.name} {len(self)}".encode()
        yield self.labels.numpy()
        for index in evenly_spaced(len(self), min(len(self), CONTENT_SAMPLES)).tolist():
            yield self.read(index, None).contiguous().numpy()
