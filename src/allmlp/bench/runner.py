"""Run a benchmark: for every model and batch size, prepare all backends, check parity, then time them interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from allmlp.bench import backends as inference
from allmlp.bench import training
from allmlp.bench.backends import Backend, PreparedBackend, default_backends, parse_backend, select_backends
from allmlp.bench.clock import Call, Clock, clock_of
from allmlp.bench.machine import PeakMemory, copy_rate, peak_matmul
from allmlp.bench.parity import SAME_MODEL_ERROR, Outputs, allowed, error
from allmlp.bench.peers import PACKAGES, PeerGroup, peer_group
from allmlp.bench.scaling import ScalingAxis, scaled_models
from allmlp.bench.timing import Failure, Quartiles, Timing, release, speedup, time_interleaved, try_call
from allmlp.bench.traffic import traffic
from allmlp.errors import UserError, lookup
from allmlp.files import expand_user
from allmlp.kernels.launch import device_guard
from allmlp.models.cost import measure
from allmlp.models.model import ModelSpec
from allmlp.models.preset import preset
from allmlp.models.zoo import configure, presets
from allmlp.provenance import environment
from allmlp.train_step import WARMUP_CALLS
from allmlp.weights.bundled import model_path
from allmlp.weights.convert import is_model_folder
from allmlp.weights.folder import read_spec

LogFunction = Callable[..., object]
"""Like print, with `end`."""
PEAK = "peak matmul"
Measure = Literal["rate", "latency", "device"]
MEASURES: tuple[Measure, ...] = ("rate", "latency", "device")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    against: tuple[str, ...] = ()
    """Models timed in the same rounds as each of `models`, for comparison."""
    img_size: int | None = None
    """Image size, where it differs from the models' own."""
    seq_len: int | None = None
    """Sequence length, likewise."""


class Ratio(NamedTuple):
    """Speedup of a backend over a peer: quartiles of the ratios of all rounds."""

    peer: str
    """"timm best", "ours fast", or with a model in front where it is another one: "vit_b16 timm best"."""
    model: str
    backend: str
    """Backend of the peer; the best of a package has the lowest median."""
    by: Measure
    """Calls in a row; one call alone; one call on the GPU without its launch."""
    median: float
    low: float
    high: float


class Measurement(NamedTuple):
    """One backend of one model at one batch size. Fields that were not measured are None, and `note` says why.

    Each of rate, latency and device time is the median over rounds, with its quartiles as `low` and `high`.
    """

    cell: str
    """The model whose rounds these are: that of the row, except for models of `--against`."""
    model: str
    size: int | None
    """The size that `--scale` varies."""
    task: str
    backend: str
    batch: int
    unit: str
    """Unit of throughput: images, tokens, or windows of a series."""
    rate_per_s: float | None = None
    """Throughput of back-to-back calls."""
    rate_low: float | None = None
    rate_high: float | None = None
    latency_ms: float | None = None
    """A single call on an idle device, from launch to result."""
    latency_ms_low: float | None = None
    latency_ms_high: float | None = None
    device_ms: float | None = None
    """A single call on the GPU, without its launch."""
    device_ms_low: float | None = None
    device_ms_high: float | None = None
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
    ratios: tuple[Ratio, ...] = ()
    calls_s: tuple[float, ...] = ()
    """Per-call time of each round, back to back."""
    latencies_s: tuple[float, ...] = ()
    """Latency of each round."""
    device_times_s: tuple[float, ...] = ()
    """Device time of each round."""

    @property
    def name(self) -> str:
        """Unique among the rows of a cell and batch size."""
        return self.backend if self.model == self.cell else f"{self.model} {self.backend}"

    @property
    def package(self) -> str:
        return self.backend.partition(" ")[0]

    def times(self, by: Measure) -> tuple[float, ...]:
        """Seconds of each round."""
        return {"rate": self.calls_s, "latency": self.latencies_s, "device": self.device_times_s}[by]

    def ratio(self, peer: str, by: Measure = "rate") -> Ratio | None:
        return next((one for one in self.ratios if (one.peer, one.by) == (peer, by)), None)


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
    """Fields of a `Measurement` that are known before it is timed."""

    memory_bytes: int | None = None
    error: float | None = None
    note: str = ""


