"""What goes out to the client: the beginning of an answer, its bytes, and that its end was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .client import Client
from .coding import Coding
from .interface import Headers, Message, Send

if TYPE_CHECKING:
    from ..evaluation import CallObservation

__all__ = ("Outlet",)

_CALL_ID = b"x-tokcap-call-id"


class Outlet:
    """The server's `send` for one answer. call_id: for the header that names the call; empty for none."""

    def __init__(self, client: Client, send: Send, call_id: str, observation: CallObservation | None) -> None:
        self.client = client
        self.status = 0
        self.headers: Headers = []
        """Of the application, names in lower case."""
        self.coding = Coding(b"")
        self.started = False
        self.ended = False
        """Whether the last message was sent."""
        self.reached = False
        """Whether a part of the answer was sent while the client was there."""
        self._send = send
        self._call_id = call_id.encode()
        self._observation = observation
        self._start: Message = {}

    @property
    def observed(self) -> bool:
        """Whether anybody wants to know when content was sent."""
        return self._observation is not None

    def begin(self, message: Message) -> None:
        """The application begins its answer. Nothing is sent yet."""
        self._start, self.status = message, int(message["status"])
        self.headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers") or ()]
        self.coding = Coding(self.header(b"content-encoding"))

    def header(self, name: bytes) -> bytes:
        """The first value of a header; empty without."""
        return next((value for key, value in self.headers if key == name), b"")

    async def start(self, *, length: int | None = None, drop: bytes = b"", content_type: bytes = b"") -> None:
        """Send the beginning. length: of the whole body, if it was changed. drop: a header that is left out.
        content_type: in place of the application's."""
        self.started = True
        if self._observation is not None:
            self._observation.status(self.status)
        dropped = {drop, _CALL_ID} if self._call_id else {drop}
        changed = {} if length is None else {b"content-length": str(length).encode()}
        if content_type:
            changed[b"content-type"] = content_type
        headers = [(name, changed.get(name, value)) for name, value in self.headers if name not in dropped]
        if self._call_id:
            headers.append((_CALL_ID, self._call_id))
        await self._send({**self._start, "headers": headers})

    async def body(self, data: bytes, *, more: bool, content: bool = False) -> None:
        """Send bytes; nothing for none that end nothing. content: whether tokens of the answer are in them."""
        if not data and more:
            return
        if self._observation is not None:
            if content:
                self._observation.first_token()
            self._observation.answered(len(data))
        self.reached |= bool(data) and not self.client.gone
        if not more:
            self.ended = True
            # From here on a disconnect is none: many servers report one as soon as the answer is whole. But nobody is
            # told before it is sent: frameworks stop a send that waits for a slow reader as soon as they hear of one.
            self.client.answered = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        if not more:
            self.client.end()

    async def other(self, message: Message) -> None:
        """A message that is neither, such as an early hint."""
        await self._send(message)
