"""A package outside of allmlp: a token mixer, a model, data, a task, an optimizer, a recipe and a study."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allmlp import Encoder, Preset
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.layers import (
    Block,
    BuildContext,
    ChannelMlp,
    ClassifierHead,
    Context,
    MeanPool,
    PatchEmbed,
    TokenMixer,
)
from allmlp.optim import Optim, parameter_groups
from allmlp.run import Budget, Run
from allmlp.study.definition import Row, Study
from allmlp.tasks.classify import Classify


class TokenShift(TokenMixer):
    """Half of the channels come from the token before, without any parameter.

    f(X)[i] = [X[i, :C/2], X[i - distance, C/2:]]
    """

    distance: int = 1

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenShiftLayer(self.distance)


class TokenShiftLayer(nn.Module):
    token_roles: ClassVar[dict[str, Any]] = {}

    def __init__(self, distance: int) -> None:
        super().__init__()
        self.distance = distance

    def forward(self, x: Tensor, context: Context) -> Tensor:
        stay, move = x.chunk(2, dim=-1)
        return torch.cat([stay, move.roll(self.distance, dims=1)], dim=-1)


class Stripes(Data):
    """Images with a bright row (class 0) or a bright column (class 1)."""

    def load(self) -> ImageDataset:
        images, labels = torch.zeros(64, 3, 8, 8, dtype=torch.uint8), torch.arange(64) % 2
        for index in range(64):
            if labels[index]:
                images[index, :, :, index % 8] = 255
            else:
                images[index, :, index % 8] = 255
        split = InMemory(images, labels)
        return ImageDataset(split, split, ("row", "column"), (0.1,) * 3, (0.3,) * 3)


class ConfidentClassify(Classify):
    """Classification without label smoothing, whatever is set."""

    def check(self) -> None:
        object.__setattr__(self, "label_smoothing", 0.0)


class SignSgd(Optim):
    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Rprop(parameter_groups(module, self), lr=self.lr)


def shift(depth: int, width: int) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=PatchEmbed((8, 8), (2, 2)),
        block=Block(TokenShift(), channel=ChannelMlp(2 * width)),
        pool=MeanPool(),
        head=ClassifierHead(2),
    )


def shift_stripes() -> Run:
    """A few steps on stripes, to see that everything is found."""
    return Run(
        shift(2, 16), ConfidentClassify(), Stripes(), batch_size=16, budget=Budget(steps=6), optim=SignSgd(lr=1e-3)
    )


def shift_distances() -> Study:
    """One distance against two."""
    rows = {str(distance): Row("shift_stripes", {"model.block.token.distance": str(distance)}) for distance in (1, 2)}
    return Study("shift_distances", rows, compared="epochs", seeds=1)


PRESETS = {"shift_tiny": Preset(shift(2, 16), "Shift")}
RECIPES = (shift_stripes,)
STUDIES = (shift_distances,)
