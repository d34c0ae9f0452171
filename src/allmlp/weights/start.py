"""The trained model that a run starts from (`Run.init_from`), by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from allmlp.data.class_names import are_same_classes
from allmlp.data.dataset import Dataset
from allmlp.data.preprocessing import Preprocessing
from allmlp.data.series import SeriesDataset
from allmlp.errors import UserError, plural
from allmlp.layers.mixers.projection import Dense, Toeplitz, TokenProjection
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.grid import GridResize, with_img_size
from allmlp.models.model import Model, ModelSpec
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.models.zoo import presets
from allmlp.weights import folder
from allmlp.weights.bundled import model_path
from allmlp.weights.fetch import locate
from allmlp.weights.pretrained import open_model, pretrained_external
from allmlp.weights.resize import (
    differs_in_img_size,
    differs_in_look_back,
    differs_in_seq_len,
    resize_length,
    resize_look_back,
    with_length,
    with_seq_len,
)

HEAD_PREFIXES = ("head.", "pool.")
"""Parameters that may differ between tasks."""


class Start(NamedTuple):
    name: str
    model: Model
    """In evaluation mode, on the CPU, in the precision of the file."""
    preprocessing: Preprocessing | None
    folder: str
    """Folder of the model and its tokenizer; empty for an image network of another package."""

    def spec_for(self, dataset: Dataset) -> ModelSpec:
        """The model's spec; for series, at the look-back of the dataset, to which the weights are resized."""
        spec = self.model.spec
        if isinstance(spec, SeriesEncoder) and isinstance(dataset, SeriesDataset):
            return with_length(spec, dataset.seq_len)
        return spec


def open_start(name: str | os.PathLike[str]) -> Start:
    """Open a model folder, a run, a bundled model (`allmlp:NAME`), a name of `allmlp list weights`, a model on the Hub
    (`hf:ORGANIZATION/NAME`), or an image classifier of another package (`timm:NAME`, `hf:NAME`).
    """
    text = os.fspath(name)
    path = model_path(text)
    if not path.exists() and ":" in text and "/" not in text:
        return Start(text, *pretrained_external(text), "")
    where = path if path.exists() else locate(text, others=presets()).path
    model, preprocessing = open_model(str(where), folder.ModelChanges(dtype=None), "cpu")
    return Start(text, model, preprocessing, str(where if where.is_dir() else where.parent))


def transfer(model: Model, start: Start, classes: Sequence[str] = ()) -> list[str]:
    """Initialize `model` with the weights of `start`; returns the keys that keep their initialization.

    All weights must match, except for head and pool, which keep their initialization if they differ, and for the layer
    of class scores, which keeps it if `classes`, those of the run, are not those of the start. Weights of the same
    model at another image size or sequence length are resized; Toeplitz matrices can become dense ones.
    """
    start_channels, channels = start.model.spec.input_channels, model.spec.input_channels
    if None not in (start_channels, channels) and start_channels != channels:
        raise UserError(
            f"{start.name} reads images with {plural(start_channels, 'channel')}, those of the run have {channels}: "
            "train a model from random weights, such as --model mixer_nano"
        )
    source = resized(start.model, model.spec)
    source |= dense_matrices(model, source)
    heads = (f"{part.parts().get('head', 'head')}." for part in (model, start.model))
    prefixes = (*HEAD_PREFIXES, *heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in source.items()}
    start_classes = start.preprocessing.class_names if start.preprocessing else ()
    keeps_scores = not (start_classes and classes) or are_same_classes(classes, start_classes)
    scores = [] if keeps_scores else class_scores(model)
    fresh = [
        name
        for name, shape in shapes.items()
        if name.startswith(prefixes) and (given.get(name) != shape or name in scores)
    ]
    body = {name: shape for name, shape in shapes.items() if name not in fresh}
    others = {name for name in given if name not in body and not name.startswith(prefixes)}
    differing = others | {name for name, shape in body.items() if given.get(name) != shape}
    if differing:
        raise UserError(
            f"{start.name} is another model than that of the run: {len(differing)} weights differ, such as "
            f"{min(differing)}; to take its architecture as well, use --model {start.name}"
        )
    model.load_state_dict({name: source[name] for name in body}, strict=False)
    return fresh


def class_scores(model: Model) -> list[str]:
    """Keys of the layer that computes the class scores, the last linear one of the head; empty without a head."""
    head = model.parts().get("head")
    layers = [] if head is None else [*model.get_submodule(head).named_modules(prefix=head)]
    linear = [(path, layer) for path, layer in layers if isinstance(layer, nn.Linear)]
    return [f"{path}.{name}" for path, layer in linear[-1:] for name, _ in layer.named_parameters()]


def resized(model: Model, like: ModelSpec) -> dict[str, Tensor]:
    """The weights of `model` at the image size, sequence length or look-back of `like`, which may be another model."""
    weights, spec = model.state_dict(), model.spec
    if differs_in_img_size(spec, like) and like.input_size is not None:
        return GridResize(spec, with_img_size(spec, like.input_size))(weights)
    if differs_in_seq_len(spec, like):
        return resize_length(weights, with_length_of(spec, like))
    if isinstance(spec, SeriesEncoder) and isinstance(like, SeriesEncoder) and differs_in_look_back(spec, like):
        return resize_look_back(weights, spec, with_length(spec, like.stem.seq_len))
    return weights


def with_length_of(spec: ModelSpec, like: ModelSpec) -> ModelSpec:
    """The spec of a text model at the sequence length of `like`."""
    if isinstance(spec, EncoderDecoder) and isinstance(like, EncoderDecoder):
        encoder, decoder = with_length_of(spec.encoder, like.encoder), with_length_of(spec.decoder, like.decoder)
        return spec.replace(encoder=encoder, decoder=decoder)
    assert isinstance(like, Encoder)
    return with_seq_len(spec, like.stem.tokens)


def dense_matrices(model: Model, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token matrices that are dense in `model` and Toeplitz in `source`."""
    matrices = {}
    for path, module in model.named_modules():
        if isinstance(module, TokenProjection) and isinstance(module.spec, Dense):
            weight, toeplitz = source.get(f"{path}.weight"), Toeplitz()
            if weight is not None and tuple(weight.shape) == toeplitz.shape(module.tokens, module.causal):
                matrices[f"{path}.weight"] = toeplitz.matrix(weight, 0, module.tokens, module.causal).contiguous()
    return matrices
