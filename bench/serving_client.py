"""The client of the measured server: raw HTTP/1.1 over connections that stay open, so that it adds little itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec

__all__ = ("Connection", "Reply", "connected", "read_chunks")


class Reply(msgspec.Struct):
    """One answer as the client saw it. Times are those of `time.perf_counter`."""

    status: int = 0
    begun: float = 0.0
    first: float = 0.0
    """When the first byte of the body came."""
    ended: float = 0.0
    body: bytes = b""
    """As it was sent, chunk sizes included; empty if it was not to be kept."""

    @property
    def whole_s(self) -> float:
        """From the request to the end of its answer."""
        return self.ended - self.begun

    @property
    def first_s(self) -> float:
        """From the request to the first byte of the body."""
        return self.first - self.begun


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._reply = Reply()
        self._head = b""
        self._left: int | None = None
        """Bytes that are missing of the body; None: it has chunks."""
        self._in_body = False
        self._last = b""
        self._kept: list[bytes] | None = None

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect to this machine."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def ask(
        self, path: str, body: bytes = b"", *, method: str = "POST", turn: int = 0, keep: bool = False
    ) -> Reply:
        """The answer to one request. Raises `RuntimeError` for any status but 200, and if the server hangs up."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"x-bench-turn: {turn}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        data = head.encode() + body
        if self._transport.is_closing():
            raise RuntimeError("the server closed the connection")
        self._head, self._in_body, self._last = b"", False, b""
        self._kept = [] if keep else None
        self._waiting = asyncio.get_running_loop().create_future()
        self._reply = Reply(begun=time.perf_counter())
        self._transport.write(data)
        reply = await self._waiting
        if reply.status != 200:
            raise RuntimeError(f"{path} was answered with status {reply.status}")
        return reply

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RuntimeError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._begin(head)
        if not data and self._left != 0:
            return
        if not self._reply.first:
            self._reply.first = now
        if self._kept is not None:
            self._kept.append(data)
        if self._left is None:
            # What ends the chunks can't stand within one: a chunk of events ends in a blank line.
            self._last = (self._last + data)[-5:]
            over = self._last == b"0\r\n\r\n"
        else:
            self._left -= len(data)
            over = self._left <= 0
        if over:
            self._end(now)

    def _begin(self, head: bytes) -> None:
        self._in_body = True
        lines = head.lower().split(b"\r\n")
        self._reply.status = int(lines[0].split(b" ")[1])
        lengths = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        self._left = lengths[0] if lengths else None

    def _end(self, now: float) -> None:
        self._reply.ended = now
        if self._kept is not None:
            self._reply.body = b"".join(self._kept)
        if self._waiting is not None:
            self._waiting.set_result(self._reply)


async def connected(port: int, number: int) -> list[Connection]:
    """So many connections."""
    return list(await asyncio.gather(*(Connection.open(port) for _ in range(number))))


def read_chunks(body: bytes) -> list[Any]:
    """The events of a streamed answer, decoded; `[DONE]` as text."""
    plain, position = b"", 0
    while position < len(body):
        size, _, _ = body[position:].partition(b"\r\n")
        start = position + len(size) + 2
        plain += body[start : start + int(size, 16)]
        position = start + int(size, 16) + 2
    events: Sequence[bytes] = [event.removeprefix(b"data: ") for event in plain.split(b"\n\n") if event]
    return [event.decode() if event == b"[DONE]" else msgspec.json.decode(event) for event in events]
