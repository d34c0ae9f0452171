"""Networks of other packages behind the interface of our own models."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.models.model import Model, ModelSpec, S
from allmlp.spec import Count, Size


class Foreign(ModelSpec, abstract=True):
    """An image classifier of another package by its name there, built from its configuration alone."""

    name: str
    classes: Count = 1000
    image: Size | None = None
    """None stands for the size the network was made for."""
    in_channels: Count = 3

    @property
    def native(self) -> tuple[int, int]:
        """The size the network was made for."""
        raise NotImplementedError

    @property
    def size(self) -> tuple[int, int]:
        return self.image or self.native

    @property
    def image_size(self) -> tuple[int, int]:
        return self.size

    @property
    def reads(self) -> str:
        return "x".join(map(str, self.size)) + " image"

    def pretrained(self) -> Trained:
        """The network with the weights its package publishes, from its cache or the network."""
        raise NotImplementedError


class Trained(NamedTuple):
    model: ForeignModel
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the pixels divided by 255, as the weights expect them."""
    crop: float = 1.0
    """The share of the short side that is kept."""


class ForeignModel(Model[S]):
    """Another package's network under `network`.

    Its state dict is complete and names every tensor once, so that it can be saved as safetensors and
    loaded into a network made on the meta device: buffers that the package computes anew are kept, and
    of a tensor with two names (BERT's embedding is also its output layer) only the first is.
    """

    network: Any

    def __init__(self, spec: S, network: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.network = network
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=True)
        self.tied = second_names(self)
        self.register_state_dict_post_hook(leave_out_tied)
        self.register_load_state_dict_pre_hook(fill_in_tied)
        self.register_load_state_dict_post_hook(tie)

    def parts(self) -> dict[str, str]:
        """What a cost table shows -> the module's path. What lies outside of them is counted as `other`."""
        raise NotImplementedError

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        spec = self.spec
        assert isinstance(spec, Foreign)
        return (torch.randn(batch, spec.in_channels, *spec.size, device=self.device, dtype=self.dtype),)


def flatten(features: Tensor, channels_last: bool = False) -> Tensor:
    """A map of features as tokens, b s c; tokens as they are."""
    if features.ndim != 4:
        return features
    return features.flatten(1, 2) if channels_last else features.flatten(2).transpose(1, 2)


def second_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a tensor -> its first."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: known for name, tensor in tensors.items() if (known := first.setdefault(id(tensor), name)) != name}


def leave_out_tied(model: ForeignModel[Any], state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in model.tied:
        del state[prefix + name]


def fill_in_tied(model: ForeignModel[Any], state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, first in model.tied.items():
        if prefix + first in state:
            state.setdefault(prefix + name, state[prefix + first])


def tie(model: ForeignModel[Any], _incompatible: Any) -> None:
    """Loading with assign=True makes two parameters of one."""
    for name, first in model.tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, attrgetter(first)(model))
