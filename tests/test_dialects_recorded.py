"""Against vLLM's own routes: the prompt is the same to the token, and the client sees what it would have seen."""

from __future__ import annotations

from typing import Any

import pytest

from tokcap.dialects import dialect_of

from .dialect_examples import MESSAGES_ID, RESPONSES_ID, events, recorded

RECORDED = recorded()
IDS = {"messages": MESSAGES_ID, "responses": RESPONSES_ID}

MINTED = ("id", "item_id", "call_id", "signature", "created_at")
"""Of every answer its own, the ids of tool calls included: vLLM draws them at random."""
ENGINE_KNOWS = ("temperature", "top_p", "max_output_tokens", "presence_penalty", "frequency_penalty", "top_logprobs")
"""What vLLM tells of its defaults where the request doesn't say."""
PER_TURN = ("input_tokens_per_turn", "cached_tokens_per_turn", "output_tokens_per_turn")
OF_OWN_TOOLS = (*PER_TURN, "tool_output_tokens_per_turn", "tool_output_tokens")
"""Counts of tools that vLLM runs itself."""


def comparable(value: Any) -> Any:
    """Without what differs from answer to answer, and without nulls."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    left_out: tuple[str, ...] = OF_OWN_TOOLS
    if value.get("object") == "response":
        left_out += ENGINE_KNOWS
    if value.get("type") == "reasoning":
        left_out += ("status",)  # null in a whole answer, `completed` in a streamed one
    found = {key: comparable(item) for key, item in value.items() if item is not None and key not in left_out}
    for key in MINTED:
        if key in found:
            found[key] = "minted"
    if found.get("type") == "thinking" and found["thinking"] == "":
        found.pop("signature", None)  # vLLM says nothing of it before the end; Anthropic has it empty
    return found


def named(row: dict[str, Any]) -> str:
    return str(row["name"])


@pytest.mark.parametrize("row", RECORDED, ids=named)
def test_request_is_asked_as_it_was_when_the_prompts_were_compared(row: dict[str, Any]) -> None:
    dialect = dialect_of(row["dialect"])
    assert dialect is not None
    assert dialect.chat_request(row["request"]) == row["chat_request"]


@pytest.mark.parametrize("row", RECORDED, ids=named)
def test_engine_renders_the_same_prompt_and_samples_alike(row: dict[str, Any]) -> None:
    assert len(row["prompt"]) > 10
    assert row["chat_prompt"] == row["prompt"]
    assert row["chat_sampling_params"] == row["sampling_params"]


@pytest.mark.parametrize("row", RECORDED, ids=named)
def test_answer_is_what_the_engine_itself_answers(row: dict[str, Any]) -> None:
    dialect = dialect_of(row["dialect"])
    assert dialect is not None
    answer = dialect.answer(row["chat"], row["request"], response_id=IDS[row["dialect"]])
    expected = row["answer"]
    for key in ("tools",):  # vLLM writes out every field that a tool could have
        if key in expected:
            assert [tool["name"] for tool in answer[key]] == [tool["name"] for tool in expected[key]]
            answer[key] = expected[key]
    assert comparable(answer) == comparable(expected)


@pytest.mark.parametrize("row", RECORDED, ids=named)
def test_stream_has_the_events_of_the_engine_itself(row: dict[str, Any]) -> None:
    dialect = dialect_of(row["dialect"])
    assert dialect is not None
    request = {**row["request"], "stream": True}
    stream = dialect.stream(request, response_id=IDS[row["dialect"]])
    told: list[bytes] = []
    for each in row["chat_stream"]:
        told += stream.end() if each == "[DONE]" else stream.feed(each)
    expected = row["answer_stream"]
    for event in expected:
        if "response" in event:
            event["response"]["tools"] = row["request"].get("tools", [])
    assert comparable(events(b"".join(told))) == comparable(expected)
