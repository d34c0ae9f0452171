"""The loop. One for every task, alone or under torchrun; read it top to bottom."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from allmlp import __version__, checkpoint, parallel
from allmlp.average import averaged, follow, pull_at
from allmlp.data.order import Loader, Order, Step, fold, in_order
from allmlp.data.source import Splits
from allmlp.errors import UserError
from allmlp.files import RUN, write_atomically
from allmlp.graph import Recorded
from allmlp.log import Log, draw_curves
from allmlp.meter import Meter
from allmlp.models.model import Model
from allmlp.models.zoo import create
from allmlp.optim import set_rates
from allmlp.run import Run
from allmlp.spec import from_dict, to_dict
from allmlp.tasks.task import Losses, Moment, Task, TaskModule
from allmlp.weights import folder


def train(run: Run, out: str | os.PathLike[str], device: str | None = None) -> dict[str, float]:
    """Train `run` into the folder `out`, going on where an earlier call stopped. Returns the last evaluation."""
    with parallel.join(device) as world, interrupts() as stopped:
        return learn(run, Path(out), world, stopped)


def learn(run: Run, path: Path, world: parallel.World, stopped: list[int]) -> dict[str, float]:
    """The loop itself. All it builds is gone when it returns, before the processes part."""
    # 1. data
    claim(path, run, world)
    data = run.data.like(run.init_from) if run.init_from else run.data
    dataset = data.open().hold_out(run.hold_out)
    run.task.accept(dataset)
    order = Order(len(dataset.train), run.batch, run.seed, run.repeats)
    loader = Loader(dataset.train, order, world.device, world.rank, world.size)
    steps, seconds = limits(run, order)
    if run.batch % world.size:
        raise UserError(f"a batch of {run.batch} cannot be shared equally by {world.size} processes")

    # 2. model and task
    torch.set_float32_matmul_precision("high")
    if run.model is None and run.init_from is None:
        raise UserError("the run has no model of its own: name the one to start from, --set init_from=FOLDER")
    spec = run.model or folder.read_spec(Path(str(run.init_from)))
    model = create(run.task.fit(spec, dataset), seed=run.seed, device=world.device)
    if run.init_from:
        folder.transfer(model, run.init_from)
    model.set_grad_checkpointing(run.checkpointing)
    torch.manual_seed(fold(run.seed, 4))  # what the task draws beside the model
    task = run.task.build(model, dataset).to(world.device).train()
    records = can_record(run, world)
    if run.compile:
        task.quicken(graphs=world.device.type == "cuda" and not records)
    wrapped = world.wrap(task, run.sharding)

    # 3. optimiser, average, and what an earlier call left
    optimizer = run.optim.build(task)
    trained = list(task.model.parameters())
    average = [weight.detach().clone() for weight in trained] if run.ema else []
    step, spent = 0, 0.0
    found = checkpoint.resumed(path, world)
    if found is not None:
        checkpoint.load(found[0], task, optimizer, average)
        step, spent = found[1]["step"], found[1]["seconds"]

    def descend(*inputs: Tensor) -> Losses:
        with precision(run, world.device):
            losses = task.learn(*inputs)
        losses.total.backward()
        update(run, task, optimizer, losses)
        follow(average, trained, pull)
        return tree_map(torch.detach, losses)

    # 4. one optimiser step per turn
    pull = torch.zeros((), device=world.device)  # a tensor, so that a recorded step can read it
    recorded = Recorded(descend) if records else None
    results: dict[str, float] = {}
    meter = Meter(run.batch, task, world.device, world.size)
    with Log(path, step, steps, world.is_main) as log:
        if found is not None:
            log.say(f"going on from step {step}")
        started = time.monotonic() - spent
        window: list[Losses] = []
        for example in loader.steps(step, steps or sys.maxsize):
            progress = max(step / steps if steps else 0.0, (time.monotonic() - started) / seconds)
            if progress >= 1:
                break
            set_rates(optimizer, run.schedule.at(progress), run.optim.decay_at(progress))
            moment = Moment(progress, generator(world, run.seed, step), world.rank, world.size)
            if recorded is not None:
                pull.fill_(pull_at(run.ema, step))
                losses = recorded(*task.prepare(example, moment))
            else:
                losses = backward(run, world, wrapped, example, moment)
                if update(run, task, optimizer, losses):
                    follow(average, trained, pull_at(run.ema, step))
            task.after_step(progress)
            step += 1
            window.append(losses)

            last = step == steps or (time.monotonic() - started) / seconds >= 1
            stop = world.any(bool(stopped)) if due(step, 10, last) or world.size == 1 else False
            if due(step, run.cadence.log, last or stop):
                shown = summarise(run, world, window, step, path) | meter.read(len(window))
                shown |= {"lr": float(optimizer.param_groups[0]["lr"]), "epoch": order.epoch(step)}
                window.clear()
                done = max(step / steps if steps else 0.0, (time.monotonic() - started) / seconds)
                left = (time.monotonic() - started) * (1 - done) / done
                log.write("train", step, shown, left)
            if due(step, run.cadence.evaluate, last) and not stop:
                results = evaluate(task, averaged(task.model, trained, average), dataset, world, run)
                log.write("eval", step, results)
                meter.pause()
            if due(step, run.cadence.save, last or stop):
                state = {"step": step, "seconds": time.monotonic() - started}
                checkpoint.save(path, world, task, optimizer, average, state, run.cadence.keep)
                meter.pause()
            if stop:
                log.say(f"stopped at step {step}; go on with: allmlp train --resume {path}")
                raise KeyboardInterrupt

    # 5. the model as a folder, and a picture of how it went
    with averaged(task.model, trained, average) as final:
        keep_model(path, final, dataset, world)
    if world.is_main:
        draw_curves(path)
    if not results:
        results = evaluate(task, averaged(task.model, trained, average), dataset, world, run)
    return results


# --- the parts of a step ------------------------------------------------------------------------------


def backward(run: Run, world: parallel.World, wrapped: nn.Module, example: Step, moment: Moment) -> Losses:
    """Gradients of one batch, in one pass or several."""
    pieces = split(example, run.accumulate)
    total = []
    for number, piece in enumerate(pieces, 1):
        with world.sync(wrapped, number == len(pieces)), precision(run, world.device):
            losses: Losses = wrapped(piece, moment)
        (losses.total / len(pieces)).backward()
        total.append(losses)
    # Means are new tensors: a CUDA graph overwrites its own outputs at the next step.
    means = {name: torch.stack([one.shown[name].detach() for one in total]).mean() for name in total[0].shown}
    return Losses(torch.stack([one.total.detach() for one in total]).mean(), means)


def can_record(run: Run, world: parallel.World) -> bool:
    """Whether a step is the same sequence of kernels every time, on one GPU, so that it can be replayed as one."""
    plain = run.accumulate == 1 and not run.checkpointing and run.nan == "stop"
    constant = run.optim.records and run.optim.last_decay is None
    return run.compile and world.device.type == "cuda" and world.size == 1 and plain and constant


def split(example: Step, parts: int) -> list[Step]:
    if parts == 1:
        return [example]
    pieces = zip(example.indices.chunk(parts), *(tensor.chunk(parts) for tensor in example.batch), strict=True)
    return [example._replace(indices=indices, batch=type(example.batch)(*tensors)) for indices, *tensors in pieces]


def update(run: Run, task: TaskModule, optimizer: torch.optim.Optimizer, losses: Losses) -> bool:
    """Whether the weights have moved."""
    if run.nan == "skip" and not bool(losses.total.isfinite()):
        optimizer.zero_grad(set_to_none=True)
        return False
    if run.clip:
        nn.utils.clip_grad_norm_(task.parameters(), run.clip, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return True


def precision(run: Run, device: torch.device) -> Any:
    wanted = run.precision if run.precision != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return torch.autocast(device.type, torch.bfloat16) if wanted == "bfloat16" else nullcontext()


def generator(world: parallel.World, seed: int, step: int) -> torch.Generator:
    """Random numbers of one step, the same again after a resume: torch's own for each process, and shared ones."""
    torch.manual_seed(fold(seed, step, world.rank, 2))
    return torch.Generator(world.device).manual_seed(fold(seed, step, 3))


