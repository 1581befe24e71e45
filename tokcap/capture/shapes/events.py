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
        self._data: list[bytes] = []
        self._name = ""
        self._started = False

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[str, bytes]]:
        """The events (name, data) that end within `data`. To be exhausted before the next `feed`."""
        held_back = self._line.endswith(b"\r")
        if held_back or b"\n" in data or b"\r" in data:
            text = bytes(self._line) + bytes(data)
            # A CR at the end may be the first half of a CRLF.
            end = len(text) - text.endswith(b"\r")
            start = 0
            for match in _LINE_END.finditer(text, 0, end):
                event = self._take(text[start : match.start()])
                start = match.end()
                if event is not None:
                    yield event
            self._line = bytearray(text[start:])
        else:
            self._line += data

    def end(self) -> Iterator[tuple[str, bytes]]:
        """What was fed last, if no blank line ended it."""
        line = bytes(self._line).removesuffix(b"\r")
        self._line.clear()
        for last in (line, b""):
            event = self._take(last) if last or self._data else None
            if event is not None:
                yield event

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
