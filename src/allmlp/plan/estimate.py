"""Estimate of a training job: memory, time, communication, storage and failures combined."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from allmlp.compilation import Region
from allmlp.errors import UserError
from allmlp.layers import TokenEmbed
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.optim import AdamW, Optim
from allmlp.plan.activations import BFLOAT16, FLOAT32, Execution
from allmlp.plan.failures import (
    DAY,
    FAILURES_PER_GPU_DAY,
    FailureModel,
    Simulation,
    daly,
    expected_time,
    mtbf,
    simulate,
    young,
)
from allmlp.plan.hardware import GPUS, GPUS_PER_NODE, Gpu, training_speed
from allmlp.plan.memory import Memory, Sharding, memory, state_per_weight, weights
from allmlp.plan.time import StepTime, step_time
from allmlp.spec import Count, NonNegative, Range, Spec

Positive = Annotated[float, Range(1e-6, 1e15)]
Fraction = Annotated[float, Range(1e-6, 1.0)]
IMAGE_BYTES = 115_000
"""The mean of ImageNet: 1,281,167 images in 147.9 GB."""
TOKEN_BYTES = 2
"""Bytes per token in a tokenized corpus on disk."""
SAMPLER_BYTES, INDEX_BYTES = 2 * 8, 3 * 8
"""Host memory per example and process: its position in two epochs, and its location in a shard."""
USABLE = 0.9
"""Usable fraction of a GPU's memory; the rest is for the allocator, matmul workspaces and the driver. On a CPU,
processes took 8 to 12 % more than their tensors."""
MIN_GOODPUT = 0.01
"""Below this a job is refused."""
HOST_BANDWIDTH = 20e9
"""Bytes per second from a GPU to the memory of its host, over PCIe."""
YEAR, MAX_YEARS = 365 * 86_400.0, 100
MAX_EVENTS = 1_000_000
"""Checkpoints and failures to simulate at most, over all runs."""


class Job(Spec):
    """A training job: model, data and hardware."""

    name: str
    model: ModelSpec
    family: str
    samples: Annotated[float, Range(1.0, 1e15)]
    epochs: Annotated[float, Range(1e-6, 1e6)]
    gpus: Count
    batch_size: Count
    """Examples per optimizer step, over all GPUs."""
    grad_accum_steps: Count = 1
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compiled: bool = True
    optim: Optim = AdamW()
    ema: bool = False
    sharding: Literal["ddp", "fsdp"] | None = None
    """None for the fastest of DDP and FSDP2, each with and without gradient checkpointing, that fits."""
    grad_checkpointing: bool | None = None
    gpu: Literal["h200", "h100", "a100"] = "h200"
    mfu: Fraction | None = None
    """Model FLOPs utilization; None for the measured one of the family."""
    network_bandwidth: Positive | None = None
    """Bytes per second and GPU; None for the GPU's published bandwidth."""
    storage_bandwidth: Positive = 2e9
    """Bytes per second at which a checkpoint is written."""
    sample_bytes: Positive | None = None
    """Stored size of an example; None for ImageNet's mean, or two bytes per token."""
    restart_seconds: NonNegative = 600.0
    """Seconds from a failure until training continues."""
    failures_per_gpu_day: NonNegative = FAILURES_PER_GPU_DAY

    def check(self) -> None:
        least = self.gpus * self.grad_accum_steps
        if self.batch_size < least:
            raise UserError(
                f"a batch of {self.batch_size:,} has less than one example per micro-batch on {self.gpus:,} GPUs; "
                f"use --batch-size {least} or more, or fewer GPUs"
            )

    @property
    def local_batch_size(self) -> int:
        """Examples per step on one GPU."""
        return math.ceil(self.batch_size / self.gpus)

    @property
    def steps(self) -> int:
        # Epochs of a budget in steps are a quotient, which may be rounded up.
        return math.ceil(round(self.samples * self.epochs / self.batch_size, 6))

    @property
    def modality(self) -> str:
        return modality(self.model)

    @property
    def card(self) -> Gpu:
        """The GPU at this precision: float32 matmuls run as TF32, at half the bfloat16 rate on all of them."""
        card = GPUS[self.gpu]
        return card if self.precision == "bfloat16" else card._replace(peak=card.peak / 2)

    def execution(self, sharding: Sharding, grad_checkpointing: bool) -> Execution:
        """Execution as in `allmlp train`: the whole step is compiled if PyTorch replays it as a CUDA graph."""
        plain = self.grad_accum_steps == 1 and not grad_checkpointing and self.optim.weight_decay_end is None
        blocks = plain and self.optim.capturable if self.gpus == 1 else sharding == "fsdp"
        region: Region = "blocks" if blocks else "step"
        return Execution("cuda", self.precision == "bfloat16", region if self.compiled else None)


