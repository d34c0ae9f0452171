"""The norm of activations at every depth, and the size of LayerScale."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.module_path import branch, module_path
from allmlp.layers.block import Residual
from allmlp.layers.scale import LayerScaleLayer
from allmlp.models.external import ExternalModel
from allmlp.models.model import Model


class ActivationNorm(NamedTuple):
    name: str
    stack: str
    block: int | None
    branch: str
    """token, cross, channel or pool for a residual branch; stem; norm (the final one); part of an external network."""
    norm: float
    """Mean L2 norm of the output tokens, over tokens and examples."""
    added: float | None
    """Mean L2 norm of the output that a residual branch adds; None for post-norm, which normalizes the sum."""


class LayerScaleSize(NamedTuple):
    """|gamma| of a LayerScale over its channels."""

    name: str
    stack: str
    block: int | None
    branch: str
    mean: float
    smallest: float
    largest: float


def activation_norms(model: Model, *inputs: Tensor) -> list[ActivationNorm]:
    """Norms at every depth for `inputs`, in the order of computation. No activations are kept."""
    norms: list[ActivationNorm] = []
    channels_last = getattr(model, "channels_last", False)  # timm's Swin and others: b h w c

    def hook_for(name: str, kind: str, is_branch: bool) -> Any:
        def hook(_module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            after = first_tensor(output)
            if after is None:
                return
            before = first_tensor(given[0]) if is_branch else None
            added = None if before is None else token_norm(after - before)
            norm = token_norm(after, channels_last)
            norms.append(ActivationNorm(name, *module_path(name), kind, norm, added))

        return hook

    with ExitStack() as stack, torch.inference_mode():
        for name, module, kind in observed_modules(model):
            is_branch = isinstance(module, Residual) and module.order == "pre"
            stack.enter_context(module.register_forward_hook(hook_for(name, kind, is_branch)))
        model(*inputs)
    return norms


def observed_modules(model: Model) -> list[tuple[str, nn.Module, str]]:
    """The modules whose output is measured: name, module, kind."""
    if isinstance(model, ExternalModel):
        return [(path, model.get_submodule(path), "part") for path in model.parts().values()]
    modules: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        inside = name.removeprefix("encoder.").removeprefix("decoder.")
        if isinstance(module, Residual):
            modules.append((name, module, branch(name)))
        elif inside in ("stem", "norm"):
            modules.append((name, module, inside))
    # The stages of our ResNet are called block by block.
    return modules or [(path, last_of(model.get_submodule(path)), "part") for path in model.parts().values()]


def last_of(module: nn.Module) -> nn.Module:
    return module[-1] if isinstance(module, nn.Sequential) else module


def first_tensor(output: Any) -> Tensor | None:
    """The activation a module returns: the tensor itself, or the first of a tuple or of a named output."""
    if isinstance(output, Tensor):
        return output
    values = list(output.values()) if hasattr(output, "values") else output if isinstance(output, tuple) else []
    return next((value for value in values if isinstance(value, Tensor)), None)


def token_norm(x: Tensor, channels_last: bool = False) -> float:
    """The mean L2 norm of the tokens: b s c, b c h w, or b h w c if `channels_last`."""
    return float(x.float().norm(dim=1 if x.dim() == 4 and not channels_last else -1).mean())


def layer_scale_sizes(model: Model) -> list[LayerScaleSize]:
    """|gamma| of every LayerScale over its channels, from the first block to the last."""
    sizes = []
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LayerScaleLayer):
                size = module.gamma.abs().float()
                numbers = float(size.mean()), float(size.min()), float(size.max())
                sizes.append(LayerScaleSize(name, *module_path(name), branch(name), *numbers))
    return sizes
