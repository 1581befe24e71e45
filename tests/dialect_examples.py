"""Chat answers in every form in which an engine may stream them, and the dialects' streams put together again."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anthropic
import hypothesis.strategies as st

from tokcap.dialects import ChatTranslation, Dialect

MESSAGES_ID, RESPONSES_ID = "msg_" + "0" * 32, "resp_" + "0" * 32

HTTP: Any = importlib.import_module(
    next(
        name
        for name in (base.__module__.partition(".")[0] for base in anthropic.DefaultHttpxClient.__mro__)
        if name.startswith("httpx")
    )
)
"""The HTTP library of the clients: httpx or httpx2, as their version has it."""


def recorded() -> list[dict[str, Any]]:
    """Requests in both dialects and what vLLM 0.32 made of them, beside our chat request and what it made of that.

    The same model and chat template at temperature 0; the template shows tools, tool calls, reasoning and effort.
    """
    path = Path(__file__).parent / "exchanges" / "vllm-0.32-translation.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# ---- chat answers


def call(name: str, arguments: str, call_id: str = "call-1") -> dict[str, Any]:
    """One tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_answer(message: Mapping[str, Any], finish_reason: str | None = "stop", **of_choice: Any) -> dict[str, Any]:
    """A whole answer as vLLM gives it."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason, **of_choice}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
    }


def chunk(delta: Mapping[str, Any] | None = None, **of_choice: Any) -> dict[str, Any]:
    """One chunk of a stream; without a delta and anything of a choice one that has no choice."""
    choices = [] if delta is None and not of_choice else [{"index": 0, "delta": dict(delta or {}), **of_choice}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_800_000_000, "model": "policy"}
    return {**head, "choices": choices}


def call_delta(index: int, arguments: str, **named: str) -> dict[str, Any]:
    """A fragment of one tool call; `id` and `name` in the first."""
    function = {"arguments": arguments, **({"name": named["name"]} if "name" in named else {})}
    return {"index": index, **({"id": named["id"], "type": "function"} if "id" in named else {}), "function": function}


def usage_chunk(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The last chunk of a stream."""
    return {**chunk(), "usage": answer["usage"]}


_numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
json_arguments = st.builds(
    json.dumps,
    st.dictionaries(st.text(), json_values, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.none() | st.just(1),
)
any_arguments = json_arguments | st.text().filter(lambda text: not text.lstrip().startswith("{")) | st.just("")


@st.composite
def chat_answers(draw: st.DrawFn, arguments: st.SearchStrategy[str] = any_arguments) -> dict[str, Any]:
    """A whole answer: reasoning, text and tool calls, each there or not."""
    message: dict[str, Any] = {}
    for key in (draw(st.sampled_from(["reasoning", "reasoning_content"])), "content"):
        message[key] = draw(st.none() | st.text())
    given = draw(st.lists(arguments, max_size=3))
    if given:
        names = st.text("abcde_", min_size=1)
        message["tool_calls"] = [call(draw(names), each, f"call-{index}") for index, each in enumerate(given)]
    finish_reason = draw(st.sampled_from(["stop", "length", "tool_calls", "abort", "content_filter"]))
    stop = draw(st.none() | st.text(min_size=1) | st.integers(0, 100))
    cached = draw(st.none() | st.integers(0, 11))
    answer = chat_answer(message, finish_reason, stop_reason=stop)
    answer["usage"]["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    return answer


def _cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def cut_up(draw: st.DrawFn, answer: Mapping[str, Any], interleaved: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream that is this answer: cut anywhere, with empty deltas.

    interleaved: the fragments of several tool calls come in any order that keeps that of each.
    """
    (choice,) = answer["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning", "reasoning_content", "content"):
        deltas += [{key: part} for part in _cut(draw, message.get(key) or "")]
    pending = [
        [call_delta(index, part) for part in _cut(draw, each["function"]["arguments"])]
        for index, each in enumerate(message.get("tool_calls") or ())
    ]
    for index, each in enumerate(message.get("tool_calls") or ()):
        first = pending[index][0]
        first |= {"id": each["id"], "type": "function"}
        first["function"]["name"] = each["function"]["name"]
    while any(pending):
        ready = [queue for queue in pending if queue]
        queue = draw(st.sampled_from(ready)) if interleaved else ready[0]
        several = [queue.pop(0) for _ in range(draw(st.integers(1, len(queue))))]
        deltas.append({"tool_calls": several})
    chunks = [chunk(delta, finish_reason=None) for delta in deltas]
    chunks.append(chunk({}, finish_reason=choice["finish_reason"], stop_reason=choice.get("stop_reason")))
    return [*chunks, usage_chunk(answer)]


# ---- streams of the dialects


def translated(stream: ChatTranslation, chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """The whole stream that a client reads."""
    told = [event for each in chunks for event in stream.feed(each)]
    return b"".join([*told, *stream.end()])


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name must be its type."""
    found = []
    for block in stream.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def joined_message(stream: bytes) -> dict[str, Any]:
    """An Anthropic stream as the message that it is, by the rules of its protocol."""
    first, *rest = events(stream)
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    fragments: list[str] = []
    is_open = False
    for event in rest[:-2]:
        content = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(content)
            content.append(event["content_block"])
            fragments, is_open = [], True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(content) - 1
            delta = event["delta"]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                fragments.append(delta["partial_json"])
            else:
                ((key, text),) = delta.items()
                assert kind == f"{key}_delta"
                content[-1][key] += text
        else:
            assert event == {"type": "content_block_stop", "index": len(content) - 1}
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = input_of("".join(fragments))
    assert not is_open
    assert [event["type"] for event in rest[-2:]] == ["message_delta", "message_stop"]
    message.update(rest[-2]["delta"])
    message["usage"].update(rest[-2]["usage"])
    return message


def input_of(arguments: str) -> Any:
    """What `input` is to be for the arguments of a chat tool call."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, parse_constant=lambda name: [][0])
    except (ValueError, IndexError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def joined_response(stream: bytes) -> dict[str, Any]:
    """A Responses stream as the response that its last event holds, which is what the events before it said."""
    found = events(stream)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.completed"
    items: list[dict[str, Any]] = []
    said: dict[int, str] = {}
    is_open = False
    for event in found[2:-1]:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            items.append(event["item"])
            is_open = True
            continue
        assert is_open
        index = event["output_index"]
        assert index == len(items) - 1
        if name == "output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            items[index] = event["item"]
            is_open = False
        elif name.endswith(".delta"):
            said[index] = said.get(index, "") + event["delta"]
        elif not name.startswith("content_part"):
            ((_, whole),) = [(key, event[key]) for key in ("text", "arguments", "refusal", "input") if key in event]
            assert whole == said.get(index, "")
    assert not is_open
    response: dict[str, Any] = found[-1]["response"]
    assert response["output"] == items
    return response


# ---- a server that a client can call


def served(
    dialect: Dialect,
    response_id: str,
    *,
    answer: Mapping[str, Any] | None = None,
    chunks: Sequence[Mapping[str, Any]] = (),
    error: tuple[int, Any] | None = None,
    seen: list[dict[str, Any]] | None = None,
) -> Any:
    """An HTTP client whose server translates what it is asked; the engine behind it answers as given."""

    def handle(request: Any) -> Any:
        body = json.loads(request.content)
        chat = dialect.chat_request(body)
        if seen is not None:
            seen.append(chat)
        if error is not None:
            return HTTP.Response(error[0], json=dialect.error(error[1], error[0]))
        if body.get("stream"):
            stream = translated(dialect.stream(body, response_id=response_id), chunks)
            return HTTP.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
        assert answer is not None
        return HTTP.Response(200, json=dialect.answer(answer, body, response_id=response_id))

    transport: Callable[..., Any] = HTTP.MockTransport
    return HTTP.Client(transport=transport(handle))
