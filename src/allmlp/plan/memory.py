"""Memory of one GPU: weights, gradients, optimiser, activations, under DDP and under FSDP2.

    at most = always + max(at the loss, in the first block of the backward pass, in its last block, in the optimiser)

Weights, their average, the optimiser's moments and DDP's buckets live through the whole step. Gradients grow while
activations go, so not all is there at once; where a batch is computed in several passes, the gradients of the first
are there when the others begin. While a gradient is computed, it and the one it is computed from exist for a moment.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from allmlp.errors import UserError
from allmlp.layers import Vocabulary
from allmlp.models.cost import one_block
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd, block_number, hidden_matrices
from allmlp.plan.activations import activations, asked, outputs
from allmlp.plan.tape import CUDA_BFLOAT16, FLOAT32, Arithmetic

Sharding = Literal["ddp", "fsdp"]


class Weight(NamedTuple):
    shape: tuple[int, ...]
    times: int
    """How many blocks have it."""
    block: bool
    hidden: bool
    """A matrix inside the blocks: what Muon makes orthogonal."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.times

    def piece(self, gpus: int) -> int:
        """Elements of the largest share: FSDP2 cuts the first axis into equal rows."""
        if not self.shape:
            return self.times
        return math.ceil(self.shape[0] / gpus) * math.prod(self.shape[1:]) * self.times


@cache
def weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """All parameters, without allocating one."""
    shallow, depths = one_block(spec)
    with torch.device("meta"):
        model = shallow.build()
    hidden = hidden_matrices(model)
    found = []
    for name, weight in model.named_parameters():
        times = next((depth for stack, depth in depths.items() if name.startswith(f"{stack}.")), 1)
        found.append(Weight(tuple(weight.shape), times, bool(block_number(name)), id(weight) in hidden))
    return tuple(found)


def moments(optim: Optim, hidden: bool) -> int:
    """Numbers that an optimiser remembers for each weight; its step counters, 4 bytes a tensor, are not counted."""
    if isinstance(optim, (AdamW, Lamb)):
        return 2
    if isinstance(optim, Adagrad):
        return 1
    if isinstance(optim, Sgd):
        return 1 if optim.momentum else 0
    if isinstance(optim, Muon):
        return 1 if hidden else 2
    raise UserError(f"what {type(optim).__name__} remembers is not written in plan/memory.py")


def passing(optim: Optim, all_of: tuple[Weight, ...]) -> int:
    """Numbers that an optimiser's step needs for a moment: the fused ones none, the others copies of the weights."""
    total = sum(weight.elements for weight in all_of)
    if isinstance(optim, Muon):
        hidden = sum(weight.elements for weight in all_of if weight.hidden)
        return max(4 * hidden, 2 * (total - hidden))
    return 2 * total if isinstance(optim, (Lamb, Adagrad)) else 0


class Memory(NamedTuple):
    """Bytes on one GPU."""

    weights: int
    average: int
    """The moving average of the weights, where the run has one."""
    optimiser: int
    gradients: int
    copies: int
    """Weights in bfloat16, which autocast makes in the forward pass and the backward pass reads."""
    exchange: int
    """DDP: the buckets gradients travel in. FSDP2: whole blocks, gathered to be used."""
    activations: int
    """All that is kept at the end of the forward pass."""
    head: int
    """The head's part of it, which goes first."""
    block: int
    """What one block keeps."""
    widest: int
    """The largest tensor in a block."""
    scores: int
    """What the loss is computed from."""
    table: int
    """The gradient of a vocabulary's table, the first to be computed."""
    passing: int
    """What the optimiser's step needs for a moment."""
    checkpointing: bool
    several: bool
    """Whether a batch is computed in several passes."""

    @property
    def always(self) -> int:
        return self.weights + self.average + self.optimiser + self.exchange

    @property
    def most(self) -> int:
        before = self.copies + self.activations + (self.gradients if self.several else 0)
        again = self.block - self.copies if self.checkpointing else 0
        at_loss = before + self.scores + max(self.scores, self.table)
        first_block = before - self.head + again + 2 * self.widest + self.table
        last_block = self.gradients + self.block + 2 * self.widest
        # A table that stem and head share: the gradients of both, and their sum.
        stem = self.gradients + 2 * self.table
        return self.always + max(at_loss, first_block, last_block, stem, self.gradients + self.passing)


def memory(
    spec: ModelSpec,
    batch: int,
    optim: Optim,
    gpus: int = 1,
    sharding: Sharding = "ddp",
    checkpointing: bool = False,
    ema: bool = False,
    passes: int = 1,
    arithmetic: Arithmetic = CUDA_BFLOAT16,
) -> Memory:
    """One GPU's memory; `batch` is its own part of a batch, computed in so many `passes`."""
    examples = math.ceil(batch / passes)
    kept, all_of = activations(spec, examples, arithmetic), weights(spec)
    shared = gpus if sharding == "fsdp" else 1
    own = FLOAT32 * sum(weight.piece(shared) for weight in all_of)
    state = FLOAT32 * sum(moments(optim, weight.hidden) * weight.piece(shared) for weight in all_of)
    return Memory(
        weights=own,
        average=own if ema else 0,
        optimiser=state,
        gradients=own,
        copies=kept.copies,
        exchange=exchange(all_of, gpus, sharding),
        activations=kept.kept(checkpointing),
        head=sum(stack.head for stack in kept.stacks),
        block=max(stack.largest for stack in kept.stacks),
        widest=max(stack.widest for stack in kept.stacks),
        scores=FLOAT32 * scores(spec, examples),
        table=FLOAT32 * table(spec) // shared,
        passing=FLOAT32 * passing(optim, all_of) // shared,
        checkpointing=checkpointing,
        several=passes > 1,
    )


def exchange(all_of: tuple[Weight, ...], gpus: int, sharding: Sharding) -> int:
    if gpus == 1:
        return 0
    if sharding == "ddp":
        return FLOAT32 * sum(weight.elements for weight in all_of)
    block = sum(math.prod(weight.shape) for weight in all_of if weight.block)
    rest = sum(weight.elements for weight in all_of if not weight.block)
    # One block is used while the next arrives; the gradients of one are whole until they are summed.
    return FLOAT32 * (2 * block + rest + max(block, rest))


def scores(spec: ModelSpec, batch: int) -> int:
    """Numbers that the loss is computed from."""
    last = answering(spec)
    return 0 if last.head is None else batch * asked(last) * outputs(last)


def table(spec: ModelSpec) -> int:
    last = answering(spec)
    return outputs(last) * last.width if isinstance(last.head, Vocabulary) else 0


def answering(spec: ModelSpec) -> Encoder:
    """The stack that has the head."""
    last = spec.decoder if isinstance(spec, EncoderDecoder) else spec
    assert isinstance(last, Encoder), "activations() has refused everything else"
    return last
