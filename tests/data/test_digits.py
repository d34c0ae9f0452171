"""The embedded digits: always the same 1,500 and 297."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from allmlp.data.dataset import InMemory
from allmlp.data.digits import Digits, read_digits

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn has the file")


def resident(split: object) -> InMemory:
    assert isinstance(split, InMemory)
    return split


def test_they_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from its file, or by its function where it has no such file."""
    datasets = pytest.importorskip("sklearn.datasets")
    expected = datasets.load_digits(return_X_y=True)
    assert all(map(np.array_equal, read_digits(), expected))
    monkeypatch.setattr("pathlib.Path.is_file", lambda self: False)
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda return_X_y: ("theirs", return_X_y))
    assert read_digits() == ("theirs", True)


def test_sizes_and_values() -> None:
    data = Digits().load()
    train, test = resident(data.train), resident(data.test)
    assert train.examples.images.shape == (1500, 1, 8, 8) and test.examples.images.shape == (297, 1, 8, 8)
    assert (
        train.examples.images.dtype == torch.uint8
        and train.examples.images.min() == 0
        and train.examples.images.max() == 255
    )
    assert data.class_names == tuple("0123456789")
    assert data.mean == pytest.approx((0.3054132,)) and data.std == pytest.approx((0.3760171,))


def test_test_split_is_stratified() -> None:
    assert set(resident(Digits().load().test).examples.labels.bincount().tolist()) == {29, 30}


def test_the_split_never_changes() -> None:
    held = resident(Digits().load().test)
    assert (
        held.examples.labels[:20].tolist() == [0, 4, 2, 5, 7, 2, 0, 6, 8, 4, 0, 7, 3, 2, 0, 1, 7, 6, 3, 5]
        and int(held.examples.images.long().sum()) == 1_477_285
    )


def test_larger() -> None:
    images, labels = Digits(img_size=(16, 12)).load().train.fetch(torch.arange(5))
    assert images.shape == (5, 1, 16, 12) and images.dtype == torch.uint8 and labels.dtype == torch.int64
