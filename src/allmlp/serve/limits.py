"""Requests refused before the application runs: from other sites, or with bodies that are too large or too slow.

A body is buffered completely, within its limits of size and time, before it is passed on. If the server is overloaded,
the request is rejected before its body is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_network
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from allmlp.serve.batching import CLIENT, ServiceUnavailable

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; only counted, never sent."""
DISCARD_BYTES = 2**16
"""The rest of a rejected body up to this size is read and discarded, so that the connection can be reused."""
LINGER_SECONDS = 1.0
"""Seconds to read a larger body before closing: a client that is still writing would otherwise miss the response."""


MAX_HEADERS, MAX_HEAD_BYTES = 100, 2**15
TOO_LARGE_HEAD = f"the head of the request is too large: at most {MAX_HEADERS} headers, {MAX_HEAD_BYTES:,} bytes in all"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class RequestLimits(NamedTuple):
    max_body: int = 16 * 2**20
    """Bytes of one body."""
    max_buffered: int = 256 * 2**20
    """Bytes of all buffered bodies."""
    idle_timeout: float = 10.0
    """Seconds without receiving a byte."""
    upload_timeout: float = 60.0
    """Seconds for the whole body."""


SECURE = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


class ClientDisconnected(Exception):
    pass


class LimitMiddleware:
    """ASGI middleware. `paths` are the known routes; `on_response` gets path, status and seconds of every request.

    With `hosts`, requests for other host names are refused: the page of another site could otherwise reach a server
    on localhost by a name that it resolves to 127.0.0.1 (DNS rebinding). Pages of `origins` may use the server, "*" for
    those of any site.
    """

    def __init__(
        self,
        app: Application,
        paths: set[str],
        rejection: Callable[[], ServiceUnavailable | None],
        draining: Callable[[], bool],
        on_response: Callable[[str, int, float], None],
        limits: RequestLimits = RequestLimits(),
        hosts: frozenset[str] | None = None,
        origins: Collection[str] = (),
    ) -> None:
        self.app, self.paths, self.limits, self.hosts, self.origins = app, paths, limits, hosts, origins
        self.rejection, self.draining, self.on_response = rejection, draining, on_response
        self.buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def track(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *SECURE]
                if self.draining():
                    # Otherwise the client's next request would find the connection closed.
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        CLIENT.set(client_of((scope.get("client") or ("",))[0]))
        try:
            refusal = self.refusal(scope)
            if refusal is not None:
                await send_error(refusal, receive, track, DISCARD_BYTES, close=True)
            elif scope["method"] == "HEAD":  # uvicorn drops the body
                await self.handle({**scope, "method": "GET"}, receive, track)
            else:
                await self.handle(scope, receive, track)
        except ClientDisconnected:
            pass
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.on_response(path, status, time.monotonic() - start)

    def refusal(self, scope: Scope) -> HTTPException | None:
        """The error for a request that is refused regardless of the application."""
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > MAX_HEAD_BYTES or len(scope["headers"]) > MAX_HEADERS:
            return HTTPException(431, TOO_LARGE_HEAD)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["http_version"] == "1.1" and [name for name, _ in scope["headers"]].count(b"host") != 1:
            return HTTPException(400, "the request must have one Host header")
        encoding = headers.get(b"transfer-encoding")
        if encoding is not None and (encoding.lower() != b"chunked" or scope["http_version"] != "1.1"):
            return HTTPException(501, "the only transfer-encoding that the server knows is chunked, of HTTP/1.1")
        host = headers.get(b"host", b"").decode("latin1")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return HTTPException(421, f"the server does not answer for {host[:100]!r}: see --allowed-host")
        origin = headers.get(b"origin", b"").decode("latin1")
        cross_site = headers.get(b"sec-fetch-site") == b"cross-site" or (origin and origin.partition("://")[2] != host)
        if scope["method"] == "POST" and cross_site and not {origin, "*"} & {*self.origins}:
            return HTTPException(403, "pages of other sites cannot use this server: see --allowed-origin")
        return None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        if not headers:
            await self.app(scope, receive, send)
            return
        length = int(headers.get(b"content-length", b"0"))  # validated by the HTTP parser
        body = bytearray()
        try:
            rejection = self.rejection() if scope["method"] == "POST" and scope["path"] in self.paths else None
            if rejection is not None:
                raise rejection
            await self.read(receive, body, length)
            await self.call(scope, bytes(body), receive, send)
        except HTTPException as error:
            self.buffered -= len(body)
            body.clear()
            # The rest of a chunked body may have any length.
            large = length > DISCARD_BYTES or b"transfer-encoding" in headers
            await send_error(error, receive, send, self.limits.max_body if large else DISCARD_BYTES, close=large)
        finally:
            self.buffered -= len(body)

    async def read(self, receive: Receive, body: bytearray, length: int) -> None:
        """Read the body chunk by chunk and count it in `buffered`."""
        too_large = HTTPException(413, f"the request is larger than {self.limits.max_body:,} bytes")
        if length > self.limits.max_body:
            raise too_large
        deadline = time.monotonic() + self.limits.upload_timeout
        more = True
        while more:
            try:
                async with asyncio.timeout(min(self.limits.idle_timeout, max(deadline - time.monotonic(), 0))):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the request was sent too slowly", {"connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            body += chunk
            self.buffered += len(chunk)
            if len(body) > self.limits.max_body:
                raise too_large
            if self.buffered > self.limits.max_buffered:
                raise ServiceUnavailable("too many request bodies in memory; try again in 1 s", 1)
            more = message.get("more_body", False)

    async def call(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Call the application with the whole body; cancel it if the client disconnects."""
        consumed = False

        async def receive_body() -> Message:
            nonlocal consumed
            if consumed:
                return await asyncio.shield(disconnect)
            consumed = True
            return {"type": "http.request", "body": body, "more_body": False}

        disconnect = asyncio.ensure_future(receive())
        task = asyncio.ensure_future(self.app(scope, receive_body, send))
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            task.result()
        finally:
            for future in (disconnect, task):
                future.cancel()
            await asyncio.gather(disconnect, task, return_exceptions=True)


def client_of(host: str) -> str:
    """The client of an address: for IPv6 its network, since a client has all addresses of one."""
    try:
        return str(ip_network((host, 64), strict=False)) if ":" in host else host[:64]
    except ValueError:  # a proxy may pass on anything
        return host[:64]


def host_name(host: str) -> str:
    """A Host header without its port."""
    return host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()


async def send_error(error: HTTPException, receive: Receive, send: Send, max_bytes: int, close: bool) -> None:
    """Send an error at once, then read up to `max_bytes` more before the connection may be closed."""
    content = json.dumps({"detail": error.detail}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **(error.headers or {})}
    if close:
        headers["connection"] = "close"
    await send(
        {
            "type": "http.response.start",
            "status": error.status_code,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": content, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while max_bytes > 0:
                message = await receive()
                max_bytes -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
