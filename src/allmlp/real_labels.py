"""Accuracy on ReaL labels (Beyer et al. 2020): all classes visible in each validation image of ImageNet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from allmlp import parallel
from allmlp.accuracy import wilson_interval
from allmlp.data.class_names import imagenet_classes, match_classes, model_class_names
from allmlp.data.columns import is_image_name
from allmlp.data.image_files import ImageFiles, LabeledFile
from allmlp.errors import UserError, one_line, plural
from allmlp.evaluation import UNREADABLE, Evaluation, Setup, predictor_outputs
from allmlp.files import read_regular
from allmlp.labeled_inputs import LabeledInputs
from allmlp.prediction import ImagePredictor, open_predictor

IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


def evaluate_real_labels(
    model: str,
    folder: str,
    file: str,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """The fraction of validation images in `folder` whose predicted class is among their labels in `file` (real.json).

    Images without labels, where the annotators did not agree on any, are excluded.
    """
    labels = read_real_labels(file)
    images = [image for image in validation_images(Path(folder), len(labels)) if labels[image.label]]
    if not images:
        raise UserError(f"{folder} has no image ILSVRC2012_val_........ that has a label in {file}")
    with parallel.join(device) as world:
        predictor = open_predictor(model, device=device, dtype=dtype)
        if not isinstance(predictor, ImagePredictor) or predictor.task != "classes":
            raise UserError(f"{model} is not an image classifier, which ReaL labels need")
        split = ImageFiles(Path(folder), images, predictor.img_size, predictor.decoding.replace(on_corrupt="skip"))
        inputs = LabeledInputs(
            f"{folder}, ReaL labels",
            tuple(imagenet_classes()),
            torch.tensor([labels[image.label][0] for image in images]),
            lambda indices: list(split.fetch(torch.tensor(indices)).images),
            lambda: {index: f"{split.name(index)}: {reason}" for index, reason in dict(split.corrupt).items()},
        )
        num_classes = predictor.probabilities([inputs.read(range(1))[0]]).shape[1]
        match = match_classes(inputs.class_names, model_class_names(predictor.class_names, num_classes))
        outputs = predictor_outputs(predictor, inputs, match, Setup(world, dtype, batch_size, progress=progress))
    hits = [
        int(predicted) in {match.labels[label] for label in labels[image.label]}
        for image, predicted, first_label in zip(images, outputs.predicted, outputs.labels, strict=True)
        if first_label != UNREADABLE
    ]
    low, high = wilson_interval(sum(hits), len(hits))
    metrics = {"accuracy": sum(hits) / len(hits), "accuracy_low": low, "accuracy_high": high}
    return Evaluation(model, inputs.data, len(hits), metrics, skipped=list(inputs.corrupt().values()))


def read_real_labels(file: str) -> list[list[int]]:
    """Labels of each image, by image number; empty where the annotators did not agree on any."""
    try:
        labels = json.loads(read_regular(file))
    except (OSError, ValueError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(labels, list) or not all(
        isinstance(row, list) and all(type(label) is int and 0 <= label < 1000 for label in row) for row in labels
    ):
        raise UserError(f"{file} is not the file real.json: it needs a list of labels from 0 to 999 for every image")
    return labels


def validation_images(folder: Path, count: int) -> list[LabeledFile]:
    """The validation images below `folder`, in class folders or not; `label` is the number of the image, from 0."""
    files = []
    for place, inner, names in os.walk(folder):
        inner.sort()
        below = Path(place).relative_to(folder)
        for name in sorted(filter(is_image_name, names)):
            number = IMAGE.fullmatch(name)
            if number and not 1 <= int(number[1]) <= count:
                raise UserError(f"{folder / below / name}: there are labels of {plural(count, 'image')} only")
            if number:
                files.append(LabeledFile((below / name).as_posix(), int(number[1]) - 1))
    return files
