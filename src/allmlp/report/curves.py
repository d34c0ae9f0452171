"""The curves of runs, thinned out so that a page stays small: what a browser draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from allmlp.log import SHARES
from allmlp.report.runs import Entry, Point

POINTS = 300
"""A curve keeps at most so many points."""
CHARTS = 12
"""Metrics that are drawn, the commonest first where there are more."""
TITLES = {"lr": "learning rate", "share": "share of the machine's matrix rate"}
LOWER, HIGHER = ("loss", "perplexity"), (*SHARES, "bleu", "chrf")
"""Parts of the names of metrics of which less, or more, is better."""


def charts(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A chart for each metric: its curves with the steps, the seconds since the run began, and the values."""
    drawn = []
    for name in metrics(entries):
        curves = [
            curve
            for number, entry in enumerate(entries)
            for kind in ("train", "eval")
            if (curve := make_curve(entry, number, kind, name)) is not None
        ]
        drawn.append({"title": title(name), "share": is_share(name), "curves": curves})
    return drawn


def metrics(entries: Sequence[Entry]) -> list[str]:
    """The loss, what runs are judged by, then what is only seen while they train; the epoch is no metric."""
    judged, trained = (
        Counter(name for entry in entries for name in dict.fromkeys(n for p in entry.of_kind(kind) for n in p.values))
        for kind in ("eval", "train")
    )
    order = [name for name, _ in judged.most_common()] + [name for name, _ in trained.most_common()]
    names = [name for name in dict.fromkeys(order) if name != "epoch"]
    return sorted(names, key=lambda name: name != "loss")[:CHARTS]


def make_curve(entry: Entry, number: int, kind: str, name: str) -> dict[str, Any] | None:
    points: list[Point] = [point for point in entry.of_kind(kind) if name in point.values]
    if not points:
        return None
    values = [point.values[name] for point in points]
    kept = thin(values, POINTS)
    start = entry.points[0].time
    return {
        "run": number,
        "kind": kind,
        "of": len(points),
        "steps": [points[index].step for index in kept],
        "seconds": [round(points[index].time - start, 1) for index in kept],
        "values": [float(f"{values[index]:.5g}") for index in kept],
    }


def thin(values: Sequence[float], most: int) -> list[int]:
    """Which points are kept: all, or the first, the last, and of equal stretches the lowest and the highest.

    So peaks and valleys stay where they are, whatever the zoom.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    edges = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
    numbers, kept = np.asarray(values), {0, count - 1}
    for low, high in pairwise(edges):
        kept |= {int(low + numbers[low:high].argmin()), int(low + numbers[low:high].argmax())}
    return sorted(kept)


def title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


def is_share(name: str) -> bool:
    """Whether a metric is told in per cent."""
    return any(word in name for word in SHARES)


def better(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where that is not known."""
    if name == "share" or name.endswith("/s"):
        return 0
    return -1 if any(word in name for word in LOWER) else 1 if any(word in name for word in HIGHER) else 0
