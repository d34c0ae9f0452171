"""allmlp bench."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import app, billions, console, examples, millions
from allmlp.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from allmlp.bench.runner import BenchReport, Measurement

TIMM = {"eager": "timm eager", "compiled": "timm compiled", "graphs": "timm graphs"}
"""Column title -> the backend it compares with."""


@app.command(
    epilog=examples(
        "allmlp bench mixer_b16 resmlp_s24 gmlp_s16 vit_b16 --batch-size 256",
        "allmlp bench mixer_s16 --batch-size 1,8 --device cpu",
        "allmlp bench mixer_b16 timm:resnet50 --batch-size 1-1024",
        "allmlp bench mixer_b16 --train",
        "allmlp bench gmlp_s16 --scale tokens",
        "allmlp bench mixer_b16 --backends ours-fast,timm-compiled --seconds 3",
    )
)
def bench(
    models: Annotated[list[str], typer.Argument(help="Model names, including timm:NAME and hf:NAME.")],
    batch_size: Annotated[
        str,
        typer.Option(help="Batch sizes: 1,8,256, or 1-1024 for powers of two [default: 256 on a GPU, 1,8 on a CPU]."),
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda [default: cuda if available].")] = "",
    precision: Annotated[
        str, typer.Option(help="float32 or bfloat16 [default: bfloat16 on a GPU; training uses autocast].")
    ] = "",
    train: Annotated[bool, typer.Option("--train", help="Time training steps instead of inference.")] = False,
    scale: Annotated[str, typer.Option(help="Scale the models in tokens, width or depth.")] = "",
    img_size: Annotated[int | None, typer.Option(help="Image size [default: the model's own].", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Sequence length [default: the model's own].", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per measurement.", min=0.01)] = 1.0,
    backends: Annotated[
        str, typer.Option(help="Comma-separated {ours,timm,hf}-{eager,compiled,graphs,fast,fp8,onnx}.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for bench.csv, bench.json and the figures.")] = Path("runs/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare speed with timm and Hugging Face, with equal weights and in interleaved rounds.

    A backend whose output error exceeds twice eager's is rejected, and the exit code is 1.
    """
    import torch

    from allmlp.bench.outputs import as_dict, draw, write_numbers
    from allmlp.bench.runner import PRECISIONS, BenchOptions
    from allmlp.bench.runner import bench as run
    from allmlp.bench.scaling import FACTORS
    from allmlp.errors import lookup

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lookup(place, dict.fromkeys(("cpu", "cuda")), "device")
    kind = precision or ("bfloat16" if place == "cuda" else "float32")
    lookup(kind, PRECISIONS, "precision")
    if scale:
        lookup(scale, FACTORS, "scaling axis")
    batches = read_batches(batch_size or ("256" if place == "cuda" else "1,8"))
    named = tuple(part.strip() for part in backends.split(",") if part.strip())
    options = BenchOptions(tuple(models), batches, place, kind, train, scale or None, seconds, named, img_size, seq_len)  # type: ignore[arg-type]
    report = run(
        options,
        log=partial(print, file=sys.stderr, flush=True),
        keep=lambda report: write_numbers(report, out),
    )
    write_numbers(report, out)
    drawn = draw(report, out)
    if as_json:
        print(json.dumps(as_dict(report), default=str))
    else:
        print_report(report)
        print(f"results{' and figures' if drawn else ''} in {out}")
    if report.rejected:
        raise typer.Exit(1)


def read_batches(text: str) -> tuple[int, ...]:
    """1,8,256 as it is; 1-1024 as 1, 2, 4 .. 1024."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or int(first) < 1 or (dash and not last.isdigit()):
            raise UserError(f"--batch-size takes sizes such as 1,8,256 or 1-1024, not {text!r}")
        size = int(first)
        found.append(size)
        while dash and 2 * size <= int(last):
            size *= 2
            found.append(size)
    return tuple(dict.fromkeys(found))


def print_report(report: BenchReport) -> None:
    from rich.text import Text

    from allmlp.bench.outputs import exponents

    screen = console()
    against = {title: backend for title, backend in TIMM.items() if any(row.backend == backend for row in report.rows)}
    for model in dict.fromkeys(row.model for row in report.rows):
        rows = [row for row in report.rows if row.model == model]
        cost = f": {millions(rows[0].parameters)} parameters, {billions(rows[0].macs)} multiply-adds"
        screen.print(Text(f"{model}, {rows[0].task}{'' if report.options.scale else cost}", style="bold"))
        screen.print(table(rows, report.options.scale, against))
        for row in rows:
            if row.note:
                size = "" if row.size is None else f"{row.size} {report.options.scale}, "
                screen.print(Text(f"{size}batch {row.batch}, {row.backend}: {row.note}"))
        screen.print()
    if against:
        screen.print(Text("x: speedup over timm at the same batch size (latency at batch 1)"))
    peaks = sorted(row.peak_flop_per_s / 1e9 for row in report.rows if row.peak_flop_per_s)
    if peaks:
        rate = " to ".join(dict.fromkeys(short(value) for value in (peaks[0], peaks[-1])))
        screen.print(Text(f"peak matmul {rate} GFLOP/s, copy {short(report.copy_rate / 1e9)} GB/s, in the same run"))
    for one in exponents(report):
        words = f"{one['model']}, {one['backend']}, batch {one['batch']}: time scales as {report.options.scale}"
        screen.print(Text(f"{words}^{one['time']:.2f}, multiply-adds as ^{one['macs']:.2f}"))
    for what, why in report.skipped.items():
        screen.print(Text(f"skipped {what}: {why}"))


def table(rows: list[Measurement], scale: str | None, against: dict[str, str]) -> Table:
    from rich.table import Table

    memory = any(row.memory_bytes is not None for row in rows)
    view = Table(box=None, pad_edge=False, header_style="dim")
    for name in [*([scale, "MACs"] if scale else []), "batch"]:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("backend", no_wrap=True)
    numbers = ["latency ms", "+-", f"{rows[0].unit}/s", "+-", "MFU", *(["GiB"] if memory else [])]
    for name in [*numbers, *(f"x {title}" for title in against)]:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            *([str(row.size), billions(row.macs)] if scale else []),
            str(row.batch),
            row.backend,
            "-" if row.latency_s is None else short(1e3 * row.latency_s),
            percent(row.latency_spread),
            "-" if row.rate_per_s is None else short(row.rate_per_s),
            percent(row.rate_spread),
            percent(row.mfu),
            *([] if not memory else ["-" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f}"]),
            *(compared(row, rows, backend) for backend in against.values()),
        )
    return view


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def compared(row: Measurement, rows: list[Measurement], backend: str) -> str:
    """Speedup over `backend` in the same cell."""
    from allmlp.bench.timing import ratio

    other = next((one for one in rows if (one.backend, one.batch, one.size) == (backend, row.batch, row.size)), None)
    if other is None or not row.calls_s or not other.calls_s:
        return "-"
    return f"{ratio(row.latencies_s, other.latencies_s) if row.batch == 1 else ratio(row.calls_s, other.calls_s):.2f}"


def short(value: float) -> str:
    """Three digits or more: 2.34, 23.4, 234, 2,340."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
