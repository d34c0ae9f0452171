"""allmlp bench."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allmlp.cli.app import app, billions, complete_model, console, examples, millions, next_command, print_json
from allmlp.errors import UserError, lookup, writing

if TYPE_CHECKING:
    from rich.table import Table

    from allmlp.bench.runner import BenchReport, Measurement


@app.command(
    epilog=examples(
        "allmlp bench mixer_b16 resmlp_s24 gmlp_s16 vit_b16 --batch-size 256",
        "allmlp bench mixer_s16 --batch-size 1,8 --device cpu",
        "allmlp bench mixer_b16 timm:resnet50 --batch-size 1-1024",
        "allmlp bench mixer_b16 --against vit_b16",
        "allmlp bench mixer_b16 --train",
        "allmlp bench gmlp_s16 --scale tokens",
        "allmlp bench mixer_b16 --backends ours-fast,timm-compiled --seconds 5",
    )
)
def bench(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Model names, including timm:NAME and hf:NAME, or model folders.", autocompletion=complete_model
        ),
    ],
    batch_size: Annotated[
        str,
        typer.Option(help="Batch sizes: 1,8,256, or 1-1024 for powers of two [default: 256 on a GPU, 1,8 on a CPU]."),
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1 [default: cuda if available].")] = "",
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16 [default: bfloat16 on a GPU; training uses autocast].")
    ] = "",
    train: Annotated[bool, typer.Option("--train", help="Time training steps instead of inference.")] = False,
    scale: Annotated[str, typer.Option(help="Scale the models in tokens, width or depth.")] = "",
    img_size: Annotated[int | None, typer.Option(help="Image size [default: the model's own].", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Sequence length [default: the model's own].", min=1)] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="A model that is timed in the same rounds and compared with each; may be repeated."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds per backend [default: 3 on a GPU, 1 on a CPU].", min=0.01)
    ] = None,
    backends: Annotated[
        str,
        typer.Option(
            help="Comma-separated {ours,timm,hf}-MODE, with MODE eager, compiled, channels-last, reduce-overhead, "
            "cuda-graph, max-autotune, fast, fp8 or onnx."
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder for bench.csv, bench.json and the figures, or one FILE.csv or FILE.json.")
    ] = Path("runs/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare speed with timm and Hugging Face, with equal weights and in interleaved rounds.

    A backend whose output error exceeds twice eager's is rejected. The exit code is 1 if one was, or if none ran.
    """
    import torch

    from allmlp.bench.outputs import as_dict, draw, is_file, write_numbers
    from allmlp.bench.runner import PRECISIONS, BenchOptions
    from allmlp.bench.runner import bench as run
    from allmlp.bench.scaling import FACTORS
    from allmlp.device import default_dtype, own_device, warn_of_slow_format
    from allmlp.files import make_writable

    own = own_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if own.type not in ("cpu", "cuda"):
        raise UserError(f"bench times CPUs and CUDA GPUs, not {own.type}: use --device cpu")
    place = own.type
    kind = precision or str(default_dtype(own)).removeprefix("torch.")
    lookup(kind, PRECISIONS, "precision")
    warn_of_slow_format(own, getattr(torch, kind))
    if scale:
        lookup(scale, FACTORS, "scaling axis")
    batches = read_batches(batch_size or ("256" if place == "cuda" else "1,8"))
    named = tuple(part.strip() for part in backends.split(",") if part.strip())
    options = BenchOptions(
        tuple(models),
        batches,
        str(own),
        kind,
        train,
        scale or None,  # type: ignore[arg-type]
        seconds or (3.0 if place == "cuda" else 1.0),
        named,
        tuple(against or ()),
        img_size,
        seq_len,
    )
    with writing(f"to {out}"):
        make_writable(out.parent if is_file(out) else out)
    report = run(
        options, log=partial(print, file=sys.stderr, flush=True), keep=lambda report: write_numbers(report, out)
    )
    write_numbers(report, out)
    drawn = [] if is_file(out) else draw(report, out)
    if as_json:
        print_json(as_dict(report))
    else:
        print_report(report)
        print(f"results{' and figures' if drawn else ''} in {out}")
        next_command("show", models[0])
    if report.rejected or all(row.note for row in report.rows):
        raise typer.Exit(1)


