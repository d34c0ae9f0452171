"""Time of one optimizer step: arithmetic at a given MFU, plus the communication that it does not hide.

    compute  = 6 MACs batch / (GPUs MFU peak)        8 in blocks with gradient checkpointing: one more forward pass
    DDP      : all-reduce of the gradients, 2 (n-1)/n weights, overlapped with the backward pass (2/3 of the time)
    FSDP2    : two all-gathers and a reduce-scatter, (n-1)/n weights each, overlapped with the whole step
    step     = compute + max(communication - what it overlaps with, 0)

Gradients are reduced once per step, in the backward pass of its last micro-batch; FSDP2 gathers the weights twice for
each micro-batch.

Gradients are float32, and gathered weights bfloat16 where the run computes in it, as `allmlp train` sends them.
"""

from __future__ import annotations

from typing import NamedTuple

from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.plan.activations import FLOAT32, head_tokens
from allmlp.plan.hardware import GPUS_PER_NODE, Gpu
from allmlp.plan.memory import Sharding

BACKWARD = 2 / 3
"""The backward pass's fraction of the compute time."""


class StepTime(NamedTuple):
    flops: float
    """Model FLOPs of the whole batch, without recomputation."""
    compute: float
    """Seconds."""
    bytes_sent: float
    """By each GPU."""
    communication: float
    """Seconds."""
    exposed: float
    """Seconds of communication that nothing overlaps with."""
    hiding_bandwidth: float
    """Bytes per second and GPU that would hide all communication."""

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def training_flops(spec: ModelSpec, grad_checkpointing: bool = False) -> float:
    """FLOPs of a training step per example: two per multiply-add, forward and twice backward.

    The head of a masked language model runs for the masked tokens only.
    """
    last = spec.decoder if isinstance(spec, EncoderDecoder) else spec
    of_head = head_tokens(last) / last.stem.tokens if isinstance(last, Encoder) and last.pool is None else 1.0
    total = 0.0
    for part in measure(spec).parts:
        per_mac = 8 if grad_checkpointing and "blocks" in part.name else 6
        total += per_mac * part.macs * (of_head if part.name.split(".")[-1] == "head" else 1.0)
    return total


def step_time(
    spec: ModelSpec,
    batch_size: int,
    gpus: int,
    gpu: Gpu,
    mfu: float,
    sharding: Sharding,
    grad_checkpointing: bool,
    bandwidth: float | None = None,
    gathered: int = FLOAT32,
    grad_accum_steps: int = 1,
) -> StepTime:
    """One step of `batch_size` examples over all GPUs, in `grad_accum_steps` micro-batches; `bandwidth` in bytes per
    second and GPU, `gathered` the bytes of a weight that FSDP2 gathers.
    """
    compute = batch_size * training_flops(spec, grad_checkpointing) / (gpus * mfu * gpu.peak)
    bandwidth = bandwidth or (gpu.intra_node if gpus <= GPUS_PER_NODE else gpu.inter_node)
    per_weight = 2 * FLOAT32 if sharding == "ddp" else 2 * gathered * grad_accum_steps + FLOAT32
    sent = per_weight * (gpus - 1) / gpus * measure(spec).parameters
    overlap = compute * (BACKWARD / grad_accum_steps if sharding == "ddp" else 1.0)
    seconds = sent / bandwidth
    flops = batch_size * training_flops(spec)
    return StepTime(flops, compute, sent, seconds, max(seconds - overlap, 0.0), sent / overlap)
