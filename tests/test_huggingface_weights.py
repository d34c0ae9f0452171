"""Hugging Face's BERT and ViT: equal outputs, and lossless conversion back to a folder for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, read_preprocessing
from allmlp.layers import FirstTokenPool, LayerNorm, LMHead, PooledHead, QAHead
from allmlp.models.bert import bert
from allmlp.models.vit import vit
from allmlp.weights.convert import convert

transformers = pytest.importorskip("transformers")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
TEXT = {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "type_vocab_size": 3,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "image_size": 12,
    "patch_size": 4,
}
BUILT = ("qkv_bias", "tie_word_embeddings")
"""Settings that change the set of weights."""
OPTIONS = [{}, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2}]


def publish(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model saved by transformers, whose weights all affect the output."""
    config = (
        transformers.ViTConfig(**IMAGE | options)
        if kind.startswith("ViT")
        else transformers.BertConfig(**TEXT | options)
    )
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.to(dtype).save_pretrained(folder)
    return model


def words() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(7) < torch.tensor([7, 5, 2])[:, None]
    return torch.randint(40, (3, 7)), mask, torch.randint(3, (3, 7))


def through(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """The converted folder, the original tensors, and those converted back."""
    ours = convert(str(folder), str(folder.parent / "ours"))
    back = convert(str(ours), str(folder.parent / "back"), to="hf")
    config = json.loads((back / "config.json").read_text())
    assert config["architectures"] == [kind]
    again = getattr(transformers, kind).from_pretrained(back)
    assert not again.training
    return ours, load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


# --- BERT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "other"])
@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"]
)
def test_bert(kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    peer, (ids, mask, segments) = publish(tmp_path / "theirs", kind, dtype, **options), words()
    folder, before, after = through(tmp_path / "theirs", kind)
    ours = allmlp.load(folder, dtype=None)
    assert ours.dtype == dtype
    with torch.no_grad():
        found, answers = ours(ids, mask, segments=segments), peer(ids, mask, segments)
    if kind == "BertModel":
        assert same(after, {name: t for name, t in before.items() if not name.startswith("pooler.")})
        found, expected = found[mask], answers.last_hidden_state[mask]
    else:
        assert same(after, before)
        if kind == "BertForQuestionAnswering":
            found, expected = found[mask], torch.stack([answers.start_logits, answers.end_logits], 2)[mask]
        else:
            found, expected = (found[mask], answers.logits[mask]) if found.dim() == 3 else (found, answers.logits)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("segments", [1, 2])
def test_a_converted_classifier_predicts(segments: int, tmp_path: Path) -> None:
    """One of a single segment reads a pair, too."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    options = {"vocab_size": len(vocabulary), "type_vocab_size": segments} | labels
    peer = publish(tmp_path / "theirs", "BertForSequenceClassification", **options)
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(vocabulary))
    folder = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    (alone,), (pair,) = allmlp.predict(folder, ["good film"]), allmlp.predict(folder, [("good film", "bad")])
    ids, kinds = torch.tensor([[2, 5, 7, 3, 6, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1]]) % segments
    for found, length in ((alone, 4), (pair, 6)):
        with torch.no_grad():
            expected = peer(ids[:, :length], token_type_ids=kinds[:, :length]).logits.softmax(1)[0]
        for one in found:
            assert one.probability == pytest.approx(expected[labels["label2id"][one.label]].item(), abs=1e-5)
    assert ("segments" in allmlp.transform(folder, [("good film", "bad")])) == (segments > 1)


def test_what_a_bert_gives_travels_along(tmp_path: Path) -> None:
    heads = {
        "BertModel": (type(None), None),
        "BertForMaskedLM": (LMHead, TextPreprocessing("text", 9)),
        "BertForSequenceClassification": (PooledHead, TextPreprocessing("classes", 9, ("bad", "good"))),
        "BertForQuestionAnswering": (QAHead, TextPreprocessing("span", 9)),
    }
    for kind, (head, inputs) in heads.items():
        options = {"id2label": {0: "bad", 1: "good"}} if "Sequence" in kind else {}
        publish(tmp_path / kind, kind, **options)
        (tmp_path / kind / "vocab.txt").write_text("[PAD]\n[UNK]\n")
        folder = convert(str(tmp_path / kind), str(tmp_path / "ours"))
        spec: Any = allmlp.load(folder).spec
        assert isinstance(spec.head, head) and isinstance(spec.pool, FirstTokenPool) == (head is PooledHead)
        assert (folder / "vocab.txt").read_text() == "[PAD]\n[UNK]\n"
        assert (read_preprocessing(folder) if inputs else (folder / "preprocessing.json").exists() or None) == inputs
        back = convert(str(folder), str(tmp_path / "back"), to="hf")
        assert (back / "vocab.txt").is_file()
        config = json.loads((back / "config.json").read_text())
        assert config.get("id2label") == ({"0": "bad", "1": "good"} if head is PooledHead else None)


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    publish(tmp_path / "theirs", "BertForPreTraining")
    told: list[str] = []
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"), notify=told.append)
    assert len(told) == 1 and told[0].startswith("dropped, since the model does not use them: ")
    for name in (
        "pooler.dense.weight",
        "pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    ):
        assert name in told[0]


# --- ViT ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options", [*OPTIONS, {"image_size": [8, 12], "patch_size": [4, 2]}], ids=["plain", "other", "wide"]
)
@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification"])
def test_vit(kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    peer = publish(tmp_path / "theirs", kind, dtype, num_labels=5, **options)
    folder, before, after = through(tmp_path / "theirs", kind)
    assert same(after, {name: tensor for name, tensor in before.items() if not name.startswith("pooler.")})
    ours = allmlp.load(folder, dtype=None)
    assert ours.dtype == dtype
    images = torch.randn(3, 3, *ours.spec.stem.img_size, dtype=dtype)  # type: ignore[attr-defined]
    with torch.no_grad():
        answers = peer(images)
        expected = answers.last_hidden_state[:, 0] if kind == "ViTModel" else answers.logits
        torch.testing.assert_close(ours(images), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert expected.abs().max() > 0.1


def test_how_pictures_are_prepared_travels_along(tmp_path: Path) -> None:
    labels = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    publish(tmp_path / "theirs", "ViTForImageClassification", **labels)
    folder = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert read_preprocessing(folder) == ImagePreprocessing((0.5,) * 3, (0.5,) * 3, ("cat", "dog"))
    pixels = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 12, "width": 12}}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(pixels))
    folder = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert read_preprocessing(folder) == ImagePreprocessing((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), ("cat", "dog"))
    back = convert(str(folder), str(tmp_path / "back"), to="hf")
    written = json.loads((back / "preprocessor_config.json").read_text())
    assert {name: written[name] for name in pixels} == pixels
    assert transformers.ViTConfig.from_pretrained(back).id2label == labels["id2label"]
    publish(tmp_path / "several", "ViTForImageClassification", problem_type="multi_label_classification", **labels)
    assert not (convert(str(tmp_path / "several"), str(tmp_path / "ours")) / "preprocessing.json").exists()


def test_values_are_no_classes(tmp_path: Path) -> None:
    labels = {"id2label": {0: "age", 1: "height"}, "label2id": {"age": 0, "height": 1}}
    publish(tmp_path / "theirs", "ViTForImageClassification", problem_type="regression", **labels)
    folder = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert read_preprocessing(folder) == ImagePreprocessing((0.5,) * 3, (0.5,) * 3, ("age", "height"), task="values")
    back = convert(str(folder), str(tmp_path / "back"), to="hf")
    found = transformers.ViTConfig.from_pretrained(back)
    assert found.problem_type == "regression" and found.id2label == labels["id2label"]
    publish(tmp_path / "texts", "BertForSequenceClassification", problem_type="regression", **labels)
    assert not (convert(str(tmp_path / "texts"), str(tmp_path / "ours")) / "preprocessing.json").exists()


@pytest.mark.parametrize("options", [{"num_labels": 2, "problem_type": "regression"}, {"num_labels": 1}])
def test_values_are_not_probabilities_of_classes(options: dict[str, Any], tmp_path: Path) -> None:
    """transformers takes a single output for a regression."""
    peer = publish(tmp_path / "images", "ViTForImageClassification", **options)
    folder = convert(str(tmp_path / "images"), str(tmp_path / "ours"))
    (found,) = allmlp.predict(folder, [np.zeros((12, 12, 3), np.uint8)])
    with torch.no_grad():
        expected = peer(torch.full((1, 3, 12, 12), -1.0)).logits[0].tolist()
    assert [one.value for one in found] == pytest.approx(expected, abs=1e-4)
    publish(tmp_path / "texts", "BertForSequenceClassification", **options)
    (tmp_path / "texts" / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    assert not (convert(str(tmp_path / "texts"), str(tmp_path / "converted")) / "preprocessing.json").exists()


def test_the_names_in_memory_are_known_too(tmp_path: Path) -> None:
    """transformers 5 uses other names for the weights of a ViT than the published files."""
    for kind in ("ViTModel", "ViTForImageClassification", "BertForMaskedLM"):
        peer = publish(tmp_path / kind, kind)
        expected = convert(str(tmp_path / kind), str(tmp_path / "expected"))
        state = {name: tensor.clone() for name, tensor in peer.state_dict().items()}
        save_file(state, tmp_path / kind / "model.safetensors")
        found = convert(str(tmp_path / kind), str(tmp_path / "found"))
        assert same(load_file(found / "model.safetensors"), load_file(expected / "model.safetensors"))


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "ViTForImageClassification"])
def test_a_pickle_or_a_file_alone(kind: str, tmp_path: Path) -> None:
    """With the folder's configuration if the file has its usual name; without it, heads have 64 channels."""
    publish(tmp_path / "theirs", kind, hidden_size=128, num_attention_heads=4, layer_norm_eps=1e-3)
    expected = convert(str(tmp_path / "theirs"), str(tmp_path / "expected"))
    weights = tmp_path / "theirs" / "model.safetensors"
    beside = convert(str(weights), str(tmp_path / "beside"))
    state = load_file(weights)
    torch.save(state, tmp_path / "theirs" / "pytorch_model.bin")
    weights.unlink()
    pickled = convert(str(tmp_path / "theirs"), str(tmp_path / "pickled"))
    for folder in (beside, pickled):
        assert allmlp.load(folder).spec == allmlp.load(expected).spec
        assert same(load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors"))
    save_file(state, tmp_path / "alone")
    spec: Any = allmlp.load(convert(str(tmp_path / "alone"), str(tmp_path / "ours"))).spec
    assert spec.block.token.num_heads == 2 and spec.block.norm == LayerNorm(1e-12)
    told = {"block.token.num_heads": 4, "block.norm.eps": 1e-3}
    spec = allmlp.load(convert(str(tmp_path / "alone"), str(tmp_path / "ours"), overrides=told)).spec
    assert spec.block.token.num_heads == 4 and spec.block.norm == LayerNorm(1e-3)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "BertModel",
            {"model_type": "roberta"},
            "model_type 'roberta': only 'bert', 'vit', 'gpt2', 'llama', 'patchtsmixer' are supported",
        ),
        ("BertModel", {"hidden_act": "mish"}, "the hidden_act 'mish' is not supported; use one of gelu, gelu_new"),
        ("BertModel", {"is_decoder": True}, "only bidirectional BERT models with absolute positions are supported"),
        ("BertModel", {"num_hidden_layers": 4}, "its configuration has num_hidden_layers 4, its weights have 3"),
        ("BertModel", {"vocab_size": "many"}, "its configuration has vocab_size 'many', its weights have 40"),
        ("BertModel", {"num_attention_heads": 5}, "12 channels cannot be split into 5 heads"),
        ("BertModel", {"num_attention_heads": [3]}, "Attention.num_heads must be a whole number"),
        ("BertModel", {"layer_norm_eps": -1}, "LayerNorm.eps must be"),
        ("ViTForImageClassification", {"image_size": 16}, "of another shape (embeddings.position_embeddings)"),
        ("ViTForImageClassification", {"image_size": "x"}, "must be 2 numbers"),
        ("ViTForImageClassification", {"num_channels": 1}, "its configuration has num_channels 1, its weights have 3"),
        ("ViTForMaskedImageModeling", {}, "unexpected (decoder.0.bias, decoder.0.weight, embeddings.mask_token)"),
        (
            "BertForMaskedLM",
            {"tie_word_embeddings": False},
            "a language-model head whose embedding is not tied is not supported",
        ),
        ("BertForTokenClassification", {}, "2 unexpected (classifier.bias, classifier.weight)"),
        ("ViTModel", {"qkv_bias": False}, "theirs does not match the model: 6 missing (encoder.layer.{0..1}.attention"),
    ],
)
def test_what_cannot_be_read(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    publish(folder, kind, **{name: value for name, value in changes.items() if name in BUILT})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(folder), str(tmp_path / "ours"))
    assert message in str(caught.value) and "\n" not in str(caught.value) and "theirs" in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (bert(1, 8, 2, vocab_size=9), "cannot represent this model: head is LMHead()"),
        (bert(1, 8, 2, vocab_size=9, positions=None), "but lacks embeddings.position_embeddings.weight"),
        (
            vit(1, 12, 3, 4, img_size=8, num_classes=3).replace(norm=LayerNorm(1e-3)),
            "norm.eps is 0.001, but the format implies 1e-06",
        ),
        (vit(1, 12, 3, 4, img_size=8, num_classes=3).replace(norm=None), "norm is None"),
    ],
)
def test_what_has_no_place_there(spec: Any, message: str, tmp_path: Path) -> None:
    allmlp.save(spec.build(), tmp_path / "ours")
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="hf")
    assert message in str(caught.value) and not (tmp_path / "theirs").exists()


def test_our_own_vit_in_transformers(tmp_path: Path) -> None:
    """Models trained here, with another eps and a wide image, load in transformers."""
    model = vit(2, 12, 3, 4, img_size=8, num_classes=3).configure(img_size=(8, 12)).build().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    allmlp.save(model, tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="hf")
    peer = transformers.ViTForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    images = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        torch.testing.assert_close(peer(images).logits, model(images), rtol=1e-5, atol=1e-5)
