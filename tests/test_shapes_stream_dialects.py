"""Streams of each dialect, also those that repeat everything or bring the ids at the end."""

from __future__ import annotations

from typing import Any

import pytest

from tokcap.capture.shapes import StreamJoiner, parse_answer
from tokcap.errors import UnusableAnswerError

from . import shape_examples
from .shape_examples import IDS, LOG_PROBS, PROMPT, sse
from .test_shapes_streams import FINISH, HEAD, OPENING, USAGE, chunk, joined, only_choice, part

LATE_IDS = {"input_ids": PROMPT, "output_ids": [IDS]}


def text_chunk(position: int) -> dict[str, Any]:
    """A chunk of a chat stream with log-probs and no ids."""
    entry = shape_examples.content()[position]
    finish = FINISH if position else {}
    return chunk(part(delta={"content": entry["token"]}, logprobs={"content": [entry]}, **finish))


def test_completions() -> None:
    columns = shape_examples.columns(names=True)
    events: list[dict[str, Any]] = []
    for position in (0, 1):
        choice = {
            "index": 0,
            "text": ("hi", "!")[position],
            "logprobs": {key: column[position : position + 1] for key, column in columns.items()},
            "finish_reason": "stop" if position else None,
            "prompt_token_ids": None if position else PROMPT,
            "token_ids": IDS[position : position + 1],
        }
        events.append({**HEAD, "object": "text_completion", "choices": [choice]})
    answer = parse_answer(joined([*events, USAGE]).answer())
    assert answer.shape == "vllm-completions"
    assert answer.choices[0].generation_log_probs == LOG_PROBS
    assert answer.choices[0].output_items[0]["content"][0]["text"] == "hi!"
    events[0]["choices"][0]["logprobs"] = None
    assert parse_answer(joined([*events, USAGE]).answer()).choices[0].generation_log_probs == [None, LOG_PROBS[1]]


def test_completions_whose_log_probs_are_all_null_have_them() -> None:
    part = {"index": 0, "text": "hi", "logprobs": {"tokens": ["h", "i"], "token_logprobs": [None, None]}}
    event = {**HEAD, "choices": [{**part, "finish_reason": "stop", "prompt_token_ids": PROMPT, "token_ids": IDS}]}
    choice = only_choice(joined([event]))
    assert (choice.generation_log_probs, choice.log_probs_present) == ([None, None], True)


def test_generate_of_vllm() -> None:
    whole = shape_examples.vllm_generate()
    (choice,) = whole["choices"]
    events = [
        {
            **whole,
            "usage": None,
            "choices": [
                {
                    "index": 0,
                    "token_ids": IDS[position : position + 1],
                    "logprobs": {"content": choice["logprobs"]["content"][position : position + 1]},
                    "sampling_mask": choice["sampling_mask"][position : position + 1],
                    "finish_reason": "stop" if position else None,
                    "weight_versions": choice["weight_versions"] if position else None,
                }
            ],
        }
        for position in (0, 1)
    ]
    found = parse_answer(joined(events).answer())
    assert found.shape == "vllm-generate"
    assert found.choices[0].generation_log_probs == LOG_PROBS
    assert found.choices[0].extra == {"sampling_mask": [[6023, 11], [151645]]}
    assert found.choices[0].policy_versions == [("default", 0, 2)]


@pytest.mark.parametrize(
    ("late", "name"),
    [
        ({**HEAD, "choices": [], "sglext": LATE_IDS}, ""),
        ({"sglext": LATE_IDS}, "sglext_ids"),
        (LATE_IDS, "sglext_ids"),
    ],
)
def test_chat_of_sglang_brings_its_ids_at_the_end(late: dict[str, Any], name: str) -> None:
    joiner = StreamJoiner()
    for event in (chunk(part(delta={"role": "assistant"})), text_chunk(0), text_chunk(1)):
        joiner.feed_event(event)
    joiner.feed_event(late, name)
    joiner.feed_event(USAGE)
    joiner.feed(b"data: [DONE]\n\n")
    assert joiner.complete
    answer = parse_answer(joiner.answer())
    assert answer.shape == "sglang-chat"
    assert answer.id_sources == ("sglext.input_ids", "sglext.output_ids[]")
    assert answer.choices[0].generation_log_probs == LOG_PROBS


