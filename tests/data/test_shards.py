"""Tar shards: fetched at random, indexed once, local and remote."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
from sample_images import encode, scene

from allmlp.data import shards
from allmlp.data.dataset import ImageDataset, Split, labels_of
from allmlp.data.decode import CorruptImage, Decode
from allmlp.data.shards import Shard, ShardImages, Shards, expand_range, find, load_index
from allmlp.errors import UserError

SMALL = (8, 8)


def members(start: int, count: int, label: str = "cls") -> list[tuple[str, bytes]]:
    found = []
    for number in range(start, start + count):
        data = encode(scene(20, 16, seed=number), "WEBP", lossless=True)
        answer = str(number % 3) if label == "cls" else json.dumps({"label": number % 3, "other": [1]})
        found += [(f"part/{number:04}.webp", data), (f"part/{number:04}.{label}", answer.encode())]
    return found


def tar(entries: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def write(folder: Path, label: str = "cls") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        (folder / f"train-{number}.tar").write_bytes(tar(members(4 * number, 4, label)))
    (folder / "val-0.tar").write_bytes(tar(members(100, 3, label)))
    return folder


def ranges(split: Split) -> ShardImages:
    assert isinstance(split, ShardImages)
    return split


def read(path: object, **fields: object) -> ImageDataset:
    return Shards(str(path), img_size=SMALL, **fields).load()  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are scanned."""
    scanned, scan = [], shards.scan
    monkeypatch.setattr(shards, "scan", lambda shard, *rest: scanned.append(str(shard)) or scan(shard, *rest))
    return scanned


def check(data: ImageDataset) -> None:
    assert data.class_names == ("0", "1", "2") and len(data.train) == 8 and len(data.test) == 3
    images, labels = data.train.fetch(torch.tensor([6, 0, 3]))
    assert labels.tolist() == [0, 0, 0]
    assert images[:, 2, 7, 7].tolist() == [number * 37 % 256 for number in (6, 0, 3)]
    assert data.test.fetch(torch.arange(3)).labels.tolist() == [1, 2, 0]
    assert ranges(data.train).bounds.tolist() == [0, 4, 8]


@pytest.mark.parametrize("label", ["cls", "json"])
def test_a_folder(label: str, tmp_path: Path) -> None:
    check(read(write(tmp_path / "data", label)))


