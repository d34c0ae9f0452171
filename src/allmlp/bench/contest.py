"""The benchmark: models one after the other, batch by batch; all sides of a cell are ready before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from allmlp.bench import sides as inference
from allmlp.bench import step as training
from allmlp.bench.agree import SAME, Parts, allowed, error
from allmlp.bench.clock import Clock, clock_of
from allmlp.bench.grow import What, grow
from allmlp.bench.machine import Memory, copy_rate, environment, product
from allmlp.bench.peers import Subject, subject
from allmlp.bench.race import WARM_UP, Failure, Timing, attempt, race, release
from allmlp.bench.sides import Entry, Side, default_sides, side_of, wanted_sides
from allmlp.bench.traffic import traffic
from allmlp.errors import UserError, lookup
from allmlp.models.cost import measure
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import configure, resolve

Say = Callable[..., object]
"""As print, with `end`."""
PEAK = "matrix product"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...]
    batches: tuple[int, ...]
    device: str
    precision: str
    train: bool = False
    grow: What | None = None
    seconds: float = 1.0
    sides: tuple[str, ...] = ()
    image: int | None = None
    """Another size of the pictures than the models' own."""
    length: int | None = None
    """The same for texts."""


class Row(NamedTuple):
    """One side of one cell. What was not measured is None, and `note` says why."""

    model: str
    size: int | None
    """What --grow changed."""
    task: str
    side: str
    batch: int
    unit: str
    """What the rate counts: images or tokens."""
    latency_s: float | None = None
    """Of a call by itself, and the inter-quartile range as a part of that."""
    latency_spread: float | None = None
    call_s: float | None = None
    """Of a call in a row of calls; the rate comes from this."""
    rate_per_s: float | None = None
    rate_spread: float | None = None
    flop_per_s: float | None = None
    """Floating-point operations of the matrix products."""
    share: float | None = None
    """Of the matrix rate that was measured in the same rounds."""
    peak_flop_per_s: float | None = None
    memory_bytes: int | None = None
    """On the card, at most."""
    error: float | None = None
    allowed: float | None = None
    macs: int = 0
    """Of one example's forward pass."""
    parameters: int = 0
    flop_per_byte: float = 0.0
    """Operations per byte that the products touch."""
    note: str = ""
    alone_s: tuple[float, ...] = ()
    """Round by round, what the latency is the median of."""
    turns_s: tuple[float, ...] = ()
    """Round by round, what `call_s` is the median of."""


@dataclass(frozen=True)
class Report:
    options: Options
    environment: dict[str, Any]
    copy_rate: float
    """Bytes per second, read and written."""
    rows: list[Row]
    left_out: dict[str, str]
    """Model and package -> why it has no side."""

    @property
    def disagree(self) -> list[Row]:
        return [row for row in self.rows if row.note.startswith("refused")]


# --- one cell ----------------------------------------------------------------------------------------------


class Result(NamedTuple):
    timing: Timing | None = None
    memory: int | None = None
    error: float | None = None
    note: str = ""


def compete(
    sides: Sequence[Side],
    reference: Parts,
    most: float,
    clock: Clock,
    seconds: float,
    device: torch.device,
    beside: Side | None = None,
    say: Say = lambda *text, **end: None,
) -> dict[str, Result]:
    """Let every side answer, drop those whose error is more than `most` (and their `coarse`), time the rest in turns.

    `beside` is timed in the same rounds without being asked for an answer: the machine's peak.
    """
    found: dict[str, Result] = {}
    ready: dict[str, Entry] = {}
    for side in sides:
        say(f" {side.name},", end="")
        outcome = attempt(lambda side=side: enter(side, reference, most, device))
        if isinstance(outcome, Failure):
            found[side.name] = Result(note=outcome.note)
        else:
            entry, found[side.name] = outcome
            if entry is not None:
                ready[side.name] = entry
    if beside is not None and ready:
        ready[beside.name] = beside.build()
    say(" timing")
    for name, timing in race({name: entry.call for name, entry in ready.items()}, clock, seconds).items():
        result = found.get(name, Result())
        failed = isinstance(timing, Failure)
        found[name] = result._replace(note=timing.note) if failed else result._replace(timing=timing)
    return found


def enter(side: Side, reference: Parts, most: float, device: torch.device) -> tuple[Entry | None, Result]:
    """Build a side, compare its answer, weigh it; no entry where the answer is another one."""
    memory = Memory(device)
    entry = side.build()
    for _ in range(WARM_UP - 1):  # where there are graphs, the one that is compared is a replay
        entry.answer()
    found, most = error(entry.answer(), reference), most * side.coarse
    if not found <= most:
        return None, Result(error=found, note=f"refused: its answer is {found:.1e} off, {most:.1e} allowed")
    return entry, Result(memory=memory.peak(entry.call), error=found)


# --- the run -----------------------------------------------------------------------------------------------


