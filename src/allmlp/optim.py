"""Optimizer specs and parameter groups: weight decay, layer-wise learning rates, AdamW, SGD, Adagrad, LAMB and Muon."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from allmlp.device import default_dtype
from allmlp.layers.block import BlockLayer
from allmlp.layers.mixers.attention import RelativePositionBiasLayer
from allmlp.layers.stem import LearnedPositionsLayer
from allmlp.spec import NonNegative, Rate, Spec

BLOCK_PATHS = re.compile(r".*\bblocks\.\d+(?=\.)"), re.compile(r".*?\b(?:layers?|layer\d+)\.\d+(?=\.)")
"""Paths of the blocks in networks of other packages, named "blocks" or "layers"."""
POSITIONS = re.compile(r"\bpos(ition)?_embed|\brelative_position_bias_table$")


class Optim(Spec, abstract=True):
    """`lr` is the peak learning rate; `weight_decay` is decoupled and scaled by the learning rate, except that SGD and
    Adagrad add it to the gradient.

    Norms, Affine, LayerScale, biases, Toeplitz diagonals and position embeddings are not decayed. With `layer_decay`
    below 1 the learning rate of each block is that factor times the rate of the block above it (fine-tuning).
    """

    lr: NonNegative = 1e-3
    weight_decay: NonNegative = 0.05
    layer_decay: Rate = 1.0
    vector_lr_scale: NonNegative = 1.0
    """Factor on the learning rate of one-dimensional parameters: norms, Affine, LayerScale, biases and diagonals."""
    weight_decay_end: NonNegative | None = None
    """Final weight decay, reached along half a cosine; None keeps it constant."""

    capturable: ClassVar[bool] = False
    """Whether a step can be captured in a CUDA graph."""

    def weight_decay_at(self, progress: float) -> float:
        last = self.weight_decay if self.weight_decay_end is None else self.weight_decay_end
        return last + (self.weight_decay - last) * (1 + math.cos(math.pi * progress)) / 2

    def build(self, module: nn.Module) -> Optimizer:
        raise NotImplementedError


class AdamW(Optim):
    capturable: ClassVar[bool] = True
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: NonNegative = 1e-8

    def build(self, module: nn.Module) -> Optimizer:
        groups = parameter_groups(module, self)
        options: dict[str, Any] = {"betas": self.betas, "eps": self.eps}
        return torch.optim.AdamW(groups, lr=self.lr, fused=True, capturable=on_gpu(module), **options)


class Sgd(Optim):
    momentum: Rate = 0.9
    nesterov: bool = True

    def build(self, module: nn.Module) -> Optimizer:
        groups = parameter_groups(module, self)
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=nesterov, fused=True)


class Adagrad(Optim):
    """The optimizer of ResMLP's translation experiments."""

    eps: NonNegative = 1e-10

    def build(self, module: nn.Module) -> Optimizer:
        return torch.optim.Adagrad(parameter_groups(module, self), lr=self.lr, eps=self.eps, foreach=True)


class Lamb(Optim):
    """Adam with a layer-wise trust ratio: each update is scaled to the norm of its weights (You et al., 2019)."""

    capturable: ClassVar[bool] = True
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: NonNegative = 1e-6
    max_grad_norm: NonNegative | None = 1.0
    """Global gradient norm is clipped to this before the moment estimates."""

    def build(self, module: nn.Module) -> Optimizer:
        return LambOptimizer(parameter_groups(module, self), self)


class Muon(Optim):
    """Orthogonalized Nesterov momentum for matrices inside blocks (Jordan et al., 2024), AdamW for the rest.

        M = momentum M + G,   W -= lr 0.2 sqrt(max(W.shape)) orthogonalize(G + momentum M)

    The factor matches the RMS of AdamW's updates, so both share one learning rate
    (`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`). Unlike torch's, it batches equal shapes, can be captured in a
    CUDA graph, and iterates in float32 on a CPU instead of bfloat16: there the directions differ by bfloat16 rounding,
    up to a tenth of a step.
    """

    capturable: ClassVar[bool] = True
    momentum: Rate = 0.95
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: NonNegative = 1e-8

    def build(self, module: nn.Module) -> Optimizer:
        return MuonOptimizer(parameter_groups(module, self, muon=True), self)


