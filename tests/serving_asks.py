"""Situations of streams, and of what is asked of the engine."""

from __future__ import annotations

import json
from typing import Any

from tests.fake_script import Script, choice
from tests.serving_harness import Harness, ask
from tests.serving_lines import covers
from tests.serving_steps import CHAT, assert_recorded, assert_same_view, call, plain, situation, target

# ---- line 11: streams


@situation()
@covers(11)
def streams_are_judged_by_events_however_they_are_cut(h: Harness) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "byte by byte": {"cut": 1},
        "by seven bytes": {"cut": 7},
        "by a hundred": {"cut": 100},
        "all in one": {"cut": -1},
        "several ids in a chunk": {"per_chunk": 3},
        "empty deltas": {"empty_deltas": True},
        "comments": {"comments": True},
        "other line ends": {"line_end": "\r\n"},
        "other line ends, cut": {"line_end": "\r\n", "cut": 3},
        "without [DONE]": {"done": False},
        "the end with the last event": {"last_more": False},
        "all in one that is the end": {"cut": -1, "last_more": False},
        "without usage": {"usage": False},
        "without usage and [DONE]": {"usage": False, "done": False},
    }
    for name, how in kinds.items():
        for count in (1, 2):
            rollout, script = h.new_rollout(), Script(choices=[choice(1000, 5), choice(1100, 7)], **how)
            answer = call(h, rollout, script, stream=True, n=count)
            assert answer.status == 200, name
            expected = plain(h, script, stream=True, n=count)
            assert_same_view(answer, expected)
            assert_recorded(h, rollout, script, count=count)


@situation()
@covers(11)
def comments_come_through(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(comments=True)
    answer = call(h, rollout, script, stream=True)
    assert answer.body.startswith(b": keep-alive\n\n")
    assert answer.body.count(b": keep-alive\n\n") >= 5
    assert_recorded(h, rollout, script)


@situation()
@covers(11)
def events_flow_while_the_engine_is_still_at_work(h: Harness) -> None:
    """The client leaves after two events that the engine sent before it stood still: so it had them by then."""
    rollout, script = h.new_rollout(), Script(waits=["2"])
    answer = call(h, rollout, script, stream=True, disconnect_after=2)
    assert len(answer.events) == 2
    assert h.settled(rollout) == ["aborted"]


# ---- line 12: what is asked of the engine

ODD_REQUEST = (
    '{ "seed" : 1180591620717411303424,\n\t"model":"policy", "temperature": 1.0, "top_p":1e-1,'
    ' "messages": [{"role": "user", "content": "caf\\u00e9 \\ud83d half", "x": [1.50, -0.0, null]}] , "user":"é" }'
)


@situation()
@covers(12)
def flags_are_added_to_the_bytes_of_the_client(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    call(h, rollout, script, content=ODD_REQUEST.encode())
    (seen,) = h.notes.read(rollout)
    assert seen.body is not None
    inside = ODD_REQUEST.strip("{ }")
    assert inside in seen.body.decode()
    assert seen.json["return_token_ids"] is True
    assert seen.json["logprobs"]
    assert seen.header("content-length") in ([], [str(len(seen.body))])
    assert_recorded(h, rollout, script)


@situation()
@covers(12)
def no_key_stands_twice_in_what_the_engine_gets(h: Harness) -> None:
    wishes: list[dict[str, Any]] = [
        {"logprobs": False, "return_token_ids": False},
        {"logprobs": None, "return_token_ids": None},
        {"stream": True, "stream_options": None},
        {"stream": True, "stream_options": {}},
        {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        {"include_reasoning": False},
    ]
    for wish in wishes:
        rollout, script = h.new_rollout(), Script()
        answer = call(h, rollout, script, **wish)
        assert answer.status == 200
        (seen,) = h.notes.read(rollout)
        assert seen.body is not None
        for pairs in _objects(seen.body):
            names = [name for name, _ in pairs]
            assert len(names) == len(set(names)), (wish, names)
        assert_recorded(h, rollout, script)


def _objects(body: bytes) -> list[list[tuple[str, Any]]]:
    found: list[list[tuple[str, Any]]] = []
    json.loads(body, object_pairs_hook=lambda pairs: found.append(pairs))
    return found


@situation()
@covers(12)
def stream_options_are_added_to_streams_only(h: Harness) -> None:
    for stream in (False, True, None):
        rollout = h.new_rollout()
        call(h, rollout, Script(), stream=stream)
        (seen,) = h.notes.read(rollout)
        options = seen.json.get("stream_options")
        assert (options == {"include_usage": True}) if stream else options is None
    rollout = h.new_rollout()
    call(h, rollout, Script(), stream=True, stream_options={"continuous_usage_stats": True})
    assert h.notes.read(rollout)[0].json["stream_options"]["include_usage"] is True


@situation()
@covers(12)
def a_cross_check_that_the_engine_does_not_answer_abstains(h: Harness) -> None:
    for stream in (False, True):
        for ignored in (["return_tokens_as_token_ids"], ["include_usage"], ["return_weight_versions"]):
            rollout, script = h.new_rollout(), Script(ignores=ignored)
            call(h, rollout, script, stream=stream)
            assert_recorded(h, rollout, script)
        rollout, script = h.new_rollout(), Script(usage=False)
        call(h, rollout, script, stream=stream)
        assert_recorded(h, rollout, script)


@situation()
@covers(12)
def a_request_in_many_messages_is_the_same_request(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    script.label = rollout
    content = ask(CHAT, user="x" * 200_000)
    parts = [content[at : at + 65536] for at in range(0, len(content), 65536)]
    headers = [("content-type", "application/json"), script.header()]
    answer = h.request("POST", target(rollout), headers=headers, parts=parts)
    assert answer.status == 200
    assert h.notes.read(rollout)[0].json["user"] == "x" * 200_000
    assert_recorded(h, rollout, script)
