"""The way of an answer from the application to the client: nothing of it that ends it goes out before its record."""

from __future__ import annotations

import asyncio
from typing import Any

from .call import Call
from .interface import Message
from .outlet import Outlet
from .streamed import StreamedAnswer
from .view import View
from .whole import WholeAnswer

__all__ = ("CapturedAnswer",)


class CapturedAnswer:
    """Takes the messages of the application in place of the server's `send`.

    One at a time: applications may send from several tasks, and what one of them sends must not overtake the record
    that another one waits for.
    """

    def __init__(self, call: Call, outlet: Outlet, view: View, *, choices: int) -> None:
        self._call = call
        self._outlet = outlet
        self._view = view
        self._choices = choices
        self._kind: WholeAnswer | StreamedAnswer | OpaqueAnswer | None = None
        self._turn = asyncio.Lock()

    @property
    def seen(self) -> Any:
        """The answer as the client sees it, decoded; what was joined of a stream. None if it can't be read."""
        return None if self._kind is None else self._kind.seen

    @property
    def error(self) -> Any:
        """The error event of a stream, if there was one."""
        return None if self._kind is None else self._kind.error

    async def send(self, message: Message) -> None:
        """The next message of the application."""
        async with self._turn:
            kind = message["type"]
            if kind == "http.response.start" and self._kind is None:
                self._outlet.begin(message)
                self._kind = self._kind_of()
                await self._kind.begin()
            elif kind != "http.response.body" or self._kind is None:
                await self._outlet.other(message)
            elif not self._outlet.ended:
                data, more = bytes(message.get("body") or b""), bool(message.get("more_body", False))
                await self._kind.body(data, more=more)

    async def finish(self, *, failed: bool) -> None:
        """The application has returned or raised (`failed`): what it left unsaid is judged as it is."""
        async with self._turn:
            if self._kind is not None and not self._outlet.ended:
                await self._kind.break_off(silent=failed and not self._outlet.started)

    async def abandon(self) -> None:
        """The application was cancelled: what was seen is recorded, and nothing is sent any more."""
        if self._kind is not None and not self._outlet.ended:
            await self._kind.abandon()

    def _kind_of(self) -> WholeAnswer | StreamedAnswer | OpaqueAnswer:
        outlet = self._outlet
        kind = outlet.header(b"content-type").partition(b";")[0].strip().lower()
        if 200 <= outlet.status < 300 and outlet.coding.known and kind == b"text/event-stream":
            return StreamedAnswer(self._call, outlet, self._view, self._choices)
        if outlet.status >= 300 or not kind or kind.endswith((b"/json", b"+json")):
            return WholeAnswer(self._call, outlet, self._view)
        return OpaqueAnswer(self._call, outlet)


class OpaqueAnswer:
    """What is neither JSON nor a stream of events that can be read: it passes as it comes, and the call is lost."""

    seen: Any = None
    error: Any = None

    def __init__(self, call: Call, outlet: Outlet) -> None:
        self._call = call
        self._outlet = outlet

    async def begin(self) -> None:
        """The beginning goes out at once."""
        await self._outlet.start()

    async def body(self, data: bytes, *, more: bool) -> None:
        """The next bytes."""
        if not more:
            await self._settle()
        await self._outlet.body(data, more=more, content=True)

    async def break_off(self, *, silent: bool) -> None:
        """The end never came."""
        await self._settle()

    async def abandon(self) -> None:
        """The application was cancelled, which settles the call by itself."""

    async def _settle(self) -> None:
        await self._call.opaque("the answer is neither JSON nor a stream of events that can be read")
