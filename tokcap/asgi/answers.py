"""The way of an answer from the application to the client: nothing of it that ends it goes out before its record.

What is answered whole waits whole. Of a stream everything up to the last finish reason flows as it comes; from there on
it is held, in order, until the record is durable.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..capture.answer import error_status
from ..capture.shapes import EventSplitter, StreamJoiner, decode_answer, decode_json
from .call import Call
from .coding import Coding
from .editing import encode_json
from .interface import Headers, Message, Send
from .strip import Stripper
from .translation import Translation

if TYPE_CHECKING:
    from ..evaluation import CallObservation

__all__ = ("CapturedAnswer", "has_content")


logger = logging.getLogger("tokcap.asgi")

CALL_ID_HEADER = b"x-tokcap-call-id"


class CapturedAnswer:
    """Takes the messages of the application in place of the server's `send`."""

    def __init__(
        self,
        call: Call,
        send: Send,
        *,
        choices: int,
        call_id_header: bool,
        translation: Translation | None = None,
        observation: CallObservation | None = None,
        fingerprint: Any = msgspec.UNSET,
    ) -> None:
        self.status = 0
        self.ended = False
        """Whether the last message was sent."""
        self.seen: Any = None
        """The answer as the client sees it, decoded; what was joined of a stream. None if it can't be read."""
        self._call = call
        self._send = send
        self._choices = choices
        self._call_id_header = call_id_header
        self._translation = translation
        self._observation = observation
        self._stripper = Stripper(call.asked, fingerprint)
        self._start: Message = {}
        self._headers: Headers = []
        self._mode: Literal["", "whole", "stream", "opaque"] = ""
        self._coding = Coding(b"")
        self._parts: list[bytes] = []
        self._splitter = EventSplitter()
        # What is encoded again must be what JSON has.
        self._decode = decode_answer if call.asked.hides_prompt_ids else decode_json
        self._joiner = StreamJoiner(choices=choices, arrays=call.asked.hides_prompt_ids)
        self._held: list[_Piece] = []
        self._recorded = False
        self._reached = False

    @property
    def _changes(self) -> bool:
        """Whether what the client gets is made anew."""
        return self._translation is not None or self._call.asked.strips

    async def send(self, message: Message) -> None:
        """The next message of the application."""
        kind = message["type"]
        if kind == "http.response.start":
            self._begin(message)
            if self._mode != "whole":
                await self._send_start(None)
        elif kind != "http.response.body" or not self._mode:
            await self._send(message)
        elif not self.ended:
            data, more = bytes(message.get("body") or b""), bool(message.get("more_body", False))
            if self._mode == "stream":
                await self._streamed(data, more)
            elif self._mode == "whole":
                await self._whole(data, more)
            else:
                await self._opaque(data, more)

    async def finish(self) -> None:
        """The application has returned or raised: what it left unsaid is judged as it is, and what is held goes out."""
        if self.ended:
            return
        if self._mode == "stream" and not self._recorded:
            await self._record_stream()
            await self._release(more=True)
        elif self._mode == "whole" and self._parts:
            await self._answered(b"".join(self._parts))

    async def abandon(self) -> None:
        """The application was cancelled: what was seen of a stream is recorded, and nothing is sent any more."""
        if self._mode == "stream" and not self._recorded:
            await self._record_stream()

    @property
    def fingerprint(self) -> Any:
        """The `system_fingerprint` of the server, None if it has none, UNSET if no answer told it."""
        return self._stripper.fingerprint

    @property
    def error(self) -> Any:
        """The error event of a stream, if there was one."""
        return self._joiner.error

    @property
    def partly_sent(self) -> bool:
        """Whether a part of the answer was sent while the client was there."""
        return self._reached

    def _begin(self, message: Message) -> None:
        self._start, self.status = message, int(message["status"])
        self._headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers") or ()]
        kind = _value(self._headers, b"content-type").partition(b";")[0].strip().lower()
        self._coding = Coding(_value(self._headers, b"content-encoding"))
        if 200 <= self.status < 300 and self._coding.known and kind == b"text/event-stream":
            self._mode = "stream"
            self._headers = [header for header in self._headers if header[0] != b"content-length"]
        elif self.status >= 300 or not kind or kind.endswith((b"/json", b"+json")):
            self._mode = "whole"
        else:
            self._mode = "opaque"

    async def _send_start(self, length: int | None) -> None:
        if self._observation is not None:
            self._observation.status(self.status)
        headers = [
            (name, str(length).encode() if name == b"content-length" and length is not None else value)
            for name, value in self._headers
        ]
        if self._call_id_header and self._call.context is not None:
            headers.append((CALL_ID_HEADER, self._call.model_call_id.encode()))
        await self._send({**self._start, "headers": headers})

    async def _send_body(self, data: bytes, *, more: bool, content: bool = False) -> None:
        if not more:
            self.ended = True
            # From here on a disconnect is none: many servers report one as soon as the answer is whole.
            self._call.client.end()
        if data or not more:
            if self._observation is not None:
                if content:
                    self._observation.first_token()
                self._observation.answered(len(data))
            self._reached |= bool(data) and not self._call.client.gone
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    # ---- answers that are whole

    async def _whole(self, data: bytes, more: bool) -> None:
        if data:
            self._parts.append(data)
        if not more:
            await self._answered(b"".join(self._parts))

    async def _answered(self, body: bytes) -> None:
        self._parts = []
        payload, problem = self._decoded(body)
        recording = asyncio.create_task(self._call.answered(self.status, self._headers, payload, problem))
        await asyncio.sleep(0)  # it has taken what it needs of the payload before it waits for the store
        body = self._prepared(body, payload)
        await recording
        self._recorded = True
        await self._send_start(len(body) if self._start_has_length() else None)
        await self._send_body(body, more=False)

    def _prepared(self, body: bytes, payload: Any) -> bytes:
        """The body as the client gets it."""
        if payload is not None and self._changes:
            try:
                body = self._rewritten(body, payload)
            except Exception as error:
                self._log_unchanged(error)
        elif self._translation is not None:
            body = self._coding.encode(encode_json(self._translation.failure(None, self.status)), last=True)
        else:
            self.seen = payload
        return body

    def _start_has_length(self) -> bool:
        return bool(_value(self._headers, b"content-length"))

    def _decoded(self, body: bytes) -> tuple[Any, str]:
        """The JSON value of a body, or None and what is wrong with it."""
        if not body:
            return None, "the answer is empty"
        if not self._coding.known:
            return None, f"the answer has the content-encoding {self._coding.name.decode('latin-1')}"
        try:
            payload = self._decode(self._coding.decode(body))
        except ValueError:
            return None, "the answer is no JSON"
        return payload, "the answer is JSON of another kind"

    def _rewritten(self, body: bytes, payload: Any) -> bytes:
        failed = self.status if self.status >= 400 else error_status(payload)
        if failed is not None:
            if self._translation is None:
                self.seen = payload
                return body
            self.seen = self._translation.failure(payload, failed or 500)
        else:
            self.seen = self._stripper.answer(payload)
            if self._translation is not None:
                self.seen = self._translation.answer(self.seen)
            elif not self._stripper.changed:
                return body
        return self._coding.encode(encode_json(self.seen, body if self._coding.identity else b"NaN"), last=True)

    # ---- streams of events

    async def _streamed(self, data: bytes, more: bool) -> None:
        try:
            data = self._coding.decode(data)
        except ValueError as error:
            self._joiner.feed_event({"error": {"message": str(error)}})
            data = b""
        flowing: list[_Piece] = []
        for name, payload, raw in self._splitter.feed_raw(data):
            self._take_event(flowing, name, payload, raw)
        if not more:
            for name, payload, raw in self._splitter.end_raw():
                self._take_event(flowing, name, payload, raw)
            self._joiner.end_of_stream()
        if flowing:
            await self._flow(flowing, more=True)
        if not self._recorded and (not more or self._joiner.done):
            await self._record_stream()
        if self._recorded:
            await self._release(more=more)

    def _take_event(self, flowing: list[_Piece], name: str, payload: bytes | None, raw: bytes) -> None:
        piece = _Piece(raw)
        if payload is not None:
            event = self._joiner.feed_data(name, payload)
            if event is not None:
                piece.content = self._observation is not None and has_content(event)
                piece.event = event
                self._stripper.learn(event)
        # The end begins with the last finish reason, or with an error.
        if self._held or self._joiner.finished or self._joiner.error is not None or self._joiner.done:
            self._held.append(piece)
        else:
            flowing.append(piece)

    async def _record_stream(self) -> None:
        self._recorded = True
        await self._call.streamed(self._joiner, self._headers)
        self.seen = _joined(self._joiner)

    async def _release(self, *, more: bool) -> None:
        held, self._held = self._held, []
        await self._flow(held, more=more)

    async def _flow(self, pieces: list[_Piece], *, more: bool) -> None:
        data = b"".join(self._shown(pieces))
        if self._translation is not None and self._recorded:
            data += self._translation.end(complete=self._joiner.finished)
        if data or not more:
            data = self._coding.encode(data, last=not more)
        await self._send_body(data, more=more, content=any(piece.content for piece in pieces))

    def _shown(self, pieces: list[_Piece]) -> list[bytes]:
        """What the client sees of these pieces."""
        if not self._changes:
            return [piece.raw for piece in pieces]
        shown = []
        for piece in pieces:
            try:
                shown.append(self._shown_piece(piece))
            except Exception as error:
                self._log_unchanged(error)
                shown.append(piece.raw)
        return shown

    def _shown_piece(self, piece: _Piece) -> bytes:
        if piece.event is None:
            return piece.raw if self._translation is None else self._translation.aside(piece.raw)
        event = self._stripper.chunk(piece.event)
        if self._translation is not None:
            # Usage is part of the other dialects' own end of a stream.
            return self._translation.chunk(piece.event if event is None else event)
        if event is None:
            return b""
        return _event_bytes(piece.raw, event) if self._stripper.changed else piece.raw

    def _log_unchanged(self, error: Exception) -> None:
        """What is wrong in our own changes must not cost the client its answer."""
        logger.exception("call %s: passed as the engine answered: %r", self._call.model_call_id, error)

    # ---- anything else

    async def _opaque(self, data: bytes, more: bool) -> None:
        if not more:
            await self._call.opaque("the answer is neither JSON nor a stream of events")
            self._recorded = True
        await self._send_body(data, more=more, content=True)


class _Piece:
    """Bytes of a stream: an event, or what stands between events."""

    __slots__ = ("content", "event", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.event: Any = None
        self.content = False


def _event_bytes(raw: bytes, event: Any) -> bytes:
    """The bytes of an event with other data."""
    head = b""
    if not raw.startswith(b"data:"):
        head = b"".join(line for line in raw.splitlines(keepends=True) if line.strip() and not line.startswith(b"data"))
    return head + b"data: " + encode_json(event, raw) + b"\n\n"


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


def _joined(joiner: StreamJoiner) -> Any:
    """The stream as one answer, for its summary: without prompt ids, which may be arrays."""
    try:
        answer = joiner.answer()
    except Exception:  # events that contradict each other
        return None
    return {**answer, "prompt_token_ids": None} if isinstance(answer, dict) else answer


def _value(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")
