"""Targets: requests on capture URLs with whatever an engine answers, through the whole middleware; and URLs alone."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterable, MutableMapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import unquote

from tests.shape_examples import sse
from tokcap import TokenEntry
from tokcap.asgi import CaptureMiddleware, rollout_base_url
from tokcap.asgi.urls import capture_url
from tokcap.capture.request import requested_choices
from tokcap.capture.shapes import decode_json, parse_answer
from tokcap.errors import FrozenError, InvalidIdError, InvalidOptionError, RetiredError, UnusableAnswerError

from .fuzz_answers import answers, json_document, requests, streams
from .fuzz_input import Choices, Target, changed, require

__all__ = ("TARGETS",)

Message = MutableMapping[str, Any]

_PATIENCE_S = 60.0
_LIMIT = 50_000
"""Bytes of a request."""
_ENGINES = ("vllm", "sglang", "tgi", "trtllm", "other")
_ROUTES = (
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/generate",
        "/inference/v1/generate",
    ),
    *("/v1/chat/completions/", "/generate_stream", "/", "/nothing", "/v1/models", "/invocations"),
)
_TYPES = (
    b"application/json",
    b"text/event-stream; charset=utf-8",
    b"text/plain",
    b"",
    b"application/problem+json",
    b";",
)
_CODINGS = (b"", b"gzip", b"deflate", b"identity", b"br", b"gzip, gzip", b"x" * 300, b"\xff")
_REFUSALS = (400, 409, 410, 413, 415, 422)


class _EngineError(Exception):
    """Raised by the engine in the middle of its answer."""


class _Sink:
    """Remembers what it is told; refuses some rollouts."""

    closed = False

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.stored: list[TokenEntry] = []
        self.settled: list[tuple[str, str]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        if rollout_id in ("frozen", "retired"):
            raise (FrozenError if rollout_id == "frozen" else RetiredError)(f"rollout {rollout_id}")
        require(1 <= choices < 2**31, f"{choices} choices")
        self.begun.append(model_call_id)

    async def put(self, entry: TokenEntry) -> None:
        self.stored.append(entry)

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        self.stored.extend(entries)

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: str, detail: str = "") -> None:
        self.settled.append((model_call_id, outcome))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.settled.append((model_call_id, "lost"))

    async def close(self) -> None:
        """Nothing is open."""


class _Engine:
    """Answers as an input says, whatever it is asked."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        """The body of the request, once it was asked."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.status, self.pieces = 200, [b""]
        self.fails_at = -1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.taken.append(body)
        if self.fails_at == 0:
            raise _EngineError
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for number, piece in enumerate(self.pieces):
            if number + 1 == self.fails_at:
                raise _EngineError
            await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < len(self.pieces)})


@cache
def _apps() -> dict[str, tuple[CaptureMiddleware, _Engine, _Sink]]:
    found = {}
    for name in _ENGINES:
        engine, sink = _Engine(), _Sink()
        app = CaptureMiddleware(engine, {}, sink=sink, engine=name, max_body_bytes=_LIMIT)
        found[name] = (app, engine, sink)
    return found


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _answer(choices: Choices, engine: _Engine) -> bytes:
    """Set what the engine answers; the bytes of it, without content encoding."""
    streamed = choices.byte() % 2 == 1
    if streamed:
        events = list(choices.one_of(streams()))
        for _ in range(choices.byte() % 3):
            events = changed(choices, events)
        body = sse(events, done=choices.byte() % 4 > 0)
        if choices.byte() % 4 == 0:
            at = choices.number(len(body) + 1)
            body = body[:at] + choices.some(9) + body[at + choices.byte() % 5 :]
    else:
        body = json_document(choices, answers())
    engine.status = choices.one_of((200, 200, 200, 200, 201, 204, 302, 400, 404, 429, 500, 503))
    kind = choices.one_of((*(_TYPES[streamed],) * 4, *_TYPES))
    engine.headers = [(b"content-type", kind)] if kind else []
    coding = choices.one_of((*(b"",) * 8, *_CODINGS))
    sent = body
    if coding:
        engine.headers.append((b"Content-Encoding", coding))
        how = choices.byte() % 4
        sent = gzip.compress(body) if how == 0 else zlib.compress(body) if how == 1 else body
    if choices.byte() % 2:
        engine.headers.append((b"content-length", str(len(sent)).encode()))
    engine.headers.append((choices.one_of((b"location", b"x-a", b"x-tokcap-call-id")), choices.some(30)))
    engine.pieces = choices.pieces(sent)
    engine.fails_at = choices.byte() % (len(engine.pieces) + 1) if choices.byte() % 8 == 0 else -1
    return sent