# --- parameter groups ---------------------------------------------------------------------------------


def parameter_groups(module: nn.Module, spec: Optim, muon: bool = False) -> list[dict[str, Any]]:
    """Group parameters by weight decay, learning rate and update rule.

    On a GPU, learning rates and step counts are tensors, so that a step can be captured in a CUDA graph.
    """
    capturable = spec.capturable and on_gpu(module)
    numbers, depth = layer_numbers(module)
    hidden = hidden_matrices(module) if muon else set()
    undecayed = {id(weight) for weight in position_embeddings(module)}
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            decays = not is_vector(weight) and id(weight) not in undecayed
            factor = spec.layer_decay ** (depth + 1 - numbers[name])
            factor *= spec.vector_lr_scale if is_vector(weight) else 1.0
            groups.setdefault((decays, factor, id(weight) in hidden), []).append(weight)
    return [
        {
            "params": weights,
            "weight_decay": spec.weight_decay if decays else 0.0,
            "decays": decays,
            "lr": torch.tensor(spec.lr * factor, device=weights[0].device) if capturable else spec.lr * factor,
            "peak_lr": spec.lr * factor,
            "muon": is_muon,
            "capturable": capturable,
        }
        for (decays, factor, is_muon), weights in groups.items()
    ]


def is_vector(weight: Tensor) -> bool:
    """Whether a parameter has one axis; in other packages, Affine and class tokens have the shape (1, 1, C)."""
    return weight.dim() < 2 or (weight.dim() > 2 and weight.numel() == weight.shape[-1])


def on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).is_cuda


def layer_numbers(module: nn.Module) -> tuple[dict[str, int], int]:
    """Depth of the trained parameters for layer decay, and the number of blocks: 0 is the stem, 1 to depth are the
    blocks, depth + 1 norm, pool and head.
    """
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    if not any(isinstance(child, BlockLayer) for child in module.modules()):
        return numbers_in_order(names)
    depth = max((block_number(name) for name, _ in module.named_parameters()), default=0)
    return {name: layer_number(name, depth) for name in names}, depth


def numbers_in_order(names: list[str]) -> tuple[dict[str, int], int]:
    """Like `layer_numbers`, for networks with other names, by the order of the parameters: those before the first block
    belong to the stem, those between blocks to the next block. Without blocks all have the same depth.
    """
    inner, outer = BLOCK_PATHS
    path = inner if any(map(inner.match, names)) else outer
    blocks, numbers = dict[str, int](), dict[str, int]()
    for name in names:
        match = path.match(name)
        following = len(blocks) + 1 if blocks else 0
        numbers[name] = blocks.setdefault(match[0], len(blocks) + 1) if match else following
    return (numbers, len(blocks)) if blocks else (dict.fromkeys(names, 1), 0)


def block_number(name: str) -> int:
    """Number of a parameter's block, from 1; 0 outside the blocks. A merge belongs to the block after it."""
    match = re.search(r"\b(?:blocks|merges)\.(\d+)\.", name)
    return int(match[1]) + 1 if match else 0


def layer_number(name: str, depth: int) -> int:
    """Depth of a parameter for layer decay: 0 stem, 1 to depth blocks, depth + 1 norm, pool and head."""
    if "stem." in name:
        return 0
    return block_number(name) or depth + 1


def position_embeddings(module: nn.Module) -> Iterable[Tensor]:
    for child in module.modules():
        if isinstance(child, (LearnedPositionsLayer, RelativePositionBiasLayer)):
            yield child.weight
    # In networks of other packages they are found by name.
    yield from (weight for name, weight in module.named_parameters() if POSITIONS.search(name))


def hidden_matrices(module: nn.Module) -> set[int]:
    """Ids of the matrices inside blocks: no embeddings, classifier or patch projection."""
    numbers, depth = layer_numbers(module)
    weights, positions = dict(module.named_parameters()), {id(weight) for weight in position_embeddings(module)}
    matrices = [weights[name] for name, number in numbers.items() if 1 <= number <= depth and weights[name].dim() == 2]
    return {id(weight) for weight in matrices} - positions


