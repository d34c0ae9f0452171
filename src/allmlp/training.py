"""The training loop: one for every task, in one process or under torchrun.

A run that was interrupted, at any moment, is resumed from its last checkpoint and computes what it would have computed
without the interruption: everything random is seeded by the step, progress is recorded in pace.json, the number of CPU
threads in threads.json, and the best weights and the evaluations since are part of the checkpoint. This needs the same
machine, versions, number of processes and OMP_NUM_THREADS; elsewhere only rounding differs.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allmlp import checkpoint, parallel
from allmlp.best import Best
from allmlp.callbacks import Callback
from allmlp.compilation import compile_task, compiler_loading
from allmlp.data.dataset import Split
from allmlp.data.sampler import Loader, Sampler, Stream, eval_batches, mix_seed
from allmlp.device import default_dtype, sum_dtype
from allmlp.ema import ModelEma
from allmlp.errors import UserError
from allmlp.files import write_text_atomically
from allmlp.freezing import Freezing
from allmlp.initial_model import initial_model
from allmlp.interrupts import Interrupts, Stopped
from allmlp.log import RunLog, announced, draw_curves, format_values
from allmlp.lora import merge
from allmlp.messages import describe_duration, describe_result, describe_stop, header
from allmlp.meter import Meter
from allmlp.models.model import Model
from allmlp.optim import set_lr
from allmlp.pace import Pace
from allmlp.quantization import round_weights
from allmlp.record import add_to_record, claim, load_data, read_run, record_data, run_folder
from allmlp.run import Run
from allmlp.spec import to_dict
from allmlp.split_metrics import Metric, SplitMetrics
from allmlp.tasks.task import Losses, StepContext, Task, TaskModule
from allmlp.threads import FILE as THREADS
from allmlp.threads import Threads
from allmlp.train_step import RecordedStep, TrainStep, autocast
from allmlp.weights import folder
from allmlp.weights.start import open_start


def train(
    run: Run,
    out: str | os.PathLike[str],
    device: str | None = None,
    callbacks: Iterable[Callback] = (),
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """Train `run` into the folder `out`, or resume the run that is there. Returns the evaluation of the saved model: on
    the test split, or on the held-out examples if the run has a `val_size`; with `metrics`, see `SplitMetrics`.

    >>> run = allmlp.recipes.runs("digits_mixer")["digits_mixer"]
    >>> print(train(run, "runs/digits")["accuracy"])
    """
    with parallel.join(device) as world, Interrupts() as interrupts, run_folder(Path(out), run, world) as path:
        try:
            return training_loop(run, path, world, interrupts, callbacks, SplitMetrics(metrics))
        except KeyboardInterrupt:
            if world.is_main:
                print(interrupts.lost(), file=sys.stderr, flush=True)
            raise


def training_loop(
    run: Run,
    path: Path,
    world: parallel.World,
    interrupts: Interrupts,
    callbacks: Iterable[Callback],
    metrics: SplitMetrics,
) -> dict[str, float]:
    """The loop itself; a separate function, so that its objects are freed before the process group ends."""
    # 1. data
    start = open_start(run.init_from) if run.init_from else None
    data = run.data.for_model(start.folder) if start else run.data
    with announced("reading the data", world.is_main), compiler_loading(run.compile):
        dataset = run.select(load_data(data, path, world))
    run.task.check_dataset(dataset)
    evaluated = dataset.validation or dataset.test
    split = "validation" if run.val_size or dataset.validation else "test"
    if (run.keep_best or run.patience) and split == "test":
        raise UserError("keep_best and patience need a validation split, the test split is for the end: set val_size")
    sampler = Sampler(len(dataset.train), run.batch_size, run.seed, run.aug_repeats, run.batch_growth)
    loader = Loader(dataset.train, sampler, world.device, world.rank, world.size)
    steps, seconds = run.budget.limits(sampler)
    if uneven := [size for _, size in sampler.stages if size % world.size]:
        raise UserError(f"batch size {uneven[0]} is not divisible by {world.size} processes")

    # 2. model and task
    torch.set_float32_matmul_precision("high")
    model, parameters, new = initial_model(run, start, dataset, world)
    torch.manual_seed(mix_seed(Stream.TASK_INIT, run.seed))
    task = run.task.build(model, dataset).to(world.device).train()
    metrics.check(task)
    restored = checkpoint.resumed(path, world)
    if run.head_init and restored is None:
        with announced("fitting the head", world.is_main):
            run.head_init.initialize(model, task, dataset, run.seed)
    if run.quantize:
        run.quantize.apply(model)
    dtype, records = compute_dtype(run, world.device), can_record(run, world)
    if run.compile:
        # Dynamo stops compiling a function after eight variants, and all runs of a process share their functions.
        torch.compiler.reset()
        cuda_graphs = world.device.type == "cuda" and not records and (world.size == 1 or run.sharding == "ddp")
        compile_task(task, "step" if cuda_graphs else "blocks", cuda_graphs)
    wrapped = world.wrap(task, run.sharding, dtype)

    # 3. optimizer, EMA and best weights, restored where an earlier call has left a checkpoint
    optimizer = run.optim.build(task)
    freezing = Freezing(task, optimizer, run.freeze_fraction)
    frozen = freezing.parameters if run.freeze_fraction == 1 else []
    trained = count(w for w in model.parameters() if w.requires_grad) - count(frozen)
    ema, best = ModelEma(task.model, run.ema_decay), Best(run.keep_best, run.patience, run.start_margin)
    step, seconds_spent, evaluation_due = 0, 0.0, run.head_init is not None
    if restored is not None:
        place, state = restored
        best.load(state["best"], task.model)
        checkpoint.load(place, task, optimizer, ema, best.weights)
        step, seconds_spent, evaluation_due = state["step"], state["seconds"], state["evaluation_due"]

    # 4. one optimizer step per iteration
    claim(path, run, world, dataset)
    train_step = TrainStep(task, optimizer, world, dtype, run.max_grad_norm, ema, run.nan == "skip", wrapped)
    if restored is not None:
        train_step.load_scaler(restored[1]["scaler"])
    call = RecordedStep(train_step) if records else train_step
    meter = Meter(task, world.device, world.size)
    pace = Pace(path, world, steps, seconds, step, seconds_spent)
    # Compiled code is made for one number of threads.
    threads = Threads(path / THREADS, step, world.device.type == "cpu" and world.size == 1 and not run.compile)
    with announced("computing the checksum of the data", world.is_main):
        record_data(path, world, dataset)
    floors, results = run.task.floors(dataset, evaluated), dict[str, float]()
    interrupts.lost = lambda: describe_stop(path, step)
    with (
        RunLog(path, step, steps, world.is_main, pace.seconds_left, callbacks) as log,
        checkpoint.Saver(path, world, task, run.keep_checkpoints, partial(log.callbacks.call, "on_save")) as saver,
    ):
        log.callbacks.call("on_start", path, to_dict(run), step)
        log.message(header(run, path, model.spec, parameters, trained, new, dataset, sampler, steps, world, dtype))
        if restored is not None:
            log.message(f"resuming from step {step}")
        elif floors:
            log.message(f"without a model: {format_values(floors)}")

        def evaluate_weights() -> dict[str, float]:
            if step:
                threads.apply()  # the same number in a resumed run, before its first step
            with log.during("evaluation"), meter.paused():
                with ema.swap() as averaged:
                    values = evaluate(task, averaged, evaluated, world, run, metrics, interrupts.over)
                    best.update(step, values, averaged, seconds_spent)
                log.write("eval", step, values)
            return values

        if evaluation_due:
            results = evaluate_weights()
        window, examples, saved, estimated = list[Losses](), 0, time.monotonic(), restored is not None
        for batch in loader.steps(step, steps or sys.maxsize):
            if step >= pace.steps or best.is_exhausted:
                break
            progress = pace.progress(step + 0.5)
            if freezing.set(progress):
                # A recorded graph, and DDP, depend on which weights have gradients.
                train_step.wrapped = wrapped = None
                gc.collect()
                train_step.wrapped = wrapped = world.wrap(task, run.sharding, dtype)
                call = RecordedStep(train_step) if records else train_step
            set_lr(optimizer, run.schedule.at(progress), run.optim.weight_decay_at(progress))
            ema.set_step(step)
            context = StepContext(progress, generator(world, run.seed, step), world.rank, world.size)
            size = sampler.batch_size(step)
            parts = batch.split(math.ceil(size * run.grad_accum_steps / run.batch_size))
            with threads:
                losses = call(task.prepare_batches(parts, context))
            task.after_step(progress)
            step += 1
            log.reach(step)
            pace.update(step)
            saver.poll()
            window.append(losses)
            examples += size

            last, stop, late = step >= pace.steps, False, False
            if world.size == 1 or due(step, 10, last):
                stop = world.any(interrupts.requested)
                late = world.any(time.monotonic() - saved > 60 * run.save_minutes)
            if due(step, run.log_every, last or stop):
                values = summarize(run, world, window, step, path) | meter.read(examples)
                rate = max(float(group["lr"]) for group in optimizer.param_groups)
                values |= {"lr": rate, "epoch": sampler.epoch(step)}
                values |= {"batch_size": size} if run.batch_growth else {}
                values |= {"loss_scale": train_step.loss_scale} if dtype == torch.float16 else {}
                window, examples = [], 0
                log.write("train", step, values, pace.seconds_left(step))
            if not estimated and (left := pace.first_estimate(step, not threads.is_measuring)) is not None:
                log.message(describe_duration(run, world, left))
                estimated = True
            seconds_spent, evaluation_due = pace.elapsed, due(step, run.eval_every, last)
            if evaluation_due and not stop:
                try:
                    results, evaluation_due = evaluate_weights(), False
                except Stopped:
                    stop = True
            if due(step, run.save_every, last or stop or late or best.is_exhausted):
                if window:  # non-finite weights must not replace a good checkpoint
                    summarize(run, world, window, step, path)
                check_weights_finite(task, world, path)
                state = {"step": step, "seconds": pace.elapsed, "best": best.state(), "evaluation_due": evaluation_due}
                state["scaler"] = train_step.scaler.state_dict()
                with interrupts.saving(), meter.paused():
                    saver.save(task, optimizer, ema, state, best.weights, wait=last or stop or best.is_exhausted)
                saved = time.monotonic()
            if stop:
                raise KeyboardInterrupt

        # 5. the model folder, the curves, and the result
        if best.is_exhausted:
            log.message(f"no improvement in {best.waited} evaluations: the run ends at step {step}")
        with ema.swap() as averaged, log.during("the last evaluation"):
            if run.keep_best:
                best.restore(averaged)
                results = best.results
            check_weights_finite(averaged, world, path)
            merge(averaged)
            round_weights(averaged)
            save_model(path, averaged, run.task.files(dataset), world)
            full = run.task.build_evaluator(averaged, dataset).to(world.device) if task.evaluates_part else task
            results = ((full is task and results) or evaluate(full, averaged, evaluated, world, run, metrics)) | floors
            result: dict[str, Any] = {split: results}
            if dataset.validation:
                result["test"] = results = evaluate(full, averaged, dataset.test, world, run, metrics)
                results |= run.task.floors(dataset, dataset.test)
        result |= {"best_step": best.step} if run.keep_best else {}
        result |= {"parameters": parameters, "trained_parameters": trained, "steps": step} | meter.cost()
        result |= {"epochs": sampler.epoch(step), "seconds": seconds_spent, "evaluations": best.evaluations}
        add_to_record(path, world, {"result": result})
        log.result = result
        log.message(describe_result(path, result, floors, dataset))
    if world.is_main:
        draw_curves(path)
    return results


# --- parts of the loop ------------------------------------------------------------------------------------


def can_record(run: Run, world: parallel.World) -> bool:
    """Whether every step runs the same kernels, on one GPU, so that it can be replayed as a CUDA graph."""
    plain = run.grad_accum_steps == 1 and not run.grad_checkpointing and run.nan == "stop"
    constant = run.optim.capturable and run.optim.weight_decay_end is None
    if not (run.compile and world.device.type == "cuda" and world.size == 1 and plain and constant):
        return False
    # In float16, whether the weights change depends on the gradients.
    return compute_dtype(run, world.device) != torch.float16


def compute_dtype(run: Run, device: torch.device) -> torch.dtype:
    return default_dtype(device) if run.precision == "auto" else getattr(torch, run.precision)


def generator(world: parallel.World, seed: int, step: int) -> torch.Generator:
    """Seed the random numbers of one step: torch's global ones per process, and a generator for all processes."""
    # For GPUs not in use yet, torch.manual_seed formats the stack, which is slow.
    reseed = torch.default_generator.manual_seed if world.device.type == "cpu" else torch.manual_seed
    reseed(mix_seed(Stream.GLOBAL_RNG, seed, step, world.rank))
    return torch.Generator(world.device).manual_seed(mix_seed(Stream.TASK_STEP, seed, step))


