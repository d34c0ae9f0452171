"""Checksums and labels of datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from allmlp.data.corpus import Corpus, TokenBatch
from allmlp.data.dataset import ImageDataset, InMemory, Subset, evenly_spaced, labels_of
from allmlp.data.image_folder import ImageFolder
from allmlp.data.tokenizer import SPECIAL_TOKENS, TokenizerConfig
from allmlp.errors import UserError
from allmlp.spec import override_all
from train.runs import small

LABELS = torch.tensor([0, 1, 2, 2])


def dataset(pixel: int = 7, label: int = 0, dtype: torch.dtype = torch.uint8) -> ImageDataset:
    images, labels = torch.zeros(4, 1, 2, 2, dtype=dtype), LABELS.clone()
    images[3, 0, 1, 1], labels[0] = pixel, label
    return ImageDataset(InMemory(images, labels), InMemory(images[:2], labels[:2]), ("a", "b", "c"), (0.5,), (0.5,))


def test_checksum_is_of_the_content() -> None:
    """It changes with a pixel, a label, the type, the shape, and what is held out; not from one call to the next."""
    plain, held = dataset(), dataset().split_validation(1)
    assert plain.checksum() == dataset().checksum() and len(plain.checksum()) == 64
    reshaped = ImageDataset(
        InMemory(plain.train.examples.images.view(4, 1, 4, 1), LABELS), plain.test, ("a", "b", "c"), (0.5,), (0.5,)
    )
    others = [dataset(pixel=8), dataset(label=1), dataset(dtype=torch.int8), reshaped, held]
    assert len({one.checksum() for one in (plain, *others)}) == 6


def test_checksum_of_image_files(tmp_path: Path) -> None:
    """Names, labels and the bytes of a few images."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / name / f"{number}.png")

    def checksum() -> str:
        return ImageFolder(str(tmp_path), img_size=(8, 8), test_fraction=0.3).load().checksum()

    found = [checksum(), checksum()]
    assert found[0] == found[1]
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "cat" / "3.png")
    found.append(checksum())
    (tmp_path / "dog" / "7.png").rename(tmp_path / "dog" / "8.png")
    found.append(checksum())
    assert len(set(found)) == 3


def test_checksum_of_tokens_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allmlp.data.corpus.MAX_BYTES_IN_MEMORY", 0)
    words = "one two three four five six ten"
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words.split()]))
    found = []
    for last in ("ten", "ten", "six"):
        (tmp_path / "a.txt").write_text("\n\n".join(["one two three four five"] * 30 + [last]))
        file, tokenizer = str(tmp_path / "a.txt"), TokenizerConfig(path=str(tmp_path / "vocab.txt"))
        found.append(Corpus(file, file, tokenizer, 8, cache=str(tmp_path / last)).load().checksum())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("count", [1, 3, 1000, 2**24 + 4, 2**31 + 1])
def test_evenly_spaced_examples_are_there(count: int) -> None:
    """The last number of 2^24 + 4 is not one of float32."""
    found = evenly_spaced(count, 64)
    assert len(found) == 64 and found[0] == 0 and found.max() < count and found[-1] >= (count - 1) * 0.999


def test_labels_of_every_kind_of_split() -> None:
    split = dataset().train
    assert labels_of(split).tolist() == [0, 1, 2, 2]
    assert labels_of(Subset(split, torch.tensor([3, 1]))).tolist() == [2, 1]


def many(counts: dict[int, int]) -> ImageDataset:
    labels = torch.cat([torch.full((count,), label) for label, count in counts.items()])
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return ImageDataset(InMemory(images, labels), InMemory(images, labels), ("a", "b", "c"), (0.5,), (0.5,))


@pytest.mark.parametrize("labels", [torch.rand(40), torch.rand(40, 3).round().long()], ids=["numbers", "several"])
def test_a_fraction_of_examples_without_one_class_each(labels: torch.Tensor) -> None:
    split = InMemory(torch.zeros(40, 1, 1, 1, dtype=torch.uint8), labels)
    assert len(ImageDataset(split, split, (), (0.5,), (0.5,)).take_fraction(0.25).train) == 10


def test_per_class_keeps_as_many_of_each() -> None:
    """By seed, nested, and all of a class that has fewer; the test split stays."""
    whole = many({0: 20, 1: 3, 2: 9})
    four, six, other = whole.take_per_class(4, 0), whole.take_per_class(6, 0), whole.take_per_class(4, 1)
    assert labels_of(four.train).bincount().tolist() == [4, 3, 4] and len(four.test) == 32
    chosen, more, others = (set(one.train.examples.images.flatten().tolist()) for one in (four, six, other))
    assert chosen < more and chosen != others
    assert whole.take_per_class(None, 0) is whole
    assert four.notes == ("1 class has fewer than 4 training examples",) and not whole.take_per_class(3, 0).notes
    unlabeled = many({-1: 7, 0: 5, 1: 3}).take_per_class(2, 0)
    assert labels_of(unlabeled.train).tolist().count(-1) == 7 and len(unlabeled.train) == 11


def test_the_choice_of_examples_is_a_setting_of_the_data_too() -> None:
    run = small()
    assert override_all(run, {"data.fraction": "0.25"}) == run.replace(train_fraction=0.25)
    assert override_all(run, {"data.per_class": "4"}) == run.replace(train_per_class=4)


def test_per_class_needs_classes() -> None:
    values = many({0: 4}).train.examples.labels.float()
    for split in (InMemory(torch.zeros(4, 2), batch_type=TokenBatch), InMemory(values, values)):
        with pytest.raises(UserError, match="train_per_class needs data with one class per example"):
            ImageDataset(split, split, ("a",), (0.5,), (0.5,)).take_per_class(2, 0)
    with pytest.raises(UserError, match="both choose training examples"):
        small(train_per_class=4, train_fraction=0.5)
