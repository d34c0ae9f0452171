"""Fused operations: each folder has the definition in plain PyTorch (reference.py) and the fast path.

token_mix, row_norm and linear answer (inference); token_product, channel_mlp and gated_mlp learn (operators with
gradients).
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def has_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run there: they are for Hopper, and Gluon still changes from one Triton to the next."""
    if not HAS_TRITON or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return triton.__version__.startswith("3.6.")


def training_type(x: Tensor) -> torch.dtype | None:
    """The type in which a layer learns by the operators here; None where plain PyTorch is the way.

    They are for bfloat16 and float16 on a GPU, by autocast or as the layer's own type.
    """
    if not (HAS_TRITON and x.is_cuda and torch.is_grad_enabled()):
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None
