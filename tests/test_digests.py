"""An answer is found again in the request that sends it back, whatever the dialect and the harness made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import load, names
from tokcap.digests import answer_digest, message_digest, request_digests

USER = {"role": "user", "content": "What is the weather in Oslo?"}


class Said(msgspec.Struct):
    """What a model said in one turn."""

    texts: list[str]
    calls: list[tuple[str, Any]]

    @property
    def text(self) -> str:
        return "".join(self.texts)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
names_of_tools = st.sampled_from(["search", "read_file", "shell"])
said = st.builds(
    Said,
    st.lists(st.text(st.characters(exclude_categories=[]), max_size=12), max_size=3),
    st.lists(st.tuples(names_of_tools, arguments), max_size=3),
)
visible = said.filter(lambda turn: bool(turn.text.strip() or turn.calls))


def output_items(turn: Said) -> list[dict[str, Any]]:
    """As a capture stores it."""
    content = [{"type": "output_text", "text": text} for text in turn.texts]
    items: list[dict[str, Any]] = [{"type": "reasoning", "summary": [], "content": [{"text": "hm", "type": "x"}]}]
    items.append({"type": "message", "role": "assistant", "content": content})
    for at, (name, given_) in enumerate(turn.calls):
        call = {
            "type": "function_call",
            "name": name,
            "arguments": json.dumps(given_),
            "call_id": f"chatcmpl-tool-{at}",
        }
        items.append(call)
    return items


def sent_back_as_chat(turn: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    if turn.calls:
        message["tool_calls"] = [
            {"id": f"t{at}", "type": "function", "function": {"name": name, "arguments": reserialised(given_)}}
            for at, (name, given_) in enumerate(turn.calls)
        ]
    return {"messages": [USER, message, {"role": "tool", "tool_call_id": "t0", "content": "11 degrees"}]}


def sent_back_as_chat_parts(turn: Said) -> dict[str, Any]:
    request = sent_back_as_chat(turn)
    message = request["messages"][1]
    message["content"] = [{"type": "text", "text": text} for text in turn.texts]
    message["reasoning_content"] = message["reasoning"] = "let me think"
    return request


def sent_back_stripped(turn: Said) -> dict[str, Any]:
    request = sent_back_as_chat(turn)
    request["messages"][1]["content"] = turn.text.strip()
    return request


def sent_back_to_responses(turn: Said) -> dict[str, Any]:
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{at}",
            "call_id": f"c{at}",
            "name": name,
            "arguments": reserialised(given_),
        }
        for at, (name, given_) in enumerate(turn.calls)
    ]
    content = [{"type": "output_text", "text": text, "annotations": []} for text in turn.texts]
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content},
            *calls,
            {"type": "function_call_output", "call_id": "c0", "output": "11 degrees"},
        ]
    }


def sent_back_to_anthropic(turn: Said) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "thinking", "thinking": "let me think", "signature": "s"}]
    content += [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in turn.texts]
    content += [{"type": "tool_use", "id": "toolu_1", "name": name, "input": given_} for name, given_ in turn.calls]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "11 degrees"}]}
    return {"messages": [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]}


SENT_BACK = [
    sent_back_as_chat,
    sent_back_as_chat_parts,
    sent_back_stripped,
    sent_back_to_responses,
    sent_back_to_anthropic,
]


def reserialised(value: Any) -> str:
    """Other white space, other order of keys, 1 where 1.0 was."""
    return json.dumps(_whole(value), indent=2)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("send_back", SENT_BACK)
@given(turn=visible)
def test_an_answer_sent_back_has_the_digest_of_the_answer(send_back: Callable[[Said], Any], turn: Said) -> None:
    digests = request_digests(send_back(turn))
    assert len(digests) == 4  # settings, user, assistant, tool
    assert answer_digest(output_items(turn)) == digests[2]


@given(turn=visible)
def test_one_conversation_has_the_same_digests_in_every_dialect(turn: Said) -> None:
    assert len({request_digests(send_back(turn))[1:] for send_back in SENT_BACK}) == 1


@given(turn=said, other=said)
def test_another_text_or_another_call_is_another_digest(turn: Said, other: Said) -> None:
    def canonical(what: Said) -> Any:
        calls = [(name, json.dumps(_whole(given_), sort_keys=True)) for name, given_ in what.calls]
        return what.text.strip(), calls

    same = canonical(turn) == canonical(other)
    assert (answer_digest(output_items(turn)) == answer_digest(output_items(other))) == same


@pytest.mark.parametrize("prefix", ["linear-", "long-", "stream-"])
def test_every_recorded_answer_stands_in_the_next_request(prefix: str) -> None:
    found = 0
    for name in names():
        calls = load(name).calls if name.startswith(prefix) else ()
        for call, following in pairwise(calls):
            if call.path != "/v1/chat/completions":
                continue
            text = call.entries[0].output_items[0]["content"]
            item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            digests = request_digests(following.request)
            assert digests.count(answer_digest([item]) or b"") >= 1
            assert digests[-2] == answer_digest([item])
            found += 1
    assert found >= 15


def test_a_history_that_grows_keeps_its_digests() -> None:
    for call, following in pairwise(load("linear-0").calls):
        digests = request_digests(call.request)
        assert request_digests(following.request)[: len(digests)] == digests


def test_an_abandoned_answer_does_not_stand_in_the_request_that_follows() -> None:
    calls = load("retry-mid-0").calls
    abandoned = next(call for call in calls if call.note.startswith("abandoned"))
    item = abandoned.entries[0].output_items[0]
    assert all(answer_digest([item]) not in request_digests(call.request) for call in calls)


@pytest.mark.parametrize(
    "items",
    [
        [],
        [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}],
        [{"type": "message", "role": "assistant", "content": []}],
        [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " \n"}]}],
        [{"role": "assistant", "content": None, "reasoning": "hm"}],
    ],
)
def test_an_answer_without_visible_content_has_no_digest(items: list[dict[str, Any]]) -> None:
    assert answer_digest(items) is None


def test_null_empty_and_absent_content_are_the_same() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "\n", "tool_calls": []},
    ]
    assert len({message_digest(message) for message in messages}) == 1


def test_the_same_visible_answer_with_other_hidden_reasoning_is_the_same() -> None:
    """Hazard 25: digests can't tell them apart, and must not pretend to."""
    one = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
    other = {"role": "assistant", "content": "42", "reasoning_content": "I guess"}
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1.0, "b": [2, 3]}', '{"b":[2,3],"a":1}'),
        ('{"path": "\\u00e9"}', '{"path": "é"}'),
        ("", "{}"),
        ('{"n": 0.0}', '{"n": -0.0}'),
        ('{"a": [1, 2', ' {"a": [1, 2\n'),
    ],
)
def test_arguments_that_mean_the_same_are_the_same(one: str, other: str) -> None:
    assert message_digest(call_message(one)) == message_digest(call_message(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": null}', "{}"),
        ('{"a": " x"}', '{"a": "x"}'),
        ('{"a": [1, 2', '{"a": [1,2'),
        (f'{{"a": {2**69}}}', f'{{"a": {2**69 + 1}}}'),
    ],
)
def test_arguments_that_mean_something_else_are_not(one: str, other: str) -> None:
    assert message_digest(call_message(one)) != message_digest(call_message(other))


