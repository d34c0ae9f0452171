"""A job, and what it would take: memory, time, traffic, store and failures put together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from allmlp.errors import UserError
from allmlp.layers import Patches, Tokens
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.optim import AdamW, Optim
from allmlp.plan import failures as failing
from allmlp.plan.failures import Failures, Simulated
from allmlp.plan.hardware import GPUS, MACHINE, Gpu, training_speed
from allmlp.plan.memory import Memory, Sharding, memory, moments, weights
from allmlp.plan.tape import CUDA_BFLOAT16, CUDA_FLOAT32, FLOAT32, Arithmetic
from allmlp.plan.time import Step, cost, step
from allmlp.spec import Count, NonNegative, Range, Spec

Positive = Annotated[float, Range(1e-6)]
Share = Annotated[float, Range(1e-6, 1.0)]
PICTURE = 115_000
"""Bytes of a picture: ImageNet's 1,281,167 in 147.9 GB."""
TOKEN = 2
"""Bytes of a token, as a corpus is kept."""
ORDER, INDEX = 2 * 8, 3 * 8
"""Bytes of host memory that a process keeps for each example: its place in two epochs, and where it lies in a shard."""
USABLE = 0.9
"""Of a GPU's memory: the rest is for the allocator, the work space of products, the driver. On a CPU a process took 8
to 12 % more than its tensors."""
LEAST = 0.01
"""The smallest share of useful time that is still called a run."""
EVENTS = 1_000_000
"""Checkpoints and failures that are played through at most, over all simulated runs."""


class Job(Spec):
    """What is to be trained, and on what."""

    name: str
    model: ModelSpec
    family: str
    samples: Annotated[float, Range(1.0)]
    epochs: Positive
    gpus: Count
    batch: Count
    """Examples per optimiser step, over all GPUs."""
    passes: Count = 1
    """Passes that a GPU's part of a batch is computed in."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compiled: bool = True
    """As the recipes are; without, more activations are kept."""
    optim: Optim = AdamW()
    ema: bool = False
    sharding: Literal["ddp", "fsdp"] | None = None
    """None takes the first that fits of DDP and FSDP2, each without and with checkpointing."""
    checkpointing: bool | None = None
    gpu: Literal["h200", "h100", "a100"] = "h200"
    share: Share | None = None
    """Of the published peak; None takes the measured one of the family."""
    network: Positive | None = None
    """Bytes per second that a GPU can send; None takes what its kind is known for."""
    store: Positive = 2e9
    """Bytes per second that a checkpoint is written with."""
    sample: Positive | None = None
    """Bytes of an example where it is kept; None takes ImageNet's mean, or two bytes a token."""
    restart: NonNegative = 600.0
    """Seconds until a failed run goes on: a new machine, the start, the checkpoint."""
    failures: NonNegative = failing.INTERRUPTIONS / failing.DAYS / failing.GPUS
    """Per GPU and day."""

    def check(self) -> None:
        if self.batch < self.gpus * self.passes:
            raise UserError(
                f"a batch of {self.batch:,} is less than one example for each of {self.gpus:,} GPUs"
                + (f" in {self.passes} passes" if self.passes > 1 else "")
                + f": use --batch {self.gpus * self.passes} or more, or fewer GPUs"
            )

    @property
    def each(self) -> int:
        """Examples of a batch on one GPU."""
        return math.ceil(self.batch / self.gpus)

    @property
    def steps(self) -> int:
        return math.ceil(self.samples * self.epochs / self.batch)

    @property
    def reads(self) -> str:
        return reads(self.model)

    @property
    def card(self) -> Gpu:
        """As it is in this precision: float32 products run as TF32, at half the rate of bfloat16 on all of them."""
        card = GPUS[self.gpu]
        return card if self.precision == "bfloat16" else card._replace(peak=card.peak / 2)

    @property
    def arithmetic(self) -> Arithmetic:
        chosen = CUDA_BFLOAT16 if self.precision == "bfloat16" else CUDA_FLOAT32
        return replace(chosen, compiled=self.compiled)


class Way(NamedTuple):
    """One way to lay the job out."""

    sharding: Sharding
    checkpointing: bool
    memory: Memory
    step: Step
    fits: bool

    @property
    def name(self) -> str:
        return {"ddp": "DDP", "fsdp": "FSDP2"}[self.sharding] + (" + checkpointing" if self.checkpointing else "")


