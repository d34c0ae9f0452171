"""Llama 3: the causal Transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention, without biases.

Source: The Llama 3 Herd of Models, table 3, with the vocabulary of 128,256 of its released weights.
"""

from __future__ import annotations

from allmlp.layers import Attention, Block, ChannelMlp, Init, LMHead, Normal, RMSNorm, RotaryPositions, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

SPREAD = Normal(0.02)


def llama(
    depth: int,
    width: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    seq_len: int = 8192,
    vocab_size: int = 128_256,
    head: LMHead = LMHead(tied=False),
) -> Encoder:
    norm, rotary = RMSNorm(1e-5), RotaryPositions(500_000.0)
    grouped = num_kv_heads if num_kv_heads < num_heads else None
    attention = Attention(num_heads, causal=True, num_kv_heads=grouped, rotary=rotary, linear_bias=False)
    return Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len, init=SPREAD),
        block=Block(attention, channel=ChannelMlp(hidden, "silu", glu=True, linear_bias=False), norm=norm),
        norm=norm,
        head=head,
        init=Init(SPREAD),
    )


def released(parameters: str) -> Published:
    return Published(parameters, "Llama 3, released model")


PRESETS = {
    "llama3_8b": Preset(llama(32, 4096, 14_336, 32, 8), "Llama", released("8030")),
    "llama3_70b": Preset(llama(80, 8192, 28_672, 64, 8), "Llama", released("70554")),
    "llama3_405b": Preset(llama(126, 16_384, 53_248, 128, 8), "Llama", released("405853")),
    "llama_tiny": Preset(llama(4, 128, 352, 4, 2, seq_len=128, vocab_size=8192, head=LMHead()), "Llama"),
}
