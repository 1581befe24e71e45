"""A streamed answer: events flow as they come, and from the last finish reason on wait for the record, in order."""

from __future__ import annotations

from typing import Any

from ..capture.shapes import EventSplitter, StreamJoiner
from .call import Call
from .outlet import Outlet
from .view import Piece, View

__all__ = ("StreamedAnswer", "has_content")


class StreamedAnswer:
    """One stream of server-sent events."""

    def __init__(self, call: Call, outlet: Outlet, view: View, choices: int) -> None:
        self.seen: Any = None
        """The stream as one answer, as the client sees it; None before its record."""
        self._call = call
        self._outlet = outlet
        self._view = view
        self._splitter = EventSplitter()
        self._joiner = StreamJoiner(choices=choices, arrays=call.asked.hides_prompt_ids, prompts=call.prompts)
        self._held: list[Piece] = []
        self._recorded = self._broken = False
        self._unreadable = False
        """Whether its content encoding turned out to be another: then it only passes."""

    @property
    def error(self) -> Any:
        """The error event, if there was one."""
        return self._joiner.error

    async def begin(self) -> None:
        """The beginning goes out at once; nothing of a stream waits for its record but its end."""
        await self._outlet.start(drop=b"content-length")

    async def body(self, data: bytes, *, more: bool) -> None:
        """The next bytes."""
        flowing = self._pieces(data)
        if not more:
            if not self._unreadable:
                for name, payload, raw in self._splitter.end_raw():
                    self._take(flowing, name, payload, raw)
            self._joiner.end_of_stream()
        if flowing:
            await self._flow(flowing, more=True)
        if not self._recorded and (not more or self._joiner.done):
            await self._record()
        if self._recorded:
            await self._release(more=more)

    async def break_off(self, *, silent: bool) -> None:
        """The end never came: what was seen is recorded, and what is held goes out, without an end."""
        self._broken = True
        if not self._recorded:
            await self._record()
        await self._release(more=True)

    async def abandon(self) -> None:
        """The application was cancelled: what was seen is recorded, and nothing is sent any more."""
        if not self._recorded:
            await self._record()

    def _pieces(self, data: bytes) -> list[Piece]:
        """What of these bytes may go out; the rest is held."""
        flowing: list[Piece] = []
        content = False
        coding = self._outlet.coding
        if not self._unreadable:
            try:
                plain = coding.decode(data)
            except ValueError as error:
                self._unreadable = True
                self._joiner.feed_event({"error": {"message": str(error)}})
            else:
                if coding.identity or self._view.changes:
                    for name, payload, raw in self._splitter.feed_raw(plain):
                        self._take(flowing, name, payload, raw)
                    return flowing
                for name, payload, raw in self._splitter.feed_raw(plain):
                    content |= self._take([], name, payload, raw)
        # Encoded bytes pass as they are, message by message.
        (self._held if self._ends() else flowing).append(Piece(data, content=content))
        return flowing

    def _take(self, flowing: list[Piece], name: str, payload: bytes | None, raw: bytes) -> bool:
        """Read a piece, and see whether it flows or is held. Returns whether it says something that was sampled."""
        piece = Piece(raw)
        if payload is not None:
            event = self._joiner.feed_data(name, payload)
            if event is not None:
                piece.event, piece.content = event, self._outlet.observed and has_content(event)
                piece.document = self._joiner.document
                # There is no room for anything else in it.
                piece.plain = len(raw) == len(payload) + 8 and raw.startswith(b"data: ") and raw.endswith(b"\n\n")
                self._view.learn(event)
        passes_encoded = not self._outlet.coding.identity and not self._view.changes
        if not passes_encoded:
            (self._held if self._ends() else flowing).append(piece)
        return piece.content

    def _ends(self) -> bool:
        """Whether the end has begun: with the last finish reason, or with an error."""
        joiner = self._joiner
        return bool(self._held) or joiner.finished or joiner.error is not None or joiner.done

    async def _record(self) -> None:
        await self._call.streamed(self._joiner, self._outlet.headers)
        self._recorded = True
        try:
            self.seen = self._view.joined(self._joiner.answer())
        except ValueError:  # events that contradict each other
            self.seen = None

    async def _release(self, *, more: bool) -> None:
        held, self._held = self._held, []
        if self._joiner.done and self._joiner.finished:
            # Clients hang up as soon as they have read the end of the events: that is no disconnect either.
            self._outlet.client.answered = True
        await self._flow(held, more=more)

    async def _flow(self, pieces: list[Piece], *, more: bool) -> None:
        data = b"".join(map(self._view.shown, pieces))
        if self._recorded:
            data += self._view.end(complete=self._joiner.finished and not self._broken)
        if self._view.changes and not self._unreadable and (data or not more):
            data = self._outlet.coding.encode(data, last=not more)
        await self._outlet.body(data, more=more, content=any(piece.content for piece in pieces))


def has_content(event: Any) -> bool:
    """Whether an event says something that was sampled."""
    if not isinstance(event, dict):
        return False
    choices = event.get("choices")
    if not isinstance(choices, list):
        return any(event.get(key) for key in ("delta", "text", "output_ids", "token"))
    for choice in choices:
        if isinstance(choice, dict):
            delta = choice.get("delta")
            said = [value for key, value in delta.items() if key != "role"] if isinstance(delta, dict) else []
            if any(said) or choice.get("text") or choice.get("token_ids"):
                return True
    return False
