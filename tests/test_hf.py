"""This library's models in transformers' own code: Auto classes, Trainer, pipelines, generate."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allmlp
from allmlp.data.decode import read_images
from allmlp.data.tokenizer import load_tokenizer
from allmlp.errors import UserError
from allmlp.layers import ClassifierHead, MeanPool
from allmlp.matmul import VARIABLE
from allmlp.models.encoder import EncoderModel
from allmlp.models.gmlp import gmlp_text
from allmlp.prediction import open_predictor
from allmlp.spec import to_dict
from allmlp.tasks.causal_lm import generate
from allmlp.tasks.task import Normalize
from allmlp.tasks.translate import translate
from data.sample_images import encode, rotated, scene
from folders import CLASSES, image_folder, text_folder
from tiny import IMAGES, TEXTS, TINY_SPECS, randomize, text_model, tiny_model
from without_allmlp import PRELUDE

transformers = pytest.importorskip("transformers")

import allmlp.hf  # noqa: E402
from allmlp.hf import code  # noqa: E402

TASKS = {
    "images": ("image-classification", "AutoModelForImageClassification"),
    "classes": ("text-classification", "AutoModelForSequenceClassification"),
    "text": ("fill-mask", "AutoModelForMaskedLM"),
    "causal": ("text-generation", "AutoModelForCausalLM"),
    "span": ("question-answering", "AutoModelForQuestionAnswering"),
    "translation": ("translation", "AutoModelForSeq2SeqLM"),
}
SENTENCE = "the cat sat on the mat"


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of this library for each task."""
    root = tmp_path_factory.mktemp("folders")
    return {name: image_folder(root / name) if name == "images" else text_folder(root / name, name) for name in TASKS}


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same models, saved by transformers."""
    root = tmp_path_factory.mktemp("saved")
    for name, folder in folders.items():
        allmlp.hf.wrap(folder).save_pretrained(root / name)
        allmlp.hf.processor(folder).save_pretrained(root / name)
    return {name: root / name for name in folders}


def auto(name: str, folder: Path, **options: Any) -> Any:
    return getattr(transformers, TASKS[name][1]).from_pretrained(folder, **options)


def inputs(name: str, model: Any) -> dict[str, torch.Tensor]:
    if name == "images":
        return {"pixel_values": torch.randn(2, 3, 8, 12)}
    ids = torch.randint(5, 60, (2, 7))
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if name == "translation" else {})


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- saving and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_there_and_back(name: str, folders: dict[str, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    """allmlp -> save_pretrained -> Auto class -> allmlp -> wrap: the same weights, outputs, preprocessing."""
    original = allmlp.load(folders[name])
    loaded = auto(name, saved[name])
    assert type(loaded).__name__ == allmlp.hf.AUTO_CLASSES[TASKS[name][1]] and not loaded.training
    assert loaded.config.architectures == [type(loaded).__name__]
    back = allmlp.load(saved[name])
    seq_len = {} if name == "images" else {"seq_len": loaded.config.max_position_embeddings}
    assert back.spec == original.spec and back.preprocessing == original.preprocessing.replace(**seq_len)
    assert same_state(original, loaded.model) and same_state(original, back)
    values = inputs(name, loaded)
    expected = original(*values.values())
    output = loaded(**values)
    logits = torch.stack([output.start_logits, output.end_logits], 2) if name == "span" else output.logits
    assert torch.equal(logits, expected) and torch.equal(back(*values.values()), expected)
    allmlp.save(back, tmp_path / "again", like=saved[name])
    assert same_state(allmlp.hf.wrap(tmp_path / "again"), loaded)
    if name != "images":
        assert load_tokenizer(saved[name]).encode([SENTENCE]) == load_tokenizer(folders[name]).encode([SENTENCE])


def test_weights_are_shared_and_dtypes_kept(saved: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_model(IMAGES[0], torch.float32)
    wrapped = allmlp.hf.wrap(model)
    assert wrapped.model is model and wrapped.config.num_labels == 5
    wrapped.half().save_pretrained(tmp_path)
    assert auto("images", tmp_path).dtype == torch.float16
    assert allmlp.load(tmp_path).dtype == torch.float32 and allmlp.load(tmp_path, dtype=None).dtype == torch.float16


def test_another_head(folders: dict[str, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    """A language model with a new classifier: the encoder is loaded, the head initialized by its spec."""
    pretrained = allmlp.load(folders["text"])
    for model in (
        transformers.AutoModelForSequenceClassification.from_pretrained(saved["text"], num_labels=4),
        allmlp.hf.wrap(folders["text"], "text-classification", num_labels=4),
    ):
        for key, value in pretrained.state_dict().items():
            assert torch.equal(model.model.state_dict()[key], value), key
        weight = model.model.head.proj.weight
        assert weight.shape == (4, 16) and 0 < weight.abs().max() < 1 and not model.model.head.proj.bias.any()
        assert model.model.spec.head == ClassifierHead(4) and model.config.preprocessing().task == "classes"
    other = auto("images", saved["images"], num_labels=2, ignore_mismatched_sizes=True)
    assert (
        other.config.id2label == {0: "LABEL_0", 1: "LABEL_1"} and other(torch.zeros(1, 3, 8, 12)).logits.shape[1] == 2
    )
    other.save_pretrained(tmp_path)
    assert allmlp.load(tmp_path).preprocessing.class_names == ()
    names = [f"class {number}" for number in range(12)]
    for key in (int, str):
        labels = {key(number): names[number] for number in (3, *range(4, 12), 2, 0, 1)}
        named = allmlp.hf.wrap(folders["text"], "text-classification", id2label=labels)
        assert named.config.preprocessing().class_names == tuple(names), "by number, not by the order of the dictionary"
    for problem in ("multi_label_classification", "regression"):
        several = allmlp.hf.wrap(folders["text"], "text-classification", problem_type=problem)
        several.save_pretrained(tmp_path / problem)
        assert allmlp.load(tmp_path / problem).preprocessing is None, "softmax would not give its probabilities"


def test_loaded_parameters_of_a_module_stay(folders: dict[str, Path]) -> None:
    """Of a module only some of whose parameters were loaded, the others are initialized."""
    model = allmlp.hf.wrap(folders["images"])
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.fill_(7), norm.bias.fill_(7)
    norm.weight._is_hf_initialized = True
    model._init_weights(norm)
    assert (norm.weight == 7).all() and (norm.bias == 0).all()


def test_features(folders: dict[str, Path], saved: dict[str, Path]) -> None:
    encoder = transformers.AutoModel.from_pretrained(saved["classes"])
    ids = torch.randint(5, 60, (2, 7))
    found = encoder(ids, output_hidden_states=True)
    original = allmlp.load(folders["classes"])
    assert torch.equal(found.last_hidden_state, original.forward_features(ids))
    assert torch.equal(found.pooler_output, original.forward_head(found.last_hidden_state, pre_logits=True))
    assert len(found.hidden_states) == 3 and encoder.config.hidden_size == 16
    assert isinstance(encoder(ids, return_dict=False), tuple)


@pytest.mark.parametrize("name", TEXTS)
def test_embedded_tokens(name: str) -> None:
    model = text_model(name)
    ids, mask = torch.randint(31, (2, 9)), torch.arange(9) < torch.tensor([[9], [5]])
    embedded = torch.nn.functional.embedding(ids, model.embedding)
    assert torch.equal(model(inputs_embeds=embedded), model(ids))
    if not model.spec.block.causal:
        assert torch.equal(model(None, mask, inputs_embeds=embedded), model(ids, mask))
        wrapped = allmlp.hf.wrap(model)
        assert wrapped.get_input_embeddings().weight is model.embedding


def test_embedded_tokens_are_checked() -> None:
    model, images = text_model("gmlp_l18"), tiny_model(IMAGES[0])
    with pytest.raises(UserError, match="either"):
        model(torch.zeros(1, 2).long(), inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(UserError, match="either"):
        model()
    with pytest.raises(UserError, match=r"\[B, S, C\], got float64 \[1, 2\]"):
        model(inputs_embeds=torch.zeros(1, 2).double())
    with pytest.raises(UserError, match="13 tokens are longer than the 12"):
        model(inputs_embeds=torch.zeros(1, 13, 16).double())
    with pytest.raises(UserError, match="does not accept inputs_embeds"):
        images(inputs_embeds=torch.zeros(1, 2, 16).double())


# --- preprocessing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [3, 1])
def test_pixels(channels: int, tmp_path: Path) -> None:
    """The image processor gives the values that our own preprocessing gives."""
    folder = image_folder(tmp_path / "model", channels)
    transparent = scene().convert("RGBA")
    transparent.putalpha(100)
    contents = {"a.png": encode(scene(70, 31)), "b.jpg": rotated(6, "JPEG"), "c.png": encode(transparent)}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / name for name in contents]
    preprocessing = allmlp.load(folder).preprocessing
    expected = Normalize(preprocessing.mean, preprocessing.std)(read_images(files, (8, 12), preprocessing))
    processor = allmlp.hf.processor(folder)
    from PIL import Image

    opened = [Image.open(file) for file in files]
    assert torch.equal(processor(opened, return_tensors="pt").pixel_values, expected)
    assert torch.equal(processor([*map(str, files)], return_tensors="pt").pixel_values, expected), "as files"
    deep = tmp_path / "deep.png"
    Image.fromarray(np.arange(96, dtype=np.uint16).reshape(8, 12) * 600).save(deep)
    wanted = Normalize(preprocessing.mean, preprocessing.std)(read_images([deep], (8, 12), preprocessing))
    for given in (deep, str(deep), [Image.open(deep)]):
        assert torch.equal(processor(given, return_tensors="pt").pixel_values, wanted)
    array = np.asarray(scene(70, 31))
    assert torch.equal(processor(array, return_tensors="pt").pixel_values, expected[:1])
    allmlp.hf.wrap(folder).save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match="do_normalize is not an option of a call"):
        processor(array, do_normalize=False)
    processor.save_pretrained(tmp_path / "saved")
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "saved")
    assert type(again) is type(processor) and torch.equal(again(array)["pixel_values"], expected[:1])


def test_tokens(saved: dict[str, Path]) -> None:
    """Special tokens are where the model was trained with them."""
    expected = {"classes": "[CLS] {} [SEP]", "text": "[CLS] {} [SEP]", "causal": "[CLS] {}", "translation": "{} [SEP]"}
    for name, template in expected.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(saved[name])
        assert tokenizer.decode(tokenizer("the cat").input_ids) == template.format("the cat")
        assert tokenizer.model_max_length == auto(name, saved[name]).config.max_position_embeddings
        assert tokenizer.padding_side == ("left" if name == "causal" else "right")
    pair = transformers.AutoTokenizer.from_pretrained(saved["span"])("the cat", "a dog")
    assert "token_type_ids" not in pair and pair.input_ids.count(load_tokenizer(saved["span"]).sep_token_id) == 2


# --- pipelines and generation ------------------------------------------------------------------------------------


def test_pipelines_agree_with_predict(folders: dict[str, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(rotated(8, "JPEG"))
    for name, item in (("images", str(file)), ("classes", SENTENCE), ("text", "the cat sat on the [MASK]")):
        pipe = transformers.pipeline(TASKS[name][0], str(saved[name]), top_k=3)
        rows = pipe(item)
        rows = rows[0] if isinstance(rows[0], list) else rows
        found = [(row.get("token_str", row.get("label")), row["score"]) for row in rows]
        for folder in (folders[name], saved[name]):
            (row,) = allmlp.predict(folder, [item], top_k=3)
            row = row[0] if isinstance(row[0], list) else row
            assert [label for label, _ in found] == [one.label for one in row]
            np.testing.assert_allclose([score for _, score in found], [one.probability for one in row], rtol=1e-5)
    assert set(auto("images", saved["images"]).config.id2label.values()) == {*CLASSES}


def test_a_causal_model_that_classifies(tmp_path: Path) -> None:
    """Alone and padded in a batch."""
    folder = text_folder(tmp_path / "model", "classes")
    causal = gmlp_text(2, 16, 32, seq_len=24, vocab_size=len(load_tokenizer(folder)), causal=True)
    model = allmlp.create(causal.replace(pool=MeanPool(), head=ClassifierHead(len(CLASSES))), seed=0)
    randomize(model, spread=0.1)
    allmlp.save(model, folder)
    texts = ["the cat", "the cat sat on the mat"]
    inputs = allmlp.hf.processor(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = allmlp.hf.wrap(folder)(**inputs).logits.softmax(1)
    wanted = open_predictor(folder, device="cpu").probabilities([(text, "") for text in texts])
    torch.testing.assert_close(found, wanted)


def test_padding_is_not_read(saved: dict[str, Path]) -> None:
    for name in ("classes", "span", "text"):
        model, tokenizer = auto(name, saved[name]), transformers.AutoTokenizer.from_pretrained(saved[name])
        batch = tokenizer([SENTENCE, "a dog"], padding=True, return_tensors="pt")
        alone = tokenizer(["a dog"], return_tensors="pt")
        together, single = model(**batch)[0][1:], model(**alone)[0]
        length = alone.input_ids.shape[1]
        assert torch.allclose(together if name == "classes" else together[:, :length], single, atol=1e-6)
        if name == "span":
            assert (together[:, length:] < -1e30).all()


def test_how_texts_are_read_is_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    place = shutil.copytree(folders["classes"], tmp_path / "classes")
    known = json.loads((place / "preprocessing.json").read_text())
    changed = known | {"whole_files": True, "text_columns": ["a", "b"], "label_column": "c"}
    (place / "preprocessing.json").write_text(json.dumps(changed))
    allmlp.hf.wrap(place).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "preprocessing.json").read_text())
    assert saved["whole_files"] and (saved["text_columns"], saved["label_column"]) == (["a", "b"], "c")


def test_classes_keep_their_names_if_their_number_does(folders: dict[str, Path]) -> None:
    names = dict(enumerate(allmlp.load(folders["classes"]).preprocessing.class_names))  # type: ignore[union-attr]
    same = allmlp.hf.wrap(folders["classes"], num_labels=len(names)).config
    assert same.id2label == names and set(same.label2id) == set(names.values())
    assert "LABEL_0" in allmlp.hf.wrap(folders["classes"], num_labels=len(names) + 1).config.id2label.values()


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_texts_with_values_or_several_classes_are_not_predicted_as_one_class(
    problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also not in a folder that held a classifier."""
    for again in (False, True):
        place = tmp_path / f"again_{again}"
        if again:
            allmlp.hf.wrap(folders["classes"]).save_pretrained(place)
        allmlp.hf.wrap(folders["text"], "text-classification", num_labels=2, problem_type=problem).save_pretrained(
            place
        )
        allmlp.hf.processor(folders["text"]).save_pretrained(place)
        with pytest.raises(UserError, match=r"has no preprocessing\.json"):
            allmlp.predict(place, SENTENCE)