def set_lr(optimizer: Optimizer, factor: float, weight_decay: float) -> None:
    """Set the learning rate of every group to `factor` times its peak, and the weight decay of groups that decay."""
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
        lr = group["peak_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


# --- optimizers that torch lacks, or that must run batched and captured ---------------------------------------


class LambOptimizer(Optimizer):
    def __init__(self, groups: list[dict[str, Any]], spec: Lamb) -> None:
        super().__init__(groups, {"lr": spec.lr})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if self.spec.max_grad_norm:
            parameters = [weight for group in self.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.spec.max_grad_norm, foreach=True)
        for group in self.param_groups:
            weights, gradients = with_gradients(group["params"])
            if not weights:
                continue
            update = adam(self, weights, gradients, self.spec)
            if group["weight_decay"]:
                torch._foreach_add_(update, weights, alpha=group["weight_decay"])
                # As in the authors' code, only decayed parameters get a trust ratio.
                norms = zip(torch._foreach_norm(weights), torch._foreach_norm(update), strict=True)
                torch._foreach_mul_(update, [torch.where((w > 0) & (u > 0), w / u, 1.0) for w, u in norms])
            torch._foreach_mul_(update, -group["lr"])
            torch._foreach_add_(weights, update)


def with_gradients(weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]


def adam_state(optimizer: Optimizer, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """First moments, second moments and step counts, which start at 0."""
    for weight in weights:
        state = optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
    states = [optimizer.state[weight] for weight in weights]
    first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    return first, second, steps


def adam(optimizer: Optimizer, weights: list[Tensor], gradients: list[Tensor], spec: Lamb) -> list[Tensor]:
    """Adam's update direction: m / (sqrt(v) + eps) with bias-corrected moments."""
    first, second, steps = adam_state(optimizer, weights)
    torch._foreach_add_(steps, 1)
    t = steps[0]
    torch._foreach_lerp_(first, gradients, 1 - spec.betas[0])
    torch._foreach_mul_(second, spec.betas[1])
    torch._foreach_addcmul_(second, gradients, gradients, 1 - spec.betas[1])
    scale = list(torch._foreach_sqrt(second))
    torch._foreach_div_(scale, (1 - spec.betas[1] ** t).sqrt())
    torch._foreach_add_(scale, spec.eps)
    update = list(torch._foreach_div(first, scale))
    torch._foreach_div_(update, 1 - spec.betas[0] ** t)
    return update


class MuonOptimizer(Optimizer):
    def __init__(self, groups: list[dict[str, Any]], spec: Muon) -> None:
        super().__init__(groups, {"lr": spec.lr})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients = with_gradients(group["params"])
            if weights:
                (self.step_muon if group["muon"] else self.step_adamw)(weights, gradients, group)

    def step_adamw(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        first, second, steps = adam_state(self, weights)
        (beta1, beta2), fixed = self.spec.betas, {"fused": True, "amsgrad": False, "maximize": False}
        rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": self.spec.eps}
        adamw(weights, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, **rates, **fixed)

    def step_muon(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        lr = group["lr"]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_mul_(momenta, self.spec.momentum)
        torch._foreach_add_(momenta, gradients)
        updates = torch._foreach_add(gradients, momenta, alpha=self.spec.momentum)
        # A stack of identical blocks has a handful of shapes: one batched iteration for each.
        by_shape: dict[torch.Size, list[int]] = {}
        for index, weight in enumerate(weights):
            by_shape.setdefault(weight.shape, []).append(index)
        for shape, indices in by_shape.items():
            directions = orthogonalize(torch.stack([updates[index] for index in indices]))
            directions *= -0.2 * math.sqrt(max(shape)) * lr
            torch._foreach_add_([weights[index] for index in indices], list(directions.unbind()))


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrices by Newton-Schulz iterations on a batch, n r c."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(default_dtype(x.device)) if x.is_cuda else x  # normalized before: small gradients vanish in float16
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    # Contiguous also where x is turned: torch adds lists of tensors in one kernel only if their strides agree.
    return torch.empty_like(matrices).copy_(x.mT if tall else x)
