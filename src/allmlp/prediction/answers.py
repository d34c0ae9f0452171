"""Predictions of a model: classes with probabilities, values, tokens or texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from allmlp.errors import UserError, command
from allmlp.models.model import ModelSpec


class Prediction(NamedTuple):
    label: str
    """A class, a token, an answer, a translation, or the name of a value."""
    probability: float | None = None
    """None if the model gives no probability."""
    value: float | None = None
    """The output of a regression."""

    def __str__(self) -> str:
        if self.value is not None:
            return f"{self.label} {self.value:.6g}"
        return self.label if self.probability is None else f"{self.label} {self.probability:.1%}"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def check_classes(model: object, spec: ModelSpec, outputs: Tensor, class_names: tuple[str, ...]) -> None:
    """Raise UserError if the outputs cannot be scores of these classes."""
    if outputs.dim() != 2 or not spec.has_head:
        train = command("train", "DATA", "--model", model)
        raise UserError(f"the model in {model} outputs features, not class scores: {train} trains a head")
    if outputs.shape[1] == 1:
        raise UserError(
            f"the model in {model} has a single output, so it is not a classifier: "
            'set "task": "values" in its preprocessing.json'
        )
    if class_names and len(class_names) != outputs.shape[1]:
        raise UserError(f"the model in {model} has {outputs.shape[1]} outputs, but {len(class_names)} class names")


def name_values(outputs: Tensor, names: tuple[str, ...]) -> list[list[Prediction]]:
    rows = outputs.flatten(1).tolist()
    return [[Prediction(name, value=value) for name, value in zip(names, row, strict=True)] for row in rows]


def most_probable(probabilities: Tensor, class_names: tuple[str, ...], top_k: int) -> list[list[Prediction]]:
    """The `top_k` classes of each row, with their index as label if they have no names."""
    names = class_names or tuple(map(str, range(probabilities.shape[1])))
    return name_classes(names, *probabilities.topk(min(top_k, probabilities.shape[1])))


def name_classes(names: tuple[str, ...], probabilities: Tensor, indices: Tensor) -> list[list[Prediction]]:
    return [
        [Prediction(names[index], probability) for index, probability in zip(*row, strict=True)]
        for row in zip(indices.tolist(), probabilities.tolist(), strict=True)
    ]
