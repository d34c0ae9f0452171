"""Mixup and CutMix of images and targets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.transform import Randomized, box_mask, per_image, symmetric_beta, uniform_integer
from allmlp.errors import UserError
from allmlp.spec import NonNegative, Rate


def one_hot(labels: Tensor, num_classes: int, label_smoothing: float = 0.0) -> Tensor:
    """Labels (int64, b) as target probabilities (b k), `label_smoothing` of the mass spread over all classes."""
    hot = labels[:, None] == torch.arange(num_classes, device=labels.device)
    return hot * (1 - label_smoothing) + label_smoothing / num_classes


class Mixup(Randomized):
    """Mixup and CutMix of each image with another one of the batch.

        mixup:   x = w x + (1 - w) x',   w ~ Beta(mixup_alpha, mixup_alpha)
        CutMix:  a box of area 1 - w shows x', w ~ Beta(cutmix_alpha, cutmix_alpha); w becomes the area left by the box

    Targets are mixed with the same w. Images are mixed with probability `prob`, by CutMix with probability
    `switch_prob` if both alphas are positive; an alpha of 0 turns its method off. The partner x' is the batch reversed
    (timm) or rolled by one (big_vision). `dominant` takes max(w, 1 - w), as big_vision does. Without `per_sample` the
    whole batch uses one draw. Sources: Zhang et al., mixup, 2017; Yun et al., CutMix, 2019.
    """

    mixup_alpha: NonNegative = 0.8
    cutmix_alpha: NonNegative = 1.0
    prob: Rate = 1.0
    switch_prob: Rate = 0.5
    per_sample: bool = True
    partner: Literal["reversed", "rolled"] = "reversed"
    dominant: bool = False

    def num_uniforms(self) -> int:
        return 6

    def __call__(self, images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.apply(images, targets, self.draw_uniforms(images, generator))

    def apply(self, images: Tensor, targets: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed images (b c h w) and targets (b k). A pure function, like `Transform.apply`."""
        if not targets.is_floating_point() or targets.ndim != 2:
            raise UserError("Mixup needs class probabilities as targets (b k): see one_hot")
        if not (self.mixup_alpha or self.cutmix_alpha):
            return images, targets
        if not self.per_sample:
            uniforms = uniforms[:1].expand_as(uniforms)
        mixed, method, u, v, y, x = uniforms.unbind(1)
        both = self.mixup_alpha and self.cutmix_alpha
        cut = method < (self.switch_prob if both else float(self.mixup_alpha == 0))
        by_box, by_weight = (symmetric_beta(u, v, alpha or 1) for alpha in (self.cutmix_alpha, self.mixup_alpha))
        keep = torch.where(cut, by_box, by_weight)
        if self.dominant:
            keep = torch.maximum(keep, 1 - keep)
        keep = torch.where(mixed < self.prob, keep, 1.0)  # b
        replaced = self.boxes(torch.where(cut, 1 - keep, 0.0), y, x, images)  # b 1 h w
        keep = torch.where(cut, 1 - replaced.float().mean((1, 2, 3)), keep)
        weight = torch.where(replaced, 0.0, per_image(torch.where(cut, 1.0, keep)))

        other_images, other_targets = (
            values.flip(0) if self.partner == "reversed" else values.roll(1, 0) for values in (images, targets)
        )
        targets = torch.lerp(other_targets, targets, keep[:, None].to(targets.dtype))
        return torch.lerp(other_images, images, weight.to(images.dtype)), targets

    @staticmethod
    def boxes(area: Tensor, y: Tensor, x: Tensor, images: Tensor) -> Tensor:
        """Masks of boxes with the image's aspect ratio around a random pixel, clipped at the border, as in timm."""
        height, width = images.shape[2:]
        side = torch.sqrt(area)
        rows, columns = torch.floor(side * height), torch.floor(side * width)
        top = uniform_integer(y, height) - torch.floor(rows / 2)
        left = uniform_integer(x, width) - torch.floor(columns / 2)
        return box_mask(top, left, rows, columns, images)
