"""Output heads: class scores, scores over the vocabulary, the span of an answer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.errors import UserError
from allmlp.layers.act import ACTS, Act
from allmlp.layers.context import BuildContext
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear, is_standard
from allmlp.layers.norm import LayerNorm, Norm
from allmlp.spec import Count, Rate, Spec


class Head(Spec, abstract=True):
    pooled: ClassVar[bool] = True
    """Whether the head takes one vector per example, or every token."""

    def build(self, ctx: BuildContext, vocab_size: int | None) -> HeadLayer:
        raise NotImplementedError


class HeadLayer(nn.Module):
    """`embedding` is the stem's token embedding, for heads that share it."""

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class ClassifierHead(Head):
    """Class scores from the pooled vector.

        logits = W y + b

    Parameters CK + K.
    """

    num_classes: Count
    init: Init | None = None
    dropout: Rate = 0.0

    def build(self, ctx: BuildContext, vocab_size: int | None) -> HeadLayer:
        return ClassifierHeadLayer(self.num_classes, self.init or ctx.init, ctx.channels, self.dropout)


class PooledHead(Head):
    """Class scores for a text or a pair of texts, with BERT's pooler on the first token.

        logits = W tanh(P y + p) + b

    Parameters C^2 + C + CK + K.
    """

    num_classes: Count
    dropout: Rate = 0.0

    def build(self, ctx: BuildContext, vocab_size: int | None) -> HeadLayer:
        return ClassifierHeadLayer(self.num_classes, ctx.init, ctx.channels, self.dropout, pooler=True)


class ClassifierHeadLayer(HeadLayer):
    def __init__(self, num_classes: int, init: Init, channels: int, dropout: float, pooler: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.pooler = Linear(channels, channels, init) if pooler else None
        self.proj = Linear(channels, num_classes, init)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        if self.pooler is not None:
            x = torch.tanh(self.pooler(x))
        return self.proj(F.dropout(x, self.dropout, self.training))


class QAHead(Head):
    """Scores of every token as start and end of the answer (SQuAD).

        (start, end)[i] = W X[i] + b

    Parameters 2C + 2.
    """

    pooled: ClassVar[bool] = False

    def build(self, ctx: BuildContext, vocab_size: int | None) -> HeadLayer:
        return QAHeadLayer(ctx)


class QAHeadLayer(HeadLayer):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.proj = Linear(ctx.channels, 2, ctx.init)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        return self.proj(x)


class LMHead(Head):
    """Scores over the vocabulary at every token, by default tied to the token embedding E.

        logits[i] = E X[i] (+ b)            transform=True, as BERT: E norm(act(T X[i] + t)) (+ b)

    The papers' counts do not include transform and bias. Parameters 0 (tied), V (bias), C^2 + 3C (transform),
    CV (untied).
    """

    pooled: ClassVar[bool] = False
    tied: bool = True
    bias: bool = False
    transform: bool = False
    act: Act = "gelu"
    norm: Norm = LayerNorm(1e-12)

    def build(self, ctx: BuildContext, vocab_size: int | None) -> HeadLayer:
        if vocab_size is None:
            raise UserError("LMHead needs a TokenEmbed stem")
        return LMHeadLayer(self, ctx, vocab_size)


class LMHeadLayer(HeadLayer):
    def __init__(self, spec: LMHead, ctx: BuildContext, vocab_size: int) -> None:
        super().__init__()
        self.act = ACTS[spec.act]
        self.transform = Linear(ctx.channels, ctx.channels, ctx.init) if spec.transform else None
        self.norm = spec.norm.build(ctx.channels) if spec.transform else None
        self.proj = None if spec.tied else Linear(ctx.channels, vocab_size, ctx.init, bias=False)
        self.bias = nn.Parameter(torch.empty(vocab_size)) if spec.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.act(self.transform(x)))
        if self.proj is not None and not is_standard(self.proj):
            return self.proj(x) if self.bias is None else self.proj(x) + self.bias
        weight = embedding if self.proj is None else self.proj.weight
        assert weight is not None, "a tied head is called with the embedding"
        return F.linear(x, weight, self.bias)
