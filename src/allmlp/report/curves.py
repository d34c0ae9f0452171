"""Training and evaluation curves, thinned out to keep the page small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from allmlp.best import MINIMIZED
from allmlp.log import PERCENTAGES, is_percentage
from allmlp.report.runs import LoggedRun

POINTS = 300
"""Maximum number of points per curve."""
MAX_METRICS, MAX_CHARTS = 12, 24
"""Maximum numbers of metrics and charts, the most common metrics first."""
TITLES = {"lr": "learning rate", "mfu": "MFU"}
HIGHER = (*PERCENTAGES, "bleu", "chrf")
"""Parts of the names of metrics where higher is better."""


def charts(runs: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """The charts of every metric, each with its curves: steps, seconds since the start of the run, and values.

    A metric of the model's quality gets one chart per data and task: accuracies of a masked language model and of an
    image classifier do not belong on the same axes.
    """
    quality = {name for run in runs for record in run.of_kind("eval") for name in record.values} | {"loss"}
    groups = list(dict.fromkeys(run.group for run in runs))
    drawn = []
    for name in metrics(runs):
        for group in groups if name in quality else [None]:
            curves = [
                curve
                for number, run in enumerate(runs)
                if group in (None, run.group)
                for kind in ("train", "eval")
                if (curve := make_curve(run, number, kind, name)) is not None
            ]
            if curves:
                about = "" if group is None or len(groups) == 1 else " · ".join(filter(None, group)) or "unknown task"
                drawn.append({"title": title(name), "group": about, "percent": is_percentage(name), "curves": curves})
    return drawn[:MAX_CHARTS]


def metrics(runs: Sequence[LoggedRun]) -> list[str]:
    """The loss, then evaluated metrics, then those logged in training only; without the epoch."""
    evaluated, trained = (
        Counter(name for run in runs for name in dict.fromkeys(n for one in run.of_kind(kind) for n in one.values))
        for kind in ("eval", "train")
    )
    order = [name for name, _ in evaluated.most_common()] + [name for name, _ in trained.most_common()]
    names = [name for name in dict.fromkeys(order) if name != "epoch"]
    return sorted(names, key=lambda name: name != "loss")[:MAX_METRICS]


def make_curve(run: LoggedRun, number: int, kind: str, name: str) -> dict[str, Any] | None:
    records = [record for record in run.of_kind(kind) if name in record.values]
    if not records:
        return None
    values = [record.values[name] for record in records]
    kept = thin(values, POINTS)
    start = run.records[0].time
    return {
        "run": number,
        "kind": kind,
        "of": len(records),
        "steps": [records[index].step for index in kept],
        "seconds": [round(records[index].time - start, 1) for index in kept],
        "values": [float(f"{values[index]:.5g}") for index in kept],
    }


def thin(values: Sequence[float], most: int) -> list[int]:
    """Indices of the points to keep: all, or the first, the last, and the minimum and maximum of equal stretches.

    Peaks and valleys stay where they are at every zoom level.
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


def better(name: str) -> int:
    """1 if higher is better, -1 if lower is, 0 if unknown."""
    if name == "mfu" or name.endswith("/s"):
        return 0
    return -1 if name.endswith(MINIMIZED) else 1 if any(word in name for word in HIGHER) else 0
