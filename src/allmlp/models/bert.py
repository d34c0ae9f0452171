"""BERT and its variants in gMLP's tables: absolute positions, relative positions as in T5, relative positions alone.

The papers' baselines have a tied vocabulary of 32,000 and no extra layer before it; `bert_base_uncased` is Google's
published model, with 30,522 tokens and that layer.
"""

from __future__ import annotations

from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    Init,
    LayerNorm,
    LearnedPositions,
    LMHead,
    RelativePositionBias,
    TokenEmbed,
    TruncatedNormal,
)
from allmlp.layers.stem import Positions
from allmlp.models.encoder import Encoder
from allmlp.models.preset import Preset, Published

TRUNCATED = TruncatedNormal(0.02, limit=0.04)
TEXT_INIT = Init(TRUNCATED)
EPS = LayerNorm(1e-12)


def bert(
    depth: int,
    width: int,
    num_heads: int,
    attention: Attention | None = None,
    positions: Positions | None = LearnedPositions(TRUNCATED),
    seq_len: int = 128,
    vocab_size: int = 32_000,
    head: LMHead = LMHead(),
) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=TokenEmbed(vocab_size, seq_len, positions, segments=2, norm=EPS, init=TRUNCATED),
        block=Block(token=attention or Attention(num_heads), channel=ChannelMlp(4 * width), norm=EPS, order="post"),
        norm=None,
        head=head,
        init=TEXT_INIT,
    )


def transformer(depth: int) -> Encoder:
    """The Transformers of gMLP's table 4: relative positions only."""
    return bert(depth, 768, 12, Attention(12, bias=RelativePositionBias()), positions=None)


def table(number: int, parameters: str, note: str = "") -> Published:
    return Published(parameters, f"gMLP, table {number}", note=note)


ABSOLUTE = "96 includes the absolute positions; without them it would be 95.5 M, printed as 95"

PRESETS = {
    "bert_base": Preset(bert(12, 768, 12, seq_len=512), "BERT", table(5, "110")),
    "bert_large": Preset(bert(24, 1024, 16, seq_len=512), "BERT", table(5, "336")),
    "bert_base_rel": Preset(bert(12, 768, 12, Attention(12, bias=RelativePositionBias())), "BERT", table(3, "110")),
    "bert_base_rel_noattn": Preset(
        bert(12, 768, 12, Attention(12, bias=RelativePositionBias(), scores="bias")), "BERT", table(3, "96", ABSOLUTE)
    ),
    "transformer_l6": Preset(transformer(6), "BERT", table(4, "67")),
    "transformer_l12": Preset(transformer(12), "BERT", table(4, "110")),
    "transformer_l24": Preset(transformer(24), "BERT", table(4, "195")),
    "transformer_l48": Preset(transformer(48), "BERT", table(4, "365")),
    "bert_base_uncased": Preset(
        bert(12, 768, 12, seq_len=512, vocab_size=30_522, head=LMHead(bias=True, transform=True)),
        "BERT",
        Published("110", "BERT, section 3"),
        "Google's released model with its masked-language head",
    ),
    "bert_tiny": Preset(bert(2, 128, 2, vocab_size=8192), "BERT"),
    "bert_small": Preset(bert(4, 512, 8, vocab_size=16_384), "BERT"),
}
