"""Oxford Pets and Flowers-102: files in the official layout, found by their names, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allmlp import UserError
from allmlp.data.dataset import labels_of
from allmlp.data.detect import detect_data
from allmlp.data.flowers import Flowers102, read_mat
from allmlp.data.pets import OxfordPets
from data.official import write_flowers, write_mat, write_pets


def test_pets(tmp_path: Path) -> None:
    data = detect_data(str(write_pets(tmp_path / "pets")))
    assert data == OxfordPets(str(tmp_path / "pets"))
    dataset = data.replace(img_size=(16, 16)).load()
    assert dataset.class_names == ("Abyssinian", "american bulldog", "Bombay") and dataset.validation is None
    assert labels_of(dataset.train).tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert labels_of(dataset.test).tolist() == [0, 1, 2]
    assert [*dataset.test.files] == ["Abyssinian_4.jpg", "american_bulldog_4.jpg", "Bombay_4.jpg"]  # type: ignore[attr-defined]


def test_pets_in_their_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"pets or .* has no annotations/trainval\.txt: extract images\.tar\.gz"):
        OxfordPets().load()
    write_pets(tmp_path / "pets")
    assert len(OxfordPets().load().train) == 9
    (tmp_path / "pets" / "annotations" / "test.txt").write_text("../secret_1 1 1 1\n")
    with pytest.raises(UserError, match="is not of the form NAME CLASS SPECIES BREED"):
        OxfordPets().load()


def test_flowers(tmp_path: Path) -> None:
    data = detect_data(str(write_flowers(tmp_path / "flowers")))
    assert data == Flowers102(str(tmp_path / "flowers"))
    dataset = data.replace(img_size=(16, 16)).load()
    assert dataset.class_names == ("1", "2", "3") and dataset.validation is None
    assert labels_of(dataset.train).tolist() == [0, 1, 2] * 3 and labels_of(dataset.test).tolist() == [0, 1, 2]
    assert [*dataset.test.files] == [f"image_0000{number}.jpg" for number in (1, 2, 3)]
    apart = data.replace(train_on_val=False).load()
    assert len(apart.train) == 6 and [*apart.validation.files] == [f"image_0000{number}.jpg" for number in (4, 5, 6)]


def test_flowers_that_name_images_without_a_label(tmp_path: Path) -> None:
    folder = write_flowers(tmp_path / "flowers")
    write_mat(folder / "setid.mat", {name: np.array([[99]], dtype=np.uint16) for name in ("trnid", "valid", "tstid")})
    with pytest.raises(UserError, match=r"names images that imagelabels\.mat has no label of"):
        Flowers102(str(folder)).load()


@pytest.mark.parametrize("compress", [True, False])
def test_mat_files(compress: bool, tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "longer": np.array([[0.5, -1.0]])}
    write_mat(tmp_path / "x.mat", arrays, compress)
    found = read_mat(tmp_path / "x.mat")
    assert found.keys() == arrays.keys() and all(np.array_equal(found[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("compress", [True, False])
def test_mat_files_of_scipy(compress: bool, tmp_path: Path) -> None:
    io = pytest.importorskip("scipy.io")
    arrays = {"labels": np.array([[77, 1, 300]], dtype=np.uint16), "x": np.arange(6.0).reshape(2, 3)}
    io.savemat(tmp_path / "x.mat", arrays, do_compression=compress)
    found = read_mat(tmp_path / "x.mat")
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_damaged_mat_files(tmp_path: Path) -> None:
    file = tmp_path / "x.mat"
    write_mat(file, {"labels": np.arange(50, dtype=np.uint8)[None]})
    whole = file.read_bytes()
    file.write_bytes(b"<html>")
    with pytest.raises(UserError, match="is not a MAT file of level 5"):
        read_mat(file)
    for size in range(129, len(whole), 3):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match="is damaged"):
            read_mat(file)
