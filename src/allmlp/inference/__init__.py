"""A trained model made ready to answer quickly: the same numbers, fewer passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allmlp.errors import UserError
from allmlp.inference.cpu import FastOnCpu
from allmlp.inference.gpu import EIGHT, FastOnGpu
from allmlp.inference.lowered import can_lower, duplicate
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model


def fast(model: Model, dtype: torch.dtype | None = None) -> nn.Module:
    """A module that answers as `model` does, for inference: bfloat16 on a GPU and float32 on a CPU unless told.

    Its weights are copies of the model's as they are now. The blocks of Mixer, ResMLP and gMLP are rewritten; other
    models keep theirs and are compiled on a GPU. With torch.float8_e4m3fn a Mixer's channel MLPs multiply 8-bit
    numbers, on a GPU that can: faster still, and no longer within twice bfloat16's error.
    """
    if not isinstance(model, EncoderModel):
        raise UserError(f"fast() takes an encoder of this library, not a {type(model).__name__}")
    on_gpu = model.device.type == "cuda"
    if eight := dtype == EIGHT:
        if not on_gpu or torch.cuda.get_device_capability(model.device) < (8, 9):
            raise UserError("8-bit products need a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell)")
        if not can_lower(model.spec):
            raise UserError("8 bits are for Mixer models: leave the type out for bfloat16")
    if dtype is None or eight:
        dtype = torch.bfloat16 if on_gpu else torch.float32
    if not can_lower(model.spec):
        copy = duplicate(model, dtype)
        compiled: Any = torch.compile(copy, mode="reduce-overhead")
        return compiled if on_gpu else copy
    return FastOnGpu(model, dtype, eight) if on_gpu else FastOnCpu(model, dtype)
