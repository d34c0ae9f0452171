"""An accelerator without hardware: tensors on the device "meta" that hold numbers, and refuse to meet others.

Under `EmulatedDevice`, whatever is created on "meta" or moved there is computed on the CPU, but says that it is on
"meta"; an operation on tensors of both devices, and a look at the memory of one (.numpy()), fail as on a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")


class OnDevice(torch.Tensor):
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=META
        )
        made.held = held
        return made

    def tolist(self) -> Any:  # which torch refuses for subclasses
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class EmulatedDevice(TorchDispatchMode):
    def __enter__(self) -> Any:
        self.stack = ExitStack()
        # Setting `parameter.data`, as modules otherwise do when they are moved, would leave what an OnDevice holds.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self.stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        # Tensors of inference mode cannot be wrapped.
        modes = torch.inference_mode, torch.no_grad
        for name in ("__enter__", "__exit__"):
            self.stack.enter_context(patch.object(modes[0], name, getattr(modes[1], name)))
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self.stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = [one for one in given if isinstance(one, OnDevice)]
    moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if there and not moves:
        strangers = [one for one in given if not isinstance(one, OnDevice) and one.dim()]
        assert not strangers, f"{func}: tensors on the device and on the CPU"
    place = kwargs.get("device")
    target = torch.device(place) if place is not None else None
    on_device = target == META if target is not None else bool(there)
    if func is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], OnDevice)
    if target == META:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(lambda one: one.held if isinstance(one, OnDevice) else one, (args, kwargs))
    found = func(*args, **kwargs)
    schema = func._schema
    if schema.name.endswith("_") and given:  # in place
        return given[0]
    return tree_map(lambda one: OnDevice(one) if on_device and isinstance(one, torch.Tensor) else one, found)
