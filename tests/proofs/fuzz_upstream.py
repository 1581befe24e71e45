"""Target: the bytes of an engine as the proxy reads them, and what of them goes on to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import h11

from tokcap.errors import UpstreamError
from tokcap.serve.address import UpstreamAddress
from tokcap.serve.connection import Connection, Exchange
from tokcap.serve.headers import client_headers
from tokcap.serve.proxied import ProxiedApp
from tokcap.serve.upstream import Upstream, detect

from .fuzz_input import Choices, Target, require

__all__ = ("TARGETS", "answer_of")

_ADDRESS = UpstreamAddress("http", "engine", 80, b"/base")
_PATIENCE_S = 60.0

_PARTS = (
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 404 \r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n"),
    *(b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 999 x\r\n", b"HTTP/1.1 101 Up\r\n", b"content-length: 5\r\n", b"\r\n"),
    *(b"content-length: 5, 5\r\n", b"content-length: -1\r\n", b"content-length: 99999999999999999999999\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n"),
    *(b"ffffffffffffffff\r\n", b"5;ext=1\r\nhello\r\n", b"0\r\ntrailer: x\r\n\r\n", b"hello", b"connection: close\r\n"),
    *(b"location: http://engine/base/x\r\n", b"location: //[::1/\r\n", b"location: /base\r\n", b"x: \xff\xfe\r\n"),
    *(b"content-type: application/json\r\n", b'{"version": "1"}', b"a" * 300, b" folded\r\n", b"x:\r\n", b"\n", b"\r"),
    *(
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"connection: x-a, keep-alive\r\nx-a: 1\r\n",
        b"upgrade: h2c\r\n",
    ),
)


def _text(choices: Choices) -> bytes:
    if choices.byte() % 8 == 0:
        return choices.rest()
    parts = [choices.one_of(_PARTS) for _ in range(1 + choices.byte() % 12)]
    text = b"".join(parts)
    for _ in range(choices.byte() % 3):
        at = choices.number(len(text) + 1)
        text = text[:at] + choices.some(6) + text[at + choices.byte() % 6 :]
    return text


class _Wire(asyncio.Transport):
    """The other end of a connection: an engine that has said everything already."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self.pieces = list(pieces)
        self.sent = bytearray()
        self.aborted = False
        self.connection = Connection()
        self.connection.connection_made(self)
        self._paused = False
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self.aborted or self._paused:
            return
        if self.pieces:
            piece = self.pieces.pop(0)
            if piece:
                self.connection.data_received(piece)
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self.connection.eof_received()
            self.connection.connection_lost(None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        asyncio.get_running_loop().call_soon(self._next)

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)


class _Engine(Upstream):
    """Every connection to it says the same."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(_ADDRESS, timeout_s=_PATIENCE_S)
        self._pieces = pieces
        self.wires: list[_Wire] = []

    async def _connect(self, within_s: float) -> Connection:
        self.wires.append(_Wire(self._pieces))
        return self.wires[-1].connection


async def answer_of(pieces: Sequence[bytes]) -> tuple[object, ...]:
    """Status, headers, body and end of one answer."""
    wire = _Wire(pieces)
    exchange = Exchange(wire.connection, _PATIENCE_S)
    found: list[object] = []
    body = b""
    try:
        await exchange.send_head("GET", b"/x", [(b"host", b"engine")])
        await exchange.send_end()
        status, headers = await exchange.head()
        found = [status, headers]
        async for piece in exchange.pieces():
            body += piece
        ended = "whole"
    except UpstreamError as error:
        require(error.sent, "nothing was sent, it says")
        ended = "broken off"
    require(exchange.complete == (ended == "whole"), "an answer that ends and does not")
    kept = exchange.finish()
    require(kept is None or (ended == "whole" and not kept.has_unread_bytes), "a connection is kept that is not clean")
    return *found, body, ended


async def _proxied(pieces: Sequence[bytes]) -> tuple[list[dict[str, Any]], bool]:
    """What the proxy sends to its server, and whether it breaks off."""
    engine = _Engine(pieces)
    sent: list[dict[str, Any]] = []
    asked = [{"type": "http.request", "body": b"", "more_body": False}]
    over = asyncio.Event()

    async def receive() -> Any:
        if asked:
            return asked.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": [(b"host", b"p")]}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "scheme": "http"}
    try:
        await ProxiedApp(engine)(scope, receive, send)
    except UpstreamError:
        return sent, True
    finally:
        over.set()
        engine.close()
    return sent, False


async def _checked(choices: Choices) -> None:
    text = _text(choices)
    pieces = choices.pieces(text)
    whole, cut = await answer_of([text]), await answer_of(pieces)
    # What came in one read and is wrong at its end is told at once, the rest of the body with it.
    require(whole == cut, f"another answer, cut otherwise: {whole!r} and {cut!r}")
    sent, broken = await _proxied(pieces)
    if len(whole) == 2:  # there was no head
        require(not broken and sent[0]["status"] == 502, "an engine that gave no answer is a 502")
    else:
        require(sent[0]["status"] == whole[0], "another status than the engine's")
        require(broken == (whole[-1] == "broken off"), "the answer ends otherwise than the engine's")
        require(b"".join(part["body"] for part in sent[1:]) == whole[-2], "another body than the engine's")
        require(sent[0]["headers"] == client_headers(whole[0], whole[1], _ADDRESS), "other headers")  # type: ignore[arg-type]
    _is_sendable(sent)
    try:
        engine, version = await detect(_Engine(pieces))
    except UpstreamError:
        return
    require(type(engine) is str and type(version) is str, "name and version are text")


def _is_sendable(sent: Sequence[dict[str, Any]]) -> None:
    """A strict server can send it: nothing in a header ends it early."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET /x HTTP/1.1\r\nhost: p\r\n\r\n")
    server.next_event()
    server.next_event()
    headers = [(name, value) for name, value in sent[0]["headers"] if name != b"content-length"]
    server.send(h11.Response(status_code=sent[0]["status"], headers=headers))


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _engine(data: bytes) -> None:
    _runner().run(asyncio.wait_for(_checked(Choices(data)), _PATIENCE_S))


def _program(*parts: int, ways: Sequence[int] = (0, 2, 9, 1, 3, 1, 1)) -> bytes:
    return bytes([1, len(parts) - 1, *parts, *ways])


def _seeds() -> list[bytes]:
    return [
        _program(0, 7, 8, 19),
        _program(0, 12, 8, 14, 14, 15),
        _program(2, 2, 0, 12, 8, 17, 18),
        _program(0, 25, 7, 20, 8, 26),
        _program(1, 8, 19, 19),
        _program(0, 12, 8, 16, 27),
        b"\0HTTP/1.1 200 OK\r\n\r\nhello",
    ]


TARGETS = (Target("engine", "bytes of an engine behind the proxy", _engine, _seeds),)
