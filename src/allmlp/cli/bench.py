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

    from allmlp.bench.contest import Report, Row

TIMM = {"eager": "timm eager", "compiled": "timm compiled", "graphs": "timm graphs"}
"""Column of ratios -> the side it compares with."""


@app.command(
    epilog=examples(
        "allmlp bench mixer_b16 resmlp_s24 gmlp_s16 vit_b16 --batch 256",
        "allmlp bench mixer_s16 --batch 1,8 --device cpu",
        "allmlp bench mixer_b16 timm:resnet50 --batch 1-1024",
        "allmlp bench mixer_b16 --train",
        "allmlp bench gmlp_s16 --grow tokens",
        "allmlp bench mixer_b16 --sides ours-fast,timm-compiled --seconds 3",
    )
)
def bench(
    models: Annotated[list[str], typer.Argument(help="Names from `allmlp list`; timm:NAME and hf:NAME compete too.")],
    batch: Annotated[
        str, typer.Option(help="Sizes: 1,8,256, or 1-1024 for powers of two; 256 on a GPU and 1,8 on a CPU.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; a GPU where there is one.")] = "",
    precision: Annotated[
        str, typer.Option(help="float32 or bfloat16; bfloat16 on a GPU, where training uses autocast.")
    ] = "",
    train: Annotated[bool, typer.Option("--train", help="The training step instead of inference.")] = False,
    grow: Annotated[str, typer.Option(help="Change the models: tokens, width or depth.")] = "",
    image: Annotated[int | None, typer.Option(help="Another size of the pictures.", min=1)] = None,
    length: Annotated[int | None, typer.Option(help="Another length of the texts.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="Time for each measurement.", min=0.01)] = 1.0,
    sides: Annotated[
        str, typer.Option(help="Only these: {ours,timm,hf}-{eager,compiled,graphs,fast,fp8,onnx}, with commas.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for bench.csv, bench.json and the figures.")] = Path("runs/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Speed against timm and Hugging Face: the same weights, the same answers or no number, all sides in turns.

    A side whose answers are further off than twice eager's own rounding is refused, and the command ends with 1.
    """
    import torch

    from allmlp.bench.contest import PRECISIONS, Options
    from allmlp.bench.contest import bench as run
    from allmlp.bench.grow import FACTORS
    from allmlp.bench.record import as_dict, draw, write_numbers
    from allmlp.errors import lookup

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lookup(place, dict.fromkeys(("cpu", "cuda")), "device")
    kind = precision or ("bfloat16" if place == "cuda" else "float32")
    lookup(kind, PRECISIONS, "precision")
    if grow:
        lookup(grow, FACTORS, "way to grow")
    batches = read_batches(batch or ("256" if place == "cuda" else "1,8"))
    named = tuple(part.strip() for part in sides.split(",") if part.strip())
    options = Options(tuple(models), batches, place, kind, train, grow or None, seconds, named, image, length)  # type: ignore[arg-type]
    report = run(
        options,
        say=partial(print, file=sys.stderr, flush=True),
        keep=lambda report: write_numbers(report, out),
    )
    write_numbers(report, out)
    drawn = draw(report, out)
    if as_json:
        print(json.dumps(as_dict(report), default=str))
    else:
        print_report(report)
        print(f"numbers{' and figures' if drawn else ''} in {out}")
    if report.disagree:
        raise typer.Exit(1)


def read_batches(text: str) -> tuple[int, ...]:
    """1,8,256 as it is; 1-1024 as 1, 2, 4 .. 1024."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or int(first) < 1 or (dash and not last.isdigit()):
            raise UserError(f"--batch takes sizes such as 1,8,256 or 1-1024, not {text!r}")
        size = int(first)
        found.append(size)
        while dash and 2 * size <= int(last):
            size *= 2
            found.append(size)
    return tuple(dict.fromkeys(found))


def print_report(report: Report) -> None:
    from rich.text import Text

    from allmlp.bench.record import exponents

    screen = console()
    against = {title: side for title, side in TIMM.items() if any(row.side == side for row in report.rows)}
    for model in dict.fromkeys(row.model for row in report.rows):
        rows = [row for row in report.rows if row.model == model]
        cost = f": {millions(rows[0].parameters)} parameters, {billions(rows[0].macs)} multiply-adds"
        screen.print(Text(f"{model}, {rows[0].task}{'' if report.options.grow else cost}", style="bold"))
        screen.print(table(rows, report.options.grow, against))
        for row in rows:
            if row.note:
                size = "" if row.size is None else f"{row.size} {report.options.grow}, "
                screen.print(Text(f"{size}batch {row.batch}, {row.side}: {row.note}"))
        screen.print()
    if against:
        screen.print(Text("x: times as fast as timm at the same batch size, by the latency at batch 1"))
    peaks = sorted(row.peak_flop_per_s / 1e9 for row in report.rows if row.peak_flop_per_s)
    if peaks:
        rate = " to ".join(dict.fromkeys(short(value) for value in (peaks[0], peaks[-1])))
        screen.print(
            Text(f"matrix products {rate} GFLOP/s, copy {short(report.copy_rate / 1e9)} GB/s, in the same run")
        )
    for one in exponents(report):
        words = f"{one['model']}, {one['side']}, batch {one['batch']}: time grows as {report.options.grow}"
        screen.print(Text(f"{words}^{one['time']:.2f}, multiply-adds as ^{one['macs']:.2f}"))
    for what, why in report.left_out.items():
        screen.print(Text(f"left out: {what}: {why}"))


def table(rows: list[Row], grow: str | None, against: dict[str, str]) -> Table:
    from rich.table import Table

    memory = any(row.memory_bytes is not None for row in rows)
    view = Table(box=None, pad_edge=False, header_style="dim")
    for name in [*([grow, "MACs"] if grow else []), "batch"]:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("side", no_wrap=True)
    numbers = ["ms alone", "+-", f"{rows[0].unit}/s", "+-", "of peak", *(["GiB"] if memory else [])]
    for name in [*numbers, *(f"x {title}" for title in against)]:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            *([str(row.size), billions(row.macs)] if grow else []),
            str(row.batch),
            row.side,
            "-" if row.latency_s is None else short(1e3 * row.latency_s),
            percent(row.latency_spread),
            "-" if row.rate_per_s is None else short(row.rate_per_s),
            percent(row.rate_spread),
            percent(row.share),
            *([] if not memory else ["-" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f}"]),
            *(compared(row, rows, side) for side in against.values()),
        )
    return view


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def compared(row: Row, rows: list[Row], side: str) -> str:
    """Against the row of `side` in the same cell."""
    from allmlp.bench.race import ratio

    other = next((one for one in rows if (one.side, one.batch, one.size) == (side, row.batch, row.size)), None)
    if other is None or not row.turns_s or not other.turns_s:
        return "-"
    return f"{ratio(row.alone_s, other.alone_s) if row.batch == 1 else ratio(row.turns_s, other.turns_s):.2f}"


def short(value: float) -> str:
    """Three digits or more: 2.34, 23.4, 234, 2,340."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
