"""The training loop: one for every task, in one process or under torchrun.

run.json is the record of a run: `run` (its config), `processes`, `environment` (command, commit, versions, device,
time), `data` (checksum and number of examples), and, once the run has ended, `result`: the last evaluation by split,
with what is reached without a model (`Task.floors`), `parameters`, `steps`, `epochs` and `seconds` of training.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from allmlp import checkpoint, parallel
from allmlp.compilation import compile_task
from allmlp.data.dataset import Dataset, Split
from allmlp.data.sampler import Loader, Sampler, Stream, eval_batches, mix_seed
from allmlp.ema import ModelEma
from allmlp.errors import UserError
from allmlp.files import RUN, write_atomically
from allmlp.log import RunLog, draw_curves, format_values
from allmlp.meter import Meter
from allmlp.models.model import Model
from allmlp.models.zoo import create
from allmlp.optim import set_lr
from allmlp.pace import FILE as PACE
from allmlp.pace import Pace
from allmlp.provenance import environment
from allmlp.run import Run
from allmlp.spec import from_dict, to_dict
from allmlp.tasks.task import Losses, StepContext, Task, TaskModule
from allmlp.train_step import RecordedStep, TrainStep, autocast
from allmlp.weights import folder


def train(run: Run, out: str | os.PathLike[str], device: str | None = None) -> dict[str, float]:
    """Train `run` into the folder `out`, or resume the run that is there. Returns the last evaluation: of the test
    split, or of the held-out examples if the run has a `val_size`.

    run = allmlp.recipes.runs("digits_mixer")["digits_mixer"]
    print(train(run, "runs/digits")["accuracy"])
    """
    with parallel.join(device) as world, interrupts() as stopped:
        return training_loop(run, Path(out), world, stopped)


def training_loop(run: Run, path: Path, world: parallel.World, stopped: list[int]) -> dict[str, float]:
    """The loop itself. A function of its own, so that what it builds is freed before the process group ends."""
    # 1. data
    claim(path, run, world)
    data = run.data.for_model(run.init_from) if run.init_from else run.data
    dataset = data.load().split_validation(run.val_size).take_fraction(run.train_fraction)
    run.task.check_dataset(dataset)
    evaluated = dataset.validation or dataset.test
    sampler = Sampler(len(dataset.train), run.batch_size, run.seed, run.aug_repeats)
    loader = Loader(dataset.train, sampler, world.device, world.rank, world.size)
    steps, seconds = limits(run, sampler)
    if run.batch_size % world.size:
        raise UserError(f"batch_size {run.batch_size} is not divisible by {world.size} processes")

    # 2. model and task
    torch.set_float32_matmul_precision("high")
    if run.model is None and run.init_from is None:
        raise UserError("the run has no model: name the one to start from, --set init_from=FOLDER")
    spec = run.model or folder.read_spec(Path(str(run.init_from)))
    model = create(run.task.configure_model(spec, dataset), seed=run.seed, device=world.device)
    if run.init_from:
        folder.transfer(model, run.init_from)
    elif run.stem_init:
        run.stem_init.initialize(model, dataset, run.seed)
    model.set_grad_checkpointing(run.grad_checkpointing)
    torch.manual_seed(mix_seed(Stream.TASK_INIT, run.seed))
    task = run.task.build(model, dataset).to(world.device).train()
    dtype, records = compute_dtype(run, world.device), can_record(run, world)
    if run.compile:
        # Dynamo stops compiling a function after eight variants, and all runs of a process share their functions.
        torch.compiler.reset()
        cuda_graphs = world.device.type == "cuda" and not records and (world.size == 1 or run.sharding == "ddp")
        compile_task(task, "step" if cuda_graphs else "blocks", cuda_graphs)
    wrapped = world.wrap(task, run.sharding, dtype)

    # 3. optimizer and EMA, restored where an earlier call has left a checkpoint
    optimizer = run.optim.build(task)
    ema = ModelEma(task.model, run.ema_decay)
    step, seconds_spent = 0, 0.0
    found = checkpoint.resumed(path, world)
    if found is not None:
        checkpoint.load(found[0], task, optimizer, ema)
        step, seconds_spent = found[1]["step"], found[1]["seconds"]

    # 4. one optimizer step per iteration
    train_step = TrainStep(task, optimizer, world, dtype, run.max_grad_norm, ema, run.nan == "skip", wrapped)
    call = RecordedStep(train_step) if records else train_step
    meter = Meter(run.batch_size, task, world.device, world.size)
    pace = Pace(path, world, steps, seconds, step, seconds_spent)
    add_to_record(path, world, lambda: {"data": describe_data(dataset)})
    floors, results = run.task.floors(dataset, evaluated), dict[str, float]()
    with RunLog(path, step, steps, world.is_main) as log:
        if found is not None:
            log.message(f"resuming from step {step}")
        elif floors:
            log.message(f"without a model: {format_values(floors)}")
        window: list[Losses] = []
        for batch in loader.steps(step, steps or sys.maxsize):
            if step >= pace.steps:
                break
            progress = pace.progress(step + 0.5)
            set_lr(optimizer, run.schedule.at(progress), run.optim.weight_decay_at(progress))
            ema.set_step(step)
            context = StepContext(progress, generator(world, run.seed, step), world.rank, world.size)
            losses = call([task.prepare_batch(part, context) for part in batch.split(run.grad_accum_steps)])
            task.after_step(progress)
            step += 1
            pace.update(step)
            window.append(losses)

            last = step >= pace.steps
            stop = world.any(bool(stopped)) if due(step, 10, last) or world.size == 1 else False
            if due(step, run.log_every, last or stop):
                values = summarize(run, world, window, step, path) | meter.read(len(window))
                values |= {"lr": float(optimizer.param_groups[0]["lr"]), "epoch": sampler.epoch(step)}
                window.clear()
                log.write("train", step, values, pace.seconds_left(step))
            seconds_spent = pace.elapsed
            if due(step, run.eval_every, last) and not stop:
                with ema.swap() as averaged:
                    results = evaluate(task, averaged, evaluated, world, run)
                log.write("eval", step, results)
                meter.pause()
            if due(step, run.save_every, last or stop):
                state = {"step": step, "seconds": pace.elapsed}
                checkpoint.save(path, world, task, optimizer, ema, state, run.keep_checkpoints)
                meter.pause()
            if stop:
                log.message(f"stopped at step {step}; resume with: allmlp train --resume {path}")
                raise KeyboardInterrupt

        # 5. the model folder, the curves, and the result
        with ema.swap() as averaged:
            save_model(path, averaged, dataset, world)
            results = results or evaluate(task, averaged, evaluated, world, run)
            results |= floors
            split = "validation" if run.val_size or dataset.validation else "test"
            result: dict[str, Any] = {split: results}
            if dataset.validation:
                results = evaluate(task, averaged, dataset.test, world, run) | run.task.floors(dataset, dataset.test)
                log.message(f"test  step {step}  {format_values(results)}")
                result["test"] = results
        result["parameters"] = sum(weight.numel() for weight in model.parameters())
        result |= {"steps": step, "epochs": sampler.epoch(step), "seconds": seconds_spent}
        add_to_record(path, world, lambda: {"result": result})
    if world.is_main:
        draw_curves(path)
    return results


# --- parts of the loop ------------------------------------------------------------------------------------


def can_record(run: Run, world: parallel.World) -> bool:
    """Whether every step runs the same kernels, on one GPU, so that it can be replayed as a CUDA graph."""
    plain = run.grad_accum_steps == 1 and not run.grad_checkpointing and run.nan == "stop"
    constant = run.optim.capturable and run.optim.weight_decay_end is None
    return run.compile and world.device.type == "cuda" and world.size == 1 and plain and constant


def compute_dtype(run: Run, device: torch.device) -> torch.dtype:
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if (auto if run.precision == "auto" else run.precision) == "bfloat16" else torch.float32


def generator(world: parallel.World, seed: int, step: int) -> torch.Generator:
    """Seed the random numbers of one step: torch's global ones per process, and a generator for all processes."""
    torch.manual_seed(mix_seed(Stream.GLOBAL_RNG, seed, step, world.rank))
    return torch.Generator(world.device).manual_seed(mix_seed(Stream.TASK_STEP, seed, step))


