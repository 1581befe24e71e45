"""Server-sent events out of a stream of bytes that is split anywhere, and JSON as servers write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ("EventSplitter", "decode_json")


def decode_json(body: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON document: fast, and as lenient as Python's own `json` (NaN, Infinity, lone surrogates).

    Raises `ValueError`.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        pass
    try:
        return json.loads(body if isinstance(body, str) else bytes(body).decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


class EventSplitter:
    """Events by blank lines: `feed` any pieces, get each event once it is whole.

    Line ends are LF, CRLF or CR; comments (`: keep-alive`) and fields other than `event` and `data` are passed over;
    several `data` lines make one event.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """What came of a line that has not ended."""
        self._block = bytearray()
        self._data: list[bytes] = []
        self._name = ""
        self._started = False

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[str, bytes]]:
        """The events (name, data) that end within `data`. To be exhausted before the next `feed`."""
        for name, payload, _ in self.feed_raw(data):
            if payload is not None:
                yield name, payload

    def feed_raw(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[str, bytes | None, bytes]]:
        """The same, with what each event was made of; joined, these bytes are the stream.

        Comments between events, and blank lines that end none, come as they are, with None for data.
        """
        text = bytes(data)
        if not text:
            return
        if self._line:
            ends = self._line[-1].endswith(b"\r") or b"\n" in text or b"\r" in text
            self._line.append(text)
            if not ends:
                return
            text = b"".join(self._line)
            self._line.clear()
        if self._is_one_event(text):
            self._started = True
            yield "", text[6:-2], text
            return
        # A CR at the end may be the first half of a CRLF.
        end = len(text) - text.endswith(b"\r")
        start = begun = 0
        for line_end, following in _line_ends(text, end):
            line = text[start:line_end]
            start = following
            event = self._take(line)
            if not line or (line.startswith(b":") and self._between_events):
                raw = text[begun:start]
                if self._block:
                    raw = bytes(self._block) + raw
                    self._block.clear()
                begun = start
                yield (*event, raw) if event is not None else ("", None, raw)
        self._block += text[begun:start]
        if start < len(text):
            self._line.append(text[start:])

    def _is_one_event(self, text: bytes) -> bool:
        """Whether this is one event and nothing else, as servers usually write them: a line of data, a blank line."""
        return (
            text.startswith(b"data: ")
            and text.find(b"\n") == len(text) - 2
            and text.endswith(b"\n\n")
            and b"\r" not in text
            and not self._block
            and self._between_events
        )

    def end(self) -> Iterator[tuple[str, bytes]]:
        """What was fed last, if no blank line ended it."""
        for name, payload, _ in self.end_raw():
            if payload is not None:
                yield name, payload

    def end_raw(self) -> Iterator[tuple[str, bytes | None, bytes]]:
        """The same, with the bytes that are left."""
        line = b"".join(self._line)
        raw = bytes(self._block) + line
        line = line.removesuffix(b"\r")
        self._line.clear()
        self._block.clear()
        event = self._take(line) if line else None
        event = event or (self._take(b"") if self._data else None)
        if raw:
            yield (*event, raw) if event is not None else ("", None, raw)

    @property
    def _between_events(self) -> bool:
        return not self._data and not self._name

    def _take(self, line: bytes) -> tuple[str, bytes] | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value.decode(errors="replace")
            return None
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return (name, b"\n".join(data)) if data else None


def _line_ends(text: bytes, end: int) -> Iterator[tuple[int, int]]:
    """Where each line before `end` ends, and where the next one begins: by LF, CRLF or CR.

    Either is searched for by itself, because a prompt makes a line of a megabyte: 4 ms for a pattern, 0.02 ms so.
    """
    feed, back = text.find(b"\n", 0, end), text.find(b"\r", 0, end)
    while feed >= 0 or back >= 0:
        if back < 0 or 0 <= feed < back:
            yield feed, feed + 1
            feed = text.find(b"\n", feed + 1, end)
        else:
            following = back + 2 if feed == back + 1 else back + 1
            yield back, following
            if feed == back + 1:
                feed = text.find(b"\n", following, end)
            back = text.find(b"\r", following, end)
