"""User-defined metrics: functions of the logits and labels of a whole split."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from allmlp.errors import UserError, one_line
from allmlp.parallel import World
from allmlp.plugins import import_named
from allmlp.tasks.task import TaskModule

log = logging.getLogger("allmlp.metrics")
TAKEN = (
    *("accuracy", "accuracy_low", "accuracy_high", "top5_accuracy", "loss", "calibration_error"),
    *("majority", "tfidf_accuracy"),
)

Metric = Callable[[Tensor, Tensor], Any]
"""From logits [N, K] (float32) and labels [N] (int64), on the CPU and in the order of the split, to a number."""


class SplitMetrics:
    """Metrics by name. Each is called in the main process with all examples of the split, under torchrun too.

    A metric that raises, or does not return a number, is left out with one warning; the run continues.
    """

    def __init__(self, functions: Mapping[str, Metric] | None = None) -> None:
        self.functions, self.failed = dict(functions or {}), set[str]()
        for name, function in self.functions.items():
            if not callable(function):
                raise UserError(
                    f"the metric {name!r} is {type(function).__name__}, not a function of logits and labels"
                )
            if name in TAKEN:
                raise UserError(f"{name} is part of every evaluation: give your metric another name")

    def check(self, task: TaskModule) -> None:
        """Raise UserError if `task` does not keep the outputs that metrics need."""
        if self.functions and not task.keeps_outputs:
            name = type(task).__name__.removesuffix("Module")
            raise UserError(f"metrics are computed from the logits of a classifier, which {name} does not have")

    def start(self, task: TaskModule) -> None:
        """Let `task` keep its outputs in the next evaluation."""
        task.kept = [] if self.functions else None

    def finish(self, task: TaskModule, world: World) -> dict[str, float]:
        """Compute the metrics from the kept outputs."""
        kept, task.kept = task.kept, None
        if kept is None:
            return {}
        shares = world.gather(tuple(map(torch.cat, zip(*kept, strict=True))))
        return world.broadcast(self.compute(interleave(shares), task.split_names) if world.is_main else {})

    def compute(self, outputs: tuple[Tensor, ...], split_names: tuple[str, ...]) -> dict[str, float]:
        logits, labels, part = outputs
        values = {}
        for number in part.unique().tolist():
            rows, prefix = part == number, f"{split_names[number]}_" if number else ""
            for name, function in self.functions.items():
                try:
                    value = float(function(logits[rows], labels[rows]))
                    if not math.isfinite(value):
                        raise ValueError(f"it is {value}")
                    values[prefix + name] = value
                except Exception as reason:  # the user's own code
                    if name not in self.failed:
                        kind = type(reason).__name__
                        log.warning("the metric %s failed and is skipped: %s: %s", name, kind, one_line(reason))
                    self.failed.add(name)
        return values


def import_metrics(places: Iterable[str]) -> dict[str, Metric]:
    """The functions MODULE:NAME or FILE.py:NAME, by name."""
    functions: dict[str, Metric] = {}
    for name, function in map(import_named, places):
        if name in functions:
            raise UserError(f"two metrics are called {name}: name them differently")
        functions[name] = function
    return functions


def interleave(shares: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Merge the parts of n processes, where process r has examples r, r + n, r + 2 n, ..."""
    columns = []
    for parts in zip(*shares, strict=True):
        whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            whole[rank :: len(parts)] = part
        columns.append(whole)
    return tuple(columns)