def test_padding_that_a_model_was_trained_to_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("classes", "span"):
        place = shutil.copytree(folders[name], tmp_path / name)
        known = json.loads((place / "preprocessing.json").read_text())
        (place / "preprocessing.json").write_text(json.dumps(known | {"mask_padding": False}))
        wrapped, tokenizer = allmlp.hf.wrap(place).eval(), allmlp.hf.processor(place)
        with pytest.raises(UserError, match="pass input_ids, not inputs_embeds"):
            wrapped(inputs_embeds=torch.zeros(1, 4, wrapped.config.hidden_size))
        wrapped.save_pretrained(tmp_path / f"saved_{name}")
        tokenizer.save_pretrained(tmp_path / f"saved_{name}")
        assert not json.loads((tmp_path / f"saved_{name}" / "preprocessing.json").read_text())["mask_padding"]
        full = tokenizer([SENTENCE], padding="max_length", return_tensors="pt")
        segments = {"segments": full["token_type_ids"]} if "token_type_ids" in full else {}
        again = getattr(transformers, TASKS[name][1]).from_pretrained(tmp_path / f"saved_{name}").eval()
        for model in (wrapped, again):
            for padding in ("longest", "max_length"):
                inputs = tokenizer([SENTENCE], padding=padding, return_tensors="pt")
                with torch.no_grad():
                    expected, found = model.model(full["input_ids"], None, **segments), model(**inputs)
                if name == "classes":
                    torch.testing.assert_close(found.logits, expected)
                else:
                    real = inputs["attention_mask"].sum()
                    assert found.start_logits.shape == inputs["input_ids"].shape
                    torch.testing.assert_close(found.start_logits[:, :real], expected[:, :real, 0])


