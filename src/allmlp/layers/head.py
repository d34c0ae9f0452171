"""What a model answers with: classes, words, a span, a judgement on a pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import Site
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.spec import Count, Rate, Spec


class Head(Spec, abstract=True):
    def build(self, site: Site, vocabulary: int | None) -> HeadLayer:
        raise NotImplementedError

    @property
    def pooled(self) -> bool:
        """Whether the head reads one vector per example, or every token."""
        return True


class HeadLayer(nn.Module):
    """`table` is the stem's token embedding, for heads that share it."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class Classes(Head):
    """Class scores from the pooled vector.

        logits = W y + b

    Parameters CK + K.
    """

    classes: Count
    init: Init | None = None
    dropout: Rate = 0.0

    def build(self, site: Site, vocabulary: int | None) -> HeadLayer:
        return ClassesLayer(self.classes, self.init or site.init, site.channels, self.dropout)


class Pair(Head):
    """Class scores for a sentence or a pair of sentences, read at the first token as BERT does.

        logits = W tanh(P y + p) + b

    Parameters C^2 + C + CK + K.
    """

    classes: Count
    dropout: Rate = 0.0

    def build(self, site: Site, vocabulary: int | None) -> HeadLayer:
        return ClassesLayer(self.classes, site.init, site.channels, self.dropout, pooler=True)


class ClassesLayer(HeadLayer):
    def __init__(self, classes: int, init: Init, channels: int, dropout: float, pooler: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.pooler = Linear(channels, channels, init) if pooler else None
        self.proj = Linear(channels, classes, init)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if self.pooler is not None:
            x = torch.tanh(self.pooler(x))
        return self.proj(F.dropout(x, self.dropout, self.training))


class Span(Head):
    """Start and end scores of an answer at every token (SQuAD).

        (start, end)[i] = W X[i] + b

    Parameters 2C + 2.
    """

    def build(self, site: Site, vocabulary: int | None) -> HeadLayer:
        return SpanLayer(site)

    @property
    def pooled(self) -> bool:
        return False


class SpanLayer(HeadLayer):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.proj = Linear(site.channels, 2, site.init)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return self.proj(x)


class Vocabulary(Head):
    """Scores over the vocabulary at every token; tied to the embedding table E unless told otherwise.

        logits[i] = E X[i] (+ b)            BERT's own head first takes norm(act(T X[i] + t))

    The papers' counts are without transform and bias. Parameters 0 (tied), V (bias),
    C^2 + 3C (transform), CV (untied).
    """

    tied: bool = True
    bias: bool = False
    transform: bool = False
    act: Act = "gelu"
    norm: Norm = LayerNorm(1e-12)

    def build(self, site: Site, vocabulary: int | None) -> HeadLayer:
        if vocabulary is None:
            raise UserError("a Vocabulary head needs a Tokens stem")
        return VocabularyLayer(self, site, vocabulary)

    @property
    def pooled(self) -> bool:
        return False


class VocabularyLayer(HeadLayer):
    def __init__(self, spec: Vocabulary, site: Site, vocabulary: int) -> None:
        super().__init__()
        self.act = ACTS[spec.act]
        self.transform = Linear(site.channels, site.channels, site.init) if spec.transform else None
        self.norm = spec.norm.build(site.channels) if spec.transform else None
        self.proj = None if spec.tied else Linear(site.channels, vocabulary, site.init, bias=False)
        self.bias = nn.Parameter(torch.empty(vocabulary)) if spec.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.act(self.transform(x)))
        weight = table if self.proj is None else self.proj.weight
        assert weight is not None, "a tied head is called with the table"
        return F.linear(x, weight, self.bias)
