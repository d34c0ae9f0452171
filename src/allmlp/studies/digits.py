"""The embedded example: three families on scikit-learn's digits."""

from __future__ import annotations

from allmlp.study.definition import Row, Study, Tuning, grid


def digits() -> Study:
    """Mixer, gMLP and ViT on scikit-learn's digits: eight epochs, two blocks, the better of two learning rates each.

    allmlp study digits --jobs 2
    Two CPU cores, no download: 15 runs in two to three minutes.
    """
    rates = grid({"optim.lr": ("5e-3", "1e-2")})
    return Study(
        "digits",
        rows={family: Row(f"digits_{family}", candidates=rates) for family in ("mixer", "gmlp", "vit")},
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "8", "model.depth": "2"},
        tuning=Tuning(val_size=300),
        reference="vit",
    )