def due(step: int, every: int, last: bool) -> bool:
    return last or step % every == 0


def limits(run: Run, sampler: Sampler) -> tuple[int | None, float]:
    """The largest number of steps and of seconds."""
    budget = run.budget
    limits = [sampler.steps(budget.epochs)] if budget.epochs is not None else []
    limits += [budget.steps] if budget.steps is not None else []
    if not limits and budget.minutes is None:
        raise UserError("the run has no budget: set budget.epochs, budget.steps or budget.minutes")
    return min(limits, default=None), math.inf if budget.minutes is None else 60 * budget.minutes


def summarize(run: Run, world: parallel.World, window: list[Losses], step: int, out: Path) -> dict[str, float]:
    """Means since the last log record. A loss that is not finite ends the run, unless nan=skip."""
    totals = torch.stack([losses.total for losses in window]).float()
    names = list(window[0].metrics)
    columns = [torch.stack([losses.metrics[name] for losses in window]).float().mean() for name in names]
    if run.nan == "skip":
        totals = totals[totals.isfinite()]
    *means, loss = world.mean(torch.stack([*columns, totals.mean()])).tolist()
    if run.nan == "stop" and not math.isfinite(loss):
        bad = step - len(window) + int((~totals.isfinite()).float().argmax())
        good = checkpoint.newest(out)
        where = f"the last good checkpoint is {good[0]}" if good else "there is no checkpoint yet"
        raise UserError(
            f"the loss became {loss} at step {bad}; {where}; lower optim.lr or set max_grad_norm or nan=skip"
        )
    return {"loss": loss, **dict(zip(names, means, strict=True))}


