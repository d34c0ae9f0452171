"""Base classes: a spec (`Data`) loads a `Dataset`, whose splits return examples by index.

The indices of each step are computed from the seed and the step (`data.sampler`), so splits have no state and a resumed
run gets the same examples.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from allmlp.data.preprocessing import PREPROCESSING_FILE, ImagePreprocessing
from allmlp.device import upload
from allmlp.errors import UserError
from allmlp.spec import Spec, to_json

Examples = Any
"""A NamedTuple of tensors with the examples along the first axis: `LabeledImages`, or another one for text."""


def map_tensors(examples: Examples, change: Callable[[Tensor], Tensor]) -> Examples:
    """Apply a function to every tensor of the examples."""
    return type(examples)(*map(change, examples))


class LabeledImages(NamedTuple):
    images: Tensor
    """uint8, b c h w."""
    labels: Tensor
    """int64, b."""


class Split(Protocol):
    """One part of a dataset."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> Examples:
        """The examples at `indices` (int64, b), on the split's device.

        `uniforms` in [0, 1), b 4, are for splits that take random crops when decoding; without them images are
        preprocessed as for evaluation.
        """
        ...

    def content(self) -> Iterator[Any]:
        """Buffers of bytes that identify the examples: all of them, or names and samples of large data."""
        ...


class InMemory:
    """A split held in memory, on the device of the model: small images, text."""

    def __init__(self, *tensors: Tensor, batch_type: Callable[..., Examples] = LabeledImages) -> None:
        self.examples = batch_type(*tensors)

    def __len__(self) -> int:
        return len(self.examples[0])

    def to(self, device: torch.device | str) -> InMemory:
        return InMemory(*(tensor.to(device) for tensor in self.examples), batch_type=type(self.examples))

    def take(self, indices: Tensor) -> InMemory:
        """Some of the examples."""
        return InMemory(*self.fetch(indices), batch_type=type(self.examples))

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> Examples:
        indices = upload(indices, self.examples[0].device)
        return map_tensors(self.examples, lambda tensor: tensor[indices])

    def content(self) -> Iterator[Any]:
        for tensor in self.examples:
            yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            yield tensor.cpu().contiguous().numpy()


class Subset:
    """Some examples of another split."""

    def __init__(self, split: Split, indices: Tensor) -> None:
        within = getattr(split, "within", None)  # a corrupt image is replaced by another of these
        self.split, self.indices = within(indices) if within else split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, uniforms: Tensor | None = None) -> LabeledImages:
        return self.split.fetch(self.indices[indices.to(self.indices.device)], uniforms)

    def content(self) -> Iterator[Any]:
        yield self.indices.numpy()
        yield from self.split.content()


