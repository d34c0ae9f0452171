"""The evaluations of a run: their times, the best weights, and early stopping."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from allmlp.ema import ema_tensors, overwrite
from allmlp.models.model import Model

MINIMIZED = ("loss", "perplexity", "mse", "mae", "mase")
"""Suffixes of the names of metrics where less is better."""


class Best:
    """Keeps the weights of the best evaluation if `keep`, and counts the evaluations since the last improvement.

    The weights of step 0, before training, are kept until others are better by more than `start_margin`.
    """

    def __init__(self, keep: bool, patience: int | None, start_margin: float = 0.0) -> None:
        self.keep, self.patience, self.start_margin = keep, patience, start_margin
        self.step, self.results, self.waited = -1, dict[str, float](), 0
        self.highest = dict[str, float]()
        """The best results, whether their weights are kept or not."""
        self.weights: dict[str, Tensor] = {}
        self.evaluations: list[dict[str, float]] = []
        """Step, seconds of training, and the first metric."""

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def update(self, step: int, results: dict[str, float], model: Model, seconds: float = 0.0) -> bool:
        """Record the results of `model` after `seconds` of training; returns whether they are the best so far."""
        if not results:
            return False
        self.evaluations.append({"step": step, "seconds": seconds, **dict([next(iter(results.items()))])})
        self.waited += 1
        if not self.highest or score(results) > score(self.highest):
            self.highest, self.waited = dict(results), 0
        if self.results and not self.exceeds_kept(results):
            return False
        self.step, self.results = step, dict(results)
        if self.keep:
            self.weights = {name: tensor.detach().clone() for name, tensor in ema_tensors(model).items()}
        return True

    def exceeds_kept(self, results: dict[str, float]) -> bool:
        new, kept = score(results), score(self.results)
        if self.step == 0 and self.start_margin:
            return new[0] > kept[0] + self.start_margin
        return new > kept

    def restore(self, model: Model) -> None:
        """Load the best weights into `model`, if they are kept."""
        if self.weights:
            tensors = ema_tensors(model)
            overwrite([tensors[name] for name in self.weights], list(self.weights.values()))

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, without the weights."""
        state = {"step": self.step, "results": self.results, "waited": self.waited}
        return state | {"highest": self.highest, "evaluations": self.evaluations}

    def load(self, state: dict[str, Any], model: Model) -> None:
        """Load the state of a checkpoint, and allocate tensors for its weights."""
        self.step, self.results, self.waited = state["step"], state["results"], state["waited"]
        self.highest, self.evaluations = state["highest"], list(state["evaluations"])
        if self.keep and self.results:
            self.weights = {name: tensor.detach().clone() for name, tensor in ema_tensors(model).items()}


def score(results: dict[str, float]) -> tuple[float, float]:
    """Sort key of results: the first metric, then the loss, which decides between equal accuracies."""
    name, value = next(iter(results.items()))
    values = (-value if name.endswith(MINIMIZED) else value), -results.get("loss", 0.0)
    return tuple(value if math.isfinite(value) else -math.inf for value in values)  # type: ignore[return-value]
