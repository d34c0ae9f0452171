"""Low-rank adapters (LoRA; Hu et al., 2021) for the linear maps of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import cache, partialmethod
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from allmlp.data.sampler import Stream, mix_seed
from allmlp.errors import UserError
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.token_roles import token_parameters
from allmlp.models.model import Model, check_merged
from allmlp.spec import Count, NonNegative, Spec

LinearMap = nn.Linear | TokenProjection


class Lora(Spec):
    """Train a low-rank change of the linear maps, and the head; everything else is frozen.

        y = W x + (alpha / r) B A x,   A: r x inputs, uniform as a linear layer,   B: outputs x r, starts at zero

    The maps are those over channels, also of attention and of patches, and the matrices over tokens (not Toeplitz
    vectors). Computed as (W + (alpha / r) B A) x, so that fused operators and token matrices need no special code: this
    saves the memory of gradients and optimizer state, not of activations, and a step takes about as long as training
    all weights. `merge` adds the change to W, so that an ordinary model is saved. Frozen BatchNorm normalizes by its
    running statistics, also in training, and does not change them.
    """

    rank: Count = 8
    alpha: NonNegative = 16.0
    maps: Literal["all", "channel", "token"] = "all"
    """The maps with adapters: "token" are the matrices over tokens, "channel" all others."""

    def apply(self, model: Model, seed: int = 0, fresh: Collection[str] = ()) -> None:
        """Add adapters to `model`, in place. The weights named in `fresh` are trained as a whole, like the head."""
        check_merged(model)
        head = model.parts().get("head")
        trained = [*model.get_submodule(head).parameters()] if head is not None else []
        trained += [weight for name, weight in model.named_parameters() if name in fresh]
        maps = linear_maps(model, self.maps)
        adapted_maps = [module for module in maps if not any(module.weight is weight for weight in trained)]
        if not adapted_maps:
            raise UserError(f"lora finds no linear maps ({self.maps}) in {type(model.spec).__name__}")
        if self.rank > (largest := max(min(module.weight.shape) for module in adapted_maps)):
            raise UserError(f"lora.rank={self.rank} is above the rank of every map, at most {largest}: lower it")
        model.requires_grad_(False)
        for weight in trained:
            weight.requires_grad_(True)
        generator = torch.Generator().manual_seed(mix_seed(Stream.LORA_INIT, seed))
        for module in adapted_maps:
            adapt(module, self.rank, self.alpha / self.rank, generator)
        for norm in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
            if not any(weight.requires_grad for weight in norm.parameters()):
                norm.__class__ = frozen(type(norm))  # type: ignore[bad-argument-type]
                norm.eval()


def merge(model: nn.Module) -> None:
    """Replace the adapters by W + (alpha / r) B A, which gives an ordinary model again."""
    for module in [module for module in model.modules() if hasattr(module, "lora_a")]:
        assert isinstance(module, LinearMap)
        weight = nn.Parameter(module.weight.detach().clone())
        for name in ("base_weight", "lora_a", "lora_b"):
            delattr(module, name)
        module.__class__ = type(module).__mro__[1]
        module.weight = weight
    for norm in [module for module in model.modules() if isinstance(module, FrozenNorm)]:
        norm.__class__ = type(norm).__mro__[2]
        norm.train(model.training)


def linear_maps(model: Model, maps: Literal["all", "channel", "token"]) -> Iterator[LinearMap]:
    over_tokens = {p.full_name for p in token_parameters(model) if p.role not in ("attention", "channel")}
    for path, module in model.named_modules():
        if isinstance(module, LinearMap) and module.weight.dim() == 2:
            kind = "token" if f"{path}.weight" in over_tokens else "channel"
            if maps in ("all", kind):
                yield module


def adapt(module: LinearMap, rank: int, scale: float, generator: torch.Generator) -> None:
    weight = module.weight
    outputs, inputs = weight.shape
    start = torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)
    del module.weight
    module.register_parameter("base_weight", nn.Parameter(weight.detach(), requires_grad=False))
    module.register_parameter("lora_a", nn.Parameter(start.to(weight)))
    module.register_parameter("lora_b", nn.Parameter(weight.new_zeros(outputs, rank)))
    module.lora_scale = scale  # type: ignore[assignment]
    module.__class__ = adapted(type(module))  # type: ignore[bad-argument-type]


def reduce(module: nn.Module, make: Callable[[type[nn.Module]], type[nn.Module]], kind: type[nn.Module]) -> Any:
    """How to pickle a module whose class is made by `make`: pickle finds only classes that have a name in a file."""
    return empty, (make, kind), module.__dict__


def empty(make: Callable[[type[nn.Module]], type[nn.Module]], kind: type[nn.Module]) -> nn.Module:
    made = make(kind)
    return made.__new__(made)


class FrozenNorm(nn.Module):
    """BatchNorm in evaluation mode, whatever the mode of the model."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


@cache
def frozen(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {"__reduce__": partialmethod(reduce, frozen, kind)})


@cache
def adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `kind` with the weight W + (alpha / r) B A. All modules of a kind share one class, so that equal
    blocks stay equal for the compiler (torch.nn.utils.parametrize makes a class for each).
    """

    def weight(self: nn.Module) -> Tensor:
        return self.base_weight + self.lora_scale * (self.lora_b @ self.lora_a)  # type: ignore[operator]

    members = {"weight": property(weight), "__reduce__": partialmethod(reduce, adapted, kind)}
    return type(f"Lora{kind.__name__}", (kind,), members)