def read_batches(text: str) -> tuple[int, ...]:
    """1,8,256 as it is; 1-1024 as 1, 2, 4 .. 1024."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or int(first) < 1 or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise UserError(f"--batch-size takes sizes such as 1,8,256 or 1-1024, not {text!r}")
        size = int(first)
        sizes.append(size)
        while dash and 2 * size <= int(last):
            size *= 2
            sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def print_report(report: BenchReport) -> None:
    from rich.text import Text

    from allmlp.bench.outputs import exponents

    screen = console()
    for cell in dict.fromkeys(row.cell for row in report.rows):
        rows = [row for row in report.rows if row.cell == cell]
        cost = f": {millions(rows[0].parameters)} parameters, {billions(rows[0].macs)} multiply-adds"
        screen.print(Text(f"{cell}, {rows[0].task}{'' if report.options.scale else cost}", style="bold"))
        screen.print(table(rows, report.options.scale))
        for row in rows:
            size = "" if row.size is None else f"{row.size} {report.options.scale}, "
            for words in ([row.note] if row.note else []) + comparisons(row):
                screen.print(Text(f"{size}batch {row.batch}, {row.name}: {words}"))
        screen.print()
    if any(row.ratio("timm best") for row in report.rows):
        by = "; at batch 1 by device time" if any(row.ratio("timm best", "device") for row in report.rows) else ""
        screen.print(Text(f"x timm: speedup over the best of timm, with quartiles over rounds{by}"))
    peaks = sorted(row.peak_flop_per_s / 1e9 for row in report.rows if row.peak_flop_per_s)
    if peaks:
        rate = " to ".join(dict.fromkeys(short(value) for value in (peaks[0], peaks[-1])))
        screen.print(Text(f"peak matmul {rate} GFLOP/s, copy {short(report.copy_rate / 1e9)} GB/s, in the same run"))
    for one in exponents(report):
        words = f"{one['model']}, {one['backend']}, batch {one['batch']}: time scales as {report.options.scale}"
        screen.print(Text(f"{words}^{one['time']:.2f}, multiply-adds as ^{one['macs']:.2f}"))
    for what, why in report.skipped.items():
        screen.print(Text(f"skipped {what}: {why}"))


def table(rows: list[Measurement], scale: str | None) -> Table:
    from rich.table import Table

    timm = any(row.ratio("timm best") for row in rows)
    view = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for name in [*([scale, "MACs"] if scale else []), "batch"]:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("backend", no_wrap=True)
    columns = {
        "latency ms": lambda row: "-" if row.latency_ms is None else short(row.latency_ms),
        "device ms": lambda row: "-" if row.device_ms is None else short(row.device_ms),
        f"{rows[0].unit}/s": lambda row: "-" if row.rate_per_s is None else short(row.rate_per_s),
        "+-": lambda row: "-" if row.rate_per_s is None else f"{(row.rate_high - row.rate_low) / row.rate_per_s:.0%}",
        "MFU": lambda row: "-" if row.mfu is None else f"{row.mfu:.0%}",
        "GiB": lambda row: "-" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f}",
        "x timm": lambda row: over_timm(row, rows),
    }
    if not any(row.memory_bytes for row in rows):  # on a CPU
        del columns["device ms"], columns["GiB"]
    if not timm:
        del columns["x timm"]
    for name in columns:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        start = [str(row.size), billions(row.macs)] if scale else []
        view.add_row(*start, str(row.batch), row.name, *(value(row) for value in columns.values()))
    return view


def over_timm(row: Measurement, rows: list[Measurement]) -> str:
    """The speedup with its quartiles; "best" for the backend of timm that the others are compared with."""
    from allmlp.bench.outputs import headline

    if row.package == "timm":
        ratios = [headline(one) for one in rows if (one.model, one.batch, one.size) == (row.model, row.batch, row.size)]
        return "best" if any(one and one.backend == row.backend for one in ratios) else ""
    ratio = headline(row)
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def comparisons(row: Measurement) -> list[str]:
    """Comparisons of our fastest backend besides that with timm's best: latency, fp8, models of --against."""
    from allmlp.bench.outputs import headline

    if row.model != row.cell or row.backend not in ("ours fast", "ours fp8", "ours cuda-graph"):
        return []
    texts = []
    for ratio in row.ratios:
        if ratio != headline(row):
            peer = ratio.backend if ratio.model == row.model else f"{ratio.model} {ratio.backend}"
            by = "" if ratio.by == "rate" else f" by {'latency' if ratio.by == 'latency' else 'device time'}"
            texts.append(f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) times as fast as {peer}{by}")
    return texts


def short(value: float) -> str:
    """Three digits or more: 2.34, 23.4, 234, 2,340."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
