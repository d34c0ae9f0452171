"""The sequence-to-sequence Transformer against torch.nn.Transformer."""

from __future__ import annotations

import math

import pytest
import torch
from agree import Weights, assert_parity, relabel
from torch import Tensor, nn

from allmlp.layers import LayerNorm
from allmlp.models.seq2seq import transformer_seq2seq
from allmlp.spec import override

WIDTH, HEADS, LENGTH, VOCABULARY = 12, 3, 10, 17


class Peer(nn.Module):
    """torch.nn.Transformer with one shared embedding and sinusoidal positions."""

    def __init__(self, pre: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 4 * WIDTH}
        self.stacks = nn.Transformer(WIDTH, HEADS, **sizes, dropout=0.0, batch_first=True, norm_first=pre)
        if not pre:
            self.stacks.encoder.norm = self.stacks.decoder.norm = None

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding.weight[ids] * math.sqrt(WIDTH)
        wave = torch.zeros(ids.shape[1], WIDTH, dtype=x.dtype)
        for position in range(ids.shape[1]):
            for k in range(0, WIDTH, 2):
                angle = position / 10_000 ** (k / WIDTH)
                wave[position, k], wave[position, k + 1] = math.sin(angle), math.cos(angle)
        return x + wave

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None, target_mask: Tensor | None) -> Tensor:
        source_padding = None if source_mask is None else ~source_mask
        y = self.stacks(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
            tgt_key_padding_mask=None if target_mask is None else ~target_mask,
        )
        return y @ self.embedding.weight.T


def rename(tensors: Weights) -> Weights:
    renamed = relabel(
        tensors,
        {
            r"^embedding\.": "encoder.stem.embedding.",
            r"^stacks\.": "",
            r"^(encoder|decoder)\.layers\.": r"\1.blocks.",
            r"\.self_attn\.in_proj_": ".token.mix.qkv.",
            r"\.self_attn\.out_proj\.": ".token.mix.out.",
            r"\.multihead_attn\.out_proj\.": ".cross.mix.out.",
            r"\.linear1\.": ".channel.mix.up.",
            r"\.linear2\.": ".channel.mix.down.",
            r"\.norm1\.": ".token.norm.",
            r"^(encoder.*)\.norm2\.": r"\1.channel.norm.",
            r"^(decoder.*)\.norm2\.": r"\1.cross.norm.",
            r"\.norm3\.": ".channel.norm.",
        },
    )
    for name in [name for name in renamed if ".multihead_attn.in_proj_" in name]:
        q, kv = renamed.pop(name).tensor_split([WIDTH])
        renamed[name.replace("multihead_attn.in_proj_", "cross.mix.q.")] = q
        renamed[name.replace("multihead_attn.in_proj_", "cross.mix.kv.")] = kv
    return renamed


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("pre", [False, True], ids=["post-norm", "pre-norm"])
def test_transformer(pre, padded):
    spec = transformer_seq2seq(2, WIDTH, HEADS, seq_len=LENGTH, vocab_size=VOCABULARY)
    for stack in ("encoder", "decoder") if pre else ():
        spec = override(override(spec, f"{stack}.block.order", "pre"), f"{stack}.norm", LayerNorm(1e-5))
    source, target = torch.randint(VOCABULARY, (3, 8)), torch.randint(VOCABULARY, (3, 6))
    masks = [None, None]
    if padded:
        masks = [torch.arange(8) < torch.tensor([[8], [5], [2]]), torch.arange(6) < torch.tensor([[3], [6], [1]])]
    assert_parity(spec.build(), Peer(pre), rename, source, target, ask=lambda model, *ids: model(*ids, *masks))
