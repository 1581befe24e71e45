"""What is stored with a call; the other engine and the other dialects."""

from __future__ import annotations

import json
from typing import Any

from tests.fake_script import Script, choice
from tests.serving_harness import Harness, ask
from tests.serving_lines import covers, covers_row
from tests.serving_steps import CHAT, TOKENS, assert_aborted, assert_recorded, call, situation
from tokcap.digests import request_digests

# ---- lines 16 to 20: what is stored with a call


@situation()
@covers(16)
def a_captured_answer_names_its_call(h: Harness) -> None:
    for stream in (False, True):
        rollout = h.new_rollout()
        answer = call(h, rollout, Script(), stream=stream)
        assert answer.header("x-tokcap-call-id") == h.calls(rollout)[0].model_call_id


@situation()
@covers(17)
def the_sampling_parameters_of_a_request_are_stored(h: Harness) -> None:
    rollout = h.new_rollout()
    asked: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["END"],
        "response_format": {"type": "json_object"},
        "seed": 7,
    }
    call(h, rollout, Script(), **asked)
    sampling = h.entries(rollout)[0].sampling
    assert {key: sampling[key] for key in asked} == asked


@situation()
@covers(18)
def version_spans_of_the_engine_are_stored(h: Harness) -> None:
    spans = [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 4}]
    for path, stream in ((TOKENS, False), (TOKENS, True)):
        rollout, script = h.new_rollout(), Script(weight_versions=spans)
        if stream:
            script.per_chunk = 4
        call(h, rollout, script, path, stream=stream)
        assert h.entries(rollout)[0].policy_versions == [("v7", 0, 1), ("v8", 1, 4)]