def test_patterns(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    check(read(f"{folder}/train-{{0..1}}.tar", test=f"{folder}/val-*.tar"))
    check(read(f"{folder}/train-0.tar, {folder}/train-1.tar", test=f"{folder}/val-0.tar"))
    check(read(folder, test=f"{folder.parent}/./data/val-0.tar"))  # which is not trained on
    assert expand_range("a-{008..010}-{0..1}.tar")[3:5] == ["a-009-1.tar", "a-010-0.tar"]
    assert [shard.path for shard in find(f"{folder}/*.tar")] == sorted(map(str, folder.glob("*.tar")))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_dialects_and_long_names(form: int, tmp_path: Path) -> None:
    folder, deep = write(tmp_path / "data"), "d" * 60 + "/" + "e" * 60 + "/"
    entries = [(deep + name, data) for name, data in reversed(members(0, 4))]  # labels may come first
    (folder / "train-0.tar").write_bytes(tar(entries, form))
    assert read(folder).train.fetch(torch.arange(4)).labels.tolist() == [0, 2, 1, 0]


def test_samples_without_label_or_image_are_skipped(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    extra = [("a.jpg", b"?"), ("b.cls", b"1"), ("readme", b"text"), (".hidden.jpg", b"?"), ("a.seg.txt", b"?")]
    (folder / "train-0.tar").write_bytes(tar(extra + members(0, 4)))
    check(read(folder))


def test_webdataset_writes_what_is_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder = write(tmp_path / "data")
    with webdataset.TarWriter(str(folder / "train-0.tar")) as writer:
        for number in range(4):
            data = encode(scene(20, 16, seed=number), "WEBP", lossless=True)
            writer.write({"__key__": f"{number:04}", "webp": data, "cls": number % 3})
    check(read(folder))


def test_class_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\ncow\n\n")
    assert read(folder, class_names_file=str(names)).class_names == ("ant", "bee", "cow")
    names.write_text("ant\nbee\n")
    with pytest.raises(UserError, match="has 2 class names, but the shards have labels up to 2"):
        read(folder, class_names_file=str(names))
    with pytest.raises(UserError, match="cannot read class names"):
        read(folder, class_names_file=str(tmp_path / "absent"))


# --- the index ------------------------------------------------------------------------------------------


def test_the_index_is_used_again_and_made_again(tmp_path: Path, scans: list[str]) -> None:
    folder = write(tmp_path / "data")
    read(folder)
    assert len(scans) == 3 and (folder / "train-0.tar.index").is_file()
    scans.clear()
    check(read(folder))
    assert scans == []
    (folder / "train-1.tar").write_bytes(tar(members(10, 2)))
    assert len(read(folder).train) == 6 and scans == [str(folder / "train-1.tar")]
    scans.clear()
    os.utime(folder / "train-0.tar", ns=(1, 1))
    read(folder)
    assert scans == [str(folder / "train-0.tar")]
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk"])
def test_a_damaged_index_is_made_again(content: bytes, tmp_path: Path, scans: list[str]) -> None:
    folder = write(tmp_path / "data")
    read(folder)
    scans.clear()
    (folder / "train-0.tar.index").write_bytes(content)
    check(read(folder))
    assert scans == [str(folder / "train-0.tar")]


def test_another_label_is_another_index(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "json")
    read(folder)
    with pytest.raises(UserError, match=r"train-0.tar: no label in part/0000.json: KeyError 'answer'"):
        read(folder, label_key="answer")


def test_where_the_index_goes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, scans: list[str]) -> None:
    folder, write_atomically = write(tmp_path / "data"), shards.write_atomically

    def refuse(file: Path, *rest: object) -> None:
        if file.parent == folder:
            raise PermissionError("read-only file system")
        write_atomically(file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "write_atomically", refuse)
    read(folder)
    assert not list(folder.glob("*.index")) and len(list(cache.rglob("*.index"))) == 3
    scans.clear()
    check(read(folder))
    assert scans == []
    read(folder, cache=str(tmp_path / "mine"))
    assert len(list((tmp_path / "mine").rglob("*.index"))) == 3


# --- damaged --------------------------------------------------------------------------------------------

WHOLE = tar(members(0, 4))
SECOND = WHOLE.index(b"part/0001.webp")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk" * 1000,
        WHOLE[: SECOND + 700],
        WHOLE[:SECOND],
        WHOLE[: SECOND + 100],
        WHOLE[:SECOND] + b"\xff" * 512 + WHOLE[SECOND + 512 :],
    ],
    ids=["empty", "junk", "cut in an image", "cut before a header", "cut in a header", "overwritten header"],
)
def test_a_damaged_shard_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "train-1.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"train-1.tar is damaged or not a tar file"):
        read(folder)


@pytest.mark.parametrize("answer", [b"", b"cat", b"-1", b"1.5", b"99999999999"])
def test_labels_that_are_none(answer: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "train-1.tar").write_bytes(tar([("a.jpg", b"?"), ("a.cls", answer)]))
    with pytest.raises(UserError, match=r"train-1.tar: no label in a.cls"):
        read(folder)


@pytest.mark.parametrize("answer", [b"[", b"[" * 100_000, b"1", b'{"label": "cat"}', b'{"label": true}', b"\xff"])
def test_json_labels_that_are_none(answer: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "train-1.tar").write_bytes(tar([("a.jpg", b"?"), ("a.json", answer)]))
    with pytest.raises(UserError, match=r"train-1.tar: no label in a.json"):
        read(folder)


@pytest.mark.parametrize("order", [1, -1])
def test_json_beside_a_class_may_have_anything(order: int, tmp_path: Path) -> None:
    """As in the shards of img2dataset, where it describes the image; a file without an image is no example."""
    parts = [("a.jpg", b"?"), ("a.cls", b"2"), ("a.json", b'{"caption": "a cat"}')][::order]
    (tmp_path / "train.tar").write_bytes(tar([*parts, ("about.json", b'{"version": 1}')]))
    found = load_index(Shard(str(tmp_path / "train.tar")), "label", str(tmp_path))
    assert found.labels.tolist() == [2]


def test_without_test_shards_a_part_of_every_class_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(
        tar(
            [
                entry
                for n in range(20)
                for entry in ((f"{n:02}.png", encode(scene(seed=n))), (f"{n:02}.cls", b"%d" % (n % 2)))
            ]
        )
    )
    data = read(tmp_path, test_fraction=0.2)
    found = [labels_of(split).bincount().tolist() for split in (data.train, data.validation, data.test)]
    assert found == [[6, 6], [2, 2], [2, 2]]
    assert data.checksum() != read(tmp_path, test_fraction=0.2, split_seed=1).checksum()


