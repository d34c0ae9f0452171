"""A run: everything that decides what a training does, as one value that can be written down and repeated."""

from __future__ import annotations

from typing import Annotated, Literal

from allmlp.data.source import Data
from allmlp.models.model import ModelSpec
from allmlp.optim import AdamW, Optim
from allmlp.parallel import Sharding
from allmlp.schedule import Cosine, Schedule
from allmlp.spec import Count, NonNegative, Range, Rate, Spec, discover
from allmlp.tasks.task import Task

# A run can be read back, or changed by name, only where every kind it may hold is known.
for _room in ("allmlp.models", "allmlp.data", "allmlp.tasks"):
    discover(_room)


class Budget(Spec):
    """When a run ends: at whichever limit comes first."""

    epochs: Annotated[float, Range(1e-6)] | None = None
    steps: Count | None = None
    minutes: NonNegative | None = None


class Cadence(Spec):
    """How often, in steps; the last step always does all three. `keep` is the number of checkpoints on disk."""

    log: Count = 20
    evaluate: Count = 500
    save: Count = 500
    keep: Count = 2


class Run(Spec):
    model: ModelSpec | None
    """None stands for the model to start from."""
    task: Task
    data: Data
    batch: Count = 128
    """Examples per optimiser step, over all processes."""
    accumulate: Count = 1
    """Passes a batch is split into."""
    budget: Budget = Budget(epochs=10)
    optim: Optim = AdamW()
    schedule: Schedule = Cosine()
    clip: NonNegative | None = None
    ema: Rate | None = None
    """Average the weights with this memory, and judge and keep the average. The memory is shorter at the start, so that
    a short run does not keep the weights it began with.
    """
    repeats: Count = 1
    """Copies of an example in its batch, differently augmented (repeated augmentation)."""
    hold_out: Annotated[int, Range(0)] = 0
    """Training examples to judge on instead of the test split, for every choice one makes."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    checkpointing: bool = False
    sharding: Sharding = "ddp"
    nan: Literal["stop", "skip"] = "stop"
    cadence: Cadence = Cadence()
    seed: int = 0
    init_from: str | None = None
    """A model folder or run to start from: its weights, resized where the input has another size, with a new head
    where that differs.
    """
