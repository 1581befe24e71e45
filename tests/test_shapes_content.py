"""What stands beside the ids (items, weights, routed experts) is kept as it is and never costs a record."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tokcap.capture.shapes import ParsedChoice, parse_answer

from . import shape_examples
from .shape_examples import npy


def choice_with(message: dict[str, Any] | None = None, **changes: Any) -> ParsedChoice:
    payload = shape_examples.vllm_chat()
    payload["choices"][0].update(changes)
    if message is not None:
        payload["choices"][0]["message"] = {"role": "assistant", **message}
    (choice,) = parse_answer(payload).choices
    return choice


def tool_call(number: int, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": f"f{number}", "arguments": arguments}}


def kinds(choice: ParsedChoice) -> list[str]:
    return [item["type"] for item in choice.output_items]


# ---- items


def test_items_are_reasoning_then_message_then_a_call_for_each_tool_call() -> None:
    message = {"reasoning": "so", "content": "hi", "tool_calls": [tool_call(1), tool_call(2)]}
    choice = choice_with(message)
    assert kinds(choice) == ["reasoning", "message", "function_call", "function_call"]
    assert [item["call_id"] for item in choice.output_items[2:]] == ["c1", "c2"]
    assert choice.token_item_index == 3


@pytest.mark.parametrize("content", [None, "", []])
def test_empty_content_makes_a_message_only_without_tool_calls(content: object) -> None:
    assert kinds(choice_with({"content": content, "tool_calls": [tool_call(1)]})) == ["function_call"]
    choice = choice_with({"content": content, "tool_calls": []})
    assert kinds(choice) == ["message"]
    assert choice.output_items[0]["content"] == [{"type": "output_text", "text": "", "annotations": []}]


def test_arguments_are_kept_as_they_are_written() -> None:
    arguments = '{"n": 1.0, "big": 1180591620717411303424, "half": "\\ud800"}'
    choice = choice_with({"tool_calls": [tool_call(1, arguments), tool_call(2, {"n": 2**70})]})
    assert [item["arguments"] for item in choice.output_items] == [arguments, {"n": 2**70}]


def test_parts_refusals_and_old_function_calls_are_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    choice = choice_with({"content": [{"type": "text", "text": "a"}, image, "b"], "refusal": "no"})
    (message,) = choice.output_items
    assert [part.get("text") for part in message["content"]] == ["a", None, "b", None]
    assert message["content"][1] == image
    assert message["content"][3] == {"type": "refusal", "refusal": "no"}
    (call,) = choice_with({"function_call": {"name": "f", "arguments": "{}"}}).output_items
    assert (call["name"], call["arguments"]) == ("f", "{}")
    both = {"function_call": {"name": "f", "arguments": "{}"}, "tool_calls": [tool_call(1)]}
    assert [item["name"] for item in choice_with(both).output_items] == ["f1"]


@pytest.mark.parametrize("calls", ["x", [None], [{"function": None}], {"a": 1}])
def test_malformed_tool_calls_cost_nothing_else(calls: object) -> None:
    assert choice_with({"content": "hi", "tool_calls": calls}).output_items[0]["content"][0]["text"] == "hi"


# ---- weights


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "v7", "start": 0, "end": 1}],
        [{"version": "v7", "start": 1, "end": 2}],
        [{"version": "v7", "start": 0, "end": 3}],
        [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 0, "end": 2}],
        [{"version": "v7", "start": 0, "end": 3}, {"version": "v8", "start": 3, "end": 2}],
        [{"version": None, "start": 0, "end": 2}],
        [{"version": "v7", "start": "0", "end": 2}],
        [{"version": "v7", "start": 0, "end": -2}],
        [5],
        "v7",
    ],
)
def test_spans_that_do_not_cover_the_generation_are_noted_instead(spans: object) -> None:
    choice = choice_with(weight_versions=spans)
    assert choice.policy_versions == []
    assert choice.extra["weight_versions"] == spans


def test_label_without_spans_makes_no_span() -> None:
    payload = shape_examples.sglang_chat()
    del payload["metadata"]["weight_versions"]
    (choice,) = parse_answer(payload).choices
    assert (choice.policy_versions, choice.extra["weight_version"]) == ([], "v8")


# ---- routed experts


EXPERTS = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (npy(EXPERTS), "npy"),
        (EXPERTS.tolist(), "nested"),
        ("nrlre1:uint16:4x3x2:" + base64.b64encode(EXPERTS.tobytes()).decode(), "nrlre1"),
        ({"data": base64.b64encode(EXPERTS.tobytes()).decode(), "shape": [4, 3, 2], "dtype": "uint16"}, "envelope"),
    ],
)
def test_routed_experts_are_read_from_every_envelope(value: object, form: str) -> None:
    choice = choice_with(routed_experts=value)
    np.testing.assert_array_equal(choice.routed_experts, EXPERTS)
    assert choice.extra["routed_experts_form"] == form
    assert "routed_experts_note" not in choice.extra


def test_rows_of_the_prompt_that_are_given_apart_come_first() -> None:
    payload = shape_examples.vllm_chat()
    payload["prompt_routed_experts"] = EXPERTS[:3].tolist()
    payload["choices"][0]["routed_experts"] = EXPERTS[3:].tolist()
    np.testing.assert_array_equal(parse_answer(payload).choices[0].routed_experts, EXPERTS)


def test_first_row_of_an_envelope_is_noted() -> None:
    part = EXPERTS[1:]
    envelope = {"data": base64.b64encode(part.tobytes()).decode(), "shape": [3, 3, 2], "dtype": "uint16", "start": 1}
    extra = choice_with(routed_experts=envelope).extra
    assert extra["routed_experts_start"] == 1
    assert "routed_experts_note" not in extra
    for wrong in (0, 3):
        note = choice_with(routed_experts={**envelope, "start": wrong}).extra["routed_experts_note"]
        assert note == f"rows {wrong} to {wrong + 3} for 5 ids"


def test_rows_of_another_answer_are_noted() -> None:
    experts = np.zeros((6, 3, 2), np.uint8)
    assert choice_with(routed_experts=npy(experts)).extra["routed_experts_note"] == "6 rows for 5 ids"


@pytest.mark.parametrize(
    "value",
    [
        "not base64",
        "AA!AAAA==",
        "nrlre1:int16:4x3x2:",
        "nrlre1:object:4x3x2:AAAA",
        "nrlre1:what",
        "AAA",
        npy(EXPERTS)[:40],
        npy(EXPERTS.astype(np.float32)),
        [[[1]], [[1, 2]]],
        [["a"]],
        {"data": "", "shape": [1]},
        {"data": "AAAA", "shape": [-5], "dtype": "uint8"},
        {"data": "AAAA", "shape": "x", "dtype": "uint8"},
        5,
        True,
    ],
)
def test_routed_experts_that_cannot_be_read_are_noted_and_cost_nothing(value: object) -> None:
    choice = choice_with(routed_experts=value)
    assert choice.routed_experts is None
    assert choice.extra["routed_experts_note"]
    assert len(choice.generation_token_ids) == 2


def test_routed_experts_at_the_root_belong_to_the_first_choice() -> None:
    payload = shape_examples.sglang_chat()
    payload["sglext"] = {"routed_experts": base64.b64encode(b"\1\0\0\0\2\0\0\0").decode()}
    payload["choices"].append({**payload["choices"][0], "index": 1})
    payload["usage"] = None
    first, second = parse_answer(payload, choices=2).choices
    np.testing.assert_array_equal(first.routed_experts, [1, 2])
    assert second.routed_experts is None
    assert second.policy_versions == []  # the spans at the root are of one choice, too
