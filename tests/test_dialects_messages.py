"""Anthropic's `/v1/messages` over chat: what is carried, dropped and refused, and what its client reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anthropic
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tokcap.dialects import MessagesDialect, dialect_of, new_response_id
from tokcap.dialects.messages_request import DROPPED
from tokcap.errors import UntranslatableError

from .dialect_examples import (
    MESSAGES_ID,
    any_arguments,
    call,
    call_delta,
    chat_answer,
    chat_answers,
    chunk,
    cut_up,
    events,
    input_of,
    joined_message,
    json_arguments,
    served,
    translated,
    usage_chunk,
)

DIALECT = MessagesDialect()
REQUEST: dict[str, Any] = {"model": "policy", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://nowhere/a.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}


def asked(**fields: Any) -> dict[str, Any]:
    return DIALECT.chat_request({**REQUEST, **fields})


def messages_of(*messages: Mapping[str, Any], **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(messages=list(messages), **fields)["messages"]
    return found


def answered(chat: Mapping[str, Any]) -> dict[str, Any]:
    return DIALECT.answer(chat, REQUEST, response_id=MESSAGES_ID)


def streamed(*chunks: Mapping[str, Any]) -> bytes:
    return translated(DIALECT.stream(REQUEST, response_id=MESSAGES_ID), chunks)


def user(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: Any = None, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def use(given: Any, call_id: str = "c1", name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given, **more}


# ---- the request


def test_plain_request() -> None:
    assert asked(system="S", temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"]) == {
        "model": "policy",
        "max_tokens": 100,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
    }


def test_request_stays_as_it_was() -> None:
    request = {**REQUEST, "system": [text("S")], "tools": [{"name": "add", "input_schema": {"properties": {}}}]}
    before = json.dumps(request)
    DIALECT.chat_request(request)
    assert json.dumps(request) == before


def test_stream_asks_for_usage_from_the_first_event_on() -> None:
    chat = asked(stream=True)
    assert chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in asked(stream=False)


def test_a_turn_with_tools_and_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": "T", "signature": "s"}
    found = messages_of(
        {"role": "user", "content": "q"},
        assistant(thinking, text("a"), use({"x": 1.0, "ü": 2**70}), use({}, "c2")),
        user(result([text("p1"), text("p2")]), result(call_id="c2"), text("b")),
    )
    assert found == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning": "T",
            "reasoning_content": "T",
            "tool_calls": [call("add", json.dumps({"x": 1.0, "ü": 2**70}), "c1"), call("add", "{}", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "p1\np2"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "b"},
    ]


def test_results_come_before_what_else_the_user_says() -> None:
    roles = [message["role"] for message in messages_of(user(text("b"), result("r")))]
    assert roles == ["tool", "user"]


def test_several_texts_stay_parts() -> None:
    (found,) = messages_of(user(text("a"), text(""), text("b")))
    assert found["content"] == [text("a"), text("b")]


def test_system_blocks_are_joined_without_the_attribution_of_claude_code() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1"), text("S1 "), text("S2", cache_control={"type": "ephemeral"})]
    assert messages_of(user(text("hi")), system=blocks)[0] == {"role": "system", "content": "S1 S2"}


def test_system_messages_within_stay_in_place_or_are_merged() -> None:
    request = {**REQUEST, "system": "S", "messages": [user(text("a")), {"role": "system", "content": "R"}]}
    system, a, reminder = DIALECT.chat_request(request)["messages"]
    assert (system["content"], a["content"], reminder) == ("S", "a", {"role": "system", "content": "R"})
    merged = MessagesDialect(merge_system=True).chat_request(request)["messages"]
    assert merged == [{"role": "system", "content": "SR"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    assert asked(tools=[TOOL], tool_choice=choice)["tool_choice"] == expected
    assert "parallel_tool_calls" not in asked(tools=[TOOL], tool_choice=choice)
    one = asked(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert one["parallel_tool_calls"] is False


def test_tools_have_an_object_as_their_schema() -> None:
    tools = [{"name": "a", "description": "d", "input_schema": {"properties": {}}, "strict": True, "type": "custom"}]
    function = {"name": "a", "description": "d", "parameters": {"properties": {}, "type": "object"}, "strict": True}
    assert asked(tools=tools)["tools"] == [{"type": "function", "function": function}]


def test_no_tools_are_no_field() -> None:
    assert {"tools", "tool_choice"} & set(asked(tools=[], tool_choice={"type": "auto"})) == set()


def test_thinking_and_effort() -> None:
    budget = {"type": "enabled", "budget_tokens": 2000}
    assert asked(max_tokens=4000, thinking=budget)["thinking_token_budget"] == 2000
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert asked(**off)["reasoning_effort"] == "none"
    assert MessagesDialect(disabled_effort="low").chat_request({**REQUEST, **off})["reasoning_effort"] == "low"
    assert asked(thinking={"type": "adaptive"}, output_config={"effort": "max"})["reasoning_effort"] == "max"


def test_output_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}
    assert asked(output_config={"format": form})["response_format"] == expected


def test_edit_that_keeps_all_thinking_edits_nothing() -> None:
    assert asked(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}) == asked()


@pytest.mark.parametrize("field", sorted(DROPPED["request"]))
def test_what_changes_nothing_is_dropped(field: str) -> None:
    assert asked(**{field: {"any": "thing"}}) == asked()


@pytest.mark.parametrize(
    ("place", "bare"),
    [
        ("text", user(text("a"))),
        ("thinking", assistant({"type": "thinking", "thinking": "T"})),
        ("tool_use", assistant(use({}))),
        ("tool_result", user(result("r"))),
    ],
)
def test_what_changes_nothing_in_a_block_is_dropped(place: str, bare: dict[str, Any]) -> None:
    (block,) = bare["content"]
    for field in DROPPED[place]:
        marked = {**bare, "content": [{**block, field: {"any": "thing"}}]}
        assert messages_of(marked) == messages_of(bare)


def test_what_only_the_model_calls_is_called_by_the_model() -> None:
    direct = {"type": "direct"}
    assert messages_of(assistant(use({}, caller=direct))) == messages_of(assistant(use({})))
    tools = [{**TOOL, "allowed_callers": ["direct"], "defer_loading": False, "input_examples": []}]
    assert asked(tools=tools) == asked(tools=[TOOL])


def test_null_is_not_there() -> None:
    assert asked(**dict.fromkeys(["system", "tools", "tool_choice", "thinking", "container", "anything"])) == asked()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    ({"messages": [user(IMAGE)]}, "messages[0].content[0].type"),
    ({"messages": [user(DOCUMENT)]}, "messages[0].content[0].type"),
    ({"messages": [user(result([IMAGE]))]}, "messages[0].content[0].content[0].type"),
    ({"messages": [user(result([{"type": "tool_reference", "tool_name": "add"}]))]}, "content[0].type"),
    ({"messages": [user({"type": "search_result", "content": []})]}, "messages[0].content[0].type"),
    ({"messages": [user(use({}))]}, "messages[0].content[0].type"),
    ({"messages": [assistant(result("r"))]}, "messages[0].content[0].type"),
    ({"messages": [assistant({"type": "redacted_thinking", "data": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [assistant({"type": "server_tool_use", "id": "1", "name": "web_search"})]}, "content[0].type"),
    ({"messages": [assistant(use("x"))]}, "messages[0].content[0].input"),
    ({"messages": [assistant(use({}, caller={"type": "code_execution_20250825", "tool_id": "x"}))]}, "caller"),
    ({"messages": [user(text("a", citations=[{"type": "char_location"}]))]}, "messages[0].content[0].citations"),
    ({"messages": [user(text("a", frobnicate=1))]}, "messages[0].content[0].frobnicate"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"output_config": {"task_budget": 5}}, "output_config.task_budget"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"stream": "yes"}, "stream"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"seed": 1}, "seed"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=[f"{index}-{case[1]}" for index, case in enumerate(REFUSED)])
def test_what_cannot_be_carried_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UntranslatableError, match=re.escape(field)) as caught:
        asked(**fields)
    assert caught.value.field.endswith(field)
    assert str(caught.value).startswith(f"{caught.value.field}: ")


@pytest.mark.parametrize("field", ["container", "mcp_servers", "fallbacks"])
@pytest.mark.parametrize("empty", [[], {}, "", False])
def test_an_empty_wish_for_what_is_refused_is_none(field: str, empty: Any) -> None:
    assert asked(**{field: empty}) == asked()


def test_no_object_is_no_request() -> None:
    with pytest.raises(UntranslatableError, match="expected an object, not array"):
        DIALECT.chat_request([REQUEST])  # type: ignore[arg-type]


# ---- the answer


def test_whole_answer() -> None:
    calls = [call("add", '{"a": 1.0, "b": 1180591620717411303424}', "c-7")]
    chat = chat_answer({"content": "t", "reasoning": "T", "tool_calls": calls}, "tool_calls")
    answer = answered(chat)
    signature = answer["content"][0].pop("signature")
    assert re.fullmatch("[0-9a-f]{32}", signature)
    assert answer == {
        "id": MESSAGES_ID,
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "T"},
            {"type": "text", "text": "t"},
            {"type": "tool_use", "id": "c-7", "name": "add", "input": {"a": 1.0, "b": 2**70}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 11, "output_tokens": 5},
    }


TOOLS_WHOLE = {"tool_calls": [call("add", "{}")]}
TOOLS_CUT = {"tool_calls": [call("add", '{"a": ')]}


@pytest.mark.parametrize(
    ("message", "finish_reason", "stop", "expected"),
    [
        ({"content": "t"}, "stop", None, ("end_turn", None)),
        ({"content": "t"}, "stop", "END", ("stop_sequence", "END")),
        ({"content": "t"}, "stop", 2, ("end_turn", None)),
        ({"content": "t"}, "length", None, ("max_tokens", None)),
        ({"content": "t"}, "length", "END", ("max_tokens", None)),
        ({"content": "t"}, "abort", None, (None, None)),
        ({"content": "t"}, None, None, (None, None)),
        ({"content": "t"}, "content_filter", None, ("refusal", None)),
        ({"refusal": "no"}, "stop", None, ("refusal", None)),
        (TOOLS_WHOLE, "tool_calls", None, ("tool_use", None)),
        (TOOLS_WHOLE, "stop", None, ("tool_use", None)),
        (TOOLS_WHOLE, "tool_calls", "END", ("tool_use", None)),
        (TOOLS_CUT, "tool_calls", "END", ("stop_sequence", "END")),
        (TOOLS_CUT, "length", None, ("max_tokens", None)),
    ],
)
def test_why_it_ended(message: dict[str, Any], finish_reason: str | None, stop: Any, expected: Any) -> None:
    for key in ("stop_reason", "matched_stop"):
        answer = answered(chat_answer(message, finish_reason, **{key: stop}))
        assert (answer["stop_reason"], answer["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" \n", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "cut', {"INVALID_JSON": '{"a": "cut'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str, expected: Any) -> None:
    (block,) = answered(chat_answer({"tool_calls": [call("add", arguments)]}))["content"]
    assert block["input"] == expected


def test_usage_counts_what_no_cache_held() -> None:
    chat = chat_answer({"content": "t"})
    chat["usage"]["prompt_tokens_details"] = {"cached_tokens": 4, "created_cache_tokens": 2}
    expected = {
        "input_tokens": 5,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 2,
        "output_tokens": 5,
    }
    assert answered(chat)["usage"] == expected


@pytest.mark.parametrize(
    "chat",
    [
        {},
        {"choices": []},
        {"choices": [None]},
        chat_answer({}),
        chat_answer({"content": "", "reasoning": None, "tool_calls": None}),
        {**chat_answer({}), "usage": None},
    ],
)
def test_empty_answer_has_one_empty_text(chat: dict[str, Any]) -> None:
    assert answered(chat)["content"] == [{"type": "text", "text": ""}]


def test_only_the_first_choice_counts() -> None:
    chat = chat_answer({"content": "a"})
    chat["choices"].append({"index": 1, "message": {"content": "b"}, "finish_reason": "length"})
    answer = answered(chat)
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": "a"}], "end_turn")


def test_model_is_the_one_that_answered() -> None:
    chat = chat_answer({"content": "a"})
    asked_of_an_alias = {**REQUEST, "model": "alias"}
    assert DIALECT.answer(chat, asked_of_an_alias, response_id=MESSAGES_ID)["model"] == "policy"
    del chat["model"]
    assert DIALECT.answer(chat, asked_of_an_alias, response_id=MESSAGES_ID)["model"] == "alias"


def test_call_without_an_id_gets_one_of_the_answer() -> None:
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "add"}}]
    first, second = answered(chat_answer({"tool_calls": calls}))["content"]
    assert (first["id"], second["id"]) == (f"call_{'0' * 32}_0", f"call_{'0' * 32}_1")
    assert (first["input"], second["input"]) == ({"a": 1}, {})


# ---- the stream


def test_events_of_a_stream() -> None:
    answer = chat_answer({"content": "t"})
    started, *rest = events(streamed(chunk({"role": "assistant", "content": "t"}), usage_chunk(answer)))
    assert started["type"] == "message_start"
    assert started["message"]["content"] == []
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "t"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": None, "stop_sequence": None},
            "usage": {"input_tokens": 11, "output_tokens": 5},
        },
        {"type": "message_stop"},
    ]


def test_first_event_knows_the_prompt() -> None:
    first = {**chunk({"role": "assistant"}), "usage": {"prompt_tokens": 11, "completion_tokens": 0}}
    stream = DIALECT.stream(REQUEST, response_id=MESSAGES_ID)
    (event,) = events(b"".join(stream.feed(first)))
    assert event["message"]["usage"] == {"input_tokens": 11, "output_tokens": 0}


def test_text_is_told_as_it_comes() -> None:
    stream = DIALECT.stream(REQUEST, response_id=MESSAGES_ID)
    told = [events(b"".join(stream.feed(chunk({"content": part}))))[-1] for part in ("a", "b")]
    assert [event["delta"]["text"] for event in told] == ["a", "b"]
    assert "é🙂".encode() in b"".join(stream.feed(chunk({"content": "é🙂"})))
    assert stream.feed(chunk({"content": ""})) == []
    assert stream.feed(chunk()) == []


def test_second_call_is_told_as_it_comes_once_the_first_is_whole() -> None:
    stream = DIALECT.stream(REQUEST, response_id=MESSAGES_ID)
    stream.feed(chunk({"tool_calls": [call_delta(0, '{"a": {"b": 1}', id="c0", name="f")]}))
    held = stream.feed(chunk({"tool_calls": [call_delta(1, "{", id="c1", name="g")]}))
    told = events(b"".join(stream.feed(chunk({"tool_calls": [call_delta(0, "}")]}))))
    assert held == []
    assert [(event["type"], event["index"]) for event in told] == [
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
    ]
    (more,) = events(b"".join(stream.feed(chunk({"tool_calls": [call_delta(1, "}")]}))))
    assert more["delta"] == {"type": "input_json_delta", "partial_json": "}"}


def test_text_within_an_unfinished_call_waits_for_its_end() -> None:
    message = joined_message(
        streamed(
            chunk({"tool_calls": [call_delta(0, '{"a": ', id="c0", name="f")]}),
            chunk({"content": "between"}),
            chunk({"tool_calls": [call_delta(0, "1}")]}),
            chunk({}, finish_reason="tool_calls"),
        )
    )
    assert message["content"] == [
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "between"},
    ]


def test_white_space_behind_a_whole_call_changes_nothing_and_more_is_an_error() -> None:
    opening = [
        chunk({"tool_calls": [call_delta(0, "{}", id="c0", name="f")]}),
        chunk({"tool_calls": [call_delta(1, "{}", id="c1", name="g")]}),
    ]
    message = joined_message(streamed(*opening, chunk({"tool_calls": [call_delta(0, " \n")]})))
    assert [block["input"] for block in message["content"]] == [{}, {}]
    broken = events(streamed(*opening, chunk({"tool_calls": [call_delta(0, "}")]}), chunk({"content": "more"})))
    assert broken[-1]["type"] == "error"


@pytest.mark.parametrize(
    "calls",
    [
        [call_delta(0, '{"a":', id="c0", name="f"), call_delta(0, "1}", id="c0", name="f")],
        [call_delta(0, '{"a":', id="c0", name="f"), call_delta(0, "1}", id="other")],
        [call_delta(0, '{"a":', id="c0"), call_delta(0, "1}", name="f")],
        [call_delta(0, '{"a":', name="f"), call_delta(0, "1}", id="c0")],
        [{"id": "c0", "function": {"name": "f", "arguments": '{"a":'}}, {"function": {"arguments": "1}"}}],
    ],
    ids=["named in every chunk", "other ids later", "name later", "id later", "no index"],
)
def test_servers_name_a_call_in_their_own_ways(calls: list[dict[str, Any]]) -> None:
    message = joined_message(streamed(*(chunk({"tool_calls": [each]}) for each in calls)))
    assert message["content"] == [{"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}}]


def test_calls_that_all_have_number_0_are_told_apart_by_their_ids() -> None:
    calls = [call_delta(0, "{}", id=f"c{number}", name="f") for number in range(3)]
    message = joined_message(streamed(*(chunk({"tool_calls": [each]}) for each in calls)))
    assert [block["id"] for block in message["content"]] == ["c0", "c1", "c2"]


def test_calls_without_index_and_id_are_told_apart_by_their_names() -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("f", "f", "g")]
    message = joined_message(streamed(*(chunk({"tool_calls": [each]}) for each in calls)))
    assert [block["name"] for block in message["content"]] == ["f", "f", "g"]


def test_error_in_mid_stream_is_the_end() -> None:
    stream = DIALECT.stream(REQUEST, response_id=MESSAGES_ID)
    stream.feed(chunk({"content": "a"}))
    (event,) = events(b"".join(stream.feed({"error": {"message": "engine is gone", "code": 503}})))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "engine is gone"}}
    assert stream.feed(chunk({"content": "b"})) == stream.end() == stream.fail("again") == []


def test_stream_ends_once() -> None:
    stream = DIALECT.stream(REQUEST, response_id=MESSAGES_ID)
    assert len(stream.end()) == 5
    assert stream.end() == []


def test_lone_surrogates_are_written_as_json() -> None:
    message = joined_message(streamed(chunk({"content": "a\ud800"}), chunk({"content": "b"})))
    assert message["content"] == answered(chat_answer({"content": "a\ud800b"}))["content"]
    assert message["content"] == [{"type": "text", "text": "a\ud800b"}]


def test_parameters_of_disaggregated_serving_come_back() -> None:
    chat = {**chat_answer({"content": "a"}), "kv_transfer_params": {"block": 2**70}, "ec_transfer_params": None}
    assert answered(chat)["kv_transfer_params"] == {"block": 2**70}
    assert "ec_transfer_params" not in answered(chat)


@given(st.data())
def test_stream_is_the_answer_however_it_is_cut(data: st.DataObject) -> None:
    answer = data.draw(chat_answers())
    chunks = data.draw(cut_up(answer))
    assert joined_message(streamed(*chunks)) == answered(answer)


@given(st.data())
def test_stream_is_the_answer_however_its_calls_are_mixed(data: st.DataObject) -> None:
    answer = data.draw(chat_answers())
    whole, mixed = answered(answer), joined_message(streamed(*data.draw(cut_up(answer, interleaved=True))))

    def by_id(message: dict[str, Any]) -> list[Any]:
        return sorted(message.pop("content"), key=lambda block: str(block.get("id", "")))

    assert by_id(mixed) == by_id(whole)
    # Which call was the last is not the same; whether one that was cut is among them decides here.
    for message in (mixed, whole):
        del message["stop_reason"], message["stop_sequence"]
    assert mixed == whole


@given(any_arguments)
def test_input_is_what_the_arguments_say(arguments: str) -> None:
    (block,) = answered(chat_answer({"tool_calls": [call("add", arguments)]}))["content"]
    assert block["input"] == input_of(arguments)


# ---- errors and ids


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_is_named_by_its_status(status: int, kind: str) -> None:
    found = DIALECT.error(
        {"error": {"message": "why", "type": "BadRequestError", "param": None, "code": status}}, status
    )
    assert found == {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"object": "error", "message": "flat", "code": 400}, "flat"),
        ({"detail": [{"loc": ["body"]}]}, '[{"loc": ["body"]}]'),
        ({"error": {}}, "{}"),
        ("some text", "some text"),
        (None, "status 400"),
    ],
)
def test_error_bodies_of_every_form(body: Any, message: str) -> None:
    assert DIALECT.error(body, 400)["error"]["message"] == message


def test_ids_are_fresh_and_dialects_are_found_by_name() -> None:
    assert re.fullmatch("msg_[0-9a-f]{32}", new_response_id("messages"))
    assert new_response_id("messages") != new_response_id("messages")
    assert dialect_of("messages") == MessagesDialect()
    assert dialect_of("chat") is None
    assert DIALECT.name == "messages"


# ---- Anthropic's own client


@contextmanager
def client(**served_as: Any) -> Iterator[anthropic.Anthropic]:
    with served(DIALECT, MESSAGES_ID, **served_as) as http:
        yield anthropic.Anthropic(api_key="none", base_url="http://engine", http_client=http, max_retries=0)


ASKED: dict[str, Any] = {"model": "policy", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
AGENT_CHAT = chat_answer(
    {"content": "é🙂", "reasoning": "T", "tool_calls": [call("add", '{"a": 1}'), call("add", "{}", "call-2")]},
    "tool_calls",
)


def test_client_reads_an_answer() -> None:
    seen: list[dict[str, Any]] = []
    with client(answer=AGENT_CHAT, seen=seen) as anthropic_client:
        message = anthropic_client.messages.create(**{**ASKED, "tools": [TOOL]})
    assert seen[0]["tools"][0]["function"]["name"] == "add"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 11


def test_client_sends_back_what_it_read() -> None:
    seen: list[dict[str, Any]] = []
    with client(answer=AGENT_CHAT, seen=seen) as anthropic_client:
        message = anthropic_client.messages.create(**ASKED)
        messages = [*ASKED["messages"], {"role": "assistant", "content": message.content}]
        anthropic_client.messages.create(**{**ASKED, "messages": messages})
    (said,) = [each for each in seen[-1]["messages"] if each["role"] == "assistant"]
    assert (said["content"], said["reasoning"]) == ("é🙂", "T")
    assert said["tool_calls"] == [call("add", '{"a": 1}'), call("add", "{}", "call-2")]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_client_joins_a_stream_to_the_answer(data: st.DataObject) -> None:
    answer = data.draw(chat_answers(json_arguments))
    chunks = data.draw(cut_up(answer))
    with client(answer=answer, chunks=chunks) as anthropic_client:
        whole = anthropic_client.messages.create(**ASKED)
        with anthropic_client.messages.stream(**ASKED) as stream:
            told = "".join(stream.text_stream)
            joined = stream.get_final_message()
    assert told == "".join(block.text for block in whole.content if block.type == "text")
    expected = whole.model_dump()
    found = joined.model_dump()
    for block in found["content"]:
        block.pop("parsed_output", None)
    assert found == expected


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, anthropic.BadRequestError),
        (404, anthropic.NotFoundError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
    ],
)
def test_client_raises_errors(status: int, raised: type[anthropic.APIStatusError]) -> None:
    body = {"error": {"message": "context is full", "type": "x", "code": status}}
    with client(error=(status, body)) as anthropic_client, pytest.raises(raised, match="context is full"):
        anthropic_client.messages.create(**ASKED)


def test_client_raises_an_error_in_mid_stream() -> None:
    chunks = [chunk({"content": "a"}), {"error": {"message": "engine is gone"}}]
    with (
        client(chunks=chunks) as anthropic_client,
        pytest.raises(anthropic.APIStatusError, match="engine is gone"),
        anthropic_client.messages.stream(**ASKED) as stream,
    ):
        stream.until_done()
