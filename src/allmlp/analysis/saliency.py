"""Which patches a prediction rests on: hide them, follow the gradient, read the classes patch by patch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis.toeplitz import Grid
from allmlp.errors import UserError
from allmlp.layers.head import Classes
from allmlp.layers.pool import Mean
from allmlp.layers.stem import Patches
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec

SQUARES = 64
"""So many squares of a picture are hidden at most, one after the other."""


class Saliency(NamedTuple):
    """Maps over the patches of one picture, h w each."""

    label: int
    """The class that is asked about: the likeliest one."""
    probability: float
    occlusion: Tensor
    """log p - log p(without the patch), in nats: positive where the patch speaks for the class."""
    gradient: Tensor
    """|dz / d patch| for the class score z, in score per standard deviation of the pixels."""
    classes: Tensor | None
    """The class score of each patch alone; their mean is the model's score. None where the model has no such parts."""


def saliency(model: Model, images: Tensor, squares: int = SQUARES) -> list[Saliency]:
    """All three for each of the pictures, which are as the model reads them (0 is the mean colour)."""
    with torch.inference_mode():
        chances = class_scores(model, images).float().softmax(1)
    labels = chances.argmax(1)
    found = []
    # One by one: the gradient keeps every activation of a deep model.
    for image, label, chance in zip(images.split(1), labels.split(1), chances.amax(1).tolist()):
        maps = class_maps(model, image, label)
        hidden = occlusion(model, image[0], int(label), squares)
        slope = gradient(model, image, label)[0]
        found.append(Saliency(int(label), chance, hidden, slope, None if maps is None else maps[0]))
    return found


def class_scores(model: Model, images: Tensor) -> Tensor:
    scores = model(images)
    spec = model.spec
    if scores.dim() != 2 or (isinstance(spec, Encoder) and spec.head is None):
        raise UserError("the model has no classes: there is no prediction to explain")
    return scores


def patch_size(spec: ModelSpec) -> tuple[int, int]:
    """The patches of the stem; for a network without one, squares of the smallest size from 16 pixels that fits."""
    if isinstance(spec, Encoder) and isinstance(spec.stem, Patches):
        return spec.stem.patch
    if spec.image_size is None:
        raise UserError(f"the model reads {spec.reads}, not pictures")
    height, width = (next((n for n in range(min(16, side), side) if side % n == 0), side) for side in spec.image_size)
    return height, width


def patch_grid(spec: ModelSpec) -> Grid:
    (height, width), (rows, columns) = spec.image_size or (0, 0), patch_size(spec)
    return height // rows, width // columns


def hidden_squares(grid: Grid, most: int = SQUARES) -> Tensor:
    """Which square a patch is hidden with, h w: as few patches to a square as give at most `most` squares."""
    side = next(n for n in range(1, max(grid) + 1) if math.ceil(grid[0] / n) * math.ceil(grid[1] / n) <= max(most, 1))
    rows, columns = (torch.arange(size) // side for size in grid)
    return rows[:, None] * math.ceil(grid[1] / side) + columns[None, :]


@torch.inference_mode()
def occlusion(model: Model, image: Tensor, label: int, squares: int = SQUARES, batch: int = 16) -> Tensor:
    """What hiding each patch costs the class, h w (Zeiler and Fergus, 2014).

        map[i] = log p(label | x) - log p(label | x with square i of the mean colour)

    Patches of one square get the same number; see `hidden_squares`.
    """
    patch, which = patch_size(model.spec), hidden_squares(patch_grid(model.spec), squares)
    pixels = which.repeat_interleave(patch[0], 0).repeat_interleave(patch[1], 1).to(image.device)
    numbers = torch.arange(int(which.max()) + 1, device=image.device)
    kept = pixels != numbers[:, None, None, None]  # n 1 h w
    variants = [torch.where(part, image, image.new_zeros(())) for part in kept.split(batch)]
    logs = [class_scores(model, part).float().log_softmax(1)[:, label] for part in (image[None], *variants)]
    return (logs[0] - torch.cat(logs[1:])).cpu()[which]


def gradient(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """How strongly each patch moves the class score, b h w (Simonyan et al., 2014).

    map[i] = sqrt(sum over the pixels and colours of patch i of (dz_label / dx)^2)
    """
    images = images.detach().clone().requires_grad_()
    scores = class_scores(model, images)
    (slope,) = torch.autograd.grad(scores.gather(1, labels[:, None]).sum(), images)
    (rows, columns), (height, width) = patch_grid(model.spec), patch_size(model.spec)
    parts = slope.unflatten(3, (columns, width)).unflatten(2, (rows, height))  # b c rows h columns w
    return parts.square().sum((1, 3, 5)).sqrt()


@torch.inference_mode()
def class_maps(model: Model, images: Tensor, labels: Tensor) -> Tensor | None:
    """The class score of every patch's last features, b h w (class activation maps; Zhou et al., 2016).

        z = W mean_i(X[i]) + b = mean_i(W X[i] + b),   map[i] = W_label X[i] + b_label

    Exact for models that average their tokens and classify with one linear map; None for the others.
    """
    spec = model.spec
    if not (isinstance(model, EncoderModel) and isinstance(spec.pool, Mean) and isinstance(spec.head, Classes)):
        return None
    assert model.head is not None, "a spec with a head builds one"
    grid = patch_grid(spec)
    scores = model.head(model.forward_features(images))[:, -grid[0] * grid[1] :]  # b s k
    return scores.gather(2, labels[:, None, None].expand(-1, scores.shape[1], 1)).squeeze(2).unflatten(1, grid)
