"""Optimisers: which parameters decay, how fast each layer learns, AdamW, SGD, LAMB and Muon."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allmlp.layers.mixers.attention import RelativeBias
from allmlp.layers.stem import LearnedPositions
from allmlp.spec import NonNegative, Rate, Spec


class Optim(Spec, abstract=True):
    """`lr` is the peak; `decay` is decoupled from the gradient and multiplied by the learning rate.

    No decay on norms, Affine, LayerScale, biases and positions. With `layer_decay` below 1 a block learns
    that factor slower than the one above it (fine-tuning).
    """

    lr: NonNegative = 1e-3
    decay: NonNegative = 0.05
    layer_decay: Rate = 1.0
    last_decay: NonNegative | None = None
    """Where the decay ends, along half a cosine from `decay`; constant if not given."""

    records: ClassVar[bool] = False
    """Whether a step on a GPU can be recorded as a CUDA graph."""

    def decay_at(self, progress: float) -> float:
        last = self.decay if self.last_decay is None else self.last_decay
        return last + (self.decay - last) * (1 + math.cos(math.pi * progress)) / 2

    def build(self, module: nn.Module) -> Optimizer:
        raise NotImplementedError


class AdamW(Optim):
    records: ClassVar[bool] = True
    beta1: Rate = 0.9
    beta2: Rate = 0.999
    eps: NonNegative = 1e-8

    def build(self, module: nn.Module) -> Optimizer:
        groups = parameter_groups(module, self)
        options: dict[str, Any] = {"betas": (self.beta1, self.beta2), "eps": self.eps}
        return torch.optim.AdamW(groups, lr=self.lr, fused=True, capturable=on_gpu(module), **options)


class Sgd(Optim):
    momentum: Rate = 0.9
    nesterov: bool = True

    def build(self, module: nn.Module) -> Optimizer:
        groups = parameter_groups(module, self)
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=nesterov, fused=True)


class Adagrad(Optim):
    """For ResMLP's translation recipe."""

    eps: NonNegative = 1e-10

    def build(self, module: nn.Module) -> Optimizer:
        return torch.optim.Adagrad(parameter_groups(module, self), lr=self.lr, eps=self.eps, foreach=True)


class Lamb(Optim):
    """Adam whose step is scaled, matrix by matrix, to the size of the weights (You et al., 2019)."""

    records: ClassVar[bool] = True
    beta1: Rate = 0.9
    beta2: Rate = 0.999
    eps: NonNegative = 1e-6
    clip: NonNegative | None = 1.0
    """Largest norm of all gradients together, before the moments."""

    def build(self, module: nn.Module) -> Optimizer:
        return LambOptimizer(parameter_groups(module, self), self)


class Muon(Optim):
    """Momentum made orthogonal for the hidden matrices (Jordan et al., 2024), AdamW for everything else.

        M = momentum M + G,   W -= lr 0.2 sqrt(max(W.shape)) orthogonal(G + momentum M)

    The factor gives steps of AdamW's size, so both share one learning rate.
    """

    records: ClassVar[bool] = True
    momentum: Rate = 0.95
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: NonNegative = 1e-8

    def build(self, module: nn.Module) -> Optimizer:
        return MuonOptimizer(parameter_groups(module, self, muon=True), self)


# --- parameter groups ---------------------------------------------------------------------------------


def parameter_groups(module: nn.Module, spec: Optim, muon: bool = False) -> list[dict[str, Any]]:
    """Parameters with equal decay, learning rate and update rule, together.

    On a GPU learning rates and step counts are tensors, so that a step can be recorded.
    """
    tensors = spec.records and on_gpu(module)
    depth = max((block_number(name) for name, _ in module.named_parameters()), default=0)
    hidden = hidden_matrices(module) if muon else set()
    fixed = {id(weight) for weight in positions(module)}
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            decays = weight.dim() >= 2 and id(weight) not in fixed
            factor = spec.layer_decay ** (depth + 1 - layer_number(name, depth))
            groups.setdefault((decays, factor, id(weight) in hidden), []).append(weight)
    return [
        {
            "params": weights,
            "weight_decay": spec.decay if decays else 0.0,
            "decays": decays,
            "lr": torch.tensor(spec.lr * factor, device=weights[0].device) if tensors else spec.lr * factor,
            "peak": spec.lr * factor,
            "muon": is_muon,
            "capturable": tensors,
        }
        for (decays, factor, is_muon), weights in groups.items()
    ]


def on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).is_cuda


