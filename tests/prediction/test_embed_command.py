"""allmlp embed: features in files, and the nearest inputs."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.data.tokenizer import load_tokenizer
from allmlp.prediction import open_predictor
from allmlp.prediction.neighbors import NamedFeatures, nearest, read_features
from data.sample_images import encode, scene
from folders import image_folder, text_folder
from prediction.conftest import Command

FILES = ("0.png", "2.png", "4.png", "6.png", "b/1.png", "b/3.png", "b/5.png")


def test_features_are_what_the_head_reads(images: Path, photos: Path) -> None:
    model, predictor = allmlp.load(images), open_predictor(images, device="cpu")
    found = torch.from_numpy(allmlp.embed(images, photos, device="cpu"))
    batch = predictor.collate([predictor.decode(photos / name) for name in FILES])  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.allclose(model.head(found, None), model(batch), atol=1e-5)  # type: ignore[operator]
    assert torch.allclose(torch.from_numpy(allmlp.embed(images, photos, device="cpu", fast=True)), found, atol=1e-4)


@pytest.mark.parametrize("task", ["classes", "text"])
def test_features_of_texts_leave_padding_out(task: str, tmp_path: Path) -> None:
    folder = text_folder(tmp_path, task)
    found = allmlp.embed(folder, ["the cat sat", "a dog jumped over the blue fence"], device="cpu")
    model, tokenizer = allmlp.load(folder), load_tokenizer(folder)
    (ids,) = tokenizer.encode(["the cat sat"])
    row = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
    with torch.no_grad():
        expected = model.forward_features(row, torch.ones_like(row, dtype=torch.bool)).mean(1)[0]
    assert torch.allclose(torch.from_numpy(found[0]), expected, atol=1e-5)


def test_files_hold_features_and_names(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("pyarrow")
    (photos / "2.png").write_bytes(b"broken")
    names = [str(photos / name) for name in FILES if name != "2.png"]
    expected = allmlp.embed(images, names, device="cpu", batch_size=99)
    for place in ("f.npy", "f.parquet", "parts/"):
        size = ("--part-size", 3) if place == "parts/" else ()
        code, _, err = command("embed", images, photos, "--out", f"{tmp_path}/{place}", "--device", "cpu", *size)
        assert code == 1 and f"skipped {photos}/2.png: " in err
        assert err.endswith(f"next: allmlp embed {images} {tmp_path}/{place} --near QUERY\n")
        found = list(read_features(tmp_path / place))
        assert [name for part in found for name in part.names] == names
        np.testing.assert_allclose(np.concatenate([part.values for part in found]), expected, atol=1e-6)
    saved = np.load(tmp_path / "f.npy")
    assert saved.dtype == np.float32 and saved.shape == expected.shape
    with open(tmp_path / "f.names.csv", newline="") as source:
        assert [row["input"] for row in csv.DictReader(source)] == names
    code, _, err = command("embed", images, photos, "--out", tmp_path / "f.csv")
    assert code == 2 and "must end in .npy, .parquet, or in /" in err


def test_nearest_inputs(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    query = tmp_path / "query.png"
    query.write_bytes(encode(scene(41, 30, seed=4)))
    features = F.normalize(torch.from_numpy(allmlp.embed(images, [query, photos], device="cpu")), dim=1)
    best = (features[1:] @ features[0]).topk(3)
    expected = [(str(photos / FILES[index]), value) for value, index in zip(*(part.tolist() for part in best))]
    assert command("embed", images, photos, "--out", tmp_path / "f.npy", "--device", "cpu")[0] == 0
    for bank in (photos, tmp_path / "f.npy"):
        found = json.loads(
            command("embed", images, bank, "--near", query, "--top-k", 3, "--json", "--device", "cpu")[1]
        )
        assert [(one["name"], pytest.approx(one["cosine"], abs=1e-5)) for one in found] == expected
    code, out, _ = command("embed", images, photos, "--near", query, "--top-k", 3, "--device", "cpu")
    assert code == 0 and len(out.splitlines()) == 4 and expected[0][0] in "".join(out.split())
    # The query itself is no neighbor.
    found = json.loads(command("embed", images, photos, "--near", photos / "0.png", "--top-k", 9, "--json")[1])
    assert sorted(one["name"] for one in found) == [str(photos / name) for name in FILES if name != "0.png"]


def test_features_without_the_names_of_their_rows(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "f.npy"
    command("embed", images, photos, "--out", file, "--device", "cpu")
    whole = np.load(file)
    for changed, what in (
        (whole[:3], "it has 3 rows, and f.names.csv"),
        (np.concatenate([whole, whole]), f"it has {2 * len(whole)} rows, and f.names.csv {len(whole)} names"),
        (whole[0], "not a row for each input"),
    ):
        np.save(file, changed)
        code, out, err = command("embed", images, file, "--near", photos / "0.png", "--device", "cpu")
        assert code == 2 and not out and what in err


def test_nearest_texts(texts: Path, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "t.csv"
    file.write_text("text\nthe cat sat\na dog jumped over the blue fence\none two three\n")
    found = json.loads(command("embed", texts, file, "--near", "the cat sat on", "--json", "--top-k", 1)[1])
    assert len(found) == 1 and -1 <= found[0]["cosine"] <= 1.0001


def test_search_in_parts_is_the_search_in_all() -> None:
    generator = np.random.default_rng(0)
    bank, query = generator.normal(size=(100, 5)), generator.normal(size=5)
    names = [str(number) for number in range(100)]
    parts = [NamedFeatures(names[start : start + 7], bank[start : start + 7]) for start in range(0, 100, 7)]
    found = nearest(query, parts, 10)
    cosines = bank @ query / np.linalg.norm(bank, axis=1) / np.linalg.norm(query)
    assert [match.name for match in found] == [str(index) for index in np.argsort(-cosines)[:10]]
    assert [match.cosine for match in found] == pytest.approx(sorted(cosines, reverse=True)[:10])
    with pytest.raises(allmlp.UserError, match="the features have 5 channels, those of the query 4"):
        nearest(query[:4], parts, 1)


def test_mistakes(images: Path, photos: Path, texts: Path, tmp_path: Path, command: Command) -> None:
    translation = text_folder(tmp_path / "translation", "translation")
    bank = tmp_path / "bank.npy"
    np.save(bank, np.zeros((2, 4), dtype=np.float32))
    (tmp_path / "bank.names.csv").write_text("input\na\nb\n")
    for arguments, message in (
        (("embed", images, photos), "either --out, to write the features, or --near"),
        (("embed", images, photos, "--near", "no.png"), "there is no file no.png"),
        (("embed", bank, "--near", photos / "0.png"), f"name the model of these features: allmlp embed MODEL {bank}"),
        (("embed", texts, "gone.npy", "--near", "the cat"), "there is no file gone.npy"),
        (("embed", images, photos, "--near", photos), "has several images: name one"),
        (
            ("embed", translation, "the cat", "--out", tmp_path / "f.npy"),
            "is an encoder-decoder: embed and transform need an encoder",
        ),
    ):
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err


def test_damaged_features_are_named(images: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("pyarrow")
    for out in ("features.parquet", "parts/"):
        assert command("embed", images, photos, "--out", f"{tmp_path}/{out}")[0] == 0
    for file in (tmp_path / "features.parquet", tmp_path / "parts/part-000000.parquet"):
        file.write_bytes(file.read_bytes()[:30])
        place = file if file.parent == tmp_path else file.parent
        code, out, err = command("embed", images, place, "--near", photos / "0.png")
        assert (code, out, err.count("\n")) == (2, "", 1) and f"cannot read features from {file}" in err


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8")
def test_names_of_files_and_classes_that_are_not_utf8(photos: Path, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("pyarrow")
    images = image_folder(tmp_path / "model")
    for name in ("3.png", "5.png"):
        os.replace(photos / "b" / name, os.fsencode(photos / "b") + b"/\xe9" + name.encode())
    expected = str(photos / "b/\\udce93.png")
    write_preprocessing(images, ImagePreprocessing((0.4,) * 3, (0.2,) * 3, ("caf\udce9", "dog", "ship")))
    for file in ("answers.csv", "answers.tsv", "answers.jsonl", "answers.parquet", "answers"):
        assert command("predict", images, photos, "--probabilities", "--out", tmp_path / file)[0] == 0
    assert "caf\\udce9" in json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])["probabilities"]
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text(encoding="utf8").splitlines()))
    assert len(rows) == 7 and rows[5]["input"] == expected and rows[5]["p(caf\\udce9)"]
    for file in ("features.npy", "features.parquet"):
        assert command("embed", images, photos, "--out", tmp_path / file)[0] == 0
        assert expected in [name for names, _ in read_features(tmp_path / file) for name in names]
        query = os.fsdecode(os.fsencode(photos / "b") + b"/\xe93.png")
        _, out, _ = command("embed", images, tmp_path / file, "--near", query, "--json")
        assert expected not in [match["name"] for match in json.loads(out)]
