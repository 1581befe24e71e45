"""The engine as an ASGI application: requests go on to it and answers come back, as they come and byte for byte.

Nothing is buffered beyond what one read brings: a client that sends or reads slowly slows the engine down, and the
other way round. What fails:

| what | the client gets | the captured call |
|---|---|---|
| the engine can't be reached | 502 | `no_generation`: nothing was sent |
| it fails later, before its answer | 502 | is left to the middleware: tokens may have been sampled |
| it breaks off its answer | its connection is broken off, too | likewise |
| the client leaves | - | likewise; the engine's connection is closed at once |

A request is never sent twice. Redirects are passed on; interim answers (1xx) and trailers are not, nor is the `?` of an
empty query, which ASGI doesn't tell from none.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from urllib.parse import quote

import msgspec

from ..asgi.interface import Headers, Message, Receive, Scope, Send
from ..asgi.refusals import error_body
from ..capture import current_capture_context, settle
from ..errors import UpstreamError
from .connection import Exchange
from .headers import body_framing, client_headers, upstream_headers, wants_websocket
from .upstream import Upstream

__all__ = ("ProxiedApp", "send_error")

_NO_WEBSOCKET = "tokcap serve passes no websockets on"


class ProxiedApp:
    """An ASGI application that answers with what the engine answers."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `UpstreamError` if the engine breaks off its answer, so that the server does the same."""
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a scope of type {scope['type']!r} can't be passed on")
        path = _raw_path(scope)
        if wants_websocket(scope["headers"]):
            await send_error(send, 501, _NO_WEBSOCKET, path)
        elif scope["method"] == "CONNECT" or not (path.startswith(b"/") or path == b"*"):
            await send_error(send, 501, f"tokcap serve is no forward proxy: {scope['method']} of a path only", path)
        else:
            await self._pass_on(scope, path, receive, send)

    async def _pass_on(self, scope: Scope, path: bytes, receive: Receive, send: Send) -> None:
        first = await receive()
        if first["type"] == "http.disconnect":
            await _not_sent("the client left")
            return
        address = self._upstream.address
        target = address.target(path, scope.get("query_string") or b"")
        headers = [*upstream_headers(scope, address), *_framing(scope["headers"], first)]
        try:
            exchange = await self._upstream.begin(scope["method"], target, headers)
        except UpstreamError as error:
            if not error.sent:
                await _not_sent(str(error))
            await send_error(send, 502, str(error), path)
            return
        client = _Client(exchange)
        sending = asyncio.create_task(client.pass_on(first, receive))
        answer = _Answer(send)
        try:
            status, headers = await exchange.head()
            await answer.start(status, client_headers(status, headers, address))
            async with aclosing(exchange.pieces()) as pieces:
                async for piece in pieces:
                    await answer.body(piece)
            # Before the last message, after which a disconnect is none.
            self._upstream.take_back(exchange)
            await answer.end()
        except UpstreamError as error:
            if client.error is not None:
                raise client.error from error
            if client.gone:
                return
            if answer.started:
                raise
            await send_error(send, 502, str(error), path)
        finally:
            self._upstream.take_back(exchange)
            sending.cancel()
            await asyncio.wait((sending,))


class _Client:
    """Passes the body on that the client sends, then listens for it to leave."""

    def __init__(self, exchange: Exchange) -> None:
        self.gone = False
        self.error: Exception | None = None
        """What `receive` raised."""
        self._exchange = exchange

    async def pass_on(self, first: Message, receive: Receive) -> None:
        """Until it is cancelled, or the client is gone: then the exchange is broken off."""
        try:
            await self._pass_on(first, receive)
        except Exception as error:  # of a middleware
            self.error = error
        self._exchange.abort()

    async def _pass_on(self, message: Message, receive: Receive) -> None:
        # What can't be sent is read all the same: the engine may have answered without reading on, which whoever reads
        # the answer finds out, and only who goes on reading notices that the client leaves.
        sending = True
        while message["type"] != "http.disconnect":
            try:
                if sending:
                    await self._exchange.send_body(message.get("body") or b"")
                    if not message.get("more_body", False):
                        sending = False
                        await self._exchange.send_end()
            except UpstreamError:
                sending = False
            message = await receive()
        self.gone = True


class _Answer:
    """What was sent of an answer."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_error(send: Send, status: int, message: str, path: bytes = b"", headers: Headers | None = None) -> None:
    """A whole answer that is an error, in the shape that clients of the route expect."""
    body = msgspec.json.encode(error_body("messages" if path.endswith(b"/messages") else "", status, message))
    found = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})


def _framing(headers: Headers, first: Message) -> Headers:
    """The field that frames the body of a request; by what came of the body if the request has none."""
    found = body_framing(headers)
    if found:
        return found
    if first.get("more_body", False):
        return [(b"transfer-encoding", b"chunked")]
    body = first.get("body") or b""
    return [(b"content-length", str(len(body)).encode())] if body else []


async def _not_sent(why: str) -> None:
    if current_capture_context() is not None:
        await settle("no_generation", f"nothing was sent to the engine: {why}")


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008, "reason": _NO_WEBSOCKET})
        return
    body = msgspec.json.encode(error_body("", 501, _NO_WEBSOCKET))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": 501, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def _raw_path(scope: Scope) -> bytes:
    """As it was sent, if the server tells."""
    raw = scope.get("raw_path")
    return bytes(raw) if raw else quote(scope["path"], safe="/%:@!$&'()*+,;=~", errors="surrogateescape").encode()
