"""Targets: what engines answer, whole and as streams, and what becomes of it in records, views and summaries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from tests import recordings
from tests.dialect_examples import MESSAGES_ID, RESPONSES_ID, recorded
from tests.shape_examples import EXAMPLES, sse
from tests.test_shapes_fuzz import split_slowly
from tests.test_shapes_streams import FINISH, HEAD, OPENING, USAGE, chunk, part
from tokcap import TokenEntry
from tokcap.asgi.asks import asked_of
from tokcap.asgi.engines import Server
from tokcap.asgi.streamed import has_content
from tokcap.asgi.strip import Stripper
from tokcap.capture import CaptureContext
from tokcap.capture.answer import answer_entries, error_status
from tokcap.capture.request import requested_choices, requested_sampling
from tokcap.capture.shapes import EventSplitter, RecentPrompts, StreamJoiner, decode_json, lift, parse_answer
from tokcap.dialects import MessagesDialect, ResponsesDialect
from tokcap.errors import InvalidEntryError, UntranslatableError, UnusableAnswerError
from tokcap.evaluation.entries import entry_of, summary_of
from tokcap.evaluation.summary import begun, ended

from .fuzz_input import Choices, Target, as_json, changed, copied, require

__all__ = ("TARGETS", "answers", "requests", "streams")

_MOST_OF_A_SUMMARY = 256 << 10
"""Bytes; its lists and names are bounded one by one."""


@cache
def answers() -> list[Any]:
    """One whole answer of each shape, and recorded ones."""
    found = [make() for _, make in EXAMPLES.values()]
    for name in ("linear-0", "stream-0"):
        found += [each.response for each in recordings.load(name).calls[:2] if each.response is not None]
    return found


@cache
def streams() -> list[list[Any]]:
    """Events of streams of each dialect."""
    found: list[list[Any]] = [
        [OPENING, chunk(part(delta={"content": "hi"}, token_ids=[6023])), chunk(part(**FINISH)), USAGE],
        [{"type": "message_start", "message": {"id": "m", "content": []}}, {"type": "message_stop"}],
        [{"type": "response.created", "response": {"id": "r"}}, {"type": "response.completed", "response": {}}],
        [{"text": "hi", "meta_info": {"id": "x", "finish_reason": None}, "output_ids": [6023]}],
        [{"token": {"id": 5, "text": "a", "logprob": -0.5}, "generated_text": None}],
        [{**HEAD, "choices": [{"index": 1, "text": "a", "finish_reason": "stop"}]}],
    ]
    call = next(each for each in recordings.load("stream-0").calls if each.sse)
    lines = [line.removeprefix("data: ") for line in call.sse or ()][:6]
    return [*found, [json.loads(line) for line in lines if line != "[DONE]"]]


@cache
def requests() -> list[dict[str, Any]]:
    """Request bodies in each dialect."""
    translated = [row["request"] for row in recorded()][:12]
    more: list[dict[str, Any]] = [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "logprobs": True},
        {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 0, "stream_options": {"include_usage": False}},
        {"input_ids": [1, 2], "sampling_params": {"temperature": 0.5}, "return_logprob": False},
        {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "max_tokens": 4}},
        {"model": "m", "input": [{"type": "message", "role": "user", "content": "hi"}], "tools": [{"name": "t"}]},
    ]
    return [*more, *translated]


_ODD_JSON = (
    *(b"NaN", b"-0", b"1e999", b'"\\ud800"', b"[" * 60, b"1" * 200, b"{}", b"\xef\xbb\xbf{}", b""),
    b'{"a":1,"a":2}',
)


def json_document(choices: Choices, documents: Sequence[Any]) -> bytes:
    """A document of the kind, somehow changed, as JSON; or bytes that are anything."""
    way = choices.byte() % 8
    if way == 0:
        return choices.rest()
    if way == 1:
        return choices.one_of(_ODD_JSON)
    document = choices.one_of(documents)
    for _ in range(choices.byte() % 4):
        document = changed(choices, document)
    text = as_json(document)
    if way == 2:
        at = choices.number(len(text) + 1)
        text = text[:at] + choices.some(8) + text[at + choices.byte() % 8 :]
    return text


# ---- server-sent events


def _events(data: bytes) -> None:
    choices = Choices(data)
    sizes = [1 + choices.byte() % 32 for _ in range(choices.byte() % 8)]
    text = choices.rest().replace(b"\1", b"\r\n").replace(b"\2", b"data: ").replace(b"\3", b"\n\n")
    splitter = EventSplitter()
    bounds = [*itertools.accumulate(sizes, initial=0), len(text) + 1]
    found = [each for start, end in itertools.pairwise(bounds) for each in splitter.feed_raw(text[start:end])]
    found += splitter.end_raw()
    told = [(name, payload) for name, payload, _ in found if payload is not None]
    require(told == split_slowly(text), "other events than line by line")
    require(b"".join(raw for *_, raw in found) == text, "the pieces are not the stream")


def _event_seeds() -> list[bytes]:
    return [
        b"\2\5\7data: 1\n\ndata:2\r\n\r\n",
        b"\0event: e\ndata: x\ndata: y\n\n: keep\n\n",
        b"\3\1\1\1\xef\xbb\xbfdata: 1\r\rdata",
    ]


# ---- streams


def _stream_text(choices: Choices) -> bytes:
    if choices.byte() % 8 == 0:
        return choices.rest()
    events = list(choices.one_of(streams()))
    for _ in range(choices.byte() % 4):
        events = changed(choices, events)
    if choices.byte() % 4 == 0:
        events += choices.one_of(streams())
    text = sse(events, done=choices.byte() % 4 > 0)
    if choices.byte() % 4 == 0:
        at = choices.number(len(text) + 1)
        text = text[:at] + choices.some(12) + text[at + choices.byte() % 8 :]
    return text


def _streams(data: bytes) -> None:
    choices = Choices(data)
    count = 1 + choices.byte() % 3
    text = _stream_text(choices)
    whole = StreamJoiner(choices=count, arrays=choices.byte() % 2 == 1)
    cut = StreamJoiner(choices=count, arrays=choices.byte() % 2 == 1)
    for piece in choices.pieces(text):
        cut.feed(piece)
    whole.feed(text)
    for each in (whole, cut):
        each.end_of_stream()
    require(_joined(whole, count) == _joined(cut, count), "another answer, cut otherwise")
    for _, payload in EventSplitter().feed(text):
        try:
            has_content(decode_json(payload))
        except ValueError:
            continue


def _joined(joiner: StreamJoiner, count: int) -> object:
    """What a stream said, comparable."""
    try:
        answer = joiner.answer()
    except UnusableAnswerError:
        return "contradiction"
    return joiner.complete, joiner.finished, joiner.error is None, _entries(answer, count, partial=not joiner.complete)


def _entries(payload: Any, count: int, *, partial: bool = False) -> object:
    """The records of an answer, or why there are none. A record that is made can be stored as it is."""
    try:
        parsed = parse_answer(payload, choices=count, partial=partial)
    except UnusableAnswerError:
        return "refused"
    require((parsed.evidence == "ids") == bool(parsed.choices), "choices without ids")
    context = CaptureContext("r-1", "c-1", _NoSink())
    try:
        made = answer_entries(context, parsed, aborted=partial)
    except InvalidEntryError as error:
        return f"invalid: {error}"
    return [_comparable(entry) for entry in made]


class _NoSink:
    """Nothing is ever put."""

    async def put(self, entry: TokenEntry) -> None:
        raise AssertionError("put")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        raise AssertionError("mark_incomplete")

    async def close(self) -> None:
        """Nothing is open."""


def _comparable(entry: TokenEntry) -> object:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__ if name != "created_at"}
    return repr({name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()})


def _stream_seeds() -> list[bytes]:
    return [bytes([0, 1, kind, 0, 1, 1, 1, 0, 0, 3, 0, 5, 1, 7]) for kind in range(len(streams()))] + [
        b"\0\0data: {}\n\n\1\2",
        bytes([1, 1, 0, 2, 1, 1, 5, 4, 3, 0, 1, 1, 9, 5]),
    ]


# ---- whole answers


def _whole(data: bytes) -> None:
    choices = Choices(data)
    body = json_document(choices, answers())
    try:
        payload = decode_json(body)
    except ValueError:
        return
    read = RecentPrompts().of("r-1")
    lifted, _ = lift(body, read)
    require(repr(_plain(lifted)) == repr(payload), "ids that were lifted are others")
    error_status(payload)
    count = 1 + choices.byte() % 3
    _entries(payload, count)
    _entries(payload, count, partial=True)
    request = copied(choices.one_of(requests()))
    server = Server(engine=choices.one_of(("vllm", "sglang", "tgi", "trtllm", "other")))
    asked = asked_of(server, choices.one_of(("chat", "completions", "vllm-generate", "native-generate")), request)
    stripper = Stripper(asked, msgspec.UNSET)
    stripper.answer(copied(payload))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _whole_seeds() -> list[bytes]:
    return [bytes([3, place, 1, 7, 3, 1, 5, 40, 0]) for place in range(len(EXAMPLES))] + [b"\0{}", b"\1\4"]


# ---- the other dialects


def _dialects(data: bytes) -> None:
    choices = Choices(data)
    dialect: Any = choices.one_of((MessagesDialect(), ResponsesDialect()))
    response_id = MESSAGES_ID if isinstance(dialect, MessagesDialect) else RESPONSES_ID
    request = _decoded(json_document(choices, requests()))
    if isinstance(request, dict):
        requested_sampling(request)
        require(requested_choices(request) >= 1, "no choice is asked for")
        try:
            chat = dialect.chat_request(request)
        except UntranslatableError as error:
            require(error.field, "refused without a field")
        else:
            require(isinstance(chat["messages"], list), "a chat request without messages")
    else:
        request = {"model": "m"}
    answer = _decoded(json_document(choices, answers()))
    if isinstance(answer, dict):
        require(dialect.answer(answer, request, response_id=response_id)["id"] == response_id, "another id")
    stream = dialect.stream(request, response_id=response_id)
    events = choices.one_of(streams())
    if choices.byte() % 2:
        events = changed(choices, events)
    told = b"".join(each for event in events if isinstance(event, dict) for each in stream.feed(event))
    told += b"".join(stream.end())
    require(split_slowly(told), "a stream without an event")
    require(isinstance(dialect.error(answer, 500)["error"]["message"], str), "an error without words")


def _decoded(body: bytes) -> Any:
    try:
        return decode_json(body)
    except ValueError:
        return None


def _dialect_seeds() -> list[bytes]:
    return [bytes([kind, 3, place, 1, 9, 3, 7, 3, 1, 0, place % 7, 1, 4]) for kind in (0, 1) for place in range(6)]


# ---- summaries


def _summaries(data: bytes) -> None:
    choices = Choices(data)
    request = _decoded(json_document(choices, requests()))
    answer = _decoded(json_document(choices, answers()))
    error = _decoded(json_document(choices, [{"error": {"message": "context length", "code": 400}}, {"detail": []}]))
    summary = begun(
        *("r-1", "c-1"),
        began_at=1.0,
        method=choices.some(20).decode("latin-1"),
        path=choices.some(200).decode("latin-1"),
        dialect=choices.one_of(("chat", "completions", "messages", "other")),
        engine="vllm 0.32",
        request=request if isinstance(request, dict) else None,
        request_bytes=len(data),
        training=True,
        retry_count=choices.byte(),
    )
    summary = ended(
        summary, answer=answer, error=error, status=choices.number(600), latency_s=0.5, outcome="lost", detail="why"
    )
    entry = entry_of(summary, 7)
    require(summary_of(entry) == summary, "a summary that does not come back")
    require(len(msgspec.msgpack.encode(summary)) < _MOST_OF_A_SUMMARY, "a summary without a bound")


def _summary_seeds() -> list[bytes]:
    return [bytes([3, place, 0, 3, place, 0, 3, 0, 0, 4, *b"POST", 2, *b"/x", 1, 200, 1]) for place in range(8)]


TARGETS = (
    Target("events", "server-sent events in any pieces", _events, _event_seeds, 512, 30),
    Target("streams", "streams of any dialect, joined and recorded", _streams, _stream_seeds, weight=3),
    Target("answers", "whole answers, read, lifted, recorded and stripped", _whole, _whole_seeds),
    Target("dialects", "requests and answers of Anthropic messages and Responses", _dialects, _dialect_seeds),
    Target("summaries", "summaries of evaluation capture", _summaries, _summary_seeds),
)
