"""Folders of images: layouts, errors and corrupt images."""

from __future__ import annotations

import logging
import os
import pickle
import re
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from PIL import Image
from sample_images import CORRUPT, encode, scene

from allmlp.data.dataset import ImageDataset, Split, labels_of
from allmlp.data.decode import CorruptImage, Decode
from allmlp.data.encoded_images import EncodedImages
from allmlp.data.image_files import ImageFiles
from allmlp.data.image_folder import ImageFolder, list_images
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


def files(split: Split) -> ImageFiles:
    assert isinstance(split, ImageFiles)
    return split


def paint(folder: Path, count: int) -> Path:
    """Images that are all different, also from those of other folders."""
    folder.mkdir(parents=True, exist_ok=True)
    shade = sum(folder.name.encode()) % 256
    for index in range(count):
        Image.new("RGB", (9, 8), (shade, index // 256, index % 256)).save(folder / f"{index:03}.png")
    return folder


def read(root: Path, **fields: object) -> ImageDataset:
    return ImageFolder(str(root), img_size=SMALL, **fields).load()  # type: ignore[arg-type]


def test_read_while_a_model_answers(tmp_path: Path) -> None:
    """Decoding threads are not in the caller's inference mode."""
    train = read(fill(tmp_path, "cat", "dog")).train
    with torch.inference_mode():
        inside = train.fetch(torch.arange(3)).images.clone()
    assert torch.equal(inside, train.fetch(torch.arange(3)).images)


@pytest.mark.parametrize("test", ["val", "valid", "validation", "test"])
def test_two_folders(test: str, tmp_path: Path) -> None:
    fill(tmp_path / "train", "dog", "cat")
    fill(tmp_path / test, "cat", "dog", count=1, kind="jpg")
    data = read(tmp_path)
    assert data.class_names == ("cat", "dog") and len(data.train) == 6 and len(data.test) == 2
    assert [*files(data.train).files][:2] == ["cat/0.png", "cat/1.png"]
    images, labels = data.train.fetch(torch.tensor([5, 0, 5]))
    assert images.shape == (3, 3, 8, 8) and images.dtype == torch.uint8 and labels.tolist() == [1, 0, 1]
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])
    assert len(data.mean) == len(data.std) == 3