class PreparedGroup(NamedTuple):
    """The backends of one model, built and checked."""

    rows: list[Measurement]
    """One per backend, without times."""
    ready: dict[str, PreparedBackend]
    """Backends to time."""
    units: int
    """Images, tokens or windows of an example."""
    flops: int
    """FLOPs of an example."""


def prepare_group(
    one: PeerGroup, cell: str, size: int | None, batch: int, options: BenchOptions, log: LogFunction
) -> PreparedGroup:
    """Build every backend of a model and reject those that do not agree with it."""
    if one.name != cell:
        log(f" {one.name}:", end="")
    device, precision = torch.device(options.device), PRECISIONS[options.precision]
    usual = default_backends(one.models, device, batch, options.train, brief=options.scale is not None)
    names = select_backends(options.backends, one) if options.backends else usual
    unit, units = inference.unit(one.first.dummy_inputs())
    cost, task = measure(one.spec), "training" if options.train else "inference"
    moved = traffic(one.spec, batch) * precision.itemsize
    about = {"macs": cost.macs, "parameters": cost.parameters, "flop_per_byte": 2 * cost.macs * batch / moved}
    plain = Measurement(cell, one.name, size, task, "", batch, unit, **about)
    flops = training.build_task(one.first, one).flops if options.train else 2 * cost.macs

    inputs = training.examples(one, batch) if options.train else inference.random_inputs(one.first, batch)
    parity = try_call(lambda: check_parity(one, inputs, options))
    if isinstance(parity, Failure):
        log(f" {parity.note}")
        return PreparedGroup([plain._replace(backend=name, note=parity.note) for name in names], {}, units, flops)
    build = training.training if options.train else inference.inference
    backends = [build(one, name, inputs, precision) for name in names if name.partition(" ")[0] in parity.same]
    ready, results = prepare_backends(backends, parity.reference, parity.allowed, device, log)
    tolerance_scale = {backend.name: backend.tolerance_scale for backend in backends}
    rows = []
    for name in names:
        result = results.get(name) or parity.other[name.partition(" ")[0]]
        allowed = parity.allowed * tolerance_scale.get(name, 1)
        rows.append(plain._replace(backend=name, allowed=allowed, **result._asdict()))
    return PreparedGroup(rows, ready, units, flops)


def prepare_backends(
    backends: Sequence[Backend],
    reference: Outputs,
    max_error: float,
    device: torch.device,
    log: LogFunction = lambda *text, **end: None,
) -> tuple[dict[str, PreparedBackend], dict[str, BackendResult]]:
    """Backends whose error is within `max_error`, and the measurements of all backends so far."""
    ready: dict[str, PreparedBackend] = {}
    results: dict[str, BackendResult] = {}
    for backend in backends:
        log(f" {backend.name},", end="")
        outcome = try_call(lambda backend=backend: prepare_backend(backend, reference, max_error, device))
        if isinstance(outcome, Failure):
            results[backend.name] = BackendResult(note=outcome.note)
        else:
            entry, results[backend.name] = outcome
            if entry is not None:
                ready[backend.name] = entry
    return ready, results


def prepare_backend(
    backend: Backend, reference: Outputs, max_error: float, device: torch.device
) -> tuple[PreparedBackend | None, BackendResult]:
    """Build a backend, check its outputs and measure its memory; None if it is rejected."""
    memory = PeakMemory(device)
    entry = backend.build()
    for _ in range(WARMUP_CALLS):  # with CUDA graphs, the compared output comes from a replay
        entry.output()
    output_error, max_error = error(entry.output(), reference), max_error * backend.tolerance_scale
    if not output_error <= max_error:
        note = f"rejected: output error {output_error:.1e}, {max_error:.1e} allowed"
        return None, BackendResult(error=output_error, note=note)
    return entry, BackendResult(memory.peak(entry.call), output_error)


