"""Weights of 8 and 4 bits on CIFAR-10: rounded after training, and trained for it."""

from __future__ import annotations

from allmlp.quantization import Quantization
from allmlp.recipes.cifar_classification import cifar10_gmlp
from allmlp.run import Budget, Run


def cifar10_quantized() -> dict[str, Run]:
    """gMLP on CIFAR-10 with weights of 8 and 4 bits: rounded after training, fake quantization, Quant-Noise.

    allmlp train cifar10_quantized
    allmlp train cifar10_quantized/int4_noise --set model=gmlp_nano

    60 epochs each, otherwise as `cifar10_gmlp`. All rows but `float` evaluate and save rounded weights; `int8` and
    `int4` train like `float`.
    """
    run = cifar10_gmlp().replace(budget=Budget(epochs=60))
    quantized = {
        "float": None,
        "int8": Quantization(bits=8, noise=0.0),
        "int8_trained": Quantization(bits=8),
        "int4": Quantization(bits=4, noise=0.0),
        "int4_trained": Quantization(bits=4),
        "int4_noise": Quantization(bits=4, noise=0.5),
    }
    return {name: run.replace(quantize=quantize) for name, quantize in quantized.items()}
