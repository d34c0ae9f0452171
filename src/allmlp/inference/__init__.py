"""Conversion of a trained model for fast inference: the same outputs with fewer passes over memory."""

from __future__ import annotations

import logging

import torch

from allmlp.device import as_dtype, default_dtype, warn_of_slow_format
from allmlp.errors import UserError, one_line, suggest_keywords
from allmlp.inference.capabilities import Capabilities, Engine, EngineChoice, choose
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.encoder import is_supported
from allmlp.inference.gpu import GpuFastEncoder
from allmlp.inference.gpu_fp8 import GpuFp8Encoder
from allmlp.inference.measurement import Times, keep, measured_key, read_kept, time_engines
from allmlp.inference.model import FastModel, UnfusedModel, with_plain_weights
from allmlp.kernels.unit_rows.reference import FP8
from allmlp.layers.stem import PatchEmbed
from allmlp.models.cost import measure as measure_cost
from allmlp.models.encoder import EncoderModel
from allmlp.models.grid import DynamicEncoderModel
from allmlp.models.model import Model, uncompiled
from allmlp.models.series_encoder import SeriesEncoderModel

SMALL_MACS = 5 * 10**9
log = logging.getLogger(__name__)


@suggest_keywords
def fast(
    model: Model, dtype: torch.dtype | None = None, *, measure: bool = False, batch_size: int | None = None
) -> FastModel:
    """Return a module for inference with the outputs of `model`, by default in bfloat16 on a CUDA GPU, else in float32.

    >>> fast = allmlp.fast(model.eval().cuda())
    >>> logits = fast(images)
    >>> print(fast.report())  # the chosen engine, and why

    Time-series models stay in float32 by default. The current weights are copied: convert again after changing the
    model's weights, or to change device or dtype. The engine is chosen by device and model (see
    `allmlp.inference.capabilities`): kernels of this library, fused matrix products, torch.compile, ONNX Runtime or
    plain PyTorch.

    `batch_size` is the usual number of examples in a call (default: 1 on a CPU, else 64); other sizes work too. On a
    CPU it affects the choice: with `batch_size=1`, a model of less than five billion multiply-adds runs in ONNX Runtime
    if the packages are installed (the export takes some seconds); for larger batches, fused products are used.

    With `measure`, all engines that can run the model on this machine are built and timed on batches of `batch_size`,
    which can take minutes, and the fastest is returned. The result is stored for later calls, with or without
    `measure`.

    With torch.float8_e4m3fn the channel MLPs of a Mixer, ResMLP, gMLP or aMLP run in fp8 on a GPU that supports it.
    With torch.int8 an image or time-series model on a CPU runs in ONNX Runtime with weights and activations of 8 bits.
    Both are less exact.
    """
    model, dtype = check_arguments(model, dtype, batch_size)
    if dtype == torch.int8:
        return int8(model)
    capabilities = Capabilities.of(model.device)
    if dtype == FP8:
        return fp8(model, capabilities)
    # Before normalization, a series far from 0 would lose its variation in 16 bits.
    dtype = dtype or (torch.float32 if isinstance(model, SeriesEncoderModel) else default_dtype(model.device))
    warn_of_slow_format(model.device, dtype)
    can_fuse = isinstance(model, EncoderModel) and is_supported(model.spec)
    is_text = isinstance(model, EncoderModel) and not isinstance(model.spec.stem, PatchEmbed)
    batch_size = batch_size or (1 if capabilities.device == "cpu" else 64)
    can_export = capabilities.onnx and dtype == torch.float32 and not is_text
    is_small = can_export and batch_size == 1 and measure_cost(model.spec).macs < SMALL_MACS
    choice = choose(capabilities, can_fuse, can_export, is_small)
    key = measured_key(model, dtype, batch_size)
    if times := read_kept(key):
        fastest = next((engine for engine in (choice.engine, *choice.alternatives) if engine == times.fastest), None)
        if fastest is not None:
            return build(fastest, model, dtype).chosen(measured(fastest, times, batch_size))
    if measure and choice.alternatives:
        return measured_fastest(model, dtype, choice, batch_size, key)
    if choice.engine != "kernels" and capabilities.device != "cpu" and can_fuse:
        log.warning("fast() uses %s: %s", choice.engine, choice.reason)
    try:
        return build(choice.engine, model, dtype).chosen(choice)
    except Exception as reason:  # from the exporter
        if choice.engine != "onnx":
            raise
        log.warning("fast() does not use ONNX Runtime: %s", one_line(reason))
        choice = choose(capabilities, can_fuse)
        return build(choice.engine, model, dtype).chosen(choice)


