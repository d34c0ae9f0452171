"""Images kept in memory are those of their source, as for evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sample_images import encode, scene

import allmlp
from allmlp.data.corpus import Corpus
from allmlp.data.dataset import InMemory
from allmlp.data.decoded import CHUNK, Decoded, decode
from allmlp.data.image_folder import ImageFolder


def test_same_examples_as_the_source(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(3):
                image = encode(scene(20, 16, seed=7 * number + index + (part == "val")))
                (tmp_path / part / name / f"{index}.png").write_bytes(image)
    source = ImageFolder(str(tmp_path), img_size=(8, 8))
    whole, found = source.load(), Decoded(source).load()
    assert found.class_names == whole.class_names and found.mean == whole.mean and found.crop_pct == whole.crop_pct
    for split, wanted in ((found.train, whole.train), (found.test, whole.test)):
        assert isinstance(split, InMemory) and len(split) == len(wanted)
        for mine, theirs in zip(split.examples, wanted.fetch(torch.arange(len(wanted)))):
            assert torch.equal(mine, theirs)


def test_more_than_a_chunk() -> None:
    images = torch.arange(CHUNK + 3).view(-1, 1, 1, 1)
    found = decode(InMemory(images, images.flatten() % 7))
    assert torch.equal(found.examples.images, images) and torch.equal(found.examples.labels, images.flatten() % 7)


def test_only_images(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("\n\n".join(f"one two three {number}" for number in range(50)))
    text = Corpus(str(tmp_path / "a.txt"), test_fraction=0.5, cache=str(tmp_path / "cache"))
    with pytest.raises(allmlp.UserError, match="Decoded needs a source of images, not Corpus"):
        Decoded(text).load()
