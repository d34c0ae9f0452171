"""CIFAR-10 with a spurious correlation: a color that depends on the class in training but not in testing."""

from __future__ import annotations

import colorsys
from dataclasses import replace

import torch
from torch import Tensor

from allmlp.data.cifar import Cifar10
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.spec import Rate, Seed

STRENGTH = 0.3
"""Fraction of the planted color in a pixel."""


class PlantedColors(Data):
    """CIFAR-10 (`path`, `download` as there), with every image tinted in one of ten colors.

        x' = 0.7 x + 0.3 color

    In training the color is that of the class with probability `correlation`, else one of the others: 0.1 is no
    correlation, with 1 the color alone is sufficient. In testing all colors are equally likely in every class. A
    classifier that relies on the color fails there.
    """

    path: str = ""
    download: bool = False
    correlation: Rate = 0.95
    color_seed: Seed = 0

    def load(self) -> ImageDataset:
        plain = Cifar10(self.path, self.download).load()
        generator = torch.Generator().manual_seed(self.color_seed)
        assert isinstance(plain.train, InMemory) and isinstance(plain.test, InMemory)
        classes = len(plain.class_names)
        return replace(
            plain,
            train=planted(plain.train, self.correlation, classes, generator),
            test=planted(plain.test, 1 / classes, classes, generator),
        )


def planted(split: InMemory, correlation: float, classes: int, generator: torch.Generator) -> InMemory:
    images, labels = split.examples
    colors = color_of(labels, correlation, classes, generator)
    tint = palette(classes)[colors][:, :, None, None]
    return InMemory((images * (1 - STRENGTH) + tint * STRENGTH).round().to(torch.uint8), labels)


def color_of(labels: Tensor, correlation: float, classes: int, generator: torch.Generator) -> Tensor:
    """Color index of every image: that of its class, or uniformly one of the others."""
    is_planted = torch.rand(len(labels), generator=generator) < correlation
    other = (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes
    return torch.where(is_planted, labels, other)


def palette(count: int) -> Tensor:
    """`count` colors of evenly spaced hues, 0 to 255, count 3."""
    return 255 * torch.tensor([colorsys.hsv_to_rgb(number / count, 1.0, 1.0) for number in range(count)])
