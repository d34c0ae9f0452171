"""A small student with and without a teacher."""

from __future__ import annotations

from allmlp.models.zoo import preset
from allmlp.recipes.cifar_classification import cifar10_mixer
from allmlp.run import Budget, Run
from allmlp.tasks.classify import Classify
from allmlp.tasks.distill import Distill
from allmlp.weights.bundled import BUNDLED


def cifar10_distill() -> dict[str, Run]:
    """A small Mixer (0.85 M parameters) on CIFAR-10: from labels alone, and distilled from the bundled gMLP.

    allmlp train cifar10_distill
    allmlp train cifar10_distill/hard --set task.teacher=runs/my_convnet

    Two to five minutes each on one H200. Published for hard distillation on ImageNet, from RegNetY-16GF: ResMLP-S12
    76.6 to 77.8 %.
    """
    student = preset("mixer_nano").spec.configure(drop_path=0.0)
    labels = cifar10_mixer().replace(model=student, budget=Budget(epochs=100))
    assert isinstance(labels.task, Classify)
    return {
        "labels": labels,
        "hard": labels.replace(task=Distill(BUNDLED, labels.task, "hard")),
        "soft": labels.replace(task=Distill(BUNDLED, labels.task, "soft", alpha=0.9, temperature=2.0)),
    }
