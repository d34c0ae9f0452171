"""Published specifications of GPUs, and measured training and inference speeds."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from allmlp.errors import UserError

FILE = Path(__file__).with_name("speeds.json")


class Gpu(NamedTuple):
    name: str
    peak: float
    """Published dense bfloat16 FLOP/s."""
    memory: float
    """Bytes."""
    intra_node: float
    """Bytes per second to GPUs of the same node (NVLink)."""
    inter_node: float
    """Bytes per second to other nodes."""


GPUS = {
    "h200": Gpu("H200", 989.4e12, 141e9, 450e9, 50e9),
    "h100": Gpu("H100", 989.4e12, 80e9, 450e9, 50e9),
    "a100": Gpu("A100", 312e12, 80e9, 300e9, 25e9),
}
"""SXM versions. Between nodes: one 400 Gb/s port per GPU, 200 Gb/s for the A100."""

GPUS_PER_NODE = 8
"""GPUs of a node, linked by NVLink."""


class Speed(NamedTuple):
    """The measured speed of one model on one GPU."""

    model: str
    """A preset, NAME@SIZE at another input size, or a recipe that has its own model."""
    family: str
    modality: str
    """image or text."""
    task: str
    """training or inference."""
    macs: int
    """Multiply-adds of one example's forward pass."""
    batch_size: int
    throughput: float
    """Images or tokens per second."""
    flops: float
    """Model FLOP/s: 2 per multiply-add of the forward pass, 6 in training."""
    memory: int | None
    """Peak bytes."""
    gpu: str
    description: str
    source: str
    """A file in docs/."""
    eager: bool = False
    """Whether nothing was compiled or fused: slower than the model could be."""

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the fraction of the published peak."""
        return self.flops / GPUS[self.gpu].peak


RELATED = dict.fromkeys(("Transformer", "GPT-2", "Llama"), "BERT") | dict.fromkeys(
    ("BERT", "ViT", "Mixer", "ResMLP", "aMLP"), "gMLP"
)
"""Family -> family whose measurements are used instead; gMLP was trained on both images and text."""


@cache
def speeds() -> tuple[Speed, ...]:
    """All measured speeds, generated from the logs in docs/."""
    return tuple(Speed(**row) for row in json.loads(FILE.read_text(encoding="utf8")))


def training_speed(family: str, modality: str, macs: int) -> Speed:
    """Measured speed of the family's compiled model nearest in multiply-adds, or of a related family's."""
    name: str | None = family
    while name is not None:
        requested = "training", name, modality, False
        measured = [s for s in speeds() if (s.task, s.family, s.modality, s.eager) == requested]
        if measured:
            return min(measured, key=lambda speed: abs(math.log(speed.macs / macs)))
        name = RELATED.get(name)
    raise UserError(f"no measured MFU for training {family} on {modality}: pass --mfu")


def expected_flops(device: str, family: str, modality: str, macs: int, mfu: float | None) -> tuple[float | None, str]:
    """Expected FLOP/s of the GPU with this device name, and the source of the number."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name in device), None)
    if gpu is None:
        return None, f"the peak of {device} is unknown; --calibrate MODEL measures a speed"
    if mfu is not None:
        return mfu * gpu.peak, f"given MFU of {mfu:.1%} on {gpu.name}"
    speed = training_speed(family, modality, macs)
    return speed.mfu * gpu.peak, f"MFU of {speed.mfu:.1%} on {gpu.name}: {speed.description}"