class Strategy(NamedTuple):
    """One way to run the job in parallel."""

    job: Job
    sharding: Sharding
    grad_checkpointing: bool
    step: StepTime

    @property
    def memory(self) -> Memory:
        """Memory, traced on demand: it is not needed for strategies slower than one that fits."""
        job = self.job
        return memory(
            job.model,
            job.local_batch_size,
            job.optim,
            job.gpus,
            self.sharding,
            self.grad_checkpointing,
            job.ema,
            job.grad_accum_steps,
            job.execution(self.sharding, self.grad_checkpointing),
        )

    @property
    def fits(self) -> bool:
        return self.memory.peak <= USABLE * self.job.card.memory

    @property
    def name(self) -> str:
        return {"ddp": "DDP", "fsdp": "FSDP2"}[self.sharding] + (" + ckpt" if self.grad_checkpointing else "")


class Estimate(NamedTuple):
    job: Job
    mfu: float
    mfu_from: str
    """The measurement it comes from, or "given"."""
    mfu_source: str
    """The file with that measurement."""
    strategies: tuple[Strategy, ...]
    chosen: Strategy
    checkpoint_bytes: int
    sample_bytes: float
    failures: FailureModel
    interval: float
    """Seconds of work between checkpoints, by Daly's formula."""
    expected_seconds: float
    """Wall-clock time by the closed form."""
    simulation: Simulation

    @property
    def ideal_seconds(self) -> float:
        """Training time without failures and checkpoints."""
        return self.job.steps * self.chosen.step.seconds

    @property
    def save_every(self) -> int:
        """Steps between checkpoints, as in a run's `save_every`."""
        return max(round(self.interval / self.chosen.step.seconds), 1)

    @property
    def goodput(self) -> float:
        return self.ideal_seconds / self.expected_seconds

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.job.batch_size / self.chosen.step.seconds

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second from the object store."""
        return self.throughput * self.sample_bytes

    @property
    def host_memory(self) -> float:
        """Bytes that each process needs for the order and the index of the examples."""
        return self.job.samples * (SAMPLER_BYTES + (INDEX_BYTES if self.job.modality == "image" else 0))

    @property
    def nodes(self) -> int:
        return math.ceil(self.job.gpus / GPUS_PER_NODE)

    @property
    def gpu_days(self) -> float:
        return self.expected_seconds * self.job.gpus / DAY

    def as_json(self) -> dict[str, Any]:
        job, simulation = self.job, self.simulation
        return {
            "model": job.name,
            "gpu": job.gpu,
            "gpus": job.gpus,
            "batch_size": job.batch_size,
            "steps": job.steps,
            "mfu": self.mfu,
            "mfu_from": self.mfu_from,
            "mfu_source": self.mfu_source,
            "strategies": {
                each.name: {
                    "memory": each.memory._asdict() | {"peak": each.memory.peak},
                    "fits": each.fits,
                    "step": each.step._asdict() | {"seconds": each.step.seconds},
                }
                for each in self.strategies
            },
            "chosen": self.chosen.name,
            "samples_per_second": self.throughput,
            "read_bytes_per_second": self.read_bandwidth,
            "host_bytes_per_process": self.host_memory,
            "checkpoint_bytes": self.checkpoint_bytes,
            "mtbf_seconds": self.failures.mtbf,
            "save_every": self.save_every,
            "checkpoint_interval_seconds": {"young": young(self.failures), "daly": self.interval},
            "hours_without_failures": self.ideal_seconds / 3600,
            "hours": self.expected_seconds / 3600,
            "hours_simulated": {"mean": simulation.seconds / 3600, "error": simulation.error / 3600},
            "failures_simulated": simulation.failures,
            "goodput": self.goodput,
            "gpu_days": self.gpu_days,
        }


def estimate(job: Job, runs: int = 500, seed: int = 0) -> Estimate:
    """Estimate `job`; failures are also simulated in `runs` runs."""
    mfu, mfu_from, mfu_source = job.mfu, "given", ""
    if mfu is None:
        speed = training_speed(job.family, job.modality, measure(job.model).macs)
        mfu, mfu_from, mfu_source = speed.mfu, speed.description, speed.source
    strategies = tuple(
        strategy(job, mfu, sharding, checkpointing) for sharding in ("ddp", "fsdp") for checkpointing in (False, True)
    )
    chosen = choose(job, strategies)
    size = checkpoint_bytes(job)
    failures = failure_model(job, size, chosen.sharding)
    work = job.steps * chosen.step.seconds
    interval = min(daly(failures), work) if math.isfinite(failures.mtbf) else work
    expected = expected_time(work, interval, failures)
    if work < MIN_GOODPUT * expected:
        raise UserError(
            f"{job.name} would never finish on {job.gpus:,} GPUs, with a failure every {failures.mtbf:,.0f} s and "
            f"{failures.restart:,.0f} s per restart; use fewer GPUs or a shorter --restart-minutes"
        )
    if expected > MAX_YEARS * YEAR:
        raise UserError(
            f"{job.name} would take {expected / YEAR:,.0f} years: lower --samples or --epochs, or raise --gpus"
        )
    events = work / interval + expected / failures.mtbf
    simulation = simulate(work, interval, failures, min(runs, max(int(MAX_EVENTS / events), 2)), seed)
    return Estimate(
        job,
        mfu,
        mfu_from,
        mfu_source,
        strategies,
        chosen,
        size,
        sample_bytes(job),
        failures,
        interval,
        expected,
        simulation,
    )


def failure_model(job: Job, size: int, sharding: Sharding) -> FailureModel:
    """Failures of the job's GPUs, with checkpoints of `size` bytes."""
    between, written = mtbf(job.gpus, job.failures_per_gpu_day), size / job.storage_bandwidth
    if sharding == "fsdp":
        # Shards are copied to the memory of their hosts, and written while training goes on.
        return FailureModel(between, size / job.gpus / HOST_BANDWIDTH, job.restart_seconds, written)
    return FailureModel(between, written, job.restart_seconds)


