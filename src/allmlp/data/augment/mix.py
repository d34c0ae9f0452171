"""Pictures mixed with other pictures of the batch, and the targets that go with them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allmlp.data.augment.transform import beta, box, integer, uniform, wide
from allmlp.errors import UserError
from allmlp.spec import NonNegative, Rate, Spec


def one_hot(labels: Tensor, classes: int, smoothing: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Labels (int64, b) as targets (b k) that sum to one, `smoothing` of it spread over all classes."""
    hot = labels[:, None] == torch.arange(classes, device=labels.device)
    return hot.to(dtype) * (1 - smoothing) + smoothing / classes


class Mix(Spec):
    """Mixup and cutmix, each picture with its own weight.

        mixup:   x = w x + (1 - w) x',   w ~ Beta(mixup, mixup)
        cutmix:  a box with 1 - w of the area shows x', w ~ Beta(cutmix, cutmix); w is then what the box left over

    Targets are mixed with the same w. A picture is mixed with `probability`; where both kinds are on it is cutmix with
    probability `switch`. An amount of zero turns a kind off. The partner x' is the batch reversed (timm) or rolled by
    one (big_vision); `dominant` takes max(w, 1 - w), as big_vision does; without `per_sample` all share one draw.
    Sources: Zhang et al., mixup, 2017; Yun et al., CutMix, 2019.
    """

    mixup: NonNegative = 0.8
    cutmix: NonNegative = 1.0
    probability: Rate = 1.0
    switch: Rate = 0.5
    per_sample: bool = True
    partner: Literal["reversed", "rolled"] = "reversed"
    dominant: bool = False

    def numbers(self) -> int:
        return 6

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return uniform(images, self.numbers(), generator)

    def apply(self, images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.transform(images, targets, self.draw(images, generator))

    def __call__(self, images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.apply(images, targets, generator)

    def transform(self, images: Tensor, targets: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed pictures (b c h w) and targets (b k): a pure function, as `Transform.transform`."""
        if not targets.is_floating_point() or targets.ndim != 2:
            raise UserError("Mix needs targets as shares of the classes (b k): see one_hot")
        if not (self.mixup or self.cutmix):
            return images, targets
        if not self.per_sample:
            draws = draws[:1].expand_as(draws)
        mixed, kind, first, second, y, x = draws.unbind(1)
        cut = kind < (self.switch if self.mixup and self.cutmix else float(self.mixup == 0))
        keep = torch.where(cut, beta(first, second, self.cutmix or 1), beta(first, second, self.mixup or 1))
        if self.dominant:
            keep = torch.maximum(keep, 1 - keep)
        keep = torch.where(mixed < self.probability, keep, 1.0)  # b
        area = torch.where(cut, 1 - keep, 0.0)
        taken = self.boxes(area, y, x, images)  # b 1 h w
        keep = torch.where(cut, 1 - taken.float().mean((1, 2, 3)), keep)
        weight = torch.where(taken, 0.0, wide(torch.where(cut, 1.0, keep)))

        other, others = (
            values.flip(0) if self.partner == "reversed" else values.roll(1, 0) for values in (images, targets)
        )
        targets = torch.lerp(others, targets, keep[:, None].to(targets.dtype))
        return torch.lerp(other, images, weight.to(images.dtype)), targets

    @staticmethod
    def boxes(area: Tensor, y: Tensor, x: Tensor, images: Tensor) -> Tensor:
        """Boxes shaped like the picture around a random pixel, cut off at the border, as CutMix and timm draw them."""
        height, width = images.shape[2:]
        side = torch.sqrt(area)
        rows, columns = torch.floor(side * height), torch.floor(side * width)
        top = integer(y, height) - torch.floor(rows / 2)
        left = integer(x, width) - torch.floor(columns / 2)
        return box(top, left, rows, columns, images)
