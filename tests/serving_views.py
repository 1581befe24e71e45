"""What the client sees, with and without tokcap; encodings."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.fake_script import Script, choice
from tests.serving_harness import Harness, ask, events_of, ordered
from tests.serving_lines import covers
from tests.serving_steps import (
    CHAT,
    COMPLETIONS,
    EVERYTHING,
    NAMES,
    TOKENS,
    assert_no_trace,
    assert_recorded,
    assert_same_view,
    call,
    plain,
    read_json,
    situation,
)

# ---- line 13: what the client sees


@dataclass(frozen=True)
class Pair:
    """A request whose answer must look as if tokcap were not there."""

    name: str
    path: str
    body: dict[str, Any]
    script: Script = Script()  # noqa: RUF009 - never written to
    engine: str = "vllm"


_REASONING = Script(choices=[choice(1000, 6, reasoning=3)])
_TOOLS = Script(
    choices=[
        choice(
            1000,
            6,
            swallowed=[2, 3],
            finish_reason="tool_calls",
            tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        )
    ]
)
_NUMBERS = Script(extra={"big": 2**70, "one": 1.0, "tiny": 1e-7, "none": None, "nested": {"b": [], "a": {}}})


def _pairs() -> Iterable[Pair]:
    chat: dict[str, tuple[dict[str, Any], Script]] = {
        "nothing": ({}, Script()),
        "log-probs": ({"logprobs": True}, Script()),
        "log-probs and alternatives": ({"logprobs": True, "top_logprobs": 2}, Script()),
        "no log-probs": ({"logprobs": False}, Script()),
        "log-probs null": ({"logprobs": None}, Script()),
        "ids": ({"return_token_ids": True}, Script()),
        "no ids": ({"return_token_ids": False}, Script()),
        "ids and log-probs": ({"return_token_ids": True, "logprobs": True}, Script()),
        "names": ({"logprobs": True, "return_tokens_as_token_ids": True}, Script()),
        "names without log-probs": ({"return_tokens_as_token_ids": True}, Script()),
        "two choices": ({"n": 2}, Script(choices=[choice(1000, 2), choice(1100, 2)])),
        "hidden reasoning": ({"include_reasoning": False}, _REASONING),
        "hidden reasoning with log-probs": ({"include_reasoning": False, "logprobs": True}, _REASONING),
        "reasoning": ({}, _REASONING),
        "tools": ({}, _TOOLS),
        "tools and ids": ({"return_token_ids": True}, _TOOLS),
        "numbers": ({}, _NUMBERS),
        "versions": ({}, Script(weight_versions=[{"version": "v7", "start": 0, "end": 4}])),
    }
    completions: dict[str, tuple[dict[str, Any], Script]] = {
        "nothing": ({}, Script()),
        "no alternatives": ({"logprobs": 0}, Script()),
        "alternatives": ({"logprobs": 2}, Script()),
        "log-probs null": ({"logprobs": None}, Script()),
        "ids": ({"return_token_ids": True}, Script()),
        "ids and log-probs": ({"return_token_ids": True, "logprobs": 1}, Script()),
        "two prompts": ({"prompt": ["a", "b"]}, Script(choices=[choice(1000, 3), choice(1100, 3)])),
        "echo": ({"echo": True}, Script()),
        "echo and log-probs": ({"echo": True, "logprobs": 1}, Script()),
        "echo of two prompts": (
            {"echo": True, "prompt": ["a", "b"]},
            Script(choices=[choice(1000, 3), choice(1100, 3)]),
        ),
    }
    tokens: dict[str, tuple[dict[str, Any], Script]] = {
        "nothing": ({}, Script()),
        "log-probs": ({"sampling_params": {"logprobs": 1}}, Script()),
        "prompt ids": ({"return_token_ids": True}, Script()),
    }
    streams: dict[str, dict[str, Any]] = {
        "": {},
        " streamed": {"stream": True},
        " streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
    }
    for path, wishes in ((CHAT, chat), (COMPLETIONS, completions), (TOKENS, tokens)):
        for name, (wish, script) in wishes.items():
            for how, options in streams.items():
                yield Pair(f"{NAMES[path]}: {name}{how}", path, wish | options, script)
    for name, options in {
        "no usage": {"include_usage": False},
        "no options": {},
        "usage in each chunk": {"include_usage": True, "continuous_usage_stats": True},
        "usage in each chunk without the last": {"continuous_usage_stats": True},
    }.items():
        yield Pair(f"chat: {name} streamed", CHAT, {"stream": True, "stream_options": options})
    sglang = Script(engine="sglang")
    for wish in ({}, {"logprobs": True}, {"n": 2}, {"stream": True}, {"stream": True, "logprobs": True}):
        yield Pair(f"sglang chat: {wish}", CHAT, wish, sglang, "sglang")
    yield Pair("sglang chat: with usage", CHAT, streams[" streamed with usage"], sglang, "sglang")
    for wish in (
        {},
        {"return_logprob": True},
        {"return_prompt_token_ids": True},
        {"stream": True},
        {"stream": True, "return_logprob": True},
    ):
        yield Pair(f"sglang generate: {wish}", "/generate", wish, sglang, "sglang")


PAIRS = list(_pairs())


def see_no_difference(h: Harness, pair: Pair) -> None:
    """Play one pair."""
    rollout = h.new_rollout()
    script = _copy(pair.script, label=rollout)
    answer = call(h, rollout, script, pair.path, **pair.body)
    expected = plain(h, script, pair.path, **pair.body)
    assert expected.status == 200
    assert_same_view(answer, expected)
    assert h.outcomes(rollout) == ["recorded"]


def _copy(script: Script, **changes: Any) -> Script:

    return msgspec.structs.replace(script, **changes)


@situation()
@covers(13)
def an_answer_from_which_nothing_is_taken_is_the_same_bytes(h: Harness) -> None:
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for options in ({}, streamed):
        rollout, script = h.new_rollout(), Script(extra={} if options else {"one": 1.0})
        script.label = rollout
        answer = call(h, rollout, script, **EVERYTHING, **options)
        assert answer.body == plain(h, script, **EVERYTHING, **options).body
        assert_recorded(h, rollout, script)


@situation()
@covers(13)
def headers_of_the_answer_pass(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(headers=[("x-request-id", "abc"), ("set-cookie", "a=1"), ("set-cookie", "b=2")])
    for stream in (False, True):
        answer = call(h, rollout, script, stream=stream)
        assert answer.header("x-request-id") == "abc"
        assert [value for name, value in answer.headers if name == "set-cookie"] == ["a=1", "b=2"]


# ---- line 14: encodings


@situation()
@covers(14)
def the_engine_is_asked_for_an_answer_that_is_not_compressed(h: Harness) -> None:
    for given in ([], [("accept-encoding", "gzip, br")]):
        rollout, script = h.new_rollout(), Script()
        call(h, rollout, script, headers=given)
        assert h.notes.read(rollout)[0].header("accept-encoding") == ["identity"]


@situation()
@covers(14)
def a_compressed_request_is_decoded(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    content = ask(CHAT, user="x" * 1000)
    answer = call(h, rollout, script, content=gzip.compress(content), headers=[("content-encoding", "gzip")])
    assert answer.status == 200
    (seen,) = h.notes.read(rollout)
    assert seen.json["user"] == "x" * 1000
    assert seen.header("content-encoding") == []
    assert_recorded(h, rollout, script)


@situation()
@covers(14)
def a_request_that_can_not_be_decoded_is_a_415_and_leaves_no_trace(h: Harness) -> None:
    for encoding, content in (("x-strange", ask(CHAT)), ("gzip", b"this is no gzip")):
        rollout = h.new_rollout()
        answer = call(h, rollout, Script(), content=content, headers=[("content-encoding", encoding)])
        assert answer.status == 415 or (encoding == "gzip" and answer.status == 400)
        assert h.notes.read(rollout) == []
        assert_no_trace(h, rollout)


@situation()
@covers(14)
def an_answer_that_is_compressed_all_the_same_is_captured_and_comes_compressed(h: Harness) -> None:
    for stream in (False, True):
        rollout, script = h.new_rollout(), Script(gzip=True)
        script.label = rollout
        answer = call(h, rollout, script, stream=stream, headers=[("accept-encoding", "gzip")])
        assert answer.status == 200
        assert answer.header("content-encoding") == "gzip"
        length = answer.header("content-length")
        assert length is None or int(length) == len(answer.body)
        expected = gzip.decompress(plain(h, script, stream=stream).body)
        found = gzip.decompress(answer.body)
        if stream:
            assert list(map(read_json, events_of(found))) == list(map(read_json, events_of(expected)))
        else:
            assert ordered(found) == ordered(expected)
        assert_recorded(h, rollout, script)


@situation()
@covers(14)
def a_compressed_answer_from_which_nothing_is_taken_is_the_same_bytes(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(gzip=True)
    script.label = rollout
    answer = call(h, rollout, script, **EVERYTHING)
    assert answer.body == plain(h, script, **EVERYTHING).body
    assert answer.header("content-encoding") == "gzip"
    assert_recorded(h, rollout, script)
