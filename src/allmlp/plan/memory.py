"""Memory of one GPU: weights, gradients, optimizer state, activations, under DDP and under FSDP2.

    peak = persistent + max(at the loss, first block of the backward pass, its last block, optimizer step)

Weights, their EMA, the optimizer state and communication buffers exist during the whole step. Gradients grow while
activations are freed, so the two are never all there at once, except with gradient accumulation, where the gradients of
the first micro-batch exist when the next one starts; with FSDP2 they are whole until the last one, since only then they
are reduced. Computing a gradient needs both it and its input.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from allmlp.errors import UserError
from allmlp.models.model import ModelSpec
from allmlp.optim import Adagrad, AdamW, Lamb, Muon, Optim, Sgd, hidden_matrices
from allmlp.plan.activations import BFLOAT16, FLOAT32, Execution, activations

Sharding = Literal["ddp", "fsdp"]


class Weight(NamedTuple):
    shape: tuple[int, ...]
    copies: int
    """Number of blocks that have this weight."""
    in_block: bool
    hidden: bool
    """A matrix inside the blocks, which Muon orthogonalizes."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.copies

    def shard(self, gpus: int) -> int:
        """Elements of the largest shard: FSDP2 splits the first axis into equal parts."""
        if not self.shape:
            return self.copies
        return math.ceil(self.shape[0] / gpus) * math.prod(self.shape[1:]) * self.copies


@cache
def weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """All parameters, counted on the meta device."""
    shallow, depths = spec.shallow()
    with torch.device("meta"):
        model = shallow.build()
    hidden = hidden_matrices(model)
    shapes = []
    for name, weight in model.named_parameters():
        copies = next((len(numbers) for block, numbers in depths.items() if name.startswith(f"{block}.")), 1)
        shapes.append(Weight(tuple(weight.shape), copies, "blocks." in name, id(weight) in hidden))
    return tuple(shapes)


def state_per_weight(optim: Optim, hidden: bool) -> int:
    """Values of optimizer state per weight; step counters, 4 bytes per tensor, are left out."""
    if isinstance(optim, (AdamW, Lamb)):
        return 2
    if isinstance(optim, Adagrad):
        return 1
    if isinstance(optim, Sgd):
        return 1 if optim.momentum else 0
    if isinstance(optim, Muon):
        return 1 if hidden else 2
    raise UserError(f"the optimizer state of {type(optim).__name__} is unknown: add it to plan/memory.py")


def workspace(optim: Optim, all_weights: tuple[Weight, ...]) -> int:
    """Temporary values of an optimizer step: none for fused optimizers, copies of the weights for the others."""
    total = sum(weight.elements for weight in all_weights)
    if isinstance(optim, Muon):
        hidden = sum(weight.elements for weight in all_weights if weight.hidden)
        return max(4 * hidden, 2 * (total - hidden))
    return 2 * total if isinstance(optim, (Lamb, Adagrad)) else 0


class Memory(NamedTuple):
    """Bytes on one GPU."""

    weights: int
    ema: int
    """The moving average of the weights, if the run has one."""
    optimizer_state: int
    gradients: int
    weight_copies: int
    """Weights in bfloat16, made by autocast in the forward pass and read by the backward pass; not with FSDP2, which
    gathers them in bfloat16 again. Also matrices that are expanded from fewer weights.
    """
    communication_buffers: int
    """DDP: gradient buckets. FSDP2: all-gathered blocks and gradients before the reduce-scatter."""
    activations: int
    """At the end of the forward pass."""
    head: int
    """The head's part of them, which is freed first."""
    block: int
    """Activations of one block."""
    largest_activation: int
    """The largest tensor of a block."""
    logits: int
    largest_gradient: int
    """Gradient of the largest weight outside the blocks: a vocabulary's, computed first, or twice if tied."""
    workspace: int
    """Temporary memory of the optimizer step."""
    grad_checkpointing: bool
    grad_accumulation: bool

    @property
    def persistent(self) -> int:
        return self.weights + self.ema + self.optimizer_state + self.communication_buffers

    @property
    def peak(self) -> int:
        forward = self.weight_copies + self.activations + (self.gradients if self.grad_accumulation else 0)
        recomputed = self.block - self.weight_copies if self.grad_checkpointing else 0
        loss = forward + self.logits + max(self.logits, self.largest_gradient)
        first_block = forward - self.head + recomputed + 2 * self.largest_activation + self.largest_gradient
        last_block = self.gradients + self.block + 2 * self.largest_activation
        # A tied embedding: the gradients from stem and head, and their sum.
        stem = self.gradients + 2 * self.largest_gradient
        return self.persistent + max(loss, first_block, last_block, stem, self.gradients + self.workspace)


def memory(
    spec: ModelSpec,
    batch_size: int,
    optim: Optim,
    gpus: int = 1,
    sharding: Sharding = "ddp",
    grad_checkpointing: bool = False,
    ema: bool = False,
    grad_accum_steps: int = 1,
    execution: Execution = Execution(),
) -> Memory:
    """Memory of one GPU that computes `batch_size` examples of a batch, in `grad_accum_steps` micro-batches."""
    examples = math.ceil(batch_size / grad_accum_steps)
    if sharding == "fsdp" and gpus > 1:
        execution = execution._replace(bfloat16_weights=execution.bfloat16)
    kept, all_weights = activations(spec, execution), weights(spec)
    shards = gpus if sharding == "fsdp" else 1
    weight_bytes = FLOAT32 * sum(weight.shard(shards) for weight in all_weights)
    state = sum(state_per_weight(optim, weight.hidden) * weight.shard(shards) for weight in all_weights)
    sharded = sharding == "fsdp" and grad_accum_steps == 1
    gradients = weight_bytes if sharded else FLOAT32 * sum(weight.elements for weight in all_weights)
    outside = max((weight.elements for weight in all_weights if not weight.in_block), default=0)
    return Memory(
        weights=weight_bytes,
        ema=weight_bytes if ema else 0,
        optimizer_state=FLOAT32 * state,
        gradients=gradients,
        weight_copies=kept.weight_copies,
        communication_buffers=communication_buffers(all_weights, gpus, sharding, execution.bfloat16_weights),
        activations=examples * (kept.checkpointed if grad_checkpointing else kept.saved),
        head=examples * kept.head,
        block=examples * kept.block,
        largest_activation=examples * kept.largest,
        logits=examples * kept.logits,
        largest_gradient=FLOAT32 * outside // shards,
        workspace=FLOAT32 * workspace(optim, all_weights) // shards,
        grad_checkpointing=grad_checkpointing,
        grad_accumulation=grad_accum_steps > 1,
    )


def communication_buffers(all_weights: tuple[Weight, ...], gpus: int, sharding: Sharding, bfloat16: bool) -> int:
    if gpus == 1:
        return 0
    if sharding == "ddp":
        return FLOAT32 * sum(weight.elements for weight in all_weights)
    block = sum(math.prod(weight.shape) for weight in all_weights if weight.in_block)
    rest = sum(weight.elements for weight in all_weights if not weight.in_block)
    # The next block is all-gathered while one is used; the gradients of one are full until the reduce-scatter.
    return (BFLOAT16 if bfloat16 else FLOAT32) * (2 * block + rest) + FLOAT32 * max(block, rest)
