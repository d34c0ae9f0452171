"""Predictions of a trained model for images and texts, and text generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmlp.data.decode import read_images
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, image_preprocessing, read_preprocessing
from allmlp.data.tokenizer import Tokenizer, load_tokenizer
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.tasks import causal_lm
from allmlp.tasks.classify_text import classify_texts
from allmlp.tasks.masked_lm import fill_mask
from allmlp.weights.folder import load


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


def predict_images(folder: Path, files: list[Path], top_k: int = 5) -> list[list[Prediction]]:
    """The `top_k` classes of each image, most probable first; of a regression, all values."""
    model, preprocessing = load(folder), image_preprocessing(folder)
    size = model.spec.input_size
    if size is None:
        raise UserError(f"the input of the model is {model.spec.input_spec}, not an image")
    images = read_images(files, size, preprocessing)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    with torch.inference_mode():
        outputs = model((images.float() / 255 - mean) / std)
    names = preprocessing.class_names
    if preprocessing.task == "values":
        return name_values(outputs, names)
    check_classes(folder, outputs, names)
    return most_probable(outputs.softmax(dim=1), names, top_k)


def check_classes(folder: Path, outputs: Tensor, class_names: tuple[str, ...]) -> None:
    """Raise UserError if the outputs cannot be scores of these classes."""
    if outputs.dim() != 2:
        raise UserError(f"the model in {folder} outputs features, not class scores: it has no head")
    if outputs.shape[1] == 1:
        raise UserError(
            f"the model in {folder} has a single output, so it is not a classifier: "
            'set "task": "values" in its preprocessing.json'
        )
    if class_names and len(class_names) != outputs.shape[1]:
        raise UserError(f"the model in {folder} has {outputs.shape[1]} outputs, but {len(class_names)} class names")


def name_values(outputs: Tensor, names: tuple[str, ...]) -> list[list[Prediction]]:
    rows = outputs.flatten(1).tolist()
    named = len(names) == len(rows[0])
    return [[Prediction(names[i] if named else str(i), value=value) for i, value in enumerate(row)] for row in rows]


def most_probable(probabilities: Tensor, class_names: tuple[str, ...], top_k: int) -> list[list[Prediction]]:
    """The `top_k` classes of each row, with their index as label if they have no names."""
    found = probabilities.topk(min(top_k, probabilities.shape[1]))
    names = class_names or tuple(map(str, range(probabilities.shape[1])))
    return [
        [Prediction(names[index], probability) for index, probability in zip(indices, values, strict=True)]
        for indices, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def reads_text(folder: Path) -> bool:
    return isinstance(read_preprocessing(folder), TextPreprocessing)


def open_text(folder: Path) -> tuple[Model, Tokenizer, TextPreprocessing]:
    """A text model with its tokenizer and preprocessing."""
    preprocessing = read_preprocessing(folder)
    if isinstance(preprocessing, ImagePreprocessing):
        raise UserError(f"the model in {folder} reads images, not text")
    model, tokenizer = load(folder), load_tokenizer(folder)
    parts = list(model.spec.children())
    vocab_size = next((getattr(part, "vocab_size", None) for part in parts if hasattr(part, "vocab_size")), None)
    if vocab_size != len(tokenizer):
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {vocab_size}: they do not match"
        )
    return model, tokenizer, preprocessing


def predict_text(folder: Path, text: str, context: str = "", top_k: int = 5) -> list[list[Prediction]]:
    """Tokens for every [MASK], classes, answers from the context, or a translation, depending on the model's task.

    `context` is the second sentence of a pair, or the paragraph that contains the answer to a question.
    """
    model, tokenizer, preprocessing = open_text(folder)
    if preprocessing.task == "text":
        if is_causal(model):
            raise UserError(f"the model in {folder} is a causal language model: use allmlp generate")
        return [[Prediction(*pair) for pair in row] for row in fill_mask(model, tokenizer, text, top_k)]
    if preprocessing.task == "classes":
        probabilities = classify_texts(model, tokenizer, [(text, context)])
        check_classes(folder, probabilities, preprocessing.class_names)
        return most_probable(probabilities, preprocessing.class_names, top_k)
    if preprocessing.task == "span":
        from allmlp.tasks.question_answering import answer_question

        if not context:
            raise UserError("a question needs the paragraph that contains its answer: --context")
        answers = answer_question(model, tokenizer, text, context)[:top_k]
        return [[Prediction(answer.text, answer.probability) for answer in answers]]
    from allmlp.tasks.translate import translate

    return [[Prediction(translate(model, tokenizer, [text])[0])]]


def is_causal(model: Model) -> bool:
    block = getattr(model.spec, "block", None)
    return block is not None and block.causal


def generate(
    folder: Path,
    prompt: str = "",
    max_new_tokens: int = 50,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
) -> str:
    """The prompt and the text that the causal language model in `folder` generates after it."""
    model, tokenizer, preprocessing = open_text(folder)
    if preprocessing.task != "text" or not is_causal(model):
        raise UserError(f"the model in {folder} is not a causal language model: it cannot generate text")
    start = tokenizer.encode([prompt])[0] if prompt else []
    tokens = causal_lm.generate(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed)
    return tokenizer.decode([*start, *tokens])
