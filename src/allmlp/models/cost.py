"""Parameters and multiply-adds of a model by part, counted on the meta device without allocating weights.

The blocks of a stack are identical, so one block is built, counted and multiplied by the depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from allmlp.models.model import ModelSpec


class Part(NamedTuple):
    name: str
    parameters: int
    macs: int


@dataclass(frozen=True)
class Cost:
    """The cost of one example at the model's full input size.

    >>> cost = allmlp.measure(allmlp.preset("mixer_b16").spec)
    >>> cost.parameters, cost.macs
    (59880472, 12601767936)
    """

    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def macs(self) -> int:
        """Multiply-adds of all matrix products and convolutions."""
        return sum(part.macs for part in self.parts)

    @property
    def head_parameters(self) -> int:
        return sum(part.parameters for part in self.parts if part.name.split(".")[-1] == "head")

    def __str__(self) -> str:
        rows = [*self.parts, Part("total", self.parameters, self.macs)]
        width = max(24, *(len(part.name) + 2 for part in rows))
        lines = [f"{'part':<{width}}{'parameters':>16}{'MACs':>20}"]
        return "\n".join(lines + [f"{name:<{width}}{count:>16,}{macs:>20,}" for name, count, macs in rows])


def measure(spec: ModelSpec) -> Cost:
    """Count the parameters and multiply-adds of `spec`; the time this takes does not depend on the depth.

    >>> print(allmlp.measure(allmlp.preset("gmlp_s16").spec))
    """
    return count(spec)


@cache  # a run needs it at its start and at its end
def count(spec: ModelSpec) -> Cost:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton where it is installed

    shallow, depths = spec.shallow()
    with torch.device("meta"):
        model = shallow.build().eval().requires_grad_(False)
        inputs = model.dummy_inputs()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*inputs)
    root = type(model).__name__
    flops = {name.removeprefix(f"{root}."): sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}  # lists a tied weight once
    parts, other_parameters, other_macs = [], sum(sizes.values()), counter.get_total_flops() // 2
    for label, path in model.parts().items():
        depth = next((len(numbers) for block, numbers in depths.items() if path.startswith(f"{block}.")), 1)
        parameters = sum(size for name, size in sizes.items() if name.startswith(f"{path}."))
        macs = count_flops(path, model.get_submodule(path), flops) // 2
        other_parameters, other_macs = other_parameters - parameters, other_macs - macs
        parts.append(Part(label, parameters * depth, macs * depth))
    parts.append(Part("other", other_parameters, other_macs))
    return Cost(tuple(part for part in parts if part.parameters or part.macs))


def count_flops(path: str, module: nn.Module, flops: dict[str, int]) -> int:
    """FLOPs counted in `module`, or in its children if it is never called itself."""
    if path in flops:
        return flops[path]
    return sum(count_flops(f"{path}.{name}", child, flops) for name, child in module.named_children())
