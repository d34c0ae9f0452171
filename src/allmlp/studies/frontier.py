"""Accuracy by the amount of training data."""

from __future__ import annotations

from allmlp.study.definition import Row, Study


def frontier() -> Study:
    """3, 10, 30 and 100 % of CIFAR-10's training images, of every class alike, at equal compute: all families.

    allmlp study frontier --minutes 9 --jobs 3
    3,000 steps of 512 images for every row, 30 epochs of all images; 60 runs.
    """
    families = ("gmlp", "resmlp", "mixer", "vit", "resnet18")
    fractions = {"3": "0.03", "10": "0.1", "30": "0.3", "100": "1.0"}
    return Study(
        "frontier",
        rows={
            f"{family}_{percent}": Row(f"cifar10_{family}", {"train_fraction": fraction}, curve=(family, int(percent)))
            for family in families
            for percent, fraction in fractions.items()
        },
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "none", "budget.steps": "3000"},
        axis="training images, %",
    )
