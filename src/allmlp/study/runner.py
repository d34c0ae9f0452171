"""Runs the remaining trials of a study, each in its own process, in portions of some minutes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import IO

from allmlp.best import MINIMIZED
from allmlp.checkpoint import FOLDER as CHECKPOINTS
from allmlp.errors import UserError
from allmlp.log import METRICS, format_duration, format_value
from allmlp.record import read_record
from allmlp.spec import to_dict
from allmlp.study import records
from allmlp.study.definition import PARENT, Key, Overrides, Study, Trial, parent
from allmlp.study.mps import multi_process_service
from allmlp.study.process import lifeline, terminations
from allmlp.study.records import Record
from allmlp.study.running import Process

RUNNING = ".running"
"""Folder of the runs in progress, removed at the end. Not "runs", where `allmlp train` puts those of the user."""
START_UP = 60.0
"""Seconds from the start of a process to the first step, assumed before any was measured."""
GRACE = 30.0
"""Seconds that a run may exceed the end of a portion before it is stopped."""
LAST = 5
"""Number of latest start-up times considered."""
MEASURING = 60.0
"""Seconds for measuring an inference rate."""
ALLMLP = (sys.executable, "-m", "allmlp.study.process")
BENCH = ("--backends", "ours-compiled,ours-fast")
"""Options of `allmlp bench`; the faster backend counts as a model's inference rate."""
LAST_LINES = 20
"""Lines of output kept for a failed run."""


@dataclass
class Progress:
    """State of a study: its records, remaining trials, and the candidate chosen for each row."""

    study: Study
    records: list[Record]
    chosen: dict[str, str] = field(default_factory=dict)
    """Row -> candidate, for rows whose tuning is complete."""
    done: dict[Key, Record] = field(default_factory=dict)
    ready: list[Trial] = field(default_factory=list)
    """Trials that can run now, in the order of the rows."""
    later: list[Trial] = field(default_factory=list)
    """Trials that wait for tuning, or for the model of another row; with the first candidate if none is chosen yet."""
    stale: list[str] = field(default_factory=list)
    hopeless: dict[str, str] = field(default_factory=dict)
    """Rows that cannot be finished, and why."""

    def value(self, record: Record) -> float:
        """The metric of a record."""
        values, metric = scores(record), metric_name(self.study, record)
        if metric not in values:
            raise UserError(f"row {record['row']} has no metric {metric!r}, but {', '.join(values)}")
        return float(values[metric])

    def metric(self, row: str) -> str:
        finished = [record for record in self.done.values() if record["row"] == row and "result" in record]
        return next((metric_name(self.study, record) for record in finished), self.study.metric_of(row))


def scores(record: Record) -> dict[str, float]:
    """The metrics of a run: on the held-out examples for a tuning run, on test for a final one."""
    return record["result"]["validation" if record["purpose"] == "tune" else "test"]


