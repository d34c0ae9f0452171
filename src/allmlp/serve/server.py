"""The server process: connection timeouts, the listening socket, and graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from allmlp.errors import UserError, plural
from allmlp.serve.app import Service, create_app, load_service
from allmlp.serve.batching import Batcher
from allmlp.serve.engine import GPU_THREADS, BatchingEngine
from allmlp.serve.limits import MAX_HEAD_BYTES, SECURITY_HEADERS, TOO_LARGE_HEAD, client_of
from allmlp.threads import limit

HEADER_TIMEOUT = 10.0
"""Seconds to receive the request headers, from the connection or from their first byte."""
WRITE_TIMEOUT = 30.0
"""Seconds for a client to read a response that fills its socket buffer."""
KEEP_ALIVE_TIMEOUT = 15
MAX_CONNECTIONS = 512
READ_BYTES = 2**14
"""Bytes parsed in one turn of the event loop: at most 5 ms, for a body in chunks of one byte."""
MAX_PARSE_SECONDS = 0.2
"""Processor time for parsing one request. 16 MiB take a tenth of it, unless they are sent in chunks of a few bytes."""
SLOW_PARSE_SECONDS = 1e-3
"""Parse time of one read above which a connection is slow; slow ones together get a third of the event loop's time."""
WARM_UP_SECONDS = 5.0
"""Maximum warm-up time per model."""
LINGER_SECONDS = 0.5
"""Seconds for which an idle server that is shutting down still answers new requests with 503."""
NEW_LINGER_SECONDS = 5.0
"""The same for clients that are connected but have not sent a request yet."""


Network = IPv4Network | IPv6Network


def response(status: str, detail: str, *headers: tuple[str, str]) -> bytes:
    """An error response, after which the connection is closed."""
    body = json.dumps({"detail": detail})
    fields = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    lines = [f"{name}: {value}" for name, value in (*fields, *SECURITY_HEADERS.items(), *headers)]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", body]).encode()


