"""Run a benchmark: for every model and batch size, prepare all backends, check parity, then time them interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from allmlp.bench import backends as inference
from allmlp.bench import training
from allmlp.bench.backends import Backend, PreparedBackend, default_backends, parse_backend, select_backends
from allmlp.bench.clock import Clock, clock_of
from allmlp.bench.machine import Memory, copy_rate, peak_matmul
from allmlp.bench.parity import SAME_MODEL_ERROR, Parts, allowed, error
from allmlp.bench.peers import PeerGroup, peer_group
from allmlp.bench.scaling import ScalingAxis, scaled_models
from allmlp.bench.timing import WARM_UP, Failure, Timing, release, time_interleaved, try_call
from allmlp.bench.traffic import traffic
from allmlp.errors import UserError, lookup
from allmlp.models.cost import measure
from allmlp.models.model import ModelSpec
from allmlp.models.preset import preset
from allmlp.models.zoo import configure
from allmlp.provenance import environment

LogFunction = Callable[..., object]
"""Like print, with `end`."""
PEAK = "peak matmul"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BenchOptions:
    models: tuple[str, ...]
    batches: tuple[int, ...]
    device: str
    precision: str
    train: bool = False
    scale: ScalingAxis | None = None
    seconds: float = 1.0
    backends: tuple[str, ...] = ()
    img_size: int | None = None
    """Image size, where it differs from the models' own."""
    seq_len: int | None = None
    """Sequence length, likewise."""


class Measurement(NamedTuple):
    """One backend of one model at one batch size. Fields that were not measured are None, and `note` says why."""

    model: str
    size: int | None
    """The size that `--scale` varies."""
    task: str
    backend: str
    batch: int
    unit: str
    """What throughput counts: images or tokens."""
    latency_s: float | None = None
    """Median of single calls; its spread is the relative inter-quartile range."""
    latency_spread: float | None = None
    call_s: float | None = None
    """Median per call in a run of back-to-back calls; throughput is computed from it."""
    rate_per_s: float | None = None
    rate_spread: float | None = None
    flop_per_s: float | None = None
    """Matrix-product FLOPs per second."""
    mfu: float | None = None
    """Model FLOPs utilization: flop_per_s over the peak matmul timed in the same rounds."""
    peak_flop_per_s: float | None = None
    memory_bytes: int | None = None
    """Peak GPU memory."""
    error: float | None = None
    allowed: float | None = None
    macs: int = 0
    """Multiply-adds of one example's forward pass."""
    parameters: int = 0
    flop_per_byte: float = 0.0
    """Arithmetic intensity of the matrix products."""
    note: str = ""
    latencies_s: tuple[float, ...] = ()
    """Latency of each round."""
    calls_s: tuple[float, ...] = ()
    """Per-call time of each round."""


@dataclass(frozen=True)
class BenchReport:
    options: BenchOptions
    environment: dict[str, Any]
    copy_rate: float
    """Memory bandwidth of a copy, bytes read and written per second."""
    rows: list[Measurement]
    skipped: dict[str, str]
    """"model, package" -> why it has no backend."""

    @property
    def rejected(self) -> list[Measurement]:
        return [row for row in self.rows if row.note.startswith("rejected")]


# --- one model at one batch size -------------------------------------------------------------------------


class BackendResult(NamedTuple):
    timing: Timing | None = None
    memory: int | None = None
    error: float | None = None
    note: str = ""


def time_backends(
    backends: Sequence[Backend],
    reference: Parts,
    max_error: float,
    clock: Clock,
    seconds: float,
    device: torch.device,
    peak: Backend | None = None,
    log: LogFunction = lambda *text, **end: None,
) -> dict[str, BackendResult]:
    """Prepare every backend, reject those whose error exceeds `max_error`, and time the rest in interleaved rounds.

    `peak` is timed in the same rounds without a parity check.
    """
    found: dict[str, BackendResult] = {}
    ready: dict[str, PreparedBackend] = {}
    for backend in backends:
        log(f" {backend.name},", end="")
        outcome = try_call(lambda backend=backend: prepare_backend(backend, reference, max_error, device))
        if isinstance(outcome, Failure):
            found[backend.name] = BackendResult(note=outcome.note)
        else:
            entry, found[backend.name] = outcome
            if entry is not None:
                ready[backend.name] = entry
    if peak is not None and ready:
        ready[peak.name] = peak.build()
    log(" timing")
    for name, timing in time_interleaved({name: entry.call for name, entry in ready.items()}, clock, seconds).items():
        result = found.get(name, BackendResult())
        failed = isinstance(timing, Failure)
        found[name] = result._replace(note=timing.note) if failed else result._replace(timing=timing)
    return found


def prepare_backend(
    backend: Backend, reference: Parts, max_error: float, device: torch.device
) -> tuple[PreparedBackend | None, BackendResult]:
    """Build a backend, check its outputs and measure its memory; None if it is rejected."""
    memory = Memory(device)
    entry = backend.build()
    for _ in range(WARM_UP - 1):  # with CUDA graphs, the compared output comes from a replay
        entry.output()
    found, max_error = error(entry.output(), reference), max_error * backend.tolerance_scale
    if not found <= max_error:
        return None, BackendResult(error=found, note=f"rejected: output error {found:.1e}, {max_error:.1e} allowed")
    return entry, BackendResult(memory=memory.peak(entry.call), error=found)


# --- the whole run ---------------------------------------------------------------------------------------