def expected_seconds(job: Job) -> tuple[float, str]:
    """Training time without failures, checkpoints and evaluation, and the measurement that the speed comes from."""
    speed = training_speed(job.family, job.modality, measure(job.model).macs)
    step = step_time(job.model, job.batch_size, job.gpus, job.card, job.mfu or speed.mfu, "ddp", False)
    return job.steps * step.seconds, speed.description


def strategy(job: Job, mfu: float, sharding: Sharding, grad_checkpointing: bool) -> Strategy:
    gathered = BFLOAT16 if job.precision == "bfloat16" else FLOAT32
    rest = grad_checkpointing, job.network_bandwidth, gathered, job.grad_accum_steps
    step = step_time(job.model, job.batch_size, job.gpus, job.card, mfu, sharding, *rest)
    return Strategy(job, sharding, grad_checkpointing, step)


def choose(job: Job, strategies: tuple[Strategy, ...]) -> Strategy:
    """The fastest strategy that fits, of those the job allows."""
    allowed = [
        each
        for each in strategies
        if job.sharding in (None, each.sharding) and job.grad_checkpointing in (None, each.grad_checkpointing)
    ]
    chosen = next((each for each in sorted(allowed, key=lambda each: each.step.seconds) if each.fits), None)
    if chosen is None:
        least = min(allowed, key=lambda each: each.memory.peak)
        raise UserError(
            f"{job.name} does not fit: {least.name} needs {least.memory.peak / 1e9:.0f} GB with "
            f"{job.local_batch_size:,} examples per GPU, and {USABLE * job.card.memory / 1e9:.0f} GB of a "
            f"{job.card.name} are usable; use more GPUs, a smaller --batch-size or a larger --grad-accum-steps"
        )
    return chosen


def checkpoint_bytes(job: Job) -> int:
    """Weights, optimizer state and EMA, unsharded, in float32."""
    copies = 2 if job.ema else 1
    values = (weight.elements * (copies + state_per_weight(job.optim, weight.hidden)) for weight in weights(job.model))
    return FLOAT32 * sum(values)


def modality(spec: ModelSpec) -> str:
    if isinstance(spec, SeriesEncoder):
        return "series"
    return "text" if spec.input_size is None else "image"


def sample_bytes(job: Job) -> float:
    if job.sample_bytes is not None:
        return job.sample_bytes
    model = job.model
    if isinstance(model, SeriesEncoder):
        return FLOAT32 * model.stem.seq_len * model.stem.in_chans
    stacks = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
    tokens = [s.stem.seq_len for s in stacks if isinstance(s, Encoder) and isinstance(s.stem, TokenEmbed)]
    return TOKEN_BYTES * sum(tokens) if tokens else IMAGE_BYTES
