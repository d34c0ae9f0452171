"""A trained model made ready to answer quickly: the same numbers, fewer passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allmlp.errors import UserError
from allmlp.inference.cpu import FastOnCpu
from allmlp.inference.gpu import FastOnGpu
from allmlp.inference.lowered import can_lower, duplicate
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model


def fast(model: Model, dtype: torch.dtype | None = None) -> nn.Module:
    """A module that answers as `model` does, for inference: bfloat16 on a GPU and float32 on a CPU unless told.

    Its weights are copies of the model's as they are now. The blocks of Mixer, ResMLP and gMLP are rewritten; other
    models keep theirs and are compiled on a GPU.
    """
    if not isinstance(model, EncoderModel):
        raise UserError(f"fast() takes an encoder of this library, not a {type(model).__name__}")
    on_gpu = model.device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    if not can_lower(model.spec):
        copy = duplicate(model, dtype)
        compiled: Any = torch.compile(copy, mode="max-autotune")
        return compiled if on_gpu else copy
    return (FastOnGpu if on_gpu else FastOnCpu)(model, dtype)