def block_number(name: str) -> int:
    found = re.search(r"\bblocks\.(\d+)\.", name)
    return int(found[1]) + 1 if found else 0


def layer_number(name: str, depth: int) -> int:
    """0 for the stem, 1.. for the blocks, the last for norm, pool and head."""
    if "stem." in name:
        return 0
    return block_number(name) or depth + 1


def positions(module: nn.Module) -> Iterable[Tensor]:
    for child in module.modules():
        if isinstance(child, (LearnedPositions, RelativeBias)):
            yield child.weight


def hidden_matrices(module: nn.Module) -> set[int]:
    """Matrices inside the blocks: neither tables nor the classifier nor the patch stem."""
    return {id(weight) for name, weight in module.named_parameters() if block_number(name) and weight.dim() == 2}


def set_rates(optimizer: Optimizer, factor: float, decay: float) -> None:
    """The learning rate as a factor of each group's peak, and the decay of the groups that have one."""
    for group in optimizer.param_groups:
        group["weight_decay"] = decay if group["decays"] else 0.0
        lr = group["peak"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


# --- the two that torch has not, or not fast enough -------------------------------------------------------


class LambOptimizer(Optimizer):
    def __init__(self, groups: list[dict[str, Any]], spec: Lamb) -> None:
        super().__init__(groups, {"lr": spec.lr})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if self.spec.clip:
            everything = [weight for group in self.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(everything, self.spec.clip, foreach=True)
        for group in self.param_groups:
            weights, gradients = with_gradients(group["params"])
            if not weights:
                continue
            update = adam(self, weights, gradients, self.spec)
            if group["weight_decay"]:
                torch._foreach_add_(update, weights, alpha=group["weight_decay"])
                # The trust ratio is for the decayed matrices only, as in the paper's code.
                sizes, steps = torch._foreach_norm(weights), torch._foreach_norm(update)
                trust = [
                    torch.where((size > 0) & (length > 0), size / length, 1.0)
                    for size, length in zip(sizes, steps, strict=True)
                ]
                torch._foreach_mul_(update, trust)
            descend(weights, update, group["lr"])


def descend(weights: list[Tensor], update: list[Tensor], lr: float | Tensor) -> None:
    torch._foreach_mul_(update, -lr)
    torch._foreach_add_(weights, update)


def with_gradients(weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]


def adam(optimizer: Optimizer, weights: list[Tensor], gradients: list[Tensor], spec: Lamb | Muon) -> list[Tensor]:
    """Adam's direction, mean(g) / (sqrt(mean(g^2)) + eps) with both means free of their start at zero."""
    for weight in weights:
        state = optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
    states = [optimizer.state[weight] for weight in weights]
    first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    torch._foreach_add_(steps, 1)
    t = steps[0]
    torch._foreach_lerp_(first, gradients, 1 - spec.beta1)
    torch._foreach_mul_(second, spec.beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - spec.beta2)
    scale = list(torch._foreach_sqrt(second))
    torch._foreach_div_(scale, (1 - spec.beta2**t).sqrt())
    torch._foreach_add_(scale, spec.eps)
    update = list(torch._foreach_div(first, scale))
    torch._foreach_div_(update, 1 - spec.beta1**t)
    return update


class MuonOptimizer(Optimizer):
    def __init__(self, groups: list[dict[str, Any]], spec: Muon) -> None:
        super().__init__(groups, {"lr": spec.lr})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients = with_gradients(group["params"])
            if not weights:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            if group["muon"]:
                self.step_muon(weights, gradients, group["lr"])
            else:
                descend(weights, adam(self, weights, gradients, self.spec), group["lr"])

    def step_muon(self, weights: list[Tensor], gradients: list[Tensor], lr: float | Tensor) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_mul_(momenta, self.spec.momentum)
        torch._foreach_add_(momenta, gradients)
        updates = torch._foreach_add(gradients, momenta, alpha=self.spec.momentum)
        # Equal shapes go through one batched product: a stack of blocks has only a handful of shapes.
        shapes: dict[torch.Size, list[int]] = {}
        for number, weight in enumerate(weights):
            shapes.setdefault(weight.shape, []).append(number)
        for shape, numbers in shapes.items():
            steps = orthogonal(torch.stack([updates[number] for number in numbers]))
            chosen = [weights[number] for number in numbers]
            descend(chosen, list((0.2 * math.sqrt(max(shape)) * steps).unbind()), lr)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices, roughly: five Newton-Schulz steps on a batch, n r c."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if wide else x).to(matrices.dtype)