def int8(model: EncoderModel | SeriesEncoderModel) -> FastModel:
    if model.device.type != "cpu":
        raise UserError("int8 is for a CPU: move the model there, or use torch.float8_e4m3fn on a GPU")
    from allmlp.inference.onnx import OnnxModel

    return OnnxModel(model, int8=True).chosen(EngineChoice("onnx", "int8 was requested"))


def fp8(model: EncoderModel | SeriesEncoderModel, capabilities: Capabilities) -> FastModel:
    if capabilities.amd or capabilities.compute < (8, 9):
        raise UserError("fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper, Blackwell)")
    if not isinstance(model, EncoderModel) or not is_supported(model.spec, attention=True):
        raise UserError("fp8 is only for Mixer, ResMLP, gMLP and aMLP models: omit dtype to use bfloat16")
    return GpuFp8Encoder(model, default_dtype(model.device)).chosen(EngineChoice("kernels", "fp8 was requested"))


def check_arguments(
    model: Model, dtype: torch.dtype | None, batch_size: int | None
) -> tuple[EncoderModel | SeriesEncoderModel, torch.dtype | None]:
    """The model with plain weights, and the dtype."""
    model = uncompiled(model)
    if not isinstance(model, (EncoderModel, SeriesEncoderModel)):
        raise UserError(f"fast() takes an encoder of this library, not a {type(model).__name__}")
    if isinstance(model, DynamicEncoderModel):
        raise UserError("fast() takes a model of one image size: load or create it without dynamic=True")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(f"batch_size is a number of examples from 1 on, not {batch_size!r}")
    if dtype is not None and dtype not in (torch.int8, FP8):
        dtype = as_dtype(dtype)
    return with_plain_weights(model), dtype


def build(engine: Engine, model: EncoderModel | SeriesEncoderModel, dtype: torch.dtype) -> FastModel:
    if engine == "onnx":
        from allmlp.inference.onnx import OnnxModel  # and the packages that write ONNX files

        return OnnxModel(model)
    if engine in ("kernels", "fused"):
        assert isinstance(model, EncoderModel)
        return (GpuFastEncoder if engine == "kernels" else CpuFastEncoder)(model, dtype)
    return UnfusedModel(model, dtype, compiled=engine == "compiled")


def measured_fastest(
    model: EncoderModel | SeriesEncoderModel, dtype: torch.dtype, choice: EngineChoice, batch_size: int, key: str
) -> FastModel:
    (x,) = model.dummy_inputs(batch_size)
    built: dict[Engine, FastModel] = {}
    for engine in (choice.engine, *choice.alternatives):
        try:
            built[engine] = build(engine, model, dtype)
            built[engine](x)
        except Exception as reason:  # from compilers and exporters; the other engines remain
            if engine == choice.engine != "onnx":
                raise
            built.pop(engine, None)
            log.warning("fast() does not use %s: %s", engine, one_line(reason))
    times = time_engines({engine: lambda one=one: one(x) for engine, one in built.items()}, model.device)
    keep(key, times)
    fastest = min(built, key=lambda engine: times[engine])
    return built[fastest].chosen(measured(fastest, times, batch_size))


def measured(engine: Engine, times: Times, batch_size: int) -> EngineChoice:
    return EngineChoice(engine, f"the fastest here on batches of {batch_size}: {times}")