def count(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def due(step: int, every: int, last: bool) -> bool:
    return last or step % every == 0


def summarize(run: Run, world: parallel.World, window: list[Losses], step: int, out: Path) -> dict[str, float]:
    """Means since the last log record. A non-finite loss ends the run; with nan=skip such values are left out."""
    names = ["loss", *window[0].metrics]
    steps = [torch.stack([value.float() for value in (losses.total, *losses.metrics.values())]) for losses in window]
    if run.nan == "skip":
        sums = [torch.stack([values.nan_to_num(0, 0, 0), values.isfinite().float()]) for values in steps]
        found = zip(names, *world.sum(torch.stack(sums).sum(0)).tolist(), strict=True)
        return {name: total / count for name, total, count in found if count}
    means = world.mean(torch.stack(steps))
    if not math.isfinite(loss := means[:, 0].mean().item()):
        at = step - len(window) + 1 + int((~means[:, 0].isfinite()).float().argmax())
        found = checkpoint.newest(out)
        where = f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint yet"
        raise UserError(f"the loss became {loss} at step {at}; {where}; lower optim.lr, set max_grad_norm or nan=skip")
    return dict(zip(names, means.mean(0).tolist(), strict=True))


def check_weights_finite(module: torch.nn.Module, world: parallel.World, out: Path) -> None:
    """Raise UserError if weights are not finite, so that the run does not end successfully with a useless model."""
    local = [getattr(weight, "_local_tensor", weight) for weight in module.parameters()]
    if world.any(not all(bool(weight.isfinite().all()) for weight in local)):
        raise UserError(
            f"the weights are no longer finite, so that {out} has no model: lower optim.lr, or set max_grad_norm"
        )


# --- evaluation and files ---------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    task: TaskModule,
    model: Model,
    split: Split,
    world: parallel.World,
    run: Run,
    metrics: SplitMetrics = SplitMetrics(),
    over: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> dict[str, float]:
    task.eval()
    metrics.start(task)
    world.share_buffers(model)
    # Evaluation is rare: running it eagerly costs less than compiling the model a second time.
    with autocast(world.device, compute_dtype(run, world.device)), torch.compiler.set_stance("force_eager"):
        sums = task.evaluate(model, over(eval_batches(split, run.batch_size, world.device, world.rank, world.size)))
    task.train()
    wide = sum_dtype(world.device)
    totals = {name: world.sum(torch.stack(list(pair)).to(wide)).tolist() for name, pair in sums.items()}
    values = task.summary({name: total / count for name, (total, count) in totals.items() if count})
    return values | metrics.finish(task, world)


def save_model(out: Path, model: Model, files: Mapping[str, str], world: parallel.World) -> None:
    state = checkpoint.full_state_dict(model.state_dict(), world)
    if world.is_main:
        folder.write_model(out, model.spec, state)
        for name, text in files.items():
            write_text_atomically(out / name, text)


def evaluate_checkpoint(
    out: Path, device: str | None = None, task: Task | None = None, model: Path | None = None
) -> dict[str, float]:
    """Evaluate the model of a finished run, or the one in the folder `model`, on the run's test split (on the held-out
    examples, if it has a `val_size`), by its own task or another one; includes trivial baselines.
    """
    run = read_run(out)
    evaluator = task or run.task
    with parallel.join(device) as world:
        dataset = run.select(run.data.for_model(str(out)).load())
        evaluator.check_dataset(dataset)
        loaded = folder.load(model or out, device=world.device, dtype=None)
        module = evaluator.build_evaluator(loaded, dataset).to(world.device)
        return evaluate(module, loaded, dataset.test, world, run) | evaluator.floors(dataset, dataset.test)
