"""The server process: connection timeouts, the listening socket, and graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from allmlp.errors import UserError
from allmlp.serve.app import Service, create_app, load_service
from allmlp.serve.batching import Batcher
from allmlp.serve.engine import BatchingEngine
from allmlp.threads import limit

MAX_HEADER_BYTES = 2**15
"""Longer request headers get 400 from the HTTP parser."""
HEADER_TIMEOUT = 10.0
"""Seconds to receive the request headers, from the connection or from their first byte."""
WRITE_TIMEOUT = 30.0
"""Seconds for a client to read a response that fills its socket buffer."""
KEEP_ALIVE_TIMEOUT = 15
MAX_CONNECTIONS = 512
MAX_PARSE_SECONDS = 0.5
"""Processor time for parsing one request. 16 MiB take a tenth of it, unless they are sent in chunks of a few bytes."""
WARM_UP_SECONDS = 5.0
"""For each model, at most."""
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
    parse_seconds: float = 0.0
    """Of the current request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()
        else:
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.on_header_timeout)

    def data_received(self, data: bytes) -> None:
        start, cycle = time.thread_time(), self.cycle
        super().data_received(data)
        self.parse_seconds = (self.parse_seconds if self.cycle is cycle else 0.0) + time.thread_time() - start
        if self.parse_seconds > MAX_PARSE_SECONDS:
            self.transport.abort()
            return
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
    """The connection limit, lower if the process may open few files, which Windows does not limit so."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

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


def allowed_hosts(host: str, more: Sequence[str]) -> frozenset[str] | None:
    """The names that a server at the address `host` answers for, and `more`; None for all."""
    if "*" in more:
        return None
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if address is not None and not address.is_loopback and not more:
        return None  # other machines may know this one by any name
    own = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own.lower(), *(name.lower() for name in more)})


def served_name(model: str) -> tuple[str, str]:
    """Name in URLs, and the model: NAME=MODEL, or the last part of its path or name."""
    name, given, place = model.partition("=")
    if not given or Path(model).exists():
        place, name = model, re.split("[/:]", str(Path(model).resolve()) if Path(model).exists() else model)[-1]
    return re.sub(r"[^\w.-]+", "-", name) or "model", place


def run(
    models: Sequence[str],
    host: str,
    port: int,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    max_concurrency: int | None = None,
    timeout: float = 20.0,
    threads: int | None = None,
    more_hosts: Sequence[str] = (),
) -> None:
    """Serve models until a signal arrives."""
    # Invalid forms and images are reported to the client and must not fill the log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    services: dict[str, Service] = {}
    for model in models:
        name, place = served_name(model)
        if name in services:
            raise UserError(f"two models are called {name}: name them, such as {name}-2={place}")
        services[name] = load_service(place, device, dtype)
    on_gpu = any(service.predictor.device.type == "cuda" for service in services.values())
    # On a CPU, decoding more at a time would only take cores from the model.
    decode_threads = limit() if on_gpu else 1
    engine = BatchingEngine(batch_size or (128 if on_gpu else 16), threads or (limit() if on_gpu else None))
    batcher = Batcher(engine, max_concurrency or 8 * engine.max_batch_size, timeout, decode_threads)
    app = create_app(services, batcher, hosts=allowed_hosts(host, more_hosts))
    server = Server(app, batcher)
    with listen(host, port) as listener:
        engine.start()
        warm_up(engine, services.values())
        gc.freeze()  # what was imported and loaded lives on: collections of garbage need not look at it
        listed = ", ".join(describe(name, service) for name, service in services.items())
        print(f"Serving {listed} at {address(listener)}; press Ctrl-C to stop", flush=True)
        server.run([listener])
    print(f"{batcher.accepted:,} inputs accepted, {batcher.in_flight} unfinished", flush=True)


def warm_up(engine: BatchingEngine, services: Iterable[Service]) -> None:
    """Run every model until the number of threads is chosen and the time that it takes is known."""
    for service in services:
        function, item = service.warm_up()
        deadline = time.monotonic() + WARM_UP_SECONDS
        for number in count(1):
            last = engine.submit(function, item).result()
            measuring = any(threads.is_measuring for threads in engine.threads[function].values())
            if number >= 3 and (not measuring or time.monotonic() > deadline):
                engine.seconds[function] = last.model_seconds
                break


def describe(name: str, service: Service) -> str:
    parameters = sum(parameter.numel() for parameter in service.model.parameters())
    return f"{name} ({parameters / 1e6:.2f} M parameters, {service.model.spec.input_spec}, {service.predictor.device})"
