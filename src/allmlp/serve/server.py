"""The process: connections that may not dawdle, a socket, and a shutdown that answers everyone it has taken on."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from allmlp.errors import UserError
from allmlp.serve.app import application, open_service
from allmlp.serve.batching import Batcher

HEAD_BYTES = 2**15
"""The longest head of a request; HTTP's parser answers a longer one with 400."""
HEAD_SECONDS = 10.0
"""In which it must have come, counted from the connection or from its first byte."""
WRITE_SECONDS = 30.0
"""In which a client must take an answer that its socket has no room for."""
IDLE_SECONDS = 15
"""That a connection is kept open after an answer."""
CONNECTIONS = 512
LINGER = 0.5
"""Seconds for which a server with nothing left to do still tells new requests, those on their way, that it ends."""


def answer(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "content-length: 0", "connection: close", *headers, "", ""]).encode()


TOO_SLOW = answer("408 Request Timeout")
TOO_MANY = answer("503 Service Unavailable", "retry-after: 1")


class Connection(H11Protocol):
    """HTTP/1.1 with a time limit on the head of a request and on the reading of an answer, and a limit on clients."""

    head_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(TOO_MANY)
            transport.close()
        else:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_head_timer()
        elif self.head_timer is None:
            # The first piece of the next head, or the rest of a body that nobody waits for any more.
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.give_up)

    def give_up(self) -> None:
        if not self.transport.is_closing():
            if self.cycle is None:
                self.transport.write(TOO_SLOW)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop_head_timer()
        self.stop_write_timer()

    def stop_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None


def most_connections() -> int:
    """Fewer where the system gives the process few files."""
    return min(CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64, 8))


class Server(uvicorn.Server):
    """On the first signal new work is refused with 503, what was taken on is finished, then the process ends.

    A second signal does not wait.
    """

    def __init__(self, app: Any, batcher: Batcher) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=int(batcher.timeout) + 5,
        )
        super().__init__(config)
        self.batcher = batcher
        self.asked: float | None = None
        """When the first signal came, or after it when a request was last inside."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = time.monotonic()
            self.batcher.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.asked is not None:
            if self.batcher.inside:
                self.asked = time.monotonic()
            elif time.monotonic() - self.asked > LINGER:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        # Who had connected before that is still told that it ends.
        until = time.monotonic() + LINGER
        while self.server_state.connections and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as reason:
        text = getattr(reason, "strerror", None) or reason
        raise UserError(f"cannot listen on {host}, port {port}: {text}; choose another --host or --port") from None


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(folder: Path, host: str, port: int, batch: int, queue: int, timeout: float, threads: int | None = None) -> None:
    """Serve a folder until a signal comes."""
    torch.set_num_threads(threads or cores())
    # What is wrong with a form or a picture is told to the client; it must not fill the log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    service = open_service(folder)
    batcher = Batcher(batch, queue, timeout)
    service.try_once()  # the first time takes longer
    began = time.perf_counter()
    service.try_once()
    batcher.pace = time.perf_counter() - began
    server = Server(application(service, folder.resolve().name, batcher), batcher)
    with listen(host, port) as listener:
        parameters = sum(parameter.numel() for parameter in service.model.parameters())
        print(
            f"{folder} ({parameters / 1e6:.2f} M parameters, reads {service.model.spec.reads}) "
            f"answers at {address(listener)}; Ctrl-C ends it",
            flush=True,
        )
        server.run([listener])
    print(f"{batcher.accepted:,} requests were taken on, {batcher.inside or 'none'} left unanswered", flush=True)
