"""The server process over real sockets: slow, invalid and too many clients, and shutdown under load."""

from __future__ import annotations

import gc
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from allmlp.cli import main
from allmlp.errors import UserError
from allmlp.serve import server
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import RequestLimits
from allmlp.weights.bundled import bundled
from data.sample_images import encode, scene
from folders import image_folder
from serve.servers import running

HEAD = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n"


@pytest.fixture(scope="module")
def batcher() -> Batcher:
    return Batcher()


LIMITS = RequestLimits(max_body=10_000, idle_timeout=1.0)


@pytest.fixture(scope="module")
def started(batcher: Batcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(image_folder(tmp_path_factory.mktemp("model")), batcher=batcher, limits=LIMITS) as found:
        yield found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have short timeouts, and room for few connections."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT", 1.0)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)


@pytest.fixture
def port(started: int, impatient: None) -> int:
    """A server in a thread, which these tests share."""
    return started


@pytest.fixture
def fresh_port(impatient: None, tmp_path: Path) -> Iterator[int]:
    """A server in a thread that has had no connections."""
    with running(image_folder(tmp_path), limits=LIMITS) as found:
        yield found


def send(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces with pauses between them and return the response."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        try:
            for number, piece in enumerate(pieces):
                time.sleep(pause if number else 0)
                connection.sendall(piece)
        except OSError:
            pass
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        return received


def predict(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/predict", encode(scene()))
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((b"not http at all\r\n\r\n",), 400),
        ((b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",), 431),
        ((b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000,), 431),
        ((b"GET /health?" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",), 431),
        ((b"GET /health?" + b"a" * 33_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",), 431),
        ((b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(9000)) + b"\r\n",), 431),
        ((HEAD.replace(b"2000", b"-2000") + b"\r\n",), 400),
        ((HEAD.replace(b"2000", b"2000000") + b"\r\n",), 413),
        ((b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",), 400),
        ((HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",), 400),
        ((b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200 + b"\r\n",), 431),
        ((b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n folded\r\n\r\n",), 400),
        ((b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",), 400),
        ((b"GET / HTTP/1.1\r\n\r\n",), 400),
        ((b"GET / HTTP/1.1\nhost: x\n\n",), 400),
        ((b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",), 501),
        ((b"POST /predict HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",), 501),
        ((b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",), 200),
        ((b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",), 400),
        ((b"GET /%00%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",), 404),
        ((), 408),
        ((b"POST /pre",), 408),
        ((HEAD + b"\r\n", b"some of it"), 408),
    ],
)
def test_invalid_and_slow_requests(port: int, pieces: tuple[bytes, ...], status: int) -> None:
    response = send(port, *pieces)
    assert response.startswith(b"HTTP/1.1 %d " % status) and response.count(b"HTTP/1.1 ") == 1
    assert predict(port) == 200


def test_slow_headers(port: int) -> None:
    began = time.monotonic()
    assert b" 408 " in send(port, *(HEAD[place : place + 1] for place in range(20)), pause=0.1)
    assert time.monotonic() - began < 5
    assert predict(port) == 200


def test_rejected_body_is_not_awaited(port: int, batcher: Batcher) -> None:
    began, batcher.in_flight = time.monotonic(), batcher.max_concurrency
    response = send(port, HEAD + b"\r\n", *[b"x"] * 40, pause=0.2)
    assert response.startswith(b"HTTP/1.1 503 ") and time.monotonic() - began < 6
    batcher.in_flight = 0
    assert predict(port) == 200


def test_rest_of_a_chunked_body_is_not_read(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed soon after the 413, however much the client has to send."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT", 60.0)
    chunk, began = b"1000\r\n" + b"x" * 0x1000 + b"\r\n", time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 3)
        response = connection.recv(1000)
        with suppress(OSError):
            while time.monotonic() - began < 20:
                connection.sendall(chunk)
                time.sleep(0.05)
    assert response.startswith(b"HTTP/1.1 413 ") and b"connection: close" in response
    assert time.monotonic() - began < 15
    assert predict(port) == 200


CHUNKED = b"POST /predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


def test_tiny_chunks_are_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PARSE_SECONDS", 5e-4)
    with socket.create_connection(("127.0.0.1", port), 20) as connection, suppress(OSError):
        connection.sendall(CHUNKED + b"1\r\nx\r\n" * 9_000)
        assert connection.recv(100) == b""
    monkeypatch.undo()
    assert predict(port) == 200


def test_tiny_chunks_delay_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each connection little is parsed in a turn of the event loop."""
    monkeypatch.setattr(server, "MAX_PARSE_SECONDS", 60.0)
    chunks, slowest, start = CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n", 0.0, time.monotonic()
    with running(image_folder(tmp_path)) as port, ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(send, port, chunks) for _ in range(4)]
        while not all(client.done() for client in clients):
            began = time.monotonic()
            send(port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            slowest = max(slowest, time.monotonic() - began)
        assert all(b"HTTP/1.1 422 " in client.result() for client in clients)
        assert slowest < (time.monotonic() - start) / 5


def test_headers_after_a_chunked_body_are_ignored(port: int) -> None:
    data = encode(scene(8, 8))
    chunk = b"%x\r\n" % len(data) + data + b"\r\n0\r\n"
    response = send(port, CHUNKED + chunk + b"host: y\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("host", "more", "expected"),
    [
        ("127.0.0.1", (), True),
        ("0.0.0.0", (), None),
        ("::", (), None),
        ("0.0.0.0", ("Example.org",), True),
        ("::1", (), True),
        ("127.0.0.1", ("*",), None),
    ],
)
def test_allowed_hosts(host: str, more: tuple[str, ...], expected: bool | None) -> None:
    found = server.allowed_hosts(host, more)
    assert (found is None) == (expected is None)
    if found is not None:
        assert {"localhost", "127.0.0.1", "[::1]", *(name.lower() for name in more)} <= found
        assert "evil.example" not in found


@pytest.mark.parametrize(
    ("model", "name", "place"),
    [
        ("runs/a", "a", "runs/a"),
        ("allmlp:cifar10", "cifar10", "allmlp:cifar10"),
        ("hf:someone/name", "name", "hf:someone/name"),
        ("big=runs/a", "big", "runs/a"),
        ("my model=runs/a", "my-model", "runs/a"),
    ],
)
def test_names_of_models(model: str, name: str, place: str) -> None:
    assert server.served_name(model) == (name, place)


def test_too_many_connections(fresh_port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", fresh_port), 20) for _ in range(6)]
    time.sleep(0.1)
    response = send(fresh_port)
    assert response.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in response
    for connection in held:
        connection.close()
    time.sleep(0.1)
    assert predict(fresh_port) == 200


@pytest.mark.slow
def test_full_server_takes_connections_of_others(fresh_port: int) -> None:
    """One address cannot keep others out: it loses its oldest connection that has sent no whole request."""
    held = [socket.create_connection(("127.0.0.1", fresh_port), 20) for _ in range(6)]
    held[0].sendall(HEAD + b"\r\nsome of the body")
    time.sleep(0.1)
    health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fresh_port), 20, source_address=("127.0.0.2", 0)) as other:
        other.sendall(health)
        assert other.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert held[0].recv(1000).startswith(b"HTTP/1.1 503 ")
    for connection in held:
        connection.close()


def test_trusted_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients behind a proxy have shares of their own; who is not a proxy cannot choose its address."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    batcher = Batcher(max_concurrency=8)
    batcher.clients["10.1.1.1"] = Counter({len: 8})
    request = HEAD.replace(b"2000", b"1") + b"connection: close\r\nx-forwarded-for: 10.1.1.1\r\n\r\nx"
    with running(image_folder(tmp_path), batcher=batcher, trusted_proxies=[server.network("127.0.0.1")]) as port:
        assert send(port, request).startswith(b"HTTP/1.1 503 ")
        assert send(port, request.replace(b"1.1.1", b"1.1.2")).startswith(b"HTTP/1.1 422 ")
        with socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0)) as other:
            other.sendall(request)
            assert other.recv(1000).startswith(b"HTTP/1.1 422 ")
    with pytest.raises(UserError, match=r"--trusted-proxy takes an address or a network .* not 'proxy'"):
        server.network("proxy")


def test_two_requests_on_one_connection(port: int) -> None:
    data = encode(scene(8, 8))
    request = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    response = send(port, request + request, last, pause=0.2)
    assert response.count(b"HTTP/1.1 200 OK") == 3


def test_bodies_are_sent_at_once(port: int) -> None:
    """Not when the client has acknowledged the head, which may take 40 ms."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
        client.request("GET", "/health")
        client.getresponse().read()
        assert client.sock is not None
        own = client.sock.getsockname()
        (connection,) = (one for one in gc.get_objects() if isinstance(one, server.Connection) and one.client == own)
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_client_that_does_not_read_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_TIMEOUT", 0.2)
    received = b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", port))
        # More than the socket buffers hold: 800 responses of 20 kB.
        connection.sendall(b"GET /page.js HTTP/1.1\r\nhost: x\r\n\r\n" * 800)
        time.sleep(1)
        with suppress(ConnectionResetError):
            while piece := connection.recv(2**20):
                received += piece
    assert 0 < received.count(b"HTTP/1.1 200 OK") < 800
    assert predict(port) == 200


# --- processes --------------------------------------------------------------------------------------------------------


class Served:
    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "allmlp", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.line)
        assert found, self.line + self.process.communicate()[1]
        self.port = int(found[1])


@pytest.mark.slow
def test_sigterm_under_load_completes_accepted_requests() -> None:
    """Clients keep sending requests, so that the signal arrives with requests in every state."""
    served = Served(str(bundled()), "--batch-size", "4", "--max-concurrency", "16", "--threads", "1")
    statuses: Counter[Any] = Counter()
    data = encode(scene(32, 32))

    def client(number: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
            while True:
                try:
                    connection.request("POST", "/predict", data)
                    response = connection.getresponse()
                    response.read()
                    statuses[response.status] += 1
                    if response.status == 503:
                        assert int(response.headers["retry-after"]) >= 1
                        time.sleep(0.02)
                except http.client.RemoteDisconnected:
                    statuses["closed"] += 1
                    connection.close()
                except OSError:
                    return

    with ThreadPoolExecutor(24) as threads:
        tasks = [threads.submit(client, number) for number in range(24)]
        deadline = time.monotonic() + 60
        while statuses[200] < 12 and time.monotonic() < deadline:
            time.sleep(0.05)
        served.process.send_signal(signal.SIGTERM)
        out, err = served.process.communicate(timeout=60)
        for task in tasks:
            task.result()
    assert served.process.returncode == 0 and not err
    accepted = re.search(r"([\d,]+) inputs accepted, 0 unfinished", out)
    assert accepted and int(accepted[1].replace(",", "")) == statuses[200] >= 12
    assert set(statuses) <= {200, 503, "closed"} and statuses[503] > 0


@pytest.mark.slow
def test_nobody_is_reset_at_a_shutdown() -> None:
    """Clients that connect while the server shuts down get 503, or are refused by the system."""
    served = Served(str(bundled()), "--threads", "1")
    ends: Counter[str] = Counter()

    def client() -> None:
        while True:
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
                    connection.request("GET", "/health")
                    ends[str(connection.getresponse().status)] += 1
            except OSError as reason:
                ends[type(reason).__name__] += 1
                return

    with ThreadPoolExecutor(100) as threads:
        tasks = [threads.submit(client) for _ in range(100)]
        time.sleep(1.0)
        served.process.send_signal(signal.SIGTERM)
        _, err = served.process.communicate(timeout=60)
        for task in tasks:
            task.result()
    assert served.process.returncode == 0 and not err
    assert set(ends) == {"200", "503", "ConnectionRefusedError"}, ends


def test_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = image_folder(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        for arguments, words in (
            ([str(tmp_path / "none")], "none is not a folder"),
            ([str(folder), "--port", str(occupied.getsockname()[1])], "choose another --host or --port"),
            ([str(folder), "--host", "no.such.host.invalid"], "choose another --host or --port"),
            ([str(folder), "--port", "70000"], "--port"),
            ([str(folder), str(folder)], "two models are called model: name them, such as model-2="),
            ([str(folder), "--dtype", "int8"], "unknown dtype 'int8'"),
        ):
            with pytest.raises(SystemExit) as caught:
                main(["serve", *arguments])
            assert caught.value.code == 2 and words in capsys.readouterr().err


def test_missing_fastapi(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(\"No module named 'fastapi'\", name='fastapi')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "allmlp", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "error: this needs fastapi: pip install 'allmlp[serve]'\n"
