"""Content encodings of answers: read for capture, and put on again if something was taken out."""

from __future__ import annotations

import zlib
from typing import Any

__all__ = ("Coding",)

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


class Coding:
    """Decodes an answer piece by piece and encodes it anew."""

    def __init__(self, name: bytes) -> None:
        self.name = name.strip().lower()
        self.identity = self.name in (b"", b"identity")
        self.known = self.identity or self.name in _WINDOW_BITS
        # Made when they are needed: together they take 86 KiB.
        self._inflate: Any = None
        self._deflate: Any = None

    def again(self) -> Coding:
        """The same encoding, for another reading from the beginning."""
        return Coding(self.name)

    def decode(self, data: bytes) -> bytes:
        """What these bytes say. Raises `ValueError` for what is not of this encoding."""
        if self.identity:
            return data
        found = b""
        while data:
            if self._inflate is None or self._inflate.eof:  # gzip may have several members
                self._inflate = zlib.decompressobj(_WINDOW_BITS.get(self.name, 15))
            try:
                found += self._inflate.decompress(data)
            except zlib.error as error:
                raise ValueError(f"the answer is not of its content-encoding: {error}") from error
            data = self._inflate.unused_data
        return found

    def encode(self, data: bytes, *, last: bool) -> bytes:
        """The bytes for these, complete enough to be read at once."""
        if self.identity:
            return data
        if self._deflate is None:
            self._deflate = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS.get(self.name, 15))
        return bytes(self._deflate.compress(data) + self._deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH))
