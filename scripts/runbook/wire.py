"""The official clients, with all that they send and get kept as it was on the wire."""

from __future__ import annotations

import http.client
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokcap.asgi import rollout_base_url

__all__ = ("Answer", "Clients", "Exchange", "ask", "dumped")

MODEL = "smollm2"
PATIENCE_S = 300.0
"""The very first call with log-probs takes 15 seconds."""
_STREAM = "text/event-stream"
_INCOMPLETE = b"event: response.incomplete"


class Answer(msgspec.Struct):
    """What a server answered."""

    status: int
    content_type: str
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.content_type.startswith(_STREAM)


class Exchange(msgspec.Struct):
    """One captured request of a client, and what it got."""

    rollout: str
    path: str
    """Without the prefix."""
    training: bool
    request: dict[str, Any]
    retry: int
    answer: Answer
    call_id: str = ""
    """`x-tokcap-call-id`."""
    ended: bool = False
    """Whether the last byte was read."""
    dropped: bool = False
    """Whether the answer was taken from the client after it had come."""

    @property
    def whole(self) -> bool:
        """Whether the client has read the answer to its end; of a stream to the event that ends it."""
        if not self.answer.is_stream:
            return self.ended
        last = self.answer.body.rstrip().rpartition(b"\n\n")[2]
        return last.startswith((b"data: [DONE]", b"event: message_stop", b"event: response.completed", _INCOMPLETE))

    @property
    def can_be_repeated(self) -> bool:
        """Whether the engine samples the same if it is asked again."""
        return self.request.get("seed") is not None or self.request.get("temperature") == 0

    def __str__(self) -> str:
        return f"{self.rollout} {self.path} {self.call_id}"


class Clients:
    """Makes clients for one server, and keeps what they exchange with it under capture URLs, in order."""

    def __init__(self, base: str, key: str = "") -> None:
        self.base, self.key = base, key
        self.exchanges: list[Exchange] = []
        self.drops = 0
        """How many of the next answers are lost on their way: the client sees a time-out, after the whole answer."""

    def openai(self, rollout: str, *, training: bool = True, key: str | None = None, root: bool = False) -> Any:
        """`openai.OpenAI`. root: with the base that has no `/v1`, for routes elsewhere."""
        library: Any = importlib.import_module("openai")
        base = rollout_base_url(self.base if root else f"{self.base}/v1", rollout, training)
        return library.OpenAI(
            base_url=base,
            api_key=self._key(key) or "none",
            timeout=PATIENCE_S,
            max_retries=0,
            http_client=self._http(library, rollout, training),
        )

    def anthropic(self, rollout: str, *, training: bool = True, key: str | None = None) -> Any:
        """`anthropic.Anthropic`, which shows its key as vLLM wants it."""
        library: Any = importlib.import_module("anthropic")
        return library.Anthropic(
            base_url=rollout_base_url(self.base, rollout, training),
            auth_token=self._key(key) or "none",
            api_key=None,
            timeout=PATIENCE_S,
            max_retries=0,
            http_client=self._http(library, rollout, training),
        )

    def ask(self, path: str, body: Any) -> Answer:
        """A request without capture, as anybody else sends it."""
        return ask(self.base, path, body, key=self.key)

    def tokens(self, text: str) -> list[int]:
        """The ids of a piece of text, without any at its ends."""
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        ids: list[int] = json.loads(self.ask("/tokenize", body).body)["tokens"]
        return ids

    def save(self, path: Path) -> None:
        """Write all exchanges, one a line, to look at them afterwards."""
        lines = [{**msgspec.structs.asdict(each), "answer": each.answer.body.decode()} for each in self.exchanges]
        path.write_bytes(b"".join(dumped(line) + b"\n" for line in lines))

    def _key(self, key: str | None) -> str:
        return self.key if key is None else key

    def _http(self, library: Any, rollout: str, training: bool) -> Any:
        hook = self._keeping(_http_library(library), rollout, training)
        return library.DefaultHttpxClient(event_hooks={"response": [hook]}, trust_env=False)

    def _keeping(self, http_library: Any, rollout: str, training: bool) -> Callable[[Any], None]:
        def keep(response: Any) -> None:
            request = response.request
            answer = Answer(response.status_code, response.headers.get("content-type", ""))
            exchange = Exchange(
                rollout,
                _below_prefix(request.url.path, rollout, training),
                training,
                json.loads(request.content or b"{}"),
                int(request.headers.get("x-stainless-retry-count", 0)),
                answer,
                response.headers.get("x-tokcap-call-id", ""),
            )
            self.exchanges.append(exchange)
            response.stream = _kept_stream(http_library, response.stream, exchange)
            if self.drops:
                self.drops -= 1
                response.read()
                exchange.dropped = True
                raise http_library.ReadTimeout("the answer is lost", request=request)

        return keep


def ask(base: str, path: str, body: Any, *, key: str = "", method: str = "POST") -> Answer:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE_S)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, None if body is None else dumped(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.getheader("content-type") or "", response.read())
    finally:
        connection.close()


def dumped(body: Any) -> bytes:
    """A body as JSON."""
    return json.dumps(body, ensure_ascii=False).encode()


def _below_prefix(path: str, rollout: str, training: bool) -> str:
    inside = urlsplit(rollout_base_url("http://host", rollout, training)).path
    assert path.startswith(inside), path
    return path[len(inside) :]


def _http_library(client_library: Any) -> Any:
    """httpx or httpx2, as the version of the client library has it."""
    bases = (base.__module__.partition(".")[0] for base in client_library.DefaultHttpxClient.__mro__)
    return importlib.import_module(next(name for name in bases if name.startswith("httpx")))


def _kept_stream(http_library: Any, stream: Any, exchange: Exchange) -> Any:
    """The stream of an answer's bytes, with what passes kept."""

    def read(_: Any) -> Iterator[bytes]:
        for part in stream:
            exchange.answer.body += part
            yield part
        exchange.ended = True

    def close(_: Any) -> None:
        stream.close()

    kind = type("KeptStream", (http_library.SyncByteStream,), {"__iter__": read, "close": close})
    return kind()
