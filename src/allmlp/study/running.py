"""A trial of a study while it runs, in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from allmlp.log import METRICS, read_metrics
from allmlp.study.definition import Trial


@dataclass
class Process:
    """A running trial."""

    trial: Trial
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def lines(self) -> list[str]:
        """Output of the run so far."""
        text = self.log.read_text(encoding="utf8", errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    @property
    def last_line(self) -> str:
        return (self.lines or [""])[-1].strip()

    @property
    def start_up(self) -> float:
        """Seconds until the first record of the training; all so far if there is none."""
        file = self.folder / METRICS
        metrics = read_metrics(file) if file.exists() else []
        return metrics[0]["time"] - (time.time() - self.seconds) if metrics else self.seconds

    def clear(self) -> None:
        """Remove log and folder; only records are kept."""
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.log.with_suffix(""), ignore_errors=True)
