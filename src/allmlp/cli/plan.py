"""allmlp plan."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli.app import app, cell, complete_name, console, examples, next_command, plain_table, print_json
from allmlp.errors import UserError, lookup, plural

if TYPE_CHECKING:
    from rich.table import Table

    from allmlp.plan.check import Comparison
    from allmlp.plan.estimate import Estimate
    from allmlp.plan.scaling import Scaling

GIGABYTE = 1e9


@app.command(
    epilog=examples(
        "allmlp plan mixer_h14 --samples 300e6 --epochs 14 --gpus 1024",
        "allmlp plan imagenet_mixer_b16 --gpus 64 --gpu a100",
        "allmlp plan gmlp_xlarge --samples 256e6 --gpus 128 --mfu 0.3 --json",
        "allmlp plan --from runs/* --at 1e18",
        "allmlp plan resmlp_s24 --check --batch-size 8 --calibrate resmlp_s12",
    )
)
def plan(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="A model from `allmlp list`, or a recipe from `allmlp list recipes`; with --from finished runs, or "
            "folders that contain them.",
            autocompletion=complete_name,
        ),
    ],
    from_runs: Annotated[
        bool, typer.Option("--from", help="Fit a scaling law to runs, and predict the loss of the next one.")
    ] = False,
    by: Annotated[str | None, typer.Option(help="With --from: flops, parameters or examples; default flops.")] = None,
    at: Annotated[
        float | None, typer.Option(help="With --from: the size to predict; default: ten times the largest.")
    ] = None,
    samples: Annotated[float | None, typer.Option(help="Size of the training set, e.g. 300e6.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs; default 8.")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, h100 or a100; default h200.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per step over all GPUs; default: the paper's.")
    ] = None,
    grad_accum_steps: Annotated[int | None, typer.Option(help="Micro-batches per step.")] = None,
    optim: Annotated[str | None, typer.Option(help="adamw, sgd, adagrad, lamb or muon.")] = None,
    sharding: Annotated[str | None, typer.Option(help="ddp or fsdp; default: the fastest that fits.")] = None,
    grad_checkpointing: Annotated[
        bool | None,
        typer.Option("--grad-checkpointing/--no-grad-checkpointing", help="Recompute blocks in the backward pass."),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--eager", help="With or without torch.compile; default: as the recipe, --check eager."
        ),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Model FLOPs utilization; default: the measured one of the family.")
    ] = None,
    network_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s per GPU; default: the GPU's.", min=0.001, max=1_000_000)
    ] = None,
    storage_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s at which checkpoints are written; default 2.", min=0.001, max=1_000_000)
    ] = None,
    sample_bytes: Annotated[float | None, typer.Option(help="Stored size of an example.")] = None,
    restart_minutes: Annotated[
        float | None, typer.Option(help="From a failure until training continues; default 10.", min=0, max=10_000_000)
    ] = None,
    simulations: Annotated[int | None, typer.Option(help="Runs to simulate; default 500.", min=2, max=100_000)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the simulation, or of the intervals of --from; default 0.", min=0)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Run real steps on this machine and compare.")] = False,
    calibrate: Annotated[str | None, typer.Option(help="With --check: measure the speed with this model.")] = None,
    device: Annotated[str | None, typer.Option(help="With --check: cpu, cuda or cuda:1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, step time, communication, storage, failures and GPU-days of a large training run.

    With --from, fit L = E + A x^-alpha to the losses of finished runs instead.
    """
    cluster = {"--samples": samples, "--epochs": epochs, "--gpu": gpu, "--grad-accum-steps": grad_accum_steps}
    cluster |= {"--sharding": sharding, "--network-bandwidth": network_bandwidth, "--sample-bytes": sample_bytes}
    cluster |= {"--storage-bandwidth": storage_bandwidth, "--restart-minutes": restart_minutes}
    cluster |= {"--simulations": simulations}
    if from_runs:
        model = {"--gpus": gpus, "--batch-size": batch_size, "--optim": optim, "--mfu": mfu, "--compiled": compiled}
        model |= {"--grad-checkpointing": grad_checkpointing, "--calibrate": calibrate, "--device": device}
        refuse("--from fits the losses of finished runs", cluster | model | {"--check": check or None})
        predict_loss(targets, by or "flops", at, seed or 0, as_json)
        return
    if len(targets) > 1 or by is not None or at is not None:
        raise UserError("plan estimates one model or recipe; several runs, --by and --at need --from")
    (target,) = targets
    check_options(samples=samples, epochs=epochs, gpus=gpus, gpu=gpu, batch_size=batch_size, sharding=sharding, mfu=mfu)
    check_options(grad_accum_steps=grad_accum_steps, sample_bytes=sample_bytes)
    from allmlp.plan.estimate import estimate
    from allmlp.plan.jobs import job

    if check:
        refuse(
            "--check runs steps on one device of this machine",
            {"--gpus": None if gpus == 1 else gpus} | cluster | {"--seed": seed},
        )
        options = bool(grad_checkpointing), bool(compiled), mfu, calibrate, device, as_json
        run_check(target, 8 if batch_size is None else batch_size, optim, *options)
        return
    if calibrate or device:
        raise UserError("--calibrate and --device need --check")
    result = estimate(
        job(
            target,
            samples,
            epochs,
            gpus=8 if gpus is None else gpus,
            gpu=gpu,
            batch_size=batch_size,
            grad_accum_steps=grad_accum_steps,
            optim=optim,
            sharding=sharding,
            grad_checkpointing=grad_checkpointing,
            compiled=compiled,
            mfu=mfu,
            network_bandwidth=None if network_bandwidth is None else network_bandwidth * GIGABYTE,
            storage_bandwidth=None if storage_bandwidth is None else storage_bandwidth * GIGABYTE,
            sample_bytes=sample_bytes,
            restart_seconds=None if restart_minutes is None else restart_minutes * 60,
        ),
        500 if simulations is None else simulations,
        seed or 0,
    )
    if as_json:
        print_json(result.as_json(), indent=2)
    else:
        print_estimate(result)
        next_command("show", target)


