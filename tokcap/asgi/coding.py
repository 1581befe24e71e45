"""Content encodings of answers: read for capture, and put on again if something was taken out."""

from __future__ import annotations

import zlib

__all__ = ("Coding",)

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


class Coding:
    """Decodes an answer piece by piece and encodes it anew. Nothing is done for an answer without an encoding."""

    def __init__(self, name: bytes) -> None:
        self.name = name.strip().lower()
        self.identity = self.name in (b"", b"identity")
        self.known = self.identity or self.name in _WINDOW_BITS
        bits = _WINDOW_BITS.get(self.name, 15)
        self._inflate = zlib.decompressobj(bits)
        self._deflate = zlib.compressobj(1, zlib.DEFLATED, bits)

    def decode(self, data: bytes) -> bytes:
        """What these bytes say. Raises `ValueError` for what is not of this encoding."""
        if self.identity:
            return data
        try:
            return self._inflate.decompress(data)
        except zlib.error as error:
            raise ValueError(f"the answer is not of its content-encoding: {error}") from error

    def encode(self, data: bytes, *, last: bool) -> bytes:
        """The bytes for these, complete enough to be read at once."""
        if self.identity:
            return data
        return self._deflate.compress(data) + self._deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
