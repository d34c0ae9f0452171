"""Translation: ResMLP's encoder-decoder without self-attention, and the Transformer it is compared with.

In ResMLP every self-attention is replaced by a linear map over tokens, triangular in the decoder, which keeps its
cross-attention (paper, section 2). Settings that the paper does not give follow the Transformer base: 8 heads, one
embedding for source, target and output; 256 tokens cover the length filter of the training data.
"""

from __future__ import annotations

from allmlp.layers import (
    Affine,
    Attention,
    Block,
    ChannelMlp,
    CrossAttention,
    Init,
    LayerNorm,
    LayerScale,
    LMHead,
    Normal,
    SinusoidalPositions,
    TokenEmbed,
    TokenLinear,
    XavierUniform,
)
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.preset import Preset


def translator(stack: Encoder, encoder: Block, decoder: Block) -> EncoderDecoder:
    return EncoderDecoder(encoder=stack.replace(block=encoder), decoder=stack.replace(block=decoder, head=LMHead()))


def resmlp_seq2seq(
    depth: int, width: int = 512, num_heads: int = 8, seq_len: int = 256, vocab_size: int = 32_768
) -> EncoderDecoder:
    block = Block(TokenLinear(), channel=ChannelMlp(4 * width, act="relu"), norm=Affine(), scale=LayerScale(0.2))
    stack = Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len, scale=True, init=Normal(width**-0.5)),
        block=block,
        norm=Affine(),
        init=Init(XavierUniform()),
    )
    return translator(stack, block, block.replace(token=TokenLinear(causal=True), cross=CrossAttention(num_heads)))


def transformer_seq2seq(
    depth: int, width: int = 512, num_heads: int = 8, seq_len: int = 256, vocab_size: int = 32_768
) -> EncoderDecoder:
    """Vaswani et al. (2017): post-norm, ReLU, sinusoidal positions."""
    norm = LayerNorm(1e-5)
    block = Block(Attention(num_heads), channel=ChannelMlp(4 * width, act="relu"), norm=norm, order="post")
    stack = Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len, positions=SinusoidalPositions(), scale=True, init=Normal(width**-0.5)),
        block=block,
        norm=None,
        init=Init(XavierUniform()),
    )
    return translator(
        stack, block, block.replace(token=Attention(num_heads, causal=True), cross=CrossAttention(num_heads))
    )


PRESETS = {
    "resmlp_seq2seq_6": Preset(resmlp_seq2seq(6), "ResMLP"),
    "resmlp_seq2seq_12": Preset(resmlp_seq2seq(12), "ResMLP"),
    "transformer_seq2seq_base": Preset(transformer_seq2seq(6), "Transformer"),
    "resmlp_seq2seq_tiny": Preset(resmlp_seq2seq(3, 128, 4, seq_len=64, vocab_size=8192), "ResMLP"),
    "transformer_seq2seq_tiny": Preset(transformer_seq2seq(3, 128, 4, seq_len=64, vocab_size=8192), "Transformer"),
}
