"""Folders of pictures: their layouts, their errors, and what happens to broken pictures."""

from __future__ import annotations

import logging
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from pictures import BROKEN, encode, scene
from PIL import Image

from allmlp.data.decode import BrokenImage, Decode
from allmlp.data.encoded import Encoded
from allmlp.data.folder import Files, ImageFolder
from allmlp.data.source import Dataset, Split
from allmlp.errors import UserError
from allmlp.spec import from_json, to_json

SMALL = (8, 8)


def fill(root: Path, *classes: str, count: int = 3, kind: str = "png") -> Path:
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            data = encode(scene(20, 16, seed=7 * number + index), {"jpg": "JPEG"}.get(kind, kind.upper()))
            (root / name / f"{index}.{kind}").write_bytes(data)
    return root


def files(split: Split) -> Files:
    assert isinstance(split, Files)
    return split


def read(root: Path, **fields: object) -> Dataset:
    return ImageFolder(str(root), image=SMALL, **fields).open()  # type: ignore[arg-type]


def test_read_while_a_model_answers(tmp_path: Path) -> None:
    """The threads that decode do not share the caller's inference mode."""
    train = read(fill(tmp_path, "cat", "dog")).train
    with torch.inference_mode():
        inside = train.fetch(torch.arange(3)).images.clone()
    assert torch.equal(inside, train.fetch(torch.arange(3)).images)


@pytest.mark.parametrize("test", ["val", "valid", "validation", "test"])
def test_two_folders(test: str, tmp_path: Path) -> None:
    fill(tmp_path / "train", "dog", "cat")
    fill(tmp_path / test, "cat", "dog", count=1, kind="jpg")
    data = read(tmp_path)
    assert data.classes == ("cat", "dog") and len(data.train) == 6 and len(data.test) == 2
    assert files(data.train).files[:2] == ["cat/0.png", "cat/1.png"]
    images, labels = data.train.fetch(torch.tensor([5, 0, 5]))
    assert images.shape == (3, 3, 8, 8) and images.dtype == torch.uint8 and labels.tolist() == [1, 0, 1]
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])
    assert len(data.mean) == len(data.std) == 3


def test_one_folder_holds_a_share_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b", count=60)
    data = read(tmp_path, held=0.25)
    train, test = set(files(data.train).files), set(files(data.test).files)
    assert not train & test and len(train | test) == 120 and 15 <= len(test) <= 45
    fill(tmp_path, "a", "b", count=90)
    assert test <= set(files(read(tmp_path, held=0.25).test).files)  # nothing changes sides
    assert len(read(tmp_path, held=0.0).test) == 1


def test_named_test_folder_and_train_without_one(tmp_path: Path) -> None:
    fill(tmp_path / "train", "a", "b", count=20)
    assert len(read(tmp_path).train) + len(read(tmp_path).test) == 40
    fill(tmp_path / "mine", "b", count=2)
    data = read(tmp_path, test="mine")
    assert len(data.train) == 40 and data.test.fetch(torch.arange(2)).labels.tolist() == [1, 1]
    with pytest.raises(UserError, match="no folder 'mime' to test on; did you mean 'mine'"):
        read(tmp_path, test="mime")


def test_train_may_be_a_class(tmp_path: Path) -> None:
    assert read(fill(tmp_path, "bus", "train")).classes == ("bus", "train")


def test_deeper_folders_hidden_and_other_files(tmp_path: Path) -> None:
    fill(tmp_path / "train", "a", "b")
    fill(tmp_path / "train" / "a", "deep", ".hidden", kind="jpg")
    for name in ("._0.png", "notes.txt", "LARGE.PNG"):
        (tmp_path / "train" / "b" / name).write_bytes(encode(scene()))
    fill(tmp_path / "val", "a")
    found = files(read(tmp_path).train).files
    assert "a/deep/1.jpg" in found and "b/LARGE.PNG" in found and len(found) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "has no folders: it needs one for each class"),
        (lambda root: fill(root, "a"), "has one class, 'a': there is nothing to tell apart"),
        (lambda root: fill(root, "a", "b", count=0), r"has no pictures \(.*.jpg"),
        (lambda root: (fill(root, "a"), fill(root, "b", count=0)), "b has no pictures to train on"),
        (lambda root: (fill(root / "train", "a", "b"), fill(root / "val", "bb")), "'bb' is not in .*mean 'b'"),
        (lambda root: (fill(root / "train", "a", "b"), (root / "val").mkdir()), "val has no pictures"),
    ],
)
def test_wrong_folders(make: object, message: str, tmp_path: Path) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        read(tmp_path / "nowhere")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    (tmp_path / "b").chmod(0)
    try:
        with pytest.raises(UserError, match="cannot read"):
            read(tmp_path)
    finally:
        (tmp_path / "b").chmod(0o755)