def bench(
    options: BenchOptions,
    log: LogFunction = lambda *text, **end: None,
    keep: Callable[[BenchReport], object] = lambda report: None,
) -> BenchReport:
    """Run the benchmark. `keep` receives the partial report after every cell, so an interrupted run loses nothing."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device here: use --device cpu, or install a CUDA build of torch")
    for name in options.backends or ():  # fail before anything is measured
        _, mode = parse_backend(name)
        if options.train:
            lookup(mode, training.MODES, "training mode")
    specs = {
        name: configure(preset(name).spec, img_size=options.img_size, seq_len=options.seq_len)
        for name in options.models
    }
    cases = [case for name, spec in specs.items() for case in sizes(name, spec, options.scale)]
    clock = clock_of(device)
    with matrix_precision():
        report = BenchReport(options, environment(device), copy_rate(device, clock, options.seconds), [], {})
        for name, size, spec in cases:
            title = name if size is None else f"{name} with {size} {options.scale}"
            one = peer_group(name, spec, device)
            report.skipped.update({f"{name}, {package}": why for package, why in one.missing.items()})
            for batch in options.batches:
                log(f"{title}, batch {batch}:", end="")
                report.rows.extend(run_cell(one, size, batch, options, clock, log))
                release()
                keep(report)
            del one
            release()
    if not report.rows:
        raise UserError(f"none of {', '.join(options.backends)} supports {', '.join(options.models)}")
    return report


def sizes(name: str, spec: ModelSpec, axis: ScalingAxis | None) -> Iterator[tuple[str, int | None, ModelSpec]]:
    if axis is None:
        yield name, None, spec
    else:
        yield from ((name, scaled.size, scaled.spec) for scaled in scaled_models(spec, axis))


def run_cell(
    one: PeerGroup, size: int | None, batch: int, options: BenchOptions, clock: Clock, log: LogFunction
) -> list[Measurement]:
    """All measurements of one model at one batch size."""
    device, precision = torch.device(options.device), PRECISIONS[options.precision]
    usual = default_backends(one.models, device, batch, options.train, brief=options.scale is not None)
    names = select_backends(options.backends, one) if options.backends else usual
    unit, units = inference.unit(one.first.dummy_inputs())
    cost, task = measure(one.spec), "training" if options.train else "inference"
    moved = traffic(one.spec, batch) * precision.itemsize
    about = {"macs": cost.macs, "parameters": cost.parameters, "flop_per_byte": 2 * cost.macs * batch / moved}
    plain = Measurement(one.name, size, task, "", batch, unit, **about)

    inputs = training.examples(one, batch) if options.train else inference.random_inputs(one.first, batch)
    parity = try_call(lambda: check_parity(one, inputs, options))
    if isinstance(parity, Failure):
        log(f" {parity.note}")
        return [plain._replace(backend=name, note=parity.note) for name in names]
    build = training.training if options.train else inference.inference
    backends = [build(one, name, inputs, precision) for name in names if name.partition(" ")[0] in parity.same]
    call, operations = peak_matmul(device, precision)
    peak = Backend(PEAK, lambda: PreparedBackend(call, list))
    results = time_backends(backends, parity.reference, parity.allowed, clock, options.seconds, device, peak, log)
    timing = results.get(PEAK, BackendResult()).timing
    rate = operations / timing.call.median if timing else None
    flops = training.build_task(one.first, one).flops if options.train else 2 * cost.macs
    rows, tolerance_scale = [], {backend.name: backend.tolerance_scale for backend in backends}
    for name in names:
        result = results.get(name) or parity.other[name.partition(" ")[0]]
        weighed = {
            "memory_bytes": result.memory,
            "error": result.error,
            "allowed": parity.allowed * tolerance_scale.get(name, 1),
        }
        row = plain._replace(backend=name, note=result.note, **weighed)
        rows.append(with_timing(row, result.timing, units, flops, rate) if result.timing else row)
    torch.compiler.reset()  # otherwise the next batch size would be compiled as a dynamic shape
    return rows


class ParityCheck(NamedTuple):
    reference: Parts
    allowed: float
    same: list[str]
    """Packages with the same model."""
    other: dict[str, BackendResult]
    """Packages with another model, and why they are not timed."""


def check_parity(one: PeerGroup, inputs: tuple[torch.Tensor, ...], options: BenchOptions) -> ParityCheck:
    """Compare the packages in float64, and measure eager rounding error of those that agree in the timed precision."""
    precision = PRECISIONS[options.precision]
    exact, build = (training.exact, training.training) if options.train else (inference.exact, inference.inference)
    reference = exact(one, next(iter(one.models)), inputs)
    apart = {package: error(exact(one, package, inputs), reference) for package in list(one.models)[1:]}
    other = {
        package: BackendResult(error=found, note=f"rejected: not the same model, error {found:.1e} in float64")
        for package, found in apart.items()
        if not found <= SAME_MODEL_ERROR
    }
    same = [package for package in one.models if package not in other]
    eager = [error(build(one, f"{package} eager", inputs, precision).build().output(), reference) for package in same]
    return ParityCheck(reference, allowed(eager, precision), same, other)


def with_timing(row: Measurement, timing: Timing, units: int, flops: int, peak: float | None) -> Measurement:
    rate = row.batch / timing.call.median
    return row._replace(
        latency_s=timing.latency.median,
        latency_spread=timing.latency.relative_iqr,
        call_s=timing.call.median,
        rate_per_s=rate * units,
        rate_spread=timing.call.relative_iqr,
        flop_per_s=rate * flops,
        mfu=rate * flops / peak if peak else None,
        peak_flop_per_s=peak,
        latencies_s=timing.latencies,
        calls_s=timing.calls,
    )


@contextmanager
def matrix_precision() -> Iterator[None]:
    """float32 matmul precision as in `allmlp train`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
