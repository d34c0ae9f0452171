"""The interface of every model, this library's and other packages'."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from allmlp.errors import UserError, lookup
from allmlp.models.cost import Cost, measure
from allmlp.models.preset import preset, presets
from allmlp.spec import Spec, hints

if TYPE_CHECKING:
    from allmlp.prediction import Prediction


class ModelSpec(Spec, abstract=True):
    """The configuration of a whole model."""

    def build(self) -> Model:
        """The initialized module; on the `meta` device inside `torch.device("meta")`."""
        raise NotImplementedError

    @classmethod
    def from_name(cls, name: str, path: str) -> Spec:
        """A preset's spec, or the kind of that name with its defaults."""
        if name in Spec.kinds:
            return super().from_name(name, path)
        if ":" not in name:
            kinds = {kind: spec_class for kind, spec_class in Spec.kinds.items() if issubclass(spec_class, ModelSpec)}
            lookup(name, presets() | kinds, "model")
        return preset(name).spec

    @property
    def input_spec(self) -> str:
        """The input in a few words: "224x224 image", "128 tokens", "512x7 series" (steps x variates)."""
        if self.input_size is None:
            raise NotImplementedError
        return "x".join(map(str, self.input_size)) + " image"

    @property
    def input_size(self) -> tuple[int, int] | None:
        """Height and width of the input images; None for other inputs."""
        return None

    @property
    def input_channels(self) -> int | None:
        """Channels of the input images; None for other inputs."""
        return None if self.input_size is None else getattr(self, "in_chans", None)

    @property
    def has_head(self) -> bool:
        """False for a model that returns features."""
        return True

    def configure(self, **options: Any) -> Self:
        """A copy with another input or output; the options are those of `allmlp.create`, without None."""
        for name in options:
            if name not in hints(type(self)):
                raise UserError(f"{type(self).__name__} models have no {name!r}")
        return self.replace(**options)

    def with_channels(self, channels: int) -> Self:
        """A copy for images with this many channels; the spec itself if it has them already, or reads no images."""
        return self if self.input_channels in (None, channels) else self.configure(in_chans=channels)

    def shallow(self) -> tuple[ModelSpec, dict[str, range]]:
        """The model with one block per stack, and a map from the path of each remaining block to the block numbers it
        stands for. The blocks of a stack are identical, so one is enough to count costs and to list the weights.
        """
        return self, {}


S = TypeVar("S", bound=ModelSpec)


class Model(nn.Module, Generic[S]):
    """A network with its spec. `forward` is `forward_head(forward_features(x))`.

    >>> model = allmlp.create("mixer_b16")
    >>> features = model.forward_features(images)  # [B, S, C]
    """

    spec: S
    preprocessing: Any = None
    """Preprocessing of the inputs (`ImagePreprocessing`, `TextPreprocessing`), if it was loaded with the model."""
    folder: str | None = None
    """Folder that the model was loaded from; it contains the tokenizer of a text model."""
    checkpointing: bool = False
    borrows_weights: bool = False
    """Whether every call gets its weights by `functional_call`, which takes them away before the backward pass."""

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens after the last norm, [B, S, C]."""
        raise NotImplementedError

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pooling and head: from features to the model's output."""
        raise NotImplementedError

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """A valid input of the largest size, on the model's device."""
        raise NotImplementedError

    def parts(self) -> dict[str, str]:
        """The rows of the cost table: label -> path of the module. The rest is counted as `other`."""
        raise NotImplementedError

    def describe(self) -> Cost:
        """Parameters and multiply-adds by part."""
        return measure(self.spec)

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        """Recompute the activations of the blocks in the backward pass instead of storing them."""
        self.checkpointing = enable
        return self

    def run_block(self, block: nn.Module, *inputs: Any) -> Tensor:
        """The output of a block; its activations are recomputed in the backward pass under gradient checkpointing."""
        if not self.checkpointing:
            return block(*inputs)
        if not self.borrows_weights:
            return checkpoint(block, *inputs, use_reentrant=False)
        weights = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        return checkpoint(lambda *args: functional_call(block, weights, args), *inputs, use_reentrant=False)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Save the model with a model card; the options are those of `allmlp.save_pretrained`."""
        # Through the public name: saving is implemented in a package above this one.
        import allmlp

        return allmlp.save_pretrained(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to the Hugging Face Hub; the options are those of `allmlp.push_to_hub`."""
        import allmlp

        return allmlp.push_to_hub(self, repo_id, **options)

    def transform(self, inputs: Any, **options: Any) -> Any:
        """Preprocess images or texts, as `predict` does, into a batch for the model, on its device and in its dtype.

        >>> logits = model(model.transform([image, other_image]))  # PIL images, uint8 arrays [H, W, C], files, ...
        >>> logits = model(**model.transform("a text"))  # ids, mask and segments

        The options are those of `allmlp.transform`.
        """
        import allmlp

        return allmlp.transform(self, inputs, **options)

    def predict(self, inputs: Any, **options: Any) -> list[list[Prediction]]:
        """The most probable classes of images or texts; inputs, options and result are those of `allmlp.predict`.

        >>> [[best, *others]] = model.predict(image)
        """
        import allmlp

        return allmlp.predict(self, inputs, **options)

    def forget_class_names(self) -> None:
        """Remove the class names from the preprocessing; called when the head is replaced."""
        if self.preprocessing is not None:
            self.preprocessing = self.preprocessing.replace(class_names=())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


M = TypeVar("M", bound=Model)


def uncompiled(model: Any) -> Any:
    """The model inside the wrapper of torch.compile."""
    return getattr(model, "_orig_mod", model)


def check_merged(model: nn.Module) -> None:
    """Raise UserError if the model has adapters that are not merged into its weights: `allmlp.lora`'s or PEFT's."""
    if any(name.endswith("lora_a") for name, _ in model.named_parameters()):
        raise UserError("the model has LoRA adapters: merge them into its weights first, allmlp.lora.merge(model)")
    if any(path.endswith(".base_layer") for path, _ in model.named_modules()):
        raise UserError("the model has adapters of PEFT: merge them into its weights first, with merge_and_unload()")


def follow_mode(model: nn.Module, other: nn.Module) -> None:
    """Copy training or evaluation mode (some modules may be frozen) and checkpointing from `other`, by module."""
    for module, source in zip(model.modules(), other.modules(), strict=True):
        module.training = source.training
        if isinstance(module, Model) and isinstance(source, Model):
            module.checkpointing = source.checkpointing


def take_over(new: M, model: Model, weights: Mapping[str, Tensor]) -> M:
    """Fill `new`, which was built on the meta device and has the parts of `model`, with `weights`, and copy the rest
    from `model`: preprocessing, folder, modes, and which weights are trained.
    """
    for parameter, source in zip(new.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(source.requires_grad)
    new.load_state_dict(weights, assign=True)
    new.preprocessing, new.folder = model.preprocessing, model.folder
    follow_mode(new, model)
    return new
