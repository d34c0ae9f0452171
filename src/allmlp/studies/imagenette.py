"""Photographs of ten classes at 128 pixels."""

from __future__ import annotations

from allmlp.study.definition import Row, Study


def imagenette() -> Study:
    """All families on Imagenette at 128 pixels from scratch, 100 epochs.

    allmlp study imagenette --minutes 9 --jobs 2
    18 runs.
    """
    families = ("gmlp", "amlp", "resmlp", "mixer", "vit", "resnet18")
    return Study(
        "imagenette",
        rows={family: Row(f"imagenette_{family}") for family in families},
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "100"},
        reference="vit",
    )
