"""The recorded traffic is read as `recordings` reads it, which does so on its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tokcap.capture.shapes import StreamJoiner, parse_answer

from . import recordings
from .recordings import RecordedCall

NAMES = recordings.names()
SHAPES = {"/v1/chat/completions": "vllm-chat", "/v1/completions": "vllm-completions"}


def streamed(call: RecordedCall) -> bytes:
    return "".join(f"{line}\n\n" for line in call.sse or ()).encode()


def join(call: RecordedCall, pieces: Iterator[bytes]) -> StreamJoiner:
    joiner = StreamJoiner(choices=call.choices)
    for piece in pieces:
        joiner.feed(piece)
    return joiner


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def at_random(data: bytes, seed: int) -> Iterator[bytes]:
    cuts = sorted(random.Random(seed).sample(range(len(data)), 40))
    return (data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True))


def payload_of(call: RecordedCall) -> Any:
    return call.response if call.sse is None else join(call, byte_by_byte(streamed(call))).answer()


def check(call: RecordedCall, payload: Any) -> None:
    answer = parse_answer(payload, choices=call.choices, path=call.path)
    assert answer.evidence == "ids"
    assert answer.shape == SHAPES[call.path]
    assert len(answer.choices) == len(call.entries)
    for choice, entry in zip(answer.choices, call.entries, strict=True):
        np.testing.assert_array_equal(choice.prompt_token_ids, entry.prompt_token_ids)
        np.testing.assert_array_equal(choice.generation_token_ids, entry.generation_token_ids)
        found = np.array(choice.generation_log_probs, dtype=np.float64)
        np.testing.assert_array_equal(found, entry.generation_log_probs)
        assert choice.log_probs_present == (not np.isnan(entry.generation_log_probs).any())
        assert choice.pieces == entry.pieces
        assert (choice.choice_index, choice.finish_reason) == (entry.choice_index, entry.finish_reason)
        assert (answer.model, answer.response_id, answer.created_at) == (
            entry.model,
            entry.response_id,
            entry.created_at,
        )
        (item,) = choice.output_items
        (recorded,) = entry.output_items
        assert item["content"][0]["text"] == recorded.get("content", recorded.get("text"))
        assert choice.token_item_index == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_call_is_read_exactly(name: str) -> None:
    checked = 0
    for call in recordings.load(name).calls:
        if call.entries:
            check(call, payload_of(call))
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize("name", ["stream-0", "stream-1", "stream-2"])
def test_recorded_stream_is_the_same_however_it_is_cut(name: str) -> None:
    for call in recordings.load(name).calls:
        data = streamed(call)
        for seed in range(3):
            joiner = join(call, at_random(data, seed))
            assert joiner.complete
            check(call, joiner.answer())


def test_recorded_stream_is_complete_only_with_its_last_line() -> None:
    for name in ("stream-0", "stream-1", "stream-2"):
        for call in recordings.load(name).calls:
            joiner = StreamJoiner()
            lines = call.sse or []
            for line in lines[:-1]:
                joiner.feed(f"{line}\n\n".encode())
            assert joiner.finished
            assert not joiner.complete
            joiner.feed(f"{lines[-1]}\n\n".encode())
            assert joiner.complete


def test_recorded_stream_that_breaks_off_gives_the_tokens_seen() -> None:
    call = recordings.load("stream-0").calls[0]
    (entry,) = call.entries
    joiner = StreamJoiner()
    for line in (call.sse or ())[:11]:
        joiner.feed(f"{line}\n\n".encode())
    assert not joiner.finished
    (choice,) = parse_answer(joiner.answer(), partial=True).choices
    np.testing.assert_array_equal(choice.generation_token_ids, entry.generation_token_ids[:10])
    np.testing.assert_array_equal(choice.prompt_token_ids, entry.prompt_token_ids)
    assert choice.generation_log_probs == entry.generation_log_probs[:10].tolist()
    assert choice.finish_reason == ""


@pytest.mark.parametrize(
    ("note", "evidence", "sources"),
    [
        ("one token", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("two choices", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("stop strings", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("no token ids asked for", "none", ()),
        ("no logprobs asked for", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("top logprobs", "ids", ("prompt_token_ids", "choices[].token_ids")),
        (
            "tokens as ids",
            "ids",
            ("prompt_token_ids", "choices[].token_ids", "choices[].logprobs.content[].token"),
        ),
        ("context overflow: error", "none", ()),
        ("bad message: error", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("unknown model: error", "none", ()),
        ("responses: no ids on the wire", "none", ()),
        ("messages: no ids on the wire", "none", ()),
        ("no generation", "none", ()),
        ("stream", "ids", ("prompt_token_ids", "choices[].token_ids")),
        ("text prompt", "ids", ("choices[].prompt_token_ids", "choices[].token_ids")),
        ("completions stream", "ids", ("choices[].prompt_token_ids", "choices[].token_ids")),
    ],
)
def test_edge_call_has_the_evidence_that_its_body_holds(note: str, evidence: str, sources: tuple[str, ...]) -> None:
    calls = [call for call in recordings.load("edges-0").calls if call.note == note]
    assert calls
    for call in calls:
        answer = parse_answer(payload_of(call), choices=call.choices, path=call.path)
        assert (answer.evidence, answer.id_sources) == (evidence, sources)
        assert len(answer.choices) == len(call.entries)


def test_stop_string_of_an_edge_call_is_its_stop_reason() -> None:
    (call,) = (call for call in recordings.load("edges-0").calls if call.note == "stop strings")
    assert parse_answer(call.response).choices[0].stop_reason == "i"


def test_recorded_responses_and_messages_tell_their_usage_without_ids() -> None:
    for note in ("responses: no ids on the wire", "messages: no ids on the wire"):
        (call,) = (call for call in recordings.load("edges-0").calls if call.note == note)
        answer = parse_answer(call.response)
        assert (answer.usage_prompt_tokens, answer.usage_completion_tokens) == (32, 6)
        assert answer.response_id
