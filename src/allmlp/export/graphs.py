"""The graphs that are exported for a model: functions of tensors, with named inputs and outputs.

    images       images                              -> logits
    series       series, mask (True where observed)  -> forecast
    text         ids, mask (, segments)              -> logits
    causal text  the same, and a decoding step: token, past.0 ..                    -> logits, present.0 ..
    translation  encoder: source, mask    -> memory.0 ..
                 step:    token, mask, memory.0 .., past.0 ..                       -> logits, present.0 ..

The batch size is dynamic. Decoding starts from an empty past (B x 0 x C); `present` is the `past` of the next step. A
recurrent model (`TokenLstm`) has a state in place of a past, and no decoding step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.export.sample_inputs import SampleInputs
from allmlp.layers.context import Cache
from allmlp.layers.mixers.lstm import TokenLstm
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import EncoderModel
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.models.model import Model
from allmlp.models.series_encoder import SeriesEncoderModel

STEPS = 6
"""Decoding steps on which a file is compared."""
Tensors = tuple[Tensor, ...]


class ExportGraph(NamedTuple):
    name: str
    """ "encoder" or "step"; empty for the whole model."""
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dynamic_axes: tuple[dict[int, str], ...]
    """Per input, its dynamic axes and their names."""
    calls: list[Tensors]
    """Inputs on which it is compared; it is traced with the last."""
    max_past: int | None = None
    """The largest size of `past`."""


BATCH = {0: "batch"}
PAST = {0: "batch", 1: "past"}


@torch.no_grad()
def graphs(model: Model, samples: SampleInputs) -> list[ExportGraph]:
    """The graphs of a model in evaluation mode."""
    if isinstance(model, EncoderDecoderModel):
        return translation_graphs(model, *samples.tensors)
    if isinstance(model, SeriesEncoderModel):
        return [series_graph(model, *samples.tensors)]
    if isinstance(model, EncoderModel) and isinstance(model.spec.stem, TokenEmbed):
        return text_graphs(model, *samples.tensors)
    name = "images" if samples.tensors[0].is_floating_point() else "ids"
    return [ExportGraph("", ForwardGraph(model), (name,), ("logits",), (BATCH,), batches(samples.tensors[:1]))]


def translation_graphs(model: EncoderDecoderModel, source: Tensor, mask: Tensor) -> list[ExportGraph]:
    encoder = EncoderGraph(model)
    memory = encoder(source, mask)
    named = ("source", "mask"), numbered("memory", memory)
    return [
        ExportGraph("encoder", encoder, *named, (BATCH, BATCH), batches((source, mask))),
        step(model, source, (mask, *memory), model.spec.decoder.stem.tokens),
    ]


def series_graph(model: SeriesEncoderModel, series: Tensor) -> ExportGraph:
    """The graph of a forecaster, compared on series with gaps."""
    observed = (torch.rand(series.shape, generator=torch.Generator().manual_seed(0)) > 0.1).to(series.device)
    graph = ForwardGraph(model), ("series", "mask"), ("forecast",), (BATCH, BATCH)
    return ExportGraph("", *graph, batches((series, observed)))


def text_graphs(model: EncoderModel, ids: Tensor, mask: Tensor) -> list[ExportGraph]:
    stem = model.spec.stem
    assert isinstance(stem, TokenEmbed)
    names: tuple[str, ...] = ("ids", "mask")
    tensors: Tensors = (ids, mask)
    if (stem.segments or 0) > 1:
        names, tensors = (*names, "segments"), (ids, mask, second_half(mask))
    exported = [ExportGraph("", ForwardGraph(model), names, ("logits",), (BATCH,) * len(names), batches(tensors))]
    if model.spec.block.causal and model.spec.pool is None and not is_recurrent(model):
        exported.append(step(model, ids, (), stem.seq_len))
    return exported


def is_recurrent(model: EncoderModel | EncoderDecoderModel) -> bool:
    """Whether decoding carries a state of constant size."""
    spec = model.spec.decoder if isinstance(model, EncoderDecoderModel) else model.spec
    return any(isinstance(part, TokenLstm) for part in spec.children())


def batches(tensors: Tensors) -> list[Tensors]:
    """Batches with one example, then with all of them."""
    return [tuple(tensor[:1] for tensor in tensors), tensors]


def second_half(mask: Tensor) -> Tensor:
    """Segment ids: 0 in the first half of each text, 1 in the second, [B, S]."""
    return (mask.long().cumsum(1) > mask.sum(1, keepdim=True) / 2).long()


def numbered(name: str, tensors: Tensors) -> tuple[str, ...]:
    return tuple(f"{name}.{number}" for number in range(len(tensors)))


def step(model: EncoderModel | EncoderDecoderModel, ids: Tensor, fixed: Tensors, max_past: int) -> ExportGraph:
    """One decoding step, compared for one example and for all, each from an empty past."""
    if is_recurrent(model):
        raise UserError("a decoder with TokenLstm cannot be exported: its state is not a sequence of past tokens")
    module, count = DecodeStepGraph(model, ids, *fixed), min(STEPS, max_past, ids.shape[1])
    if count < 3:
        raise UserError(f"a model of {max_past} tokens is too short to export a decoding step")
    calls: list[Tensors] = []
    for batch in (1, len(ids)):
        past, kept = module.empty(batch), tuple(tensor[:batch] for tensor in fixed)
        for position in range(count):
            calls.append((ids[:batch, position : position + 1], *kept, *past))
            past = module(*calls[-1])[1:]
    given = ("mask", *numbered("memory", fixed[1:])) if fixed else ()
    inputs = ("token", *given, *numbered("past", past))
    dynamic_axes = (BATCH,) * (1 + len(fixed)) + (PAST,) * len(past)
    return ExportGraph("step", module, inputs, ("logits", *numbered("present", past)), dynamic_axes, calls, max_past)


class ModelGraph(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model: Any = model


class ForwardGraph(ModelGraph):
    """The forward pass of a model."""

    def forward(self, *tensors: Tensor) -> Tensor:
        if len(tensors) == 3:
            return self.model(*tensors[:2], segments=tensors[2])
        return self.model(*tensors)


class EncoderGraph(ModelGraph):
    """Keys and values of the source for each layer of the decoder: (source, mask) -> (memory...)."""

    def forward(self, *tensors: Tensor) -> Tensors:
        source, mask = tensors
        cache = Cache()
        # The decoder's output is unused, so it is not part of the traced graph; only the cache is.
        self.model.decode(source[:, :1], self.model.encode(source, mask), mask, cache=cache)
        return tuple(cache.fixed.values())


class DecodeStepGraph(ModelGraph):
    """One token: (token, past...) -> (logits, present...); for translation (token, mask, memory..., past...)."""

    def __init__(self, model: EncoderModel | EncoderDecoderModel, ids: Tensor, *fixed: Tensor) -> None:
        super().__init__(model)
        self.readers: list[nn.Module] = []
        cache = Cache()
        if isinstance(model, EncoderDecoderModel):
            mask = fixed[0][:1]
            model.decode(ids[:1, :1], model.encode(ids[:1], mask), mask, cache=cache)
            self.readers = list(cache.fixed)
        else:
            model(ids[:1, :1], cache=cache)
        self.layers = list(cache.seen)
        self.widths = [x.shape[2] for x in cache.seen.values()]

    def empty(self, batch: int) -> Tensors:
        """The empty past of the first token."""
        return tuple(torch.zeros(batch, 0, width, device=self.model.device) for width in self.widths)

    def forward(self, *tensors: Tensor) -> Tensors:
        past = tensors[-len(self.layers) :]
        cache = Cache()
        cache.length, cache.seen = past[0].shape[1], dict(zip(self.layers, past))
        if isinstance(self.model, EncoderDecoderModel):
            token, mask, *memory = tensors[: -len(self.layers)]
            cache.fixed = dict(zip(self.readers, memory))
            # Every layer reads its part of the memory from the cache.
            logits = self.model.decode(token, memory[0], mask, cache=cache)
        else:
            logits = self.model(tensors[0], cache=cache)
        return logits, *(cache.seen[layer] for layer in self.layers)
