"""Several views of each picture, for self-supervised learning."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from allmlp.data.augment.colour import Blur, ColourJitter, Greyscale, Normalise, Solarise
from allmlp.data.augment.geometry import Flip, RandomResizedCrop
from allmlp.data.augment.transform import Augment, Span, Transform, uniform
from allmlp.spec import Count, Range, Size, Spec


class MultiCrop(Spec):
    """DINO's views: large crops of much of the picture, and small crops of little of it.

    Every view: crop (bicubic), flip, colour jitter (0.4, 0.4, 0.2, 0.1) with probability 0.8, greyscale 0.2. Then
    blur: always in the first large crop, with 0.1 in other large crops, with 0.5 in small ones; and in the other
    large crops solarise with 0.2. `sigma` is the blur's, in pixels. Source: Caron et al., DINO, 2021, and its code.
    """

    globals: Count = 2
    local: Annotated[int, Range(0, 64)] = 8
    global_scale: Span = (0.4, 1.0)
    local_scale: Span = (0.05, 0.4)
    global_size: Size = (224, 224)
    local_size: Size = (96, 96)
    sigma: Span = (0.1, 2.0)
    normalise: Normalise | None = None

    def views(self) -> list[Augment]:
        """The pipeline of each view, the large crops first."""
        first = self.view(self.global_scale, self.global_size, blur=1.0, solarise=0.0)
        other = self.view(self.global_scale, self.global_size, blur=0.1, solarise=0.2)
        small = self.view(self.local_scale, self.local_size, blur=0.5, solarise=0.0)
        return [first] + [other] * (self.globals - 1) + [small] * self.local

    def view(self, scale: Span, size: tuple[int, int], blur: float, solarise: float) -> Augment:
        transforms: list[Transform] = [
            RandomResizedCrop(scale=scale, size=size, filter="bicubic"),
            Flip(),
            ColourJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
            Greyscale(0.2),
            Blur(blur, self.sigma),
            Solarise(solarise),
        ]
        return Augment((*transforms, self.normalise) if self.normalise else tuple(transforms))

    def numbers(self) -> int:
        return sum(view.numbers() for view in self.views())

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return uniform(images, self.numbers(), generator)

    def apply(self, images: Tensor, generator: torch.Generator) -> list[Tensor]:
        return self.transform(images, self.draw(images, generator))

    def __call__(self, images: Tensor, generator: torch.Generator) -> list[Tensor]:
        return self.apply(images, generator)

    def transform(self, images: Tensor, draws: Tensor) -> list[Tensor]:
        """[large crops (globals * b c H W), small crops (local * b c h w)], one view of the whole batch after another.

        Without small crops the list has one entry. A pure function, as `Transform.transform`.
        """
        views = self.views()
        parts = draws.split([view.numbers() for view in views], dim=1)
        crops = [view.transform(images, part) for view, part in zip(views, parts)]
        groups = (crops[: self.globals], crops[self.globals :])
        return [torch.cat(group) for group in groups if group]
