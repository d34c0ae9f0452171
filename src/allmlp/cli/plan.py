"""allmlp plan."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allmlp.cli.app import app, console, examples
from allmlp.errors import UserError

if TYPE_CHECKING:
    from allmlp.plan.check import Compared
    from allmlp.plan.forecast import Forecast

GIGABYTE = 1e9


@app.command(
    epilog=examples(
        "allmlp plan mixer_h14 --samples 300e6 --epochs 14 --gpus 1024",
        "allmlp plan imagenet_mixer_b16 --gpus 64 --gpu a100",
        "allmlp plan gmlp_xlarge --samples 256e6 --gpus 128 --batch 2048 --share 0.3 --json",
        "allmlp plan resmlp_s24 --check --batch 8 --calibrate resmlp_s12",
    )
)
def plan(
    target: Annotated[str, typer.Argument(help="A model from `allmlp list`, or a recipe from `allmlp list recipes`.")],
    samples: Annotated[float | None, typer.Option(help="Examples in the training set: 300e6.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times they are all read.")] = None,
    gpus: Annotated[int, typer.Option(help="How many.")] = 8,
    gpu: Annotated[str, typer.Option(help="h200, h100 or a100.")] = "h200",
    batch: Annotated[
        int | None, typer.Option(help="Examples per step over all GPUs; the paper's if not given.")
    ] = None,
    passes: Annotated[int | None, typer.Option(help="Passes that a GPU computes its part of a batch in.")] = None,
    optim: Annotated[str | None, typer.Option(help="adamw, sgd, adagrad, lamb or muon.")] = None,
    sharding: Annotated[str | None, typer.Option(help="ddp or fsdp; the quicker that fits if not given.")] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option("--checkpointing/--no-checkpointing", help="Compute blocks again in the backward pass."),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compiled/--eager", help="With torch.compile, as recipes are; --check is eager if not told."),
    ] = None,
    share: Annotated[float | None, typer.Option(help="Of the GPU's published peak; the family's measured one.")] = None,
    network: Annotated[
        float | None, typer.Option(help="GB/s that a GPU can send; what its kind can if not given.")
    ] = None,
    store: Annotated[float, typer.Option(help="GB/s that a checkpoint is written with.")] = 2.0,
    sample_bytes: Annotated[float | None, typer.Option(help="Bytes of an example in the object store.")] = None,
    restart: Annotated[float, typer.Option(help="Minutes until a failed run goes on.")] = 10.0,
    simulations: Annotated[int, typer.Option(help="Runs to play through.", min=2, max=100_000)] = 500,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Run a few real steps here and compare.")] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="With --check: the model to measure the speed on first.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --check: cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """What a run past one machine takes: memory, step time, network, object store, hours, checkpoints, failures."""
    from allmlp.plan.forecast import forecast
    from allmlp.plan.jobs import job

    options: dict[str, Any] = {
        "gpus": gpus,
        "gpu": gpu,
        "batch": batch,
        "passes": passes,
        "optim": optim,
        "sharding": sharding,
        "checkpointing": checkpointing,
        "compiled": compiled,
        "share": share,
        "network": None if network is None else network * 1e9,
        "store": store * 1e9,
        "sample": sample_bytes,
        "restart": restart * 60,
    }
    if check:
        run_check(target, batch or 8, optim, bool(checkpointing), bool(compiled), share, calibrate, device, as_json)
        return
    if calibrate or device:
        raise UserError("--calibrate and --device belong to --check")
    found = forecast(job(target, samples, epochs, **options), simulations, seed)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_forecast(found)


def run_check(
    target: str,
    batch: int,
    optim: str | None,
    checkpointing: bool,
    compiled: bool,
    share: float | None,
    calibrate: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    import torch

    from allmlp.models.zoo import preset
    from allmlp.plan.check import check
    from allmlp.plan.hardware import card_here
    from allmlp.plan.jobs import job
    from allmlp.plan.time import cost

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device here: use --device cpu")
    here = job(target, samples=batch, epochs=1, gpus=1, batch=batch, optim=optim, share=share)
    other, flops, basis = None, None, "no speed to predict from: --calibrate MODEL measures one"
    if calibrate is not None:
        other, basis = preset(calibrate).spec, f"from the speed of {calibrate}, measured beside it"
    elif place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        flops, basis = card_here(name, here.family, here.reads, cost(here.model).macs, share)
    rows = check(here.model, batch, here.optim, place, 5, checkpointing, flops, other, compiled)
    if as_json:
        found = {row.what: row._asdict() | {"error": row.error} for row in rows}
        print(
            json.dumps({"model": target, "batch": batch, "device": str(place), "basis": basis, "rows": found}, indent=2)
        )
        return
    print(f"{target}, batch {batch}, one step on {place}; {basis}")
    print_compared(rows)


def print_compared(rows: list[Compared]) -> None:
    from rich.table import Table

    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("what")
    for title in ("predicted", "measured", "error"):
        view.add_column(title, justify="right")
    for row in rows:
        scale, unit = (1e6, "MB") if row.unit == "bytes" else (1.0, row.unit)
        shown = [f"{value / scale:,.3f} {unit}" if value is not None else "" for value in (row.predicted, row.measured)]
        view.add_row(row.what, *shown, "" if row.error is None else f"{row.error:+.1%}")
    console().print(view)


def print_forecast(found: Forecast) -> None:
    from rich.table import Table
    from rich.text import Text

    from allmlp.plan.failures import young
    from allmlp.plan.forecast import USABLE

    job, chosen, screen = found.job, found.chosen, console()

    def heading(text: str) -> None:
        screen.print(Text(f"\n{text}", style="bold"))

    screen.print(
        Text(job.name, style="bold"),
        f"on {job.gpus:,} {job.card.name}: {job.samples:,.0f} samples x {job.epochs:g} epochs, batch {job.batch:,} "
        f"({job.each:,} a GPU), {type(job.optim).__name__}, {job.precision}",
    )
    mode = "compiled" if job.compiled else "eager"
    usable = USABLE * job.card.memory / GIGABYTE
    heading(f"Memory of one GPU, {mode}, GB of {usable:.0f} that can be used; not all of it is there at once")
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("")
    for way in found.ways:
        view.add_column(way.name, justify="right")
    for label, name in ROWS.items():
        numbers = [getattr(way.memory, name) for way in found.ways]
        if any(numbers):
            view.add_row(label, *(f"{number / GIGABYTE:.3f}" for number in numbers))
    view.add_row("at most", *(f"{w.memory.most / GIGABYTE:.3f}{'' if w.fits else ' (too much)'}" for w in found.ways))
    view.add_row("one step, ms", *(f"{1e3 * way.step.seconds:,.1f}" for way in found.ways))
    screen.print(view)

    step, known, played = chosen.step, found.failures, found.simulated
    heading(f"Time, by {chosen.name}")
    say(
        "arithmetic",
        f"{step.flops / 1e15:,.2f} PFLOP a step, {1e3 * step.compute:,.1f} ms at {found.share:.1%} of "
        f"{job.card.peak / 1e12:,.0f} TFLOP/s a GPU (share: {found.shared_from})",
    )
    say(
        "network",
        f"{step.traffic / 1e9:,.2f} GB a GPU and step, {1e3 * step.network:,.1f} ms, of which "
        f"{1e3 * step.exposed:,.1f} ms have nothing to hide behind; {step.needed / 1e9:,.1f} GB/s a GPU hide all",
    )
    say("step", f"{1e3 * step.seconds:,.1f} ms, {found.rate:,.0f} samples/s; {job.steps:,} steps")
    say(
        "data",
        f"{found.sample:,.0f} bytes a sample: {found.stream / 1e9:,.2f} GB/s from the object store, "
        f"{found.stream / found.machines / 1e6:,.1f} MB/s for each of {found.machines:,} machines; "
        f"{found.host / 1e9:,.1f} GB of host memory a process for the order of the samples",
    )
    heading("Failures, at the rate of Llama 3")
    say("one in", f"{known.between / 3600:,.1f} h on {job.gpus:,} GPUs; a restart takes {known.restart / 60:g} min")
    say(
        "checkpoint",
        f"{found.checkpoint / 1e9:,.2f} GB, {known.checkpoint:,.1f} s to write; best every "
        f"{found.interval / 60:,.1f} min (Young {young(known) / 60:,.1f}), cadence.save={found.save}",
    )
    say(
        "goodput",
        f"{found.goodput:.2%}; simulated {found.work / played.seconds:.2%} "
        f"+- {found.work * played.error / played.seconds**2:.2%} with {played.failures:,.1f} failures a run",
    )
    heading("In all")
    say("hours", f"{found.expected / 3600:,.1f} ({found.work / 3600:,.1f} without failures)")
    say("GPU-days", f"{found.gpu_days:,.1f}")


def say(label: str, text: str) -> None:
    print(*wrap(text, 100, initial_indent=f"{label:<13}", subsequent_indent=" " * 13), sep="\n")


ROWS = {
    "weights": "weights",
    "their average": "average",
    "optimiser": "optimiser",
    "gradients": "gradients",
    "weights in bfloat16": "copies",
    "buckets, gathered blocks": "exchange",
    "activations": "activations",
}
