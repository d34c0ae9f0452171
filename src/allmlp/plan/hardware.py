"""GPUs as their makers describe them, and the speeds that models of this library have reached on one."""

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
    """Dense bfloat16 operations per second, as published."""
    memory: float
    """Bytes."""
    inside: float
    """Bytes per second that it can send to others of its machine."""
    outside: float
    """Bytes per second that it can send to other machines."""


GPUS = {
    "h200": Gpu("H200", 989.4e12, 141e9, 450e9, 50e9),
    "h100": Gpu("H100", 989.4e12, 80e9, 450e9, 50e9),
    "a100": Gpu("A100", 312e12, 80e9, 300e9, 25e9),
}
"""SXM cards. Outside: a 400 Gb/s port for each GPU, 200 Gb/s for the A100."""

MACHINE = 8
"""GPUs that are linked inside."""


class Speed(NamedTuple):
    """What one model has reached on one GPU."""

    model: str
    """A name of the zoo, NAME@SIZE at another size of input, or a recipe that has its own."""
    family: str
    reads: str
    """image or text."""
    task: str
    """training or inference."""
    macs: int
    """Multiply-adds of one example's forward pass."""
    batch: int
    rate: float
    """Images or tokens per second."""
    flops: float
    """Useful operations per second: 2 for a multiply-add of the forward pass, 6 in training."""
    memory: int | None
    """Bytes, at most."""
    gpu: str
    what: str
    source: str
    """A file below docs/."""

    @property
    def share(self) -> float:
        """Of the published peak."""
        return self.flops / GPUS[self.gpu].peak


@cache
def speeds() -> tuple[Speed, ...]:
    """All that were measured: written by `python -m allmlp.report.measured` from what lies in docs/."""
    return tuple(Speed(**row) for row in json.loads(FILE.read_text(encoding="utf8")))


def training_speed(family: str, reads: str, macs: int) -> Speed:
    """Of the family's model that is nearest in multiply-adds; gMLP, which was trained on both, stands in for others."""
    attentive = {"Transformer": "BERT", "BERT": "BERT", "ViT": "ViT"}
    for name in (family, attentive.get(family, "gMLP"), "gMLP"):
        known = [s for s in speeds() if (s.task, s.family, s.reads) == ("training", name, reads)]
        if known:
            return min(known, key=lambda speed: abs(math.log(speed.macs / macs)))
    raise UserError(f"no training of {family} on {reads} was measured: say what share of the peak it reaches, --share")


def card_here(name: str, family: str, reads: str, macs: int, share: float | None) -> tuple[float | None, str]:
    """Operations per second to expect of the card with this name, and where the number comes from."""
    known = next((gpu for gpu in GPUS.values() if gpu.name in name), None)
    if known is None:
        return None, f"no published peak of {name} is known here: --calibrate MODEL measures a speed"
    if share is not None:
        return share * known.peak, f"{share:.1%} of {known.name}'s peak, given"
    found = training_speed(family, reads, macs)
    return found.share * known.peak, f"{found.share:.1%} of {known.name}'s peak: {found.what}"