def _request(choices: Choices) -> tuple[str, bytes, list[tuple[bytes, bytes]], bytes]:
    """Route, path, headers and body of a request."""
    rollout = choices.one_of(("r-1", "r-1", "r-1", "r-1", "frozen", "retired", "a%2Fb", "..", "x" * 300, "r%2D1"))
    route = choices.one_of(_ROUTES)
    raw = f"/ng-rollout/{rollout}/training-token-capture{route}".encode()
    body = json_document(choices, requests())
    if choices.byte() % 32 == 0:
        body += b" " * _LIMIT
    headers = [(b"host", b"server"), (b"content-type", b"application/json")]
    coding = choices.one_of((*(b"",) * 12, *_CODINGS))
    if coding:
        headers.append((b"content-encoding", coding))
        if choices.byte() % 2:
            body = gzip.compress(body) if choices.byte() % 4 else gzip.compress(bytes(10 * _LIMIT))
    length = choices.one_of((str(len(body)).encode(), b"", b"-1", b"9" * 400, b"\xb2", b"1 0"))
    headers += [(b"content-length", length)] if length else []
    for name in (b"x-stainless-retry-count", b"idempotency-key", b"authorization", b"x-api-key"):
        if choices.byte() % 4 == 0:
            headers.append((name, choices.one_of((b"1", b"\xb2", b"9" * 5000, choices.some(40)))))
    return route, raw, headers, body


