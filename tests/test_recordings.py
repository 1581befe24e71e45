"""The recorded traffic says what its README promises, and `recordings` adds nothing to it."""

from __future__ import annotations

import numpy as np
import pytest

from tokcap.entry import identical

from . import recordings


def test_every_recorded_rollout_is_named_after_its_file() -> None:
    names = recordings.names()
    assert len(names) == 25
    assert [rollout.rollout_id for rollout in recordings.rollouts()] == names


def test_sampled_ids_of_all_rollouts_but_the_edges_sum_to_6815() -> None:
    sampled = sum(
        len(entry.generation_token_ids)
        for rollout in recordings.rollouts()
        if rollout.rollout_id != "edges-0"
        for entry in rollout.entries
    )
    assert sampled == 6815


def test_every_call_but_those_of_the_edges_is_recorded_with_all_log_probs() -> None:
    for rollout in recordings.rollouts():
        if rollout.rollout_id == "edges-0":
            continue
        for call in rollout.calls:
            (entry,) = call.entries
            assert call.outcome == "recorded"
            assert entry.flags == ()
            assert entry.finish_reason in ("stop", "length")


def test_ids_agree_with_the_usage_that_the_engine_reports() -> None:
    checked = 0
    for rollout in recordings.rollouts():
        for call in rollout.calls:
            usage = (call.response or {}).get("usage") or {}
            if call.entries and "completion_tokens" in usage:
                assert usage["completion_tokens"] == sum(len(entry.generation_token_ids) for entry in call.entries)
                assert all(usage["prompt_tokens"] == len(entry.prompt_token_ids) for entry in call.entries)
                checked += 1
    assert checked > 200


def test_prompt_given_as_ids_is_the_prompt_that_was_recorded() -> None:
    for name in ("token-in-0", "token-in-1", "token-in-2", "long-token-in-0"):
        for call in recordings.load(name).calls:
            assert call.entries[0].prompt_token_ids.tolist() == call.request["prompt"]


def test_pieces_spell_the_text_of_the_answer() -> None:
    call = recordings.load("linear-0").calls[0]
    (entry,) = call.entries
    assert entry.pieces is not None
    assert b"".join(entry.pieces).decode(errors="replace").startswith(entry.output_items[0]["content"])


def test_streamed_answer_gives_the_text_that_its_pieces_spell() -> None:
    for name in ("stream-0", "stream-1", "stream-2"):
        for call in recordings.load(name).calls:
            (entry,) = call.entries
            assert entry.pieces is not None
            assert entry.output_items[0]["role"] == "assistant"
            text = b"".join(entry.pieces).decode(errors="replace")
            assert text.startswith(entry.output_items[0]["content"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("note", "outcome", "entries"),
    [
        ("one token", "recorded", 1),
        ("two choices", "recorded", 2),
        ("stop strings", "recorded", 1),
        ("no token ids asked for", "lost", 0),
        ("no logprobs asked for", "recorded", 1),
        ("top logprobs", "recorded", 1),
        ("tokens as ids", "recorded", 1),
        ("context overflow: error", "no_generation", 0),
        ("bad message: error", "recorded", 1),
        ("unknown model: error", "no_generation", 0),
        ("responses: no ids on the wire", "lost", 0),
        ("messages: no ids on the wire", "lost", 0),
        ("stream", "recorded", 1),
        ("text prompt", "recorded", 1),
        ("completions stream", "recorded", 1),
    ],
)
def test_edge_call_has_the_entries_that_its_body_proves(note: str, outcome: str, entries: int) -> None:
    (call,) = (call for call in recordings.load("edges-0").calls if call.note == note)
    assert (call.outcome, len(call.entries)) == (outcome, entries)
    assert [entry.choice_index for entry in call.entries] == list(range(entries))


def test_edge_requests_that_generate_nothing_are_no_model_calls() -> None:
    others = [call for call in recordings.load("edges-0").calls if not call.generates]
    assert [call.path for call in others] == ["/v1/messages/count_tokens", "/tokenize"]
    assert [call.entries for call in others] == [(), ()]


def test_missing_log_probs_are_unknown_not_zero() -> None:
    (call,) = (call for call in recordings.load("edges-0").calls if call.note == "no logprobs asked for")
    assert np.isnan(call.entries[0].generation_log_probs).all()


def test_completion_sampled_twice_with_one_seed_is_the_same_streamed_or_not() -> None:
    calls = {call.note: call for call in recordings.load("edges-0").calls}
    plain, streamed = calls["text prompt"].entries[0], calls["completions stream"].entries[0]
    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(streamed, field))
    assert plain.output_items == streamed.output_items


def test_reading_a_recording_again_gives_identical_entries() -> None:
    one, other = recordings.load("sub-agent-0").entries, recordings.load("sub-agent-0").entries
    assert all(map(identical, one, other))