def test_a_fraction_of_every_class_is_held_out(tmp_path: Path) -> None:
    for name, count in (("a", 60), ("b", 20)):
        paint(tmp_path / name, count)
    data = read(tmp_path, test_fraction=0.25, val_fraction=0.1)
    parts = [set(files(split).files) for split in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [52, 8, 20] and len(set.union(*parts)) == 80
    assert labels_of(data.test).bincount().tolist() == [15, 5]
    assert labels_of(data.validation).bincount().tolist() == [6, 2]
    assert read(tmp_path, test_fraction=0.25, val_fraction=0.1).checksum() == data.checksum()
    other = read(tmp_path, test_fraction=0.25, val_fraction=0.1, split_seed=1)
    assert len(set(files(other.test).files) & parts[2]) < 15
    whole = read(tmp_path, test_fraction=0.0)
    assert len(whole.test) == 1 and whole.validation is None
    with pytest.raises(UserError, match="leave nothing to train on"):
        read(tmp_path, test_fraction=0.5)


def test_named_test_folder_and_train_without_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / "train" / name, 20)
    data = read(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (28, 6, 6)
    fill(tmp_path / "mine", "b", count=2)
    data = read(tmp_path, test="mine")
    assert len(data.train) == 40 and data.test.fetch(torch.arange(2)).labels.tolist() == [1, 1]
    with pytest.raises(UserError, match="no test folder 'mime'; did you mean 'mine'"):
        read(tmp_path, test="mime")


def test_train_may_be_a_class(tmp_path: Path) -> None:
    assert read(fill(tmp_path, "bus", "train")).class_names == ("bus", "train")


def test_deeper_folders_hidden_and_other_files(tmp_path: Path) -> None:
    fill(tmp_path / "train", "a", "b")
    fill(tmp_path / "train" / "a", "deep", ".hidden", kind="jpg")
    for name in ("._0.png", "notes.txt", "LARGE.PNG"):
        (tmp_path / "train" / "b" / name).write_bytes(encode(scene()))
    fill(tmp_path / "val", "a")
    found = files(read(tmp_path).train).files
    assert "a/deep/1.jpg" in found and "b/LARGE.PNG" in found and len(found) == 10


def test_notes_on_what_is_not_read(tmp_path: Path) -> None:
    for split in ("train", "val", "validation", "holdout"):
        fill(tmp_path / split, "a", "b")
    for name in ("photo.heic", "photo.JFIF"):
        (tmp_path / "train" / "b" / name).write_bytes(encode(scene(), "JPEG"))
    data = read(tmp_path)
    assert len(data.train) == 7
    assert "2 folders are not used beside those of the splits: holdout, validation" in data.notes
    assert "1 file is not read, without the suffix of an image: b/photo.heic" in data.notes


def test_links_to_folders(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "a", "b")
    fill(tmp_path / "other", "part", kind="jpg")
    links = {"photos/b/more": "other", "photos/a/up": "", "photos/a/b": "photos/b", "other/part/loop": "other"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    images = list_images(tmp_path / "photos", ("a", "b"))
    assert [file for file, label in images if label] == [
        *(f"b/{number}.png" for number in range(3)),
        *(f"b/more/part/{number}.jpg" for number in range(3)),
    ]
    assert len(images) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "has no subfolders: it needs one per class"),
        (lambda root: fill(root, "a"), "has only one class, 'a': at least two are needed"),
        (lambda root: fill(root, "test", "train"), "/train has no folders of classes: the images of each class must"),
        (lambda root: fill(root, "a", "b", count=0), r"has no images \(.*.jpg"),
        (lambda root: (fill(root, "a"), fill(root, "b", count=0)), "has only one class, 'a'"),
        (lambda root: fill(root / "deep", "a", count=3) / "a" / "0.png", "has only one class, 'a'"),
        (
            lambda root: (root / "0.png").write_bytes(encode(scene())),
            "or give a table with the columns image and label",
        ),
        (
            lambda root: fill(root, "a", "b", count=1),
            "2 examples in 2 groups and 2 classes are too few for a test split",
        ),
        (lambda root: (fill(root / "train", "a", "b"), fill(root / "val", "bb")), "'bb' is not in .*mean 'b'"),
        (lambda root: (fill(root / "train", "a", "b"), (root / "val").mkdir()), "val has no images"),
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


# --- corrupt images -------------------------------------------------------------------------------------


def with_broken(root: Path, content: bytes | None) -> Path:
    """Two classes of three images; the last image of the first class is corrupt."""
    fill(root / "train", "a", "b")
    fill(root / "val", "a", "b", count=1)
    file = root / "train" / "a" / "2.png"
    file.unlink()
    if content is None:
        file.symlink_to(root / "gone")
    else:
        file.write_bytes(content)
    return root


CONTENTS = {**CORRUPT, "unreadable": None}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("uniforms", [None, torch.full((6, 4), 0.5)])
def test_an_error_names_the_file(kind: str, uniforms: torch.Tensor | None, tmp_path: Path) -> None:
    """While it is loaded or when it is fetched, and again when it is fetched once more."""
    split = listed(with_broken(tmp_path, CONTENTS[kind]), "error")
    message = r"train.a.2\.png: .*; repair or remove it, or set data.decode.on_corrupt=skip"
    for _ in range(2):
        with pytest.raises(CorruptImage, match=message):
            split.fetch(torch.arange(6), uniforms)
    assert len(split.fetch(torch.tensor([0, 1, 3]), None).labels) == 3
    with pytest.raises(CorruptImage, match=message):
        read(tmp_path, decode=Decode(on_corrupt="error")).train.fetch(torch.arange(6), uniforms)


@pytest.mark.parametrize("kind", CONTENTS)
def test_skip_uses_the_next_image_and_counts(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = listed(with_broken(tmp_path, CONTENTS[kind]), "skip")
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        images, labels = split.fetch(torch.arange(6))
        again, _ = split.fetch(torch.arange(6))
    assert labels.tolist() == [0, 0, 1, 1, 1, 1] and torch.equal(images[2], images[3]) and torch.equal(images, again)
    assert split.skipped == 1 and list(split.corrupt) == [2]
    assert len(caplog.messages) == 1 and "2.png" in caplog.messages[0] and "(1 so far)" in caplog.messages[0]


def listed(root: Path, on_corrupt: Literal["error", "skip"]) -> ImageFiles:
    """The training split as it is before files are inspected."""
    found = list_images(root / "train", ("a", "b"))
    return ImageFiles(root / "train", found, SMALL, Decode(on_corrupt=on_corrupt))


@pytest.mark.parametrize("kind", ["empty", "text", "header only", "bomb", "unreadable"])
def test_corrupt_headers_are_left_out_with_a_note(kind: str, tmp_path: Path) -> None:
    data = read(with_broken(tmp_path, CONTENTS[kind]))
    labels = data.train.fetch(torch.arange(5)).labels
    assert len(data.train) == 5 and labels.tolist() == [0, 0, 1, 1, 1] and not files(data.train).corrupt
    assert re.match(r"skipped 1 file that cannot be read: .*a.2\.png \(.+\)", data.notes[0])


def test_many_corrupt_images_are_an_error(tmp_path: Path) -> None:
    """More than a tenth, whether the header or only the pixels are damaged."""
    for name in ("a", "b"):
        paint(tmp_path / "train" / name, 10)
        paint(tmp_path / "val" / name, 1)
    files = [tmp_path / "train" / "a" / f"00{number}.png" for number in range(3)]
    for file in files[:2]:
        file.write_bytes(CORRUPT["truncated jpeg"])
    assert len(read(tmp_path).train.fetch(torch.arange(20)).labels) == 20
    files[2].write_bytes(CORRUPT["truncated jpeg"])
    with pytest.raises(UserError, match=r"3 of 20 images cannot be read, such as .*a.00[012]\.png: .*; repair"):
        read(tmp_path).train.fetch(torch.arange(20))
    files[2].write_bytes(b"")
    assert len(read(tmp_path).train) == 19
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"3 of 20 images cannot be read, such as .*a.000\.png: the file is empty"):
        read(tmp_path)


# --- threads --------------------------------------------------------------------------------------------


class Slow(EncodedImages):
    """Earlier examples take longer to load."""

    def read(self, index: int) -> bytes:
        time.sleep(0.02 * (8 - index))
        return encode(scene(8, 8, seed=index))

    def name(self, index: int) -> str:
        return str(index)


class OneBroken(Slow):
    """All threads meet the same corrupt image at the same time."""

    def read(self, index: int) -> bytes:
        if index == 0:
            time.sleep(0.05)
            raise CorruptImage("broken")
        return encode(scene(8, 8, seed=index))


def test_a_corrupt_image_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    split = OneBroken(torch.arange(8), SMALL, Decode(crop_pct=1.0), num_workers=8)
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        assert split.fetch(torch.zeros(8, dtype=torch.int64)).labels.tolist() == [1] * 8
    assert split.skipped == len(caplog.messages) == 1


def test_threads_keep_the_order() -> None:
    split = Slow(torch.arange(8), SMALL, Decode(crop_pct=1.0), num_workers=8)
    images, labels = split.fetch(torch.arange(8))
    assert labels.tolist() == list(range(8))
    assert images[:, 2, 7, 7].tolist() == [index * 37 % 256 for index in range(8)]


def test_any_number_of_threads_gives_the_same(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b", count=6, kind="jpg")
    indices, uniforms = torch.tensor([3, 1, 4, 1, 5]), torch.rand(5, 4)
    one, four = (read(tmp_path, num_workers=workers).train.fetch(indices, uniforms) for workers in (1, 4))
    assert torch.equal(one.images, four.images) and torch.equal(one.labels, four.labels)
    assert not torch.equal(one.images[1], one.images[3])  # the same image with other uniforms


def test_a_split_can_go_to_another_process(tmp_path: Path) -> None:
    split = files(read(fill(tmp_path, "a", "b")).train)
    images, _ = split.fetch(torch.arange(3))
    assert torch.equal(pickle.loads(pickle.dumps(split)).fetch(torch.arange(3)).images, images)


def test_hold_out(tmp_path: Path) -> None:
    data = read(fill(tmp_path, "a", "b", count=10), test_fraction=0.0).split_validation(5)
    assert len(data.test) == 5 and data.test.fetch(torch.arange(5)).images.shape == (5, 3, 8, 8)


def test_gray_and_json(tmp_path: Path) -> None:
    spec = ImageFolder(str(fill(tmp_path, "a", "b")), img_size=SMALL, decode=Decode(color="gray"))
    assert from_json(to_json(spec)) == spec
    data = spec.load()
    assert data.train.fetch(torch.tensor([0])).images.shape == (1, 1, 8, 8) and len(data.mean) == 1


def test_preprocessing_is_saved_with_the_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(12):
            Image.new("RGB", (20, 10), (number * 20, 0, 0)).save(tmp_path / name / f"{number}.png")
    data = ImageFolder(
        str(tmp_path), img_size=(8, 8), decode=Decode(crop_pct=0.9, mean=(0.5,) * 3, std=(0.5,) * 3)
    ).load()
    inputs = from_json(data.files()["preprocessing.json"])
    assert (inputs.crop_pct, inputs.mean, inputs.class_names) == (0.9, (0.5, 0.5, 0.5), ("a", "b"))
    with pytest.raises(UserError, match="needs 3 numbers"):
        Decode(mean=(0.5,))
