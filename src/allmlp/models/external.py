"""Networks of other packages behind the interface of this library's models."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.models.model import Model, ModelSpec, S
from allmlp.spec import Count, Size


class External(ModelSpec, abstract=True):
    """An image classifier of another package by its name there, built without weights."""

    name: str
    num_classes: Count = 1000
    img_size: Size | None = None
    """None is the network's default size."""
    in_chans: Count = 3

    @property
    def default_size(self) -> tuple[int, int]:
        """The image size of the network's configuration."""
        raise NotImplementedError

    @property
    def input_size(self) -> tuple[int, int]:
        return self.img_size or self.default_size

    def pretrained(self) -> PretrainedExternal:
        """The network with the weights that its package publishes, downloaded or from the cache."""
        raise NotImplementedError


class PretrainedExternal(NamedTuple):
    model: ExternalModel
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Standard deviation of pixels in [0, 1]."""
    crop_pct: float = 1.0
    """Fraction of the short side that is kept."""


class ExternalModel(Model[S]):
    """Another package's network as `network`.

    The state dict is complete and lists every tensor once, so that it can be saved as safetensors and loaded into a
    network built on the meta device: it includes non-persistent buffers, and a tensor with two names (BERT's embedding
    is also its output layer) only under the first.
    """

    network: Any

    def __init__(self, spec: S, network: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.network = network
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=True)
        self.tied = tied_names(self)
        self.register_state_dict_post_hook(drop_tied)
        self.register_load_state_dict_pre_hook(restore_tied)
        self.register_load_state_dict_post_hook(tie)

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        spec = self.spec
        assert isinstance(spec, External)
        return (torch.randn(batch_size, spec.in_chans, *spec.input_size, device=self.device, dtype=self.dtype),)


def flatten(features: Tensor, channels_last: bool = False) -> Tensor:
    """A feature map as tokens, b s c; tokens are returned unchanged."""
    if features.ndim != 4:
        return features
    return features.flatten(1, 2) if channels_last else features.flatten(2).transpose(1, 2)


def tied_names(model: nn.Module) -> dict[str, str]:
    """For each further name of a tied tensor, its first name."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {
        name: first_name
        for name, tensor in tensors.items()
        if (first_name := first.setdefault(id(tensor), name)) != name
    }


def drop_tied(model: ExternalModel[Any], state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in model.tied:
        del state[prefix + name]


def restore_tied(model: ExternalModel[Any], state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, first in model.tied.items():
        if prefix + first in state:
            state.setdefault(prefix + name, state[prefix + first])


def tie(model: ExternalModel[Any], _incompatible: Any) -> None:
    """Tie the tensors again that load_state_dict(assign=True) has separated."""
    for name, first in model.tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, attrgetter(first)(model))
