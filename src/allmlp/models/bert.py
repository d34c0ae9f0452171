"""BERT and its relatives in gMLP's tables: absolute positions, T5's relative ones, and no content scores.

The papers' baselines have 32,000 tied embeddings and no extra layer in front of the vocabulary;
`bert_base_uncased` is Google's published model, which has both.
"""

from __future__ import annotations

from allmlp.layers import (
    Attention,
    Block,
    ChannelMlp,
    Init,
    LayerNorm,
    Learned,
    RelativePositions,
    Tokens,
    TruncatedNormal,
    Vocabulary,
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
    heads: int,
    attention: Attention | None = None,
    positions: Positions | None = Learned(TRUNCATED),
    length: int = 128,
    vocabulary: int = 32_000,
    head: Vocabulary = Vocabulary(),
) -> Encoder:
    return Encoder(
        width=width,
        depth=depth,
        stem=Tokens(vocabulary, length, positions, segments=2, norm=EPS, init=TRUNCATED),
        block=Block(token=attention or Attention(heads), channel=ChannelMlp(4 * width), norm=EPS, order="post"),
        norm=None,
        head=head,
        init=TEXT_INIT,
    )


def transformer(depth: int) -> Encoder:
    """The Transformers of gMLP's table 4: relative positions alone."""
    return bert(depth, 768, 12, Attention(12, bias=RelativePositions()), positions=None)


def table(number: int, parameters: str, note: str = "") -> Published:
    return Published(parameters, f"gMLP, table {number}", note=note)


ABSOLUTE = "prints 96; without the absolute positions that this model keeps it would be 95.5 M, printed 95"

PRESETS = {
    "bert_base": Preset(bert(12, 768, 12, length=512), "BERT", table(5, "110")),
    "bert_large": Preset(bert(24, 1024, 16, length=512), "BERT", table(5, "336")),
    "bert_base_rel": Preset(bert(12, 768, 12, Attention(12, bias=RelativePositions())), "BERT", table(3, "110")),
    "bert_base_rel_noattn": Preset(
        bert(12, 768, 12, Attention(12, bias=RelativePositions(), scores="bias")), "BERT", table(3, "96", ABSOLUTE)
    ),
    "transformer_l6": Preset(transformer(6), "BERT", table(4, "67")),
    "transformer_l12": Preset(transformer(12), "BERT", table(4, "110")),
    "transformer_l24": Preset(transformer(24), "BERT", table(4, "195")),
    "transformer_l48": Preset(transformer(48), "BERT", table(4, "365")),
    "bert_base_uncased": Preset(
        bert(12, 768, 12, length=512, vocabulary=30_522, head=Vocabulary(bias=True, transform=True)),
        "BERT",
        Published("110", "BERT, section 3"),
        "Google's released model with its masked-language head",
    ),
    "bert_tiny": Preset(bert(2, 128, 2, vocabulary=8192), "BERT"),
    "bert_small": Preset(bert(4, 512, 8, vocabulary=16_384), "BERT"),
}