BAD_REQUEST = response("400 Bad Request", "the request is not valid HTTP (RFC 9112)")
REQUEST_TIMEOUT = response("408 Request Timeout", "the request was sent too slowly")
HEAD_TOO_LARGE = response("431 Request Header Fields Too Large", TOO_LARGE_HEAD)
TOO_MANY_CONNECTIONS = response("503 Service Unavailable", "too many connections", ("retry-after", "1"))


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1 protocol with limits on the size of the head, on the time to receive it, to parse a request
    and to send the response, and on the number of connections.

    This relies on HttpToolsProtocol's internals (`cycle`, `connections`), so pyproject.toml pins uvicorn's minor
    versions.
    """

    buffer = memoryview(bytearray(READ_BYTES))
    """Shared by all connections, since data are parsed as soon as they are read."""
    slow: ClassVar[set[Connection]] = set()
    """Connections that are paused because parsing takes long."""
    header_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None
    parse_seconds: float = 0.0
    """Parse time of the current request."""
    in_head: bool = False
    """Whether the head of a request has started but not ended."""
    head_bytes: int = 0

    def __init__(self, *args: Any, trusted_proxies: Sequence[Network] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trusted_proxies = trusted_proxies

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol, which Python's create_server() does not. Without
        # it the body of a response, sent after its head, waits 40 ms for a client that delays its acknowledgment.
        if (connected := transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = self.client[0] if self.client else ""
        trusted = any(ip_address(host) in network for network in self.trusted_proxies)
        self.address = None if trusted else client_of(host)
        """None for a trusted proxy, whose connections belong to many clients."""
        self.opened = self.loop.time()
        if len(self.connections) > max_connections():
            refused = self.crowding_out() or self
            refused.refuse(TOO_MANY_CONNECTIONS)
            if refused is self:
                return
        self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.on_header_timeout)

    def crowding_out(self) -> Connection | None:
        """The oldest connection without a complete request of the client with the most connections, if that client has
        more than the one of this connection.
        """
        others = [one for one in self.connections if isinstance(one, Connection) and one.address is not None]
        counts = Counter(one.address for one in others)
        client, most = max(counts.items(), key=lambda item: item[1], default=(None, 0))
        waiting = [one for one in others if one.address == client and one.is_waiting()]
        return min(waiting, key=lambda one: one.opened, default=None) if most > counts[self.address] else None

    def is_waiting(self) -> bool:
        """Whether the client has to send something before it is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def refuse(self, message: bytes) -> None:
        """Close the connection, with this response unless one has been started."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(message)
        self.transport.close()

    # --- received bytes ----------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        start, cycle, in_head = time.thread_time(), self.cycle, self.in_head
        self.data_received(bytes(self.buffer[:nbytes]))
        seconds = time.thread_time() - start
        self.parse_seconds = seconds if self.cycle is not cycle else self.parse_seconds + seconds
        self.head_bytes = self.head_bytes + nbytes if in_head and self.in_head else 0
        if self.transport.is_closing():
            return
        if self.head_bytes > MAX_HEAD_BYTES:
            self.refuse(HEAD_TOO_LARGE)
        elif self.parse_seconds > MAX_PARSE_SECONDS:
            self.transport.abort()
        elif self.cycle is not None and not self.cycle.response_complete:
            self.stop_header_timer()
        elif self.header_timer is None:
            # The beginning of the next request, or the rest of a rejected body.
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.on_header_timeout)
        if seconds > SLOW_PARSE_SECONDS:
            self.slow.add(self)
            self.transport.pause_reading()
            self.loop.call_later(2 * seconds * len(self.slow), self.read_on)

    def read_on(self) -> None:
        self.slow.discard(self)
        self.transport.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self.refuse(BAD_REQUEST)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # those after a chunked body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser takes what follows for another protocol

    # --- timeouts ----------------------------------------------------------------------------------------------------

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
    """The connection limit, lower if the process may open few files (not limited on Windows)."""
    if sys.platform != "win32":
        import resource

        return min(MAX_CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64, 8))
    return MAX_CONNECTIONS


class Server(uvicorn.Server):
    """Shuts down gracefully on the first signal: new requests get 503, accepted ones are completed.

    A second signal exits at once.
    """

    def __init__(self, app: Any, batcher: Batcher, trusted_proxies: Sequence[Network] = ()) -> None:
        self.protocol = partial(Connection, trusted_proxies=trusted_proxies)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=self.protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=bool(trusted_proxies),  # X-Forwarded-For, from nobody else
            forwarded_allow_ips=[str(network) for network in trusted_proxies],
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
        """Accept the connections in the backlog, which closing the listener would reset, and answer 503."""
        waiting = list[socket.socket]()
        for listener in sockets or ():
            with suppress(BlockingIOError):
                while len(waiting) < MAX_CONNECTIONS:
                    waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        for accepted in waiting:
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(partial(self.protocol, **state), accepted)
        start = time.monotonic()
        while not self.force_exit and (connections := self.server_state.connections):
            # Connections answered before may be idle for long, the others are about to send a request.
            new = any(isinstance(one, Connection) and one.cycle is None for one in connections)
            if time.monotonic() - start > (NEW_LINGER_SECONDS if new else LINGER_SECONDS):
                break
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
    """Host names that a server at the address `host` answers for, with `more`; None for all."""
    if "*" in more:
        return None
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if address is not None and not address.is_loopback and not more:
        return None  # other machines may know this one by any name
    own_name = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own_name.lower(), *(name.lower() for name in more)})


def network(text: str) -> Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise UserError(f"--trusted-proxy takes an address or a network such as 10.0.0.0/8, not {text!r}") from None


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
    origins: Sequence[str] = (),
    trusted_proxies: Sequence[str] = (),
) -> None:
    """Serve models until a signal arrives."""
    proxies = [network(text) for text in trusted_proxies]
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
    # On a CPU, more decoding threads would only take cores from the model.
    largest, usual_threads, decode_threads = (128, min(limit(), GPU_THREADS), limit()) if on_gpu else (16, None, 1)
    engine = BatchingEngine(batch_size or largest, threads or usual_threads)
    batcher = Batcher(engine, max_concurrency or 8 * engine.max_batch_size, timeout, decode_threads)
    app = create_app(services, batcher, hosts=allowed_hosts(host, more_hosts), origins=origins)
    server = Server(app, batcher, proxies)
    with listen(host, port) as listener:
        engine.start()
        warm_up(engine, services.values())
        gc.freeze()  # objects loaded so far stay alive: exclude them from garbage collection
        listed = ", ".join(describe(name, service) for name, service in services.items())
        print(f"Serving {listed} at {address(listener)}; press Ctrl-C to stop", flush=True)
        server.run([listener])
    print(f"{plural(batcher.accepted, 'input')} accepted, {batcher.in_flight} unfinished", flush=True)


def warm_up(engine: BatchingEngine, services: Iterable[Service]) -> None:
    """Run every model until the number of threads is chosen and its time per input is known."""
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