def test_chat_of_sglang_that_broke_off_before_the_ids_has_no_evidence() -> None:
    answer = parse_answer(joined([text_chunk(0), text_chunk(1), USAGE]).answer())
    assert (answer.evidence, answer.usage_completion_tokens) == ("none", 2)


def test_snapshot_of_dynamo_in_a_chunk_without_choices() -> None:
    data = shape_examples.dynamo()["nvext"]
    timing = {**HEAD, "choices": [], "nvext": {"timing": 1}}
    events = [text_chunk(0), text_chunk(1), timing, {**HEAD, "choices": [], "nvext": data}, timing, USAGE]
    answer = parse_answer(joined(events).answer())
    assert answer.shape == "dynamo"
    assert answer.choices[0].generation_token_ids.tolist() == IDS
    assert answer.choices[0].pieces == [b"hi", b"!"]


def test_completions_of_trtllm() -> None:
    event = {
        **HEAD,
        "prompt_token_ids": PROMPT,
        "choices": [{"index": 0, "text": "hi", "token_ids": IDS[:1], "finish_reason": None}],
    }
    last = {**HEAD, "choices": [{"index": 0, "text": "!", "token_ids": IDS[1:], "finish_reason": "stop"}]}
    answer = parse_answer(joined([event, last]).answer())
    assert answer.shape == "trtllm-completions"
    assert answer.choices[0].generation_token_ids.tolist() == IDS


# ---- SGLang's own route


def native(ids: list[int], sampled: int | None, **meta: Any) -> dict[str, Any]:
    whole = shape_examples.sglang_generate()["meta_info"]
    triples = [row for row in whole["output_token_logprobs"] if row[1] in ids]
    kept = {"id": "rid", "prompt_tokens": 3, "finish_reason": None}
    text = "".join("hi" if token == IDS[0] else "!" for token in ids)
    return {
        "text": text,
        "output_ids": ids,
        "prompt_token_ids": PROMPT,
        "meta_info": {**kept, "completion_tokens": sampled, "output_token_logprobs": triples, **meta},
    }


STOP = {"finish_reason": {"type": "stop", "matched": 151645}}


@pytest.mark.parametrize(
    "events",
    [
        [native(IDS[:1], 1), native(IDS, 2, **STOP)],
        [native(IDS[:1], 1), native(IDS[1:], 2, **STOP)],
        [native([], 0), native(IDS, 2), native([], 2, **STOP)],
        [native(IDS, 2), native(IDS, 2, **STOP)],
        [native(IDS[:1], None), native(IDS, None, **STOP)],
        [
            native(IDS[:1], 1),
            native(IDS[1:], 2, output_token_logprobs=shape_examples.triples(), **STOP),
        ],
    ],
    ids=["cumulative", "incremental", "empty events", "repeated", "cumulative without counts", "mixed"],
)
def test_generate_of_sglang_is_cumulative_or_incremental(events: list[dict[str, Any]]) -> None:
    joiner = joined(events)
    assert joiner.complete
    answer = parse_answer(joiner.answer())
    assert answer.shape == "sglang-generate"
    assert answer.choices[0].generation_token_ids.tolist() == IDS
    assert answer.choices[0].generation_log_probs == LOG_PROBS
    assert answer.choices[0].output_items[0]["content"][0]["text"] == "hi!"
    assert answer.choices[0].stop_reason == 151645


def test_incremental_stream_keeps_the_events_that_it_was_given() -> None:
    first, last = native(IDS[:1], 1), native(IDS[1:], 2, **STOP)
    joiner = StreamJoiner()
    joiner.feed_event(first)
    joiner.feed_event(last)
    assert (first["output_ids"], last["output_ids"]) == (IDS[:1], IDS[1:])
    assert len(first["meta_info"]["output_token_logprobs"]) == 1


