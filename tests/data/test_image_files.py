"""Image files: groups by name and content, notes, tables of images, folders with other things in them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from allmlp.data.dataset import ImageDataset, labels_of
from allmlp.data.image_files import FileNames, ImageFiles, LabeledFile, name_groups
from allmlp.data.image_folder import ImageFolder
from allmlp.data.image_table import ImageTable
from allmlp.errors import UserError

SIZE = (8, 8)


def paint(file: Path, shade: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8), (shade // 256, shade % 256, 7)).save(file)


def folder(root: Path, names: list[str], first: int = 0) -> Path:
    for shade, name in enumerate(names, first):
        paint(root / name, shade)
    return root


def read(root: Path, **fields: object) -> ImageDataset:
    return ImageFolder(str(root), img_size=SIZE, **fields).load()  # type: ignore[arg-type]


def names(data: ImageDataset) -> list[set[str]]:
    return [set(split.files) for split in (data.train, data.validation, data.test) if isinstance(split, ImageFiles)]


# --- groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "groups"),
    [
        ([f"cat_{n:03}_{view}.jpg" for n in range(4) for view in "ab"], 4),
        ([f"IMG_{n:04}{copy}.jpg" for n in range(4) for copy in ("", " (1)", "-edited")], 4),
        ([f"video{n}_frame_{frame:04}.jpg" for n in range(6) for frame in range(30)], 6),
        ([f"IMG_202305{day:02}_{clock}.jpg" for day in range(1, 8) for clock in (120000, 120001, 180000)], 7),
        ([f"IMG_{n:04}.jpg" for n in range(50)], 50),
        ([f"cat.{n}.jpg" for n in range(50)], 50),
        ([f"cat ({n}).jpg" for n in range(50)], 50),
        ([f"n02102040_{n}.JPEG" for n in range(50)], 50),
        ([f"ILSVRC2012_val_{n:08}.JPEG" for n in range(50)], 50),
        ([f"{year}_{n:03}.png" for year in (2021, 2022) for n in range(20)], 40),
        ([f"{n:05}.png" for n in range(50)], 50),
    ],
)
def test_groups_by_name(files: list[str], groups: int) -> None:
    assert len(set(name_groups([LabeledFile(f"cat/{file}", 0) for file in files]))) == groups
    two = [LabeledFile(f"{name}/{file}", label) for label, name in enumerate(("cat", "dog")) for file in files]
    assert len(set(name_groups(two))) == 2 * groups


def test_groups_stay_in_one_split(tmp_path: Path) -> None:
    folder(
        tmp_path, [f"{name}/{name}_{n:03}_{view}.png" for name in ("cat", "dog") for n in range(20) for view in "ab"]
    )
    data = read(tmp_path)
    parts = [{file.rpartition("_")[0] for file in part} for part in names(data)]
    assert sum(map(len, parts)) == 40 and [len(part) for part in parts] == [28, 6, 6]
    assert data.notes == (
        "40 groups of files by their names, such as cat/cat_000 (2 files), are kept in one split "
        "(--set data.group_by_name=false turns this off)",
        "split with seed 0: 56 train, 12 validation, 12 test",
    )
    apart = [{file.rpartition("_")[0] for file in part} for part in names(read(tmp_path, group_by_name=False))]
    assert sum(map(len, apart)) > 40


def test_copies_stay_in_one_split_and_are_told(tmp_path: Path) -> None:
    """Ten images of each class, each three times under other names; one of them in both classes."""
    for copy in "xyz":
        folder(tmp_path, [f"cat/{copy}{n}.png" for n in range(10)], 100)
        folder(tmp_path, [f"dog/{copy}{n}.png" for n in range(10)], 200)
    paint(tmp_path / "dog" / "other.png", 100)
    data = read(tmp_path, test_fraction=0.2)
    pixels = [set(split.fetch(torch.arange(len(split))).images[:, 1, 0, 0].tolist()) for split in splits(data)]
    assert sum(map(len, pixels)) == 20 and [len(part) for part in pixels] == [12, 4, 4]
    assert data.notes[:2] == (
        "41 training images are copies of another",
        "1 image is in two classes: cat/x0.png = dog/other.png",
    )


def splits(data: ImageDataset) -> list[ImageFiles]:
    return [split for split in (data.train, data.validation, data.test) if isinstance(split, ImageFiles)]


def test_copies_across_given_splits_are_told(tmp_path: Path) -> None:
    folder(tmp_path / "train", [f"{name}/{n}.png" for name in "ab" for n in range(5)])
    folder(tmp_path / "test", ["a/x.png", "a/y.png"], 3)
    folder(tmp_path / "test", ["b/z.png"], 500)
    folder(tmp_path / "valid", ["a/z.png", "b/x.png"], 600)
    data = read(tmp_path)
    assert data.notes == ("2 of 3 test images are also training images",)
    assert [len(part) for part in names(data)] == [10, 2, 3]


def test_validation_from_given_training_images(tmp_path: Path) -> None:
    folder(tmp_path / "train", [f"{name}/{n}.png" for name in "ab" for n in range(10)])
    folder(tmp_path / "test", ["a/x.png", "b/y.png"], 300)
    assert read(tmp_path).validation is None
    data = read(tmp_path, val_fraction=0.2)
    assert [len(part) for part in names(data)] == [16, 4, 2] and data.notes == (
        "split with seed 0: 16 train, 4 validation",
    )


# --- folders --------------------------------------------------------------------------------------------


def test_other_things_in_the_folder(tmp_path: Path) -> None:
    """Stray images, notes, folders without images, and images that have no label."""
    folder(tmp_path, [f"{name}/{n}.png" for name in ("cat", "dog", "Unlabeled") for n in range(10)])
    folder(tmp_path, ["cover.png", "back.jpg"], 900)
    for name in ("notes", ".git", "__MACOSX"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    (tmp_path / "__MACOSX" / "._0.png").write_text("?")
    data = read(tmp_path)
    assert data.class_names == ("cat", "dog") and sum(map(len, names(data))) == 20
    assert data.notes[:2] == (
        f"2 images are outside of class folders in {tmp_path} and not used",
        "3 folders are not used as classes: Unlabeled, __MACOSX, notes",
    )


def test_an_unlabeled_test_folder_is_not_used(tmp_path: Path) -> None:
    folder(tmp_path / "Train", [f"{name}/{n}.png" for name in "ab" for n in range(10)])
    folder(tmp_path / "Test", ["0.png", "1.png"], 700)
    data = read(tmp_path)
    assert data.notes[0] == f"{tmp_path / 'Test'} has no folders of classes and is not used"
    assert [len(part) for part in names(data)] == [14, 3, 3]


def test_other_things_in_the_test_folder(tmp_path: Path) -> None:
    """As in the training folder: what has no label or no images is left out."""
    for part, first in (("train", 0), ("test", 500)):
        folder(tmp_path / part, [f"{name}/{n}.png" for name in ("a", "b", "unlabeled") for n in range(5)], first)
        (tmp_path / part / "notes").mkdir()
    data = read(tmp_path)
    assert data.class_names == ("a", "b") and len(data.test) == 10
    assert f"2 folders are not used as classes in {tmp_path / 'test'}: notes, unlabeled" in data.notes


def test_a_split_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    folder(tmp_path / "train", [f"{name}/{n}.png" for name in "ab" for n in range(5)])
    (tmp_path / "test" / "a").mkdir(parents=True)
    (tmp_path / "test" / "a" / "0.png").write_bytes(b"?")
    with pytest.raises(UserError, match=r"no image in .*test can be read, such as .*0.png: not an image"):
        read(tmp_path)


def test_everything_in_one_folder(tmp_path: Path) -> None:
    folder(tmp_path / "photos" / "inner", [f"{name}/{n}.png" for name in "ab" for n in range(10)])
    data = read(tmp_path)
    assert data.class_names == ("a", "b") and splits(data)[0].root == tmp_path / "photos" / "inner"


def test_sizes_of_all_kinds(tmp_path: Path) -> None:
    sizes = [(1, 1), (3000, 20), (20, 3000), (2000, 1500), (16, 16), (7, 300)] * 2
    for number, size in enumerate(sizes):
        file = tmp_path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (number, 0, 0)).save(file)
    for split in splits(read(tmp_path)):
        assert split.fetch(torch.arange(len(split))).images.shape == (len(split), 3, 8, 8)


def test_a_class_with_one_image(tmp_path: Path) -> None:
    folder(tmp_path, [*(f"a/{n}.png" for n in range(10)), *(f"b/{n}.png" for n in range(10)), "c/0.png"])
    data = read(tmp_path)
    assert "1 class has one example: c" in data.notes and "c/0.png" in names(data)[0]


def test_a_class_without_test_images_is_named(tmp_path: Path) -> None:
    """Of 40 images and 3, the test split had the first class alone, and an accuracy of 100 %."""
    folder(tmp_path, [*(f"a/{n}.png" for n in range(40)), *(f"b/{n}.png" for n in range(3))])
    data = read(tmp_path)
    assert labels_of(data.test).unique().tolist() == [0]
    assert "1 class has too few examples for the test split: b" in data.notes


# --- tables ---------------------------------------------------------------------------------------------


def table(root: Path, header: str, rows: list[str], name: str = "labels.csv") -> Path:
    (root / name).write_text("\n".join([header, *rows]))
    return root / name


def read_table(file: Path, **fields: object) -> ImageDataset:
    return ImageTable(str(file), img_size=SIZE, **fields).load()  # type: ignore[arg-type]


WRITTEN = ["{}/{}.png", "{}/{}", "{1}.png", "{1}", "{}\\{}.png", "{}\\{}", "C:\\photos\\{1}.png"]


@pytest.mark.parametrize("written", WRITTEN)
def test_table_of_images(written: str, tmp_path: Path) -> None:
    """Paths, paths without suffix, names without folder, and paths of Windows."""
    kinds, root = ["cat", "dog"] * 10, tmp_path / "data"
    folder(root, [f"images/{kind}/img{n}.png" for n, kind in enumerate(kinds)])
    rows = [f"{written.format(f'images/{kind}', f'img{n}')},{kind}" for n, kind in enumerate(kinds)]
    data = read_table(table(root, "image,label", rows))
    assert data.class_names == ("cat", "dog") and [len(part) for part in names(data)] == [14, 3, 3]
    assert all(label == ("dog" in file) for split in splits(data) for file, label in zip(split.files, labels_of(split)))
    assert data.notes == ("split with seed 0: 14 train, 3 validation, 3 test",)
    checksum = data.checksum()
    assert read_table(root.rename(tmp_path / "moved") / "labels.csv").checksum() == checksum


def test_a_file_name_that_occurs_twice_needs_its_folder(tmp_path: Path) -> None:
    folder(tmp_path, [f"{part}/{n}.png" for part in "ab" for n in range(20)])
    rows = [f"{n},{n % 2}" for n in range(20)]
    with pytest.raises(UserError, match=r"20 of 20 images are not in .*, such as 0:"):
        read_table(table(tmp_path, "image,label", rows))
    assert sum(map(len, names(read_table(table(tmp_path, "image,label", [f"a/{row}" for row in rows]))))) == 20


@pytest.mark.parametrize("written", ["{}", "{}.png", "/elsewhere/photos/{}.png", "C:\\photos\\{}.png"])
def test_a_missing_image_is_not_that_of_its_name_in_another_folder(written: str, tmp_path: Path) -> None:
    """The row of a/0.png got the image b/0.png."""
    files = [*(f"a/{n}" for n in range(1, 20)), "b/0", *(f"b/{n}" for n in range(20, 39))]
    folder(tmp_path, [f"{file}.png" for file in files])
    listed = [written.format(file.replace("/", "\\") if "\\" in written else file) for file in ("a/0", *files)]
    rows = [f"{name},{file[0]}" for name, file in zip(listed, ("a/0", *files), strict=True)]
    data = read_table(table(tmp_path, "image,label", rows))
    found = [(file, data.class_names[label]) for part in splits(data) for file, label in zip(part.files, part.labels)]
    assert sorted(found) == sorted((f"{file}.png", file[0]) for file in files)
    assert f"skipped 1 image not in {tmp_path}: {listed[0]}" in data.notes


def test_table_with_splits_and_other_columns(tmp_path: Path) -> None:
    folder(tmp_path, [f"{n}.png" for n in range(20)])
    rows = [f"{n}.png;{n};{n % 2};{'test' if n > 15 else 'train'}" for n in range(20)]
    data = read_table(table(tmp_path, "photo;number;kind;split", rows))
    assert data.class_names == ("0", "1") and len(data.train) == 16 and len(data.test) == 4 and data.validation is None
    assert data.notes == (
        "columns found by their content: image_column=photo, label_column=kind (set data.image_column to change this)",
    )
    dev = [row.replace("test", "dev") for row in rows]
    only = read_table(table(tmp_path, "photo;number;kind;split", dev))
    assert len(only.train) == 16 and len(only.test) == 4 and only.validation is None
    three = read_table(table(tmp_path, "photo;number;kind;split", [*dev[:18], *rows[18:]]))
    assert [len(part) for part in (three.train, three.validation, three.test)] == [16, 2, 2]
    val = table(tmp_path, "photo,kind", ["0.png,0", "1.png,1", "2.png,0"], "val.csv")
    beside = read_table(table(tmp_path, "photo;number;kind;split", rows), val=str(val))
    assert [len(part) for part in (beside.train, beside.validation, beside.test)] == [16, 3, 4]
    test = table(tmp_path, "photo,kind", ["19.png,0", "18.png,1"], "test.csv")
    given = read_table(tmp_path / "labels.csv", test=str(test), image_column="photo", label_column="kind")
    assert len(given.train) == 20 and labels_of(given.test).tolist() == [0, 1]
    assert given.notes == ("2 of 2 test images are also training images",)


def test_images_of_a_table_that_are_missing(tmp_path: Path) -> None:
    folder(tmp_path / "images", [f"{n}.png" for n in range(20)])
    rows = [f"{n}.png,{n % 2}" for n in range(22)]
    data = read_table(table(tmp_path, "file,label", rows), folder=str(tmp_path / "images"))
    assert sum(map(len, names(data))) == 20
    assert data.notes[0] == f"skipped 2 images not in {tmp_path / 'images'}: 20.png, 21.png"
    with pytest.raises(UserError, match=r"23 of 23 images are not in .*, such as 0\.png: set data\.folder"):
        read_table(
            table(tmp_path, "file,label", [f"{n}.png,{n % 2}" for n in range(23)]), folder=str(tmp_path / "none")
        )
    with pytest.raises(UserError, match=r"no column 'fiel'; did you mean 'file'"):
        read_table(table(tmp_path, "file,label", rows), image_column="fiel")
    with pytest.raises(UserError, match=r"none of a, b holds names of images: set data\.image_column"):
        read_table(table(tmp_path, "a,b", ["x,one", "y,two"]))
    test = table(tmp_path / "images", "file,label", ["0.png,w"], "test.csv")
    train = table(tmp_path / "images", "file,label", rows)
    with pytest.raises(UserError, match="unknown label 'w' in the test split"):
        read_table(train, test=str(test))


def test_names_in_one_buffer() -> None:
    names = ["a/b.png", "", "straße 1.jpg", os.fsdecode(b"not \xff utf8.png")]
    kept = FileNames(names)
    assert [*kept] == names and len(kept) == 4 and kept[2] == names[2]
    assert [*pickle.loads(pickle.dumps(kept))] == names and not [*FileNames([])]
