"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Act = Literal["gelu", "gelu_tanh", "relu", "silu", "sigmoid"]

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the default of Flax and so of Google's Mixer.
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
