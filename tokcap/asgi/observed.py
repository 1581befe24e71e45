"""A request that only evaluation capture looks at: everything passes at once and as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..capture.request import requested_choices
from ..capture.shapes import EventSplitter, StreamJoiner, decode_json
from .client import Client, decoded
from .coding import Coding
from .interface import Application, Message, Send
from .refusals import RefusalError
from .request import Request, decoded_request
from .streamed import has_content

if TYPE_CHECKING:
    from ..evaluation import CallObservation, EvaluationRecorder

__all__ = ("ObservedAnswer", "observe")

_MOST_BYTES = 64 * 2**20
"""Of an answer that is kept to be summarised; a longer one is counted only."""


class ObservedAnswer:
    """Passes the messages of the application on, and keeps what its summary needs."""

    def __init__(self, client: Client, send: Send, observation: CallObservation, *, choices: int) -> None:
        self.error: Any = None
        """The error event of a stream."""
        self._client = client
        self._send = send
        self._observation = observation
        self._joiner = StreamJoiner(choices=choices)
        self._splitter = EventSplitter()
        self._coding = Coding(b"")
        self._is_stream = False
        self._parts: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        """The next message of the application."""
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_end:
            # From here on a disconnect is none; see `Outlet.body`.
            self._client.answered = True
        await self._send(message)
        if is_end:
            self._client.end()
        if message["type"] == "http.response.start":
            headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers") or ()}
            self._observation.status(int(message["status"]))
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._coding = Coding(headers.get(b"content-encoding", b""))
        elif message["type"] == "http.response.body":
            data = bytes(message.get("body") or b"")
            self._observation.answered(len(data))
            self._keep(data)

    def seen(self) -> Any:
        """The answer, decoded and joined; None if it can't be read."""
        try:
            if self._is_stream:
                for name, payload in self._splitter.end():
                    self._joiner.feed_data(name, payload)
                return self._joiner.answer()
            return decode_json(b"".join(self._parts)) if self._parts else None
        except ValueError:  # also the errors of shapes
            return None

    def _keep(self, data: bytes) -> None:
        if not data or not self._coding.known or self._size > _MOST_BYTES:
            return
        try:
            data = self._coding.decode(data)
        except ValueError:
            return
        self._size += len(data)
        if not self._is_stream:
            self._parts.append(data)
            return
        for name, payload in self._splitter.feed(data):
            event = self._joiner.feed_data(name, payload)
            if has_content(event):
                self._observation.first_token()
        self.error = self._joiner.error


async def observe(request: Request, app: Application, recorder: EvaluationRecorder, limit: int) -> None:
    """Evaluation capture alone: nothing is changed or refused, no answer waits; what passes is summarised.

    limit: bytes of a body that are looked at. A smaller one is read before it is handed on.
    """
    client = Client(request.receive)
    content, size, receive = None, 0, client.receive
    try:
        body = await client.read(request.headers, limit)
        size = len(body)
        content = decoded_request(decoded(body, request.header(b"content-encoding"), limit))
        client.listen()
    except RefusalError:
        # Too large, or of an encoding that only the application knows: it passes without being understood.
        receive = client.replay
    observation = request.observed_by(recorder, uuid4().hex, content, size, training=False)
    assert observation is not None
    answer = ObservedAnswer(client, request.send, observation, choices=requested_choices(content))
    error: BaseException | None = None
    try:
        await app(request.scope, receive, answer.send)
    except BaseException as raised:
        error = raised
        raise
    finally:
        gone = client.gone
        client.close()
        await observation.end(answer=answer.seen(), error=error or answer.error, client_gone=gone)
