"""The situations of the table of answers: what becomes of each kind of answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.fake_script import Script, choice
from tests.serving_harness import Harness, ask
from tests.serving_lines import covers, covers_row
from tests.serving_steps import (
    CHAT,
    COMPLETIONS,
    EVERYTHING,
    ROUTES,
    TOKENS,
    assert_recorded,
    assert_same_view,
    call,
    plain,
    read_by_engine,
    read_json,
    situation,
)

# ---- rows: 2xx with ids and log-probs


@situation()
@covers_row("2xx with ids and log-probs")
@covers(8)
def a_chat_is_recorded(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    answer = call(h, rollout, script)
    assert answer.status == 200
    assert_recorded(h, rollout, script, response_id=answer.json["id"])
    assert h.entries(rollout)[0].model == "policy"


@situation()
@covers_row("2xx with ids and log-probs")
def a_completion_is_recorded(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(choices=[choice(2000, 3, finish_reason="length")])
    answer = call(h, rollout, script, COMPLETIONS)
    assert_recorded(h, rollout, script, response_id=answer.json["id"])


@situation()
@covers_row("2xx with ids and log-probs")
def a_call_that_speaks_in_ids_is_recorded(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(choices=[choice(2100, 5)])
    assert call(h, rollout, script, TOKENS).status == 200
    assert_recorded(h, rollout, script)


@situation()
@covers_row("2xx with ids and log-probs")
def streams_of_all_routes_are_recorded(h: Harness) -> None:
    for path in ROUTES:
        rollout, script = h.new_rollout(), Script(choices=[choice(2200, 6)])
        answer = call(h, rollout, script, path, stream=True)
        assert answer.events[-1] == "[DONE]"
        assert_recorded(h, rollout, script)


@situation()
@covers_row("2xx with ids and log-probs")
def every_choice_has_an_entry_of_its_own(h: Harness) -> None:
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            rollout = h.new_rollout()
            script = Script(choices=[choice(3000, 3), choice(3100, 5, finish_reason="length"), choice(3200, 1)])
            call(h, rollout, script, path, n=3, stream=stream)
            assert_recorded(h, rollout, script, count=3)


@situation()
@covers_row("2xx with ids and log-probs")
def choices_may_stand_in_any_order(h: Harness) -> None:
    rollout = h.new_rollout()
    script = Script(choices=[choice(3000, 3), choice(3100, 5), choice(3200, 1)], order=[2, 0, 1])
    answer = call(h, rollout, script, n=3)
    assert [each["index"] for each in answer.json["choices"]] == [2, 0, 1]
    assert_recorded(h, rollout, script, count=3)


@situation()
@covers_row("2xx with ids and log-probs")
def several_calls_of_one_rollout_lie_side_by_side(h: Harness) -> None:
    rollout = h.new_rollout()
    for first in (4000, 4100, 4200):
        call(h, rollout, Script(choices=[choice(first, 2)], label=f"{rollout}-{first}"))
    assert h.outcomes(rollout) == ["recorded"] * 3
    assert [entry.generation_token_ids[0] for entry in h.entries(rollout)] == [4000, 4100, 4200]


@situation()
@covers_row("2xx with ids and log-probs")
def tool_calls_and_swallowed_tokens_cost_no_token(h: Harness) -> None:
    tool = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1.0}'}}
    for stream in (False, True):
        rollout = h.new_rollout()
        script = Script(choices=[choice(4300, 6, swallowed=[1, 2], tool_calls=[tool], finish_reason="tool_calls")])
        call(h, rollout, script, stream=stream)
        assert_recorded(h, rollout, script)


# ---- rows: errors before anything was sampled

ERRORS = {
    400: {"message": "max_tokens=100000 cannot be greater than max_model_len=4096.", "type": "BadRequestError"},
    404: {"message": "The model `absent` does not exist.", "type": "NotFoundError"},
    422: {"message": "Unprocessable", "type": "UnprocessableEntity"},
    429: {"message": "slow down", "type": "RateLimitError"},
    503: {"message": "overloaded", "type": "ServiceUnavailableError"},
}


@situation()
@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
def errors_before_sampling_pass_unchanged_and_are_no_generation(h: Harness) -> None:
    for status, error in ERRORS.items():
        for stream, reads in ((False, "first"), (True, "first"), (False, "never")):
            rollout, text = h.new_rollout(), json.dumps({"error": {**error, "param": None, "code": status}}, indent=1)
            headers = [("retry-after", "7"), ("x-engine", "a"), ("x-engine", "b")]
            script = Script(status=status, body=text, headers=headers, reads=reads)
            answer = call(h, rollout, script, stream=stream)
            assert (answer.status, answer.body.decode()) == (status, text)
            assert answer.header("retry-after") == "7"
            assert [value for name, value in answer.headers if name == "x-engine"] == ["a", "b"]
            assert h.settled(rollout) == ["no_generation"]
            assert h.entries(rollout) == []


@situation()
@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
@covers(15)
def a_refused_call_can_be_repeated_and_is_then_recorded(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    call(h, rollout, Script(status=429, body="{}", label=f"{rollout}-refused"))
    call(h, rollout, script)
    assert h.outcomes(rollout) == ["no_generation", "recorded"]


@situation()
@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
def what_the_engine_finds_wrong_in_a_request_it_says_itself(h: Harness) -> None:
    wrong: list[tuple[str, bytes]] = [
        (CHAT, b'{"model": "policy", "messages": '),
        (CHAT, b"[1, 2]"),
        (CHAT, b'"text"'),
        (CHAT, b""),
        (CHAT, b"\xff\xfe{"),
        (CHAT, ask(CHAT, messages="none")),
        (CHAT, ask(CHAT, stream_options={"include_usage": True})),
        (CHAT, ask(CHAT, top_logprobs=2)),
        (COMPLETIONS, b'{"model": "policy"}'),
    ]
    for path, content in wrong:
        rollout, script = h.new_rollout(), Script()
        expected = plain(h, script, path, content=content)
        assert expected.status == 400
        answer = call(h, rollout, script, path, content=content)
        assert (answer.status, answer.body) == (400, expected.body), content
        assert h.settled(rollout) == ["no_generation"], content


# ---- row: completion_tokens 0


@situation()
@covers_row("`usage.completion_tokens: 0`")
def a_usage_of_no_tokens_is_no_generation(h: Harness) -> None:
    for stream, told in ((False, False), (True, False), (True, True)):
        rollout = h.new_rollout()
        script = Script(choices=[choice(1, 0, finish_reason="length")], empty_deltas=told)
        answer = call(h, rollout, script, stream=stream)
        assert answer.status == 200
        assert_same_view(answer, plain(h, script, stream=stream))
        assert h.settled(rollout) == ["no_generation"]


# ---- row: ids that can't be used


def _lost(h: Harness, script: Script, path: str = CHAT, **body: Any) -> None:
    rollout = h.new_rollout()
    answer = call(h, rollout, script, path, **body)
    assert answer.status == 200
    assert_same_view(answer, plain(h, script, path, **body))
    assert h.settled(rollout) == ["lost"]
    assert h.calls(rollout)[0].detail
    assert h.entries(rollout) == []


@situation()
@covers_row("2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than")
def an_answer_without_ids_is_lost(h: Harness) -> None:
    ignores = ["return_token_ids", "return_tokens_as_token_ids"]
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            _lost(h, Script(ignores=ignores), path, stream=stream)


@situation()
@covers_row("2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than")
def ids_on_some_choices_only_make_the_call_lost(h: Harness) -> None:
    for stream in (False, True):
        _lost(h, Script(ids_on=[0], ignores=["return_tokens_as_token_ids"]), n=2, stream=stream)


@situation()
@covers_row("2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than")
def two_sources_of_ids_that_disagree_make_the_call_lost(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(disagreeing=True)
    answer = call(h, rollout, script)
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "".join(script.choices[0].texts)
    assert h.settled(rollout) == ["lost"]
    assert h.entries(rollout) == []


@situation()
@covers_row("2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than")
def fewer_ids_than_the_usage_says_make_the_call_lost(h: Harness) -> None:
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            _lost(h, Script(choices=[choice(1000, 5, missing=[2])]), path, stream=stream)


@situation()
@covers_row("2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than")
def choices_that_never_came_make_the_call_lost(h: Harness) -> None:
    rollout, body = h.new_rollout(), json.loads(plain(h, Script(), return_token_ids=True, logprobs=True).body)
    call(h, rollout, Script(body=json.dumps(body)), n=2)  # one of two
    assert h.settled(rollout) == ["lost"]


# ---- rows: log-probs that are missing


@situation()
@covers_row("log-probs missing for some positions, null or NaN")
def log_probs_that_are_null_stay_unknown(h: Harness) -> None:
    for path in ROUTES:
        for stream in (False, True):
            rollout = h.new_rollout()
            sampled = choice(1000, 4)
            sampled.log_probs[1] = sampled.log_probs[3] = None
            script = Script(choices=[sampled])
            answer = call(h, rollout, script, path, stream=stream)
            assert_same_view(answer, plain(h, script, path, stream=stream))
            assert_recorded(h, rollout, script)
            assert "unknown" in h.entries(rollout)[0].flags


@situation()
@covers_row("log-probs missing for some positions, null or NaN")
def a_literal_nan_costs_the_answer_nothing(h: Harness) -> None:
    for stream in (False, True):
        rollout, sampled = h.new_rollout(), choice(1000, 4)
        sampled.log_probs[1] = None
        script = Script(choices=[sampled], literal_nan=True)
        answer = call(h, rollout, script, stream=stream)
        assert answer.status == 200
        assert_same_view(answer, plain(h, script, stream=stream))
        assert_recorded(h, rollout, script)


@situation()
@covers_row("log-probs missing for some positions, null or NaN")
def a_clamped_log_prob_is_kept_as_it_is(h: Harness) -> None:
    rollout, sampled = h.new_rollout(), choice(1000, 3)
    sampled.log_probs[1] = -9999.0
    script = Script(choices=[sampled])
    call(h, rollout, script)
    assert_recorded(h, rollout, script)


@situation()
@covers_row("log-probs missing altogether")
def log_probs_that_are_missing_altogether_are_flagged(h: Harness) -> None:
    for stream in (False, True):
        for script in (Script(ignores=["logprobs"]), Script(null_log_probs=True)):
            rollout = h.new_rollout()
            answer = call(h, rollout, script, stream=stream)
            assert answer.status == 200
            assert_recorded(h, rollout, script, log_probs=False)
            entry = h.entries(rollout)[0]
            assert np.isnan(entry.generation_log_probs).all()
            assert entry.extra["log_probs_missing"] is True
            script.label = ""


# ---- row: 500 after sampling


@situation()
@covers_row("500 after sampling")
def a_500_may_have_sampled_and_is_lost(h: Harness) -> None:
    message = "Out of range float values are not JSON compliant: nan"
    for text in (json.dumps({"error": {"message": message, "code": 500}}), "Internal Server Error", ""):
        for stream in (False, True):
            rollout = h.new_rollout()
            answer = call(h, rollout, Script(status=500, body=text), stream=stream)
            assert (answer.status, answer.body.decode()) == (500, text)
            assert h.settled(rollout) == ["lost"]


@situation(kinds=("in process", "workers"))
@covers_row("500 after sampling")
def a_500_of_a_server_that_never_read_the_request_has_sampled_nothing(h: Harness) -> None:
    """Also with nothing but its status to judge by; behind a proxy nobody can know."""
    rollout = h.new_rollout()
    answer = call(h, rollout, Script(status=500, body="{}", reads="never"))
    assert (answer.status, answer.body) == (500, b"{}")
    assert h.settled(rollout) == ["no_generation"]


# ---- row: answers that are none

ODD_BODIES = {
    "empty": "",
    "html": "<html>sorry</html>",
    "cut short": '{"id": "x", "choices": [{"index": 0, "mess',
    "a number": "17",
    "null": "null",
    "an empty object": "{}",
    "an empty list": "[]",
    "choices that are no list": '{"choices": "none"}',
    "choices of strings": '{"choices": ["a", null, 3]}',
    "a NaN outside": '{"choices": NaN}',
    "deep": "[" * 5000 + "]" * 5000,
    "a huge number": '{"choices": [], "n": 1' + "0" * 5000 + "}",
    "half a surrogate": '{"choices": [], "text": "\\ud83d"}',
    "twice the same key": '{"choices": [], "choices": []}',
    "ids that are none": '{"choices": [{"index": 0, "token_ids": ["a"], "message": {}}], "prompt_token_ids": [1]}',
    "ids too large": '{"choices": [{"index": 0, "token_ids": [4294967296], "message": {}}], "prompt_token_ids": [1]}',
    "an index that is none": '{"choices": [{"index": "a", "token_ids": [1], "message": {}}], "prompt_token_ids": [1]}',
    "a mark of byte order": "\ufeff{}",
}


@situation()
@covers_row("answer that is not JSON, empty 200")
@covers_row("After generation tokcap never turns an answer into an error.")
def whatever_a_200_holds_the_client_gets_it_and_the_call_is_lost(h: Harness) -> None:
    for name, text in ODD_BODIES.items():
        rollout = h.new_rollout()
        # The client asks for ids itself, so that nothing is to be taken from what seems to hold some.
        answer = call(h, rollout, Script(body=text, label=f"{rollout}-odd"), **EVERYTHING)
        assert answer.status == 200, name
        assert read_json(answer.body.decode()) == read_json(text), name
        assert h.settled(rollout) == ["lost"], name


@situation()
@covers_row("answer that is not JSON, empty 200")
def an_empty_200_for_a_client_that_had_gone_is_aborted(h: Harness) -> None:
    for text in ("", "null", "not json"):
        rollout = h.new_rollout()
        script = Script(waits=["answer"], gone=text)
        call(h, rollout, script, disconnect_when=read_by_engine(h, rollout))
        assert h.settled(rollout) == ["aborted"]
        h.until(lambda label=rollout: h.notes.read(label)[0].ended == "gone")  # type: ignore[misc]
        assert h.notes.read(rollout)[0].disconnected


@situation()
@covers_row("answer that is not JSON, empty 200")
@covers(13)
def what_holds_nothing_to_be_taken_is_the_same_bytes(h: Harness) -> None:
    spelled = json.dumps(json.loads(plain(h, Script()).body), indent=3)  # an answer of an engine that ignores flags
    for name, text in {**ODD_BODIES, "ids that were not given": spelled}.items():
        if '"token_ids": [' in text:
            continue
        rollout = h.new_rollout()
        answer = call(h, rollout, Script(body=text, label=f"{rollout}-odd"))
        assert (answer.status, answer.body.decode()) == (200, text), name
        assert h.settled(rollout) == ["lost"], name


@situation()
@covers_row("2xx with ids and log-probs")
@covers(13)
def an_answer_in_an_odd_spelling_is_recorded_and_the_same_bytes(h: Harness) -> None:
    script = Script()
    spelled = json.dumps(json.loads(plain(h, script, **EVERYTHING).body), indent=3, sort_keys=True)
    rollout = h.new_rollout()
    answer = call(h, rollout, Script(body=spelled), **EVERYTHING)
    assert answer.body.decode() == spelled
    assert_recorded(h, rollout, script)
