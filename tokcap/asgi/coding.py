"""Content encodings: read for capture, and put on again if something was taken out of an answer.

Few bytes may stand for a thousand times as many, and each gzip member costs as much as a small body. So what is decoded
is bounded by who asks, and time and memory by what was sent.
"""

from __future__ import annotations

import zlib
from typing import Any

__all__ = ("Coding", "Inflation")

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
_GZIP = 31
_MOST_MEMBERS = 10_000
_STEPS = (1 << 12, 1 << 16)
"""Bytes that are decoded at a time, at the beginning of a member and at most; what a member leaves over is copied."""
_FREE, _RATIO = 16 << 20, 32
"""An answer may say so many bytes, and so many times what was sent of it: JSON with log-probs becomes a tenth."""


class Inflation:
    """Decodes gzip (several members, too) or deflate, piece by piece. bits: as zlib has them."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._stream: Any = None
        self._members = 0
        self._step = _STEPS[0]

    @property
    def ended(self) -> bool:
        """Whether the last member is whole."""
        return self._stream is not None and bool(self._stream.eof)

    def feed(self, data: bytes, most: int) -> bytes:
        """What these bytes say; if that is more than `most` bytes, the beginning of it, longer than `most`.

        Raises `ValueError` for what is not of this encoding.
        """
        found: list[bytes] = []
        size, start = 0, 0
        view = memoryview(data)
        while start < len(data) and size <= most:
            if self._stream is None or (self._stream.eof and self._bits == _GZIP):
                self._begin()
            elif self._stream.eof:
                break  # what follows is not of it
            piece = view[start : start + self._step]
            try:
                part = self._stream.decompress(piece, most - size + 1)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            if part:
                found.append(part)
                size += len(part)
            start += len(piece) - len(self._stream.unused_data) - len(self._stream.unconsumed_tail)
            self._step = min(2 * self._step, _STEPS[1])
        return found[0] if len(found) == 1 else b"".join(found)

    def _begin(self) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise ValueError(f"it has more than {_MOST_MEMBERS} members")
        self._stream = zlib.decompressobj(self._bits)
        self._step = _STEPS[0]


class Coding:
    """Decodes an answer piece by piece and encodes it anew."""

    def __init__(self, name: bytes) -> None:
        self.name = name.strip().lower()
        self.identity = self.name in (b"", b"identity")
        self.known = self.identity or self.name in _WINDOW_BITS
        # Made when they are needed: together they take 86 KiB.
        self._inflation: Inflation | None = None
        self._deflate: Any = None
        self._left = _FREE

    def again(self) -> Coding:
        """The same encoding, for another reading from the beginning."""
        return Coding(self.name)

    def decode(self, data: bytes) -> bytes:
        """What these bytes say. Raises `ValueError` for what is not of this encoding, or says far too much."""
        if self.identity:
            return data
        if self._inflation is None:
            self._inflation = Inflation(_WINDOW_BITS.get(self.name, 15))
        self._left += _RATIO * len(data)
        try:
            found = self._inflation.feed(data, self._left)
        except ValueError as error:
            raise ValueError(f"the answer is not of its content-encoding: {error}") from error
        self._left -= len(found)
        if self._left < 0:
            raise ValueError("the answer says far more than was sent of it")
        return found

    def encode(self, data: bytes, *, last: bool) -> bytes:
        """The bytes for these, complete enough to be read at once."""
        if self.identity:
            return data
        if self._deflate is None:
            self._deflate = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS.get(self.name, 15))
        return bytes(self._deflate.compress(data) + self._deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH))
