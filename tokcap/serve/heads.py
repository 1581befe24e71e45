"""How long the head of a request, and the trailers behind its body, may be.

uvicorn's protocol for h11 answers 400 above 64 KiB. The one for httptools, which uvicorn takes if that is installed,
keeps whatever comes, at twenty times its size: here it gets the same bound. What is counted are the bytes since a head
was whole or a piece of a body came, so that a body may be as long as it likes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ("LARGEST_HEAD", "bounded_protocol")

LARGEST_HEAD = 64 * 1024
"""Bytes, and what one read brings beyond them. As uvicorn has it for h11."""
_WHY = "The head of the request is too long."


class _Bounded(asyncio.Protocol):
    """In front of uvicorn's protocol for httptools, whose parser calls the `on_` methods."""

    cycle: Any
    """Of uvicorn: the request that is being answered, or was the last one; None before the first."""
    send_400_response: Any
    transport: asyncio.Transport
    _pending = 0

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self._pending <= LARGEST_HEAD or self.transport.is_closing():
            return
        if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):
            self.send_400_response(_WHY)  # closes the connection, too
        else:  # behind a request that is not answered yet, or was answered early
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._pending = 0
        super().on_headers_complete()  # type: ignore[misc]  # of uvicorn

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)  # type: ignore[misc]  # of uvicorn


def bounded_protocol(base: type[asyncio.Protocol] = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn that bounds heads. base: of uvicorn; the one for h11 is returned as it is."""
    return type("BoundedProtocol", (_Bounded, base), {}) if hasattr(base, "on_headers_complete") else base
