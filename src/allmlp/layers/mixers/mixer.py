"""The interface of token mixers: a spec that builds a module from `b s c` to `b s c`."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import nn

from allmlp.layers.context import BuildContext
from allmlp.spec import Spec


class TokenMixer(Spec, abstract=True):
    """Base class of specs for the `token` slot of a block. The module's call is `forward(x, context)`, and its
    `token_roles` declares the roles of its parameters (`allmlp.layers.token_roles`).
    """

    separates_documents: ClassVar[bool] = False
    """Whether the layer keeps the documents of a row separate, using `Context.same_document`."""

    def build(self, ctx: BuildContext) -> nn.Module:
        raise NotImplementedError

    def keep_width(self, tokens: int, times: int = 1) -> Self:
        """The mixer with the hidden width that it has for this many tokens, times a factor, for any number of them."""
        return self

    @property
    def is_causal(self) -> bool:
        """Whether no token can see a later one."""
        return bool(getattr(self, "causal", False))
