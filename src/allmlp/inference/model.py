"""The result of `fast`: a module with the frozen weights of a conversion, for one device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.inference.capabilities import EngineChoice
from allmlp.inference.graphs import CudaGraphs
from allmlp.kernels.launch import device_guard
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from allmlp.models.series_encoder import SeriesEncoderModel

M = TypeVar("M", bound=Model)
CHANGED = "fast() converts a model as its config builds it"
RECONVERT = "convert the original again with allmlp.fast(model)"


@torch.no_grad()
def copy_frozen(model: M, dtype: torch.dtype) -> M:
    """A copy of the model in `dtype`, in eval mode and without gradients."""
    copy = built_anew(model)
    state = {name: tensor_of(model, name) for name in copy.state_dict()}
    cast = {name: value.to(dtype if value.is_floating_point() else None, copy=True) for name, value in state.items()}
    copy.load_state_dict(cast, assign=True)
    return copy.eval().requires_grad_(False)


@torch.no_grad()
def with_plain_weights(model: M) -> M:
    """The model itself, or, where it computes weights from others (LoRA, quantization, torch's parametrizations), an
    ordinary model with the weights that it uses in evaluation.
    """
    copy = built_anew(model)
    check_modules(model, copy)
    if not any(is_computed(*place(model, name)) for name in copy.state_dict()):
        return model
    training = [module for module in model.modules() if module.training]
    model.eval()  # in training, Quant-Noise draws its weights
    try:
        return copy_frozen(model, model.dtype)
    finally:
        for module in training:
            module.training = True


def built_anew(model: M) -> M:
    """An ordinary model of the same config, on the meta device."""
    with torch.device("meta"):
        built = model.spec.build()
    assert isinstance(built, type(model))
    return built


def check_modules(model: Model, copy: Model) -> None:
    """Refuse a model whose modules are not those of its config: the converted model would compute something else."""
    modules, expected = dict(model.named_modules()), dict(copy.named_modules())
    for path, module in expected.items():
        other = modules.get(path)
        if not isinstance(other, type(module)) and not isinstance(module, type(other)):  # a plain Linear is one too
            kind = "missing" if other is None else f"a {type(other).__name__}"
            raise UserError(f"{path} is {kind}, not the {type(module).__name__} of the config: {CHANGED}")
    for name in model.state_dict():
        path = name.rpartition(".")[0].partition(".parametrizations.")[0]
        if path not in expected:
            raise UserError(f"{path} is not in the config: {CHANGED}")
    for name, value in copy.state_dict().items():
        module, leaf = place(model, name)
        if leaf in vars(module):
            raise UserError(f"{name} is set by a hook: make it a parameter first, as by torch.nn.utils.prune.remove")
        if is_computed(module, leaf):
            continue
        tensor = getattr(module, leaf)  # None: a layer without bias
        if tensor is None or tensor.shape != value.shape:
            size = None if tensor is None else list(tensor.shape)
            raise UserError(f"{name} is {size}, not the {list(value.shape)} of the config: {CHANGED}")


def place(model: Model, name: str) -> tuple[nn.Module, str]:
    """The module of a tensor, and the tensor's name in it."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def is_computed(module: nn.Module, leaf: str) -> bool:
    return isinstance(getattr(type(module), leaf, None), property)


def tensor_of(model: Model, name: str) -> Tensor:
    module, leaf = place(model, name)
    return getattr(module, leaf)


def check_tensor(x: object) -> None:
    if not isinstance(x, Tensor):
        raise UserError(f"a fast model takes a tensor, not a {type(x).__name__}: convert it with torch.as_tensor(x)")


class FastModel(nn.Module):
    """A module for inference on the device and in the dtype it was converted for.

    Its parameters are frozen, and fused weights are buffers. It can be copied, pickled, and loaded with the
    `state_dict` of another conversion of the same model; training or moving it is refused. On a GPU, calls replay CUDA
    graphs, which a copy captures again. It is thread-safe.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device_type = dtype, device.type
        self.graphs = CudaGraphs()
        self.choice = EngineChoice("eager", "")

    def chosen(self, choice: EngineChoice) -> Self:
        self.choice = choice
        return self

    def report(self) -> str:
        """The engine that runs the model, and the reason, in one line."""
        return f"{self.choice.engine} on {self.device} in {self.dtype_name}: {self.choice.reason}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def run(self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], kind: Any = None) -> Tensor:
        """compute(*inputs), in a CUDA graph on a GPU; `kind` identifies `compute`."""
        device = self.device
        for x in inputs:
            if x.device != device:
                raise UserError(
                    f"the input is on {x.device} and the model on {device}: move it with .to({str(device)!r})"
                )
        with torch.autocast(device.type, enabled=False):  # dtypes are fixed at conversion
            # During a capture by the caller, the kernels become part of that graph.
            if device.type == "cuda" and len(inputs[0]) and not torch.cuda.is_current_stream_capturing():
                return self.graphs.replay(compute, inputs, self.dtype, kind)
            with torch.no_grad(), device_guard(device):
                return compute(*map(self.cast, inputs))

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    # --- refused operations --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise UserError(f"a fast model is for inference only: train the original, then {RECONVERT}")
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by .to(), .cuda(), .half() and so on, which may not change anything."""
        asked = fn(torch.empty(0, device=self.device, dtype=self.dtype))
        if (asked.device, asked.dtype) != (self.device, self.dtype):
            where = f"on {self.device} in {self.dtype_name}"
            raise UserError(f"a fast model stays {where}: {RECONVERT} on the other device or dtype")
        self.graphs = CudaGraphs()

        def keep_dtype(tensor: Tensor) -> Tensor:
            """Ignore casts: some weights are deliberately more or less precise than the model's dtype."""
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor

        return super()._apply(keep_dtype, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        expected = {name: (value.shape, value.dtype) for name, value in self.state_dict().items()}
        passed = {name: (value.shape, value.dtype) for name, value in state_dict.items()}
        if expected != passed:
            raise UserError(
                f"these are not the weights of the same fast model: load them into the original, then {RECONVERT}"
            )
        self.graphs = CudaGraphs()
        return super().load_state_dict(state_dict, strict, assign)

    # --- copies ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["graphs"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.graphs = CudaGraphs()
        if self.device.type != self.device_type:
            raise UserError(f"this model was converted on {self.device_type}, not {self.device.type}: {RECONVERT} here")


class UnfusedModel(FastModel):
    """A model with its own blocks, compiled by torch or as it is."""

    def __init__(self, model: EncoderModel | SeriesEncoderModel, dtype: torch.dtype, compiled: bool = False) -> None:
        super().__init__(dtype, model.device)
        self.spec, self.compiled = model.spec, compiled
        self.model = copy_frozen(model, dtype)
        self.eval()
        if compiled:
            self.model.compile()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.compiled:
            self.model.compile()

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Like `forward` of the original."""
        check_tensor(x)
        given: dict[str, Any] = {"x": x, "mask": mask, **options}
        given = {name: value for name, value in given.items() if value is not None}
        names = tuple(given)
        if not all(isinstance(value, Tensor) and len(value) == len(x) for value in given.values()):
            # Other arguments, such as a cache or an embedding, have no batch dimension.
            given |= {name: self.cast(value) for name, value in given.items() if isinstance(value, Tensor)}
            with torch.no_grad(), device_guard(self.device), torch.autocast(self.device.type, enabled=False):
                return self.model.forward(**given)

        def compute(*tensors: Tensor) -> Tensor:
            if self.compiled:
                for tensor in tensors:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one compilation for all batch sizes
            return self.model(**dict(zip(names, tensors, strict=True)))

        return self.run(compute, tuple(given.values()), names)
