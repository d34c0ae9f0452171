"""What a user may name as input, and what is found there."""

from __future__ import annotations

import csv
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from allmlp import UserError
from allmlp.prediction import open_predictor
from allmlp.prediction.inputs import Columns, Inputs, as_items, guess_reads
from allmlp.prediction.predictor import ModelInputs
from data.sample_images import encode, scene

TABLES = ("reviews.csv", "reviews.tsv", "reviews.jsonl", "reviews.parquet")
ROWS = [{"id": "7", "text": "the cat, sat", "label": "1"}, {"id": "8", "text": 'a "red" mat', "label": "0"}]


def names(*arguments: object, reads: Any = "images", **options: Any) -> list[str]:
    return [item.name for item in Inputs(map(str, arguments), reads, **options)]


def sources(*arguments: object, **options: Any) -> list[Any]:
    return [item.source for item in Inputs(map(str, arguments), "texts", **options)]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    if file.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(file, "w", newline="") as target:
            writer = csv.DictWriter(target, rows[0], delimiter="," if file.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    return file


def write_tar(members: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return target.getvalue()


# --- images -------------------------------------------------------------------------------------------------


def test_folders_are_searched_at_any_depth_in_order(photos: Path) -> None:
    expected = [str(photos / name) for name in ("0.png", "2.png", "4.png", "6.png", "b/1.png", "b/3.png", "b/5.png")]
    inputs = Inputs([str(photos)], "images")
    assert [item.name for item in inputs] == [item.name for item in inputs] == expected


def test_patterns_ranges_and_files(photos: Path) -> None:
    assert names(photos / "[24].png", photos / "b/1.png") == [str(photos / n) for n in ("2.png", "4.png", "b/1.png")]
    assert names(photos / "**/5.png") == [str(photos / "b/5.png")]
    assert names(photos / "b" / "{1..3}.png") == [str(photos / "b/1.png"), str(photos / "b/3.png")]
    (photos / "[x].png").write_bytes(b"")
    assert names(photos / "[x].png") == [str(photos / "[x].png")]


def test_what_is_missing_is_one_line_before_anything_is_read(photos: Path) -> None:
    with pytest.raises(UserError, match=r"^there is no file .*no\.png$"):
        Inputs([str(photos), str(photos / "no.png")], "images")
    (photos / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no images$"):
        names(photos / "empty")


@pytest.mark.parametrize("table", TABLES)
def test_tables_of_image_files(table: str, photos: Path) -> None:
    rows = [{"who": "a", "path": "0.png"}, {"who": "b", "path": "b/1.png"}, {"who": "c", "path": "no.png"}]
    found = list(Inputs([str(write(photos / table, rows))], "images", Columns(keep=("who", "path"))))
    assert [item.name for item in found] == [f"{photos}/{row['path']}" for row in rows]
    assert [dict(item.columns) for item in found] == rows
    with pytest.raises(UserError, match=r"has no column 'whom'; did you mean 'who'"):
        names(photos / table, columns=Columns(keep=("whom",)))


def test_tables_of_image_files_without_suffix_or_folder(photos: Path) -> None:
    """As in a table to train on."""
    file = write(photos / "names.csv", [{"image": name} for name in ("0", "b/1", "1.png", " 0.png", "no")])
    found = names(file)
    assert [Path(name).relative_to(photos).as_posix() for name in found] == [
        "0.png",
        "b/1.png",
        "b/1.png",
        "0.png",
        "no",
    ]
    by_stem = write(photos / "ids.csv", [{"id": name, "who": "a"} for name in ("2", "3")])
    assert names(by_stem) == [str(photos / "2.png"), str(photos / "b/3.png")]


def test_shards_and_object_stores(photos: Path, images: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    predictor = open_predictor(images, device="cpu")
    pictures = {f"{number}.jpg": encode(scene(30, 20, number), "JPEG") for number in range(3)}
    tar = write_tar({**pictures, "0.cls": b"1", "notes.txt": b"x"})
    (photos / "shard-0.tar").write_bytes(tar)
    store = fsspec.filesystem("memory")
    store.pipe({"/photos/deep/a.png": encode(scene(9, 9)), "/photos/notes.md": b"x", "/photos/s.tar": tar})
    store.pipe("/photos/list.csv", b"image\ndeep/a.png\n")
    decoded = [predictor.decode(data) for data in pictures.values()]
    for place, prefix in ((photos / "shard-{0..0}.tar", photos / "shard-0.tar"), ("memory:///photos/s.tar",) * 2):
        found = list(Inputs([str(place)], "images"))
        assert [item.name for item in found] == [f"{prefix}/{name}" for name in pictures]
        assert all(torch.equal(predictor.decode(item.source), data) for item, data in zip(found, decoded))
    assert names("memory:///photos/*/*.png") == names("memory:///photos/list.csv") == ["memory:///photos/deep/a.png"]
    assert set(names("memory:///photos")) == {"memory:///photos/deep/a.png", *names("memory:///photos/s.tar")}
    (item,) = Inputs(["memory:///photos/deep/a.png"], "images")
    assert torch.equal(predictor.decode(item.source), predictor.decode(scene(9, 9)))
    (text,) = Inputs(["memory:///photos/s.tar"], "texts")
    assert text.name == "memory:///photos/s.tar/notes.txt" and text.source() == b"x"
    (gone,) = Inputs(["memory:///photos/gone.png"], "images")
    (photos / "urls.csv").write_text("image\nnowhere://a.png\n")
    for item in (gone, *Inputs([str(photos / "urls.csv")], "images")):
        with pytest.raises(UserError, match="cannot read it: "):
            predictor.decode(item.source)
    for size in (700, tar.index(b"2.jpg"), tar.index(b"2.jpg") + 100):
        (photos / "cut.tar").write_bytes(tar[:size])
        with pytest.raises(UserError, match=r"cut\.tar is damaged or not a tar file"):
            names(photos / "cut.tar")


def test_standard_input_names_files(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{photos}/0.png\n\n  {photos}/no.png \n"))
    inputs = Inputs(["-"], "images")
    assert not inputs.repeatable and [item.name for item in inputs] == [f"{photos}/0.png", f"{photos}/no.png"]


def test_an_image_in_standard_input_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = (photos / "0.png").read_bytes().decode("utf8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.StringIO(image))
    with pytest.raises(UserError, match="standard input is not text: - reads names of images, one per line"):
        list(Inputs(["-"], "images"))


def test_listing_is_lazy(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"{photos}/0.png\n"

    monkeypatch.setattr(sys, "stdin", lines())
    found = iter(Inputs(["-"], "images"))
    for _ in range(10):
        next(found)
    assert read == 10


# --- texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_read_and_its_name_is_no_text(table: str, tmp_path: Path) -> None:
    file = write(tmp_path / table, ROWS)
    assert names(file, reads="texts") == [row["text"] for row in ROWS]
    found = Inputs([str(file)], "texts", Columns(keep=("id",)))
    assert [dict(item.columns) for item in found] == [{"id": "7"}, {"id": "8"}]


@pytest.mark.parametrize("name", ["dev.tsv", "photo.jpg", "runs/text", "reviews.csv.gz", "notes.txt", "a.parquet"])
def test_the_name_of_a_missing_file_is_no_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^there is no file {name}; if it is a text"):
        Inputs([name], "texts")
    assert names(f"what is {name}", reads="texts") == [f"what is {name}"]


@pytest.mark.parametrize("text", ["wonderful", "why?", "the [MASK] sat", "3.5 stars", "Dr. No", "{5..1}", "a: b"])
def test_texts_with_odd_letters(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sources(text, context="more") == [(text, "more")]


def test_a_squad_file_is_a_table_of_questions(tmp_path: Path) -> None:
    asked = [{"id": 7, "question": "who sat?"}, {"question": "where?", "answers": []}]
    content = {"data": [{"paragraphs": [{"context": "the cat sat", "qas": asked}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    found = list(Inputs([str(tmp_path / "dev.json")], "texts", Columns(keep=("id",))))
    assert [(item.source, dict(item.columns)) for item in found] == [
        (("who sat?", "the cat sat"), {"id": "7"}),
        (("where?", "the cat sat"), {"id": ""}),
    ]
    assert sources(tmp_path) == [item.source for item in found], "in a folder"
    (tmp_path / "dev.json").write_text('{"data": [{"paragraphs": 1}]}')
    with pytest.raises(UserError, match="is not a SQuAD file"):
        sources(tmp_path / "dev.json")


def test_pairs_files_of_lines_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"question": "who sat?", "context": "the cat sat"}, {"question": "where?", "context": ""}]
    file = write(tmp_path / "pairs.csv", pairs)
    assert sources(file, context="x") == [("who sat?", "the cat sat"), ("where?", "x")]
    assert sources(file, columns=Columns("context", "question"))[0] == ("the cat sat", "who sat?")
    assert sources(file, questions=False) == [("who sat?", ""), ("where?", "")], "what a classifier is trained on"
    (tmp_path / "lines.txt").write_text("one two\n\nthree, four\n")
    assert names(tmp_path / "lines.txt", reads="texts") == ["one two", "three, four"]
    assert names(tmp_path, reads="texts") == ["one two", "three, four", "who sat?", "where?"]
    (whole,) = Inputs([str(tmp_path / "lines.txt")], "texts", context="x", whole_files=True)
    assert whole.name == str(tmp_path / "lines.txt") and whole.source() == ("one two\n\nthree, four", "x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("dev.tsv\nand/or\n"))
    assert names("-", reads="texts") == ["dev.tsv", "and/or"]
    (tmp_path / "a.png").write_bytes(encode(scene()))
    with pytest.raises(UserError, match=r"a\.png is an image; the model reads texts"):
        names(tmp_path / "a.png", reads="texts")


def test_columns_by_content_and_by_name(tmp_path: Path) -> None:
    rows = [{"nr": str(n), "was": f"the cat sat on mat {n}", "wie": "gut" if n % 2 else "weniger"} for n in range(9)]
    file = write(tmp_path / "t.csv", rows)
    assert names(file, reads="texts") == [row["was"] for row in rows]
    assert names(file, reads="texts", columns=Columns("wie"))[:2] == ["weniger", "gut"]
    with pytest.raises(UserError, match=r"t\.csv has no column 'wass'; did you mean 'was'"):
        names(file, reads="texts", columns=Columns("wass"))
    with pytest.raises(UserError, match=r"none of nr, was, wie names image files: set --column"):
        names(file)
    assert names(file, reads="texts", trained_on=("wie",))[:2] == ["weniger", "gut"], "as in training"
    assert sources(file, trained_on=("wie", "was"))[0] == ("weniger", "the cat sat on mat 0")
    assert sources(file, trained_on=("wie", "was"), columns=Columns("was"))[0] == ("the cat sat on mat 0", "")
    assert names(file, reads="texts", trained_on=("wie", "wo")) == [row["was"] for row in rows], "not in this table"


# --- from Python --------------------------------------------------------------------------------------------


def test_inputs_of_a_call(photos: Path, images: Path, tmp_path: Path) -> None:
    predictor = open_predictor(images, device="cpu")
    file = photos / "0.png"
    picture = Image.open(file).convert("RGB")
    pixels = np.array(picture)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    expected = predictor.decode(file)
    for one in (file, str(file), file.read_bytes(), picture, pixels, tensor):
        (item,) = as_items(one, ModelInputs("images"))
        (listed,) = as_items([one], ModelInputs("images"))
        assert torch.equal(predictor.decode(item.source), expected), type(one)
        assert torch.equal(predictor.decode(listed.source), expected), type(one)
    assert len(list(as_items(torch.stack([tensor, tensor]), ModelInputs("images")))) == 2
    assert len(list(as_items([photos, file], ModelInputs("images")))) == 8
    with pytest.raises(UserError, match="the inputs must be images, not int"):
        list(as_items(3, ModelInputs("images")))
    with pytest.raises(UserError, match=r"pixels must be uint8 from 0 to 255, not float32"):
        predictor.decode(pixels.astype(np.float32))
    with pytest.raises(UserError, match=r"not \[3, 20\]|not \[20, 30, 5\]"):
        predictor.decode(np.zeros((20, 30, 5), np.uint8))


def test_a_string_from_python_is_a_text_and_a_path_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "dev.tsv", ROWS)
    assert [item.source for item in as_items("dev.tsv", ModelInputs("texts"), "x")] == [("dev.tsv", "x")]
    assert [item.source for item in as_items(["-", ("a", "b")], ModelInputs("texts"))] == [("-", ""), ("a", "b")]
    assert [item.name for item in as_items(file, ModelInputs("texts"))] == [row["text"] for row in ROWS]


def test_a_pair_alone_is_one_input_of_a_model_of_pairs() -> None:
    def sources(inputs: Any, context: str = "", **kind: Any) -> list[Any]:
        return [item.source for item in as_items(inputs, ModelInputs("texts", **kind), context)]

    for kind in ({"questions": True}, {"trained_on": ("premise", "hypothesis")}):
        assert sources(("a", "b"), **kind) == sources([("a", "b")], **kind) == [("a", "b")]
        assert sources(("a", "b"), "c", **kind) == [("a", "c"), ("b", "c")]
        assert sources(["a", "b"], **kind) == [("a", ""), ("b", "")]
        assert sources((("a", "b"), ("c", "d")), **kind) == [("a", "b"), ("c", "d")]
    assert sources(("a", "b"), trained_on=("text",)) == [("a", ""), ("b", "")]


def test_which_model_an_input_is_for(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", ROWS)
    pictures = write(photos / "list.csv", [{"photo": "0.png"}])
    assert [guess_reads(str(one)) for one in (photos, photos / "0.png", "no.jpg", pictures)] == ["images"] * 4
    assert [guess_reads(str(one)) for one in (table, "a wonderful film", "dull")] == ["texts"] * 3
