"""Two stacks for sequence to sequence: the decoder reads the encoder's output by cross-attention."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.layers.head import Vocabulary
from allmlp.layers.stem import Tokens
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec


class EncoderDecoder(ModelSpec):
    """An encoder of the source and a causal decoder of the target.

        M = encoder(source),   logits[t] = head(decoder(target[0..t], M))

    share=True uses one embedding table for source, target and output.
    """

    encoder: Encoder
    decoder: Encoder
    share: bool = True

    def check(self) -> None:
        if not (isinstance(self.encoder.stem, Tokens) and isinstance(self.decoder.stem, Tokens)):
            raise UserError("an EncoderDecoder needs Tokens stems on both sides")
        if self.encoder.head is not None or self.encoder.pool is not None:
            raise UserError("the encoder of an EncoderDecoder has neither pool nor head")
        if self.decoder.block.cross is None or not self.decoder.block.causal:
            raise UserError("the decoder of an EncoderDecoder needs causal blocks with cross-attention")
        if not isinstance(self.decoder.head, Vocabulary):
            raise UserError("the decoder of an EncoderDecoder needs a Vocabulary head")
        if self.encoder.width != self.decoder.width:
            raise UserError("encoder and decoder must have the same width")
        if self.share and self.encoder.stem.vocabulary != self.decoder.stem.vocabulary:
            raise UserError("a shared embedding needs the same vocabulary on both sides")

    def build(self) -> EncoderDecoderModel:
        return EncoderDecoderModel(self)

    @property
    def reads(self) -> str:
        return f"{self.encoder.stem.tokens} + {self.decoder.stem.tokens} tokens"

    def configure(self, **options: Any) -> Self:
        for name in options:
            if name not in ("vocabulary", "length", "drop_path"):
                raise UserError(f"a sequence-to-sequence model takes no {name!r}, only vocabulary, length, drop_path")
        return self.replace(encoder=self.encoder.configure(**options), decoder=self.decoder.configure(**options))


class EncoderDecoderModel(Model[EncoderDecoder]):
    def __init__(self, spec: EncoderDecoder) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = EncoderModel(spec.encoder)
        self.decoder = EncoderModel(spec.decoder, table=not spec.share)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores of the next token after each of `target` (teacher forcing), [B, T, V]."""
        memory = self.encode(source, source_mask)
        return self.decode(target, memory, source_mask, target_mask)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder.forward_features(source, mask)

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Scores for `target`; with a cache it holds only the tokens since the last call."""
        table = self.encoder.table if self.spec.share else None
        return self.decoder(target, mask, memory=memory, memory_mask=memory_mask, cache=cache, table=table)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's output, b s c."""
        return self.encode(x, mask)

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        self.encoder.set_grad_checkpointing(enable)
        self.decoder.set_grad_checkpointing(enable)
        return self

    def example(self, batch: int = 1) -> tuple[Tensor, ...]:
        (source,) = self.encoder.example(batch)
        (target,) = self.decoder.example(batch)
        return source, target
