"""Conversion of a trained model for fast inference: the same outputs with fewer passes over memory."""

from __future__ import annotations

import logging

import torch

from allmlp.device import default_dtype
from allmlp.errors import UserError, suggest_keywords
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.encoder import is_supported
from allmlp.inference.gpu import FP8, GpuFastEncoder
from allmlp.inference.model import FastModel, UnfusedModel
from allmlp.kernels import has_kernels
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model

log = logging.getLogger(__name__)


@suggest_keywords
def fast(model: Model, dtype: torch.dtype | None = None) -> FastModel:
    """Return a module for inference with the outputs of `model`, by default in bfloat16 on a CUDA GPU, else in float32.

        fast = allmlp.fast(model.eval().cuda())
        logits = fast(images)

    The weights are those of this moment, copied: convert again after changing the model's, or to change device or
    dtype. The blocks of Mixer, ResMLP and gMLP are fused; other models keep theirs and are compiled on a GPU. With
    torch.float8_e4m3fn the channel MLPs of a Mixer run in fp8 on a GPU that supports it: faster still, but no longer
    within twice bfloat16's error.

    A GPU below compute capability 8.0 has no bfloat16, and our kernels do not run on it: there models are compiled, in
    float16. On other accelerators, such as mps, they are unchanged.
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
        dtype = default_dtype(model.device)
    if not is_supported(model.spec):
        return UnfusedModel(model, dtype)
    if on_gpu and not has_kernels(model.device):
        log.warning("the kernels of fast() need a GPU of compute capability 8.0: the model is compiled instead")
        return UnfusedModel(model, dtype)
    if model.device.type not in ("cpu", "cuda"):
        log.warning("fast() has no kernels for %s: the model runs as it is", model.device.type)
        return UnfusedModel(model, dtype)
    return GpuFastEncoder(model, dtype, fp8) if on_gpu else CpuFastEncoder(model, dtype)
