"""What a client may send, and how slowly: everything else is answered before the application sees it.

A body is read whole, within its limits of size and time, and only then handed on; who cannot be served now is told so
before the body is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from allmlp.serve.batching import Refused

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT_GONE = 499
"""Only counted, never sent."""
DISCARD = 2**16
"""Of a refused request so many bytes are read, so that its connection can go on."""
LINGER = 1.0
"""Seconds in which a larger one is read on: a connection closed under a client that still writes loses the answer."""


class Allowed(NamedTuple):
    body: int = 16 * 2**20
    """Bytes of one request."""
    held: int = 256 * 2**20
    """Bytes of all requests that are being read."""
    pause: float = 10.0
    """Seconds without a byte."""
    upload: float = 60.0
    """Seconds for a body."""


class Problem(Exception):
    """What is answered instead of a result."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}


class ClientGone(Exception):
    pass


def busy(refused: Refused) -> Problem:
    return Problem(503, str(refused), {"retry-after": str(refused.seconds)})


class Limits:
    """An ASGI application around another. `paths` are those it knows; `count` is told path, status and seconds."""

    def __init__(
        self,
        app: Application,
        paths: set[str],
        refusal: Callable[[], Refused | None],
        closing: Callable[[], bool],
        count: Callable[[str, int, float], None],
        allowed: Allowed = Allowed(),
    ) -> None:
        self.app, self.paths, self.refusal, self.closing, self.count = app, paths, refusal, closing, count
        self.allowed = allowed
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.closing():
                    # A client that sent its next request on this connection would find it closed.
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self.handle(scope, receive, answer)
        except ClientGone:
            pass
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.count(path, status, time.monotonic() - began)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        if not headers:
            await self.app(scope, receive, send)
            return
        length = int(headers.get(b"content-length", b"0"))  # HTTP's parser has made sure that it is a number
        body = bytearray()
        try:
            refused = self.refusal() if scope["method"] == "POST" and scope["path"] in self.paths else None
            if refused is not None:
                raise busy(refused)
            await self.read(receive, body, length)
            await self.call(scope, bytes(body), receive, send)
        except Problem as problem:
            self.held -= len(body)
            body.clear()
            await refuse(problem, receive, send, DISCARD if length <= DISCARD else self.allowed.body, length > DISCARD)
        finally:
            self.held -= len(body)

    async def read(self, receive: Receive, body: bytearray, length: int) -> None:
        """The body, piece by piece; `held` grows with it."""
        too_large = Problem(413, f"the request is larger than {self.allowed.body:,} bytes")
        if length > self.allowed.body:
            raise too_large
        end = time.monotonic() + self.allowed.upload
        more = True
        while more:
            try:
                async with asyncio.timeout(min(self.allowed.pause, max(end - time.monotonic(), 0))):
                    message = await receive()
            except TimeoutError:
                raise Problem(408, "the request was sent too slowly", {"connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            body += piece
            self.held += len(piece)
            if len(body) > self.allowed.body:
                raise too_large
            if self.held > self.allowed.held:
                raise busy(Refused("the server is reading as much as it can hold; try again in 1 s", 1))
            more = message.get("more_body", False)

    async def call(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """The application, with the body in one piece; given up when the client has gone."""
        handed = False

        async def whole() -> Message:
            nonlocal handed
            if handed:
                return await asyncio.shield(gone)
            handed = True
            return {"type": "http.request", "body": body, "more_body": False}

        gone = asyncio.ensure_future(receive())
        task = asyncio.ensure_future(self.app(scope, whole, send))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            task.result()
        finally:
            for part in (gone, task):
                part.cancel()
            await asyncio.gather(gone, task, return_exceptions=True)


async def refuse(problem: Problem, receive: Receive, send: Send, most: int, close: bool) -> None:
    """Send a problem at once, then read on a little before the connection may be closed."""
    content = json.dumps({"detail": problem.detail}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **problem.headers}
    if close:
        headers["connection"] = "close"
    await send(
        {
            "type": "http.response.start",
            "status": problem.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": content, "more_body": True})
    try:
        async with asyncio.timeout(LINGER):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
