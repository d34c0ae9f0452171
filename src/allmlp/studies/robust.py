"""What models of CIFAR-10 rely on: corrupted images, and a planted color."""

from __future__ import annotations

from allmlp.recipes.robustness import KINDS, cifar10_corrupted
from allmlp.study.definition import Row, Study


def robust() -> Study:
    """Accuracy of all families on corrupted CIFAR-10 images: noise, blur, fog and others in five severities, 60 epochs.

    allmlp study robust --minutes 9 --jobs 3
    The corruptions are made here from a seed, the same for all models. 15 runs.
    """
    return Study(
        "robust",
        rows={family: Row(f"cifar10_corrupted/{family}") for family in cifar10_corrupted()},
        compared="epochs",
        metric="corrupted_accuracy",
        also=("accuracy", *(f"accuracy_{kind}" for kind in KINDS)),
        overrides={"budget.epochs": "60"},
        reference="vit",
    )


def robust_colors() -> Study:
    """A color planted in 95 % of the images of its class: all families, then the last layer or all weights retrained.

    allmlp study robust_colors --minutes 9 --jobs 3

    CIFAR-10, 30 epochs; accuracy on test images with colors at random. Retrained on a tenth of the training images with
    colors at random (Kirichenko et al., 2023). 45 runs.
    """
    rows: dict[str, Row] = {}
    for family in cifar10_corrupted():
        rows[family] = Row(f"cifar10_colors/{family}", {"budget.epochs": "30"})
        for method in ("last_layer", "full"):
            rows[f"{family}_{method}"] = Row(f"cifar10_colors/{family}_{method}", {"init_from": f"study:{family}"})
    return Study("robust_colors", rows, compared="epochs", metric="accuracy")
