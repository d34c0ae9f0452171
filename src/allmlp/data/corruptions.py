"""Image corruptions for measuring robustness: noise, blur, weather and digital artifacts in five severities.

Kinds and severities follow CIFAR-10-C (Hendrycks and Dietterich, 2019) in name and approximate strength; its images are
not reproduced: corruptions are computed for any image, from one seed per image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from allmlp.data.augment.color import blur, gray

SEVERITIES = (1, 2, 3, 4, 5)


def gaussian_noise(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    return images + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * noise(images, seeds, Tensor.normal_)


def shot_noise(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    """Poisson noise of photons, by its normal approximation."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return images + (images / photons).sqrt() * noise(images, seeds, Tensor.normal_)


def impulse_noise(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    """A fraction of the values becomes black or white."""
    fraction = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    u = noise(images, seeds, Tensor.uniform_)
    return torch.where(u < fraction / 2, 0.0, torch.where(u > 1 - fraction / 2, 1.0, images))


def gaussian_blur(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return blur(images, images.new_full((len(images),), sigma), 3)


def fog(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    """A bright layer of smooth random density."""
    density = (0.2, 0.35, 0.5, 0.6, 0.7)[severity - 1]
    coarse = noise(images, seeds, Tensor.uniform_, (1, 4, 4))
    layer = density * interpolate(coarse, images.shape[2:], mode="bicubic").clamp(0, 1)
    return images * (1 - layer) + layer


def brightness(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    return images + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]


def contrast(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    mean = images.mean((2, 3), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (images - mean)


def saturation(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    return torch.lerp(gray(images).expand_as(images), images, (0.5, 0.3, 0.1, 1.8, 2.6)[severity - 1])


def pixelate(images: Tensor, severity: int, seeds: Sequence[int]) -> Tensor:
    factor = (0.69, 0.5, 0.375, 0.3125, 0.25)[severity - 1]
    small = interpolate(images, scale_factor=factor, mode="area")
    return interpolate(small, images.shape[2:], mode="nearest-exact")


CORRUPTIONS: dict[str, Callable[[Tensor, int, Sequence[int]], Tensor]] = {
    function.__name__: function
    for function in (
        *(gaussian_noise, shot_noise, impulse_noise, gaussian_blur, fog),
        *(brightness, contrast, saturation, pixelate),
    )
}


def corrupt(images: Tensor, kind: str, severity: int, seeds: Sequence[int]) -> Tensor:
    """Images (float, b c h w, in [0, 1]) with a corruption of `CORRUPTIONS`, rounded as if stored in eight bits.

    Each image has its own seed, so that the result does not depend on the rest of the batch.
    """
    changed = CORRUPTIONS[kind](images, severity, seeds)
    return (changed.clamp(0, 1) * 255).round() / 255


def noise(
    images: Tensor, seeds: Sequence[int], fill: Callable[..., Tensor], shape: tuple[int, ...] | None = None
) -> Tensor:
    """Noise for each image, by default in its shape; `fill` is `Tensor.normal_` or `Tensor.uniform_`."""
    generator, values = torch.Generator(images.device), images.new_empty(len(images), *(shape or images.shape[1:]))
    for image_values, seed in zip(values, seeds, strict=True):
        fill(image_values, generator=generator.manual_seed(seed))
    return values
