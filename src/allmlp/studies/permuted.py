"""Mixer's experiment: images with permuted pixels."""

from __future__ import annotations

from allmlp.recipes.robustness import cifar10_permuted
from allmlp.study.definition import Row, Study


def permuted() -> Study:
    """CIFAR-10 with patches and the pixels within them permuted, and with all pixels permuted: all families, 40 epochs.

    allmlp study permuted --minutes 9 --jobs 3

    An MLP over patches has nothing to lose by the first but the order its weights begin with, and much by the second; a
    convnet loses by both. 45 runs.
    """
    return Study(
        "permuted",
        rows={name: Row(f"cifar10_permuted/{name}") for name in cifar10_permuted()},
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "40"},
        reference="mixer_none",
    )
