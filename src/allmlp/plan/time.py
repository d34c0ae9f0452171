"""Time of one optimiser step: arithmetic at a share of the peak, and what of the network it cannot hide.

    compute  = 6 MACs batch / (GPUs share peak)                8 in the blocks with checkpointing: one more forward pass
    DDP      : 2 (n-1)/n weights, all-reduced while the backward pass (2/3 of the time) runs
    FSDP2    : 3 (n-1)/n weights, gathered twice and reduced once, beside the whole step
    step     = compute + max(network - what runs beside it, 0)

Gradients and gathered weights travel in float32, as `allmlp train` sends them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from allmlp.models.cost import Cost, measure
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.plan.activations import asked
from allmlp.plan.hardware import MACHINE, Gpu
from allmlp.plan.memory import Sharding
from allmlp.plan.tape import FLOAT32

BACKWARD = 2 / 3
"""The backward pass's part of the time."""


class Step(NamedTuple):
    flops: float
    """Useful operations of the whole batch, without what checkpointing computes again."""
    compute: float
    """Seconds."""
    traffic: float
    """Bytes that one GPU sends."""
    network: float
    """Seconds that takes."""
    exposed: float
    """Seconds of it that nothing runs beside."""
    needed: float
    """Bytes per second that one GPU would have to send for all of it to be hidden."""

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


@cache
def cost(spec: ModelSpec) -> Cost:
    return measure(spec)


def training_flops(spec: ModelSpec, checkpointing: bool = False) -> float:
    """Operations of one example's step: two per multiply-add, forward and twice backward.

    The head of a masked language model runs for the hidden tokens alone.
    """
    last = spec.decoder if isinstance(spec, EncoderDecoder) else spec
    part_of_head = asked(last) / last.stem.tokens if isinstance(last, Encoder) and last.pool is None else 1.0
    total = 0.0
    for part in cost(spec).parts:
        times = 8 if checkpointing and "blocks" in part.name else 6
        total += times * part.macs * (part_of_head if part.name.split(".")[-1] == "head" else 1.0)
    return total


def step(
    spec: ModelSpec,
    batch: int,
    gpus: int,
    gpu: Gpu,
    share: float,
    sharding: Sharding,
    checkpointing: bool,
    network: float | None = None,
) -> Step:
    """One step of `batch` examples over all GPUs; `network` in bytes per second and GPU, else the card's."""
    rate = gpus * share * gpu.peak
    compute = batch * training_flops(spec, checkpointing) / rate
    speed = network or (gpu.inside if gpus <= MACHINE else gpu.outside)
    times = 2 if sharding == "ddp" else 3
    traffic = times * (gpus - 1) / gpus * FLOAT32 * cost(spec).parameters
    hidden = compute * (BACKWARD if sharding == "ddp" else 1.0)
    seconds = traffic / speed
    useful = batch * training_flops(spec)
    return Step(useful, compute, traffic, seconds, max(seconds - hidden, 0.0), traffic / hidden)
