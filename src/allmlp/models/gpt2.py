"""GPT-2: the causal Transformer with learned positions and LayerNorm before each branch."""

from __future__ import annotations

from allmlp.layers import Attention, Block, ChannelMlp, Init, LayerNorm, LearnedPositions, LMHead, Normal, TokenEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

SPREAD = Normal(0.02)


def gpt2(depth: int, width: int, num_heads: int, seq_len: int = 1024, vocab_size: int = 50_257) -> Encoder:
    """All weights start from N(0, 0.02^2); OpenAI divided those of each branch's last layer by sqrt(2 depth)."""
    norm = LayerNorm(1e-5)
    return Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len, LearnedPositions(SPREAD), init=SPREAD),
        block=Block(Attention(num_heads, causal=True), channel=ChannelMlp(4 * width, "gelu_tanh"), norm=norm),
        norm=norm,
        head=LMHead(),
        init=Init(SPREAD),
    )


PRINTED = "the paper prints 117 M, its released weights have 124.4 M"

PRESETS = {
    "gpt2_small": Preset(gpt2(12, 768, 12), "GPT-2", Published("124", "GPT-2, released model", note=PRINTED)),
    "gpt2_tiny": Preset(gpt2(4, 128, 2, seq_len=128, vocab_size=8192), "GPT-2"),
}
