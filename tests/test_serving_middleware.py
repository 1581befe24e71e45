"""The door of the middleware: URLs, configuration, keys, evaluation capture, mounts, and what is stored with a call."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.children import Channel, Nursery, nursery
from tests.fake_engine import FakeEngine, Message, Notebook
from tests.fake_script import Script, choice
from tests.serving_harness import InProcess, ask, harnesses, plain_answer
from tests.serving_lines import covers
from tests.serving_state import state_of_vllm
from tests.serving_steps import CHAT, COMPLETIONS, assert_no_trace, assert_recorded, assert_same_view, call, target
from tokcap import FileStore
from tokcap.errors import ConfigError, InvalidIdError, UnsafeDirectoryError

__all__ = ("nursery",)

nursery = pytest.fixture(scope="module")(nursery)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InProcess]]:
    """Harnesses, and nothing in the environment that would configure them."""
    for name in ("TOKCAP_DIR", "TOKCAP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield from harnesses(tmp_path)


@pytest.fixture
def harness(make: Callable[..., InProcess]) -> InProcess:
    return make()


def block(directory: Path, **other: Any) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, "dir": str(directory), **other}}


# ---- line 1: URLs


@covers(1)
@pytest.mark.parametrize("root_path", ["/api", "/a/b", "/with space"])
def test_the_prefix_is_found_after_the_root_path(harness: InProcess, root_path: str) -> None:
    harness.root_path = root_path
    rollout, script = harness.new_rollout(), Script()
    assert call(harness, rollout, script).status == 200
    (seen,) = harness.notes.read(rollout)
    assert seen.raw_path == quote(root_path) + CHAT
    assert seen.root_path == root_path
    assert seen.path.endswith(CHAT)
    assert "ng-rollout" not in seen.path
    assert_recorded(harness, rollout, script)


@covers(1)
def test_the_prefix_may_be_a_part_of_the_root_path_of_nobody(harness: InProcess) -> None:
    """A prefix in the middle of a path is none."""
    rollout = harness.new_rollout()
    answer = harness.request("POST", "/api" + target(rollout), body=ask(CHAT))
    assert answer.status == 404
    assert_no_trace(harness, rollout)


@covers(1)
def test_a_server_that_gives_no_raw_path_is_served_by_its_path(harness: InProcess) -> None:
    harness.without_raw_path = True
    rollout, script = harness.new_rollout(), Script()
    assert call(harness, rollout, script).status == 200
    assert harness.notes.read(rollout)[0].path == CHAT
    assert_recorded(harness, rollout, script)


@covers(1)
@pytest.mark.parametrize("training", [True, False])
def test_the_root_of_the_server_is_behind_a_prefix_that_ends_in_a_slash(harness: InProcess, training: bool) -> None:
    rollout = harness.new_rollout()
    answer = harness.request("GET", target(rollout, "/", training=training))
    assert (answer.status, answer.body) == (200, b"hello")
    assert_no_trace(harness, rollout)


@covers(1)
@pytest.mark.parametrize("training", [True, False])
def test_a_websocket_with_the_prefix_is_closed_and_one_without_is_not_touched(
    harness: InProcess, training: bool
) -> None:
    async def talk(path: str) -> list[str]:
        messages: list[Message] = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]
        sent: list[str] = []

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message["type"])

        scope = harness.scope_of("GET", path, [], None) | {"type": "websocket", "scheme": "ws", "subprotocols": []}
        del scope["method"]
        await harness.app(scope, receive, send)
        return sent

    assert harness.run(talk(target("r", "/v1/realtime", training=training))) == ["websocket.close"]
    assert harness.run(talk(target("bad%2Fid", "/v1/realtime", training=training))) == ["websocket.close"]
    assert harness.run(talk("/v1/realtime")) == ["websocket.accept"]
    assert_no_trace(harness, "r")


@covers(1)
@pytest.mark.parametrize("kind", ["http", "websocket", "something.else"])
def test_without_the_prefix_the_app_is_called_with_the_very_same_things(harness: InProcess, kind: str) -> None:
    from tokcap.asgi import CaptureMiddleware

    given: list[Any] = []

    async def app(*things: Any) -> None:
        given.extend(things)

    async def receive() -> Any:
        raise AssertionError("nobody asked for it")

    async def send(message: Any) -> None:
        raise AssertionError("nobody sent anything")

    assert harness.sink is not None
    middleware = CaptureMiddleware(app, sink=harness.sink, engine="vllm")
    scope = harness.scope_of("POST", CHAT, [], None) | {"type": kind}
    before = dict(scope)
    harness.run(middleware(scope, receive, send))
    assert given[0] is scope
    assert scope == before
    assert given[1] is receive
    assert given[2] is send


@covers(1)
def test_without_the_prefix_only_a_handful_of_functions_is_called(harness: InProcess) -> None:
    """At most 20 us: counted in calls, because times depend on the machine."""
    from tokcap.asgi import CaptureMiddleware

    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append("app")

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    assert harness.sink is not None
    middleware = CaptureMiddleware(app, sink=harness.sink, engine="vllm")
    scope = harness.scope_of("POST", CHAT, [], None)
    harness.run(middleware(scope, nothing, nothing))
    calls.clear()

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    async def once() -> None:
        work = middleware(scope, nothing, nothing)
        sys.setprofile(watch)
        try:
            await work
        finally:
            sys.setprofile(None)

    harness.run(once())
    assert "app" in calls
    assert len(calls) <= 8, calls


# ---- line 2: what decides


@covers(2)
def test_with_the_block_off_a_training_url_is_only_stripped(make: Callable[..., InProcess], tmp_path: Path) -> None:
    store = tmp_path / "off"
    harness = make(config={"token_id_capture": {"enabled": False, "dir": str(store)}})
    assert_only_stripped(harness)
    assert not store.exists()


@covers(2)
def test_without_sink_and_directory_a_training_url_is_only_stripped(make: Callable[..., InProcess]) -> None:
    assert_only_stripped(make(own_sink=True))


def assert_only_stripped(harness: InProcess) -> None:
    for stream in (False, True):
        script = Script(label=harness.new_rollout())
        headers = [script.header(), ("content-type", "application/json"), ("accept-encoding", "br")]
        content = ask(CHAT, stream=stream)
        answer = harness.request("POST", target(script.label), headers=headers, body=content)
        plain = plain_answer(harness.store_dir.parent, "POST", CHAT, headers=headers, body=content)
        assert (answer.status, answer.body) == (200, plain.body)
        assert answer.header("x-tokcap-call-id") is None
        (seen,) = harness.notes.read(script.label)
        assert (seen.path, seen.body, seen.header("accept-encoding")) == (CHAT, content, ["br"])


@covers(2)
def test_an_evaluation_url_captures_no_tokens(harness: InProcess) -> None:
    rollout, script = harness.new_rollout(), Script()
    headers = [script.header(), ("content-type", "application/json")]
    content = ask(CHAT)
    answer = harness.request("POST", target(rollout, training=False), headers=headers, body=content)
    assert answer.body == plain_answer(harness.store_dir.parent, "POST", CHAT, headers=headers, body=content).body
    assert_no_trace(harness, rollout)


@covers(2)
@pytest.mark.parametrize("how", ["argument", "TOKCAP_DIR", "TOKCAP_CONFIG"])
def test_the_directory_comes_from_the_argument_or_from_the_environment(
    make: Callable[..., InProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = tmp_path / "tokens"
    if how == "argument":
        harness = make(config=block(store))
    else:
        run = tmp_path / "run.json"
        run.write_text(json.dumps(block(store)))
        monkeypatch.setenv(how, str(store if how == "TOKCAP_DIR" else run))
        harness = make(own_sink=True)
    harness.store_dir = store
    rollout, script = harness.new_rollout(), Script()
    assert call(harness, rollout, script).status == 200
    assert_recorded(harness, rollout, script)


@covers(2)
def test_no_flag_of_an_agent_is_looked_at(make: Callable[..., InProcess], tmp_path: Path) -> None:
    config = block(tmp_path / "tokens") | {
        "agent": {"responses_api_agents": {"simple": {"token_id_capture": False}}},
    }
    harness = make(config=config)
    harness.store_dir = tmp_path / "tokens"
    rollout, script = harness.new_rollout(), Script()
    call(harness, rollout, script)
    assert_recorded(harness, rollout, script)


@covers(2)
def test_settings_that_can_not_be_are_refused_when_the_app_is_made(make: Callable[..., InProcess]) -> None:
    for wrong in ({"max_body_bytes": 0}, {"no_such_setting": 1}, {"routes": {"generate": "generating"}}):
        with pytest.raises(ConfigError):
            make(**wrong)
    with pytest.raises(ConfigError):
        make(config={"token_id_capture": {"enabled": True, "dir": "relative"}})


# ---- line 3: base URLs


@covers(3)
@pytest.mark.parametrize(
    ("base", "how", "expected"),
    [
        ("http://h:8000", {}, "http://h:8000/ng-rollout/r-1/training-token-capture"),
        ("http://h:8000/", {}, "http://h:8000/ng-rollout/r-1/training-token-capture"),
        ("https://h/api", {}, "https://h/api/ng-rollout/r-1/training-token-capture"),
        ("http://h:8000/v1", {}, "http://h:8000/ng-rollout/r-1/training-token-capture/v1"),
        ("http://h:8000/v1/", {}, "http://h:8000/ng-rollout/r-1/training-token-capture/v1"),
        ("https://h/api/v1", {}, "https://h/api/ng-rollout/r-1/training-token-capture/v1"),
        ("http://h:8000", {"openai": True}, "http://h:8000/ng-rollout/r-1/training-token-capture/v1"),
        ("http://h:8000/v1", {"openai": True}, "http://h:8000/ng-rollout/r-1/training-token-capture/v1"),
        ("http://h:8000", {"training": False}, "http://h:8000/ng-rollout/r-1"),
        ("http://h:8000/v1", {"training": False}, "http://h:8000/ng-rollout/r-1/v1"),
        ("http://[::1]:8000/v1", {}, "http://[::1]:8000/ng-rollout/r-1/training-token-capture/v1"),
    ],
)
def test_the_base_url_of_a_rollout(base: str, how: dict[str, Any], expected: str) -> None:
    from tokcap.asgi import rollout_base_url

    assert rollout_base_url(base, "r-1", **how).rstrip("/") == expected


@covers(3)
@pytest.mark.parametrize("bad", ["a/b", "", "..", "a b", "a%2Fb", "é"])
def test_the_base_url_of_a_bad_id_is_refused(bad: str) -> None:
    from tokcap.asgi import rollout_base_url

    with pytest.raises(InvalidIdError):
        rollout_base_url("http://h:8000", bad)


@covers(3)
@pytest.mark.parametrize(("base", "path"), [("http://testserver/v1", "/chat/completions"), ("http://testserver", CHAT)])
def test_what_a_client_builds_from_its_base_url_is_captured(harness: InProcess, base: str, path: str) -> None:
    from tokcap.asgi import rollout_base_url

    rollout, script = harness.new_rollout(), Script()
    url = urlsplit(rollout_base_url(base, rollout) + path)
    headers = [script.header(), ("content-type", "application/json")]
    assert harness.request("POST", url.path, headers=headers, body=ask(CHAT)).status == 200
    assert_recorded(harness, rollout, script)


# ---- line 4: redirects


@covers(4)
def test_a_redirect_below_a_root_path_keeps_both(harness: InProcess) -> None:
    harness.root_path = "/api"
    rollout = harness.new_rollout()
    answer = harness.request("GET", target(rollout, "/v1/models/"))
    assert answer.header("location") == f"http://testserver/api{target(rollout, '/v1/models')}"
    answer = harness.request("GET", target(rollout, "/x"), headers=[Script(redirect="/api/v1/models").header()])
    assert answer.header("location") == f"/api{target(rollout, '/v1/models')}"
    assert_no_trace(harness, rollout)


# ---- line 5: evaluation capture


def evaluation(directory: Path, *, on: bool = True, tokens: Path | None = None) -> dict[str, Any]:
    config = {"model_call_capture_dir": str(directory), "observability_enabled": on}
    return config | (block(tokens) if tokens else {})


@covers(5)
def test_the_directory_alone_does_not_turn_evaluation_capture_on(
    make: Callable[..., InProcess], tmp_path: Path
) -> None:
    harness = make(config=evaluation(tmp_path / "records", on=False))
    harness.request("POST", target("r-1", training=False), headers=[Script().header()], body=ask(CHAT))
    assert not (tmp_path / "records" / "evaluation").exists()


@covers(5)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_evaluation_capture_records_calls_of_both_kinds_of_url(
    make: Callable[..., InProcess], tmp_path: Path, training: bool, stream: bool
) -> None:
    from tokcap.evaluation import summaries

    harness = make(config=evaluation(tmp_path / "records", tokens=tmp_path / "tokens"))
    harness.store_dir = tmp_path / "tokens"
    rollout, script = harness.new_rollout(), Script()
    headers = [script.header(), ("content-type", "application/json")]
    content = ask(CHAT, stream=stream)
    answer = harness.request("POST", target(rollout, training=training), headers=headers, body=content)
    assert_same_view(answer, plain_answer(tmp_path, "POST", CHAT, headers=headers, body=content))
    harness.run(asyncio.sleep(0))
    found = [summary for summary in summaries(tmp_path / "records") if rollout in repr(summary)]
    assert len(found) == 1
    assert any((tmp_path / "records" / "evaluation").rglob("*"))
    assert harness.exists(rollout) is training


@covers(5)
def test_the_store_of_tokens_does_not_see_the_evaluation_records_beside_it(
    make: Callable[..., InProcess], tmp_path: Path
) -> None:
    harness = make(config=evaluation(tmp_path / "both", tokens=tmp_path / "both"))
    harness.store_dir = tmp_path / "both"
    trained, evaluated = harness.new_rollout(), harness.new_rollout()
    call(harness, trained, Script())
    harness.request("POST", target(evaluated, training=False), headers=[Script().header()], body=ask(CHAT))
    with FileStore(tmp_path / "both", read_only=True) as store:
        assert [name for name, _ in store.rollouts()] == [trained]
    with FileStore(tmp_path / "both") as store:
        store.sweep_now(0)
    assert any((tmp_path / "both" / "evaluation").rglob("*"))


@covers(5)
def test_evaluation_capture_that_fails_costs_no_answer(make: Callable[..., InProcess], tmp_path: Path) -> None:
    (tmp_path / "records").mkdir(mode=0o700)
    harness = make(config=evaluation(tmp_path / "records"))
    place = tmp_path / "records" / "evaluation"
    if place.exists():
        for each in sorted(place.rglob("*"), reverse=True):
            each.rmdir() if each.is_dir() else each.unlink()
        place.rmdir()
    place.write_text("something that is no directory")
    answer = harness.request("POST", target("r-1", training=False), headers=[Script().header()], body=ask(CHAT))
    assert answer.status == 200


@covers(5)
def test_no_route_returns_token_arrays_of_the_store(harness: InProcess) -> None:
    rollout = harness.new_rollout()
    call(harness, rollout, Script(choices=[choice(987_000, 3)]))
    base = target(rollout, "")
    for method in ("GET", "POST"):
        for path in (
            base,
            base + "/",
            f"/ng-rollout/{rollout}",
            f"/ng-rollout/{rollout}/",
            "/ng-rollout/",
            f"/tokcap/rollouts/{rollout}",
            f"/tokcap/{rollout}",
            "/tokcap/",
            "/tokcap/metrics",
            f"{base}/tokcap/rollouts/{rollout}",
        ):
            assert b"987001" not in harness.request(method, path).body


# ---- line 6: lifespan, mounts, forks


@covers(6)
def test_without_a_lifespan_event_the_middleware_makes_its_own_sink(
    make: Callable[..., InProcess], tmp_path: Path
) -> None:
    harness = make(config=block(tmp_path / "tokens"))
    harness.store_dir = tmp_path / "tokens"
    for stream in (False, True):
        rollout, script = harness.new_rollout(), Script()
        call(harness, rollout, script, stream=stream)
        assert_recorded(harness, rollout, script)
    assert harness.engine.lifespan == []


@covers(6)
def test_a_lifespan_reaches_the_app_and_calls_are_stored_when_it_ends(
    make: Callable[..., InProcess], tmp_path: Path
) -> None:
    harness = make(config=block(tmp_path / "tokens"))
    harness.store_dir = tmp_path / "tokens"

    async def live() -> list[str]:
        asked: asyncio.Queue[Message] = asyncio.Queue()
        answers: asyncio.Queue[str] = asyncio.Queue()

        async def send(message: Message) -> None:
            answers.put_nowait(message["type"])

        life = asyncio.ensure_future(harness.app({"type": "lifespan", "asgi": {"version": "3.0"}}, asked.get, send))
        asked.put_nowait({"type": "lifespan.startup"})
        first = await answers.get()
        script = Script()
        headers = [script.header(), ("content-type", "application/json")]
        await harness.exchange("POST", target("r-1"), headers=headers, body=ask(CHAT))
        asked.put_nowait({"type": "lifespan.shutdown"})
        second = await answers.get()
        await life
        return [first, second]

    assert harness.run(live()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert harness.engine.lifespan == ["lifespan.startup", "lifespan.shutdown"]
    assert_recorded(harness, "r-1", Script())


@covers(6)
def test_a_directory_that_is_unsafe_is_refused_when_the_app_is_made(
    make: Callable[..., InProcess], tmp_path: Path
) -> None:
    unsafe = tmp_path / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError):
        make(config=block(unsafe))


def serve_across_a_fork(channel: Channel, directory: str) -> None:
    """In a child: make the app, serve a call, fork, and serve one in either process."""
    harness = InProcess(Path(directory), config=block(Path(directory) / "tokens"), engine="vllm")
    harness.store_dir = Path(directory) / "tokens"
    assert call(harness, "before", Script()).status == 200
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # The loop of the parent stays: closed here, it would be taken from the epoll instance that both share.
            of_parent, harness.runner = harness.runner, asyncio.Runner()
            assert of_parent is not harness.runner
            code = 0 if call(harness, "in-the-child", Script(label="in-the-child")).status == 200 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert call(harness, "in-the-parent", Script(label="in-the-parent")).status == 200
    channel.send(os.waitstatus_to_exitcode(status))
    channel.send({name: harness.outcomes(name) for name in ("before", "in-the-child", "in-the-parent")})
    harness.close()


@covers(6)
def test_the_sink_survives_a_fork(tmp_path: Path, nursery: Nursery) -> None:
    child = nursery.start(serve_across_a_fork, str(tmp_path))
    assert child.receive() == 0
    assert child.receive() == {name: ["recorded"] for name in ("before", "in-the-child", "in-the-parent")}
    child.end()


@covers(6, 9)
def test_a_stripped_path_is_still_guarded_by_the_key_of_the_server(make: Callable[..., InProcess]) -> None:
    harness = make(api_key="secret")
    for training in (True, False):
        for headers in ([], [("authorization", "Bearer wrong")]):
            rollout = harness.new_rollout()
            answer = harness.request(
                "POST",
                target(rollout, training=training),
                headers=[Script().header(), ("content-type", "application/json"), *headers],
                body=ask(CHAT),
            )
            assert (answer.status, answer.json) == (401, {"error": "Unauthorized"})
            # The key is not known here, so the intent was written.
            assert harness.settled(rollout) == ["no_generation"] if training else not harness.exists(rollout)
    rollout, script = harness.new_rollout(), Script()
    call(harness, rollout, script, headers=[("authorization", "Bearer secret")])
    assert_recorded(harness, rollout, script)


@covers(9)
@pytest.mark.parametrize("status", [401, 403])
def test_a_401_and_a_403_of_the_engine_are_no_generation(harness: InProcess, status: int) -> None:
    rollout = harness.new_rollout()
    call(harness, rollout, Script(status=status, body='{"error": "no"}'))
    assert harness.settled(rollout) == ["no_generation"]


@covers(9)
@pytest.mark.parametrize("known", ["settings", "state"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/unknown"])
def test_a_stranger_leaves_no_trace_where_the_key_is_known(
    make: Callable[..., InProcess], known: str, path: str
) -> None:
    harness = make(api_key="secret", **({"api_keys": ["other", "secret"]} if known == "settings" else {}))
    if known == "state":
        harness.scope["app"] = state_of_vllm(api_key=["other", "secret"])
    for headers in ([], [("authorization", "Bearer wrong")], [("authorization", "secret")], [("authorization", "")]):
        rollout = harness.new_rollout()
        answer = call(harness, rollout, Script(), path, headers=headers)
        assert answer.status == 401
        assert_no_trace(harness, rollout)
    rollout, script = harness.new_rollout(), Script()
    answer = call(harness, rollout, script, path, headers=[("authorization", "Bearer secret")])
    assert answer.status == (404 if path == "/v1/unknown" else 200)
    assert harness.exists(rollout)
    assert harness.notes.read(rollout)[0].header("authorization") == ["Bearer secret"]


@covers(9)
def test_the_key_is_not_asked_of_what_generates_nothing(make: Callable[..., InProcess]) -> None:
    """The server itself decides there."""
    harness = make(api_keys=["secret"])
    for method, path in (("GET", "/health"), ("OPTIONS", CHAT), ("POST", "/tokenize")):
        assert harness.request(method, target("r-1", path)).status == 200


# ---- line 7: routes


@covers(7)
def test_configuration_adds_routes_to_the_table(make: Callable[..., InProcess]) -> None:
    own = "/own" + CHAT
    harness = make(routes={f"POST {own}": "generating", "POST /v1/new/route": "other"})
    for stream in (False, True):
        rollout, script = harness.new_rollout(), Script()
        answer = call(harness, rollout, script, own, content=ask(CHAT, stream=stream))
        assert answer.status == 200
        assert harness.notes.read(rollout)[0].json["return_token_ids"] is True
        assert b'"token_ids":[' not in answer.body
        assert_recorded(harness, rollout, script)
    rollout = harness.new_rollout()
    assert call(harness, rollout, Script(), "/v1/new/route").status == 200
    assert_no_trace(harness, rollout)


@covers(8)
def test_an_unknown_route_that_answers_with_ids_is_recorded(harness: InProcess) -> None:
    """It speaks chat, but no table says so: the client asked for ids itself."""
    rollout, script = harness.new_rollout(), Script()
    answer = call(harness, rollout, script, "/v1/own", content=ask(CHAT, return_token_ids=True, logprobs=True))
    assert answer.json["choices"][0]["token_ids"] == script.choices[0].ids
    assert_recorded(harness, rollout, script)


# ---- the engine that these tests stand on


def test_the_scripted_engine_tells_over_http_what_it_saw(tmp_path: Path) -> None:
    notes = Notebook(tmp_path)
    harness = InProcess(tmp_path / "h", engine="vllm")
    harness.engine.notes = notes
    assert isinstance(harness.engine, FakeEngine)
    harness.request("GET", "/v1/models", headers=[Script(label="seen").header()])
    (seen,) = harness.request("GET", "/__seen").json
    assert (seen["label"], seen["path"], seen["ended"]) == ("seen", "/v1/models", "answered")
    harness.request("POST", "/__tell?name=go")
    assert notes.told("go")
    harness.close()
