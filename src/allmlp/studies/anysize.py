"""One MLP for images of any size."""

from __future__ import annotations

from allmlp.recipes.anysize import SIZES
from allmlp.studies.cifar10 import ALL_THREE
from allmlp.study.definition import Row, Study


def anysize() -> Study:
    """Token weights resized to a random grid in every step, against training at 32 pixels: accuracy at 24 to 64 pixels.

    allmlp study anysize --minutes 9 --jobs 3
    gMLP on CIFAR-10, 100 epochs with the settings that `cifar10_tuned` chose for it, no fine-tuning at the other sizes;
    6 runs. A step at a random size has on average 1.9 times the tokens of one at 32 pixels.
    """
    return Study(
        "anysize",
        rows={row: Row(f"cifar10_anysize/{row}") for row in ("gmlp_fixed", "gmlp_any")},
        compared="epochs",
        metric="worst_accuracy",
        also=tuple(f"accuracy_{size}" for size in SIZES),
        overrides={"budget.epochs": "100", **ALL_THREE},
        reference="gmlp_fixed",
    )
