"""What the server counts, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import bisect
import os
import time
from collections import Counter
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """How many observations were at most so large, for each of `bounds`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str = "") -> list[str]:
        comma, total, lines = "," if labels else "", 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts):
            total += count
            lines.append(f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}')
        braces = f"{{{labels}}}" if labels else ""
        return [*lines, f"{name}_sum{braces} {self.sum:.6f}", f"{name}_count{braces} {total}"]


class Metrics:
    def __init__(self) -> None:
        self.started = time.time()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.batches, self.model = Histogram(SIZES), Histogram(SECONDS)

    def on_response(self, path: str, status: int, seconds: float) -> None:
        """`path` is one of the server's own: what clients make up must not become a label."""
        self.responses[path, status] += 1
        self.seconds.setdefault(path, Histogram(SECONDS)).observe(seconds)

    def on_batch(self, size: int, seconds: float) -> None:
        self.batches.observe(size)
        self.model.observe(seconds)

    def text(self, inside: int, capacity: int, accepted: int) -> str:
        lines = head("allmlp_responses_total", "counter", "Answers by path and status.")
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'allmlp_responses_total{{path="{path}",status="{status}"}} {count}')
        lines += head("allmlp_response_seconds", "histogram", "From the head of a request to the end of its answer.")
        for path, histogram in sorted(self.seconds.items()):
            lines += histogram.lines("allmlp_response_seconds", f'path="{path}"')
        lines += head("allmlp_batch_size", "histogram", "Requests that went through the model together.")
        lines += self.batches.lines("allmlp_batch_size")
        lines += head("allmlp_batch_seconds", "histogram", "Time of a batch in the model.")
        lines += self.model.lines("allmlp_batch_seconds")
        for name, kind, what, value in (
            ("allmlp_accepted_total", "counter", "Requests that were taken on.", accepted),
            ("allmlp_in_flight", "gauge", "Requests taken on and not answered yet.", inside),
            ("allmlp_capacity", "gauge", "How many there may be.", capacity),
            ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident_bytes()),
            ("process_start_time_seconds", "gauge", "Start time since the epoch in seconds.", f"{self.started:.3f}"),
        ):
            lines += [*head(name, kind, what), f"{name} {value}"]
        return "\n".join(lines) + "\n"


def head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
