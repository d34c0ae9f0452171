"""Multi-crop augmentation for self-supervised learning."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from allmlp.data.augment.color import ColorJitter, GaussianBlur, Grayscale, Solarize
from allmlp.data.augment.geometry import HorizontalFlip, RandomResizedCrop
from allmlp.data.augment.transform import Augment, FloatRange, Randomized
from allmlp.spec import Count, Range, Size


class MultiCrop(Randomized):
    """DINO's crops of an image: global ones that cover much of it, and local ones that cover little.

    Every crop (bicubic) is flipped at random, with color jitter (0.4, 0.4, 0.2, 0.1) at probability 0.8 and grayscale
    at 0.2. Blur is applied always to the first global crop, with 0.1 to the other global crops and 0.5 to local ones;
    solarization with 0.2 to the other global crops. `blur_sigma` is in pixels. Source: Caron et al., DINO, 2021, and
    its code.
    """

    num_global: Count = 2
    num_local: Annotated[int, Range(0, 64)] = 8
    global_scale: FloatRange = (0.4, 1.0)
    local_scale: FloatRange = (0.05, 0.4)
    global_size: Size = (224, 224)
    local_size: Size = (96, 96)
    blur_sigma: FloatRange = (0.1, 2.0)

    def pipelines(self) -> list[Augment]:
        """The augmentation of each crop, global crops first."""
        first = self.pipeline(self.global_scale, self.global_size, blur=1.0, solarize=0.0)
        other = self.pipeline(self.global_scale, self.global_size, blur=0.1, solarize=0.2)
        local = self.pipeline(self.local_scale, self.local_size, blur=0.5, solarize=0.0)
        return [first] + [other] * (self.num_global - 1) + [local] * self.num_local

    def pipeline(self, scale: FloatRange, size: tuple[int, int], blur: float, solarize: float) -> Augment:
        return Augment(
            (
                RandomResizedCrop(scale=scale, size=size, interpolation="bicubic"),
                HorizontalFlip(),
                ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
                Grayscale(0.2),
                GaussianBlur(blur, self.blur_sigma),
                Solarize(solarize),
            )
        )

    def num_uniforms(self) -> int:
        return sum(pipeline.num_uniforms() for pipeline in self.pipelines())

    def __call__(self, images: Tensor, generator: torch.Generator) -> list[Tensor]:
        return self.apply(images, self.draw_uniforms(images, generator))

    def apply(self, images: Tensor, uniforms: Tensor) -> list[Tensor]:
        """[global crops (num_global * b c H W), local crops (num_local * b c h w)]; the batch stays together per crop.

        Without local crops the list has one entry. A pure function, like `Transform.apply`.
        """
        pipelines = self.pipelines()
        parts = uniforms.split([pipeline.num_uniforms() for pipeline in pipelines], dim=1)
        crops = [pipeline.apply(images, part) for pipeline, part in zip(pipelines, parts)]
        groups = (crops[: self.num_global], crops[self.num_global :])
        return [torch.cat(group) for group in groups if group]
