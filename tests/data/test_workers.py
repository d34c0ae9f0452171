"""Workers: threads first, then processes; the same results, whatever happens to the processes."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from allmlp.data import workers
from allmlp.data.decode import Decode
from allmlp.data.image_folder import ImageFolder
from allmlp.data.shards import Shard, Shards
from allmlp.data.workers import Dispatcher, Job, SharedMemory, Workers, split
from allmlp.prediction.inputs import Inputs, ShardPart
from allmlp.prediction.predictor import read_image
from allmlp.prediction.stream import is_portable

SHAPE = 3, 4, 4
fill = partial(np.full, SHAPE, dtype=np.uint8)
"""fill(7) is an image of sevens; fill(300) raises OverflowError."""
pixels = partial(np.full, (4, 4, 3), dtype=np.uint8)
"""What `read` makes the same image of."""
read = partial(read_image, SHAPE[1:], Decode(crop_pct=1.0))
needs_processes = pytest.mark.skipif(not workers.are_processes_supported(), reason="needs Linux")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PROCESSES_AFTER", 0)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that read images, as for predictions, with processes that are ready."""
    before, made, folder = children(), Workers(read, SHAPE, 4), tmp_path_factory.mktemp("work")
    (folder / "json.py").write_text("raise ImportError('not from the working directory')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "PROCESSES_AFTER", 0)
        patch.setattr(sys, "path", [folder, *sys.path])  # Python ignores what is not a string
        patch.delattr(os, "memfd_create")  # as in Python of uv and conda
        patch.chdir(folder)
        made.map([])
    assert made.processes
    until(partial(getattr, made.processes, "is_ready"))
    assert len(children() - before) == 5  # four, and the one that started them
    yield made
    made.processes.close()
    assert children() <= before


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.02)


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


def save(value: int, file: Path) -> None:
    Image.fromarray(fill(value).transpose(1, 2, 0)).save(file)


@pytest.mark.parametrize("items", [0, 1, 7, 100])
def test_jobs_cover_all_items(items: int) -> None:
    jobs = split(items, 3, 4)
    assert [position for job in jobs for position in job] == [*range(items)]
    assert all(1 <= len(job) <= 4 for job in jobs) and (items < 6 or len(jobs) >= 6)


def test_processes_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "limit", lambda: 15)
    assert workers.own_cores() == 15
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers.own_cores() == 2


def test_threads() -> None:
    made = Workers(fill, SHAPE, 4)
    found, failed = made.map([1, 300, 3])
    assert failed == [1] and found[0].tolist() == fill(1).tolist() and found[2].tolist() == fill(3).tolist()
    assert made.processes is None  # not before PROCESSES_AFTER items


@needs_processes
def test_processes(reading: Workers) -> None:
    for _ in range(3):
        items = [number % 400 for number in range(1000)]
        found, failed = reading.map([partial(pixels, item) for item in items])
        assert failed == [position for position, item in enumerate(items) if item > 255]
        assert all((found[position] == item).all() for position, item in enumerate(items) if item <= 255)
    reading.map([partial(pixels, 1)], portable=False)
    assert reading.processes and reading.processes.memory.size < 4 * found.nbytes  # buffers are used again


def test_a_process_that_does_not_stop_is_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        wait = process.wait
        monkeypatch.setattr(process, "wait", lambda timeout=None: wait(timeout and 0.01))
        workers.end(process)
        assert process.returncode == -signal.SIGKILL


@needs_processes
def test_a_process_has_its_next_job_while_it_computes_one() -> None:
    """So it need not wait for a process that is busy; and a process that ends does not leave a call waiting."""
    pairs = [multiprocessing.Pipe() for _ in range(3)]
    dispatcher = Dispatcher(subprocess.Popen(["true"]), *(ours for ours, _ in pairs))
    control, *processes = (theirs for _, theirs in pairs)
    control.send("")
    thread = threading.Thread(target=dispatcher.run, args=(fill,), daemon=True)
    thread.start()
    jobs = [Job("", 0, (), number, ()) for number in range(8)]

    def received(process: Any) -> int:
        assert process.poll(5)
        return process.recv().first

    with ThreadPoolExecutor(1) as pool, processes[0]:
        call = pool.submit(dispatcher.compute, np.empty(0), jobs[:5])
        assert [[received(process) for _ in range(2)] for process in processes] == [[0, 2], [1, 3]]
        assert not any(process.poll(0.01) for process in processes)
        processes[1].send([13, 12])
        assert received(processes[1]) == 4
        for process in (*processes, *processes):
            process.send([1] if process is processes[0] else [])
        assert call.result(5) == [1, 1, 12, 13]
        call = pool.submit(dispatcher.compute, np.empty(0), jobs[5:])
        until(processes[1].poll)
        processes[0].close()
        assert isinstance(call.exception(5), EOFError)
    thread.join(5)
    with pytest.raises(EOFError):
        dispatcher.compute(np.empty(0), jobs)