# --- the whole run ---------------------------------------------------------------------------------------


def bench(
    options: BenchOptions,
    log: LogFunction = lambda *text, **end: None,
    keep: Callable[[BenchReport], object] = lambda report: None,
) -> BenchReport:
    """Run the benchmark. `keep` receives the partial report after every cell, so an interrupted run loses nothing."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no cuda device here: use --device cpu, or install a CUDA build of torch")
    requested = [parse_backend(name) for name in options.backends]  # fails before anything is measured
    if options.train:
        for _, mode in requested:
            lookup(mode, training.MODES, "training mode")
    packages = [package for package in PACKAGES if not requested or package in dict(requested)]
    names = labels([*options.models, *options.against])
    specs = {
        names[name]: configure(spec_of(name), img_size=options.img_size, seq_len=options.seq_len) for name in names
    }
    cases = [case for name in options.models for case in sizes(names[name], specs[names[name]], options.scale)]
    clock = clock_of(device)
    with fastest_settings(), device_guard(device):
        report = BenchReport(options, environment(device), copy_rate(device, clock, options.seconds), [], {})
        others = dict.fromkeys(names[name] for name in options.against)
        against = {name: peer_group(name, specs[name], device, packages) for name in others}
        for name, size, spec in cases:
            title = name if size is None else f"{name} with {size} {options.scale}"
            groups = [
                peer_group(name, spec, device, packages),
                *(group for other, group in against.items() if other != name),
            ]
            for one in groups:
                report.skipped.update({f"{one.name}, {package}": why for package, why in one.missing.items()})
            for batch in options.batches:
                log(f"{title}, batch {batch}:", end="")
                report.rows.extend(run_cell(groups, size, batch, options, clock, log))
                release()
                keep(report)
            del groups, one
            release()
    if not report.rows:
        raise UserError(f"none of {', '.join(options.backends)} supports {', '.join(options.models)}")
    return report


def spec_of(name: str) -> ModelSpec:
    """Spec of a preset or of a model folder; of another path, `read_spec` says what it is instead."""
    path = model_path(name)
    is_path = is_model_folder(path) or (path.exists() and name not in presets())
    return read_spec(path) if is_path else preset(name).spec


def labels(names: Sequence[str]) -> dict[str, str]:
    """Names in tables and figures; for a folder the last part of its path, or the whole path if two end alike."""
    folders = {name: is_model_folder(expand_user(name)) for name in names}
    short = {name: expand_user(name).resolve().name if folder else name for name, folder in folders.items()}
    return {name: name if list(short.values()).count(last) > 1 else last for name, last in short.items()}


def sizes(name: str, spec: ModelSpec, axis: ScalingAxis | None) -> Iterator[tuple[str, int | None, ModelSpec]]:
    if axis is None:
        yield name, None, spec
    else:
        yield from ((name, scaled.size, scaled.spec) for scaled in scaled_models(spec, axis))


def run_cell(
    groups: Sequence[PeerGroup], size: int | None, batch: int, options: BenchOptions, clock: Clock, log: LogFunction
) -> list[Measurement]:
    """All measurements of one model, and of those it is compared with, at one batch size."""
    prepared = [prepare_group(one, groups[0].name, size, batch, options, log) for one in groups]
    calls: dict[str, Call] = {
        row.name: group.ready[row.backend].call
        for group in prepared
        for row in group.rows
        if row.backend in group.ready
    }
    operations = 0
    if calls:
        calls[PEAK], operations = peak_matmul(torch.device(options.device), PRECISIONS[options.precision])
    log(" timing")
    timings = time_interleaved(calls, clock, options.seconds)
    peak = timings.get(PEAK)
    rate = operations / peak.call.median if isinstance(peak, Timing) else None
    rows = [with_timing(row, timings.get(row.name), group, rate) for group in prepared for row in group.rows]
    torch.compiler.reset()  # otherwise the next batch size would be compiled as a dynamic shape
    return [row._replace(ratios=tuple(ratios(row, rows))) for row in rows]


class ParityCheck(NamedTuple):
    reference: Outputs
    allowed: float
    same: list[str]
    """Packages with the same model."""
    other: dict[str, BackendResult]
    """Packages with another model, and why they are not timed."""


def check_parity(one: PeerGroup, inputs: tuple[torch.Tensor, ...], options: BenchOptions) -> ParityCheck:
    """Compare the packages in float64; for those that agree, measure eager's rounding error in the timed precision."""
    precision = PRECISIONS[options.precision]
    exact, build = (training.exact, training.training) if options.train else (inference.exact, inference.inference)
    reference = exact(one, next(iter(one.models)), inputs)
    apart = {package: error(exact(one, package, inputs), reference) for package in list(one.models)[1:]}
    other = {
        package: BackendResult(
            error=difference, note=f"rejected: not the same model, error {difference:.1e} in float64"
        )
        for package, difference in apart.items()
        if not difference <= SAME_MODEL_ERROR
    }
    same = [package for package in one.models if package not in other]
    eager = [error(build(one, f"{package} eager", inputs, precision).build().output(), reference) for package in same]
    return ParityCheck(reference, allowed(eager, precision), same, other)


