"""Requests and answers that two readers may read in two ways, through the proxy.

A client's bytes go straight into the protocol of uvicorn, the engine is a socket that answers bytes. What passes has to
be so plain that every reader finds the same in it: it is read here by a parser that refuses all that is not.

What reaches the engine: once each request that the server in front handed to the proxy, in order, and nothing else.
What reaches the client: one answer for each of its requests, and none that an answer carried in itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tokcap.asgi.interface import Receive, Scope, Send
from tokcap.serve.app import ServedApp
from tokcap.serve.options import ServeOptions

__all__ = ("Engine", "Line", "NotStrictError", "Strict", "answered", "echo", "exchanged", "strict_answers", "through")

_REQUEST_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+ [!-~]+ HTTP/1\.1")
_STATUS_LINE = re.compile(rb"HTTP/1\.1 [1-5][0-9][0-9] [\t -~\x80-\xff]*")
_VALUE = rb"[\x01-\x08\x0e-\x1f!-~\x80-\xff]"
_FIELD = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t ]*((?:" + _VALUE + rb"(?:[\t ]*" + _VALUE + rb")*)?)[\t ]*", re.DOTALL
)
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,8}")
_WAIT_S = 0.02
"""For a request that never gets whole: what comes in this time is all that is looked at."""
_PATIENCE_S = 60.0


class NotStrictError(Exception):
    """Bytes that some reader might read otherwise."""


@dataclass
class Strict:
    """One message, as every reader has to read it."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]


class _Reader:
    """Reads messages from bytes; raises `NotStrictError`, and `EOFError` for the beginning of one."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise EOFError
        found = self.data[self.at : end]
        if not found.endswith(b"\r") or b"\r" in found[:-1] or b"\0" in found:
            raise NotStrictError(f"a line is {found[:100]!r}")
        self.at = end + 1
        return found[:-1]

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise EOFError
        found = self.data[self.at : self.at + count]
        self.at += count
        return found

    def head(self, first: re.Pattern[bytes]) -> Strict:
        line = self.line()
        if not first.fullmatch(line):
            raise NotStrictError(f"the first line is {line[:100]!r}")
        headers = []
        while text := self.line():
            match = _FIELD.fullmatch(text)
            if match is None:
                raise NotStrictError(f"a header is {text[:100]!r}")
            headers.append((match[1].lower(), match[2]))
        return Strict(line, headers)

    def body(self, message: Strict, *, to_the_end: bool = False) -> None:
        lengths = [value for name, value in message.headers if name == b"content-length"]
        codings = [value for name, value in message.headers if name == b"transfer-encoding"]
        if len(lengths) + len(codings) > 1:
            raise NotStrictError(f"the end is told by {lengths} and {codings}")
        if codings:
            if codings != [b"chunked"]:
                raise NotStrictError(f"the coding is {codings}")
            while size := self._chunk_size():
                message.body += self.take(size)
                if self.take(2) != b"\r\n":
                    raise NotStrictError("a chunk is longer than it says")
            if self.line():
                raise NotStrictError("there are trailers")
        elif lengths:
            if not lengths[0].isdigit():
                raise NotStrictError(f"the length is {lengths[0]!r}")
            message.body = self.take(int(lengths[0]))
        elif to_the_end:
            message.body = self.take(len(self.data) - self.at)

    def _chunk_size(self) -> int:
        line = self.line()
        if not _CHUNK.fullmatch(line):
            raise NotStrictError(f"the size of a chunk is {line[:100]!r}")
        return int(line, 16)


def strict_answers(data: bytes, asked: list[bytes], *, closed: bool) -> list[Strict]:
    """The answers to requests of these methods. Raises `NotStrictError`, also for an answer that nobody asked for."""
    reader, found = _Reader(data), list[Strict]()
    while reader.at < len(data):
        if len(found) == len(asked):
            raise NotStrictError(f"an answer that nobody asked for: {data[reader.at : reader.at + 100]!r}")
        try:
            answer = reader.head(_STATUS_LINE)
            status = int(answer.line.split(b" ")[1])
            if status < 200:
                continue
            if asked[len(found)] != b"HEAD" and status not in (204, 304):
                reader.body(answer, to_the_end=closed)
        except EOFError:
            if not closed:
                raise NotStrictError("an answer stops, and the connection stays open") from None
            break
        found.append(answer)
    return found


# ---- the engine


Answering = Callable[[Strict], bytes]


@dataclass
class Engine:
    """A server that reads strictly, and answers what a function says; the connection is closed if it says so."""

    answering: Answering
    seen: list[Strict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    connections: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        data = b""
        try:
            while more := await reader.read(65536):
                data += more
                data = await self._answered(data, writer)
                if writer.is_closing():
                    break
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answered(self, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        while data:
            parts = _Reader(data)
            try:
                request = parts.head(_REQUEST_LINE)
                parts.body(request)
            except EOFError:
                return data
            except NotStrictError as error:
                self.problems.append(str(error))
                writer.close()
                return b""
            data = data[parts.at :]
            self.seen.append(request)
            writer.write(self.answering(request))
            if request.target.startswith(b"/last"):
                writer.close()
            await writer.drain()
        return b""

    def forget(self) -> None:
        self.seen.clear()
        self.problems.clear()

    def cut(self) -> None:
        """Close what is open."""
        for writer in list(self._writers):
            writer.close()


def plain(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def echo(request: Strict) -> bytes:
    return plain(b"for " + request.target)


# ---- the client


class _Transport(asyncio.Transport):
    """What a protocol writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.9", 9), "sockname": ("127.0.0.1", 80)})
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