# --- evaluation and files ---------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(task: TaskModule, model: Model, split: Split, world: parallel.World, run: Run) -> dict[str, float]:
    task.eval()
    # Evaluation is rare: running it eagerly costs less than compiling the model a second time.
    with autocast(world.device, compute_dtype(run, world.device)), torch.compiler.set_stance("force_eager"):
        sums = task.evaluate(model, eval_batches(split, run.batch_size, world.device, world.rank, world.size))
    task.train()
    totals = {name: world.sum(torch.stack(list(pair)).double()).tolist() for name, pair in sums.items()}
    return task.summary({name: total / count for name, (total, count) in totals.items() if count})


def save_model(out: Path, model: Model, dataset: Dataset, world: parallel.World) -> None:
    state = checkpoint.full_state_dict(model.state_dict(), world)
    if world.is_main:
        folder.write_model(out, model.spec, state)
        for name, text in dataset.files().items():
            write_atomically(out / name, lambda file, text=text: file.write_text(text, encoding="utf8"))


def claim(out: Path, run: Run, world: parallel.World) -> None:
    """Write run.json, or check that the folder holds the same run. A run without a checkpoint is replaced."""
    file = out / RUN
    before = read_run(out) if file.exists() else None
    if before not in (None, run) and checkpoint.complete(out):
        changes = ", ".join(differences(to_dict(before), to_dict(run)))
        raise UserError(f"{out} holds another run, these fields differ: {changes}; resume it, or choose another --out")
    world.barrier()
    if before != run and world.is_main:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / PACE).unlink(missing_ok=True)
            write_record(out, {"run": to_dict(run), "processes": world.size, "environment": environment(world.device)})
        except OSError as reason:
            raise UserError(f"cannot write to {out}: {reason}") from reason
    world.barrier()


def describe_data(dataset: Dataset) -> dict[str, Any]:
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {"sha256": dataset.checksum()} | {name: len(split) for name, split in splits.items() if split}


def add_to_record(out: Path, world: parallel.World, make: Callable[[], dict[str, Any]]) -> None:
    """Add an entry to run.json. What is there stays: a run that is resumed has begun with the first environment."""
    if world.is_main:
        record = read_record(out)
        write_record(out, make() | record)


def write_record(out: Path, record: dict[str, Any]) -> None:
    order = [name for name in ("run", "processes", "environment", "data", "result") if name in record]
    text = json.dumps({name: record[name] for name in order}, indent=1)
    write_atomically(out / RUN, lambda temporary: temporary.write_text(text, encoding="utf8"))


def read_record(out: Path) -> dict[str, Any]:
    """The record of a run, run.json."""
    file = out / RUN
    if not file.is_file():
        raise UserError(f"{out} is not a run: it has no {RUN}")
    try:
        record = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as reason:
        raise UserError(f"{file}: {reason}") from None
    return record if isinstance(record, dict) else {}


def read_run(out: Path) -> Run:
    file = out / RUN
    try:
        run = from_dict(read_record(out).get("run"), "run")
    except ValueError as reason:
        raise UserError(f"{file}: {reason}") from None
    if not isinstance(run, Run):
        raise UserError(f"{file} does not describe a run")
    return run


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.get("kind") == b.get("kind"):
        return [line for name in a for line in differences(a[name], b[name], f"{path}.{name}" if path else name)]
    return [] if a == b else [path]


def evaluate_checkpoint(out: Path, device: str | None = None, task: Task | None = None) -> dict[str, float]:
    """Evaluate the model of a finished run on its test split (on the held-out examples, if it has a `val_size`), by its
    own task or by another one; with what is reached without a model.
    """
    run = read_run(out)
    evaluator = task or run.task
    with parallel.join(device) as world:
        dataset = run.data.for_model(str(out)).load().split_validation(run.val_size)
        evaluator.check_dataset(dataset)
        model = folder.load(out, device=world.device, dtype=None)
        module = evaluator.build_evaluator(model, dataset).to(world.device)
        return evaluate(module, model, dataset.test, world, run) | evaluator.floors(dataset, dataset.test)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the current step is finished and saved; a second signal ends at once.

    Under torchrun SIGTERM ends at once too: it is sent when another process has died, which this one may wait for.
    """
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    numbers = [signal.SIGINT] if "RANK" in os.environ else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
