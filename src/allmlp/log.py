"""Logging of a run: progress bar or plain lines, metrics.jsonl, callbacks, curves at the end."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allmlp.callbacks import Callback, Callbacks, tensorboard
from allmlp.errors import MissingExtra, printable, require
from allmlp.files import RUN, read_json_lines, write_text_atomically

METRICS = "metrics.jsonl"
PERCENTAGES = ("accuracy", "agreement", "majority", "mfu", "exact_match", "f1")
"""Metrics whose name contains one of these are shown in percent."""
COLORS = {"train": "tab:blue", "eval": "tab:orange"}
MAX_PANELS = 4


FIRST_SILENCE, LATER_SILENCE = 4.0, 30.0
"""Seconds without output before a line is shown: the first time, and later."""
BAR_VALUES, REFRESH = 3, 0.2
"""Number of values beside the progress bar, and seconds between its updates."""
SLOW = 2.0
"""Seconds after which a slow preparation is announced."""


class RunLog:
    """Writes the log records of a run; only that of the main process is `enabled`.

    While nothing else is shown (a long step, few log records), a line with step and remaining time appears after 4
    seconds, then every 30. `seconds_left` estimates the time after a step.
    """

    def __init__(
        self,
        out: Path,
        start: int,
        steps: int | None,
        enabled: bool,
        seconds_left: Callable[[int], float],
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self.out, self.steps, self.enabled, self.seconds_left = out, steps, enabled, seconds_left
        self.step = start
        self.drawn = 0.0
        self.bar: Any = None
        self.callbacks = Callbacks([*tensorboard(), *callbacks] if enabled else ())
        self.result: dict[str, Any] = {}
        """Result of the whole run, set by the loop at the end."""
        self.spoken, self.silence, self.ended = time.monotonic(), FIRST_SILENCE, threading.Event()
        self.began, self.activity = self.spoken, "the first step"
        if enabled:
            drop_after(out / METRICS, start)
            self.file = open(out / METRICS, "a", encoding="utf8")  # noqa: SIM115
            if sys.stderr.isatty():
                self.bar = progress_bar(steps, start)

    def write(self, kind: str, step: int, values: dict[str, float], left: float | None = None) -> None:
        """Write one record. `kind` is "train" or "eval", `left` the remaining time in seconds."""
        if not self.enabled:
            return
        print(
            json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}),
            file=self.file,
            flush=True,
        )
        self.callbacks.call("on_step" if kind == "train" else "on_eval", step, values)
        text = format_values(values)
        if self.bar is None:
            ahead = "" if left is None else f"  left {format_duration(left)}"
            self.message(f"{kind:5} step {self.position(step)}  {text}{ahead}")
        elif kind == "train":
            self.bar.update(0, completed=step, text=format_values(dict(list(values.items())[:BAR_VALUES])))
        else:
            self.message(f"step {step}  {text}")

    def reach(self, step: int) -> None:
        """Record that `step` steps have been trained."""
        self.step, self.activity = step, ""
        if self.bar is not None and time.monotonic() - self.drawn > REFRESH:
            self.drawn = time.monotonic()
            self.bar.update(0, completed=step)

    def message(self, text: str) -> None:
        if self.enabled:
            self.spoken, text = time.monotonic(), printable(text)
            self.bar.print(text) if self.bar is not None else print(text, file=sys.stderr, flush=True)

    def position(self, step: int) -> str:
        return f"{step}/{self.steps}" if self.steps else str(step)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Name what takes the time in the `with` block: a line says how long it has taken, instead of the time left."""
        before, self.activity, self.began = self.activity, activity, time.monotonic()
        yield
        self.activity, self.began = before, time.monotonic()

    def fill_silence(self) -> None:
        """Thread that shows a line if nothing has been shown for a while."""
        while not self.ended.wait(0.5):
            now = time.monotonic()
            if now - self.spoken < self.silence:
                continue
            self.silence = LATER_SILENCE
            if self.activity:
                text = f"{self.activity} has taken {now - self.began:.0f} s so far"
            else:
                text = f"left {format_duration(self.seconds_left(self.step))}"
            self.message(f"train step {self.position(self.step)}  {text}")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        elif self.enabled:
            threading.Thread(target=self.fill_silence, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.bar is not None:
            self.bar.stop()
        if self.enabled:
            self.file.close()
        self.callbacks.call("on_end", self.result)


@contextmanager
def announced(text: str, enabled: bool = True) -> Iterator[None]:
    """Print `text` if the `with` block takes long."""
    timer = threading.Timer(SLOW, lambda: print(f"{text} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    if enabled:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_values(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {format_value(name, value)}" for name, value in values.items())


def format_value(name: str, value: float) -> str:
    if name.endswith("/s") or name == "step":
        return f"{value:,.0f}"
    if name == "lr":
        return f"{value:.2e}"
    return f"{value:.2%}" if is_percentage(name) else f"{value:.4g}"


def is_percentage(name: str) -> bool:
    return any(word in name for word in PERCENTAGES)


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def drop_after(file: Path, step: int) -> None:
    """Remove the records of steps that a resumed run repeats, atomically."""
    if file.exists():
        kept = [record for record in read_metrics(file) if record["step"] <= step] if step else []
        text = "".join(f"{json.dumps(record)}\n" for record in kept)
        write_text_atomically(file, text)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file."""
    return [record for record in read_json_lines(file) if {"kind", "step"} <= record.keys()]


def progress_bar(steps: int | None, start: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(12), MofNCompleteColumn(), "left", TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task("train", total=steps, completed=start, text="")
    # The terminal wraps lines; brackets are not markup.
    bar.print = partial(bar.console.print, soft_wrap=True, markup=False, highlight=False)  # type: ignore[attr-defined]
    return bar


def draw_curves(out: Path) -> list[Path]:
    """Plot the loss and every evaluated metric over the steps, each on its own axes, as PNG and SVG; skipped if
    matplotlib is missing.
    """
    try:
        require("matplotlib", "analysis").use("Agg")
        plt = require("matplotlib.pyplot", "analysis")
        percent = require("matplotlib.ticker", "analysis").PercentFormatter(1.0)
    except MissingExtra:
        return []

    records = read_metrics(out / METRICS)
    logged = [name for record in records for name in record if record["kind"] == "eval" or is_percentage(name)]
    panels = [name for name in dict.fromkeys(["loss", *logged]) if name not in ("kind", "step", "time")][:MAX_PANELS]
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), constrained_layout=True, squeeze=False)
    for axis, name in zip(axes[0], panels, strict=True):
        for kind, word in (("train", "training"), ("eval", "evaluation")):
            points = [(record["step"], record[name]) for record in records if record["kind"] == kind and name in record]
            if points:
                about = difference(out, name) if kind == "train" else ""
                label = f"{word} ({about})" if about else word
                axis.plot(*zip(*points, strict=True), label=label, color=COLORS[kind], marker="." * (len(points) < 30))
        axis.set(xlabel="step", title=name.replace("_", " "))
        axis.grid(alpha=0.3)
        if is_percentage(name):
            axis.yaxis.set_major_formatter(percent)
        if axis.lines:
            axis.legend()
    files = [out / "curves.png", out / "curves.svg"]
    for file in files:
        figure.savefig(file, dpi=120)
    plt.close(figure)
    return files


def difference(out: Path, metric: str) -> str:
    """Reasons why a metric is worse in training than in evaluation: "label smoothing 0.1, mixed images"."""
    try:
        task = json.loads((out / RUN).read_text(encoding="utf8"))["run"]["task"]
        smoothing, mixes = float(task.get("label_smoothing") or 0), task.get("mix") is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    reasons = [f"label smoothing {smoothing:g}"] if smoothing and metric == "loss" else []
    return ", ".join([*reasons, "mixed images"] if mixes else reasons)