def bench(
    options: Options, say: Say = lambda *text, **end: None, keep: Callable[[Report], object] = lambda report: None
) -> Report:
    """Run it all. `keep` is given the report so far after every cell: what is measured is not lost."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device here: use --device cpu, or install a CUDA build of torch")
    for name in options.sides or ():  # a mistake is told before anything is measured
        _, mode = side_of(name)
        if options.train:
            lookup(mode, training.MODES, "mode of training")
    specs = {name: configure(resolve(name), image=options.image, length=options.length) for name in options.models}
    cases = [case for name, spec in specs.items() for case in sizes(name, spec, options.grow)]
    clock = clock_of(device)
    with matrix_precision():
        report = Report(options, environment(device), copy_rate(device, clock, options.seconds), [], {})
        for name, size, spec in cases:
            title = name if size is None else f"{name} with {size} {options.grow}"
            one = subject(name, spec, device)
            report.left_out.update({f"{name}, {package}": why for package, why in one.missing.items()})
            for batch in options.batches:
                say(f"{title}, batch {batch}:", end="")
                report.rows.extend(cell(one, size, batch, options, clock, say))
                release()
                keep(report)
            del one
            release()
    if not report.rows:
        raise UserError(f"no side of {', '.join(options.sides)} has {', '.join(options.models)}")
    return report


def sizes(name: str, spec: ModelSpec, what: What | None) -> Iterator[tuple[str, int | None, ModelSpec]]:
    if what is None:
        yield name, None, spec
    else:
        yield from ((name, grown.size, grown.spec) for grown in grow(spec, what))


def cell(one: Subject, size: int | None, batch: int, options: Options, clock: Clock, say: Say) -> list[Row]:
    """One model at one batch size."""
    device, precision = torch.device(options.device), PRECISIONS[options.precision]
    usual = default_sides(one.models, device, batch, options.train, brief=options.grow is not None)
    names = wanted_sides(options.sides, one) if options.sides else usual
    unit, units = inference.unit(one.first.example())
    cost, task = measure(one.spec), "training" if options.train else "inference"
    moved = traffic(one.spec, batch) * precision.itemsize
    about = {"macs": cost.macs, "parameters": cost.parameters, "flop_per_byte": 2 * cost.macs * batch / moved}
    plain = Row(one.name, size, task, "", batch, unit, **about)

    inputs = training.examples(one, batch) if options.train else inference.example(one.first, batch)
    judged = attempt(lambda: judge(one, inputs, options))
    if isinstance(judged, Failure):
        say(f" {judged.note}")
        return [plain._replace(side=name, note=judged.note) for name in names]
    build = training.training if options.train else inference.inference
    sides = [build(one, name, inputs, precision) for name in names if name.partition(" ")[0] in judged.same]
    call, operations = product(device, precision)
    peak = Side(PEAK, lambda: Entry(call, list))
    results = compete(sides, judged.reference, judged.allowed, clock, options.seconds, device, peak, say)
    timing = results.get(PEAK, Result()).timing
    rate = operations / timing.turn.median if timing else None
    flops = training.build_task(one.first, one).flops if options.train else 2 * cost.macs
    rows, coarse = [], {side.name: side.coarse for side in sides}
    for name in names:
        result = results.get(name) or judged.other[name.partition(" ")[0]]
        weighed = {
            "memory_bytes": result.memory,
            "error": result.error,
            "allowed": judged.allowed * coarse.get(name, 1),
        }
        row = plain._replace(side=name, note=result.note, **weighed)
        rows.append(timed(row, result.timing, units, flops, rate) if result.timing else row)
    torch.compiler.reset()  # every shape is compiled for itself: as a further one it would become a dynamic one
    return rows


class Judged(NamedTuple):
    reference: Parts
    allowed: float
    same: list[str]
    """Packages that have the same model."""
    other: dict[str, Result]
    """Packages that have another one, and why nothing of them is timed."""


def judge(one: Subject, inputs: tuple[torch.Tensor, ...], options: Options) -> Judged:
    """Compare the packages in float64, and see how far those that agree are off in the precision that is timed."""
    precision = PRECISIONS[options.precision]
    exact, build = (training.exact, training.training) if options.train else (inference.exact, inference.inference)
    reference = exact(one, next(iter(one.models)), inputs)
    apart = {package: error(exact(one, package, inputs), reference) for package in list(one.models)[1:]}
    other = {
        package: Result(error=found, note=f"refused: another model, {found:.1e} off in float64")
        for package, found in apart.items()
        if not found <= SAME
    }
    same = [package for package in one.models if package not in other]
    eager = [error(build(one, f"{package} eager", inputs, precision).build().answer(), reference) for package in same]
    return Judged(reference, allowed(eager, precision), same, other)


def timed(row: Row, timing: Timing, units: int, flops: int, peak: float | None) -> Row:
    rate = row.batch / timing.turn.median
    return row._replace(
        latency_s=timing.latency.median,
        latency_spread=timing.latency.share,
        call_s=timing.turn.median,
        rate_per_s=rate * units,
        rate_spread=timing.turn.share,
        flop_per_s=rate * flops,
        share=rate * flops / peak if peak else None,
        peak_flop_per_s=peak,
        alone_s=timing.alone,
        turns_s=timing.turns,
    )


@contextmanager
def matrix_precision() -> Iterator[None]:
    """float32 products as `allmlp train` has them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
