"""OpenAI's `/v1/responses` over chat: what is carried, dropped and refused, and what its client reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import given, settings

from tokcap.dialects import ResponsesDialect, dialect_of, new_response_id
from tokcap.dialects.responses_items import DROPPED as DROPPED_ITEMS
from tokcap.dialects.responses_request import DROPPED
from tokcap.errors import UntranslatableError

from .dialect_examples import (
    RESPONSES_ID,
    call,
    call_delta,
    chat_answer,
    chat_answers,
    chunk,
    cut_up,
    events,
    joined_response,
    served,
    translated,
    usage_chunk,
)

DIALECT = ResponsesDialect()
REQUEST: dict[str, Any] = {"model": "policy", "input": "hi"}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Applies a patch"}
SKY: dict[str, Any] = {
    "type": "namespace",
    "name": "sky",
    "description": "The sky",
    "tools": [{**TOOL, "name": "look"}],
}


def asked(**fields: Any) -> dict[str, Any]:
    return DIALECT.chat_request({**REQUEST, **fields})


def messages_of(*items: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(input=list(items))["messages"]
    return found


def answered(chat: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return DIALECT.answer(chat, {**REQUEST, **fields}, response_id=RESPONSES_ID)


def streamed(*chunks: Mapping[str, Any], **fields: Any) -> bytes:
    return translated(DIALECT.stream({**REQUEST, **fields}, response_id=RESPONSES_ID), chunks)


def message(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts], **more}


def reasoning(*texts: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **more}


def function_call(arguments: str = "{}", call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments, **more}


def output(value: Any = "r", call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value, **more}


# ---- the request


def test_plain_request() -> None:
    assert asked(instructions="S", max_output_tokens=5, temperature=0.5, top_p=0.9, store=False) == {
        "model": "policy",
        "max_tokens": 5,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
    }


def test_request_stays_as_it_was() -> None:
    request = {**REQUEST, "input": [message("user", "a"), function_call(), output()], "tools": [SKY, PATCH]}
    before = json.dumps(request)
    DIALECT.chat_request(request)
    assert json.dumps(request) == before


def test_stream_asks_for_usage() -> None:
    assert asked(stream=True)["stream_options"] == {"include_usage": True}
    assert "stream_options" not in asked()


def test_items_of_one_answer_are_one_message() -> None:
    found = messages_of(
        message("developer", "D"),
        message("user", "a", "b"),
        reasoning("T1", "T2"),
        message("assistant", "x", "y", id="m", status="completed"),
        function_call('{"a": 1.0}'),
        function_call("{", "c2"),
        output("r1"),
        output([{"type": "input_text", "text": "p1"}, {"type": "input_text", "text": "p2"}], "c2"),
        {"role": "user", "content": "z"},
    )
    assert found == [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "reasoning": "T1T2",
            "reasoning_content": "T1T2",
            "content": "xy",
            "tool_calls": [call("add", '{"a": 1.0}', "c1"), call("add", "{", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "tool_call_id": "c2", "content": "p1\np2"},
        {"role": "user", "content": "z"},
    ]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_roles_are_those_of_chat(role: str) -> None:
    assert messages_of({"role": role, "content": "a"}) == [{"role": role, "content": "a"}]
    assert messages_of(message(role, "a")) == [{"role": role, "content": "a"}]


def test_what_only_the_model_calls_is_called_by_the_model() -> None:
    direct = {"type": "direct"}
    assert messages_of(function_call(caller=direct)) == messages_of(function_call())
    assert messages_of(output(caller=direct, name="add", namespace="sky")) == messages_of(output())


def test_what_the_last_message_has_already_begins_another_one() -> None:
    found = messages_of(message("assistant", "a"), message("assistant", "b"), reasoning("T"), function_call())
    assert [each["content"] for each in found] == ["a", "b"]
    assert found[1]["reasoning"] == "T"
    assert found[1]["tool_calls"] == [call("add", "{}", "c1")]
    first, second = messages_of(reasoning("T1"), reasoning("T2"))
    assert (first["reasoning"], second["reasoning"]) == ("T1", "T2")


def test_summary_stands_for_reasoning_that_is_not_there() -> None:
    item = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "S"}]}
    assert messages_of(item)[0]["reasoning"] == "S"
    assert messages_of({**reasoning("T"), "summary": item["summary"]})[0]["reasoning"] == "T"


def test_refusal_was_said() -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages_of(item) == [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    ("item", "goes_on"),
    [
        (message("assistant", "a", status="incomplete"), True),
        (reasoning("a", status="in_progress"), True),
        (message("assistant", "a", status="completed"), False),
        (message("user", "a", status="incomplete"), False),
        (function_call(status="incomplete"), False),
    ],
)
def test_engine_goes_on_with_an_answer_that_is_not_whole(item: dict[str, Any], goes_on: bool) -> None:
    chat = asked(input=[item])
    assert chat.get("continue_final_message", False) is goes_on
    assert chat.get("add_generation_prompt", True) is not goes_on


def test_functions() -> None:
    tool = {**TOOL, "description": "d", "strict": True, "defer_loading": False, "allowed_callers": ["direct"]}
    function = {"name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert asked(tools=[tool])["tools"] == [{"type": "function", "function": function}]
    assert asked(tools=[{"type": "function", "name": "f"}])["tools"][0]["function"] == {"name": "f"}


def test_functions_of_a_namespace_are_shown_under_both_names() -> None:
    chat = asked(tools=[SKY], input=[{**function_call(), "name": "look", "namespace": "sky"}])
    assert chat["tools"][0]["function"]["name"] == "sky__look"
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "sky__look"


def test_custom_tools_are_shown_as_functions_of_one_text() -> None:
    item = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a\n"é"'}
    chat = asked(tools=[PATCH], input=[item, {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}])
    function = chat["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("patch", "Applies a patch")
    assert list(function["parameters"]["properties"]) == ["input"]
    arguments = chat["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"input": item["input"]}
    assert chat["messages"][1] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "sky__look"}}),
        ({"type": "function", "name": "sky__look"}, {"type": "function", "function": {"name": "sky__look"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    assert asked(tools=[TOOL, SKY, PATCH], tool_choice=choice)["tool_choice"] == expected


def test_no_tools_are_no_field() -> None:
    assert {"tools", "tool_choice"} & set(asked(tools=[], tool_choice="auto")) == set()


def test_how_it_is_to_answer() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}
    chat = asked(text={"format": form, "verbosity": "low"}, reasoning={"effort": "high", "summary": "auto"})
    expected = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": expected}
    assert (chat["verbosity"], chat["reasoning_effort"]) == ("low", "high")
    assert asked(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert asked(text={"format": {"type": "text"}}) == asked()
    assert asked(truncation="auto")["truncate_prompt_tokens"] == -1
    assert asked(truncation="disabled") == asked()


def test_log_probs() -> None:
    chat = asked(include=["message.output_text.logprobs"], top_logprobs=3)
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)
    assert asked(top_logprobs=3, include=["reasoning.encrypted_content"]) == asked()


@pytest.mark.parametrize("field", sorted(DROPPED))
def test_what_changes_nothing_is_dropped(field: str) -> None:
    assert asked(**{field: {"any": "thing"}}) == asked()


@pytest.mark.parametrize(
    ("place", "bare"),
    [
        ("message", message("user", "a")),
        ("reasoning", reasoning("a")),
        ("call", function_call()),
        ("output", output()),
    ],
)
def test_what_changes_nothing_in_an_item_is_dropped(place: str, bare: dict[str, Any]) -> None:
    for field in DROPPED_ITEMS[place]:
        assert messages_of({**bare, field: "anything"}) == messages_of(bare)


def test_null_is_not_there() -> None:
    fields = ["instructions", "tools", "tool_choice", "text", "reasoning", "previous_response_id", "store", "include"]
    assert asked(**dict.fromkeys([*fields, "conversation", "prompt", "anything"])) == asked()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"enable_response_messages": True}, "enable_response_messages"),
    ({"request_id": "r"}, "request_id"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "s"}]}, "tools[0].type"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
    ({"tools": [{**TOOL, "output_schema": {"type": "object"}}]}, "tools[0].output_schema"),
    ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format"),
    ({"tools": [{**SKY, "tools": [PATCH]}]}, "tools[0].tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"include": ["everything"]}, "include[0]"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"text": {"format": {"type": "json_object"}}, "include_reasoning": False}, "include_reasoning"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"stream": 1}, "stream"),
    ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type"),
    ({"input": [output([{"type": "input_image", "image_url": "u"}])]}, "input[0].output[0].type"),
    ({"input": [output(5)]}, "input[0].output"),
    ({"input": [reasoning(encrypted_content="x")]}, "input[0].encrypted_content"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [function_call(caller={"type": "program", "caller_id": "p"})]}, "input[0].caller"),
    ({"input": [{**function_call(), "async": True}]}, "input[0].async"),
    ({"input": [message("user", "a", frobnicate=1)]}, "input[0].frobnicate"),
    (
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [{}]}]}]},
        "input[0].content[0].annotations",
    ),
]


@pytest.mark.parametrize(
    ("fields", "field"),
    REFUSED,
    ids=[f"{index}-{case[1]}" for index, case in enumerate(REFUSED)],
)
def test_what_cannot_be_carried_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UntranslatableError, match=re.escape(field)) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("fields", [{"store": False}, {"background": False}, {"context_management": []}])
def test_an_empty_wish_for_what_is_refused_is_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


# ---- the answer


def test_whole_answer() -> None:
    arguments = '{"a": 1.0, "b": 1180591620717411303424}'
    chat = chat_answer({"content": "t", "reasoning": "T", "tool_calls": [call("add", arguments, "c-7")]}, "tool_calls")
    chat["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    chat["usage"]["completion_tokens_details"] = {"reasoning_tokens": 2}
    response = answered(chat, metadata={"a": "b"}, instructions="S", tools=[TOOL], model="alias")
    thought, said, called = response["output"]
    assert [item.pop("id").partition("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "T"}]
    assert said["content"] == [{"type": "output_text", "text": "t", "annotations": [], "logprobs": None}]
    assert (called["call_id"], called["name"], called["arguments"]) == ("c-7", "add", arguments)
    assert (response["id"], response["object"], response["model"]) == (RESPONSES_ID, "response", "policy")
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert (response["metadata"], response["instructions"], response["tools"]) == ({"a": "b"}, "S", [TOOL])
    assert response["created_at"] == 1_800_000_000
    assert response["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("abort", "cancelled", None),
        (None, "completed", None),
    ],
)
def test_status(finish_reason: str | None, status: str, reason: str | None) -> None:
    response = answered(chat_answer({"content": "t"}, finish_reason))
    assert response["status"] == status
    assert (response["incomplete_details"] or {}).get("reason") == reason


def test_refusal_is_a_part_of_its_own() -> None:
    (item,) = answered(chat_answer({"refusal": "no"}))["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "no"}]
    assert joined_response(streamed(chunk({"refusal": "n"}), chunk({"refusal": "o"})))["output"] == [item]


@pytest.mark.parametrize("chat", [{}, {"choices": []}, chat_answer({}), {**chat_answer({}), "usage": None}])
def test_empty_answer_has_no_output(chat: dict[str, Any]) -> None:
    assert answered(chat)["output"] == []


def test_hidden_reasoning_is_left_out() -> None:
    message = {"content": "t", "reasoning": "T"}
    (item,) = answered(chat_answer(message), include_reasoning=False)["output"]
    assert item["type"] == "message"
    stream = streamed(chunk({"reasoning": "T"}), chunk({"content": "t"}), include_reasoning=False)
    assert joined_response(stream)["output"] == [item]
    assert asked(include_reasoning=False) == asked()
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "include_reasoning": False}
    (item,) = answered(chat_answer(message, logprobs={"content": LOG_PROBS}), **wanted)["output"]
    assert item["content"][0]["logprobs"] is None


def test_names_of_a_namespace_come_back_as_they_were_sent() -> None:
    chat = chat_answer({"tool_calls": [call("sky__look", "{}"), call("add", "{}"), call("other__f", "{}")]})
    found = [(item["namespace"], item["name"]) for item in answered(chat, tools=[SKY, TOOL])["output"]]
    assert found == [("sky", "look"), (None, "add"), (None, "other__f")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\n\\ud83d\\ude42"}', "a\n🙂"),
        ("bare text", "bare text"),
        ('{"other": 1}', '{"other": 1}'),
        ("", ""),
    ],
)
def test_input_of_a_custom_tool(arguments: str, expected: str) -> None:
    (item,) = answered(chat_answer({"tool_calls": [call("patch", arguments)]}), tools=[PATCH])["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", expected)
    cut = [call_delta(0, arguments[:7], id="call-1", name="patch"), call_delta(0, arguments[7:])]
    stream = streamed(*(chunk({"tool_calls": [each]}) for each in cut), tools=[PATCH])
    assert joined_response(stream)["output"] == [item]


LOG_PROBS: list[dict[str, Any]] = [
    {"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": [{"token": "u", "logprob": -1.0, "bytes": None}]},
    {"token": "u", "logprob": None, "bytes": [117]},
]


def test_log_probs_of_the_text() -> None:
    wanted = {"include": ["message.output_text.logprobs"]}
    (item,) = answered(chat_answer({"content": "tu"}, logprobs={"content": LOG_PROBS}), **wanted)["output"]
    assert item["content"][0]["logprobs"] == [
        {**LOG_PROBS[0], "top_logprobs": [{"token": "u", "logprob": -1.0, "bytes": []}]},
        {**LOG_PROBS[1], "top_logprobs": []},
    ]
    chunks = [chunk({"content": each["token"]}, logprobs={"content": [each]}) for each in LOG_PROBS]
    stream = streamed(*chunks, **wanted)
    assert joined_response(stream)["output"] == [item]
    deltas = [event["logprobs"] for event in events(stream) if event["type"] == "response.output_text.delta"]
    assert deltas[0] == [{"token": "t", "logprob": -0.5, "top_logprobs": [{"token": "u", "logprob": -1.0}]}]
    (unasked,) = answered(chat_answer({"content": "tu"}, logprobs={"content": LOG_PROBS}))["output"]
    assert unasked["content"][0]["logprobs"] is None


# ---- the stream


def test_events_of_a_stream() -> None:
    answer = chat_answer({"content": "t"})
    found = events(streamed(chunk({"role": "assistant", "content": "t"}), usage_chunk(answer)))
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [found[index]["response"]["status"] for index in (0, 1, -1)] == ["in_progress", "in_progress", "completed"]
    assert found[0]["response"]["usage"] is None
    assert found[-1]["response"]["usage"]["input_tokens"] == 11


def test_events_of_a_call() -> None:
    found = events(streamed(chunk({"tool_calls": [call_delta(0, "{}", id="c", name="add")]})))
    assert [event["type"].removeprefix("response.") for event in found[2:-1]] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert (found[4]["name"], found[4]["arguments"]) == ("add", "{}")


def test_error_in_mid_stream_is_the_end() -> None:
    stream = DIALECT.stream(REQUEST, response_id=RESPONSES_ID)
    stream.feed(chunk({"content": "a"}))
    error, failed = events(b"".join(stream.feed({"error": {"message": "engine is gone", "type": "x", "code": 503}})))
    assert (error["type"], error["code"], error["message"]) == ("error", "503", "engine is gone")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "engine is gone"}
    assert [error["sequence_number"], failed["sequence_number"]] == [5, 6]
    assert stream.feed(chunk({"content": "b"})) == stream.end() == stream.fail("again") == []


def test_more_of_a_whole_call_is_an_error() -> None:
    found = events(
        streamed(
            chunk({"tool_calls": [call_delta(0, "{}", id="c0", name="f")]}),
            chunk({"tool_calls": [call_delta(1, "{}", id="c1", name="g")]}),
            chunk({"tool_calls": [call_delta(0, "}")]}),
            chunk({"content": "more"}),
        )
    )
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]


def test_stream_ends_once() -> None:
    stream = DIALECT.stream(REQUEST, response_id=RESPONSES_ID)
    assert len(stream.end()) == 3
    assert stream.end() == []


@given(st.data())
def test_stream_is_the_answer_however_it_is_cut(data: st.DataObject) -> None:
    answer = data.draw(chat_answers())
    assert joined_response(streamed(*data.draw(cut_up(answer)))) == answered(answer)


@given(st.data())
def test_arguments_survive_however_calls_are_mixed(data: st.DataObject) -> None:
    answer = data.draw(chat_answers())
    mixed = joined_response(streamed(*data.draw(cut_up(answer, interleaved=True))))
    given_calls = answer["choices"][0]["message"].get("tool_calls") or []
    sent = {each["id"]: (each["function"]["name"], each["function"]["arguments"]) for each in given_calls}
    items = [item for item in mixed["output"] if item["type"] == "function_call"]
    assert {item["call_id"]: (item["name"], item["arguments"]) for item in items} == sent


# ---- errors and ids


def test_error_keeps_the_words_of_the_engine() -> None:
    body = {"error": {"message": "why", "type": "BadRequestError", "param": "input", "code": 400}}
    assert DIALECT.error(body, 400) == body
    flat = DIALECT.error({"object": "error", "message": "why"}, 400)
    assert flat == {"error": {"message": "why", "type": "invalid_request_error", "param": None, "code": 400}}
    assert DIALECT.error(None, 500)["error"]["type"] == "server_error"


def test_ids_are_fresh_and_dialects_are_found_by_name() -> None:
    assert re.fullmatch("resp_[0-9a-f]{32}", new_response_id("responses"))
    assert dialect_of("responses") == ResponsesDialect()
    assert DIALECT.name == "responses"


# ---- OpenAI's own client


@contextmanager
def client(**served_as: Any) -> Iterator[openai.OpenAI]:
    with served(DIALECT, RESPONSES_ID, **served_as) as http:
        yield openai.OpenAI(api_key="none", base_url="http://engine/v1", http_client=http, max_retries=0)


AGENT_CHAT = chat_answer(
    {"content": "é🙂", "reasoning": "T", "tool_calls": [call("add", '{"a": 1.0}'), call("add", "{", "call-2")]},
    "tool_calls",
)


def test_client_reads_an_answer() -> None:
    seen: list[dict[str, Any]] = []
    with client(answer=AGENT_CHAT, seen=seen) as openai_client:
        response = openai_client.responses.create(model="policy", input="hi", tools=[TOOL], store=False)  # type: ignore[list-item]
    assert seen[0]["tools"][0]["function"]["name"] == "add"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "é🙂"
    assert response.usage is not None
    assert response.usage.total_tokens == 16


def test_client_sends_back_what_it_read() -> None:
    seen: list[dict[str, Any]] = []
    with client(answer=AGENT_CHAT, seen=seen) as openai_client:
        response = openai_client.responses.create(model="policy", input="hi")
        sent: Any = [{"role": "user", "content": "hi"}, *response.output, output("r", "call-1"), output("r", "call-2")]
        openai_client.responses.create(model="policy", input=sent)
    (said,) = [each for each in seen[-1]["messages"] if each["role"] == "assistant"]
    assert (said["content"], said["reasoning"]) == ("é🙂", "T")
    assert said["tool_calls"] == AGENT_CHAT["choices"][0]["message"]["tool_calls"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_client_joins_a_stream_to_the_answer(data: st.DataObject) -> None:
    answer = data.draw(chat_answers())
    chunks = data.draw(cut_up(answer))
    with client(answer=answer, chunks=chunks) as openai_client:
        whole = openai_client.responses.create(model="policy", input="hi")
        with openai_client.responses.stream(model="policy", input="hi") as stream:
            told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            joined = stream.get_final_response()
    assert told == whole.output_text

    def plain(response: Any) -> Any:
        found = json.loads(response.model_dump_json())
        for item in found["output"]:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return found

    assert plain(joined) == plain(whole)


def test_client_raises_errors() -> None:
    body = {"error": {"message": "context is full", "type": "x", "code": 400}}
    with client(error=(400, body)) as openai_client, pytest.raises(openai.BadRequestError, match="context is full"):
        openai_client.responses.create(model="policy", input="hi")


def test_client_raises_an_error_in_mid_stream() -> None:
    chunks = [chunk({"content": "a"}), {"error": {"message": "engine is gone"}}]
    with (
        client(chunks=chunks) as openai_client,
        pytest.raises(openai.APIError, match="engine is gone"),
        openai_client.responses.stream(model="policy", input="hi") as stream,
    ):
        stream.until_done()
