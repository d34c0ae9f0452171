"""Logging of a run: progress bar or plain lines, metrics.jsonl, TensorBoard if installed, curves at the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allmlp.errors import MissingExtra, require

METRICS = "metrics.jsonl"
PERCENTAGES = ("accuracy", "agreement", "majority", "mfu", "exact_match", "f1")
"""Metrics whose name contains one of these are shown in percent."""


class RunLog:
    """Writes the records of a run; only the log of the main process is `enabled`."""

    def __init__(self, out: Path, start: int, steps: int | None, enabled: bool) -> None:
        self.out, self.steps, self.enabled = out, steps, enabled
        self.bar: Any = None
        self.writer: Any = None
        if enabled:
            drop_after(out / METRICS, start)
            self.file = open(out / METRICS, "a", encoding="utf8")  # noqa: SIM115
            self.writer = tensorboard(out)
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
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{kind}/{name}", value, step)
        text = format_values(values)
        if self.bar is not None:
            self.bar.update(0, completed=step, text=text) if kind == "train" else self.bar.print(f"step {step}  {text}")
        else:
            total = f"/{self.steps}" if self.steps else ""
            ahead = "" if left is None else f"  left {format_duration(left)}"
            print(f"{kind:5} step {step}{total}  {text}{ahead}", file=sys.stderr, flush=True)

    def message(self, text: str) -> None:
        if self.enabled:
            self.bar.print(text) if self.bar is not None else print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.enabled:
            self.file.close()
        if self.writer is not None:
            self.writer.close()


def format_values(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {format_value(name, value)}" for name, value in values.items())


def format_value(name: str, value: float) -> str:
    if name.endswith("/s") or name == "step":
        return f"{value:,.0f}"
    if name == "lr":
        return f"{value:.2e}"
    return f"{value:.2%}" if any(word in name for word in PERCENTAGES) else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def drop_after(file: Path, step: int) -> None:
    """Remove the records of steps that a resumed run repeats."""
    if file.exists():
        kept = [record for record in read_metrics(file) if record["step"] <= step] if step else []
        file.write_text("".join(f"{json.dumps(record)}\n" for record in kept), encoding="utf8")


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; lines cut short by a crash are skipped."""
    records = []
    for line in file.read_text(encoding="utf8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def tensorboard(out: Path) -> Any:
    try:
        return require("torch.utils.tensorboard", "train").SummaryWriter(out / "tensorboard")
    except MissingExtra:
        return None


def progress_bar(steps: int | None, start: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), "left")
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    bar.add_task("train", total=steps, completed=start, text="")
    bar.print = bar.console.print  # type: ignore[attr-defined]
    return bar


def draw_curves(out: Path) -> list[Path]:
    """Loss and accuracy over the steps, as PNG and SVG; nothing where matplotlib is missing."""
    try:
        require("matplotlib", "analysis").use("Agg")
        plt = require("matplotlib.pyplot", "analysis")
    except MissingExtra:
        return []

    records = read_metrics(out / METRICS)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axis, word in ((left, "loss"), (right, "accuracy")):
        for kind in ("train", "eval"):
            names = {name for r in records if r["kind"] == kind for name in r if name.endswith(word)}
            for name in sorted(names):
                points = [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
                label = kind if name == word else f"{kind} {name.replace('_', ' ')}"
                axis.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
        axis.set(xlabel="step", ylabel=word, title=word)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    files = [out / "curves.png", out / "curves.svg"]
    for file in files:
        figure.savefig(file, dpi=120)
    plt.close(figure)
    return files
