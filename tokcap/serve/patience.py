"""How long a client may take over its request: one that sends a byte now and then would hold a connection for ever.

| of a request | how long |
|---|---|
| head | `client_timeout_s` from the connection, or from its first byte on one that was used before; then it is closed |
| body | `client_timeout_s` of waiting in all, and a second more for every KiB that came; then it is answered 408 |
| rest of a body that is answered already | as the head, and a second more for every KiB that came |

Only the time counts in which the proxy waits for the client: an engine that reads slowly is not its fault. Clients that
send all of a body before they read would lose an early answer with the connection. Between two requests a connection
may be idle for as long as the server keeps it. Head and rest are timed by the protocol of `tokcap serve`, the body by
its application, also under another server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..asgi.interface import Message, Receive, Send

__all__ = ("PatientReceive", "SlowClientError", "StartedSend", "patient_protocol")

_LEAST_RATE = 1024.0
"""Bytes of a body in a second."""


class SlowClientError(Exception):
    """The client takes too long to send its body."""


class PatientReceive:
    """`receive` of a request, which raises `SlowClientError` when the patience is over."""

    def __init__(self, receive: Receive, patience_s: float) -> None:
        self._receive = receive
        self._left_s = patience_s
        self._body_is_whole = False

    async def __call__(self) -> Message:
        """The next message; once the body is whole, for as long as it takes."""
        if self._body_is_whole:
            return await self._receive()
        since = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._left_s)):
                message = await self._receive()
        except TimeoutError as error:
            raise SlowClientError("the body of the request comes too slowly") from error
        self._left_s += len(message.get("body") or b"") / _LEAST_RATE - (time.monotonic() - since)
        self._body_is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message


class StartedSend:
    """`send` of a request, which knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        self.started = True
        await self._send(message)


class _Patient(asyncio.Protocol):
    """In front of a protocol of uvicorn: times the heads of requests, and what is left of a body that was answered."""

    patience_s: float
    cycle: Any
    """Of uvicorn: the request that is being answered, or was the last one; None before the first."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = transport
        self._deadline: asyncio.TimerHandle | None = None
        self._await_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._no_deadline()
        elif before is None:
            self._await_head()
        elif before.response_complete:
            self._await_head(len(data) / _LEAST_RATE if before.more_body else 0.0)

    def connection_lost(self, error: Exception | None) -> None:
        self._no_deadline()
        super().connection_lost(error)

    def _await_head(self, more_s: float = 0.0) -> None:
        """Wait for the next head from now on, or `more_s` longer than before, at most `patience_s` from now."""
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.call_later(self.patience_s, self._too_late, self.cycle)
        elif more_s:
            due = min(self._deadline.when() + more_s, loop.time() + self.patience_s)
            self._deadline.cancel()
            self._deadline = loop.call_at(due, self._too_late, self.cycle)

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self, cycle: Any) -> None:
        self._deadline = None
        if self.cycle is cycle:
            self._transport.close()


def patient_protocol(patience_s: float | None, base: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn. patience_s: for the head of a request; None: for ever. base: of uvicorn."""
    if patience_s is None:
        return base
    return type("PatientProtocol", (_Patient, base), {"patience_s": patience_s})
