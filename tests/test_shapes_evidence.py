"""Answers without ids, answers that were cut off, and why an answer ended."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tokcap.capture.shapes import parse_answer

from . import shape_examples
from .shape_examples import IDS, LOG_PROBS
from .test_shapes_rules import chat, only_choice, two_choices

# ---- answers without ids


@pytest.mark.parametrize(
    "payload",
    [
        {"error": {"message": "no", "code": 400}},
        {"id": "x", "choices": []},
        {"id": "x", "choices": None},
        {"count": 1, "tokens": [6004]},
        {"token_ids": [1, 2], "sampling_params": {}},
        {"type": "message", "content": [{"type": "text", "text": "hi"}], "usage": {"output_tokens": 2}},
        [],
        None,
        "text",
        {},
    ],
)
def test_what_is_no_answer_has_no_evidence(payload: Any) -> None:
    answer = parse_answer(payload, choices=2)
    assert (answer.evidence, answer.choices, answer.shape, answer.id_sources) == ("none", [], "", ())


def test_answer_without_ids_has_no_evidence_whatever_its_log_probs_are() -> None:
    payload = chat(token_ids=None)
    payload["prompt_token_ids"] = None
    answer = parse_answer(payload, choices=2)
    assert (answer.evidence, answer.choices) == ("none", [])
    assert (answer.model, answer.response_id, answer.usage_completion_tokens) == ("m", "chatcmpl-x", 2)
    payload["choices"][0]["logprobs"] = {"content": "broken"}
    assert parse_answer(payload).evidence == "none"


# ---- an answer that was cut off


def test_choices_that_were_seen_of_a_partial_answer_are_given() -> None:
    payload = two_choices()
    payload["choices"][1]["token_ids"] = None
    choice = only_choice(payload, choices=3, partial=True)
    assert choice.generation_token_ids.tolist() == IDS
    assert parse_answer(chat(token_ids=None, logprobs=None), partial=True).evidence == "none"


# ---- reasons


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "eos_token", "something new"])
def test_finish_reasons_are_an_open_set(reason: str) -> None:
    assert only_choice(chat(finish_reason=reason)).finish_reason == reason
    assert only_choice(chat(finish_reason={"type": reason, "matched": 7})).finish_reason == reason


def test_missing_finish_reason_is_empty_and_stop_reason_may_be_anything() -> None:
    choice = only_choice(chat(finish_reason=None, stop_reason="</done>"))
    assert (choice.finish_reason, choice.stop_reason) == ("", "</done>")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "cancelled"}, "abort"),
        ({"status": "queued"}, "queued"),
    ],
)
def test_status_of_a_response_is_its_finish_reason(change: dict[str, Any], reason: str) -> None:
    assert only_choice({**shape_examples.vllm_responses(), **change}).finish_reason == reason


def test_log_probs_of_every_value_but_no_other_kind_survive() -> None:
    values = [None, math.nan, -math.inf, math.inf, 0, -9999.0, LOG_PROBS[0]]
    payload = chat(token_ids=list(range(7)), logprobs={"content": [{"logprob": value} for value in values]})
    payload["usage"] = None
    choice = only_choice(payload)
    assert repr(choice.generation_log_probs) == "[None, nan, -inf, inf, 0.0, -9999.0, -0.2]"
    assert choice.clamped == [5]
