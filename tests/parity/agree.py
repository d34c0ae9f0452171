"""Comparison of two models: the same random weights in both, then the outputs and every gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
"""Tensors by name: the weights of a model, or their gradients."""


TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""The largest allowed difference, relative to the largest number."""


def weights(model: nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def buffers(model: nn.Module) -> Weights:
    """The running statistics of BatchNorm."""
    state = model.state_dict()
    return {name: state[name] for name, _ in model.named_buffers() if name in state}


def gradients(model: nn.Module) -> Weights:
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused, f"without a gradient: {unused}"
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw all weights and running statistics, so that none is zero or one and has no effect."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        sizes = [size for size in parameter.shape if size > 1]
        with torch.no_grad():
            parameter.copy_(0.5 + 0.3 * noise if len(sizes) < 2 else noise / math.prod(sizes[1:]) ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)


def relabel(tensors: Weights, rules: Mapping[str, str]) -> Weights:
    """Names rewritten by regular expressions, one after the other.

    Names that come to differ only in a #number at their end are parts of one tensor, stacked in that order.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules.items():
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901
        whole, _, part = name.partition("#")
        assert part not in parts.setdefault(whole, {}), f"two tensors are called {name}"
        parts[whole][part] = tensor
    sorted_parts = {whole: [found[part] for part in sorted(found)] for whole, found in parts.items()}
    return {whole: torch.cat(found) if len(found) > 1 else found[0] for whole, found in sorted_parts.items()}


def shaped(renamed: Weights, like: nn.Module) -> Weights:
    """The peer's tensors in our shapes, without its dimensions of size one."""
    own = dict(like.named_parameters())
    assert renamed.keys() == own.keys()
    return {name: tensor.reshape(own[name].shape) for name, tensor in renamed.items()}


def assert_same(actual: Tensor, expected: Tensor, what: str, scale: float | None = None) -> None:
    """Equal up to rounding, relative to the largest number (or to `scale`)."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    scale = scale or largest(expected)
    assert scale > 0, f"{what} is zero: the comparison would be empty"
    error = largest(actual - expected) / scale
    assert error <= TOLERANCE[expected.dtype], f"{what} differs by {error:.2e} of its largest number"


def assert_same_gradients(actual: Weights, expected: Weights) -> None:
    """Some parameters do nothing, such as the last bias of Mixer's token MLP, which every later LayerNorm
    removes: their gradient is rounding alone, so below a hundredth of the largest it is compared with that."""
    floor = max(map(largest, expected.values())) / 100
    for name, gradient in expected.items():
        assert_same(actual[name], gradient, f"the gradient of {name}", max(largest(gradient), floor))


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def assert_parity(
    ours: nn.Module,
    peer: nn.Module,
    rename: Callable[[Weights], Weights],
    *inputs: Tensor,
    ask: Callable[..., Any] = lambda model, *inputs: model(*inputs),
    ask_peer: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float64,
    train: bool = False,
) -> None:
    """Both models have the same outputs, gradients and, in training, running statistics.

    `rename` only renames, reshapes, permutes, splits and stacks, so it maps the peer's gradients to our names as it
    maps its weights.
    """
    ours, peer = ours.to(dtype).train(train), peer.to(dtype).train(train)
    randomize(peer)
    statistics = rename(buffers(peer)) if buffers(ours) else {}
    ours.load_state_dict(shaped(rename(weights(peer)), ours) | {name: statistics[name] for name in buffers(ours)})
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())

    mine = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    theirs = [x.detach().clone().requires_grad_(x.requires_grad) for x in mine]
    actual, expected = ask(ours, *mine), (ask_peer or ask)(peer, *theirs)
    assert_same(actual, expected, "the output")

    probe = torch.randn_like(expected)
    actual.backward(probe)
    expected.backward(probe)
    assert_same_gradients(gradients(ours), shaped(rename(gradients(peer)), ours))
    for x, y in zip(mine, theirs):
        if y.grad is not None:
            assert_same(x.grad, y.grad, "the gradient of the input")
    statistics = rename(buffers(peer)) if buffers(ours) else {}
    for name, tensor in buffers(ours).items():
        if tensor.is_floating_point():
            assert_same(tensor, statistics[name], name)
        else:
            assert torch.equal(tensor, statistics[name]), name