def with_timing(
    row: Measurement, timing: Timing | Failure | None, group: PreparedGroup, peak: float | None
) -> Measurement:
    if timing is None:
        return row
    if isinstance(timing, Failure):
        return row._replace(note=timing.note)
    call, rate = timing.call, row.batch / timing.call.median
    return row._replace(
        rate_per_s=rate * group.units,
        rate_low=row.batch * group.units / call.high,
        rate_high=row.batch * group.units / call.low,
        flop_per_s=rate * group.flops,
        mfu=rate * group.flops / peak if peak else None,
        peak_flop_per_s=peak,
        calls_s=timing.calls,
        latencies_s=timing.latencies,
        device_times_s=timing.device_times,
        **milliseconds("latency_ms", timing.latency),
        **milliseconds("device_ms", timing.device_time),
    )


def milliseconds(field: str, quartiles: Quartiles | None) -> dict[str, Any]:
    """The fields of a `Measurement` for a median with its quartiles, in seconds."""
    if quartiles is None:
        return {}
    return {f"{field}{end}": 1e3 * time for end, time in zip(("", "_low", "_high"), quartiles)}


def ratios(row: Measurement, rows: Sequence[Measurement]) -> Iterator[Ratio]:
    """Speedups over the best backend of every other package and model in its rounds, and over "ours fast".

    By throughput, on a GPU at batch 1 also by latency and device time. FP8 is not a package's best: it rounds coarser.
    """
    groups: dict[str, list[Measurement]] = {}
    for other in rows:
        prefix = "" if other.model == row.model else f"{other.model} "
        if prefix or other.package != row.package:
            if other.backend != "ours fp8":
                groups.setdefault(f"{prefix}{other.package} best", []).append(other)
        elif other.backend == "ours fast" != row.backend:
            groups["ours fast"] = [other]
    for peer, others in groups.items():
        for by in MEASURES if row.batch == 1 and row.device_times_s else MEASURES[:1]:
            timed = [other for other in others if other.times(by)]
            if row.times(by) and timed:
                best = min(timed, key=lambda other: statistics.median(other.times(by)))
                yield Ratio(peer, best.model, best.backend, by, *speedup(row.times(by), best.times(by)))


@contextmanager
def fastest_settings() -> Iterator[None]:
    """Use the matmul precision of `allmlp train` and the fastest convolutions; raise if a model is not compiled.

    All models of a package share their code, and torch.compile gives up on code that it has compiled eight times.
    """
    from torch._dynamo import config

    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    try:
        with config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