# --- broken pictures ------------------------------------------------------------------------------------


def with_broken(root: Path, content: bytes | None) -> Path:
    """Two classes of three; the last picture of the first class is broken."""
    fill(root / "train", "a", "b")
    fill(root / "val", "a", "b", count=1)
    file = root / "train" / "a" / "2.png"
    file.unlink()
    if content is None:
        file.symlink_to(root / "gone")
    else:
        file.write_bytes(content)
    return root


CONTENTS = {**BROKEN, "unreadable": None}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("draws", [None, torch.full((6, 4), 0.5)])
def test_an_error_names_the_file(kind: str, draws: torch.Tensor | None, tmp_path: Path) -> None:
    split = read(with_broken(tmp_path, CONTENTS[kind])).train
    with pytest.raises(BrokenImage, match=r"train.a.2\.png: .*; repair or remove it, or set data.decode.broken=skip"):
        split.fetch(torch.arange(6), draws)
    assert len(split.fetch(torch.tensor([0, 1, 3]), None).labels) == 3


@pytest.mark.parametrize("kind", CONTENTS)
def test_skipping_takes_the_next_and_counts(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = files(read(with_broken(tmp_path, CONTENTS[kind]), decode=Decode(broken="skip")).train)
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        images, labels = split.fetch(torch.arange(6))
        again, _ = split.fetch(torch.arange(6))
    assert labels.tolist() == [0, 0, 1, 1, 1, 1] and torch.equal(images[2], images[3]) and torch.equal(images, again)
    assert split.skipped == 1 and list(split.broken) == [2]
    assert len(caplog.messages) == 1 and "2.png" in caplog.messages[0] and "(1 so far)" in caplog.messages[0]


def test_nothing_but_broken_pictures(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="all broken"):
        read(tmp_path, decode=Decode(broken="skip")).train.fetch(torch.tensor([0]))


# --- threads --------------------------------------------------------------------------------------------


class Slow(Encoded):
    """The earlier an example, the longer it takes."""

    def read(self, index: int) -> bytes:
        time.sleep(0.02 * (8 - index))
        return encode(scene(8, 8, seed=index))

    def name(self, index: int) -> str:
        return str(index)


def test_threads_keep_the_order() -> None:
    split = Slow(torch.arange(8), SMALL, Decode(crop=1.0), workers=8)
    images, labels = split.fetch(torch.arange(8))
    assert labels.tolist() == list(range(8))
    assert images[:, 2, 7, 7].tolist() == [index * 37 % 256 for index in range(8)]


def test_any_number_of_threads_gives_the_same(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b", count=6, kind="jpg")
    indices, draws = torch.tensor([3, 1, 4, 1, 5]), torch.rand(5, 4)
    one, four = (read(tmp_path, workers=workers).train.fetch(indices, draws) for workers in (1, 4))
    assert torch.equal(one.images, four.images) and torch.equal(one.labels, four.labels)
    assert not torch.equal(one.images[1], one.images[3])  # the same picture, other draws


def test_a_split_can_go_to_another_process(tmp_path: Path) -> None:
    split = files(read(fill(tmp_path, "a", "b")).train)
    images, _ = split.fetch(torch.arange(3))
    assert torch.equal(pickle.loads(pickle.dumps(split)).fetch(torch.arange(3)).images, images)


def test_hold_out(tmp_path: Path) -> None:
    data = read(fill(tmp_path, "a", "b", count=10), held=0.0).hold_out(5)
    assert len(data.test) == 5 and data.test.fetch(torch.arange(5)).images.shape == (5, 3, 8, 8)


def test_grey_and_json(tmp_path: Path) -> None:
    spec = ImageFolder(str(fill(tmp_path, "a", "b")), image=SMALL, decode=Decode(colour="grey"))
    assert from_json(to_json(spec)) == spec
    data = spec.open()
    assert data.train.fetch(torch.tensor([0])).images.shape == (1, 1, 8, 8) and len(data.mean) == 1


def test_a_model_remembers_how_its_pictures_were_cut(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(12):
            Image.new("RGB", (20, 10), (number * 20, 0, 0)).save(tmp_path / name / f"{number}.png")
    data = ImageFolder(str(tmp_path), image=(8, 8), decode=Decode(crop=0.9, mean=(0.5,) * 3, std=(0.5,) * 3)).open()
    inputs = from_json(data.files()["inputs.json"])
    assert (inputs.crop, inputs.mean, inputs.classes) == (0.9, (0.5, 0.5, 0.5), ("a", "b"))
    with pytest.raises(UserError, match="needs 3 numbers"):
        Decode(mean=(0.5,))
