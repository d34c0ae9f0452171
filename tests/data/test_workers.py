"""Workers: threads first, then processes; the same results, whatever happens to the processes."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from allmlp.data import workers
from allmlp.data.decode import Decode
from allmlp.data.image_folder import ImageFolder
from allmlp.data.shards import Shard, Shards
from allmlp.data.workers import SharedMemory, Workers, split
from allmlp.prediction.inputs import Inputs, fetch
from allmlp.prediction.predictor import read_image
from allmlp.prediction.stream import is_portable

SHAPE = 3, 4, 4
fill = partial(np.full, SHAPE, dtype=np.uint8)
"""fill(7) is an image of sevens; fill(300) raises OverflowError."""
needs_processes = pytest.mark.skipif(not workers.are_processes_supported(), reason="needs Linux")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PROCESSES_AFTER", 0)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.02)


def started(function: Callable[[int], object], count: int = 4) -> Workers:
    """Workers whose processes are ready."""
    made = Workers(function, SHAPE, count)
    made.map([0])
    until(lambda: made.processes and made.processes.is_ready)
    return made


def children() -> set[int]:
    """Processes of which this one is an ancestor."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, added = set(), {os.getpid()}
    while added:
        found |= added
        added = {process for process, parent in parents.items() if parent in found} - found
    return found - {os.getpid()}


@pytest.mark.parametrize("items", [0, 1, 7, 100])
def test_jobs_cover_all_items(items: int) -> None:
    jobs = split(items, 3, 4)
    assert [position for job in jobs for position in job] == [*range(items)]
    assert all(1 <= len(job) <= 4 for job in jobs) and (items < 6 or len(jobs) >= 6)


def test_threads() -> None:
    made = Workers(fill, SHAPE, 4)
    found, failed = made.map([1, 300, 3])
    assert failed == [1] and found[0].tolist() == fill(1).tolist() and found[2].tolist() == fill(3).tolist()
    assert made.processes is None  # not before PROCESSES_AFTER items


@needs_processes
def test_processes(at_once: None) -> None:
    before = children()
    made = started(fill)
    assert len(children() - before) == 5  # four, and the one that started them
    for _ in range(3):
        items = [number % 400 for number in range(1000)]
        found, failed = made.map(items)
        assert failed == [position for position, item in enumerate(items) if item > 255]
        assert all((found[position] == item).all() for position, item in enumerate(items) if item <= 255)
    made.map([1, 2], portable=False)
    assert made.processes and made.processes.memory.size < 2 * found.nbytes + 2**16  # buffers are used again
    del made
    gc.collect()
    until(lambda: children() <= before)


def test_a_process_that_does_not_stop_is_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        wait = process.wait
        monkeypatch.setattr(process, "wait", lambda timeout=None: wait(timeout and 0.01))
        workers.close(process, [])
        assert process.returncode == -signal.SIGKILL


@needs_processes
def test_a_killed_process_is_replaced_by_threads(at_once: None, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    made = started(fill)
    for process in sorted(children() - before)[1:]:
        os.kill(process, signal.SIGKILL)
    for _ in range(3):
        found, failed = made.map([*range(100)])
        assert not failed and (found[:, 0, 0, 0] == np.arange(100)).all()
    assert [record.message for record in caplog.records] == [
        "a process that decodes images has ended: they are now decoded by threads"
    ]


class OnlyHere:
    """Cannot be imported by another process, like a class of a notebook."""

    __module__ = "__main__"

    def __call__(self, item: int) -> np.ndarray:
        return fill(item)


@needs_processes
@pytest.mark.parametrize("function", [lambda item: np.full(SHAPE, item), OnlyHere()], ids=["no pickle", "no import"])
def test_without_processes_there_are_threads(
    function: Callable[[int], np.ndarray], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OnlyHere", OnlyHere, raising=False)
    before = children()
    made = Workers(function, SHAPE, 4)
    for _ in range(5):
        found, failed = made.map([1, 2, 3])
        assert not failed and found[:, 0, 0, 0].tolist() == [1, 2, 3]
        time.sleep(0.1)
    until(lambda: not (children() - before))
    assert made.processes and not made.processes.is_ready


@needs_processes
def test_a_system_without_room_for_processes(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", fail)
    made = Workers(fill, SHAPE, 4)
    for _ in range(2):
        found, failed = made.map([1, 2])
        assert not failed and found[:, 0, 0, 0].tolist() == [1, 2] and made.processes is None


def test_few_workers_are_threads(at_once: None) -> None:
    made = Workers(fill, SHAPE, 2)
    made.map([1])
    assert made.processes is None


@needs_processes
def test_a_buffer_in_use_is_not_used_again() -> None:
    memory = SharedMemory()
    first, one = memory.take((100, 7))
    one[:] = 1
    kept = torch.from_numpy(one)[3:4]
    second, two = memory.take((100, 7))
    two[:] = 2
    del one, two
    third, _two = memory.take((90, 7))
    assert second == third != first and kept.eq(1).all()
    del kept
    fourth, _ = memory.take((100, 7))
    assert fourth == first and memory.size < 2**16
    assert memory.take((5000, 70))[0] not in (first, second)  # a larger one


@needs_processes
def test_images_are_the_same(tmp_path: Path, at_once: None) -> None:
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "train" / name / f"{number}.jpg")
    data = ImageFolder(str(tmp_path), img_size=(8, 8), num_workers=4, test_fraction=0.0).load()
    broken = tmp_path / "train" / "a" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])  # after the headers have been read
    indices, uniforms = torch.arange(len(data.train)), torch.rand(len(data.train), 4)
    by_threads = data.train.fetch(indices, uniforms)
    source = getattr(data.train, "split", data.train)
    until(lambda: source.workers().processes.is_ready)
    by_processes = data.train.fetch(indices, uniforms)
    assert torch.equal(by_threads.images, by_processes.images) and torch.equal(by_threads.labels, by_processes.labels)
    assert source.skipped == 1 and not by_processes.images.is_inference()
    with torch.inference_mode():
        assert not data.train.fetch(indices).images.is_inference()


def test_portable_sources(tmp_path: Path) -> None:
    """Not what Python cannot send, or what has threads, as the file systems of fsspec."""
    random = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number in range(20):
            content = io.BytesIO()
            Image.fromarray(random).save(content, "PNG")
            for suffix, data in (("png", content.getvalue()), ("cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/shards/train-0.tar", (tmp_path / "train-0.tar").read_bytes())
    for place, portable in ((str(tmp_path), True), ("memory://shards", False)):
        assert {is_portable(item.source) for item in Inputs([place], "images")} == {portable}
        images = Shards(place, test_fraction=0.0, cache=str(tmp_path)).load().train
        assert getattr(images, "split", images).is_portable is portable
    assert is_portable("cat.jpg") and is_portable(tmp_path)
    assert not is_portable(b"") and not is_portable(lambda: b"") and not is_portable(torch.zeros(1))


@needs_processes
def test_predictions_by_processes(tmp_path: Path, at_once: None) -> None:
    """What `predict` sends: paths, and functions that read bytes of shards."""
    file = tmp_path / "one.png"
    Image.fromarray(fill(9).transpose(1, 2, 0)).save(file)
    made = started(partial(read_image, SHAPE[1:], Decode(crop_pct=1.0)))
    found, failed = made.map([file, tmp_path / "none.png", partial(fetch, partial(Shard(str(file)).read, 0, 10**6))])
    assert failed == [1] and (found[[0, 2]] == 9).all()
