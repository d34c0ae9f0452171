"""What every model offers, ours and those from elsewhere: the uniform interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.spec import Spec, hints

if TYPE_CHECKING:
    from allmlp.models.cost import Cost


class ModelSpec(Spec, abstract=True):
    """The configuration of a whole model."""

    def build(self) -> Model:
        """The module, initialised; on the `meta` device when made inside `torch.device("meta")`."""
        raise NotImplementedError

    @property
    def reads(self) -> str:
        """What the model is given, in a few words: "224x224 image", "128 tokens"."""
        raise NotImplementedError

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the pictures it reads; None where it reads something else."""
        return None

    def configure(self, **options: Any) -> Self:
        """This spec with its input or output changed; `options` as in `allmlp.create`, all of them set."""
        for name in options:
            if name not in hints(type(self)):
                raise UserError(f"{type(self).__name__} models take no {name!r}")
        return self.replace(**options)


S = TypeVar("S", bound=ModelSpec)


class Model(nn.Module, Generic[S]):
    """A network with its spec. `forward` is `forward_head(forward_features(x))`."""

    spec: S

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens after the last norm, b s c."""
        raise NotImplementedError

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        """A valid input of the largest size, on the model's device."""
        raise NotImplementedError

    def describe(self) -> Cost:
        """Parameters and multiply-adds by part."""
        from allmlp.models.cost import measure

        return measure(self.spec)

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        """Recompute blocks in the backward pass instead of keeping their activations."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write the model to `folder` with a card; the options are those of `allmlp.save_pretrained`."""
        # By its public name: what is written lies above the models.
        import allmlp

        return allmlp.save_pretrained(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Publish the model on the Hugging Face hub; the options are those of `allmlp.push_to_hub`."""
        import allmlp

        return allmlp.push_to_hub(self, repo_id, **options)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def initialise(model: nn.Module) -> None:
    """Draw every parameter anew, in the order of the modules (after `to_empty`, for instance)."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