@pytest.mark.parametrize(
    "events",
    [
        [native(IDS[:1], 1), native(IDS[1:], 3, **STOP)],
        [native(IDS[:1], 1), native([5, 6], 2, **STOP)],
        [native(IDS[:1], None), native(IDS[1:], None, **STOP)],
        [{**native(IDS[:1], None), "output_ids": None}, {**native(IDS[1:], None, **STOP), "output_ids": None}],
    ],
    ids=["a part is missing", "other ids than before", "no count and not continued", "log-probs not continued"],
)
def test_generate_of_sglang_that_fits_neither_way_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(UnusableAnswerError, match="of the stream"):
        joined(events).answer()


def test_generate_of_sglang_with_several_choices_gives_a_list() -> None:
    events = [
        {**native(IDS[:1], 1), "index": 1},
        {**native(IDS, 2, **STOP), "index": 0},
        {**native(IDS, 2, **STOP), "index": 1},
    ]
    assert not joined(events[:2], choices=2).finished
    assert not joined(events[1:2], choices=2).finished
    answer = parse_answer(joined(events, choices=2).answer(), choices=2)
    assert [choice.generation_token_ids.tolist() for choice in answer.choices] == [IDS, IDS]


# ---- others


def test_response_is_that_of_the_last_event() -> None:
    whole = shape_examples.vllm_responses()
    item = whole["output"][0]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_x", "output": []}},
        {"type": "response.output_text.delta", "delta": "hi!"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]
    joiner = joined(events, done=False)
    assert not joiner.finished
    assert joiner.answer()["output"] == [item]
    for kind in ("response.completed", "response.incomplete"):
        joiner = joined([*events, {"type": kind, "response": whole}], done=False)
        joiner.end_of_stream()
        assert joiner.complete
        assert parse_answer(joiner.answer()).choices[0].generation_token_ids.tolist() == IDS


def test_failed_response_is_an_error() -> None:
    failed = {"type": "response.failed", "response": {"id": "resp_x", "status": "failed"}}
    joiner = joined([{"type": "response.created", "response": {}}, failed])
    assert joiner.error == failed
    assert joiner.answer()["status"] == "failed"
    assert not joiner.complete


def test_message_has_a_usage_and_no_evidence() -> None:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_x", "model": "m", "usage": {"input_tokens": 3}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    joiner = joined(events, done=False)
    joiner.end_of_stream()
    assert joiner.complete
    answer = parse_answer(joiner.answer())
    assert (answer.evidence, answer.response_id) == ("none", "msg_x")
    assert (answer.usage_prompt_tokens, answer.usage_completion_tokens) == (3, 2)


def test_tgi_streams_a_token_in_each_event_and_no_prompt() -> None:
    whole = shape_examples.tgi_generate()
    events: list[dict[str, Any]] = [
        {"index": position, "token": token, "generated_text": None, "details": None}
        for position, token in enumerate(whole["details"]["tokens"])
    ]
    assert not joined(events, done=False).finished
    events[1]["generated_text"] = "hi!"
    events[1]["details"] = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": 1, "input_length": 3}
    joiner = StreamJoiner()
    joiner.feed(sse(events, done=False))
    joiner.end_of_stream()
    assert joiner.complete
    with pytest.raises(UnusableAnswerError, match="details has 2 ids of sampled tokens but no prompt ids"):
        parse_answer(joiner.answer())
    events[1]["details"]["prefill"] = whole["details"]["prefill"]
    assert only_choice(joined(events)).generation_log_probs == LOG_PROBS


def test_opening_of_a_stream_alone_has_no_sampled_ids() -> None:
    joiner = joined([OPENING], done=False)
    assert parse_answer(joiner.answer(), partial=True).evidence == "none"
