"""How large activations are from block to block, and how LayerScale weighs what the blocks add."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.place import place, slot
from allmlp.layers.block import Residual
from allmlp.layers.scale import LayerScaleLayer
from allmlp.models.foreign import ForeignModel
from allmlp.models.model import Model


class Activation(NamedTuple):
    name: str
    stack: str
    block: int | None
    slot: str
    """token, cross, channel or pool for a residual branch; stem; norm for the last one; part in a foreign network."""
    norm: float
    """|x| of what leaves, the mean over tokens and examples."""
    added: float | None
    """|y - x| of what a residual branch adds to its input; None where it is normed after the addition."""


class Scale(NamedTuple):
    """The size of a LayerScale's gamma over its channels."""

    name: str
    stack: str
    block: int | None
    slot: str
    mean: float
    smallest: float
    largest: float


def activations(model: Model, *inputs: Tensor) -> list[Activation]:
    """Norms at every depth while the model reads `inputs`, in the order of computation. Nothing is kept but numbers."""
    found: list[Activation] = []

    def watch(name: str, kind: str, branch: bool) -> Any:
        def hook(_module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            after = tensor_in(output)
            if after is None:
                return
            before = tensor_in(given[0]) if branch else None
            added = None if before is None else token_norm(after - before)
            found.append(Activation(name, *place(name), kind, token_norm(after), added))

        return hook

    with ExitStack() as stack, torch.inference_mode():
        for name, module, kind in watched(model):
            branch = isinstance(module, Residual) and module.order == "pre"
            stack.enter_context(module.register_forward_hook(watch(name, kind, branch)))
        model(*inputs)
    return found


def watched(model: Model) -> list[tuple[str, nn.Module, str]]:
    """The modules whose output is looked at."""
    if isinstance(model, ForeignModel):
        return [(path, model.get_submodule(path), "part") for path in model.parts().values()]
    places: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        outermost = name.removeprefix("encoder.").removeprefix("decoder.")
        if isinstance(module, Residual):
            places.append((name, module, slot(name)))
        elif outermost in ("stem", "norm"):
            places.append((name, module, outermost))
    return places


def tensor_in(output: Any) -> Tensor | None:
    """The activation in what a module returns: itself, or the first tensor of a tuple or of a named output."""
    if isinstance(output, Tensor):
        return output
    values = list(output.values()) if hasattr(output, "values") else output if isinstance(output, tuple) else []
    return next((value for value in values if isinstance(value, Tensor)), None)


def token_norm(x: Tensor) -> float:
    """The mean length of the tokens: b s c, or b c h w with channels second."""
    return float(x.float().norm(dim=1 if x.dim() == 4 else -1).mean())


def layer_scales(model: Model) -> list[Scale]:
    """|gamma| of every LayerScale over its channels, from the first block to the last."""
    found = []
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LayerScaleLayer):
                size = module.gamma.abs().float()
                numbers = float(size.mean()), float(size.min()), float(size.max())
                found.append(Scale(name, *place(name), slot(name), *numbers))
    return found
