"""The client of one captured request: its body, read once, and whether it is still there."""

from __future__ import annotations

import asyncio

from .coding import Inflation
from .interface import Headers, Message, Receive
from .refusals import RefusalError

__all__ = ("Client", "ClientGoneError", "decoded")


_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_MOST_ENCODINGS = 4
"""One inside another: each may take as long as the largest body does."""


class ClientGoneError(Exception):
    """The client left before it had sent its request."""


class Client:
    """Reads the body, hands it to the application once, and then alone listens for a disconnect.

    An application may listen, too: what it gets is what was heard here. A disconnect after the answer is none.
    """

    def __init__(self, receive: Receive) -> None:
        self.body = b""
        """As the application is to see it; may be replaced before it is handed out."""
        self.gone = False
        """Whether the client left before the answer was whole."""
        self.answered = False
        """Whether the last message of the answer was sent."""
        self.body_taken = False
        """Whether the application has asked for the body; before that it can't have done anything with it."""
        self._receive = receive
        self._consumed: list[Message] = []
        self._over = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def read(self, headers: Headers, limit: int) -> bytes:
        """The body as it was sent. Raises `RefusalError` above `limit` bytes, and `ClientGoneError`."""
        declared = next((value for name, value in headers if name == b"content-length"), b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._consumed.append(message)
            part = message.get("body") or b""
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            more = message.get("more_body", False)
        self._consumed = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)
        return self.body

    async def replay(self) -> Message:
        """For an application that is to have the messages as they came: those that `read` took, then the others."""
        return self._consumed.pop(0) if self._consumed else await self._receive()

    def listen(self) -> None:
        """From now on a disconnect is heard. To be called once the body was read."""
        self._consumed = []
        self._watch = asyncio.create_task(self._listen())

    async def receive(self) -> Message:
        """What the application receives: the whole body, then nothing until the client is gone or has its answer."""
        if not self.body_taken:
            self.body_taken = True
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    def end(self) -> None:
        """The answer is whole: what is heard from now on says nothing of it."""
        self.answered = True
        self._over.set()

    def close(self) -> None:
        """Stop listening."""
        self.end()
        # Let go of it: its cancellation holds a traceback that refers to this client.
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()

    async def _listen(self) -> None:
        message = await self._receive()
        # Anything else comes from a `receive` that repeats the body for ever: it can't be listened to.
        if message["type"] == "http.disconnect":
            self.gone = not self.answered
            self._over.set()


def decoded(body: bytes, encoding: bytes, limit: int) -> bytes:
    """A body without its content encodings (`gzip`, `deflate`), at most `limit` bytes.

    Raises `RefusalError`: 415 for another encoding, 413 above the limit, 400 for what can't be decoded.
    """
    names = [name.strip().lower().decode("latin-1") for name in encoding.split(b",") if name.strip()]
    if len(names) > _MOST_ENCODINGS:
        raise RefusalError(415, f"the body has {len(names)} content-encodings; at most {_MOST_ENCODINGS} are read here")
    for name in reversed(names):
        if name == "identity":
            continue
        bits = _WINDOW_BITS.get(name)
        if bits is None:
            raise RefusalError(415, f"content-encoding {name[:40]!r} can't be read here; send gzip, deflate or none")
        body = _inflated(body, bits, limit)
    return body


def _inflated(body: bytes, bits: int, limit: int) -> bytes:
    if not body:
        return body
    inflation = Inflation(bits)
    try:
        found = inflation.feed(body, limit)
    except ValueError as error:
        if bits == 15:  # some clients send deflate without the zlib header
            return _inflated(body, -15, limit)
        raise RefusalError(400, f"the body is not of its content-encoding: {error}") from None
    if len(found) > limit:
        raise _too_large(limit)
    if not inflation.ended:
        raise RefusalError(400, "the body is not of its content-encoding: it ends too early")
    return found


def _too_large(limit: int) -> RefusalError:
    return RefusalError(413, f"the request is larger than {limit} bytes (tokcap_serving.max_body_bytes)")
