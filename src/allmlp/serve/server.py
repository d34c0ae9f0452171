"""The server process: connection timeouts, the listening socket, and graceful shutdown."""

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
from allmlp.serve.app import create_app, load_service
from allmlp.serve.batching import Batcher

MAX_HEADER_BYTES = 2**15
"""Longer request headers get 400 from the HTTP parser."""
HEADER_TIMEOUT = 10.0
"""Seconds to receive the request headers, from the connection or from their first byte."""
WRITE_TIMEOUT = 30.0
"""Seconds for a client to read a response that fills its socket buffer."""
KEEP_ALIVE_TIMEOUT = 15
MAX_CONNECTIONS = 512
LINGER_SECONDS = 0.5
"""How long an idle server that is shutting down still answers new requests with 503."""


def empty_response(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "content-length: 0", "connection: close", *headers, "", ""]).encode()


REQUEST_TIMEOUT = empty_response("408 Request Timeout")
TOO_MANY_CONNECTIONS = empty_response("503 Service Unavailable", "retry-after: 1")


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with timeouts for receiving headers and sending responses, and a connection limit.

    This relies on H11Protocol's internals (`cycle`, `connections`), so pyproject.toml pins uvicorn's minor versions.
    """

    header_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()
        else:
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.on_header_timeout)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_header_timer()
        elif self.header_timer is None:
            # The beginning of the next request, or the rest of a rejected body.
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.on_header_timeout)

    def on_header_timeout(self) -> None:
        if not self.transport.is_closing():
            if self.cycle is None:
                self.transport.write(REQUEST_TIMEOUT)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop_header_timer()
        self.stop_write_timer()

    def stop_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None


def max_connections() -> int:
    """The connection limit, lower if the process may open few files."""
    return min(MAX_CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64, 8))


class Server(uvicorn.Server):
    """Shuts down gracefully on the first signal: new requests get 503, accepted ones are completed.

    A second signal exits at once.
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
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
            timeout_graceful_shutdown=int(batcher.timeout) + 5,
        )
        super().__init__(config)
        self.batcher = batcher
        self.idle_since: float | None = None
        """Set by the first signal; then the last time a request was in flight."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.idle_since is None:
            self.idle_since = time.monotonic()
            self.batcher.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.idle_since is not None:
            if self.batcher.in_flight:
                self.idle_since = time.monotonic()
            elif time.monotonic() - self.idle_since > LINGER_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        # Clients that are already connected still get a 503.
        deadline = time.monotonic() + LINGER_SECONDS
        while self.server_state.connections and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as reason:
        text = getattr(reason, "strerror", None) or reason
        raise UserError(f"cannot listen on {host}, port {port}: {text}; choose another --host or --port") from None


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    folder: Path,
    host: str,
    port: int,
    batch_size: int,
    max_concurrency: int,
    timeout: float,
    threads: int | None = None,
) -> None:
    """Serve the model of a folder until a signal arrives."""
    torch.set_num_threads(threads or available_cores())
    # Invalid forms and images are reported to the client and must not fill the log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    service = load_service(folder)
    batcher = Batcher(batch_size, max_concurrency, timeout)
    service.warm_up()  # the first run is slower
    start = time.perf_counter()
    service.warm_up()
    batcher.seconds_per_request = time.perf_counter() - start
    server = Server(create_app(service, folder.resolve().name, batcher), batcher)
    with listen(host, port) as listener:
        parameters = sum(parameter.numel() for parameter in service.model.parameters())
        print(
            f"Serving {folder} ({parameters / 1e6:.2f} M parameters, {service.model.spec.input_spec}) "
            f"at {address(listener)}; press Ctrl-C to stop",
            flush=True,
        )
        server.run([listener])
    print(f"{batcher.accepted:,} requests accepted, {batcher.in_flight} unfinished", flush=True)
