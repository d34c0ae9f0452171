"""Published BERT models: equal outputs to transformers, and one-line errors for invalid folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import allmlp
from allmlp.layers import LMHead
from allmlp.models.gmlp import gmlp_text
from allmlp.models.resmlp import resmlp
from allmlp.weights.huggingface_bert import init_embeddings, load_bert, principal, word_embeddings

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "type_vocab_size": 3,
}


def publish(folder: Path, kind: str = "BertModel", **options: Any) -> Any:
    """A model saved by transformers, with weights large enough that each affects the output."""
    model = getattr(transformers, kind)(transformers.BertConfig(**SIZES | options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(7) < torch.tensor([7, 5, 2])[:, None]
    return torch.randint(40, (3, 7)), mask, torch.randint(3, (3, 7))


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the tensors of a folder and save them again."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("options", [{}, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2}], ids=["plain", "other"])
def test_features(options: dict[str, Any], tmp_path: Path) -> None:
    peer, (ids, mask, segments) = publish(tmp_path, **options), inputs()
    ours = load_bert(tmp_path)
    assert not ours.training and ours.spec.head is None
    with torch.no_grad():
        for seen, kinds in ((mask, segments), (mask, None), (None, None)):
            expected = peer(ids, attention_mask=seen, token_type_ids=kinds).last_hidden_state
            found = ours(ids, seen, segments=kinds)
            real = mask if seen is not None else torch.ones_like(mask)
            torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_masked_words(kind: str, tmp_path: Path) -> None:
    peer, (ids, mask, segments) = publish(tmp_path, kind, hidden_act="gelu_new"), inputs()
    ours = load_bert(tmp_path)
    assert isinstance(ours.spec.head, LMHead) and ours.spec.head.transform and ours.spec.head.bias
    with torch.no_grad():
        answers = peer(ids, attention_mask=mask, token_type_ids=segments)
        expected = answers.logits if kind == "BertForMaskedLM" else answers.prediction_logits
        torch.testing.assert_close(ours(ids, mask, segments=segments)[mask], expected[mask], rtol=0, atol=1e-5)
    allmlp.save(ours, tmp_path / "ours")
    assert allmlp.load(tmp_path / "ours").spec == ours.spec


def test_names_of_the_first_published_models(tmp_path: Path) -> None:
    """gamma and beta, position ids, a copy of the tied embedding, half precision, a shorter configuration."""
    publish(tmp_path, "BertForMaskedLM", type_vocab_size=2)
    now = load_bert(tmp_path).state_dict()

    def older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        named["bert.embeddings.position_ids"] = torch.arange(9)[None]
        named["cls.predictions.decoder.weight"] = named["bert.embeddings.word_embeddings.weight"].clone()
        return {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in named.items()}

    rewrite(tmp_path, older)
    configure(tmp_path, layer_norm_eps=None, type_vocab_size=None, hidden_act=None, tie_word_embeddings=None)
    then = load_bert(tmp_path).state_dict()
    assert now.keys() == then.keys() and all(torch.equal(now[name].half().float(), then[name]) for name in now)


def test_a_pickle_with_tied_weights(tmp_path: Path) -> None:
    """torch.save writes the storage of the embedding and of the output layer once."""
    publish(tmp_path, "BertForMaskedLM", vocab_size=2000)
    expected = load_bert(tmp_path).state_dict()
    state = load_file(tmp_path / "model.safetensors")
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found = load_bert(tmp_path).state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)


def test_the_table_alone(tmp_path: Path) -> None:
    for kind in ("BertModel", "BertForMaskedLM"):
        peer = publish(tmp_path / kind, kind)
        rewrite(tmp_path / kind, lambda tensors: {name: t for name, t in tensors.items() if "word_" in name})
        assert torch.equal(word_embeddings(tmp_path / kind), peer.get_input_embeddings().weight)
    rewrite(tmp_path / kind, lambda tensors: {"something.else": torch.zeros(1)})
    with pytest.raises(allmlp.UserError, match=r"BertForMaskedLM has no embeddings.word_embeddings.weight"):
        word_embeddings(tmp_path / kind)


# --- what is wrong with a folder ------------------------------------------------------------------------------


def test_tensors_are_named(tmp_path: Path) -> None:
    publish(tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["encoder.layer.1.attention.self.key.bias"]
        tensors["encoder.layer.0.output.dense.weight"] = torch.zeros(12, 12)
        return tensors | {"adapter.weight": torch.zeros(3)}

    rewrite(tmp_path, spoil)
    with pytest.raises(allmlp.UserError) as caught:
        load_bert(tmp_path)
    for words in (
        "1 missing (encoder.layer.1.attention.self.key.bias)",
        "1 unexpected (adapter.weight)",
        "1 of another shape (encoder.layer.0.output.dense.weight)",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "has the model_type 'roberta': only 'bert' is supported"),
        ({"model_type": None}, "has the model_type None"),
        ({"hidden_size": 13}, "its configuration has hidden_size 13, its weights have 12"),
        ({"hidden_size": "wide"}, "its configuration has hidden_size 'wide', its weights have 12"),
        ({"hidden_act": "mish"}, "the hidden_act 'mish' is not supported; use one of gelu, gelu_new"),
        (
            {"position_embedding_type": "relative_key"},
            "only bidirectional BERT models with absolute positions are supported",
        ),
        ({"is_decoder": True}, "only bidirectional BERT models with absolute positions are supported"),
        ({"tie_word_embeddings": False}, "a language-model head whose embedding is not tied is not supported"),
        ({"num_attention_heads": 5}, "12 channels cannot be split into 5 heads"),
        ({"vocab_size": 41}, "its configuration has vocab_size 41, its weights have 40"),
    ],
)
def test_configurations_that_cannot_be_read(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    publish(tmp_path, "BertForMaskedLM")
    configure(tmp_path, **changes)
    with pytest.raises(allmlp.UserError, match=message) as caught:
        load_bert(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [load_bert, word_embeddings])
def test_files_that_are_missing_or_damaged(read: Any, tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"nowhere is not a model folder: it has no config.json"):
        read(tmp_path / "nowhere")
    publish(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(allmlp.UserError, match=r"model.safetensors is damaged or not a safetensors file"):
        read(tmp_path)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(allmlp.UserError, match=r"pytorch_model.bin is damaged or not a weights file"):
        read(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(allmlp.UserError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        read(tmp_path)
    for text, message in (("{", "cannot read .*config.json"), ("[]", "config.json is not a JSON object")):
        config.write_text(text)
        with pytest.raises(allmlp.UserError, match=message):
            read(tmp_path)


# --- the table as a start ---------------------------------------------------------------------------------------


def test_a_table_of_the_same_width_is_copied(tmp_path: Path) -> None:
    publish(tmp_path)
    model = allmlp.create(gmlp_text(1, 12, 8, vocab_size=40), seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    init_embeddings(model, tmp_path)
    after = model.state_dict()
    assert torch.equal(after.pop("stem.embedding.weight"), word_embeddings(tmp_path))
    assert all(torch.equal(before[name], weight) for name, weight in after.items())


@pytest.mark.parametrize("width", [5, 16])
def test_a_table_of_another_width_is_projected(width: int, tmp_path: Path) -> None:
    publish(tmp_path)
    models = [allmlp.create(gmlp_text(1, width, 8, vocab_size=40), seed=0) for _ in range(2)]
    std = models[0].embedding.std().item()
    for model in models:
        init_embeddings(model, tmp_path)
    table = models[0].embedding.detach()
    assert torch.equal(table, models[1].embedding) and table.std().item() == pytest.approx(std, rel=1e-5)
    source = word_embeddings(tmp_path).double()
    centered = source - source.mean(0)
    kept = min(width, 12)
    u, s, _ = torch.linalg.svd(centered, full_matrices=False)
    best = (u[:, :kept] * s[:kept]) @ (u[:, :kept] * s[:kept]).T
    found = table.double() @ table.double().T
    torch.testing.assert_close(found / found.norm(), best / best.norm(), rtol=0, atol=1e-6)
    assert not table[:, kept:].any() and models[0].embedding.requires_grad


def test_the_signs_of_components_are_fixed() -> None:
    """A matrix and its negative have the same components, so only the sign of the rows differs."""
    table = torch.randn(30, 6)
    torch.testing.assert_close(principal(-table, 4), -principal(table, 4))
    variances = principal(table, 6).var(0)
    assert torch.equal(variances, variances.sort(descending=True).values)


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    publish(tmp_path)
    with pytest.raises(allmlp.UserError, match="has 40 tokens, the model 41: use its tokenizer"):
        init_embeddings(allmlp.create(gmlp_text(1, 12, 8, vocab_size=41)), tmp_path)
    with pytest.raises(allmlp.UserError, match="only text encoders have word embeddings to initialize"):
        init_embeddings(allmlp.create(resmlp(1, 8, 0.1, patch_size=4, img_size=8)), tmp_path)