@needs_processes
def test_relative_paths(reading: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are relative to the working directory of the call, not to that in which the processes were started."""
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        save(value, folder / "file.png")
        monkeypatch.chdir(folder)
        found, failed = reading.map(["file.png", Path("none.png")])
        assert failed == [1] and (found[0] == value).all()


@needs_processes
def test_predictions_by_processes(reading: Workers, tmp_path: Path) -> None:
    """What `predict` sends: paths, and functions that read bytes of shards."""
    file = tmp_path / "one.png"
    save(9, file)
    sources = file, tmp_path / "none.png", ShardPart(Shard(str(file)), 0, 10**6)
    found, failed = reading.map(sources)
    assert failed == [1] and (found[[0, 2]] == 9).all()


@needs_processes
def test_in_a_fork(reading: Workers) -> None:
    """A fork has no threads, and does not end the processes of its parent."""
    reading.map([partial(time.sleep, 0.1)] * 8, portable=False)  # all threads are started
    before, child = children(), os.fork()
    if child == 0:
        signal.alarm(30)
        found, failed = reading.map([partial(pixels, 1)] * 8)
        gc.collect()
        os._exit(0 if not failed and (found == 1).all() and reading.processes is None else 1)
    assert os.waitpid(child, 0)[1] == 0 and children() == before
    found, failed = reading.map([partial(pixels, 2)] * 8)
    assert not failed and (found == 2).all() and reading.processes


class OnlyHere:
    """Cannot be imported by another process, like a class of a notebook."""

    __module__ = "__main__"

    def __call__(self, item: int) -> np.ndarray:
        return fill(item)


@needs_processes
@pytest.mark.parametrize("function", [lambda item: np.full(SHAPE, item), OnlyHere()], ids=["no pickle", "no import"])
def test_without_processes_there_are_threads(
    function: Callable[[int], np.ndarray],
    at_once: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "OnlyHere", OnlyHere, raising=False)
    caplog.set_level(logging.DEBUG, "allmlp.data")
    before, made = children(), Workers(function, SHAPE, 4)
    for end in (lambda: caplog.messages, lambda: children() <= before):
        found, failed = made.map([1, 2, 3])
        assert not failed and found[:, 0, 0, 0].tolist() == [1, 2, 3]
        until(end)
    assert "cannot start" in caplog.text and made.processes and not made.processes.is_ready


@needs_processes
def test_a_system_without_room_for_processes(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: object())  # an old libc
    made = Workers(fill, SHAPE, 4)
    for _ in range(2):
        found, failed = made.map([1, 2])
        assert not failed and found[:, 0, 0, 0].tolist() == [1, 2] and made.processes is None


@pytest.mark.parametrize(("count", "daemon"), [(2, False), (4, True)])
def test_few_workers_and_those_of_a_data_loader_are_threads(
    count: int, daemon: bool, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": daemon})
    made = Workers(fill, SHAPE, count)
    made.map([1])
    assert made.processes is None


@needs_processes
def test_a_buffer_in_use_is_not_used_again() -> None:
    memory = SharedMemory()
    first, one = memory.take((100, 7))
    one[:] = 1
    kept = torch.from_numpy(one[3:4])
    second, two = memory.take((100, 7))
    two[:] = 2
    del one, two
    third, three = memory.take((90, 7))
    assert second == third != first and kept.eq(1).all()
    del kept, three
    assert memory.take((100, 7))[0] in (first, second) and memory.size < 2**16
    for rows in range(1, 20_000, 100):
        memory.take((rows, 7))
    assert memory.size < 5 * 20_000 * 7


@needs_processes
def test_images_are_the_same(tmp_path: Path, at_once: None, caplog: pytest.LogCaptureFixture) -> None:
    """By threads, by processes, and after these have been killed."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(12):
            image = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "train" / name / f"{number}.jpg")
    data = ImageFolder(str(tmp_path), img_size=(8, 8), num_workers=4, test_fraction=0.0).load()
    broken = tmp_path / "train" / "a" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:100])  # after the headers have been read
    indices, uniforms, before = torch.arange(len(data.train)), torch.rand(len(data.train), 4), children()
    by_threads = data.train.fetch(indices, uniforms)
    source = getattr(data.train, "split", data.train)
    until(partial(getattr, source.workers().processes, "is_ready"))
    by_processes = data.train.fetch(indices, uniforms)
    for process in sorted(children() - before)[1:4]:
        os.kill(process, signal.SIGKILL)
    caplog.clear()
    for found in (by_processes, *(data.train.fetch(indices, uniforms) for _ in range(2))):
        assert torch.equal(by_threads.images, found.images) and torch.equal(by_threads.labels, found.labels)
    assert source.skipped == 1 and not by_processes.images.is_inference()
    assert caplog.messages == ["the processes that decode images have ended (one was killed): threads decode them now"]
    with torch.inference_mode():
        assert not data.train.fetch(indices).images.is_inference()
    del source, data
    gc.collect()
    until(lambda: children() <= before)


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
