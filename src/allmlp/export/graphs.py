"""What of a model is exported: functions of tensors alone, with a name for everything that goes in and out.

    pictures     images                              -> scores
    text         ids, mask (, segments)              -> scores
    causal text  the same, and one step:  token, past.0 ..                          -> scores, now.0 ..
    translation  encoder: source, mask    -> memory.0 ..
                 step:    token, mask, memory.0 .., past.0 ..                       -> scores, now.0 ..

Every batch size will do. A step begins with an empty past (B x 0 x C) and hands `now` to the next as its `past`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.export.rows import Rows
from allmlp.layers.context import Cache
from allmlp.layers.stem import Tokens
from allmlp.models.encoder import EncoderModel
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.models.model import Model

STEPS = 6
"""Steps of decoding on which a file is compared."""
Tensors = tuple[Tensor, ...]


class Graph(NamedTuple):
    name: str
    """What part of the model it is: "encoder" or "step"; empty for the model itself."""
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    free: tuple[dict[int, str], ...]
    """The axes of every input that may have any size."""
    calls: list[Tensors]
    """Inputs it is compared on; it is traced with the last."""
    longest: int | None = None
    """What `past` can grow to."""


BATCH = {0: "batch"}
PAST = {0: "batch", 1: "past"}


@torch.no_grad()
def graphs(model: Model, rows: Rows) -> list[Graph]:
    """The graphs of a model in evaluation mode."""
    if isinstance(model, EncoderDecoderModel):
        source, mask = rows.tensors
        encoder = Source(model)
        memory = encoder(source, mask)
        named = ("source", "mask"), numbered("memory", memory)
        return [
            Graph("encoder", encoder, *named, (BATCH, BATCH), batches(rows.tensors)),
            step(model, source, (mask, *memory), model.spec.decoder.stem.tokens),
        ]
    if not isinstance(model, EncoderModel) or not isinstance(model.spec.stem, Tokens):
        name = "images" if rows.tensors[0].is_floating_point() else "ids"
        return [Graph("", Whole(model), (name,), ("scores",), (BATCH,), batches(rows.tensors[:1]))]
    ids, mask = rows.tensors
    names, tensors = ("ids", "mask"), rows.tensors
    if (model.spec.stem.segments or 0) > 1:
        names, tensors = (*names, "segments"), (ids, mask, second_half(mask))
    found = [Graph("", Whole(model), names, ("scores",), (BATCH,) * len(names), batches(tensors))]
    if model.spec.block.causal and model.spec.pool is None:
        found.append(step(model, ids, (), model.spec.stem.length))
    return found


def batches(tensors: Tensors) -> list[Tensors]:
    """One example alone, then all of them."""
    return [tuple(tensor[:1] for tensor in tensors), tensors]


def second_half(mask: Tensor) -> Tensor:
    """Segments of a text cut in two: 0 and then 1, b s."""
    return (mask.long().cumsum(1) > mask.sum(1, keepdim=True) / 2).long()


def numbered(name: str, tensors: Tensors) -> tuple[str, ...]:
    return tuple(f"{name}.{number}" for number in range(len(tensors)))


def step(model: EncoderModel | EncoderDecoderModel, ids: Tensor, fixed: Tensors, longest: int) -> Graph:
    """One step of decoding, compared for one example and for all, each from an empty past on."""
    module, count = Step(model, ids, *fixed), min(STEPS, longest, ids.shape[1])
    if count < 3:
        raise UserError(f"a model that reads {longest} tokens has no steps worth exporting")
    calls: list[Tensors] = []
    for batch in (1, len(ids)):
        past, kept = module.empty(batch), tuple(tensor[:batch] for tensor in fixed)
        for place in range(count):
            calls.append((ids[:batch, place : place + 1], *kept, *past))
            past = module(*calls[-1])[1:]
    given = ("mask", *numbered("memory", fixed[1:])) if fixed else ()
    inputs = ("token", *given, *numbered("past", past))
    free = (BATCH,) * (1 + len(fixed)) + (PAST,) * len(past)
    return Graph("step", module, inputs, ("scores", *numbered("now", past)), free, calls, longest)


class Whole(nn.Module):
    """A model's forward pass over everything it is given at once."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Tensor:
        if len(tensors) == 3:
            return self.model(*tensors[:2], segments=tensors[2])
        return self.model(*tensors)


class Source(nn.Module):
    """What a decoder keeps of the source, layer by layer: (source, mask) -> (memory...)."""

    def __init__(self, model: EncoderDecoderModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Tensors:
        source, mask = tensors
        cache = Cache()
        # What comes out of this step is not asked for, and in a graph it is not computed: only what it keeps.
        self.model.decode(source[:, :1], self.model.encode(source, mask), mask, cache=cache)
        return tuple(cache.fixed.values())


class Step(nn.Module):
    """The next token: (token, past...) -> (scores, now...); in a translation (token, mask, memory..., past...)."""

    def __init__(self, model: EncoderModel | EncoderDecoderModel, ids: Tensor, *fixed: Tensor) -> None:
        super().__init__()
        self.model = model
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
        """The past of a first token."""
        return tuple(torch.zeros(batch, 0, width) for width in self.widths)

    def forward(self, *tensors: Tensor) -> Tensors:
        past = tensors[-len(self.layers) :]
        cache = Cache()
        cache.length, cache.seen = past[0].shape[1], dict(zip(self.layers, past))
        if isinstance(self.model, EncoderDecoderModel):
            token, mask, *memory = tensors[: -len(self.layers)]
            cache.fixed = dict(zip(self.readers, memory))
            # The memory itself is not read again: every layer has its part of it in the cache.
            scores = self.model.decode(token, memory[0], mask, cache=cache)
        else:
            scores = self.model(tensors[0], cache=cache)
        return scores, *(cache.seen[layer] for layer in self.layers)
