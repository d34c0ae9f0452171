"""MNIST's IDX format: valid files, and errors for wrong headers and sizes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from allmlp.data.detect import detect_data
from allmlp.data.mnist import CLASS_NAMES, Mnist
from allmlp.errors import UserError

COUNTS = {"train": 6, "t10k": 3}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pixels(part: str) -> np.ndarray:
    return np.random.default_rng(COUNTS[part]).integers(0, 256, (COUNTS[part], 28, 28), dtype=np.uint8)


def write(folder: Path, compressed: bool = False, dot: str = "-") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in COUNTS.items():
        for name, array in (("images", pixels(part)), ("labels", np.arange(count, dtype=np.uint8))):
            file = f"{part}-{name}{dot}idx{array.ndim}-ubyte"
            if compressed:
                (folder / f"{file}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / file).write_bytes(idx(array))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("inner", ["", "MNIST/raw"])
def test_reads(compressed: bool, dot: str, inner: str, tmp_path: Path) -> None:
    write(tmp_path / inner, compressed, dot)
    data = Mnist(path=str(tmp_path)).load()
    images, labels = data.train.fetch(torch.tensor([4, 1]))
    assert torch.equal(images, torch.from_numpy(pixels("train")[[4, 1], None])) and labels.tolist() == [4, 1]
    assert len(data.train) == 6 and len(data.test) == 3 and data.class_names[7] == "7"


def test_fashion_by_its_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "fashion")
    monkeypatch.setenv("ALLMLP_DATA", str(tmp_path))
    data = Mnist(variant="fashion").load()
    assert data.class_names[9] == "ankle boot" and data.mean == (0.2860,)


def test_folders_of_torchvision_are_not_confused(tmp_path: Path) -> None:
    write(tmp_path / "FashionMNIST/raw")
    with pytest.raises(UserError, match="no train-images-idx3-ubyte"):
        Mnist(str(tmp_path)).load()
    write(tmp_path / "MNIST/raw")
    for file in (tmp_path / "MNIST/raw").glob("*labels*"):
        file.write_bytes(idx(np.full(COUNTS[file.name.partition("-")[0]], 9, np.uint8)))
    labels = {name: Mnist(str(tmp_path), name).load().train.fetch(torch.tensor([1]))[1] for name in CLASS_NAMES}
    assert labels == {"mnist": 9, "fashion": 1}
    assert detect_data(str(tmp_path / "FashionMNIST/raw")) == Mnist(str(tmp_path / "FashionMNIST/raw"), "fashion")
    assert detect_data(str(tmp_path / "MNIST/raw")) == Mnist(str(tmp_path / "MNIST/raw"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "not an idx file"),
        ("train-images-idx3-ubyte", idx(np.zeros(6, np.uint8)), "not an idx file of bytes in 3 dimensions"),
        ("train-images-idx3-ubyte", idx(np.zeros((6, 28, 28), np.uint8))[:-1], "4,704 bytes and has only 4,703"),
        ("train-images-idx3-ubyte", idx(np.zeros((6, 28, 28), np.uint8)) + b"x", "has more"),
        ("train-images-idx3-ubyte", struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**31, 2**31), "claims 2147483648 x"),
        ("train-images-idx3-ubyte", idx(np.zeros((5, 28, 28), np.uint8)), "has 5 images, .* 6 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([0, 1, 10], np.uint8)), "label 10; the largest of 10 classes is 9"),
    ],
)  # fmt: skip
def test_damaged(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Mnist(path=str(tmp_path)).load()


@pytest.mark.parametrize("content", [b"", b"plain", gzip.compress(idx(pixels("train")))[:-500]])
def test_damaged_gzip(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, compressed=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz"):
        Mnist(path=str(tmp_path)).load()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in .*: set data.path"
    ):
        Mnist(path=str(tmp_path)).load()
