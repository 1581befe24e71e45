"""What the client sees of an answer: without what was added for capture, in the dialect that it asked in."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ..capture.answer import error_status
from .asks import Asked
from .editing import encode_json
from .strip import Stripper
from .translation import Translation

__all__ = ("Piece", "View")

logger = logging.getLogger("tokcap.asgi")


class Piece(msgspec.Struct, gc=False):
    """Bytes of a stream: an event, or what stands between events."""

    raw: bytes
    event: Any = None
    """Decoded; None for what is none."""
    content: bool = False
    """Whether it says something that was sampled."""
    document: bytes = b""
    """Its JSON, without prompt ids that were lifted out of it; with `event`."""
    plain: bool = False
    """Whether it is a line of data and a blank line, each ended by LF, as servers usually write an event."""


class View:
    """Of one answer, whole or piece by piece. What goes wrong in here never costs the client its answer: then it gets
    the engine's own bytes, and that is logged."""

    def __init__(self, asked: Asked, translation: Translation | None, fingerprint: Any, call_id: str) -> None:
        self._asked = asked
        self._stripper = Stripper(asked, fingerprint)
        self._translation = translation
        self._call_id = call_id

    @property
    def changes(self) -> bool:
        """Whether anything may have to be made anew."""
        return self._translation is not None or self._asked.strips

    @property
    def translates(self) -> bool:
        """Whether the client is answered in another dialect than the engine."""
        return self._translation is not None

    @property
    def told_fingerprint(self) -> Any:
        """The `system_fingerprint` that this answer told, None if it has none, UNSET if it told nothing of it."""
        return self._stripper.told

    def whole(self, body: bytes, payload: Any, status: int, document: bytes) -> tuple[bytes, Any]:
        """The body as the client gets it, without content encoding, and its decoded value.

        payload: decoded, changed in place; None for what is no JSON. document: the JSON that shows whether it holds
        numbers that JSON has none for: the body, or what of it isn't prompt ids.
        """
        try:
            if payload is None:
                return self._unreadable(body, status)
            failed = status if status >= 400 else error_status(payload)
            if failed is not None:
                if self._translation is None:
                    return body, payload
                payload = self._translation.failure(payload, failed or 500)
            else:
                payload = self._stripper.answer(payload)
                if self._translation is not None:
                    payload = self._translation.answer(payload)
                elif not self._stripper.changed:
                    return body, payload
            return encode_json(payload, document), payload
        except Exception as error:
            self._log(error)
            return body, None

    def _unreadable(self, body: bytes, status: int) -> tuple[bytes, Any]:
        if self._translation is None or status < 400:
            return body, None
        payload = self._translation.failure(None, status)
        return encode_json(payload), payload

    def learn(self, event: Any) -> None:
        """An event came. In the order of the stream, before any of them is shown."""
        try:
            self._stripper.learn(event)
        except Exception as error:
            self._log(error)

    def shown(self, piece: Piece) -> bytes:
        """What the client sees of a piece of a stream."""
        if not self.changes:
            return piece.raw
        try:
            return self._shown(piece)
        except Exception as error:
            self._log(error)
            return piece.raw

    def _shown(self, piece: Piece) -> bytes:
        if piece.event is None:
            return piece.raw if self._translation is None else self._translation.aside(piece.raw)
        event = self._stripper.chunk(piece.event)
        if self._translation is not None:
            # Usage is part of the other dialects' own end of a stream.
            return self._translation.chunk(piece.event if event is None else event)
        if event is None:
            return b""
        return _event_bytes(piece, event) if self._stripper.changed else piece.raw

    def end(self, *, complete: bool) -> bytes:
        """What ends a stream in the client's dialect; once."""
        try:
            return b"" if self._translation is None else self._translation.end(complete=complete)
        except Exception as error:
            self._log(error)
            return b""

    def joined(self, answer: Any) -> Any:
        """A stream as one answer, as the client would see it; for its summary, so without prompt ids."""
        try:
            if isinstance(answer, dict):
                answer = {**answer, "prompt_token_ids": None}
            return answer if self._translation is None else self._translation.answer(answer)
        except Exception as error:
            self._log(error)
            return None

    def _log(self, error: Exception) -> None:
        logger.exception("call %s: passed as the engine answered: %r", self._call_id, error)


def _event_bytes(piece: Piece, event: Any) -> bytes:
    """The bytes of an event with other data; its other lines come first, its line ends stay."""
    data = encode_json(event, piece.document)
    if piece.plain:
        return b"data: %b\n\n" % data
    raw = piece.raw
    line_end = b"\r\n" if b"\r\n" in raw else b"\n"
    others = b""
    if not raw.startswith(b"data:") or raw.count(b"\n") > 2:
        lines = [line for line in raw.splitlines() if line.strip() and not line.startswith(b"data")]
        others = b"".join(line + line_end for line in lines)
    return others + b"data: " + data + line_end + line_end
