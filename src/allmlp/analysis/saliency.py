"""Saliency of patches for a prediction: occlusion, input gradients, and class activation maps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.toeplitz import Grid
from allmlp.errors import UserError
from allmlp.layers.head import ClassifierHead
from allmlp.layers.pool import MeanPool
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec

SQUARES, BATCH_SIZE = 64, 16
"""The largest number of squares of an image that are occluded, and how many in one batch."""


class Saliency(NamedTuple):
    """Maps over the patches of one image, h w each."""

    label: int
    """The predicted class, which the maps explain."""
    probability: float
    occlusion: Tensor
    """log p - log p(without the patch), in nats: positive if the patch supports the class."""
    gradient: Tensor
    """|dz / d patch| of the class logit z, per standard deviation of the pixels."""
    class_map: Tensor | None
    """The class logit of each patch, whose mean is the model's logit; None for a model without such logits."""


def saliency(model: Model, images: Tensor, squares: int = SQUARES) -> list[Saliency]:
    """All maps of each image; the images are normalized (0 is the mean color)."""
    with torch.inference_mode():
        probabilities = class_logits(model, images).float().softmax(1)
    labels = probabilities.argmax(1)
    explained = []
    # One by one: the gradient keeps every activation of a deep model.
    for image, label, probability in zip(images.split(1), labels.split(1), probabilities.amax(1).tolist()):
        maps = class_maps(model, image, label)
        occluded = occlusion(model, image[0], int(label), squares)
        slope = gradient(model, image, label)[0]
        explained.append(Saliency(int(label), probability, occluded, slope, None if maps is None else maps[0]))
    return explained


def class_logits(model: Model, images: Tensor) -> Tensor:
    logits, spec = model(images), model.spec
    if logits.dim() != 2 or logits.shape[1] < 2 or not spec.has_head:
        raise UserError("the model outputs no class scores: there is no prediction to explain")
    return logits


def patch_size(spec: ModelSpec) -> tuple[int, int]:
    """The patches of the stem; for a network without one, squares of the smallest size from 16 pixels that fits."""
    if isinstance(spec, Encoder) and isinstance(spec.stem, PatchEmbed):
        return spec.stem.patch_size
    if spec.input_size is None:
        raise UserError(f"the model reads {spec.input_spec}, not images")
    height, width = (next((n for n in range(min(16, side), side) if side % n == 0), side) for side in spec.input_size)
    return height, width


def patch_grid(spec: ModelSpec) -> Grid:
    (height, width), (rows, columns) = spec.input_size or (0, 0), patch_size(spec)
    return height // rows, width // columns


def occlusion_squares(grid: Grid, most: int = SQUARES) -> Tensor:
    """The square that each patch is occluded with, h w: as few patches per square as give at most `most` squares."""
    side = next(n for n in range(1, max(grid) + 1) if math.ceil(grid[0] / n) * math.ceil(grid[1] / n) <= max(most, 1))
    rows, columns = (torch.arange(size) // side for size in grid)
    return rows[:, None] * math.ceil(grid[1] / side) + columns[None, :]


@torch.inference_mode()
def occlusion(model: Model, image: Tensor, label: int, squares: int = SQUARES) -> Tensor:
    """The log-probability that the class loses when a patch is occluded, h w (Zeiler and Fergus, 2014).

        map[i] = log p(label | x) - log p(label | x with square i of the mean color)

    Patches of one square get the same value; see `occlusion_squares`.
    """
    patch, which = patch_size(model.spec), occlusion_squares(patch_grid(model.spec), squares)
    pixels = which.repeat_interleave(patch[0], 0).repeat_interleave(patch[1], 1).to(image.device)
    numbers = torch.arange(int(which.max()) + 1, device=image.device)
    kept = pixels != numbers[:, None, None, None]  # n 1 h w
    variants = [torch.where(part, image, image.new_zeros(())) for part in kept.split(BATCH_SIZE)]
    logs = [class_logits(model, part).float().log_softmax(1)[:, label] for part in (image[None], *variants)]
    return (logs[0] - torch.cat(logs[1:])).cpu()[which]


def gradient(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """The norm of the class logit's gradient in each patch, b h w (Simonyan et al., 2014).

    map[i] = sqrt(sum over the pixels and colors of patch i of (dz_label / dx)^2)
    """
    images = images.detach().clone().requires_grad_()
    logits = class_logits(model, images)
    (slope,) = torch.autograd.grad(logits.gather(1, labels[:, None]).sum(), images)
    (rows, columns), (height, width) = patch_grid(model.spec), patch_size(model.spec)
    parts = slope.unflatten(3, (columns, width)).unflatten(2, (rows, height))  # b c rows h columns w
    return parts.square().sum((1, 3, 5)).sqrt().cpu()


@torch.inference_mode()
def class_maps(model: Model, images: Tensor, labels: Tensor) -> Tensor | None:
    """The class logit of every patch's final features, b h w (class activation maps; Zhou et al., 2016).

        z = W mean_i(X[i]) + b = mean_i(W X[i] + b),   map[i] = W_label X[i] + b_label

    Exact for models with mean pooling and a linear classifier; None for the others. In a model with stages, a patch has
    the logit of the token into which it was merged.
    """
    spec = model.spec
    if not (isinstance(model, EncoderModel) and isinstance(spec.pool, MeanPool)):
        return None
    if not isinstance(spec.head, ClassifierHead):
        return None
    assert model.head is not None, "a spec with a head builds one"
    grid, merged = patch_grid(spec), spec.build_contexts[-1].grid or (1, 1)
    logits = model.head(model.forward_features(images))[:, -merged[0] * merged[1] :]  # b s k
    class_map = logits.gather(2, labels[:, None, None].expand(-1, logits.shape[1], 1)).squeeze(2).unflatten(1, merged)
    for axis in (0, 1):
        factor = math.prod(stage.merge.patch_size[axis] for stage in spec.stages if stage.merge)
        class_map = class_map.index_select(1 + axis, torch.arange(grid[axis], device=class_map.device) // factor)
    return class_map.cpu()
