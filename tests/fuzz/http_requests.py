"""Send damaged HTTP to a running server: no answer may be a 500, no request may stop it from answering others."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from fuzz.sandbox import MEMORY, Outcome
from fuzz.targets import damage, damage_json, seeds

STATUSES = {100, 200, 400, 403, 404, 405, 408, 413, 415, 421, 422, 431, 501, 503, 504}
QUIET, SLOW = 0.3, 10.0
"""Seconds without a byte after which the client gives up on a damaged request, and on a good one."""
PATHS = ("/predict", "/importance", "/models/text/classify", "/health", "/", "/maps", "/openapi.json", "/metrics", "/x")
HEADERS = (
    b"content-length: 3",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"content-length: 1_0",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding : chunked",
    b"host: evil.example",
    b"host:",
    b"expect: 100-continue",
    b"connection: upgrade\r\nupgrade: h2c",
    b"origin: null",
    b"sec-fetch-site: cross-site",
    b"content-type: multipart/form-data; boundary=" + b"b" * 80,
    b"content-type: \xff\xfe",
    b"x: a\r\n folded",
    b"x: a\0b",
    b"x: " + b"y" * 40_000,
    b"\r\n".join(b"x%d: y" % number for number in range(150)),
    b"no colon",
    b": no name",
)


class RawRequest(NamedTuple):
    pieces: list[bytes]
    """What is sent, one after another."""
    is_good: bool = True
    """Whether it must be answered by 200."""
    vanishes: bool = False
    """Whether the client resets the connection instead of waiting for the answer."""


HEALTH = RawRequest([b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n"])


def raw_request(rng: random.Random) -> RawRequest:
    """One good request, or several damaged ones."""
    good = rng.random() < 0.2
    data = b"".join(request(rng, good) for _ in range(1 if good else rng.choice((1, 1, 1, 2, 5))))
    if not good and rng.random() < 0.6:
        data = damage(data, rng)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 5))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    return RawRequest(pieces, good, not good and rng.random() < 0.1)


def request(rng: random.Random, good: bool) -> bytes:
    picture = rng.choice(sorted((seeds() / "images").iterdir())).read_bytes()
    text = {"text": "the cat sat", "top_k": 2}
    kind = rng.randrange(3)
    if kind == 0:
        path, body, content = "/predict", picture, b"image/png"
    elif kind == 1:
        form = b'--b\r\ncontent-disposition: form-data; name="files"; filename="a.png"\r\n\r\n%b\r\n' % picture
        path, body, content = "/predict", form * rng.choice((1, 3)) + b"--b--\r\n", b"multipart/form-data; boundary=b"
    else:
        path, content = "/models/text/classify", b"application/json"
        body = json.dumps(text if good else damage_json(text, rng)).encode()
    method = b"POST"
    if not good:
        path, method = rng.choice((path, *PATHS)), rng.choice((b"POST", b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS"))
        body = damage(body, rng) if rng.random() < 0.5 else body
    head = [method + f" {path} HTTP/1.1".encode(), b"host: localhost", b"content-type: " + content]
    if rng.random() < 0.5:
        head.append(b"content-length: %d" % len(body))
    else:
        head.append(b"transfer-encoding: chunked")
        body = chunked(body, rng, good)
    extra = [] if good else rng.sample(HEADERS, rng.choice((0, 1, 1, 2)))
    return b"\r\n".join([*head, *extra, b"connection: close", b"", b""]) + body


def chunked(body: bytes, rng: random.Random, good: bool) -> bytes:
    size = rng.choice((1, 7, 1000, 2**16))
    ends = (b"\r\n",) if good else (b"\r\n", b"\r\n", b"\n", b";" + b"e" * 1000 + b"\r\n", b"\r\n\r\n")
    pieces = [body[place : place + size] for place in range(0, len(body), size)]
    trailer = b"" if good else rng.choice((b"", b"", b"host: evil\r\n", b"x: y\r\n" * 2000))
    return (
        b"".join(b"%x%b%b\r\n" % (len(piece), rng.choice(ends), piece) for piece in pieces)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


def exchange(port: int, sent: RawRequest) -> bytes:
    """What the server answers."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), SLOW) as connection:
        try:
            for piece in sent.pieces:
                connection.sendall(piece)
            if sent.vanishes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            connection.settimeout(SLOW if sent.is_good else QUIET)
            while piece := connection.recv(2**16):
                received += piece
        except OSError:  # refused while it was sent, or no answer in time
            pass
    return received


def judge(sent: RawRequest, received: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
    if sent.is_good and found != [200]:
        return f"a good request is answered by {found}: {received[-200:]!r}"
    if unknown := set(found) - STATUSES:
        return f"status {unknown}: {received[-200:]!r}"
    if received.count(b"x-content-type-options: nosniff") != len([status for status in found if status != 100]):
        return f"an answer without nosniff: {received[:200]!r}"
    return ""


def http_requests(root: Path, seed: int, seconds: float) -> Iterator[tuple[str, Outcome, str]]:
    """Name, outcome and fault of each case."""
    errors = root / "server.txt"
    command = [sys.executable, "-m", "allmlp", "serve", str(seeds() / "image"), str(seeds() / "text"), "--port", "0"]
    with (
        errors.open("wb") as target,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=target, text=True) as process,
    ):
        assert process.stdout
        match = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        if match is None:
            process.wait(60)
            yield "start", Outcome(1, "", "", 0.0, 0, False), f"the server does not start: {errors.read_text()}"
            return
        port, base, end = int(match[1]), resident(process.pid), time.monotonic() + seconds
        for number in count():
            start, sent = time.monotonic(), raw_request(random.Random(f"http {seed} {number}"))
            fault = judge(sent, exchange(port, sent)) or judge(HEALTH, exchange(port, HEALTH))
            grown = max(resident(process.pid) - base, 0)
            fault = fault or (f"{grown / 2**20:,.0f} MiB" if grown > MEMORY else "")
            yield f"case {number}", Outcome(0, "", "", time.monotonic() - start, grown, False), fault
            if time.monotonic() > end:
                break
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    said = errors.read_text(encoding="utf8", errors="replace")
    yield "end", Outcome(code, "", said, 0.0, 0, False), f"exit status {code}: {said[-300:]}" if code or said else ""


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # it has ended
        return 0
