"""Workers that read and decode images: threads, and after the first thousand images processes.

    workers = Workers(read, (3, 224, 224), count=16)
    images, failed = workers.map(items)                # images[i] = read(items[i]), but for the positions in `failed`

Threads take turns at Python's global interpreter lock: on 16 cores, 16 of them prepared fewer images per second than 4.
Processes do not, but take a second or two to start, which they do in the background.

A first process imports what `read` needs, once, and forks the others. This one, which may have threads and a CUDA
context, is not forked, and the user's script is not imported again. Images are written to an anonymous file that all
processes map, so that /dev/shm, which is small in containers, is not used.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from allmlp.errors import one_line

log = logging.getLogger("allmlp.data")
PROCESSES_FROM = 4
"""With fewer workers, threads are as fast."""
PROCESSES_AFTER = 1000
"""Items that threads compute first: fewer take less time than the start of the processes."""
AT_ONCE_THREAD, AT_ONCE_PROCESS = 4, 16
"""Maximum number of items in one job. A job of one takes a tenth longer in a thread, as it is handed over."""
NO_PROCESSES = "images are decoded by threads, because processes cannot start: %s"
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from allmlp.data.workers import run; "
    "run(*map(int, sys.argv[2:]))"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


Function = Callable[[Any], Any]
"""Returns an array or a tensor (uint8)."""


class Workers:
    """`count` workers that compute `function`, which returns uint8 arrays of `shape`, for batches of items."""

    def __init__(self, function: Function, shape: Sequence[int], count: int) -> None:
        self.function, self.shape, self.count, self.pid = function, tuple(shape), count, os.getpid()
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self.lock, self.computed = threading.Lock(), 0
        self.may_fork = count >= PROCESSES_FROM and are_processes_supported()
        self.processes: WorkerProcesses | None = None

    def map(self, items: Sequence[Any], portable: bool = True) -> tuple[np.ndarray, list[int]]:
        """function(item) for all items (n, *shape), and the positions of those for which it raised an error.

        Items that are not `portable` cannot be sent to other processes. Any number of threads may call this.
        """
        processes = self.ready_processes(len(items)) if portable else None
        if processes is not None:
            with suppress(WorkerEnded):
                return processes.map(items)
        return self.map_in_threads(items)

    def map_in_threads(self, items: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
        found = np.empty((len(items), *self.shape), dtype=np.uint8)
        jobs = split(len(items), self.count, AT_ONCE_THREAD)
        failed = self.threads.map(lambda job: fill(found, job.start, items[job.start : job.stop], self.function), jobs)
        return found, [position for some in failed for position in some]

    def ready_processes(self, items: int) -> WorkerProcesses | None:
        """The processes, if they are ready; they are started when enough items have been computed."""
        with self.lock:
            self.computed += items
            if self.processes is None and self.may_fork and self.computed >= PROCESSES_AFTER:
                try:
                    self.processes = WorkerProcesses(self.function, self.shape, self.count)
                except OSError as reason:  # too many files or processes, or forbidden in this container
                    log.debug(NO_PROCESSES, reason)
                    self.may_fork = False
        return self.processes if self.processes and self.processes.is_ready else None


def split(items: int, workers: int, most: int) -> list[range]:
    """Jobs for all workers: at least two each, if there are enough items."""
    size = min(max(items // (2 * workers), 1), most)
    return [range(first, min(first + size, items)) for first in range(0, items, size)]


def fill(found: np.ndarray, first: int, items: Sequence[Any], function: Function) -> list[int]:
    """Write function(item) into the rows from `first` on; returns those that failed."""
    failed = []
    for position, item in enumerate(items, first):
        try:
            found[position] = function(item)
        except Exception:  # the caller computes it again, and sees the error
            failed.append(position)
    return failed


def are_processes_supported() -> bool:
    """Whether this system can fork processes and share anonymous files."""
    return sys.platform == "linux" and bool(sys.executable)


class WorkerEnded(RuntimeError):
    """A process has ended: it was killed."""


class WorkerProcesses:
    """The processes of `Workers`; the function is sent to them by pickle."""

    def __init__(self, function: Function, shape: Sequence[int], count: int) -> None:
        self.shape, self.count, self.is_ready = shape, count, False
        self.memory = SharedMemory()
        pairs = [socket.socketpair() for _ in range(count + 1)]
        theirs = [self.memory.file, *(pair[1].fileno() for pair in pairs)]
        process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path), *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(ONE_THREAD, "1")},
        )
        for _, other in pairs:
            other.close()
        control, *connections = (Connection(ours.detach()) for ours, _ in pairs)
        self.idle: SimpleQueue[Connection] = SimpleQueue()
        for connection in connections:
            self.idle.put(connection)
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="worker-process")
        self.close = weakref.finalize(self, close, process, [control, *connections])
        threading.Thread(target=self.start, args=(control, function), name="start-workers", daemon=True).start()

    def start(self, control: Connection, function: Function) -> None:
        """Send the function, and wait until it is loaded."""
        try:
            control.send_bytes(pickle.dumps(function, pickle.HIGHEST_PROTOCOL))
            reason = control.recv()
        except Exception as error:  # what cannot be pickled raises many types
            reason = one_line(error) or type(error).__name__
        if reason:
            log.debug(NO_PROCESSES, reason)
        self.is_ready = not reason
        if reason:
            self.close()

    def map(self, items: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
        """As `Workers.map`. The memory is used again when nothing refers to the array any more."""
        offset, found = self.memory.take((len(items), *self.shape))
        jobs = [
            self.pool.submit(self.compute, (offset, found.shape, job.start, items[job.start : job.stop]))
            for job in split(len(items), self.count, AT_ONCE_PROCESS)
        ]
        return found, [position for job in jobs for position in job.result()]

    def compute(self, job: tuple[int, tuple[int, ...], int, Sequence[Any]]) -> list[int]:
        connection = self.idle.get()
        try:
            connection.send(job)
            return connection.recv()
        except (EOFError, OSError) as reason:
            was_ready, self.is_ready = self.is_ready, False  # before the message: other threads come here, too
            if was_ready:
                log.warning("a process that decodes images has ended: they are now decoded by threads")
            raise WorkerEnded from reason
        finally:
            self.idle.put(connection)


def close(process: subprocess.Popen[bytes], connections: list[Connection]) -> None:
    """End the processes: they stop at the end of their connections."""
    for connection in connections:
        with suppress(OSError):
            connection.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Buffer(NamedTuple):
    offset: int
    length: int
    content: mmap.mmap


class SharedMemory:
    """Buffers in an anonymous file that grows; a buffer is free when nothing refers to its array."""

    def __init__(self) -> None:
        self.file = os.memfd_create("allmlp") if sys.platform == "linux" else -1
        self.size, self.lock = 0, threading.Lock()
        self.free: deque[Buffer] = deque()
        weakref.finalize(self, os.close, self.file)

    def take(self, shape: Sequence[int]) -> tuple[int, np.ndarray]:
        """Offset in the file, and a uint8 array."""
        needed = math.prod(shape)
        with self.lock:
            buffer = self.reuse(needed) or self.grow(needed)
        found = np.frombuffer(buffer.content, dtype=np.uint8, count=needed).reshape(shape)
        # Runs in any thread, also within the lock: appending needs none.
        weakref.finalize(found, self.free.append, buffer)
        return buffer.offset, found

    def reuse(self, needed: int) -> Buffer | None:
        for _ in range(len(self.free)):
            buffer = self.free.popleft()
            if needed <= buffer.length <= 2 * needed + mmap.ALLOCATIONGRANULARITY:
                return buffer
            self.free.append(buffer)
        return None

    def grow(self, needed: int) -> Buffer:
        step = mmap.ALLOCATIONGRANULARITY
        offset, length = self.size, max(-(-needed // step), 1) * step
        os.ftruncate(self.file, offset + length)
        self.size += length
        return Buffer(offset, length, mmap.mmap(self.file, length, offset=offset))


# --- in the other processes ---------------------------------------------------------------------------------


def run(memory: int, first: int, *others: int) -> None:
    """Load the function, fork a process per connection, and wait for them. The arguments are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads the answers
    warnings.simplefilter("ignore")
    control = Connection(first)
    try:
        function = load(control)
        if function is not None and sys.platform == "linux":
            for place, number in enumerate(others):
                if os.fork() == 0:
                    for other in (first, *others[place + 1 :]):
                        os.close(other)
                    try:
                        answer(Connection(number), memory, function)
                    finally:
                        os._exit(0)
                os.close(number)
            control.send("")
            with suppress(ChildProcessError):
                while True:
                    os.wait()
    except OSError as reason:  # no room for another process
        control.send(one_line(reason))


def load(control: Connection) -> Function | None:
    """The function, and what it imports; None if it cannot be loaded, which the sender is told."""
    try:
        sent = control.recv_bytes()
    except EOFError:  # it could not be pickled
        return None
    try:
        return pickle.loads(sent)
    except Exception as reason:  # such as a class of the user's script
        control.send(one_line(reason) or type(reason).__name__)
        return None


def answer(connection: Connection, memory: int, function: Function) -> None:
    """Compute jobs until the connection is closed, and answer with the positions that failed."""
    mapped: dict[int, mmap.mmap] = {}
    while True:
        try:
            offset, shape, first, items = connection.recv()
        except (EOFError, OSError):
            return
        length = math.prod(shape)
        if offset not in mapped or len(mapped[offset]) < length:
            mapped[offset] = mmap.mmap(memory, length, offset=offset)
        found = np.frombuffer(mapped[offset], dtype=np.uint8, count=length).reshape(shape)
        connection.send(fill(found, first, items, function))
