"""Conversion of a trained model for fast inference: the same outputs with fewer passes over memory."""

from __future__ import annotations

import torch

from allmlp.errors import UserError, suggest_keywords
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.encoder import is_supported
from allmlp.inference.gpu import FP8, GpuFastEncoder
from allmlp.inference.model import FastModel, UnfusedModel
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model


@suggest_keywords
def fast(model: Model, dtype: torch.dtype | None = None) -> FastModel:
    """Return a module for inference with the outputs of `model`, by default in bfloat16 on a GPU, float32 on a CPU.

        fast = allmlp.fast(model.eval().cuda())
        logits = fast(images)

    The weights are those of this moment, copied: convert again after changing the model's, or to change device or
    dtype. The blocks of Mixer, ResMLP and gMLP are fused; other models keep theirs and are compiled on a GPU. With
    torch.float8_e4m3fn the channel MLPs of a Mixer run in fp8 on a GPU that supports it: faster still, but no longer
    within twice bfloat16's error.
    """
    if not isinstance(model, EncoderModel):
        raise UserError(f"fast() takes an encoder of this library, not a {type(model).__name__}")
    on_gpu = model.device.type == "cuda"
    if fp8 := dtype == FP8:
        if not on_gpu or torch.cuda.get_device_capability(model.device) < (8, 9):
            raise UserError("fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell)")
        if not is_supported(model.spec):
            raise UserError("fp8 is only for Mixer models: omit dtype to use bfloat16")
    if dtype is None or fp8:
        dtype = torch.bfloat16 if on_gpu else torch.float32
    if not is_supported(model.spec):
        return UnfusedModel(model, dtype)
    return GpuFastEncoder(model, dtype, fp8) if on_gpu else CpuFastEncoder(model, dtype)
