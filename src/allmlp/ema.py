"""Exponential moving average (EMA) of a model, evaluated and saved in place of the last weights.

    average += (1 - d) (model - average),   d = min(decay, (1 + t) / (10 + t)) at step t

With the warm-up of d, a short run forgets its initialization. Floating-point buffers, such as the running statistics of
BatchNorm, are averaged like the parameters; integer buffers are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from allmlp.models.model import Model


class ModelEma:
    """EMA of one model. If decay is None, `update` does nothing and `swap` yields the model unchanged."""

    def __init__(self, model: Model, decay: float | None) -> None:
        self.model, self.decay = model, decay
        self.source: dict[str, Tensor] = ema_tensors(model) if decay else {}
        self.average = {name: tensor.detach().clone() for name, tensor in self.source.items()}
        # A tensor, so that a step recorded as a CUDA graph reads the current value.
        self.one_minus_decay = torch.zeros((), device=model.device)

    def set_step(self, step: int) -> None:
        self.one_minus_decay.fill_(one_minus_decay_at(self.decay, step))

    @torch.no_grad()
    def update(self) -> None:
        average, source = split_dtypes(self.average), split_dtypes(self.source)
        if average[0]:
            difference = torch._foreach_sub(source[0], average[0])
            torch._foreach_mul_(difference, self.one_minus_decay)
            torch._foreach_add_(average[0], difference)
        overwrite(average[1], source[1])

    @contextmanager
    def swap(self) -> Iterator[Model]:
        """The model holding its averaged weights inside the `with` block."""
        source, average = list(self.source.values()), list(self.average.values())
        saved = [tensor.detach().clone() for tensor in source]
        overwrite(source, average)
        try:
            yield self.model
        finally:
            overwrite(source, saved)


def one_minus_decay_at(decay: float | None, step: int) -> float:
    return max(1 - (decay or 0.0), 9 / (10 + step))


def ema_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved with them."""
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def split_dtypes(tensors: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floating-point tensors, and all others; under FSDP, which does not shard buffers, the shards of this process."""
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors.values()]
    floating = [tensor for tensor in local if tensor.is_floating_point()]
    return floating, [tensor for tensor in local if not tensor.is_floating_point()]


@torch.no_grad()
def overwrite(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