def check_options(**fields: object) -> None:
    """Check fields of the job by the names of their options. The other options are in other units than their fields."""
    from allmlp.plan.estimate import Job
    from allmlp.spec import conform, hints

    for name, value in fields.items():
        if value is not None:
            conform(value, hints(Job)[name], f"--{name.replace('_', '-')}")


def refuse(reason: str, options: Mapping[str, object]) -> None:
    """Options that have a value would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{reason}: leave out {name}")


def predict_loss(folders: list[str], by: str, at: float | None, seed: int, as_json: bool) -> None:
    from pathlib import Path

    from allmlp.plan.scaling import QUANTITIES, scaling
    from allmlp.report.runs import runs_in

    quantity = lookup(by, QUANTITIES, "quantity")
    named = [Path(folder) for folder in folders]
    result = scaling([run for folder in named for run in runs_in(folder) or [folder]], quantity, at, seed)
    if as_json:
        print_json(result.as_json(), indent=2)
    else:
        print_scaling(result)


def print_scaling(result: Scaling) -> None:
    table = plain_table(("run",), (result.by, "loss", "fitted", "from smaller runs"))
    for point in result.points:
        x, error = getattr(point, result.by), result.held_out.get(point.name)
        table.add_row(
            cell(point.name),
            f"{x:.3g}",
            f"{point.loss:.4f}",
            f"{result.law(x) / point.loss - 1:+.2%}",
            "" if error is None else f"{error:+.2%}",
        )
    console().print(table)
    law, (low, high) = result.law, result.alpha_range
    print(f"L = {law.floor:.4g} + {law.scale:.4g} ({result.by} / {law.unit:.3g})^-{law.alpha:.3g}")
    print(
        f"95 % intervals: E {result.floor_range[0]:.4g} to {result.floor_range[1]:.4g}, alpha {low:.3g} to {high:.3g}"
    )
    if result.held_out_error is not None:
        count = len(result.held_out)
        print(f"held out: {plural(count, 'run')} predicted from smaller ones, off by {result.held_out_error:.2%}")
    else:
        print("held out: no run has enough smaller ones to be predicted from")
    ahead = result.next
    print(
        f"at {ahead.x:.3g} {result.by}: loss {ahead.loss:.4f}, {ahead.low:.4f} to {ahead.high:.4f} with 95 % confidence"
    )


def run_check(
    target: str,
    batch_size: int,
    optim: str | None,
    grad_checkpointing: bool,
    compiled: bool,
    mfu: float | None,
    calibrate: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    import torch

    from allmlp.device import own_device
    from allmlp.models.cost import measure
    from allmlp.models.zoo import preset
    from allmlp.plan.check import check
    from allmlp.plan.fits import check_training
    from allmlp.plan.hardware import expected_flops
    from allmlp.plan.jobs import job

    place = own_device(device)
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"--check measures memory on a CPU or a CUDA GPU, not on {place.type}: use --device cpu")
    if mfu is not None and (calibrate is not None or place.type == "cpu"):
        reason = "--calibrate measures the speed" if calibrate is not None else "the peak speed of a CPU is unknown"
        refuse(reason, {"--mfu": mfu})
    sizes = {"samples": 1, "epochs": 1, "gpus": 1, "batch_size": batch_size, "grad_accum_steps": 1}
    here = job(target, **sizes, optim=optim, mfu=mfu)
    other, flops, basis = None, None, "no speed to predict the time from; --calibrate MODEL measures one"
    if calibrate is not None:
        other, basis = preset(calibrate).spec, f"time predicted from the speed of {calibrate}"
    elif place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        flops, basis = expected_flops(name, here.family, here.modality, measure(here.model).macs, mfu)
    check_training(here.model, batch_size, here.optim, place, grad_checkpointing=grad_checkpointing)
    half = here.precision == "bfloat16"
    rows = check(here.model, batch_size, here.optim, place, 5, grad_checkpointing, flops, other, compiled, half)
    if as_json:
        report: dict[str, Any] = {"model": target, "batch_size": batch_size, "device": str(place), "basis": basis}
        report["rows"] = {row.quantity: row._asdict() | {"error": row.error} for row in rows}
        print_json(report, indent=2)
        return
    print(f"{target}, batch size {batch_size}, one step on {place}; {basis}")
    print_comparisons(rows)


def print_comparisons(rows: list[Comparison]) -> None:
    table = plain_table(("quantity",), ("predicted", "measured", "error"))
    for row in rows:
        scale, unit = (1e6, "MB") if row.unit == "bytes" else (1.0, row.unit)
        shown = [f"{value / scale:,.3f} {unit}" if value is not None else "" for value in (row.predicted, row.measured)]
        table.add_row(row.quantity, *shown, "" if row.error is None else f"{row.error:+.1%}")
    console().print(table)


MEMORY = {
    "weights": "weights",
    "EMA of weights": "ema",
    "optimizer state": "optimizer_state",
    "gradients": "gradients",
    "weights in bfloat16": "weight_copies",
    "communication buffers": "communication_buffers",
    "activations": "activations",
}


def print_estimate(result: Estimate) -> None:
    from rich.text import Text

    from allmlp.plan.estimate import USABLE

    job, screen = result.job, console()

    def heading(text: str) -> None:
        screen.print(Text(f"\n{text}", style="bold"))

    mode = "compiled" if job.compiled else "eager"
    title = f" on {job.gpus:,} {job.card.name}, {type(job.optim).__name__}, {job.precision}, {mode}"
    screen.print(Text.assemble((job.name, "bold"), title))
    print(
        f"{job.samples:,.0f} samples x {plural(job.epochs, 'epoch', form='g')}, batch size {job.batch_size:,} "
        f"({job.local_batch_size:,} per GPU)"
    )
    heading(f"Memory per GPU in GB ({USABLE * job.card.memory / GIGABYTE:.0f} usable; ckpt: gradient checkpointing)")
    screen.print(memory_table(result))
    if not all(each.fits for each in result.strategies):
        print("(!) does not fit")
    for section, lines in {
        f"Time with {result.chosen.name}": time_lines(result),
        "Failures at the rate of Llama 3": failure_lines(result),
        "Total": {
            "hours": f"{result.expected_seconds / 3600:,.1f} ({result.ideal_seconds / 3600:,.1f} without failures)",
            "GPU-days": f"{result.gpu_days:,.1f}",
        },
    }.items():
        heading(section)
        for label, text in lines.items():
            print(*wrap(text, screen.width, initial_indent=f"{label:<13}", subsequent_indent=" " * 13), sep="\n")


def memory_table(result: Estimate) -> Table:
    table = plain_table(("",), (each.name for each in result.strategies))
    for label, name in MEMORY.items():
        sizes = [getattr(each.memory, name) for each in result.strategies]
        if any(sizes):
            table.add_row(label, *(f"{size / GIGABYTE:.3f}" for size in sizes))
    peaks = (f"{each.memory.peak / GIGABYTE:.3f}{'' if each.fits else ' (!)'}" for each in result.strategies)
    table.add_row("peak of a step", *peaks)
    table.add_row("step time, ms", *(f"{1e3 * each.step.seconds:,.1f}" for each in result.strategies))
    return table


def time_lines(result: Estimate) -> dict[str, str]:
    job, step = result.job, result.chosen.step
    return {
        "compute": (
            f"{step.flops / 1e15:,.2f} PFLOP per step, {1e3 * step.compute:,.1f} ms at {result.mfu:.1%} MFU of "
            f"{job.card.peak / 1e12:,.0f} TFLOP/s per GPU (MFU: {result.mfu_from})"
        ),
        "network": (
            f"{step.bytes_sent / 1e9:,.2f} GB per GPU and step, {1e3 * step.communication:,.1f} ms, of which "
            f"{1e3 * step.exposed:,.1f} ms are not overlapped; {step.hiding_bandwidth / 1e9:,.1f} GB/s per GPU would "
            "hide all of it"
        ),
        "step": f"{1e3 * step.seconds:,.1f} ms, {result.throughput:,.0f} samples/s; {plural(job.steps, 'step')}",
        "data": (
            f"{result.sample_bytes:,.0f} bytes per sample: {result.read_bandwidth / 1e9:,.2f} GB/s from the object "
            f"store, {result.read_bandwidth / result.nodes / 1e6:,.1f} MB/s per node ({plural(result.nodes, 'node')}); "
            f"{result.host_memory / 1e9:,.1f} GB of host memory per process for the sampler and the index"
        ),
    }


def failure_lines(result: Estimate) -> dict[str, str]:
    from allmlp.plan.failures import young

    failures, simulation = result.failures, result.simulation
    writing = f"{failures.checkpoint:,.1f} s to write"
    if failures.background:
        writing = f"{failures.checkpoint:,.2f} s to copy, {failures.background:,.1f} s to write in the background"
    return {
        "MTBF": (
            f"{failures.mtbf / 3600:,.1f} h on {result.job.gpus:,} GPUs; a restart takes {failures.restart / 60:g} min"
        ),
        "checkpoint": (
            f"{result.checkpoint_bytes / 1e9:,.2f} GB, {writing}; best interval {result.interval / 60:,.1f} min "
            f"(Daly; Young: {young(failures) / 60:,.1f}), save_every={result.save_every}"
        ),
        "goodput": (
            f"{result.goodput:.2%}; simulated {result.ideal_seconds / simulation.seconds:.2%} "
            f"+- {result.ideal_seconds * simulation.error / simulation.seconds**2:.2%} with "
            f"{simulation.failures:,.1f} failures per run"
        ),
    }
