"""Freezing everything but the head of a model in the first part of a run."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from allmlp.errors import UserError
from allmlp.tasks.task import TaskModule


class Freezing:
    """Trains the head alone while progress is below `fraction`, then everything.

    Frozen parameters have no gradient: neither they nor their optimizer state change, and they do not count when
    gradients are clipped. Their modules are in evaluation mode, without dropout, stochastic depth and new statistics.
    """

    def __init__(self, task: TaskModule, optimizer: Optimizer, fraction: float) -> None:
        self.task, self.fraction, self.is_frozen = task, fraction, False
        self.parameters: list[nn.Parameter] = []
        if fraction:
            head = task.model.get_submodule(head_path(task))
            kept = {id(weight) for weight in head.parameters()}
            self.head = head
            self.parameters = [w for w in task.model.parameters() if w.requires_grad and id(w) not in kept]
            separate_groups(optimizer, {id(weight) for weight in self.parameters})

    def set(self, progress: float) -> bool:
        """Freeze or unfreeze for a step at this progress; returns whether anything changed."""
        freeze = progress < self.fraction
        changed = freeze != self.is_frozen
        self.is_frozen = freeze
        if changed:
            for weight in self.parameters:
                weight.requires_grad_(not freeze)
            self.task.train()
        if freeze and self.task.model.training:  # evaluations end in training mode
            self.task.model.eval()
            self.head.train()
        return changed


def head_path(task: TaskModule) -> str:
    parts = task.model.parts()
    if "head" not in parts:
        raise UserError("freeze_fraction needs a model with a head")
    return parts["head"]


def separate_groups(optimizer: Optimizer, late: set[int]) -> None:
    """Split parameter groups by membership in `late`, so that all of a group have taken equally many steps."""
    for group in list(optimizer.param_groups):
        parts = [[w for w in group["params"] if (id(w) in late) == inside] for inside in (False, True)]
        if all(parts):
            group["params"] = parts[0]
            optimizer.param_groups.append({**group, "params": parts[1]})
