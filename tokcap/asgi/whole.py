"""An answer that comes whole: it waits whole, until its record is durable."""

from __future__ import annotations

import asyncio
from typing import Any

from ..capture.shapes import decode_json, lift
from .call import Call
from .outlet import Outlet
from .view import View

__all__ = ("WholeAnswer",)


class WholeAnswer:
    """One JSON body, or an error, or whatever else came without being a stream."""

    def __init__(self, call: Call, outlet: Outlet, view: View) -> None:
        self.seen: Any = None
        """As the client sees it, decoded; None if it can't be read."""
        self.error: Any = None
        self._call = call
        self._outlet = outlet
        self._view = view
        self._parts: list[bytes] = []

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    async def body(self, data: bytes, *, more: bool) -> None:
        """The next bytes."""
        if data:
            self._parts.append(data)
        if more:
            return
        body = b"".join(self._parts)
        payload, document, problem = self._decoded(body)
        recording = self._call.answering(self._outlet.status, self._outlet.headers, payload, problem)
        await asyncio.sleep(0)  # it has taken what it needs of the payload before it waits for the store
        shown = self._shown(body, payload, document)
        await asyncio.shield(recording)
        changed = shown is not body
        json = b"application/json" if changed and self._view.translates else b""
        if not self._outlet.started:  # else an earlier try was cancelled in the middle
            await self._outlet.start(length=len(shown) if changed else None, content_type=json)
        await self._outlet.body(shown, more=False)

    async def break_off(self, *, silent: bool) -> None:
        """The end never came. What there is goes out without an end, so that nobody takes it for whole.

        silent: nothing goes out, because the server has an error to say.
        """
        outlet = self._outlet
        await asyncio.shield(self._call.answering(outlet.status, outlet.headers, None, "the answer broke off"))
        if not silent:
            if not outlet.started:
                await outlet.start()
            await self._outlet.body(b"".join(self._parts), more=True)

    async def abandon(self) -> None:
        """The application was cancelled; there is nothing to record of half a body."""

    def _shown(self, body: bytes, payload: Any, document: bytes) -> bytes:
        coding = self._outlet.coding
        if payload is None and coding.identity is False:
            return body
        plain = body if coding.identity else coding.again().decode(body)
        shown, self.seen = self._view.whole(plain, payload, self._outlet.status, document)
        if shown is plain:
            return body
        return coding.encode(shown, last=True)

    def _decoded(self, body: bytes) -> tuple[Any, bytes, str]:
        """The JSON value of a body and its JSON without lifted prompt ids, or None, nothing, and what is wrong."""
        coding = self._outlet.coding
        if not body:
            return None, b"", "the answer is empty"
        if not coding.known:
            return None, b"", f"the answer has the content-encoding {coding.name.decode('latin-1')}"
        try:
            plain = coding.decode(body)
            # What is encoded again must be what JSON has.
            hides = self._call.asked.hides_prompt_ids
            payload, document = lift(plain, self._call.prompts) if hides else (decode_json(plain), plain)
        except ValueError:
            return None, b"", "the answer is no JSON"
        return payload, document, "the answer is JSON of another kind"