def due(step: int, every: int, last: bool) -> bool:
    return last or step % every == 0


def limits(run: Run, order: Order) -> tuple[int | None, float]:
    """Steps and seconds a run may take."""
    budget = run.budget
    limits = [order.steps(budget.epochs)] if budget.epochs is not None else []
    limits += [budget.steps] if budget.steps is not None else []
    if not limits and budget.minutes is None:
        raise UserError("the run has no end: set budget.epochs, budget.steps or budget.minutes")
    return min(limits, default=None), math.inf if budget.minutes is None else 60 * budget.minutes


def summarise(run: Run, world: parallel.World, window: list[Losses], step: int, out: Path) -> dict[str, float]:
    """Means since the last report; an infinite or undefined loss ends the run here, unless it is to be skipped."""
    totals = torch.stack([losses.total for losses in window]).float()
    names = list(window[0].shown)
    columns = [torch.stack([losses.shown[name] for losses in window]).float().mean() for name in names]
    if run.nan == "skip":
        totals = totals[totals.isfinite()]
    *means, loss = world.mean(torch.stack([*columns, totals.mean()])).tolist()
    if run.nan == "stop" and not math.isfinite(loss):
        bad = step - len(window) + int((~totals.isfinite()).float().argmax())
        good = checkpoint.newest(out)
        where = f"the last good checkpoint is {good[0]}" if good else "there is no checkpoint yet"
        raise UserError(f"the loss became {loss} at step {bad}; {where}; lower optim.lr, set clip, or nan=skip")
    return {"loss": loss, **dict(zip(names, means, strict=True))}


