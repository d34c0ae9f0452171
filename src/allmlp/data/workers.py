"""Workers that read and decode images: threads, and after the first thousand images processes.

    workers = Workers(read, (3, 224, 224), count=16)
    images, failed = workers.map(items)                # images[i] = read(items[i]), but for the positions in `failed`

Threads take turns at Python's global interpreter lock: on 16 cores, 16 of them prepared fewer images per second than 4.
Processes do not, but take a second or two to start, which they do in the background.

A first process imports what `read` needs, once, and forks the others. This one, which may have threads and a CUDA
context, is not forked, and the user's script is not imported again, as multiprocessing would. Images are written to an
anonymous file that all processes map, so that /dev/shm, which is small in containers, is not used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from allmlp.errors import one_line
from allmlp.threads import limit

log = logging.getLogger("allmlp.data")
PROCESSES_FROM = 4
"""With fewer workers, threads are as fast."""
PROCESSES_AFTER = 1000
"""Items that threads compute first: fewer take less time than the start of the processes."""
AT_ONCE_THREAD, AT_ONCE_PROCESS = 4, 16
"""Maximum number of items in one job. A job of one takes a tenth longer in a thread, as it is handed over."""
QUEUED = 2
"""Jobs that a process has: the one it computes, and the next."""
NO_PROCESSES = "images are decoded by threads, because processes cannot start: %s"
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from allmlp.data.workers import run; "
    "run(*map(int, sys.argv[2:]))"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CLOSE_ON_EXEC = 1


Function = Callable[[Any], Any]
"""Returns an array or a tensor (uint8)."""


class Workers:
    """`count` workers that compute `function`, which returns uint8 arrays of `shape`, for batches of items."""

    def __init__(self, function: Function, shape: Sequence[int], count: int) -> None:
        self.function, self.shape, self.count = function, tuple(shape), count
        self.processes: WorkerProcesses | None
        self.start()

    def start(self) -> None:
        self.threads, self.lock = ThreadPoolExecutor(self.count, thread_name_prefix="decode"), threading.Lock()
        self.computed, self.processes = 0, None
        self.may_fork = self.count >= PROCESSES_FROM and are_processes_supported()
        self.pid = os.getpid()

    def map(self, items: Sequence[Any], portable: bool = True) -> tuple[np.ndarray, list[int]]:
        """function(item) for all items (n, *shape), and the positions of those for which it raised an error.

        Items that are not `portable` cannot be sent to other processes. Any number of threads may call this.
        """
        if self.pid != os.getpid():
            self.start()  # a fork has no threads, and leaves the processes to its parent
        processes = self.ready_processes(len(items)) if portable else None
        if processes is not None:
            try:
                return processes.map(items)
            except (EOFError, ConnectionError):
                self.give_up(processes, "one was killed")
            except OSError as reason:  # such as no more memory
                self.give_up(processes, one_line(reason))
        return self.map_in_threads(items)

    def map_in_threads(self, items: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
        rows = np.empty((len(items), *self.shape), dtype=np.uint8)
        jobs = split(len(items), self.count, AT_ONCE_THREAD)
        failed = self.threads.map(lambda job: fill(rows, job.start, items[job.start : job.stop], self.function), jobs)
        return rows, [position for some in failed for position in some]

    def ready_processes(self, items: int) -> WorkerProcesses | None:
        """The processes, if they are ready; they are started when enough items have been computed."""
        with self.lock:
            self.computed += items
            if self.processes is None and self.may_fork and self.computed >= PROCESSES_AFTER:
                try:
                    self.processes = WorkerProcesses(self.function, self.shape, self.count)
                except (OSError, RuntimeError) as reason:  # too many files, processes or threads, or forbidden here
                    log.debug(NO_PROCESSES, reason)
                    self.may_fork = False
            return self.processes if self.processes and self.processes.is_ready else None

    def give_up(self, processes: WorkerProcesses, reason: str) -> None:
        with self.lock:
            if self.processes is processes:
                log.warning("the processes that decode images have ended (%s): threads decode them now", reason)
                self.processes, self.may_fork = None, False


def own_cores() -> int:
    """The cores of this process: those that torchrun starts on a machine share them."""
    return math.ceil(limit() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def split(items: int, workers: int, most: int) -> list[range]:
    """Jobs for all workers: at least two each, if there are enough items."""
    size = min(max(items // (2 * workers), 1), most)
    return [range(first, min(first + size, items)) for first in range(0, items, size)]


def fill(rows: np.ndarray, first: int, items: Sequence[Any], function: Function) -> list[int]:
    """Write function(item) into the rows from `first` on; returns those that failed."""
    failed = []
    for position, item in enumerate(items, first):
        try:
            rows[position] = function(item)
        except Exception:  # the caller computes it again, and sees the error
            failed.append(position)
    return failed


def are_processes_supported() -> bool:
    """Whether this process may start others: on Linux, unless it is a worker itself, or no plain Python."""
    is_worker = multiprocessing.current_process().daemon  # as those of a DataLoader
    return sys.platform == "linux" and bool(sys.executable) and not is_worker and not hasattr(sys, "frozen")


class Job(NamedTuple):
    folder: str
    """The working directory, for relative paths."""
    offset: int
    shape: tuple[int, ...]
    """Position and shape of the array for all items of the batch."""
    first: int
    items: Sequence[Any]


class WorkerProcesses:
    """The processes of `Workers`; the function is sent to them by pickle."""

    def __init__(self, function: Function, shape: Sequence[int], count: int) -> None:
        self.shape, self.count = shape, count
        self.memory = SharedMemory()
        pairs = [socket.socketpair() for _ in range(count + 1)]
        theirs = [self.memory.file, *(pair[1].fileno() for pair in pairs)]
        places = [place for place in sys.path if isinstance(place, str)]  # others are ignored by Python
        process = subprocess.Popen(
            # Nothing is imported from the working directory (-P), unless this process does so too.
            [sys.executable, "-P", "-c", START, json.dumps(places), *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(ONE_THREAD, "1")},
            start_new_session=True,  # Ctrl-C is for the process that reads the answers
        )
        for _, other in pairs:
            other.close()
        self.close = weakref.finalize(self, end, process)
        self.dispatcher = Dispatcher(process, *(Connection(ours.detach()) for ours, _ in pairs))
        # The thread does not refer to this object: the processes end when nothing else does.
        threading.Thread(target=self.dispatcher.run, args=(function,), name="dispatch", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        return self.dispatcher.is_ready

    def map(self, items: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
        """As `Workers.map`; EOFError or OSError if a process has ended."""
        offset, rows = self.memory.take((len(items), *self.shape))
        folder = os.getcwd()
        jobs = [
            Job(folder, offset, rows.shape, part.start, items[part.start : part.stop])
            for part in split(len(items), self.count, AT_ONCE_PROCESS)
        ]
        return rows, self.dispatcher.compute(rows, jobs)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the first process. The dispatcher sees that and closes the connections, which ends the others."""
    process.kill()
    process.wait()