@dataclass(frozen=True)
class Dataset:
    """A loaded dataset: its training and test split, and a validation split if the data have one."""

    split_by_time: ClassVar[bool] = False
    """Whether no examples can be held out of the training split, since they overlap with the others."""
    train: Split
    test: Split
    validation: Split | None = field(default=None, kw_only=True)
    """Evaluated during training, for choosing hyperparameters; the test split is then evaluated only at the end."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Notes from loading, one sentence each: guessed columns, skipped files, duplicates across splits."""

    def split_validation(self, examples: int) -> Self:
        """Hold out `examples` of the training split and evaluate nothing else, to choose hyperparameters."""
        if not examples:
            return self
        if not 0 < examples < len(self.train):
            raise UserError(f"cannot hold out {examples} of {len(self.train)} training examples: lower val_size")
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        train, validation = order[examples:].sort().values, order[:examples].sort().values
        return replace(self, train=subset(self.train, train), test=subset(self.train, validation), validation=None)

    def take_fraction(self, fraction: float) -> Self:
        """Keep this fraction of every class of the training split; a smaller fraction is a subset of a larger one."""
        if fraction == 1:
            return self
        labels = classes_of(self.train)
        groups = shuffled_classes(torch.zeros(len(self.train)) if labels is None else labels, seed=0)
        kept = torch.cat([some[: max(round(fraction * len(some)), 1)] for some in groups])
        return replace(self, train=subset(self.train, kept.sort().values))

    def take_per_class(self, count: int | None, seed: int) -> Self:
        """Keep `count` training examples per class, chosen by `seed` (all of a smaller class, and all without a label);
        with the same seed, a smaller count gives a subset.
        """
        if count is None:
            return self
        labels = classes_of(self.train)
        if labels is None:
            raise UserError("train_per_class needs data with one class per example: use train_fraction")
        # Unlabeled examples (negative labels) belong to no class and are all kept.
        groups = shuffled_classes(labels, seed)
        kept = torch.cat([some if labels[some[0]] < 0 else some[:count] for some in groups])
        small = sum(len(some) < count for some in groups if labels[some[0]] >= 0)
        classes = "class has" if small == 1 else "classes have"
        notes = (f"{small:,} {classes} fewer than {count:,} training examples",) if small else ()
        return replace(self, train=subset(self.train, kept.sort().values), notes=(*self.notes, *notes))

    def checksum(self) -> str:
        """SHA-256 of the training and evaluation data."""
        digest = hashlib.sha256()
        for buffer in self.content():
            digest.update(buffer)
        return digest.hexdigest()

    def content(self) -> Iterator[Any]:
        """Buffers of bytes that identify the dataset."""
        for split in filter(None, (self.train, self.validation, self.test)):
            yield from split.content()

    def files(self) -> dict[str, str]:
        """Name -> text of the files that are saved next to a model trained on this dataset."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Labeled images."""

    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Standard deviation of the pixels divided by 255, per channel."""
    crop_pct: float = 1.0
    """Center crop for evaluation, as a fraction of the short side."""
    image_column: str = field(default="", kw_only=True)
    label_column: str = field(default="", kw_only=True)
    """The columns of the table that lists the images, if there is one."""

    def files(self) -> dict[str, str]:
        task = "classes" if self.class_names else "values"
        columns = self.image_column, self.label_column
        preprocessing = ImagePreprocessing(self.mean, self.std, self.class_names, self.crop_pct, task, *columns)
        return {PREPROCESSING_FILE: to_json(preprocessing)}


def evenly_spaced(count: int, chosen: int) -> Tensor:
    """Indices of `chosen` of `count` examples, from the first to the last; some are repeated if there are fewer."""
    # In float32, for compatible checksums; above 2^24 examples an index may be rounded beyond the last.
    return torch.linspace(0, count - 1, chosen).long().clamp(max=count - 1)


def subset(split: Split, indices: Tensor) -> Split:
    if isinstance(split, InMemory):
        return split.take(indices)
    if isinstance(split, Subset):
        return Subset(split.split, split.indices[indices])
    return Subset(split, indices)


def labels_of(split: Split) -> Tensor:
    """All labels of a split, int64, without decoding images."""
    if isinstance(split, Subset):
        return labels_of(split.split)[split.indices]
    return split.examples.labels if isinstance(split, InMemory) else split.labels  # type: ignore[attr-defined]


def classes_of(split: Split) -> Tensor | None:
    """The class of each example; None for text without labels, numbers to predict, or several classes per example."""
    try:
        labels = labels_of(split)
    except AttributeError:
        return None
    return None if labels.is_floating_point() or labels.dim() != 1 else labels


def shuffled_classes(labels: Tensor, seed: int) -> list[Tensor]:
    """The indices of the examples of each class, in random order."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [order[labels[order] == label] for label in labels.unique()]


class Data(Spec, abstract=True):
    """Spec of a dataset."""

    @staticmethod
    def of(train: Any, test: Any = None, **options: Any) -> Data:
        """Use an indexable collection of labeled images or texts as data: a torch Dataset, a table of `datasets`, a
        list.

        >>> allmlp.train(Data.of(torchvision_dataset), "runs/photos")
        >>> run = run.replace(data=Data.of([("a fine film", 1), ("a bore", 0), ...], seq_len=64))

        Items are (image, label), (text, label) or (text, text_pair, label), or mappings with these keys. Without
        `test`, a part of every class is held out. The options are `validation`, `class_names` and `name`; for images
        `img_size` and `decode` (crops); for texts `tokenizer` (a file, a folder or a `TokenizerConfig`) and `seq_len`.
        """
        # Imported by name, since that module imports this one.
        return importlib.import_module("allmlp.data.objects").of_objects(train, test, **options)

    def load(self) -> Dataset:
        raise NotImplementedError

    def for_model(self, folder: str) -> Self:
        """This dataset as the model in `folder` expects it, for instance with its tokenizer."""
        return self