def test_other_mistakes(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    with pytest.raises(UserError, match=r"absent.tar does not exist"):
        read(folder / "absent.tar")
    with pytest.raises(UserError, match=r"no train shards.*allmlp shards FOLDER shards/"):
        read(f"{folder}/absent-*.tar", test=str(folder / "val-0.tar"))
    with pytest.raises(UserError, match="is not a valid range"):
        read("x-{9..0}.tar")
    (folder / "train-1.tar").write_bytes(tar([("readme.txt", b"hello")]))
    with pytest.raises(UserError, match="has no labeled images"):
        read(folder)
    (folder / "train-1.tar").write_bytes(tar([("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")]))
    with pytest.raises(UserError, match="a has two images"):
        read(folder)
    for file in folder.glob("*.tar"):
        file.write_bytes(tar([("a.jpg", b"?"), ("a.cls", b"0")]))
    with pytest.raises(UserError, match="has only one class"):
        read(folder)


def test_a_corrupt_image(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "train-1.tar").write_bytes(tar([("a.jpg", b"?"), ("a.cls", b"1"), *members(5, 3)]))
    with pytest.raises(CorruptImage, match=r"train-1.tar, image at byte 512: not an image"):
        read(folder, decode=Decode(on_corrupt="error")).train.fetch(torch.tensor([4]))
    split = ranges(read(folder).train)
    assert split.fetch(torch.tensor([4])).labels.tolist() == [2] and split.skipped == 1


@pytest.mark.parametrize("on_corrupt", ["error", "skip"])
def test_a_missing_shard_is_not_a_corrupt_image(on_corrupt: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    split = ranges(read(folder, decode=Decode(on_corrupt=on_corrupt)).train)  # type: ignore[arg-type]
    (folder / "train-1.tar").write_bytes(WHOLE[:600])
    with pytest.raises(UserError, match="became shorter"):
        split.fetch(torch.tensor([7]))
    (folder / "train-1.tar").unlink()
    with pytest.raises(UserError, match=r"cannot read .*train-1\.tar"):
        split.fetch(torch.tensor([7]))
    assert split.skipped == 0


# --- remote ---------------------------------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """The shards in a file system that is not the local one."""
    memory, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for file in write(tmp_path / "data").glob("*.tar"):
        memory.pipe_file(f"{folder}/{file.name}", file.read_bytes())
    return f"memory:/{folder}"


def test_remote(remote: str, cache: Path, scans: list[str]) -> None:
    check(read(remote))
    assert len(scans) == 3 and scans[0].startswith("memory://") and len(list(cache.rglob("*.index"))) == 3
    scans.clear()
    check(read(f"{remote}/train-{{0..1}}.tar", test=f"{remote}/val-*.tar"))
    assert scans == []
    path = remote.removeprefix("memory:/") + "/train-1.tar"
    fsspec.filesystem("memory").pipe_file(path, tar(members(10, 2)))
    assert len(read(remote).train) == 6 and len(scans) == 1


def test_indexes_are_parsed_one_at_a_time(tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """np.load in two threads failed at times (AST constructor recursion depth mismatch), and the shard was scanned."""
    folder, load, busy = write(tmp_path / "data"), shards.np.load, threading.Lock()
    read(folder)
    scans.clear()

    @contextmanager
    def alone(*args: object, **options: object) -> Iterator[object]:
        with load(*args, **options) as stored:  # type: ignore[arg-type]
            assert busy.acquire(blocking=False), "another thread is in np.load"
            time.sleep(0.05)
            yield stored
            busy.release()

    monkeypatch.setattr(shards.np, "load", alone)
    read(folder, num_workers=2)
    assert scans == []


def test_remote_mistakes(remote: str) -> None:
    with pytest.raises(UserError, match="cannot read nothing://x"):
        read("nothing://x/*.tar")
    with pytest.raises(UserError, match=r"cannot read memory://.*absent\.tar"):
        read(f"{remote}/absent.tar", test=f"{remote}/val-0.tar")
    path = remote.removeprefix("memory:/") + "/train-1.tar"
    fsspec.filesystem("memory").pipe_file(path, WHOLE[:3000])
    with pytest.raises(UserError, match=r"memory://.*train-1.tar is damaged"):
        read(remote)
