"""Image classification with permuted pixels; the permutation is the same for all images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allmlp.data.dataset import ImageDataset
from allmlp.errors import UserError
from allmlp.models.model import Model
from allmlp.spec import Seed, Size
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.task import Normalize, TaskModule


class ClassifyPermuted(Classify):
    """The model sees permuted pixels, in training (after augmentation) and in evaluation.

        patches:  patches are permuted, and the pixels of every patch in the same way
        global:   all pixels are permuted

    Source: MLP-Mixer, section 3.4. With patches of the model's size, the first does not change the problem for an MLP
    over patches, apart from initialization, because its weights can be permuted accordingly; nor does the second for a
    plain MLP.
    """

    permutation: Literal["patches", "global"] = "patches"
    permuted_patch: Size = (4, 4)
    permutation_seed: Seed = 0

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return ClassifyPermutedModule(self, model, dataset)


class ClassifyPermutedModule(ClassifyModule):
    def __init__(self, spec: ClassifyPermuted, model: Model, dataset: ImageDataset) -> None:
        super().__init__(spec, model, dataset)
        size = model.spec.input_size
        if size is None:
            raise UserError("ClassifyPermuted needs a model of images")
        patch = spec.permuted_patch if spec.permutation == "patches" else size
        if size[0] % patch[0] or size[1] % patch[1]:
            raise UserError(f"images of {size} pixels have no whole patches of {patch}: set task.permuted_patch")
        order = pixel_order(size, patch, spec.permutation_seed)
        self.normalize = NormalizePermuted(dataset, size, order)


class NormalizePermuted(Normalize):
    order: Tensor

    def __init__(self, dataset: ImageDataset, size: tuple[int, int], order: Tensor) -> None:
        super().__init__(dataset.mean, dataset.std, size)
        self.register_buffer("order", order, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        images = super().forward(images)
        return images.flatten(2)[:, :, self.order].view_as(images)


def pixel_order(size: tuple[int, int], patch: tuple[int, int], seed: int) -> Tensor:
    """Source index of every pixel in the flattened image."""
    generator = torch.Generator().manual_seed(seed)
    (height, width), (rows, columns) = size, patch
    grid = torch.arange(height * width).view(height // rows, rows, width // columns, columns)
    patches = grid.transpose(1, 2).flatten(2).flatten(0, 1)  # patches pixels
    patches = patches[torch.randperm(len(patches), generator=generator)]
    patches = patches[:, torch.randperm(rows * columns, generator=generator)]
    return patches.view(height // rows, width // columns, rows, columns).transpose(1, 2).flatten()
