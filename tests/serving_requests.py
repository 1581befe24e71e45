"""Which requests are captured, and what the engine gets of their URLs; redirects."""

from __future__ import annotations

from tests.fake_script import Script
from tests.serving_harness import Harness, ask, plain_answer
from tests.serving_lines import covers
from tests.serving_steps import CHAT, assert_no_trace, call, situation, target

# ---- lines 7 and 8: which requests

NOT_GENERATING = (
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("GET", "/"),
    ("HEAD", "/"),
    ("OPTIONS", CHAT),
    ("HEAD", CHAT),
    ("GET", CHAT),
    ("GET", "/absent"),
    ("DELETE", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/embeddings"),
)


@situation()
@covers(7)
def requests_that_generate_nothing_pass_untouched_and_leave_no_trace(h: Harness) -> None:
    for method, path in NOT_GENERATING:
        for status in (0, 404, 500, 401):
            rollout = h.new_rollout()
            script = Script(status=status, body="{}" if status else None, label=rollout)
            content = b'{"model":  "policy", "prompt": "hi"}' if method == "POST" else b""
            headers = [script.header(), *([("content-type", "application/json")] if content else [])]
            expected = plain_answer(h.store_dir.parent, method, path, headers=headers, body=content)
            answer = h.request(method, target(rollout, path), headers=headers, body=content)
            assert (answer.status, answer.body) == (expected.status, expected.body), (method, path)
            assert answer.header("x-tokcap-call-id") is None
            (seen,) = h.notes.read(rollout)
            assert (seen.method, seen.path, seen.body) == (method, path, content), (method, path)
            assert_no_trace(h, rollout)


@situation()
@covers(8)
def an_unknown_route_that_answers_without_ids_is_lost(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    answer = call(h, rollout, script, "/v1/new/route")
    assert answer.json == {"result": "something that no table knows"}
    assert h.settled(rollout) == ["lost"]
    assert "unknown_route" in h.calls(rollout)[0].detail


@situation()
@covers(8)
def an_unknown_route_that_is_absent_generates_nothing(h: Harness) -> None:
    for script in (Script(), Script(status=405, body="{}")):
        rollout = h.new_rollout()
        answer = call(h, rollout, script, "/v1/absent")
        assert answer.status == (script.status or 404)
        assert h.settled(rollout) == ["no_generation"]


@situation()
@covers(8)
def the_body_of_an_unknown_route_reaches_it_as_it_is(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script(status=200, body="done", content_type="text/plain")
    answer = call(h, rollout, script, "/v1/new/route", content=b"\x00\xffno json", headers=[])
    assert (answer.status, answer.body) == (200, b"done")
    assert h.notes.read(rollout)[0].body == b"\x00\xffno json"
    assert h.settled(rollout) == ["lost"]


@situation()
@covers(1)
def the_engine_gets_path_query_and_encoding_of_the_rest_as_they_were(h: Harness) -> None:
    for training in (True, False):
        rollout = h.new_rollout()
        script = Script(status=200, body="{}", label=rollout)
        rest = "/v1/models/org%2Fname%20x?a=%2F&b=c%20d&a="
        answer = h.request("GET", target(rollout, rest, training=training), headers=[script.header()])
        assert answer.status == 200
        (seen,) = h.notes.read(rollout)
        assert seen.path == "/v1/models/org/name x"
        assert seen.raw_path == "/v1/models/org%2Fname%20x"
        assert seen.query == "a=%2F&b=c%20d&a="
        assert_no_trace(h, rollout)


@situation()
@covers(1)
def one_level_is_stripped_and_no_more(h: Harness) -> None:
    outer, inner = h.new_rollout(), h.new_rollout()
    script = Script(label=outer)
    h.request("GET", target(outer, target(inner, "/v1/models")), headers=[script.header()])
    assert h.notes.read(outer)[0].path == target(inner, "/v1/models")
    assert_no_trace(h, outer)
    assert_no_trace(h, inner)


BAD_IDS = ("a%2Fb", "a%2fb", "..", ".", "-a", "_a", "a%20b", "a%0A", "a%00", "a:b", "%C3%A9", "a" * 201, "")


@situation()
@covers(1, 10)
def a_bad_rollout_id_is_a_400_that_is_not_to_be_repeated(h: Harness) -> None:
    for bad in BAD_IDS:
        for training in (True, False):
            script = Script(label="bad")
            headers = [script.header(), ("content-type", "application/json")]
            answer = h.request("POST", target(bad, training=training), headers=headers, body=ask(CHAT))
            assert answer.status == 400, bad
            assert answer.header("x-should-retry") == "false", bad
            assert "error" in answer.json
    assert h.notes.read("bad") == []


@situation()
@covers(1)
def without_the_prefix_nothing_is_captured(h: Harness) -> None:
    for path in (CHAT, "/v1" + target("r"), "/ng-rolloutx/r/training-token-capture" + CHAT, "/NG-ROLLOUT/r" + CHAT):
        before = h.exists("r")
        label = h.new_rollout()
        script = Script(label=label)
        headers = [script.header(), ("content-type", "application/json"), ("accept-encoding", "br")]
        content = ask(CHAT)
        answer = h.request("POST", path, headers=headers, body=content)
        expected = plain_answer(h.store_dir.parent, "POST", path, headers=headers, body=content)
        assert (answer.status, answer.body) == (expected.status, expected.body)
        assert answer.header("x-tokcap-call-id") is None
        (seen,) = h.notes.read(label)
        assert (seen.path, seen.body, seen.header("accept-encoding")) == (path, content, ["br"])
        assert h.exists("r") is before is False


# ---- line 4: redirects


@situation()
@covers(4)
def a_redirect_keeps_the_prefix_and_leaves_no_trace(h: Harness) -> None:
    for training in (True, False):
        prefix = target("", "", training=training).replace("//", "/{}/", 1)
        for location, expected in (
            ("/v1/models", "{prefix}/v1/models"),
            ("/v1/models?a=%2F#part", "{prefix}/v1/models?a=%2F#part"),
            ("https://elsewhere.example/v1/models", "https://elsewhere.example/v1/models"),
        ):
            rollout = h.new_rollout()
            here = target(rollout, "", training=training)
            answer = h.request("GET", here + "/old", headers=[Script(redirect=location).header()])
            assert answer.status == 307
            assert answer.header("location") == expected.replace("{prefix}", here), prefix
            assert_no_trace(h, rollout)


@situation()
@covers(4)
def a_redirect_to_the_server_itself_keeps_the_prefix(h: Harness) -> None:
    rollout = h.new_rollout()
    answer = h.request("GET", target(rollout, "/v1/models/?a=1"), headers=[("host", "engine.example")])
    assert answer.status == 307
    location = answer.header("location") or ""
    assert location.endswith(target(rollout, "/v1/models?a=1"))
    assert_no_trace(h, rollout)


@situation()
@covers(4)
def a_redirect_of_a_generating_call_costs_nothing(h: Harness) -> None:
    rollout, script = h.new_rollout(), Script()
    answer = call(h, rollout, script, CHAT + "/")
    assert answer.status == 307
    assert (answer.header("location") or "").endswith(target(rollout))
    assert h.outcomes(rollout) in ([], ["no_generation"])
    assert call(h, rollout, script).status == 200
    assert h.outcomes(rollout)[-1] == "recorded"