def test_generate(folders: dict[str, Path], saved: dict[str, Path]) -> None:
    model, tokenizer = auto("causal", saved["causal"]), transformers.AutoTokenizer.from_pretrained(saved["causal"])
    prompts, options = ["the cat", "one two three four"], {"max_new_tokens": 6, "do_sample": False}
    ours = allmlp.load(folders["causal"]), load_tokenizer(folders["causal"])
    expected = [list(generate(*ours, prompt, 6, temperature=0)) for prompt in prompts]
    alone = []
    for prompt, tokens in zip(prompts, expected):
        start = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**start, **options)[0, start.input_ids.shape[1] :].tolist()
        assert found[: len(tokens)] == tokens
        alone.append(found)
        again = model.generate(**start, **options, use_cache=False)
        assert again[0, start.input_ids.shape[1] :].tolist() == found
    batch = tokenizer(prompts, padding=True, return_tensors="pt")  # on the left
    assert batch.attention_mask.min() == 0
    together = model.generate(**batch, **options)[:, batch.input_ids.shape[1] :].tolist()
    assert together == alone
    with pytest.raises(UserError, match="longer than the 24"):
        model.generate(**batch, max_new_tokens=30, do_sample=False, eos_token_id=-1)


@pytest.mark.parametrize("name", ["causal", "translation"])
def test_beam_search_with_the_cache(name: str, folders: dict[str, Path]) -> None:
    model = allmlp.hf.wrap(folders[name])
    randomize(model, spread=1.0)  # so that beams change their order
    for _ in range(4):
        ids = torch.randint(5, 60, (2, 3))
        found = [
            model.generate(ids, num_beams=4, max_new_tokens=8, do_sample=False, use_cache=cache)
            for cache in (True, False)
        ]
        assert torch.equal(*found)