@situation()
@covers(19)
def retry_count_key_and_digests_are_stored(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    content = ask(CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
    headers = [("x-stainless-retry-count", "2"), ("idempotency-key", "key-1")]
    call(h, rollout, script, content=content, headers=headers)
    (found,) = h.calls(rollout)
    assert (found.retry_count, found.idempotency_key) == (2, "key-1")
    assert tuple(found.request_digests) == tuple(request_digests(json.loads(content)))
    assert found.request_digests


@situation()
@covers(19)
def a_retry_count_that_is_none_costs_nothing(h: Harness) -> None:
    for odd in ("", "many", "-1", "99999999999999999999", "1.5"):
        rollout, script = h.new_rollout(), Script()
        call(h, rollout, script, headers=[("x-stainless-retry-count", odd), ("idempotency-key", "k" * 4000)])
        assert_recorded(h, rollout, script)


@situation()
@covers(19)
def the_pieces_of_the_tokens_are_stored(h: Harness) -> None:
    for stream in (False, True):
        rollout, script = h.new_rollout(), Script()
        call(h, rollout, script, stream=stream)
        assert h.entries(rollout)[0].pieces == [text.encode() for text in script.choices[0].texts]


@situation()
@covers(20)
def a_call_with_an_image_is_captured_and_flagged(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
    call(h, rollout, script, messages=messages)
    assert_recorded(h, rollout, script)
    assert h.entries(rollout)[0].extra["multimodal"] is True
    assert h.notes.read(rollout)[0].json["messages"] == messages
    rollout = h.new_rollout()
    call(h, rollout, Script())
    assert not h.entries(rollout)[0].extra.get("multimodal")


# ---- SGLang


@situation(engine="sglang")
@covers_row("2xx with ids and log-probs")
@covers(12)
def sglang_chats_are_recorded(h: Harness) -> None:
    for count in (1, 2):
        rollout, script = h.new_rollout(), Script(engine="sglang", choices=[choice(1000, 4), choice(1100, 2)])
        answer = call(h, rollout, script, n=count)
        assert answer.status == 200
        assert_recorded(h, rollout, script, count=count, response_id=answer.json["id"])


@situation(engine="sglang")
@covers_row("2xx with ids and log-probs")
@covers(11, 12)
def sglang_chat_streams_are_recorded_from_their_late_chunk(h: Harness) -> None:
    for count in (1, 2):
        rollout, script = h.new_rollout(), Script(engine="sglang", choices=[choice(1000, 4), choice(1100, 2)])
        answer = call(h, rollout, script, n=count, stream=True)
        assert answer.status == 200, answer.body
        assert_recorded(h, rollout, script, count=count)


@situation(engine="sglang")
@covers_row("2xx with ids and log-probs")
@covers(11, 12)
def sglang_native_calls_are_recorded_whether_cumulative_or_not(h: Harness) -> None:
    hows: tuple[dict[str, Any], ...] = ({}, {"stream": True})
    for how in hows:
        for incremental in (False, True):
            rollout = h.new_rollout()
            script = Script(engine="sglang", incremental=incremental, per_chunk=2, choices=[choice(1000, 7)])
            answer = call(h, rollout, script, "/generate", **how)
            assert answer.status == 200
            assert_recorded(h, rollout, script)


@situation(engine="sglang")
@covers_row("stream with an error event, or that just ends")
def a_cumulative_stream_that_just_ends_is_aborted_with_the_tokens_seen(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(engine="sglang", choices=[choice(1000, 6)], stops_after=3)
    call(h, rollout, script, "/generate", stream=True)
    assert_aborted(h, rollout, script, 3)


@situation(engine="sglang")
@covers_row("stream with an error event, or that just ends")
def a_chat_of_sglang_that_breaks_before_its_ids_is_aborted(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(engine="sglang", choices=[choice(1000, 6)], error_after=3)
    call(h, rollout, script, stream=True)
    assert h.settled(rollout) == ["aborted"]
    assert h.entries(rollout) == []


# ---- other dialects: the details have their own tests


@situation()
@covers_row("2xx with ids and log-probs")
@covers(19)
def a_message_of_the_anthropic_dialect_is_captured_by_way_of_a_chat(h: Harness) -> None:
    for stream in (False, True):
        rollout, script = h.new_rollout(), Script()
        answer = call(h, rollout, script, "/v1/messages", stream=stream)
        assert answer.status == 200
        (seen,) = h.notes.read(rollout)
        assert seen.path == CHAT
        shown = json.loads(answer.events[0])["message"] if stream else answer.json
        assert shown["type"] == "message"
        assert b"token_ids" not in answer.body
        assert h.outcomes(rollout) == ["recorded"]
        entry = h.entries(rollout)[0]
        assert entry.generation_token_ids.tolist() == script.choices[0].ids
        assert entry.response_id == shown["id"]


@situation()
@covers_row("2xx with ids and log-probs")
@covers(19)
def a_response_of_the_openai_dialect_is_captured(h: Harness) -> None:
    for stream in (False, True):
        rollout, script = h.new_rollout(), Script()
        answer = call(h, rollout, script, "/v1/responses", stream=stream)
        assert answer.status == 200
        shown = json.loads(answer.events[0])["response"] if stream else answer.json
        assert shown["object"] == "response"
        assert b"token_ids" not in answer.body
        assert h.outcomes(rollout) == ["recorded"]
        entry = h.entries(rollout)[0]
        assert entry.generation_token_ids.tolist() == script.choices[0].ids
        assert entry.response_id == shown["id"]


@situation()
@covers(20)
def media_reach_the_engine_or_the_call_is_refused(h: Harness) -> None:
    """Whichever the bridge can do; what it must not do is generate without them."""
    rollout, script = h.new_rollout(), Script()
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    for block in ({"type": "image", "source": source}, {"type": "document", "source": source}):
        rollout = h.new_rollout()
        messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, block]}]
        answer = call(h, rollout, script, "/v1/messages", messages=messages)
        seen = h.notes.read(rollout)
        if answer.status == 200:
            assert b"AAAA" in (seen[0].body or b"")
            assert h.entries(rollout)[0].extra["multimodal"] is True
        else:
            assert 400 <= answer.status < 500
            assert seen == []
            assert h.outcomes(rollout) in ([], ["no_generation"])
        script = Script()
