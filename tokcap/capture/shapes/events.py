"""Server-sent events out of a stream of bytes that is split anywhere, and JSON as servers write it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ("EventSplitter", "decode_json")

_LINE_END = re.compile(rb"\r\n|\n|\r")


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
        self._line = bytearray()
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
        if self._is_one_event(data):
            self._started = True
            yield "", bytes(data[6:-2]), bytes(data)
            return
        if not (self._line.endswith(b"\r") or b"\n" in data or b"\r" in data):
            self._line += data
            return
        text = bytes(self._line) + bytes(data)
        # A CR at the end may be the first half of a CRLF.
        end = len(text) - text.endswith(b"\r")
        start = begun = 0
        for match in _LINE_END.finditer(text, 0, end):
            line = text[start : match.start()]
            start = match.end()
            event = self._take(line)
            if not line or (line.startswith(b":") and self._between_events):
                raw = bytes(self._block) + text[begun:start]
                self._block.clear()
                begun = start
                yield (*event, raw) if event is not None else ("", None, raw)
        self._block += text[begun:start]
        self._line = bytearray(text[start:])

    def _is_one_event(self, data: bytes | bytearray | memoryview) -> bool:
        """Whether this is one event and nothing else, as servers usually write them: a line of data, a blank line."""
        return (
            isinstance(data, bytes)
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
            and not (self._line or self._block)
            and self._between_events
        )

    def end(self) -> Iterator[tuple[str, bytes]]:
        """What was fed last, if no blank line ended it."""
        for name, payload, _ in self.end_raw():
            if payload is not None:
                yield name, payload

    def end_raw(self) -> Iterator[tuple[str, bytes | None, bytes]]:
        """The same, with the bytes that are left."""
        raw = bytes(self._block + self._line)
        line = bytes(self._line).removesuffix(b"\r")
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
