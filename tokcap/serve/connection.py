"""One HTTP/1.1 connection to the engine, and one request with its answer on it.

Not taken from a client library, because three things have to be exact: whether anything of a request was sent, since
only then the engine can have sampled; an answer that comes while the request is still being sent; and the cost of a
thousand open connections.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import h11

from ..asgi.interface import Headers
from ..errors import UpstreamError
from .address import UpstreamAddress

__all__ = ("Connection", "Exchange")

_READ_AHEAD = 64 * 1024
"""Bytes that are read before somebody asks for them; then the engine has to wait."""
_LARGEST_HEAD = 128 * 1024
"""Bytes of the head of an answer."""
_KEEP_ALIVE_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Of TCP, in seconds: an answer may take hours, but a machine that is gone is noticed within two minutes."""


class Connection(asyncio.Protocol):
    """The bytes of one connection, with back-pressure in both directions. Belongs to one event loop."""

    def __init__(self) -> None:
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGEST_HEAD)
        self.idle_since = 0.0
        """When its last exchange ended, by `time.monotonic`."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._reading = True
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @classmethod
    async def open(cls, address: UpstreamAddress, tls: ssl.SSLContext | None, within_s: float) -> Connection:
        """Connect. Raises `UpstreamError`, with nothing sent."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                transport, connection = await loop.create_connection(cls, address.host, address.port, ssl=tls)
        except TimeoutError as error:
            raise UpstreamError(f"{address} did not accept a connection within {within_s:g} s") from error
        except OSError as error:
            raise UpstreamError(f"{address} can't be reached: {error.strerror or error}") from error
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE_PROBES:
                found.setsockopt(socket.IPPROTO_TCP, option, value)
        return connection

    # ---- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _READ_AHEAD and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._error = error
        self._writable.set()
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ---- for an exchange

    async def read(self) -> bytes:
        """What came since the last call; waits for something. Empty at the end. Raises `OSError`."""
        while not self._received:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = bytes(self._received)
        self._received.clear()
        if not self._reading and self._transport is not None and not self._ended:
            self._reading = True
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Hand over bytes, and wait while too many are on their way. Raises `OSError`."""
        if self._transport is None:
            raise ConnectionResetError("the connection was never made")
        self._transport.write(data)
        await self._writable.wait()
        if self._error is not None:
            raise self._error

    @property
    def closed(self) -> bool:
        """Whether it is over, from either side."""
        return self._transport is None or self._ended or self._transport.is_closing()

    def usable(self) -> bool:
        """Whether a request may be sent on it that was idle: asked of the kernel, too, since the loop may be late."""
        if self.closed or self._received:
            return False
        found = None if self._transport is None else self._transport.get_extra_info("socket")
        if found is None:
            return False
        readable = select.poll()
        readable.register(found.fileno(), select.POLLIN)
        return not readable.poll(0)

    def abort(self) -> None:
        """Close it at once; what was not sent is dropped. Repeating is a no-op."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_unread_bytes(self) -> bool:
        """Whether more came than belongs to the answer."""
        return bool(self._received or self.http.trailing_data[0])

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Exchange:
    """One request and its answer. The request is sent by one task while another reads the answer.

    What fails raises `UpstreamError`, whose `sent` says whether the engine may have got anything of the request.
    """

    def __init__(self, connection: Connection, timeout_s: float | None = None) -> None:
        """timeout_s: how long to wait for the next bytes of the answer; None: for ever."""
        self.sent = False
        """Whether anything of the request was handed to the kernel."""
        self.complete = False
        """Whether the answer was read to its end."""
        self._connection: Connection | None = connection
        self._timeout_s = timeout_s

    async def send_head(self, method: str, target: bytes, headers: Headers) -> None:
        """The request line and the headers, those that frame the body included."""
        with self._failing("the request can't be sent"):
            data = self._open().http.send(h11.Request(method=method, target=target, headers=headers))
            await self._write(data)

    async def send_body(self, data: bytes) -> None:
        """A part of the body; returns when the engine takes more."""
        if data:
            with self._failing("the body can't be sent"):
                await self._write(self._open().http.send(h11.Data(data=data)))

    async def send_end(self) -> None:
        """The body is whole."""
        with self._failing("the body can't be sent"):
            await self._write(self._open().http.send(h11.EndOfMessage()))

    async def head(self) -> tuple[int, Headers]:
        """Status and headers of the answer; interim answers (1xx) before it are passed over."""
        with self._failing("no answer"):
            while True:
                event = self._open().http.next_event()
                if event is h11.NEED_DATA:
                    await self._read()
                elif isinstance(event, h11.Response):
                    if event.status_code > 599:
                        raise h11.RemoteProtocolError(f"the status is {event.status_code}")
                    return event.status_code, list(event.headers)
                elif not isinstance(event, h11.InformationalResponse):
                    raise h11.RemoteProtocolError("the connection was closed without an answer")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes: what one read brought is one piece, without the framing of chunks."""
        with self._failing("the answer broke off"):
            while True:
                found, broken = self._parts()
                if found:
                    yield b"".join(found)
                if broken is not None:
                    raise broken
                if self.complete:
                    return
                await self._read()

    def _parts(self) -> tuple[list[bytes], h11.ProtocolError | None]:
        """What of the body is there already, and what is wrong behind it."""
        found: list[bytes] = []
        try:
            while True:
                event = self._open().http.next_event()
                if isinstance(event, h11.Data):
                    found.append(bytes(event.data))
                elif event is h11.NEED_DATA:
                    return found, None
                elif isinstance(event, h11.EndOfMessage):
                    self.complete = True
                    return found, None
                else:
                    raise h11.RemoteProtocolError("the connection was closed in the answer")
        except h11.ProtocolError as error:
            return found, error

    def finish(self) -> Connection | None:
        """Let go of the connection: returned if another request may be sent on it, else closed. Repeating is a no-op.

        It may if request and answer are whole, both sides keep it open, and nothing followed the answer.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return None
        http = connection.http
        if not self.complete or http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            connection.abort()
            return None
        if connection.closed or connection.has_unread_bytes:
            connection.abort()
            return None
        http.start_next_cycle()
        connection.idle_since = time.monotonic()
        return connection

    def abort(self) -> None:
        """Break off: the engine sees the connection closed, and whoever reads the answer an error."""
        if self._connection is not None:
            self._connection.abort()

    def _open(self) -> Connection:
        if self._connection is None:
            raise h11.LocalProtocolError("the exchange is over")
        return self._connection

    async def _write(self, data: bytes | None) -> None:
        if data:
            connection = self._open()
            if connection.closed:
                raise ConnectionResetError("the engine closed the connection")
            self.sent = True
            await connection.write(data)

    async def _read(self) -> None:
        connection = self._open()
        async with asyncio.timeout(self._timeout_s):
            data = await connection.read()
        connection.http.receive_data(data)

    @contextmanager
    def _failing(self, what: str) -> Iterator[Any]:
        try:
            yield
        except (OSError, h11.ProtocolError) as error:
            own = type(error) is TimeoutError and error.errno is None  # TCP has one of its own
            why = f"the engine sent nothing for {self._timeout_s:g} s" if own else str(error)
            raise UpstreamError(f"{what}: {why}", sent=self.sent) from error
