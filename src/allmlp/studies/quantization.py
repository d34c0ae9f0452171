"""Few bits: after training, and trained for it."""

from __future__ import annotations

from allmlp.recipes.quantization import cifar10_quantized
from allmlp.study.definition import Overrides, Row, Study

ROUNDED: Overrides = {"budget.epochs": "none", "budget.steps": "1", "optim.lr": "0", "compile": "false"}
"""Only evaluate a model with rounded weights."""


def cifar10_quantized_sizes() -> Study:
    """gMLP of 7.2 M and 0.9 M parameters on CIFAR-10 in 8 and 4 bits: rounded after training, or trained for it.

    allmlp study cifar10_quantized_sizes --minutes 9 --jobs 12

    24 runs of 30 epochs, and 12 that take the models of `float` with the same seed and round them (`int8`, `int4`).
    Runs with equal seeds see the same images in the same order.
    """
    sizes: dict[str, Overrides] = {"": {}, ", nano": {"model": "gmlp_nano", "model.drop_path.rate": "0.1"}}
    rows: dict[str, Row] = {}
    for suffix, size in sizes.items():
        for name, run in cifar10_quantized().items():
            is_rounded = run.quantize is not None and not run.quantize.noise
            start: Overrides = {**ROUNDED, "init_from": f"study:float{suffix}"} if is_rounded else {}
            rows[f"{name}{suffix}"] = Row(f"cifar10_quantized/{name}", {**size, **start}, reference=f"float{suffix}")
    return Study(
        "cifar10_quantized_sizes",
        rows,
        compared="epochs",
        metric="accuracy",
        overrides={"budget.epochs": "30"},
    )
