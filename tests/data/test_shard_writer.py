"""Shards that were made of other data: the same images, labels and order; resumed, refused, bounded."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import encode, scene

from allmlp.cli import main
from allmlp.data import shard_writer
from allmlp.data.dataset import ImageDataset, InMemory, Split
from allmlp.data.decode import Decode
from allmlp.data.detect import detect_data
from allmlp.data.image_folder import ImageFolder
from allmlp.data.prefetch import AHEAD
from allmlp.data.resample import is_vectorized
from allmlp.data.sampler import Loader, Sampler
from allmlp.data.shard_writer import ShardFormat, write_shards
from allmlp.data.shards import Shards
from allmlp.errors import UserError

SIZE = (28, 28)
LARGE = (40, 40)
"""For which no JPEG of these is decoded at half its size."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes in three splits, noisy enough that every resampling shows."""
    folder, source = tmp_path / "photos", np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 3), ("test", 3)):
        for number in range(count):
            place = folder / split / ("ant", "bee", "cow")[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.asarray(scene(90, 60, seed=number)) // 2 + source.integers(0, 100, (60, 90, 3))
            image = Image.fromarray(pixels.astype(np.uint8))
            (place / f"{split}{number}.jpg").write_bytes(encode(image, "JPEG", quality=90))
    return folder


def load(folder: Path, size: tuple[int, int] = SIZE) -> ImageDataset:
    return ImageFolder(str(folder), img_size=size).load()


def made(folder: Path, size: tuple[int, int] = SIZE) -> ImageDataset:
    found = detect_data(str(folder))
    assert isinstance(found, Shards)
    return found.replace(img_size=size).load()


def pixels(split: Split | None) -> tuple[torch.Tensor, list[int]]:
    assert split is not None
    images, labels = split.fetch(torch.arange(len(split)))
    return images.int(), labels.tolist()


@pytest.mark.parametrize(("form", "tolerance"), [("raw", 0), ("jpeg", 60), ("webp", 60)])
def test_the_same_images_in_the_same_order(form: str, tolerance: int, photos: Path, tmp_path: Path) -> None:
    """For evaluation raw pixels are the same, where the short side is what evaluation resizes to: 32 for 28."""
    source = load(photos)
    written = write_shards(source, tmp_path / "out", ShardFormat(32, form, per_shard=4))  # type: ignore[arg-type]
    found = made(tmp_path / "out")
    assert written == (15, 0) and found.class_names == source.class_names == ("ant", "bee", "cow")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.tar")) == [
        *("test-00000.tar", "train-00000.tar", "train-00001.tar", "train-00002.tar", "val-00000.tar")
    ]
    for name in ("train", "validation", "test"):
        (wanted, labels), (images, others) = pixels(getattr(source, name)), pixels(getattr(found, name))
        assert others == labels
        difference = (images - wanted).abs()
        assert difference.max() <= tolerance + 2 * (not is_vectorized()) and difference.float().mean() <= 8


def test_smaller_images_stay_as_they_are(photos: Path, tmp_path: Path) -> None:
    write_shards(load(photos), tmp_path / "out", ShardFormat(1000))
    uniforms = torch.rand(9, 4, generator=torch.Generator().manual_seed(0))
    first, second = (
        data.train.fetch(torch.arange(9), uniforms).images
        for data in (load(photos, LARGE), made(tmp_path / "out", LARGE))
    )
    assert torch.equal(first, second), "random crops too"


def test_batches_are_the_same_from_any_step_on(photos: Path, tmp_path: Path) -> None:
    write_shards(load(photos), tmp_path / "out", ShardFormat(1000, per_shard=4))

    def batches(data: ImageDataset, start: int) -> list[torch.Tensor]:
        return [batch.examples.images for batch in Loader(data.train, Sampler(9, 4, 5), CPU).steps(start, 8)]

    whole, resumed = batches(load(photos, LARGE), 0), batches(made(tmp_path / "out", LARGE), 3)
    assert len(resumed) == 5 > AHEAD
    assert all(torch.equal(first, second) for first, second in zip(whole[3:], resumed, strict=True))


