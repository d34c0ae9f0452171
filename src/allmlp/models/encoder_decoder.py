"""Sequence to sequence: an encoder, and a decoder with cross-attention to the encoder's output."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from allmlp.errors import UserError
from allmlp.layers.context import Cache
from allmlp.layers.head import LMHead
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec


class EncoderDecoder(ModelSpec):
    """An encoder of the source and a causal decoder of the target.

        M = encoder(source),   logits[t] = head(decoder(target[0..t], M))

    tie_embeddings=True uses one embedding for source, target and output.
    """

    encoder: Encoder
    decoder: Encoder
    tie_embeddings: bool = True

    def check(self) -> None:
        if not (isinstance(self.encoder.stem, TokenEmbed) and isinstance(self.decoder.stem, TokenEmbed)):
            raise UserError("an EncoderDecoder needs TokenEmbed stems on both sides")
        if self.encoder.head is not None or self.encoder.pool is not None:
            raise UserError("the encoder of an EncoderDecoder has neither pool nor head")
        if self.decoder.block.cross is None or not self.decoder.block.causal:
            raise UserError("the decoder of an EncoderDecoder needs causal blocks with cross-attention")
        if not isinstance(self.decoder.head, LMHead):
            raise UserError("the decoder of an EncoderDecoder needs an LMHead")
        if self.encoder.width != self.decoder.width:
            raise UserError("encoder and decoder must have the same width")
        if self.tie_embeddings and self.encoder.stem.vocab_size != self.decoder.stem.vocab_size:
            raise UserError("a shared embedding needs the same vocabulary on both sides")

    def build(self) -> EncoderDecoderModel:
        return EncoderDecoderModel(self)

    @property
    def input_spec(self) -> str:
        return f"{self.encoder.stem.tokens} + {self.decoder.stem.tokens} tokens"

    def configure(self, **options: Any) -> Self:
        fields = ("vocab_size", "seq_len", "drop_path")
        for name in options:
            if name not in fields:
                raise UserError(f"the model has no {name!r} (input: {self.input_spec}); it has {', '.join(fields)}")
        return self.replace(encoder=self.encoder.configure(**options), decoder=self.decoder.configure(**options))

    def shallow(self) -> tuple[EncoderDecoder, dict[str, range]]:
        shallow = self.replace(encoder=self.encoder.replace(depth=1), decoder=self.decoder.replace(depth=1))
        return shallow, {"encoder.blocks.0": range(self.encoder.depth), "decoder.blocks.0": range(self.decoder.depth)}


class EncoderDecoderModel(Model[EncoderDecoder]):
    def __init__(self, spec: EncoderDecoder) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = EncoderModel(spec.encoder)
        self.decoder = EncoderModel(spec.decoder, embedding=not spec.tie_embeddings)

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each of `target` (teacher forcing), [B, T, V]."""
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
        """Logits for `target`; with a cache, `target` holds only the tokens since the last call."""
        embedding = self.encoder.embedding if self.spec.tie_embeddings else None
        return self.decoder(target, mask, memory=memory, memory_mask=memory_mask, cache=cache, embedding=embedding)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's output, b s c."""
        return self.encode(x, mask)

    def parts(self) -> dict[str, str]:
        stacks = {"encoder": self.encoder, "decoder": self.decoder}
        return {
            f"{name}.{label}": f"{name}.{path}"
            for name, stack in stacks.items()
            for label, path in stack.parts().items()
        }

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        self.encoder.set_grad_checkpointing(enable)
        self.decoder.set_grad_checkpointing(enable)
        return self

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        (source,) = self.encoder.dummy_inputs(batch_size)
        (target,) = self.decoder.dummy_inputs(batch_size)
        return source, target