def call_message(text: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": text}}],
    }


@pytest.mark.parametrize(
    "text", ['{"a": 1180591620717411303424}', '{"a": "\\ud800"}', "\ud800", "[" * 5000, "1e999", "NaN", "9" * 5000]
)
def test_odd_arguments_do_not_raise(text: str) -> None:
    """Hazard 26, and what else a model may write."""
    item = {"type": "function_call", "name": "f\udfff", "arguments": text, "call_id": "c"}
    named = {"id": "x", "function": {"name": "f\udfff", "arguments": text}}
    assert answer_digest([item]) == message_digest({"role": "assistant", "tool_calls": [named]})
    assert answer_digest([item]) != answer_digest([{**item, "name": "f"}])


def test_the_ids_of_tool_calls_say_nothing() -> None:
    """Hazard 24: harnesses shorten them."""
    message = call_message("{}")
    shortened = {**message, "tool_calls": [{**message["tool_calls"][0], "id": "x1"}]}
    assert message_digest(shortened) == message_digest(message)


def test_a_system_prompt_beside_the_messages_is_a_first_message() -> None:
    chat = request_digests({"messages": [{"role": "system", "content": "Be brief."}, USER]})
    assert request_digests({"system": [{"type": "text", "text": "Be brief."}], "messages": [USER]}) == chat
    assert request_digests({"instructions": "Be brief.", "input": USER["content"]}) == chat
    assert request_digests({"instructions": None, "messages": [USER]}) == (chat[0], chat[2])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "none"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("reasoning_effort", "high"),
    ],
)
def test_tools_and_template_arguments_change_the_first_digest_only(key: str, value: Any) -> None:
    plain, changed = request_digests({"messages": [USER]}), request_digests({"messages": [USER], key: value})
    assert changed[0] != plain[0]
    assert changed[1:] == plain[1:]


