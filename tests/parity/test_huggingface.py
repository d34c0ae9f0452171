"""BERT, ViT and T5's relative positions against transformers."""

from __future__ import annotations

import pytest
import torch
from agree import Weights, assert_parity, relabel
from torch import Tensor, nn

import allmlp
from allmlp.layers import Attention, Context, FirstTokenPool, Init, LMHead, PooledHead, QAHead, RelativePositionBias
from allmlp.layers.context import BuildContext
from allmlp.models.bert import bert
from allmlp.models.vit import vit

transformers = pytest.importorskip("transformers")
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

VOCABULARY, LENGTH = 13, 9
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,  # otherwise the row of the padding token gets no gradient
}


def rename_bert(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^bert\.": "",
            r"^embeddings\.word_embeddings\.": "stem.embedding.",
            r"^embeddings\.position_embeddings\.": "stem.positions.",
            r"^embeddings\.token_type_embeddings\.": "stem.segments.",
            r"^embeddings\.LayerNorm\.": "stem.norm.",
            r"^encoder\.layer\.": "blocks.",
            r"\.attention\.self\.query\.(\w+)": r".token.mix.qkv.\1#0",
            r"\.attention\.self\.key\.(\w+)": r".token.mix.qkv.\1#1",
            r"\.attention\.self\.value\.(\w+)": r".token.mix.qkv.\1#2",
            r"\.attention\.output\.dense\.": ".token.mix.out.",
            r"\.attention\.output\.LayerNorm\.": ".token.norm.",
            r"\.intermediate\.dense\.": ".channel.mix.up.",
            r"\.output\.dense\.": ".channel.mix.down.",
            r"\.output\.LayerNorm\.": ".channel.norm.",
            r"^cls\.predictions\.bias": "head.bias",
            r"^cls\.predictions\.transform\.dense\.": "head.transform.",
            r"^cls\.predictions\.transform\.LayerNorm\.": "head.norm.",
            r"^pooler\.dense\.": "head.pooler.",
            r"^(classifier|qa_outputs)\.": "head.proj.",
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("kind", "head", "read"),
    [
        pytest.param("BertModel", None, lambda out: out.last_hidden_state, id="features"),
        pytest.param("BertForMaskedLM", LMHead(bias=True, transform=True), lambda out: out.logits, id="words"),
        pytest.param("BertForSequenceClassification", PooledHead(4), lambda out: out.logits, id="pair"),
        pytest.param(
            "BertForQuestionAnswering",
            QAHead(),
            lambda out: torch.stack([out.start_logits, out.end_logits], dim=-1),
            id="span",
        ),
    ],
)
def test_bert(kind, head, read, padded):
    config = transformers.BertConfig(**BERT, num_labels=4 if isinstance(head, PooledHead) else 2)
    options = {"add_pooling_layer": False} if head is None else {}
    peer = getattr(transformers, kind)(config, **options)
    spec = bert(3, 12, 3, seq_len=LENGTH, vocab_size=VOCABULARY).replace(
        head=head, pool=FirstTokenPool() if isinstance(head, PooledHead) else None
    )
    ids, segments = torch.randint(VOCABULARY, (3, 7)), torch.randint(2, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 5, 2])[:, None] if padded else None
    assert_parity(
        spec.build(),
        peer,
        rename_bert,
        ids,
        ask=lambda model, ids: model(ids, mask, segments=segments),
        ask_peer=lambda model, ids: read(model(ids, attention_mask=mask, token_type_ids=segments)),
    )


def test_bert_base_uncased_has_the_same_tensors():
    """109,514,298 numbers."""
    with torch.device("meta"):
        peer = transformers.BertForMaskedLM(transformers.BertConfig())
        ours = allmlp.create("bert_base_uncased")
    renamed = rename_bert(dict(peer.named_parameters()))
    assert {name: t.shape for name, t in renamed.items()} == {name: p.shape for name, p in ours.named_parameters()}
    assert sum(p.numel() for p in ours.parameters()) == 109_514_298


def rename_vit(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^vit\.": "",
            r"^embeddings\.cls_token": "stem.token",
            r"^embeddings\.position_embeddings": "stem.positions.weight",
            r"^embeddings\.patch_embeddings\.projection\.": "stem.proj.",
            r"^layers\.": "blocks.",
            r"\.attention\.q_proj\.(\w+)": r".token.mix.qkv.\1#0",
            r"\.attention\.k_proj\.(\w+)": r".token.mix.qkv.\1#1",
            r"\.attention\.v_proj\.(\w+)": r".token.mix.qkv.\1#2",
            r"\.attention\.o_proj\.": ".token.mix.out.",
            r"\.layernorm_before\.": ".token.norm.",
            r"\.layernorm_after\.": ".channel.norm.",
            r"\.mlp\.fc1\.": ".channel.mix.up.",
            r"\.mlp\.fc2\.": ".channel.mix.down.",
            r"^layernorm\.": "norm.",
            r"^classifier\.": "head.proj.",
        },
    )


def test_vit():
    config = transformers.ViTConfig(
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=48,
        image_size=12,
        patch_size=4,
        num_labels=5,
        layer_norm_eps=1e-6,
    )
    peer = transformers.ViTForImageClassification(config)
    assert_parity(
        vit(3, 12, 3, patch_size=4, img_size=12, num_classes=5).build(),
        peer,
        rename_vit,
        torch.randn(3, 3, 12, 12),
        ask_peer=lambda model, images: model(images).logits,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (16, 64), (32, 1000)])
def test_t5_buckets(buckets, distance, causal):
    offset = torch.arange(-2 * distance, 2 * distance + 1)
    expected = T5Attention._relative_position_bucket(offset, not causal, buckets, distance)
    ours = RelativePositionBias(buckets, distance).build(1, causal)
    assert torch.equal(ours.bucket(offset), expected)


class Relative(nn.Module):
    """Our attention with relative positions, without the biases that T5 does not have."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        spec = Attention(3, causal, bias=RelativePositionBias(8, 20))
        self.relative = spec.bias.build(spec.num_heads, causal)
        self.layer = spec.build(BuildContext(tokens=30, channels=12, init=Init()))
        self.layer.qkv.bias = self.layer.out.bias = None

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        return self.layer(x, Context(mask=real, bias=self.relative(0, x.shape[1])))


def rename_t5(tensors: Weights) -> Weights:
    return relabel(
        tensors,
        {
            r"^relative_attention_bias\.": "relative.",
            r"^q\.weight": "layer.qkv.weight#0",
            r"^k\.weight": "layer.qkv.weight#1",
            r"^v\.weight": "layer.qkv.weight#2",
            r"^o\.": "layer.out.",
        },
    )


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_t5_attention(causal, padded):
    config = transformers.T5Config(
        d_model=12,
        d_kv=4,
        num_heads=3,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=causal,
    )
    config._attn_implementation = "eager"
    peer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    peer.scaling = 4**-0.5  # T5 leaves the scale to its weights
    real = torch.arange(26) < torch.tensor([[26], [17], [3]]) if padded else None
    seen = torch.ones(26, 26, dtype=torch.bool)
    seen = (seen.tril() if causal else seen) & (True if real is None else real[:, None, None])
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    assert_parity(
        Relative(causal),
        peer,
        rename_t5,
        torch.randn(3, 26, 12),
        ask=lambda model, x: model(x, real),
        ask_peer=lambda model, x: model(x, mask=hidden)[0],
    )