# --- judging and keeping ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(task: TaskModule, judged: Any, dataset: Splits, world: parallel.World, run: Run) -> dict[str, float]:
    task.eval()
    # Judging is rare: the uncompiled model costs less than compiling it a second time.
    with judged as model, precision(run, world.device), torch.compiler.set_stance("force_eager"):
        sums = task.evaluate(model, in_order(dataset.test, run.batch, world.device, world.rank, world.size))
    task.train()
    totals = {name: world.sum(torch.stack(list(pair)).double()).tolist() for name, pair in sums.items()}
    return task.summary({name: total / max(count, 1) for name, (total, count) in totals.items()})


def keep_model(out: Path, model: Model, dataset: Splits, world: parallel.World) -> None:
    state = checkpoint.whole(model.state_dict())
    if world.is_main:
        folder.write(out, model.spec, state)
        for name, text in dataset.files().items():
            write_atomically(out / name, lambda file, text=text: file.write_text(text, encoding="utf8"))


def claim(out: Path, run: Run, world: parallel.World) -> None:
    """Write the run down, or see that the folder holds the same run; one that never took a step is replaced."""
    file = out / RUN
    before = read_run(out) if file.exists() else None
    if before not in (None, run) and checkpoint.complete(out):
        changes = ", ".join(differences(to_dict(before), to_dict(run)))
        raise UserError(f"{out} holds another run, these fields differ: {changes}; resume it, or change --out")
    world.barrier()
    if before != run and world.is_main:
        record = {
            "run": to_dict(run),
            "allmlp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "processes": world.size,
            "command": sys.argv,
        }
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda temporary: temporary.write_text(json.dumps(record, indent=1)))
        except OSError as reason:
            raise UserError(f"cannot write to {out}: {reason}") from reason
    world.barrier()


def read_run(out: Path) -> Run:
    file = out / RUN
    if not file.is_file():
        raise UserError(f"{out} is not a run: it has no {RUN}")
    try:
        record = json.loads(file.read_text(encoding="utf8"))
        run = from_dict(record.get("run") if isinstance(record, dict) else None, "run")
    except (OSError, ValueError) as reason:
        raise UserError(f"{file}: {reason}") from None
    if not isinstance(run, Run):
        raise UserError(f"{file} does not describe a run")
    return run


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.get("kind") == b.get("kind"):
        return [line for name in a for line in differences(a[name], b[name], f"{path}.{name}" if path else name)]
    return [] if a == b else [path]


def judge_again(out: Path, device: str | None = None, judge: Task | None = None) -> dict[str, float]:
    """Evaluate the model that a run has kept, by its own task or by another one."""
    run = read_run(out)
    judge = judge or run.task
    with parallel.join(device) as world:
        dataset = run.data.like(str(out)).open().hold_out(run.hold_out)
        judge.accept(dataset)
        model = folder.load(out, world.device)
        task = judge.judge(model, dataset).to(world.device)
        return evaluate(task, nullcontext(model), dataset, world, run)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, so that the step in hand is finished and saved; a second one ends at once.

    Under torchrun SIGTERM ends at once too: it comes when another process has died, and this one may wait for it.
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
