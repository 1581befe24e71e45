"""A stream is put together into the answer that it would have been, however it was cut into pieces."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from tokcap.capture.shapes import EventSplitter, ParsedChoice, StreamJoiner, parse_answer
from tokcap.errors import UnusableAnswerError

from . import shape_examples
from .shape_examples import IDS, LOG_PROBS, PROMPT, sse

HEAD = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}
USAGE = {**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def part(index: int = 0, delta: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta or {}, "finish_reason": None, **changes}


def chunk(*parts: dict[str, Any], **root: Any) -> dict[str, Any]:
    return {**HEAD, "choices": list(parts), **root}


def token(position: int, index: int = 0, **changes: Any) -> dict[str, Any]:
    """The part of a chunk that brings one sampled token."""
    entry = shape_examples.content()[position]
    delta = {"content": entry["token"]}
    return part(index, delta, logprobs={"content": [entry]}, token_ids=[IDS[position]], **changes)


OPENING = chunk(part(delta={"role": "assistant", "content": ""}), prompt_token_ids=PROMPT, prompt_text=None)
FINISH: dict[str, Any] = {"finish_reason": "stop", "stop_reason": None}


def joined(events: list[dict[str, Any]], *, choices: int = 1, done: bool = True) -> StreamJoiner:
    joiner = StreamJoiner(choices=choices)
    joiner.feed(sse(events, done=done))
    return joiner


def only_choice(joiner: StreamJoiner) -> ParsedChoice:
    (choice,) = parse_answer(joiner.answer()).choices
    return choice


# ---- events


STREAM = [OPENING, chunk(token(0)), chunk(token(1, **FINISH)), USAGE]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_bytes_may_be_split_anywhere_and_lines_end_in_any_way(line_end: bytes, size: int) -> None:
    data = sse(STREAM).replace(b"\n", line_end)
    joiner = StreamJoiner()
    for start in range(0, len(data), size):
        assert not joiner.complete
        joiner.feed(data[start : start + size])
    joiner.end_of_stream()
    assert joiner.complete
    assert joiner.events == 4
    answer = parse_answer(joiner.answer())
    assert answer.shape == "vllm-chat"
    assert answer.choices[0].generation_token_ids.tolist() == IDS
    assert answer.choices[0].generation_log_probs == LOG_PROBS
    assert answer.choices[0].pieces == [b"hi", b"!"]
    assert (answer.response_id, answer.usage_completion_tokens) == ("chatcmpl-x", 2)


def test_comments_other_fields_names_and_several_data_lines_are_understood() -> None:
    joiner = StreamJoiner()
    joiner.feed(b"\xef\xbb\xbf: keep-alive\n\nid: 1\nretry: 5\n\n")
    for event in STREAM:
        first, second = json.dumps(event).split(",", 1)
        joiner.feed(f": keep-alive\nevent: message\ndata: {first},\ndata:{second}\n\n\n".encode())
    joiner.feed(b'event: note\ndata: "an annotation"\n\n')
    joiner.feed(b"data:[DONE]\n\n")
    assert joiner.complete
    assert joiner.events == 4
    assert only_choice(joiner).generation_token_ids.tolist() == IDS


def test_mark_of_utf8_and_carriage_returns_at_the_ends_are_no_data() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b"\xef\xbb\xbfdata: 1\r\r")) == []
    assert list(splitter.feed(b"d")) == [("", b"1")]
    assert list(splitter.feed(b"ata: 2\r")) == []
    assert list(splitter.end()) == [("", b"2")]
    assert list(splitter.end()) == []


def test_last_event_without_a_blank_line_counts_once_the_stream_ends() -> None:
    joiner = StreamJoiner()
    joiner.feed(sse(STREAM, done=False).removesuffix(b"\n\n"))
    assert joiner.events == 3
    joiner.end_of_stream()
    assert joiner.events == 4
    assert joiner.complete


def test_stream_that_ends_in_the_middle_of_an_event_is_not_complete() -> None:
    joiner = StreamJoiner()
    joiner.feed(sse(STREAM, done=False)[:-20])
    joiner.end_of_stream()
    assert joiner.finished
    assert "no JSON" in joiner.error["message"]
    assert not joiner.complete


def test_numbers_and_escapes_that_only_python_writes_are_read() -> None:
    joiner = StreamJoiner()
    first = json.dumps(chunk(token(0))).replace("-0.2", "NaN").replace('"hi"}', '"\\ud800"}')
    joiner.feed(sse([OPENING], done=False) + f"data: {first}\n\n".encode() + sse([chunk(token(1, **FINISH))]))
    choice = only_choice(joiner)
    assert repr(choice.generation_log_probs) == "[nan, -0.01]"
    assert choice.output_items[0]["content"][0]["text"] == "\ud800!"


# ---- complete, finished, error


def test_stream_is_complete_after_the_finish_reason_and_an_end() -> None:
    joiner = joined(STREAM, done=False)
    assert (joiner.finished, joiner.complete) == (True, False)
    joiner.end_of_stream()
    assert joiner.complete
    assert joined(STREAM).complete


def test_stream_without_finish_reason_is_never_complete() -> None:
    joiner = joined(STREAM[:2])
    joiner.end_of_stream()
    assert (joiner.finished, joiner.complete, joiner.error) == (False, False, None)
    assert not joined([]).complete


def test_stream_with_an_error_is_not_complete_and_gives_what_was_seen() -> None:
    error = {"error": {"message": "engine died", "code": 500}}
    joiner = joined([*STREAM[:2], error])
    assert joiner.error == error
    assert not joiner.complete
    answer = parse_answer(joiner.answer(), partial=True)
    assert answer.choices[0].generation_token_ids.tolist() == IDS[:1]
    assert not joined([*STREAM, error]).complete


@pytest.mark.parametrize("data", [b"data: {nonsense\n\n", b"data: 5\n\n", b"event: error\ndata: {}\n\n"])
def test_event_that_is_no_chunk_is_an_error(data: bytes) -> None:
    joiner = StreamJoiner()
    joiner.feed(sse(STREAM, done=False) + data + b"data: [DONE]\n\n")
    assert joiner.error is not None
    assert not joiner.complete
    assert only_choice(joiner).generation_token_ids.tolist() == IDS


# ---- chunks


def test_several_ids_in_a_chunk_and_none_in_others_are_joined_in_order() -> None:
    entries = shape_examples.content()
    events = [OPENING, chunk(part(logprobs={"content": entries}, token_ids=IDS)), chunk(part(**FINISH)), USAGE]
    assert only_choice(joined(events)).generation_log_probs == LOG_PROBS


def test_interleaved_choices_are_kept_apart() -> None:
    opening = [chunk(part(index, {"role": "assistant"}), prompt_token_ids=PROMPT) for index in (0, 1)]
    events = [
        *opening,
        chunk(token(1, 1)),
        chunk(token(0, 0)),
        chunk(token(1, 0, **FINISH), token(0, 1)),
        chunk(token(1, 1, finish_reason="length")),
        {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
    ]
    assert not joined(events[:-2], choices=2).finished
    joiner = joined(events, choices=2)
    assert joiner.complete
    first, second = parse_answer(joiner.answer(), choices=2).choices
    assert first.generation_token_ids.tolist() == IDS
    assert second.generation_token_ids.tolist() == [IDS[1], IDS[0], IDS[1]]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")


def test_null_in_a_later_chunk_takes_nothing_back() -> None:
    spans = [{"version": "v7", "start": 0, "end": 2}]
    late = part(logprobs=None, token_ids=None, weight_versions=None, stop_reason=None)
    last = token(1, finish_reason="stop", stop_reason=7, weight_versions=spans)
    joiner = joined([*STREAM[:2], chunk(last), chunk(late, prompt_token_ids=None), USAGE])
    assert joiner.complete
    choice = only_choice(joiner)
    assert (choice.finish_reason, choice.stop_reason, choice.policy_versions) == ("stop", 7, [("v7", 0, 2)])


def test_stream_is_not_finished_before_all_choices_that_were_asked_for_are() -> None:
    assert not joined(STREAM, choices=2).finished


def test_two_different_prompts_in_a_stream_are_refused() -> None:
    joiner = joined([OPENING, chunk(token(0), prompt_token_ids=[1]), *STREAM[2:]])
    with pytest.raises(UnusableAnswerError, match="two different prompts"):
        joiner.answer()
    first, second = token(0, prompt_token_ids=PROMPT), token(1, prompt_token_ids=[1], **FINISH)
    with pytest.raises(UnusableAnswerError, match="two different prompts for choice 0"):
        joined([chunk(first), chunk(second)]).answer()


def test_hazard_10_chunk_that_a_tool_parser_swallowed_is_noticed() -> None:
    with pytest.raises(UnusableAnswerError, match=r"1 sampled ids, but usage\.completion_tokens is 2"):
        parse_answer(joined([OPENING, STREAM[2], USAGE]).answer())


def test_hazard_09_chunk_without_log_probs_leaves_its_positions_unknown() -> None:
    bare = chunk(part(delta={"content": "hi"}, logprobs=None, token_ids=IDS[:1]))
    choice = only_choice(joined([OPENING, bare, STREAM[2], USAGE]))
    assert choice.generation_log_probs == [None, LOG_PROBS[1]]
    assert choice.pieces is None
    last = chunk(part(token_ids=IDS[1:], **FINISH))
    assert only_choice(joined([OPENING, STREAM[1], last])).generation_log_probs == [LOG_PROBS[0], None]
    choice = only_choice(joined([OPENING, bare, last]))
    assert (choice.generation_log_probs, choice.log_probs_present) == ([None, None], False)


def test_hazard_09_a_chunk_with_fewer_log_probs_than_ids_leaves_its_positions_unknown_and_no_others() -> None:
    events = [
        OPENING,
        chunk(part(logprobs={"content": shape_examples.content()[:1]}, token_ids=[11])),
        chunk(part(logprobs={"content": shape_examples.content()[:1]}, token_ids=IDS, **FINISH)),
    ]
    (choice,) = parse_answer(joined(events).answer()).choices
    known = shape_examples.content()[0]["logprob"]
    assert list(choice.generation_log_probs) == [known, *[None] * len(IDS)]
    assert choice.log_probs_present


def test_hazard_09_a_chunk_with_more_log_probs_than_ids_is_refused() -> None:
    long = chunk(part(logprobs={"content": shape_examples.content()}, token_ids=IDS[:1], **FINISH))
    with pytest.raises(UnusableAnswerError, match="gives 2 log-probs, but there are 1"):
        parse_answer(joined([OPENING, long]).answer())


@pytest.mark.parametrize("odd", ["x", 5, 1.5, True, {"a": 1}])
@pytest.mark.parametrize("key", ["token_ids", "response_token_ids", "sampling_mask"])
def test_no_value_of_an_event_makes_the_joiner_raise(key: str, odd: Any) -> None:
    joiner = StreamJoiner()
    values: tuple[Any, ...] = (odd, [5], odd)
    for value in values:
        fields: dict[str, Any] = {key: value}
        joiner.feed_event(chunk(part(**fields)))
    with contextlib.suppress(UnusableAnswerError):
        joiner.answer()
    assert joiner.events == 3


def test_tool_calls_without_an_index_are_told_apart_by_their_ids_or_names() -> None:
    def deltas(*calls: dict[str, Any]) -> Any:
        events = [OPENING, *(chunk(part(delta={"tool_calls": [call]})) for call in calls), chunk(part(**FINISH))]
        return joined(events).answer()["choices"][0]["message"]["tool_calls"]

    by_id = deltas(
        {"id": "a", "function": {"name": "f", "arguments": "{"}},
        {"function": {"arguments": "}"}},
        {"id": "b", "function": {"name": "g", "arguments": '{"x":1}'}},
    )
    assert [(call["id"], call["function"]) for call in by_id] == [
        ("a", {"name": "f", "arguments": "{}"}),
        ("b", {"name": "g", "arguments": '{"x":1}'}),
    ]
    by_name = deltas({"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "f", "arguments": "[]"}})
    assert [call["function"]["arguments"] for call in by_name] == ["{}", "[]"]


def test_tool_calls_reasoning_and_weights_are_joined() -> None:
    def call(index: int, **function: Any) -> dict[str, Any]:
        head = {"id": f"c{index}", "type": "function"} if "name" in function else {}
        return {"index": index, "function": function, **head}

    events = [
        OPENING,
        chunk(part(delta={"reasoning": "s"})),
        chunk(part(delta={"reasoning": "o", "tool_calls": [call(0, name="f", arguments="")]})),
        chunk(part(delta={"tool_calls": [call(1, name="g", arguments='{"a"')]}, token_ids=IDS[:1])),
        chunk(part(delta={"tool_calls": [call(0, arguments="{"), call(1, arguments=":1}")]})),
        chunk(part(delta={"tool_calls": [call(0, arguments="}")]})),
        chunk(
            part(
                token_ids=IDS[1:],
                finish_reason="tool_calls",
                weight_versions=[{"version": "v7", "start": 0, "end": 2}],
            )
        ),
    ]
    choice = only_choice(joined(events))
    assert [item["type"] for item in choice.output_items] == ["reasoning", "function_call", "function_call"]
    assert choice.output_items[0]["content"][0]["text"] == "so"
    assert [(item["call_id"], item["name"], item["arguments"]) for item in choice.output_items[1:]] == [
        ("c0", "f", "{}"),
        ("c1", "g", '{"a":1}'),
    ]
    assert choice.policy_versions == [("v7", 0, 2)]


def test_joining_changes_no_event_that_it_was_given() -> None:
    events = [OPENING, *STREAM[1:]]
    before = json.dumps(events)
    joiner = StreamJoiner()
    for event in events:
        joiner.feed_event(event)
    joiner.answer()
    assert json.dumps(events) == before


def test_stream_of_nothing_is_an_empty_answer() -> None:
    assert StreamJoiner().answer() == {}
    assert parse_answer(StreamJoiner().answer()).evidence == "none"


# ---- the bytes of events


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_the_bytes_of_all_events_are_the_stream(line_end: bytes, size: int) -> None:
    data = b": hello\n\nevent: a\ndata: 1\n: inside\ndata: 2\n\n\n: a comment\ndata: {}\n\nid: 7\n\ndata: [DONE]\n\n"
    data = (data + b"data: left").replace(b"\n", line_end)
    splitter = EventSplitter()
    pieces = [piece for start in range(0, len(data), size) for piece in splitter.feed_raw(data[start : start + size])]
    pieces += splitter.end_raw()
    assert b"".join(raw for _, _, raw in pieces) == data
    events = [(name, payload) for name, payload, _ in pieces if payload is not None]
    assert events == [("a", b"1\n2"), ("", b"{}"), ("", b"[DONE]"), ("", b"left")]


def test_a_comment_between_events_does_not_wait_for_the_next_one() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed_raw(b": keep-alive\n")) == [("", None, b": keep-alive\n")]
    assert list(splitter.feed_raw(b"\ndata: 1\n: not now\n")) == [("", None, b"\n")]
    assert list(splitter.feed_raw(b"\n")) == [("", b"1", b"data: 1\n: not now\n\n")]


# ---- log-probs whose chunk was never sent, as in chat streams of SGLang


def counted(tokens: int, *entries: dict[str, Any]) -> dict[str, Any]:
    """A chunk with log-probs of the last tokens of those that were sampled so far, and without ids."""
    logprobs = {"content": list(entries)} if entries else None
    return chunk(part(delta={"content": "x"}, logprobs=logprobs), usage={"completion_tokens": tokens})


def late_ids(count: int) -> list[dict[str, Any]]:
    return [
        chunk(part(**FINISH)),
        {**HEAD, "choices": [], "sglext": {"input_ids": PROMPT, "output_ids": [list(range(100, 100 + count))]}},
    ]


def entry(log_prob: float) -> dict[str, Any]:
    return {"token": "x", "logprob": log_prob, "bytes": None, "top_logprobs": []}


@pytest.mark.parametrize(
    ("events", "log_probs"),
    [
        # the stop token at the end
        ([counted(1, entry(-1.0)), counted(2, entry(-2.0)), counted(3)], [-1.0, -2.0, None]),
        # a step without text in the middle, one at the beginning, two at once
        ([counted(1, entry(-1.0)), counted(3, entry(-3.0))], [-1.0, None, -3.0]),
        ([counted(3, entry(-3.0))], [None, None, -3.0]),
        ([counted(1, entry(-1.0)), counted(4, entry(-3.0), entry(-4.0))], [-1.0, None, -3.0, -4.0]),
        ([counted(1, entry(-1.0)), counted(2)], [-1.0, None]),
    ],
)
def test_a_count_in_every_chunk_tells_whose_log_probs_are_missing(
    events: list[dict[str, Any]], log_probs: list[float | None]
) -> None:
    choice = only_choice(joined([*events, *late_ids(len(log_probs))]))
    assert choice.generation_log_probs == log_probs


def test_without_a_count_all_log_probs_are_unknown() -> None:
    events = [counted(1, entry(-1.0)), counted(2, entry(-2.0))]
    del events[1]["usage"]
    assert only_choice(joined([*events, *late_ids(3)])).generation_log_probs == [None, None, None]


def test_a_count_that_contradicts_the_log_probs_is_no_guess() -> None:
    events = [counted(2, entry(-1.0), entry(-2.0)), counted(2, entry(-3.0))]
    with pytest.raises(UnusableAnswerError, match="3 log-probs"):
        parse_answer(joined([*events, *late_ids(2)]).answer())
