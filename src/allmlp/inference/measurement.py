"""The fastest engine for a model and a batch size on this machine, timed once and then read from a file.

The file is fast.json in $ALLMLP_CACHE (~/.cache/allmlp); delete it to measure again. A result is specific to device,
number of CPU threads, versions of torch, Triton and ONNX Runtime, config of the model, dtype and batch size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from allmlp import __version__
from allmlp.errors import one_line
from allmlp.files import expand_user, lock, write_text_atomically
from allmlp.models.model import Model
from allmlp.provenance import cpu_name, installed_versions
from allmlp.spec import to_dict

ROUNDS, SECONDS = 7, 1.0
"""Rounds in which every engine has its turn, and seconds for each engine over all of them."""
log = logging.getLogger(__name__)


class Times(dict[str, float]):
    """Engine -> seconds of a call."""

    @property
    def fastest(self) -> str:
        return min(self, key=self.__getitem__)

    def __str__(self) -> str:
        return ", ".join(f"{engine} {1e3 * seconds:.3g} ms" for engine, seconds in self.items())


def measured_key(model: Model, dtype: torch.dtype, batch_size: int) -> str:
    device = model.device
    versions, packages = {"allmlp": __version__, "torch": torch.__version__}, installed_versions()
    versions |= {package: packages[package] for package in ("triton", "onnxruntime") if package in packages}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    config = hashlib.sha256(json.dumps(to_dict(model.spec), sort_keys=True).encode()).hexdigest()[:16]
    parts = [device.type, name, str(torch.get_num_threads()), *(" ".join(pair) for pair in versions.items())]
    return "; ".join([*parts, config, str(dtype).removeprefix("torch."), f"batch {batch_size}"])


def read_kept(key: str) -> Times | None:
    """Times of an earlier measurement; an unreadable file is ignored."""
    try:
        kept = json.loads(kept_file().read_text(encoding="utf8"))[key]
        return Times({str(engine): float(seconds) for engine, seconds in kept.items()}) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(key: str, times: Times) -> None:
    file = kept_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with lock(file.with_suffix(".lock")):
            try:
                kept = json.loads(file.read_text(encoding="utf8"))
            except (OSError, ValueError):
                kept = {}
            text = json.dumps((kept if isinstance(kept, dict) else {}) | {key: times}, indent=1)
            write_text_atomically(file, text)
    except OSError as reason:  # for example on a read-only disk: measured again next time
        log.warning("cannot store the measurements of fast(): %s", one_line(reason))


def kept_file() -> Path:
    return expand_user(os.environ.get("ALLMLP_CACHE") or "~/.cache/allmlp") / "fast.json"


def time_engines(calls: Mapping[str, Callable[[], object]], device: torch.device) -> Times:
    """Medians over rounds in which the engines take turns: within a round, all see the same state of the machine."""

    def seconds(call: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    for call in calls.values():
        call()  # compiles, tunes, allocates
    counts = {name: max(1, round(SECONDS / ROUNDS / max(seconds(call, 2), 1e-6))) for name, call in calls.items()}
    rounds = [{name: seconds(call, counts[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return Times({name: statistics.median(times[name] for times in rounds) for name in calls})
