"""The configuration of a training run: one value that can be saved, compared and repeated."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, TypeVar

from allmlp.data.dataset import Data, Dataset
from allmlp.data.sampler import GrowingBatch, Sampler
from allmlp.errors import UserError
from allmlp.head_init import HeadInit
from allmlp.lora import Lora
from allmlp.models.model import ModelSpec
from allmlp.optim import AdamW, Optim
from allmlp.parallel import Sharding
from allmlp.plugins import plugins
from allmlp.quantization import Quantization
from allmlp.schedule import CosineSchedule, Schedule
from allmlp.spec import Count, NonNegative, Range, Rate, Seed, Spec, discover
from allmlp.tasks.task import Task
from allmlp.whitening import Whitening

D = TypeVar("D", bound=Dataset)

# Reading a run, or overriding its fields by name, needs every spec it may contain.
for _room in ("allmlp.models", "allmlp.data", "allmlp.tasks"):
    discover(_room)


class Budget(Spec):
    """Length of a run, which ends at the limit reached first. `minutes` counts training time, see `allmlp.pace`."""

    epochs: Annotated[float, Range(1e-6, 1e6)] | None = None
    steps: Count | None = None
    minutes: Annotated[float, Range(1e-6, 1e6)] | None = None

    def limits(self, sampler: Sampler) -> tuple[int | None, float]:
        """Maximum number of steps and of seconds."""
        limits = [sampler.steps(self.epochs)] if self.epochs is not None else []
        limits += [self.steps] if self.steps is not None else []
        if not limits and self.minutes is None:
            raise UserError("the run has no budget: set budget.epochs, budget.steps or budget.minutes")
        return min(limits, default=None), math.inf if self.minutes is None else 60 * self.minutes


class Run(Spec):
    """Configuration of a training run: model, task, data, and how to train. Recipes return such values.

    >>> from allmlp.recipes import runs
    >>> run = runs("digits_mixer")["digits_mixer"]
    >>> allmlp.train(run.replace(batch_size=64), "runs/a")
    """

    aliases: ClassVar[dict[str, str]] = {"data.fraction": "train_fraction", "data.per_class": "train_per_class"}
    model: ModelSpec | None
    """None: the model of `init_from`."""
    task: Task
    data: Data
    batch_size: Count = 128
    """Examples per optimizer step, over all processes."""
    batch_growth: GrowingBatch | None = None
    """Start with smaller batches."""
    grad_accum_steps: Count = 1
    """Micro-batches per batch; fewer while a growing batch is smaller."""
    budget: Budget = Budget(epochs=10)
    optim: Optim = AdamW()
    schedule: Schedule = CosineSchedule()
    max_grad_norm: NonNegative | None = None
    ema_decay: Rate | None = None
    """Decay of the moving average (EMA) of the weights, which is evaluated and saved; smaller in the first steps."""
    aug_repeats: Count = 1
    """Copies of an example in its batch, each augmented differently (repeated augmentation)."""
    val_size: Annotated[int, Range(0)] = 0
    """Training examples held out for evaluation in place of the test split, to choose hyperparameters with."""
    train_fraction: Annotated[float, Range(1e-6, 1.0)] = 1.0
    """Use this fraction of the training examples, stratified by class, to measure the effect of more data."""
    train_per_class: Count | None = None
    """Use this many training examples of each class, chosen by `seed` (few-shot learning)."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products. "auto": on a CUDA GPU bfloat16, or float16 if it has no bfloat16 (below compute
    capability 8.0); elsewhere float32. With float16 the loss is scaled, see `allmlp.train_step`.
    """
    compile: bool = False
    """Compile the training step (see `allmlp.compilation`), and record it as a CUDA graph where possible."""
    grad_checkpointing: bool = False
    sharding: Sharding = "ddp"
    nan: Literal["stop", "skip"] = "stop"
    log_every: Count = 20
    """Steps between log records; the last step is always logged, evaluated and saved."""
    eval_every: Count = 500
    save_every: Count = 500
    save_minutes: NonNegative = 5.0
    """A checkpoint is written at least this often."""
    keep_checkpoints: Count = 2
    """Checkpoints kept on disk."""
    seed: Seed = 0
    stem_init: Whitening | None = None
    """Initialization of the patch embedding from training images, in place of the model's own."""
    init_from: str | None = None
    """A model folder or run to start from. Weights are resized to another input size; a head that differs is new,
    and so are the scores of other classes.
    """
    head_init: HeadInit | None = None
    """Initialization of the classifier on the features of the model as it starts."""
    lora: Lora | None = None
    """Train low-rank adapters and the head in place of all weights; the saved model is an ordinary one."""
    quantize: Quantization | None = None
    """Round weights to few bits in training (noise > 0), in evaluation and in the saved model."""
    freeze_fraction: Rate = 0.0
    """Fraction of the run, at its start, in which everything but the head is frozen and in evaluation mode."""
    keep_best: bool = False
    """Save and test the weights that were best on the validation split instead of the last ones."""
    start_margin: NonNegative = 0.0
    """With `keep_best`: minimum improvement of the first metric on the validation split over the start of the run. On
    few examples a smaller gain is chance, and the initial weights are kept.
    """
    patience: Count | None = None
    """Number of evaluations without a new best on the validation split after which the run ends."""

    def select(self, dataset: D) -> D:
        """The examples of the run: those that are held out, and those that it is trained on."""
        chosen = dataset.split_validation(self.val_size).take_fraction(self.train_fraction)
        return chosen.take_per_class(self.train_per_class, self.seed)

    def examples(self, steps: int) -> int:
        """Number of examples in this many steps; a repeated one counts each time."""
        return Sampler(1, self.batch_size, self.seed, growth=self.batch_growth).position(steps)

    def check(self) -> None:
        if self.train_per_class and self.train_fraction < 1:
            raise UserError("train_per_class and train_fraction both choose training examples: set one of them")
        if self.batch_growth and self.batch_growth.start >= self.batch_size:
            start = self.batch_growth.start
            raise UserError(f"batch_growth.start={start} does not grow to batch_size={self.batch_size}: lower start")
        if self.sharding == "fsdp" and self.task.against_fsdp:
            raise UserError(f"{type(self.task).__name__}: {self.task.against_fsdp}: use sharding=ddp")
        if self.freeze_fraction and self.sharding == "fsdp":
            raise UserError("freeze_fraction is not for sharding=fsdp, which cannot unfreeze weights: use sharding=ddp")
        if self.lora and self.sharding == "fsdp":
            raise UserError("lora is not for sharding=fsdp: use sharding=ddp")
        if self.quantize and (self.lora or self.sharding == "fsdp"):
            raise UserError("quantize is neither for lora nor for sharding=fsdp: use sharding=ddp without lora")
        if (self.lora or self.quantize) and not self.task.saves_trained:
            option, task = "lora" if self.lora else "quantize", type(self.task).__name__
            raise UserError(f"{option} changes the trained model, and {task} saves its teacher: leave {option} out")


plugins()  # last, because their recipes import Run
