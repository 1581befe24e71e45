"""The application answering one captured call: its messages on the way in and out, and every way in which it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from .answers import CapturedAnswer
from .call import Call
from .client import Client
from .interface import Application, Message
from .outlet import Outlet
from .refusals import RefusalError

__all__ = ("Exchange",)

_PATIENCE_S = 5.0
"""How long a request that was cancelled waits for a store that may hang. The write goes on in any case."""


class Exchange:
    """One call of the application. late: whether the intent is only written when it asks for the body."""

    def __init__(self, call: Call, client: Client, outlet: Outlet, answer: CapturedAnswer, *, late: bool) -> None:
        self._call = call
        self._client = client
        self._outlet = outlet
        self._answer = answer
        self._late = late
        self._refusal: RefusalError | None = None
        self.ending: asyncio.Task[None] | None = None
        """What goes on after a cancellation, until the call has its outcome."""

    async def run(self, app: Application, scope: dict[str, Any]) -> None:
        """Ask the application. Raises what it raises, and `RefusalError` if a late intent could not be written."""
        error: BaseException | None = None
        try:
            await app(scope, self._receive, self._reply)
        except BaseException as raised:
            error = raised
        if self._refusal is not None:
            raise self._refusal
        if isinstance(error, asyncio.CancelledError):
            # A cancel scope may cancel every await again; what is written goes on by itself.
            self.ending = asyncio.create_task(self._give_up(error))
            with suppress(asyncio.CancelledError):
                await asyncio.wait({self.ending}, timeout=_PATIENCE_S)
            raise error
        try:
            await self._close(error)
        finally:
            await self._call.end(error)
        if error is not None:
            raise error

    async def _give_up(self, error: BaseException) -> None:
        await self._answer.abandon()
        with suppress(asyncio.CancelledError):
            await self._call.end(error)

    async def _close(self, error: BaseException | None) -> None:
        if error is not None:
            await self._call.failed(error)
        await self._answer.finish(failed=error is not None)
        if error is None:
            await self._call.unanswered()
        if self._client.gone:
            await self._call.delivered("partly" if self._outlet.reached else "no")
        elif self._client.answered:
            await self._call.delivered("full")

    async def _receive(self) -> Message:
        if self._late and not self._client.body_taken:
            try:
                await self._call.admit()
            except RefusalError as refusal:
                self._refusal = refusal
                return {"type": "http.disconnect"}
        return await self._client.receive()

    async def _reply(self, message: Message) -> None:
        if self._refusal is None:
            await self._answer.send(message)