def test_what_only_marks_a_prompt_cache_changes_nothing() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    marked = {**tool, "cache_control": {"type": "ephemeral"}}
    assert request_digests({"messages": [USER], "tools": [tool]}) == request_digests(
        {"messages": [USER], "tools": [marked], "temperature": 0.5}
    )


def test_older_words_for_the_same_are_the_same() -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}
    assert message_digest({"role": "function", "name": "f", "content": "done"}) == message_digest(result)
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert message_digest(called) == message_digest(call_message("{}"))


def test_a_refusal_is_what_the_model_said() -> None:
    refused = message_digest({"role": "assistant", "content": None, "refusal": "No."})
    item = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert refused == answer_digest([item])
    assert refused == message_digest({"role": "assistant", "content": "No."})


def test_images_count_and_their_place_does() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "look"}
    contents = [[text], [text, image], [image, text], [text, {**image, "image_url": {"url": "data:,"}}]]
    assert len({message_digest({"role": "user", "content": content}) for content in contents}) == len(contents)


def test_answers_in_a_row_end_at_the_result_of_a_tool() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    digests = request_digests({"input": [message, call, result, message, call]})
    assert digests[1:] == (
        answer_digest([message, call]),
        message_digest({"role": "tool", "content": "done"}),
        answer_digest([message, call]),
    )


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [("Once upon", 1), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["a", "b"], 2), ([], 1), ([1.5], 1), ([2**70], 1)],
)
def test_a_prompt_without_messages_has_one_digest_per_prompt(prompt: Any, messages: int) -> None:
    digests = request_digests({"prompt": prompt})
    assert len(digests) == 1 + messages == len(set(digests))
    assert request_digests({"prompt": prompt}) == digests


def test_token_prompts_differ_by_their_ids() -> None:
    prompts: list[Any] = [[1, 2, 3], [1, 2, 4], [1, 2], [[1, 2], [3]]]
    assert len({request_digests({"prompt": prompt}) for prompt in prompts}) == len(prompts)
    assert request_digests({"input_ids": [1, 2]}) == request_digests({"token_ids": [1, 2]})


@given(body=st.dictionaries(st.sampled_from(["messages", "input", "prompt", "tools", "system"]), json_values))
def test_a_body_that_no_server_takes_has_digests_all_the_same(body: dict[str, Any]) -> None:
    digests = request_digests(body)
    assert digests
    assert all(len(digest) == 16 for digest in digests)


@given(
    st.sampled_from(["user", "assistant", "system", "tool", "function", "", "Ünüsüal"]) | st.none() | st.integers(),
    st.text(st.characters(exclude_categories=[]), max_size=12) | st.sampled_from(["", " ", "\n a \t"]) | st.none(),
    st.sampled_from([{}, {"name": "x"}, {"refusal": "no"}, {"type": "message"}, {"type": "reasoning"}]),
)
def test_a_message_has_its_digest_in_a_request_too(role: Any, content: str | None, more: dict[str, Any]) -> None:
    message = {"role": role, "content": content, **more}
    spelled_out = {**message, "content": [{"type": "text", "text": content}]} if content else message
    for each in (message, spelled_out):
        digests = request_digests({"messages": [USER, each, USER]})
        assert digests[1] == digests[-1] == message_digest(USER)
        assert digests[2:-1] == (() if more.get("type") == "reasoning" else (message_digest(spelled_out),))