def test_a_call_that_was_interrupted_is_continued(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write_shard = tmp_path / "out", shard_writer.write_shard
    calls: list[str] = []

    def dies(file: Path, *rest: object) -> None:
        calls.append(file.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write_shard(file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_writer, "write_shard", dies)
    to = ShardFormat(32, per_shard=4)
    with pytest.raises(KeyboardInterrupt):
        write_shards(load(photos), out, to)
    with pytest.raises(UserError, match=r"the shards in .*out are not finished: run the same allmlp shards again"):
        made(out)
    write_shards(load(photos), out, to)
    assert calls == ["train-00000.tar", *(f"train-{n:05}.tar" for n in (1, 1, 2)), "val-00000.tar", "test-00000.tar"]
    write_shards(load(photos), tmp_path / "other", to)
    for file in (tmp_path / "other").glob("*.tar"):
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_a_shard_that_is_half_written_is_not_there(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_pixels, count = shard_writer.encode, iter(range(100))

    def full_disk(*arguments: object) -> bytes:
        if next(count) > 2:
            raise OSError(28, "No space left on device")
        return encode_pixels(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_writer, "encode", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shards(load(photos), tmp_path / "out", ShardFormat(32))
    assert not list((tmp_path / "out").glob("*.tar")) and not list((tmp_path / "out").glob(".*.tar*"))


def test_refused(photos: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", load(photos)
    write_shards(data, out, ShardFormat(32))
    with pytest.raises(UserError, match="has shards of another size"):
        write_shards(data, out, ShardFormat(24))
    shutil.rmtree(photos / "train" / "bee")
    shutil.rmtree(photos / "val" / "bee")
    shutil.rmtree(photos / "test" / "bee")
    with pytest.raises(UserError, match="has shards of other images"):
        write_shards(load(photos), out, ShardFormat(32))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(UserError, match="full is not empty: name a new folder"):
        write_shards(data, tmp_path / "full", ShardFormat(32))
    memory = InMemory(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2))
    held = ImageDataset(memory, memory, ("a", "b"), (0.0,) * 3, (1.0,) * 3)
    with pytest.raises(UserError, match="already in memory"):
        write_shards(held, tmp_path / "new", ShardFormat(32))
    assert not (tmp_path / "new").exists()


def test_a_broken_image_is_left_out_and_named(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = photos / "train" / "ant" / "train0.jpg"
    place.write_bytes(place.read_bytes()[:-300])
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        assert write_shards(load(photos), tmp_path / "out", ShardFormat(32)) == (14, 1)
    assert "train0.jpg: image file is truncated" in caplog.text
    assert len(made(tmp_path / "out").train) == 8
    strict = ImageFolder(str(photos), img_size=SIZE, decode=Decode(on_corrupt="error")).load()
    with pytest.raises(UserError, match=r"train0\.jpg: image file is truncated"):
        write_shards(strict, tmp_path / "strict", ShardFormat(32))


def test_an_image_too_long_for_the_format_is_left_out(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (16384, 8)).save(photos / "train" / "ant" / "train0.jpg")
    with caplog.at_level(logging.WARNING, "allmlp.data"):
        assert write_shards(load(photos), tmp_path / "out", ShardFormat(8, "webp")) == (14, 1)
    assert "train0.jpg: 16384 x 8 pixels are too long for webp" in caplog.text


@pytest.mark.parametrize("name", ["two\nlines", "caf\udce9"])
def test_a_class_that_is_no_line_of_text_is_refused(name: str, photos: Path, tmp_path: Path) -> None:
    """Else the names of other classes move, or none can be written."""
    for split in photos.iterdir():
        (split / "bee").rename(split / name)
    with pytest.raises(UserError, match=r"^the class '.*' cannot be a line of classes\.txt: rename it$"):
        write_shards(load(photos), tmp_path / "out", ShardFormat(8))
    assert not (tmp_path / "out").exists()


def test_the_command(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["shards", str(photos), "small", "--size", "32", "--format", "jpeg"])
    printed = capsys.readouterr()
    assert ended.value.code == 0 and printed.out.startswith("small: 15 images, ")
    assert printed.err.splitlines()[-1] == "next: allmlp train small/"
    assert len(made(tmp_path / "small").train) == 9
    with pytest.raises(SystemExit) as ended:
        main(["shards", str(photos), "small", "--size", "24"])
    assert ended.value.code == 2 and "error: small has shards of another size" in capsys.readouterr().err


def test_a_shard_of_images_that_cannot_be_decoded_is_left_out(photos: Path, tmp_path: Path) -> None:
    """The last one may have a single image; the call can be repeated, and the others can be read."""
    last = photos / "train" / "cow" / "train8.jpg"
    last.write_bytes(last.read_bytes()[:700])
    for _ in range(2):
        written = write_shards(load(photos), tmp_path / "made", ShardFormat(40, per_shard=8))
        assert written == (14, 1) and not (tmp_path / "made" / "train-00001.tar").exists()
    assert len(made(tmp_path / "made").train) == 8
