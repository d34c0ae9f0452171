"""The model to analyze, and example images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.token_filters import evenly_spaced
from allmlp.data.dataset import Split
from allmlp.data.decode import SUFFIXES, Decode, read_images
from allmlp.data.preprocessing import TOKENIZER_FILES, ImagePreprocessing, SeriesPreprocessing, known_preprocessing
from allmlp.data.tokenizer import Tokenizer, load_tokenizer
from allmlp.errors import UserError, plural
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import create
from allmlp.tasks.task import Normalize
from allmlp.weights import folder
from allmlp.weights.bundled import BUNDLED, BUNDLED_PREFIX, model_path

MAC_BUDGET = 5e11
"""Multiply-adds of one section by default: half a minute on a CPU core."""


class NamedImages(NamedTuple):
    names: tuple[str, ...]
    pixels: Tensor
    """In [0, 1], at the model's input size, b c h w."""
    labels: Tensor | None = None
    """int64, b, for classes; floats for regression targets; None if they are not known."""


@dataclass(frozen=True)
class AnalysisTarget:
    name: str
    model: Model
    """In evaluation mode, with frozen weights."""
    trained: bool
    preprocessing: ImagePreprocessing | None = None
    """None for a model that does not read images."""
    tokenizer: Tokenizer | None = None
    """None for a model that does not read text, and for one that is not in a folder."""
    columns: tuple[str, ...] = ()
    """Columns of the table that a time-series model was trained on."""

    @property
    def output(self) -> Literal["classes", "values", "features"]:
        """Output of an image model's head: class scores, other numbers, or features if there is no head."""
        if not self.model.spec.has_head:
            return "features"
        return self.preprocessing.task if self.preprocessing else "classes"

    def class_name(self, label: int) -> str:
        names = self.preprocessing.class_names if self.preprocessing else ()
        return names[label] if label < len(names) else f"class {label}"

    def has_class_labels(self, labels: Tensor) -> bool:
        is_regression = self.preprocessing is not None and self.preprocessing.task == "values"
        return not (is_regression or labels.is_floating_point())

    def label_text(self, label: Tensor) -> str:
        if self.has_class_labels(label):
            return self.class_name(int(label))
        return " ".join(f"{value:.3g}" for value in label.flatten().tolist())

    def normalize(self, pixels: Tensor) -> Tensor:
        """The model's input for pixels in [0, 1]."""
        assert self.preprocessing is not None, "only image models are shown images"
        return Normalize(self.preprocessing.mean, self.preprocessing.std)(pixels).to(self.model.device)

    def example_inputs(self, images: NamedImages | None) -> tuple[tuple[Tensor, ...], str]:
        """The model's inputs for the images, or a random input if there are none; and what they are, in words."""
        if images is not None:
            return (self.normalize(images.pixels),), plural(len(images.pixels), "image")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model.dummy_inputs(), "one random input"

    def load_images(self, files: Sequence[Path]) -> NamedImages:
        """Image files, cropped and resized as by `allmlp predict`."""
        size, preprocessing = self.model.spec.input_size, self.preprocessing
        if size is None or preprocessing is None:
            raise UserError(f"{self.name} reads {self.model.spec.input_spec}, not images")
        return NamedImages(tuple(file.name for file in files), read_images(files, size, preprocessing).float() / 255)

    def sample(self, split: Split, most: int) -> NamedImages:
        """At most `most` images of a dataset, evenly spaced."""
        chosen = evenly_spaced(len(split), most)
        images, labels = split.fetch(torch.tensor(chosen))
        identity = (0.0,) * images.shape[1], (1.0,) * images.shape[1]
        pixels = Normalize(*identity, self.model.spec.input_size)(images).clamp(0, 1)
        return NamedImages(tuple(f"test {index}" for index in chosen), pixels, labels)

    def sample_texts(self, split: Split, most: int) -> list[str]:
        """At most `most` texts of a dataset, evenly spaced; those of a translation model are sources, those of one that
        answers questions first windows.
        """
        assert self.tokenizer is not None, "only text models read texts"
        ids, *_ = split.fetch(torch.tensor(evenly_spaced(len(split), most)))
        first = ids[:, 0] if ids.dim() > 2 else ids  # of b w s
        texts = [self.tokenizer.decode(row) for row in first.tolist()]
        return [text for text in texts if text]


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments of the command into a model, and image files or texts; the bundled model by default."""
    names = list(arguments)
    no_model = not names or Path(names[0]).is_file() or Path(names[0]).suffix.lower() in SUFFIXES
    model = BUNDLED if no_model else names.pop(0)
    return model, names


def affordable_images(model: Model, most: int, least: int = 1, passes: int = 1) -> int:
    """Images that the model can read `passes` times in about MAC_BUDGET multiply-adds, within the two limits."""
    return max(least, min(most, int(MAC_BUDGET / (passes * max(model.describe().macs, 1)))))


def load_target(name: str = BUNDLED, device: str | torch.device = "cpu") -> AnalysisTarget:
    """The model in the folder `name`, a bundled model (`allmlp:NAME`), or an untrained model by its name (seed 0)."""
    path = model_path(name)
    if path.is_dir():
        model = folder.load(path, device=device)
        label = name.removeprefix(BUNDLED_PREFIX)
        reads_text = any((path / name).is_file() for name in TOKENIZER_FILES) and model.spec.input_size is None
        tokenizer = load_tokenizer(path) if reads_text else None
        preprocessing = known_preprocessing(path) or default_preprocessing(model.spec)
        columns = preprocessing.columns if isinstance(preprocessing, SeriesPreprocessing) else ()
        images = preprocessing if isinstance(preprocessing, ImagePreprocessing) else None
        return AnalysisTarget(label, model.requires_grad_(False), True, images, tokenizer, columns)
    if path.exists() or (":" not in name and {"/", "\\"} & set(name)):
        raise UserError(f"{name} is not a folder; give a model folder or a name from `allmlp list`")
    model = create(name, seed=0, device=device).eval().requires_grad_(False)
    return AnalysisTarget(name, model, False, default_preprocessing(model.spec))


def default_preprocessing(spec: ModelSpec) -> ImagePreprocessing | None:
    """ImageNet's statistics, for an image model without a preprocessing file."""
    if spec.input_channels not in (1, 3):
        return None
    decode = Decode(color="rgb" if spec.input_channels == 3 else "gray")
    return ImagePreprocessing(*decode.statistics(), crop_pct=decode.crop_pct)