def metric_name(study: Study, record: Record) -> str:
    """The decisive metric: the first one of the evaluation, unless the study names another."""
    return study.metric_of(record["row"]) or next(iter(scores(record)))


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a value is better than another; NaN is the worst."""
    if math.isnan(than):
        return not math.isnan(value)
    return value < than if metric.endswith(MINIMIZED) else value > than


def progress_of(study: Study, recorded: list[Record], models: Path | None = None) -> Progress:
    """Compare the records with the study. A recorded run whose model is needed but not in `models` must run again."""
    progress = Progress(study, recorded)
    for row in study.rows:
        tuning = list(study.tuning_trials(row))
        look_up(progress, tuning)
        left = [trial for trial in tuning if trial.key not in progress.done]
        progress.ready += left
        like = study.rows[row].like
        best = progress.chosen.get(like) if like else None if left else choose(progress, row, tuning)
        if best is None and (like in progress.hopeless if like else not left):
            progress.hopeless[row] = f"it needs the setting of {like}" if like else "all candidates have failed"
            continue
        finals = list(study.final_trials(row, next(iter(study.candidates(row))) if best is None else best))
        if best is None:
            progress.later += finals
            continue
        progress.chosen[row] = best
        look_up(progress, finals)
        progress.ready += [trial for trial in finals if trial.key not in progress.done]
    wait_for_parents(progress, models)
    return progress


def look_up(progress: Progress, trials: list[Trial]) -> None:
    done, stale = records.match(progress.records, trials)
    progress.done |= done
    progress.stale += stale


def choose(progress: Progress, row: str, tuning: list[Trial]) -> str | None:
    """The candidate with the best mean over its seeds; candidates with a failed run are excluded."""
    if not tuning:
        return next(iter(progress.study.candidates(row)))
    by_candidate: dict[str, list[Record]] = {}
    for trial in tuning:
        by_candidate.setdefault(trial.candidate, []).append(progress.done[trial.key])
    means = {
        candidate: mean(map(progress.value, runs))
        for candidate, runs in by_candidate.items()
        if all("result" in record for record in runs)
    }
    best: str | None = None
    for candidate, value in means.items():
        if best is None or is_better(progress.metric(row), value, means[best]):
            best = candidate
    return best


def wait_for_parents(progress: Progress, models: Path | None) -> None:
    """Move runs that need the model of another row behind that row, which runs again if its model is missing."""
    queue, again, waiting = {trial.key: trial for trial in progress.ready}, list[Trial](), list[Trial]()
    for trial in (pending := list(queue.values())):  # grows: a missing model may itself need another
        missing = [(row, seed) for row, seed in trial.parents if model_folder(models, row, seed) is None]
        waiting += [trial] if missing else []
        for row, seed in missing:
            if row not in progress.chosen:
                continue
            needed = progress.study.trial(row, progress.chosen[row], seed, "final", {}, 0)
            if "failed" in progress.done.get(needed.key, {}):
                progress.hopeless[trial.row] = f"{needed.label} has failed"
            elif needed.key not in queue:
                queue[needed.key] = needed
                pending.append(needed)
                again.append(needed)
    for _ in progress.study.rows:  # as far as rows start from each other
        for trial in waiting:
            lost = [row for row, _ in trial.parents if row in progress.hopeless]
            if lost:
                progress.hopeless.setdefault(trial.row, f"it needs the model of {lost[0]}")
    first = [trial for trial in again if trial not in waiting]
    progress.ready = first + [trial for trial in progress.ready if trial not in waiting]
    progress.later += [trial for trial in waiting if trial.row not in progress.hopeless]


def model_folder(models: Path | None, row: str, seed: int) -> Path | None:
    folder = (models or Path()) / f"{row}-{seed}"
    return folder if models is not None and folder.is_dir() else None


# --- how long -----------------------------------------------------------------------------------------------


def expected_seconds(trial: Trial, recorded: list[Record]) -> float | None:
    """Duration of a run with its start-up: from its budget, or from recorded runs; None if unknown.

    Based on the last run of the row, else the slowest of its recipe, else the slowest of all. The longest of the latest
    start-ups is ignored if there are others: it may have tokenized a corpus or filled a cache.
    """
    finished = [record for record in recorded if "result" in record]
    start_ups = sorted(record["wall"] - record["result"]["seconds"] for record in finished[-LAST:])
    start_up, budget = (start_ups[:-1] or start_ups or [START_UP])[-1], trial.run.budget
    rates = [(record, rate) for record in finished if (rate := seconds_per_unit(record, trial))]
    of_row = [rate for record, rate in rates if record["row"] == trial.row][-1:]
    alike = [rate for record, rate in rates if record.get("recipe") == trial.recipe]
    per_unit = max(of_row or alike or [rate for _, rate in rates], default=None)
    amount = budget.epochs if budget.epochs is not None else budget.steps
    limits = [] if budget.minutes is None else [60 * budget.minutes]
    limits += [] if amount is None or per_unit is None else [amount * per_unit]
    return start_up + min(limits) if limits else None


def seconds_per_unit(record: Record, trial: Trial) -> float | None:
    """Seconds per epoch or step, whichever limits `trial`."""
    budget, result = trial.run.budget, record["result"]
    amount = result["epochs"] if budget.epochs is not None else result["steps"]
    return result["seconds"] / amount if amount else None


def portions(durations: list[float], portion: float, jobs: int) -> int:
    """Number of portions for these runs, each started where it fits, the longest first."""
    left, count = sorted(durations, reverse=True), 0
    while left:
        count += 1
        free = [portion] * jobs
        for duration in list(left):
            slot = max(range(jobs), key=free.__getitem__)
            if duration <= free[slot] or free[slot] == portion:
                free[slot] -= duration
                left.remove(duration)
    return count


# --- processes ----------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Runs the trials of a study for one portion; `say` prints a line."""

    study: Study
    out: Path
    locations: Overrides
    """Overrides for the location of data on this machine; not part of the records."""
    device: str | None = None
    jobs: int = 1
    minutes: float | None = None
    retry_failed: bool = False
    rows: tuple[str, ...] = ()
    """Patterns of the rows to run, together with the rows that these start from or are tuned like; all if empty."""
    keep_models: bool = False
    """Keep the model of every final run."""
    say: Callable[[str], None] = print
    show: Callable[[str], None] | None = None
    """Shows the last line of a run while it runs."""

    def __post_init__(self) -> None:
        self.began, self.earlier = time.monotonic(), len(records.read(self.out / records.FILE))
        self.unstarted: dict[str, str] = {}
        self.ended = 0
        self.active: list[Process] = []
        self.stdin = subprocess.DEVNULL
        """Standard input of the processes, which end when it closes."""
        self.open = ExitStack()
        self.shared: dict[str, str] | None = None
        """Variables of processes that share a GPU, from the first start on."""
        self.wanted = self.study.with_needed(self.rows) if self.rows else {*self.study.rows}
        if self.jobs > 1:
            self.study.check_jobs()

    def progress(self) -> Progress:
        all_records = records.read(self.out / records.FILE)
        if self.retry_failed:
            numbered = enumerate(all_records)
            all_records = [one for number, one in numbered if "failed" not in one or number >= self.earlier]
        return progress_of(self.study, all_records, self.out / "models")

    def jobs_for(self, trial: Trial) -> int:
        """Number of runs at the same time while this one runs."""
        return 1 if self.study.is_timed(trial.purpose) else self.jobs

    def left(self) -> float:
        """Seconds left in the portion."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.began)

    def run(self) -> Progress:
        """Start trials until none fits into the portion. Interrupted runs leave no record."""
        with terminations(), lifeline() as self.stdin, self.open:
            try:
                while True:
                    progress = self.progress()
                    self.start_what_fits(progress)
                    if not self.active:
                        break
                    self.wait()
            finally:
                for active in self.active:
                    self.stop(active)
                    active.clear()
                if self.minutes != 0:  # viewing the tables takes no lock: the runs may belong to another process
                    shutil.rmtree(self.out / RUNNING, ignore_errors=True)
        if self.unstarted and not self.ended:
            raise UserError("; ".join(f"{row}: {reason}" for row, reason in self.unstarted.items()))
        return progress

    def start_what_fits(self, progress: Progress) -> None:
        """Start trials in the order of the rows, those that compare seconds last and alone; in a portion the longest
        first, so that short ones fill the rest.
        """
        busy = {active.trial.key for active in self.active}
        free = [one for one in progress.ready if one.key not in busy and one.row in self.wanted - self.unstarted.keys()]
        expected = {trial.key: self.expected_seconds(trial, progress) for trial in free}
        if self.minutes is not None:
            free.sort(key=lambda trial: -(expected[trial.key] or math.inf))
        for trial in sorted(free, key=self.jobs_for, reverse=True):
            if len(self.active) >= min(map(self.jobs_for, [trial, *(active.trial for active in self.active)])):
                return
            duration = expected[trial.key]
            # A run of unknown duration is started if half a portion is left.
            fits = self.left() >= (30 * (self.minutes or 0) if duration is None else duration)
            if fits and self.left() > 0:
                about = "" if duration is None else f", about {format_duration(duration)}"
                self.say(f"{self.count(progress)} {trial.label}: started{about}")
                self.active.append(self.start(trial))

    def expected_seconds(self, trial: Trial, progress: Progress) -> float | None:
        duration = expected_seconds(trial, progress.records)
        return duration if duration is None else duration + MEASURING * self.is_measured(trial)

    def is_measured(self, trial: Trial) -> bool:
        """Whether the inference rate will be measured after this run, because it is not known yet."""
        if not self.study.inference_batch or trial.purpose != "final":
            return False
        model = records.measured_model({"row": trial.row, "run": to_dict(trial.run)})
        all_records = records.read(self.out / records.FILE)
        return not any("inference" in one and records.measured_model(one) == model for one in all_records)

    def count(self, progress: Progress) -> str:
        """The number of the run that starts next, and of all runs."""
        done, left = len(progress.done), len(progress.ready) + len(progress.later)
        return f"[{done + len(self.active) + 1}/{done + left}]"

    def start(self, trial: Trial) -> Process:
        folder = self.out / RUNNING / re.sub(r"[^\w.=-]", "_", "-".join(map(str, trial.key)))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        environment = dict(os.environ)
        if (jobs := self.jobs_for(trial)) > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
            if self.shared is None:
                on_cpu = self.device == "cpu"
                self.shared = {} if on_cpu else self.open.enter_context(multi_process_service(self.say))
            environment |= self.shared
        log = folder.with_name(f"{folder.name}.log")
        with open(log, "wb") as target:
            process = self.launch(self.command(trial, folder), target, environment)
        return Process(trial, folder / trial.recipe.partition("/")[2], log, process, time.monotonic())

    def launch(self, command: list[str], log: IO[bytes], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=self.stdin, stdout=log, stderr=subprocess.STDOUT, env=env)

    def command(self, trial: Trial, folder: Path) -> list[str]:
        overrides = {**trial.overrides, **self.locations}
        for name, value in trial.overrides.items():
            if value.startswith(PARENT):
                overrides[name] = str(model_folder(self.out / "models", *parent(value, trial.seed)))
        sets = [word for item in overrides.items() for word in ("--set", "=".join(item))]
        return [*ALLMLP, "train", trial.recipe, "--out", str(folder), *self.on_device, *sets]

    def bench_command(self, folder: Path, batch: int) -> list[str]:
        sizes = ("--batch-size", str(batch))
        return [*ALLMLP, "bench", str(folder), *sizes, *self.on_device, *BENCH, "--out", str(folder / "bench")]

    @property
    def on_device(self) -> list[str]:
        return ["--device", self.device] if self.device else []

    def wait(self) -> None:
        """Wait until a run or the portion ends."""
        while True:
            for active in list(self.active):
                if active.process.poll() is not None:
                    self.active.remove(active)
                    self.finish(active)
                    return
                if self.left() < -GRACE:
                    self.active.remove(active)
                    self.give_up(active)
                    return
            if self.show is not None:
                self.show(self.active[0].last_line)
            with suppress(subprocess.TimeoutExpired):  # of several runs, the others are looked at ten times a second
                self.active[0].process.wait(0.1)

    def finish(self, active: Process) -> None:
        """Record a run that has ended."""
        trial, code = active.trial, active.process.returncode
        self.ended += 1
        run_record = read_record(active.folder) if (active.folder / "run.json").exists() else {}
        if code == 0 and "result" in run_record:
            record = self.record(active, run_record)
            try:
                record |= self.measure_inference(active) if self.is_measured(trial) else {}
            finally:  # an interruption while measuring inference loses only that
                self.complete(active, record)
        elif (active.folder / METRICS).exists() and code != 130:
            reason = active.last_line.removeprefix("error: ") or f"ended with code {code}"
            self.fail(active, run_record, f"ended by signal {-code}" if code < 0 else reason)
        else:
            # Nothing was trained: the setup is at fault, not this configuration.
            self.ended -= 1
            self.unstarted[trial.row] = active.last_line.removeprefix("error: ") or f"ended with code {code}"
            self.say(f"{trial.label}: did not start: {self.unstarted[trial.row]}")
        active.clear()

    def complete(self, active: Process, record: Record) -> None:
        trial, name = active.trial, metric_name(self.study, record)
        text = format_value(name, scores(record).get(name, math.nan))
        trained = format_duration(record["result"]["seconds"])
        self.say(f"{trial.label}: {name} {text}, {trained} of training, {active.seconds:.0f} s in all")
        self.keep(active)
        if trial.key not in self.progress().done:
            records.append(self.out / records.FILE, record)

    def measure_inference(self, active: Process) -> Record:
        """Inference rate of a finished run's model, measured once per model, now that the device is free."""
        trial, batch = active.trial, self.study.inference_batch or 1
        with open(active.log, "ab") as log:
            bench = self.launch(self.bench_command(active.folder, batch), log)
            try:
                bench.wait()
            except KeyboardInterrupt:  # sent to the study alone, if it is terminated
                bench.kill()
                bench.wait()
                raise
        try:
            report = json.loads((active.folder / "bench" / "bench.json").read_text(encoding="utf8"))
            best = max((row for row in report["rows"] if row["rate_per_s"]), key=lambda row: row["rate_per_s"])
        except (OSError, ValueError, KeyError):
            self.say(f"{trial.label}: inference was not measured: {active.last_line}")
            return {}
        self.say(f"{trial.label}: inference {best['rate_per_s']:,.0f} {best['unit']}/s at batch {batch}")
        kept = ("unit", "batch", "backend", "rate_per_s", "rate_low", "rate_high", "memory_bytes")
        return {"inference": {name: best[name] for name in kept} | {"precision": report["options"]["precision"]}}

    def fail(self, active: Process, run_record: Record, reason: str) -> None:
        run_record = {name: value for name, value in run_record.items() if name != "result"}
        run_record |= {"failed": reason, "log": active.lines[-LAST_LINES:]}
        self.say(f"{active.trial.label}: failed: {reason}")
        records.append(self.out / records.FILE, self.record(active, run_record))

    def record(self, active: Process, run_record: Record) -> Record:
        return records.make(self.study.name, active.trial, self.jobs_for(active.trial), active.seconds, run_record)

    def keep(self, active: Process) -> None:
        """Keep the model if another row starts from it, or with `keep_models`."""
        trial = active.trial
        if trial.purpose == "final" and (self.keep_models or (trial.row, trial.seed) in self.study.parents):
            target = self.out / "models" / f"{trial.row}-{trial.seed}"
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(active.folder, target)
            shutil.rmtree(target / CHECKPOINTS, ignore_errors=True)

    def give_up(self, active: Process) -> None:
        """Stop a run at the end of a portion; one that had the whole portion will never fit and counts as failed.

        If most of the portion was the start of the run, the portions are too short for any run, and none has failed.
        """
        self.stop(active)
        portion = 60 * (self.minutes or 0)
        if active.seconds > 0.9 * portion and active.start_up > 0.5 * portion:
            took = format_duration(min(active.start_up, active.seconds))
            text = f"the start of a run takes {took} or more: use a --minutes several times as long"
            self.unstarted[active.trial.row] = text
            self.say(f"{active.trial.label}: stopped at the end of the portion")
        elif active.seconds > 0.9 * portion:
            self.fail(active, {}, f"takes longer than a portion of {self.minutes:g} minutes")
        else:
            self.say(f"{active.trial.label}: stopped at the end of the portion, it will be repeated")
        active.clear()

    def stop(self, active: Process) -> None:
        active.process.send_signal(signal.SIGTERM)
        try:
            active.process.wait(20)
        except subprocess.TimeoutExpired:
            active.process.kill()
            active.process.wait()
