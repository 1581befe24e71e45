"""A streamed answer put together, as it would have been without streaming."""

from __future__ import annotations

from typing import Any, Protocol

from ...errors import UnusableAnswerError
from .deltas import ChunkedAnswer
from .events import EventSplitter, decode_json
from .id_texts import ids_of
from .lifting import lift
from .places import as_dict, text
from .recent import PromptReader
from .snapshots import MessagesStream, NativeStream, ResponsesStream, TokenStream

__all__ = ("StreamJoiner",)

_MESSAGE_EVENTS = (
    "message_start",
    "message_delta",
    "message_stop",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
)


class _Joined(Protocol):
    def add(self, event: dict[str, Any]) -> None: ...

    def finished(self, choices: int) -> bool: ...

    def answer(self) -> Any: ...


class StreamJoiner:
    """Joins the events of one streamed answer, of any dialect that it recognises by the first event with content.

    `choices`: how many were asked for; the stream isn't finished before all of them are. Feed it bytes as they come,
    in any pieces, or decoded events; it never raises for what it is fed. After an abort `answer` gives what was seen.
    `arrays`: whether long prompt ids may come as numpy arrays, in events and in the answer; `prompts` reads those.
    """

    def __init__(self, *, choices: int = 1, arrays: bool = False, prompts: PromptReader = ids_of) -> None:
        self.choices = choices
        self.document = b""
        """The JSON of the event that `feed_data` took last, without prompt ids that came as an array."""
        self._prompts = prompts if arrays else None
        self.error: Any = None
        """The payload of the error event, if there was one; also set for an event that is no JSON."""
        self.done = False
        """Whether `[DONE]` was seen."""
        self.ended = False
        """Whether `end_of_stream` was called."""
        self.events = 0
        """How many events were joined."""
        self._splitter = EventSplitter()
        self._joined: _Joined | None = None
        self._contradiction: UnusableAnswerError | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has a finish reason: from here on only usage, late ids and `[DONE]` follow."""
        return self._joined is not None and self._joined.finished(self.choices)

    @property
    def complete(self) -> bool:
        """Whether every choice has a finish reason, the stream ended, and no error was in it."""
        return self.finished and (self.done or self.ended) and self.error is None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of the stream."""
        for name, payload in self._splitter.feed(data):
            self.feed_data(name, payload)

    def end_of_stream(self) -> None:
        """Nothing follows: the server closed the stream by itself. Not to be called if the client went away.

        A last event without a blank line counts if it is whole; half an event is an error.
        """
        for name, payload in self._splitter.end():
            self.feed_data(name, payload)
        self.ended = True

    def feed_event(self, event: Any, name: str = "") -> None:
        """The next event, decoded. `name`: the one in its `event:` line."""
        if not isinstance(event, dict):
            if name and name != "error":
                return  # an annotation of a gateway
            self._fail({"message": f"an event of the stream is a {type(event).__name__}"})
            return
        self.events += 1
        kind = text(event.get("type"))
        if name == "error" or event.get("error") is not None or kind in ("error", "response.failed"):
            self._fail(event)
            if kind != "response.failed":
                return
        if name == "sglext_ids":
            event = {"choices": [], "sglext": event.get("sglext", event)}
        if self._joined is None:
            self._joined = _joined_for(event, kind)
        if self._joined is not None and self._contradiction is None:
            try:
                self._joined.add(event)
            except UnusableAnswerError as error:
                self._contradiction = error
            except Exception as error:  # of values that no engine should send; the answer must flow on all the same
                self._contradiction = UnusableAnswerError(f"an event of the stream can't be read: {error!r}")

    def answer(self) -> Any:
        """What the stream gave so far, as `parse_answer` takes it; an empty object if there was nothing.

        Raises `UnusableAnswerError` if events contradict each other.
        """
        if self._contradiction is not None:
            raise self._contradiction
        return {} if self._joined is None else self._joined.answer()

    def feed_data(self, name: str, data: bytes) -> Any:
        """The next event as `EventSplitter` gives it. Returns it decoded; None for `[DONE]` and what is no JSON.

        One without data only keeps the connection alive.
        """
        if len(data) < 100 and data.strip() in (b"[DONE]", b""):
            self.done |= bool(data.strip())
            return None
        try:
            event, self.document = (decode_json(data), data) if self._prompts is None else lift(data, self._prompts)
        except ValueError:
            self._fail({"message": f"an event of the stream is no JSON: {data[:80]!r}"})
            return None
        self.feed_event(event, name)
        return event

    def _fail(self, error: Any) -> None:
        if self.error is None:
            self.error = error


def _joined_for(event: dict[str, Any], kind: str) -> _Joined | None:
    """What joins a stream that has this event; None if that can't be told yet."""
    if isinstance(event.get("choices"), list):
        return ChunkedAnswer()
    if isinstance(event.get("meta_info"), dict):
        return NativeStream()
    if kind.startswith("response."):
        return ResponsesStream()
    if kind in _MESSAGE_EVENTS:
        return MessagesStream()
    return TokenStream() if as_dict(event.get("token")) else None
