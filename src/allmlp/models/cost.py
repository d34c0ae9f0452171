"""What a model costs: parameters and multiply-adds by part, without allocating a single weight.

All blocks of a stack are equal, so one block is built and counted on the meta device and multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from allmlp.layers.block import BlockLayer, Residual
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.foreign import ForeignModel
from allmlp.models.model import Model, ModelSpec


class Part(NamedTuple):
    name: str
    parameters: int
    macs: int


@dataclass(frozen=True)
class Cost:
    """The cost of one example at the model's full input size."""

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
        lines = [f"{'part':<24}{'parameters':>16}{'MACs':>20}"]
        return "\n".join(lines + [f"{name:<24}{count:>16,}{macs:>20,}" for name, count, macs in rows])


def measure(spec: ModelSpec) -> Cost:
    """Count `spec` on the meta device; the cost does not grow with the depth of the stack."""
    single, depths = one_block(spec)
    with torch.device("meta"):
        model = single.build().eval().requires_grad_(False)
        inputs = model.example()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*inputs)
    root = type(model).__name__
    flops = {name.removeprefix(f"{root}."): sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}  # a shared weight has one name here
    parts = []
    for label, path in shown(model).items():
        times = next((depth for stack, depth in depths.items() if path.startswith(stack)), 1)
        parameters = sum(size for name, size in sizes.items() if name.startswith(f"{path}."))
        macs = inside(path, model.get_submodule(path), flops) // 2
        parts.append(Part(label, parameters * times, macs * times))
    if isinstance(model, ForeignModel):
        known = Cost(tuple(parts))
        rest = sum(sizes.values()) - known.parameters, counter.get_total_flops() // 2 - known.macs
        parts.append(Part("other", *rest))
    return Cost(tuple(part for part in parts if part.parameters or part.macs))


def one_block(spec: ModelSpec) -> tuple[ModelSpec, dict[str, int]]:
    """The same model with one block per stack, and how often each block stands in the whole."""
    if isinstance(spec, Encoder):
        return spec.replace(depth=1), {"blocks": spec.depth}
    if isinstance(spec, EncoderDecoder):
        shallow = spec.replace(encoder=spec.encoder.replace(depth=1), decoder=spec.decoder.replace(depth=1))
        return shallow, {"encoder.blocks": spec.encoder.depth, "decoder.blocks": spec.decoder.depth}
    return spec, {}


OPENED = (Model, nn.ModuleList, BlockLayer, Residual, ChannelMlpLayer)


def shown(model: Model) -> dict[str, str]:
    """Label -> path of every part in the table."""
    if isinstance(model, ForeignModel):
        return model.parts()
    return {path.replace(".0", ""): path for path, _ in pieces(model)}


def pieces(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The parts a table shows: stem, what is in the one block, norm, pool, head."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, OPENED):
            parts += pieces(child, f"{prefix}{name}.")
        else:
            parts.append((f"{prefix}{name}", child))
    return parts


def inside(path: str, module: nn.Module, flops: dict[str, int]) -> int:
    """What was counted while `module` ran, or while its children did where it is never called itself."""
    if path in flops:
        return flops[path]
    return sum(inside(f"{path}.{name}", child, flops) for name, child in module.named_children())