@dataclass
class Line:
    """The proxy with an engine behind it, and what the server in front handed on."""

    engine: Engine
    config: uvicorn.Config
    handed_on: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Method and target of each."""

    async def exchange(self, *pieces: bytes, within_s: float = _WAIT_S) -> tuple[bytes, bool]:
        """Send these pieces on one connection, each when the one before is answered, then hang up.

        What came, and whether more might have come: not if all was answered and the connection was still open.
        """
        state = ServerState()
        transport = _Transport()
        made: Any = self.config.http_protocol_class
        protocol = made(config=self.config, server_state=state, app_state={})
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.closed and not state.tasks:
                try:
                    protocol.data_received(piece)
                except Exception:  # as an event loop does: uvicorn can't say 400 in the middle of an answer
                    transport.close()
                await _quiet(state, within_s)
        closed = transport.closed or bool(state.tasks)
        protocol.connection_lost(None)
        await _quiet(state, _PATIENCE_S)
        return bytes(transport.written), closed


async def _quiet(state: ServerState, at_most_s: float) -> None:
    loop = asyncio.get_running_loop()
    limit = loop.time() + at_most_s
    await asyncio.sleep(0)
    while state.tasks and loop.time() < limit:
        await asyncio.wait(set(state.tasks), timeout=limit - loop.time())
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def through(parser: str, answering: Answering = echo, **options: Any) -> AsyncIterator[Line]:
    """A proxy as `tokcap serve` has it, behind one of the parsers of uvicorn. `TOKCAP_DIR` says where it captures."""
    engine = Engine(answering)
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0, limit=2**20)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    app = ServedApp(ServeOptions(upstream=url, **{"engine": "vllm", "engine_version": "0.32.0", **options}))

    async def around(scope: Scope, receive: Receive, send: Send) -> None:
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        line.handed_on.append((scope["method"].encode(), target))
        await app(scope, receive, send)

    config = uvicorn.Config(
        around, http=parser, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    line = Line(engine, config)
    try:
        yield line
    finally:
        engine.cut()
        app._upstream.close()
        server.close()
        await server.wait_closed()


async def exchanged(line: Line, raw: bytes) -> list[str]:
    """Send these bytes, then an innocent request on another connection; what is wrong with what passed."""
    line.engine.forget()
    line.handed_on.clear()
    written, _ = await line.exchange(raw)
    handed_on = [(method, _as_passed_on(target)) for method, target in line.handed_on]
    problems = [f"the engine gets more than one reading: {problem}" for problem in line.engine.problems]
    got = [(each.line.split(b" ")[0], each.target) for each in line.engine.seen]
    rest = iter(handed_on)
    if not all(each in rest for each in got):
        problems.append(f"the engine gets {got}, of {handed_on}")
    try:
        strict_answers(written, [method for method, _ in handed_on] + [b"GET"], closed=True)
    except NotStrictError as error:
        problems.append(f"the client gets more than one reading: {error}")
    line.engine.forget()
    written, _ = await line.exchange(b"GET /innocent HTTP/1.1\r\nhost: x\r\n\r\n", within_s=_PATIENCE_S)
    if not written.endswith(b"\r\n\r\nfor /innocent") or len(line.engine.seen) != 1:
        problems.append(f"an innocent request gets {written[-200:]!r}, the engine {line.engine.seen}")
    return problems


def _as_passed_on(target: bytes) -> bytes:
    """The target in the form for origin servers, without the prefix of a capture URL."""
    match = re.fullmatch(rb"(?i:https?)://[^/]*(/.*)?", target, re.DOTALL)
    target = target if match is None else match[1] or b"/"
    match = re.fullmatch(rb"/ng-rollout/[^/]*(/training-token-capture(?=/|$))?(/.*)?", target, re.DOTALL)
    return target if match is None else match[2] or b"/"


async def answered(line: Line, path: bytes) -> list[str]:
    """Two requests on one connection, the first of them answered with what is to be one answer; what is wrong."""
    line.engine.forget()
    line.handed_on.clear()
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    first = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body)
    written, closed = await line.exchange(first, b"GET /innocent HTTP/1.1\r\nhost: x\r\n\r\n")
    problems = [f"the engine gets more than one reading: {problem}" for problem in line.engine.problems]
    try:
        found = strict_answers(written, [b"POST", b"GET"][: len(line.handed_on)], closed=closed)
    except NotStrictError as error:
        return [*problems, f"the client gets more than one reading: {error}"]
    if len(found) == 2 and found[1].body != b"for /innocent":
        problems.append(f"an innocent request is answered {found[1].line!r} {found[1].body[:100]!r}")
    if found and b"training-token-capture" in path and (b"x-tokcap-call-id", b"forged") in found[0].headers:
        problems.append("the call id of an answer is forged")
    return problems