def test_generation_goes_on_with_a_cache(folders: dict[str, Path]) -> None:
    model, ids = allmlp.hf.wrap(folders["causal"]), torch.randint(5, 60, (2, 4))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1}
    first = model.generate(ids, return_dict_in_generate=True, **options)
    found = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert torch.equal(found, model.generate(first.sequences, use_cache=False, **options))


def test_left_padding_of_a_causal_model(saved: dict[str, Path]) -> None:
    model, ids = auto("causal", saved["causal"]), torch.randint(5, 60, (1, 5))
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    labels = padded.masked_fill(mask == 0, -100)  # padding does not predict the first token
    found = model(padded, mask, labels=labels, output_hidden_states=True)
    alone = model(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(found.logits[:, 3:], alone.logits) and torch.allclose(found.loss, alone.loss)
    assert torch.equal(found.hidden_states[1][:, 3:], alone.hidden_states[1])
    cached = model(padded, mask, use_cache=True)  # a cache has no rows at different positions: there is none
    assert torch.equal(cached.logits, found.logits) and cached.past_key_values is None
    assert model(ids, torch.ones_like(ids), use_cache=True).past_key_values is not None


def test_documents_in_one_row_are_refused(saved: dict[str, Path]) -> None:
    """Of collators that concatenate the texts of a batch; positions as the model has them are accepted."""
    model = auto("causal", saved["causal"])
    rows = [{"input_ids": torch.randint(5, 60, (length,)).tolist()} for length in (4, 3)]
    with pytest.raises(UserError, match="position_ids are not 0, 1, 2"):
        model(**transformers.DataCollatorWithFlattening(return_tensors="pt")(rows))
    ids, mask = torch.randint(5, 60, (2, 5)), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [1, 1, 0, 1, 2]])
    assert torch.equal(model(ids, mask, position_ids=positions).logits, model(ids, mask).logits)
    assert model(ids, position_ids=torch.arange(5)[None]).logits.shape[:2] == ids.shape


