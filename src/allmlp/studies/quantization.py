"""Few bits: after training, and trained for."""

from __future__ import annotations

from allmlp.recipes.quantization import cifar10_quantized
from allmlp.study.definition import Row, Study


def cifar10_quantized_sizes() -> Study:
    """gMLP of 7.2 M and 0.9 M parameters on CIFAR-10 in 8 and 4 bits: rounded after training, or trained for it.

    allmlp study cifar10_quantized_sizes --minutes 9

    36 runs of 60 epochs. A row and seed see the same images in the same order; `int8` and `int4` are the model of
    `float`, rounded.
    """
    sizes = {"gmlp_micro": "", "gmlp_nano": ", nano"}
    return Study(
        "cifar10_quantized_sizes",
        rows={
            f"{name}{suffix}": Row(
                f"cifar10_quantized/{name}", {"model": size, "model.drop_path.rate": "0.1"} if suffix else {}
            )
            for size, suffix in sizes.items()
            for name in cifar10_quantized()
        },
        compared="epochs",
        metric="accuracy",
        reference="float",
    )
