"""Whatever a server answers, it is read or refused; and a source that differs in one id never passes."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokcap.capture.shapes import EventSplitter, StreamJoiner, parse_answer
from tokcap.errors import UnusableAnswerError

from .shape_examples import EXAMPLES, IDS, PROMPT, sse

Path = tuple[str | int, ...]

KEYS = st.sampled_from(
    [
        *("choices", "message", "delta", "text", "index", "token_ids", "prompt_token_ids", "response_token_ids"),
        *("generation_token_ids", "generation_log_probs", "logprobs", "content", "token_logprobs", "tokens", "token"),
        *("logprob", "bytes", "rank", "token_id", "top_logprobs", "meta_info", "output_ids", "output_token_logprobs"),
        *("input_token_logprobs", "completion_tokens", "prompt_tokens", "usage", "sglext", "input_ids", "nvext"),
        *("engine_data", "completion_token_ids", "completion_logprobs", "output", "output_messages", "input_messages"),
        *("details", "prefill", "generated_text", "id", "sequences", "finish_reason", "weight_versions", "metadata"),
        *("routed_experts", "prompt_routed_experts", "tool_calls", "function", "reasoning", "type", "status", "error"),
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["token_id:5", "token_id:", "nrlre1:int16:1x1x1:AAA=", "stop", "message", "response.completed"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


def read(payload: Any, choices: int = 1, *, partial: bool = False) -> bool:
    """Whether the answer is taken; False if it is refused."""
    try:
        answer = parse_answer(payload, choices=choices, partial=partial)
    except UnusableAnswerError:
        return False
    assert (answer.evidence == "ids") == bool(answer.choices)
    for choice in answer.choices:
        assert len(choice.generation_log_probs) == len(choice.generation_token_ids)
    return True


def places(value: object, path: Path = ()) -> Iterator[Path]:
    """The path of every value in a payload."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from places(inner, (*path, position))


def at(payload: Any, path: Path) -> Any:
    for key in path:
        payload = payload[key]
    return payload


def with_value(payload: Any, path: Path, value: object) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(payload)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def id_places(payload: Any) -> list[Path]:
    """Where single ids stand: in lists of them, in triples, in objects and in names."""
    found = []
    for path in places(payload):
        value = at(payload, path)
        is_id = type(value) is int and value in (*IDS, *PROMPT)
        named = isinstance(value, str) and value.startswith("token_id:")
        masks = ("sampling_mask", "output_token_sampling_mask", "stop_reason", "matched", "matched_stop")
        if (is_id or named) and not any(key in masks for key in path):
            found.append(path)
    return found


@settings(max_examples=400, deadline=None)
@given(payload=VALUES, choices=st.integers(1, 3), partial=st.booleans())
def test_any_json_is_read_or_refused(payload: Any, choices: int, partial: bool) -> None:
    read(payload, choices, partial=partial)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_in_an_answer_may_be_anything(name: str, data: st.DataObject) -> None:
    payload = EXAMPLES[name][1]()
    path = data.draw(st.sampled_from(list(places(payload))))
    changed = with_value(payload, path, data.draw(VALUES))
    read(changed)
    read([changed], 2)
    read(changed, partial=True)


def several_sources() -> list[str]:
    """The examples in which each id stands in two places or more."""
    return [name for name in EXAMPLES if len(id_places(EXAMPLES[name][1]())) >= 2 * len(IDS) + len(PROMPT)]


def test_examples_with_several_sources_are_found() -> None:
    assert {"vllm_chat_names", "vllm_completions", "vllm_generate", "sglang_chat", "sglang_generate"} <= set(
        several_sources()
    )


@pytest.mark.parametrize("name", several_sources())
@pytest.mark.parametrize("other", [0, 7, 2**31 - 1])
def test_one_id_changed_in_one_of_two_sources_is_always_refused(name: str, other: int) -> None:
    payload = EXAMPLES[name][1]()
    tried = 0
    for path in id_places(payload):
        value = at(payload, path)
        original = value if type(value) is int else int(value.removeprefix("token_id:"))
        twice = sum(
            at(payload, each) in (original, f"token_id:{original}")
            for each in id_places(payload)
            if "top_logprobs" not in each
        )
        if twice < 2 or "top_logprobs" in path:
            continue
        changed = with_value(payload, path, other if type(value) is int else f"token_id:{other}")
        assert not read(changed), path
        tried += 1
    assert tried >= 4


@settings(max_examples=200, deadline=None)
@given(events=st.lists(VALUES, max_size=5), choices=st.integers(1, 2), size=st.integers(1, 50))
def test_any_events_are_joined_or_refused(events: list[Any], choices: int, size: int) -> None:
    joiner = StreamJoiner(choices=choices)
    data = sse(events)
    for start in range(0, len(data), size):
        joiner.feed(data[start : start + size])
    joiner.end_of_stream()
    assert joiner.done
    assert not joiner.complete or joiner.finished
    try:
        answer = joiner.answer()
    except UnusableAnswerError:
        return
    read(answer, choices, partial=not joiner.complete)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_events_do_not_depend_on_how_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    text = data.replace(b"\0", b"\n").replace(b"\1", b"\r").replace(b"\2", b"data:")
    whole, pieces = EventSplitter(), EventSplitter()
    expected = [*whole.feed(text), *whole.end()]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = [event for start, end in itertools.pairwise(bounds) for event in pieces.feed(text[start:end])]
    assert [*found, *pieces.end()] == expected


def split_slowly(stream: bytes) -> list[tuple[str, bytes]]:
    """The events of a stream, line by line."""
    found, data, name = [], [], ""
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf")), b""]:
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode(errors="replace")
        if not line:
            found += [(name, b"\n".join(data))] if data else []
            data, name = [], ""
    return found


@given(
    lines=st.lists(
        st.sampled_from(
            [b"data: 1", b"data: ", b"data", b"data:2", b"event: e", b": x", b"", b"", b"\xef\xbb\xbfdata: 3"]
        ),
        max_size=8,
    ),
    ends=st.lists(st.sampled_from([b"\n", b"\r", b"\r\n"]), min_size=8, max_size=8),
    cuts=st.lists(st.integers(0, 70), max_size=6),
)
def test_events_are_split_as_line_by_line(lines: list[bytes], ends: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(itertools.chain(*zip(lines, ends, strict=False)))
    splitter = EventSplitter()
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [each for start, end in itertools.pairwise(bounds) for each in splitter.feed_raw(stream[start:end])]
    found += splitter.end_raw()
    assert [(name, payload) for name, payload, _ in found if payload is not None] == split_slowly(stream)
    assert b"".join(raw for _, _, raw in found) == stream


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), parts=st.integers(1, 4))
def test_data_of_an_event_comes_back_whole(text: str, parts: int) -> None:
    lines = json.dumps({"text": text}, ensure_ascii=False).replace("\x85", "").split(",", parts)
    event = "".join(f"data: {line}\n" for line in lines) + "\n"
    ((name, data),) = EventSplitter().feed(event.encode("utf-8", "surrogatepass"))
    assert name == ""
    assert data.decode("utf-8", "surrogatepass") == "\n".join(lines)