def test_translate(folders: dict[str, Path], saved: dict[str, Path]) -> None:
    model = auto("translation", saved["translation"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved["translation"])
    ours = allmlp.load(folders["translation"]), load_tokenizer(folders["translation"])
    sentences = ["the cat sat", "a dog"]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    for cache in (True, False):
        found = model.generate(**batch, do_sample=False, use_cache=cache)
        texts = tokenizer.decode(found, skip_special_tokens=True)
        assert [text.strip() for text in texts] == translate(*ours, sentences, num_beams=1)
    labels = tokenizer(["one two", "three"], padding=True, return_tensors="pt").input_ids
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    target = torch.cat([torch.full((2, 1), tokenizer.cls_token_id), labels.clamp(min=0)], 1)
    logits = ours[0](batch.input_ids, target[:, :-1], batch.attention_mask.bool())
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert torch.allclose(model(**batch, labels=labels).loss, expected)


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "classes", "text"])
def test_trainer(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Two steps with gradient accumulation; the checkpoint is a model folder."""
    pytest.importorskip("accelerate")
    model, processor = allmlp.hf.wrap(folders[name]), allmlp.hf.processor(folders[name])
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    if name == "images":
        pixels = processor([scene(20, 30, seed) for seed in range(4)]).pixel_values
        rows = [{"pixel_values": image, "labels": label % 3} for label, image in enumerate(pixels)]
    else:
        encoded = processor([SENTENCE] * 4, padding="max_length")
        labels = encoded.input_ids if name == "text" else [0, 1, 2, 0]
        rows = [{"input_ids": a, "attention_mask": b, "labels": c} for a, b, c in zip(*encoded.values(), labels)]
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=processor)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trained = allmlp.load(tmp_path / "checkpoint-2")
    assert same_state(trained, model.model)
    assert any(not torch.equal(before[key], value) for key, value in trained.state_dict().items())
    if name != "text":
        picture = tmp_path / "a.png"
        picture.write_bytes(encode(scene()))
        ((best, *_),) = allmlp.predict(tmp_path / "checkpoint-2", [picture if name == "images" else SENTENCE])
        assert best.label in CLASSES


@pytest.mark.parametrize("name", ["images", "classes", "text", "causal"])
def test_losses_of_an_accumulated_batch(name: str, saved: dict[str, Path]) -> None:
    """The Trainer passes the number of items of all micro-batches: the loss is the sum divided by it."""
    model = auto(name, saved[name])
    values = inputs(name, model)
    labels = values["input_ids"] if name in ("text", "causal") else torch.tensor([0, 2])
    items = {"text": 14, "causal": 12}.get(name, 2)
    mean = model(**values, labels=labels).loss
    assert torch.allclose(model(**values, labels=labels, num_items_in_batch=4).loss, mean * items / 4)


def test_smoothed_labels_of_a_causal_model_are_the_next_tokens(saved: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, ids = auto("causal", saved["causal"]).eval(), torch.randint(5, 60, (2, 7))
    arguments = transformers.TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    found = transformers.Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits, labels = model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    assert torch.allclose(found, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))
    assert "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[" in code.export_code()


# --- without allmlp ----------------------------------------------------------------------------------------------

ELSEWHERE = (
    PRELUDE
    + """
results = {}
for folder, cls in json.loads(sys.argv[1]).items():
    model = getattr(transformers, cls).from_pretrained(folder, trust_remote_code=True)
    inputs = torch.load(f"{folder}/inputs.pt", weights_only=True)
    results[folder] = model(**inputs)[0]
    model.save_pretrained(f"{folder}/again")
    if cls.endswith("ImageClassification"):
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
        processor.save_pretrained(f"{folder}/again")
        again = transformers.pipeline("image-classification", f"{folder}/again", trust_remote_code=True)
        results["pipeline"] = torch.tensor([row["score"] for row in again(sys.argv[3])])
assert not any(name.partition(".")[0] == "allmlp" for name in sys.modules)
torch.save(results, sys.argv[2])
"""
)


@pytest.mark.slow
def test_with_transformers_only(saved: dict[str, Path], tmp_path: Path) -> None:
    """Every task in a process that cannot import allmlp: the same outputs, and it saves a folder that we can load."""
    places = {}
    for name, folder in saved.items():
        shutil.copytree(folder, tmp_path / name)
        torch.save(inputs(name, None), tmp_path / name / "inputs.pt")
        places[str(tmp_path / name)] = TASKS[name][1]
    picture, results = tmp_path / "a.png", tmp_path / "results.pt"
    picture.write_bytes(encode(scene()))
    command = [sys.executable, "-c", ELSEWHERE, json.dumps(places), str(results), str(picture)]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {name: os.environ[name] for name in (VARIABLE,) if name in os.environ}  # the same matrix products
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(results, weights_only=True)
    for name, folder in saved.items():
        values = torch.load(tmp_path / name / "inputs.pt", weights_only=True)
        assert torch.equal(found[str(tmp_path / name)], auto(name, folder)(**values)[0]), name
        assert same_state(allmlp.load(tmp_path / name / "again"), allmlp.load(folder))
    ((*row,),) = allmlp.predict(tmp_path / "images" / "again", [picture])
    assert found["pipeline"].tolist() == pytest.approx([one.probability for one in row])


@pytest.fixture(scope="module")
def exported() -> types.ModuleType:
    """The modelling file as a module."""
    module = types.ModuleType("modeling_allmlp")
    sys.modules[module.__name__] = module
    exec(compile(allmlp.hf.export_code(), code.MODELING_FILE, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", TINY_SPECS)
def test_the_modelling_file_builds_every_model(name: str, exported: types.ModuleType) -> None:
    model = tiny_model(name, torch.float32)
    config = exported.AllMlpConfig(spec=to_dict(model.spec))
    copy = config.model_spec().build().eval()
    copy.load_state_dict(model.state_dict())
    assert type(copy).__module__ == "modeling_allmlp" and exported.to_json(copy.spec) == allmlp.spec.to_json(model.spec)
    values = model.dummy_inputs(2)
    assert torch.equal(copy(*values), model(*values))


def test_the_modelling_file_stands_alone() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F811,F821,F401", "-"]
    done = subprocess.run(command, input=allmlp.hf.export_code(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # every name is defined once, and every import is used
    tree = ast.parse(allmlp.hf.export_code())
    packages = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert packages - set(sys.stdlib_module_names) == {"torch", "numpy", "transformers"}
    defined = [name for node in tree.body for name in code.bound_names(node)]
    assert len(defined) == len(set(defined))


def test_names_that_collide_are_refused() -> None:
    modules: dict[str, code.SourceModule] = {}
    code.read_modules("allmlp.layers.head", modules)
    node = ast.parse("class Linear: pass").body[0]
    modules["allmlp.layers.head"].definitions.append(
        code.Definition("allmlp.layers.head", node, "class Linear: pass", set())
    )
    with pytest.raises(TypeError, match=r"allmlp\.layers\.linear and allmlp\.layers\.head both define Linear"):
        list(code.used_definitions(modules))


def test_transformers_is_imported_by_this_package_only() -> None:
    sources = {file: file.read_text(encoding="utf8") for file in code.ROOT.rglob("*.py")}
    for file in [file for file, source in sources.items() if "transformers" in source or "allmlp.hf" in source]:
        for node in ast.parse(sources[file]).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = any(name.partition(".")[0] == "transformers" or name.startswith("allmlp.hf") for name in names)
            assert not imported or file.parent.name == "hf", file


# --- bad input ---------------------------------------------------------------------------------------------------


def test_wrong_tasks(saved: dict[str, Path]) -> None:
    for name, task, reason in (
        ("images", "fill-mask", "AllMlpForMaskedLM cannot be made of a model that reads 8x12 image"),
        ("text", "image-classification", "cannot be made of a model that reads 24 tokens"),
        ("text", "text-generation", "not causal"),
        ("causal", "fill-mask", "a causal model cannot fill masks"),
        ("classes", "translation", "needs an encoder and a decoder"),
        ("translation", "feature-extraction", r"reads 12 \+ 12 tokens"),
        ("images", "image-clasification", "unknown task 'image-clasification'; did you mean 'image-classification'"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            allmlp.hf.wrap(saved[name], task)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot be made of a model that reads 8x12 image"):
        transformers.AutoModelForMaskedLM.from_pretrained(saved["images"])


def test_what_cannot_be_wrapped(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="models of images and texts can be wrapped, not HuggingFace"):
        allmlp.hf.wrap(allmlp.create("hf:deit_ti16", num_classes=2))
    with pytest.raises(UserError, match="models of images and texts can be wrapped, not SeriesEncoder"):
        allmlp.hf.wrap(allmlp.create("patchtsmixer", in_chans=2))
    with pytest.raises(UserError, match="pass the folder"):
        allmlp.hf.processor(text_model("gmlp_l18"))
    with pytest.raises(UserError, match="part of its spec"):
        allmlp.hf.wrap(folders["text"]).resize_token_embeddings(99)
    model = allmlp.hf.wrap(tiny_model("resmlp_seq2seq_6", torch.float32))
    with pytest.raises(UserError, match="decoder_start_token_id"):
        model(torch.zeros(1, 2).long(), labels=torch.zeros(1, 2).long())
    with pytest.raises(UserError, match="decoder_input_ids or labels"):
        model(torch.zeros(1, 2).long())


def test_foreign_folders(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved["images"], folder)
    config = json.loads((folder / "config.json").read_text())
    for changed, reason in (
        ({"model_type": "vit"}, "has no 'kind'"),
        ({"spec": None}, "must be a JSON object|no 'spec'"),
        ({"spec": {"kind": "LayerNorm"}}, "LayerNorm, which is not a model"),
        ({"spec": {"kind": "Encodr"}}, "unknown kind"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(UserError, match=reason) as error:
            allmlp.load(folder)
        assert "\n" not in str(error.value)
        if "spec" in changed:
            with pytest.raises(UserError, match=reason):
                auto("images", folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / code.MODELING_FILE).unlink()
    assert same_state(allmlp.load(folder), auto("images", folder).model)  # needed by others only
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=code.MODELING_FILE):
        transformers.dynamic_module_utils.get_class_from_dynamic_module("modeling_allmlp.AllMlpConfig", str(folder))


def test_models_of_images_are_all_wrapped() -> None:
    for name in IMAGES:
        model = tiny_model(name, torch.float32)
        assert isinstance(model, EncoderModel)
        (images,) = model.dummy_inputs()
        assert torch.equal(allmlp.hf.wrap(model)(pixel_values=images).logits, model(images))