async def _played(
    choices: Choices, app: Any, raw: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> list[Message]:
    sent: list[Message] = []
    pieces = choices.pieces(body)
    over = asyncio.Event()

    async def receive() -> Message:
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": unquote(raw.decode("latin-1")), "raw_path": raw}
    scope |= {"headers": headers, "query_string": choices.some(20), "server": ("server", 80), "scheme": "http"}
    try:
        await app(scope, receive, send)
    finally:
        over.set()
    return sent


async def _checked(choices: Choices) -> None:
    name = choices.one_of(_ENGINES)
    app, engine, sink = _apps()[name]
    told: tuple[list[Any], ...] = (engine.taken, sink.begun, sink.stored, sink.settled)
    for each in told:
        each.clear()
    answer = _answer(choices, engine)
    route, raw, headers, body = _request(choices)
    failed = False
    try:
        sent = await _played(choices, app, raw, headers, body)
    except _EngineError:
        failed, sent = True, []
    asked = bool(engine.taken)
    require(failed == (asked and engine.fails_at >= 0), "the engine's failure is told otherwise")
    if failed:
        require(len(sink.begun) <= 1, "one call")
    else:
        _is_whole(sent)
        if not asked:
            require(sent[0]["status"] in _REFUSALS, f"refused with {sent[0]['status']}")
            require(not sink.stored, "a record of what was never asked")
        else:
            _answered(name, route, engine, answer, sent)
    if asked and sink.begun:
        _recorded(engine, sink, answer)


def _is_whole(sent: Sequence[Message]) -> None:
    require(sent and sent[0]["type"] == "http.response.start", "an answer begins")
    require(all(each["type"] == "http.response.body" for each in sent[1:]), "its body follows")
    ends = [not each.get("more_body", False) for each in sent[1:]]
    require(ends and ends[-1] and sum(ends) == 1, "it ends once")
    body = b"".join(each.get("body", b"") for each in sent[1:])
    lengths = [value for key, value in sent[0]["headers"] if key.lower() == b"content-length"]
    require(all(int(value) == len(body) for value in lengths), f"{lengths} bytes, and {len(body)} are sent")


def _answered(name: str, route: str, engine: _Engine, answer: bytes, sent: Sequence[Message]) -> None:
    require(sent[0]["status"] == engine.status, f"{engine.status} became {sent[0]['status']}")
    body = b"".join(each.get("body", b"") for each in sent[1:])
    translated = route.strip("/") in ("v1/messages", "v1/responses")
    if name in ("trtllm", "other") and not translated:
        require(body == answer, "an answer changed of which nothing has to be taken out")


def _recorded(engine: _Engine, sink: _Sink, answer: bytes) -> None:
    """Every call that began has an end, and what is stored of it is what the engine said."""
    require(len(sink.begun) == 1, "one call")
    require(sink.stored or sink.settled, "a call without an outcome")
    kind = dict(engine.headers).get(b"content-type", b"")
    if not sink.stored or b"json" not in kind or engine.fails_at >= 0:
        return
    try:
        payload = decode_json(answer)
        asked = decode_json(engine.taken[0])
        wanted = parse_answer(payload, choices=requested_choices(asked if isinstance(asked, dict) else None))
    except UnusableAnswerError:
        require(False, "a record of an answer that can't be read")
    except ValueError:
        return  # it was encoded
    ids = {each.choice_index: list(each.generation_token_ids) for each in wanted.choices}
    found = {entry.choice_index: entry.generation_token_ids.tolist() for entry in sink.stored}
    require(ids == found, f"{found} stored, {ids} said")


def _requests(data: bytes) -> None:
    _runner().run(asyncio.wait_for(_checked(Choices(data)), _PATIENCE_S))


def _seeds() -> list[bytes]:
    engines = range(len(_ENGINES))
    whole = [
        bytes([engine, 0, 3, place, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, place % 4, 3, place % 5, 0, 1, 0])
        for engine in engines
        for place in range(0, 16, 2)
    ]
    streamed = [
        bytes([engine, 1, place, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 3, 0, 2, 3, place % 5, 0, 1, 0, 1])
        for engine in engines
        for place in range(len(streams()))
    ]
    return whole + streamed


# ---- URLs


def _urls(data: bytes) -> None:
    choices = Choices(data)
    root = choices.one_of(("", "", "/root", "/r%2Fx", "/ng-rollout"))
    parts = choices.one_of(
        (b"/ng-rollout/r-1/v1", b"/ng-rollout/r-1/training-token-capture/v1", b"/ng%2Drollout/r-1/x", b"/ng-rollout//x")
    )
    at = choices.number(len(parts) + 1)
    raw = root.encode() + parts[:at] + choices.some(60) + parts[at + choices.byte() % 8 :]
    raw = raw.replace(b"?", b"")
    path = unquote(raw.decode("latin-1"))
    scope: dict[str, Any] = {"type": "http", "path": path, "root_path": unquote(root) if choices.byte() % 2 else ""}
    scope["raw_path"] = raw if choices.byte() % 4 else b""
    try:
        url = capture_url(scope)
    except InvalidIdError as error:
        require(len(str(error)) < 500, "a message as long as the URL")
        return
    if url is None:
        return
    require(1 <= len(url.rollout_id) <= 200 and url.rollout_id.isascii(), "an id that can't be one")
    require("/" not in url.rollout_id and url.rollout_id[0] not in ".-_", "an id that leads elsewhere")
    if scope["raw_path"]:
        require(url.root + url.prefix + (url.rest if raw != url.root + url.prefix else b"") == raw, "other bytes")
    require(url.stripped(scope)["raw_path"].startswith(url.root + b"/"), "the rest is a path")
    url.location(choices.some(60), [b"server"])
    base = choices.one_of(("http://server:8000", "https://server/v1", choices.some(30).decode("latin-1")))
    try:
        made = rollout_base_url(base, url.rollout_id)
    except InvalidOptionError:
        return
    again = capture_url({"type": "http", "path": "/" + unquote(made.split("/", 3)[3]) + "/x", "root_path": ""})
    require(base[:4] != "http" or again is None or again.rollout_id == url.rollout_id, "another rollout")


def _url_seeds() -> list[bytes]:
    return [bytes([0, kind, 14, 3, *b"abc", 0, 1, 1, 6, *b"/v1/xy", 0]) for kind in range(4)] + [
        bytes([2, 1, 20, 4, *b"%2F.", 0, 1, 1, 20, *b"http://server/x?a#b", 0])
    ]


TARGETS = (
    Target("requests", "requests on capture URLs, and whatever an engine answers", _requests, _seeds),
    Target("urls", "URLs with the prefix, and redirects", _urls, _url_seeds, 256, 20),
)