class Call:
    """A call of `map`, done when all of its jobs are. It refers to the array as long as a process may write to that."""

    def __init__(self, rows: np.ndarray, jobs: int) -> None:
        self.rows, self.jobs, self.done = rows, jobs, threading.Event()
        self.failed: list[int] = []

    def add(self, failed: list[int]) -> None:
        self.failed += failed
        self.jobs -= 1
        if not self.jobs:
            self.done.set()


class Dispatcher:
    """Hands jobs to the processes, and their answers to the threads that wait for them.

    One thread reads all answers. It may have to wait for the interpreter lock; meanwhile processes have another job.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Connection, *connections: Connection) -> None:
        self.process, self.control, self.lock = process, control, threading.Lock()
        self.is_ready = self.has_ended = False
        self.waiting: deque[tuple[bytes, Call]] = deque()
        self.running: dict[Connection, deque[Call]] = {connection: deque() for connection in connections}
        """The calls to which the jobs of each process belong, in their order."""

    def run(self, function: Function) -> None:
        """Start the processes, and read answers until one of them ends."""
        try:
            reason = self.start(function)
            if reason:
                log.debug(NO_PROCESSES, reason)
            else:
                self.is_ready = True
                self.read_answers()
        except (EOFError, OSError):
            pass  # those who wait are told
        finally:
            self.stop()

    def start(self, function: Function) -> str:
        """Send the function, and wait until it is loaded; returns why it cannot be."""
        try:
            self.control.send_bytes(pickle.dumps(function, pickle.HIGHEST_PROTOCOL))
            return self.control.recv()
        except Exception as error:  # what cannot be pickled raises many types
            return one_line(error) or type(error).__name__

    def compute(self, rows: np.ndarray, jobs: Sequence[Job]) -> list[int]:
        """Have the jobs fill `rows`; returns the positions that failed."""
        call, messages = Call(rows, len(jobs)), [pickle.dumps(job, pickle.HIGHEST_PROTOCOL) for job in jobs]
        with self.lock:
            if self.has_ended:
                raise EOFError
            self.waiting.extend((message, call) for message in messages)
            self.hand_out()
        if jobs:
            call.done.wait()
        if call.jobs:
            raise EOFError
        return sorted(call.failed)

    def hand_out(self) -> None:
        """Send waiting jobs to the processes that have the fewest."""
        while self.waiting:
            connection = min(self.running, key=lambda connection: len(self.running[connection]))
            if len(self.running[connection]) == QUEUED:
                return
            message, call = self.waiting.popleft()
            self.running[connection].append(call)
            connection.send_bytes(message)

    def read_answers(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in (self.control, *self.running):
                selector.register(connection, selectors.EVENT_READ, connection)
            while True:
                for key, _ in selector.select():
                    failed = key.data.recv()
                    with self.lock:
                        self.running[key.data].popleft().add(failed)
                        self.hand_out()

    def stop(self) -> None:
        with self.lock:
            self.has_ended = True
            for call in chain(*self.running.values(), (call for _, call in self.waiting)):
                call.done.set()
            for connection in (self.control, *self.running):
                connection.close()
        end(self.process)


class SharedMemory:
    """Buffers in an anonymous file that grows. Their lengths are powers of two, so that batches of varying sizes use
    the same ones; memory is only used for what is written to them.
    """

    def __init__(self) -> None:
        self.file, self.size, self.lock = create_file(), 0, threading.Lock()
        self.free: defaultdict[int, deque[tuple[int, mmap.mmap]]] = defaultdict(deque)
        weakref.finalize(self, os.close, self.file)

    def take(self, shape: Sequence[int]) -> tuple[int, np.ndarray]:
        """Offset in the file, and a uint8 array. Its buffer is used again when nothing refers to it or its views."""
        needed = math.prod(shape)
        length = buffer_length(needed)
        with self.lock:
            free = self.free[length]
            buffer = free.pop() if free else self.grow(length)
        offset, content = buffer
        array = np.frombuffer(content, dtype=np.uint8, count=needed)
        # Runs in any thread, also within the lock: appending needs none.
        weakref.finalize(array, free.append, buffer)
        return offset, array.reshape(shape)

    def grow(self, length: int) -> tuple[int, mmap.mmap]:
        offset = self.size
        os.ftruncate(self.file, offset + length)
        self.size += length
        return offset, mmap.mmap(self.file, length, offset=offset)


def buffer_length(needed: int) -> int:
    return max(1 << (needed - 1).bit_length(), mmap.ALLOCATIONGRANULARITY)


def create_file() -> int:
    """An anonymous file in memory. Python has os.memfd_create only if it was built on a new system; uv's and conda's
    were not.
    """
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)  # not before glibc 2.27
    number = create(b"allmlp", CLOSE_ON_EXEC) if create else -1
    if number < 0:
        raise OSError(ctypes.get_errno(), "anonymous files are not possible here")
    return number


# --- in the other processes ---------------------------------------------------------------------------------


def run(memory: int, first: int, *others: int) -> None:
    """Load the function, fork a process per connection, and wait for them. The arguments are file descriptors."""
    warnings.simplefilter("ignore")
    control = Connection(first)
    try:
        function = pickle.loads(control.recv_bytes())
        for place, number in enumerate(others):
            if sys.platform == "linux" and os.fork() == 0:
                for other in (first, *others[place + 1 :]):
                    os.close(other)
                try:
                    answer(Connection(number), memory, function)
                finally:
                    os._exit(0)
            os.close(number)
        reason = ""
    except Exception as error:  # the function cannot be loaded, such as a class of the user's script, or no room
        reason = one_line(error) or type(error).__name__
    with suppress(OSError):
        control.send(reason)
    if sys.platform == "linux":
        with suppress(ChildProcessError):
            while True:
                os.wait()


def answer(connection: Connection, memory: int, function: Function) -> None:
    """Compute jobs until the connection is closed, and answer with the positions that failed."""
    while True:
        job: Job = connection.recv()
        os.chdir(job.folder)
        needed = math.prod(job.shape)
        rows = map_buffer(memory, job.offset, buffer_length(needed))[:needed].reshape(job.shape)
        connection.send(fill(rows, job.first, job.items, function))


@cache
def map_buffer(memory: int, offset: int, length: int) -> np.ndarray:
    """A buffer of `SharedMemory`; mapping it for each job would take a hundredth longer."""
    return np.frombuffer(mmap.mmap(memory, length, offset=offset), dtype=np.uint8)
