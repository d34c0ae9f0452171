"""Initialization of the patch embedding from the principal components of training patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from allmlp.data.dataset import Dataset, ImageDataset
from allmlp.errors import UserError
from allmlp.layers.stem import PatchEmbedLayer, split_patches
from allmlp.models.model import Model
from allmlp.spec import Count, Range, Spec
from allmlp.tasks.task import Normalize

CHUNK = 250
"""Images at a time."""


class Whitening(Spec):
    """Initialize a patch embedding with channels uncorrelated over training patches, of mean 0 and variance 1.

        W = sqrt(C / k) Q (L + eps)^(-1/2) E^T,   b = -W m

    m: mean patch; E, L: the k = min(C, d) largest principal components of its d normalized pixels, and their variances;
    Q: C x k, random, with orthonormal columns. `eps` bounds how much fine detail, of little variance, is amplified.
    Pixels of a patch are strongly correlated: otherwise the stem initially sees little but the mean color. Source: the
    whitening layer of fast CIFAR-10 training (Page, 2019; Jordan, 2024), here for patches.
    """

    eps: Annotated[float, Range(1e-9)] = 1e-2
    images: Count = 2000
    """Training images to compute the covariance from."""

    @torch.no_grad()
    def initialize(self, model: Model, dataset: Dataset, seed: int) -> None:
        stem = getattr(model, "stem", None)
        if not isinstance(stem, PatchEmbedLayer) or not isinstance(dataset, ImageDataset):
            raise UserError("stem_init=Whitening is for image models of this library, with a patch embedding")
        channels, pixels = stem.proj.weight.shape
        total, products, count = torch.zeros(pixels).double(), torch.zeros(pixels, pixels).double(), 0
        for patches in self.patches(stem, dataset, seed):
            total += patches.sum(0)
            products += patches.T @ patches
            count += len(patches)
        mean = total / count
        variances, components = torch.linalg.eigh(products / count - torch.outer(mean, mean))  # in ascending order
        kept = min(channels, pixels)
        scaled = components[:, -kept:] / (variances[-kept:].clamp(min=0) + self.eps).sqrt()  # d k
        generator = torch.Generator().manual_seed(seed)
        basis, _ = torch.linalg.qr(torch.randn(channels, kept, generator=generator, dtype=torch.float64))
        weight = (channels / kept) ** 0.5 * basis @ scaled.T
        stem.proj.weight.copy_(weight)
        stem.proj.bias.copy_(-weight @ mean)

    def patches(self, stem: PatchEmbedLayer, dataset: ImageDataset, seed: int) -> Iterator[Tensor]:
        """Normalized training patches as the embedding reads them: n (c ph pw), float64, on the CPU."""
        normalize = Normalize(dataset.mean, dataset.std, stem.spec.img_size)
        order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(seed))
        for chosen in order[: self.images].split(CHUNK):
            images = normalize(dataset.train.fetch(chosen).images.cpu())
            yield split_patches(images, stem.spec.patch_size, stem.spec.kernel).flatten(0, 1).double()
