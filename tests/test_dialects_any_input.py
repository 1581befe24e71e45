"""Whatever a client sends or an engine answers: requests are translated or refused, answers always come through."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tokcap.dialects import MessagesDialect, ResponsesDialect
from tokcap.errors import UntranslatableError

from .dialect_examples import MESSAGES_ID, RESPONSES_ID, events, json_values, recorded

DIALECTS = [(MessagesDialect(), MESSAGES_ID), (ResponsesDialect(), RESPONSES_ID)]
both = pytest.mark.parametrize(("dialect", "response_id"), DIALECTS, ids=["messages", "responses"])

ROWS = recorded()
REQUESTS = [row["request"] for row in ROWS]
ANSWERS = [row["chat"] for row in ROWS]
CHUNKS = [each for row in ROWS for each in row["chat_stream"] if isinstance(each, dict)]


@st.composite
def damaged(draw: st.DrawFn, documents: list[Any]) -> Any:
    """One of the documents with a value in it replaced, added or taken out."""
    document = json.loads(json.dumps(draw(st.sampled_from(documents))))
    place = document
    while True:
        if isinstance(place, dict) and place:
            key: Any = draw(st.sampled_from(sorted(place)))
        elif isinstance(place, list) and place:
            key = draw(st.integers(0, len(place) - 1))
        else:
            break
        if not isinstance(place[key], (dict, list)) or draw(st.booleans()):
            change = draw(st.sampled_from(["replace", "remove", "add"]))
            if change == "replace":
                place[key] = draw(json_values)
            elif change == "remove":
                del place[key]
            elif isinstance(place, dict):
                place[draw(st.text("abcdefgnopt_", min_size=1))] = draw(json_values)
            break
        place = place[key]
    return document


@both
@given(request=damaged(REQUESTS) | st.dictionaries(st.text(), json_values))
def test_request_is_translated_or_refused_by_name(dialect: Any, response_id: str, request: Any) -> None:
    try:
        chat = dialect.chat_request(request)
    except UntranslatableError as error:
        assert error.field
        return
    assert isinstance(chat["messages"], list)
    assert json.loads(json.dumps(chat)) == chat


@both
@given(answer=damaged(ANSWERS) | st.dictionaries(st.text(), json_values))
def test_answer_is_made_of_anything(dialect: Any, response_id: str, answer: Any) -> None:
    request = {"model": "policy", "include": ["message.output_text.logprobs"]}
    assert dialect.answer(answer, request, response_id=response_id)["id"] == response_id


@both
@given(chunks=st.lists(damaged(CHUNKS) | st.dictionaries(st.text(), json_values), max_size=8))
def test_stream_is_made_of_anything(dialect: Any, response_id: str, chunks: list[Any]) -> None:
    stream = dialect.stream({"model": "policy", "include": ["message.output_text.logprobs"]}, response_id=response_id)
    told = [event for each in chunks for event in stream.feed(each)]
    found = events(b"".join([*told, *stream.end()]))
    assert found[-1]["type"] in ("message_stop", "response.completed", "error", "response.failed")


@both
@given(body=json_values | st.dictionaries(st.sampled_from(["error", "message", "detail", "code"]), json_values))
def test_error_is_made_of_anything(dialect: Any, response_id: str, body: Any) -> None:
    assert isinstance(dialect.error(body, 500)["error"]["message"], str)