class Forecast(NamedTuple):
    job: Job
    share: float
    shared_from: str
    """What the share was measured on, or that it is given."""
    source: str
    """Where that is written."""
    ways: tuple[Way, ...]
    chosen: Way
    checkpoint: int
    """Bytes."""
    sample: float
    """Bytes of an example."""
    failures: Failures
    interval: float
    """Seconds of work between checkpoints, by Daly's formula."""
    expected: float
    """Wall-clock seconds by the closed form."""
    simulated: Simulated

    @property
    def work(self) -> float:
        """Seconds without failures and checkpoints."""
        return self.job.steps * self.chosen.step.seconds

    @property
    def save(self) -> int:
        """Steps between checkpoints: the field `cadence.save` of a run."""
        return max(round(self.interval / self.chosen.step.seconds), 1)

    @property
    def goodput(self) -> float:
        return self.work / self.expected

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.job.batch / self.chosen.step.seconds

    @property
    def stream(self) -> float:
        """Bytes per second from the object store."""
        return self.rate * self.sample

    @property
    def host(self) -> float:
        """Bytes of host memory that each process needs to know which example comes when, and where it is."""
        return self.job.samples * (ORDER + (INDEX if self.job.reads == "image" else 0))

    @property
    def machines(self) -> int:
        return math.ceil(self.job.gpus / MACHINE)

    @property
    def gpu_days(self) -> float:
        return self.expected * self.job.gpus / failing.DAY

    def as_json(self) -> dict[str, Any]:
        job, chosen = self.job, self.chosen
        return {
            "model": job.name,
            "gpu": job.gpu,
            "gpus": job.gpus,
            "batch": job.batch,
            "steps": job.steps,
            "share": self.share,
            "share_from": self.shared_from,
            "share_source": self.source,
            "ways": {
                way.name: {"memory": way.memory._asdict() | {"most": way.memory.most}, "fits": way.fits}
                | {"step": way.step._asdict() | {"seconds": way.step.seconds}}
                for way in self.ways
            },
            "chosen": chosen.name,
            "samples_per_second": self.rate,
            "store_bytes_per_second": self.stream,
            "host_bytes_per_process": self.host,
            "checkpoint_bytes": self.checkpoint,
            "seconds_between_failures": self.failures.between,
            "steps_between_checkpoints": self.save,
            "seconds_between_checkpoints": {"young": failing.young(self.failures), "daly": self.interval},
            "hours_without_failures": self.work / 3600,
            "hours": self.expected / 3600,
            "hours_simulated": {"mean": self.simulated.seconds / 3600, "error": self.simulated.error / 3600},
            "failures_simulated": self.simulated.failures,
            "goodput": self.goodput,
            "gpu_days": self.gpu_days,
        }


def forecast(job: Job, runs: int = 500, seed: int = 0) -> Forecast:
    """What `job` takes; failures are also played through in `runs` simulations."""
    share, source, origin = job.share, "given", ""
    if share is None:
        found = training_speed(job.family, job.reads, cost(job.model).macs)
        share, source, origin = found.share, found.what, found.source
    ways = tuple(lay_out(job, share, sharding, again) for sharding in ("ddp", "fsdp") for again in (False, True))
    chosen = choose(job, ways)
    size = checkpoint_bytes(job)
    known = Failures(
        between=failing.mean_time_between(job.gpus, job.failures), checkpoint=size / job.store, restart=job.restart
    )
    work = job.steps * chosen.step.seconds
    interval = min(failing.daly(known), work) if math.isfinite(known.between) else work
    expected = failing.expected(work, interval, known)
    if work < LEAST * expected:
        raise UserError(
            f"with a failure every {known.between:,.0f} s and {known.restart:,.0f} s for a restart, {job.name} on "
            f"{job.gpus:,} GPUs would never end: use fewer GPUs or a quicker --restart"
        )
    events = work / interval + expected / known.between
    simulated = failing.simulate(work, interval, known, min(runs, max(int(EVENTS / events), 2)), seed)
    return Forecast(
        job, share, source, origin, ways, chosen, size, sample_bytes(job), known, interval, expected, simulated
    )


def lay_out(job: Job, share: float, sharding: Sharding, checkpointing: bool) -> Way:
    used = memory(
        job.model, job.each, job.optim, job.gpus, sharding, checkpointing, job.ema, job.passes, job.arithmetic
    )
    time = step(job.model, job.batch, job.gpus, job.card, share, sharding, checkpointing, job.network)
    return Way(sharding, checkpointing, used, time, used.most <= USABLE * job.card.memory)


def choose(job: Job, ways: tuple[Way, ...]) -> Way:
    """The quickest way that fits, of those the job allows."""
    allowed = [
        way for way in ways if job.sharding in (None, way.sharding) and job.checkpointing in (None, way.checkpointing)
    ]
    fitting = [way for way in allowed if way.fits]
    if not fitting:
        least = min(allowed, key=lambda way: way.memory.most)
        raise UserError(
            f"{job.name} does not fit a {job.card.name}: {least.name} needs {least.memory.most / 1e9:.0f} GB, "
            f"{USABLE * job.card.memory / 1e9:.0f} can be used, with {job.each:,} examples a GPU; "
            "use more GPUs, a smaller --batch or more --passes"
        )
    return min(fitting, key=lambda way: way.step.seconds)


def checkpoint_bytes(job: Job) -> int:
    """Weights, moments and average, whole, in float32."""
    each = FLOAT32 * (2 if job.ema else 1)
    return sum(weight.elements * (each + FLOAT32 * moments(job.optim, weight.hidden)) for weight in weights(job.model))


def reads(spec: ModelSpec) -> str:
    return "image" if isinstance(spec, Encoder) and isinstance(spec.stem, Patches) else "text"


def sample_bytes(job: Job) -> float:
    if job.sample is not None:
        return job.sample
    model = job.model
    stacks = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
    tokens = [stack.stem.length for stack in stacks if isinstance(stack, Encoder) and isinstance(stack.stem, Tokens)]
    return TOKEN * sum(tokens) if tokens else PICTURE
