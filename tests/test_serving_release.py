"""Nothing of an answer's end leaves before its record is durable, and what fails after generation costs no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine import FakeEngineError, Message
from tests.fake_script import Script, choice
from tests.serving_harness import Exchange, InProcess, ask, harnesses, plain_answer
from tests.serving_lines import covers, covers_row
from tests.serving_steps import CHAT, ROUTES, assert_recorded, assert_same_view, call, target
from tokcap.errors import DurabilityError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., InProcess]]:
    yield from harnesses(tmp_path)


@pytest.fixture
def harness(make: Callable[..., InProcess]) -> InProcess:
    return make()


def steps(harness: InProcess) -> list[str]:
    """What happened, in order; of what was sent only the kind."""
    names = []
    for name, what in harness.log:
        if name == "sent":
            last = what["type"] == "http.response.body" and not what.get("more_body", False)
            name = {"http.response.start": "start"}.get(what["type"], "last body" if last else "body")
        names.append(name)
    return names


def headers_of(script: Script) -> list[tuple[str, str]]:
    return [("content-type", "application/json"), script.header()]


# ---- before the engine


@pytest.mark.parametrize("stream", [False, True])
@covers(8)
def test_the_intent_is_durable_before_the_engine_sees_the_call(make: Callable[..., InProcess], stream: bool) -> None:
    at_entry: list[list[str]] = []

    def watched(app: Any) -> Any:
        async def inner(scope: Any, receive: Any, send: Any) -> None:
            at_entry.append(steps(harness))
            assert harness.outcomes(rollout) == ["open"]
            await app(scope, receive, send)

        return inner

    harness = make(wrap=watched)
    rollout = harness.new_rollout()
    call(harness, rollout, Script(), stream=stream)
    assert at_entry == [["begin_call begins", "begin_call returned"]]


@covers(10)
@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages", "/v1/responses", "/v1/unknown"])
def test_an_intent_that_can_not_be_written_is_a_503_and_costs_no_generation(harness: InProcess, path: str) -> None:
    assert harness.sink is not None
    harness.sink.fails["begin_call"] = DurabilityError(28, "No space left on device")
    rollout = harness.new_rollout()
    answer = call(harness, rollout, Script(), path)
    assert answer.status == 503
    assert_error_shape(answer, path)
    assert harness.notes.read() == []
    assert not harness.exists(rollout)


def assert_error_shape(answer: Exchange, path: str) -> None:
    """As the clients of that dialect read errors."""
    assert (answer.header("content-type") or "").startswith("application/json")
    assert int(answer.header("content-length") or -1) == len(answer.body)
    error = answer.json["error"]
    assert error["message"]
    assert error["type"]
    if path == "/v1/messages":
        assert answer.json["type"] == "error"


@covers(10)
def test_a_frozen_rollout_is_a_409_and_a_retired_one_a_410_that_are_not_to_be_repeated(harness: InProcess) -> None:
    assert harness.sink is not None
    rollout, store = harness.new_rollout(), harness.sink.store
    call(harness, rollout, Script(label="before"))
    with store.freeze_now(rollout) as snapshot:
        for path in (CHAT, "/v1/messages"):
            answer = call(harness, rollout, Script(label="after"), path)
            assert (answer.status, answer.header("x-should-retry")) == (409, "false")
            assert_error_shape(answer, path)
        assert store.retire_now(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    for path in (CHAT, "/v1/messages"):
        answer = call(harness, rollout, Script(label="after"), path)
        assert (answer.status, answer.header("x-should-retry")) == (410, "false")
        assert_error_shape(answer, path)
    assert harness.notes.read("after") == []


@covers(7)
def test_what_generates_nothing_still_passes_for_a_frozen_rollout(harness: InProcess) -> None:
    assert harness.sink is not None
    rollout = harness.new_rollout()
    with harness.sink.store.freeze_now(rollout):
        assert harness.request("GET", target(rollout, "/v1/models")).status == 200


@covers(10)
def test_a_body_over_the_limit_is_a_413_before_more_is_taken(make: Callable[..., InProcess]) -> None:
    harness = make(max_body_bytes=100_000)
    rollout = harness.new_rollout()
    for declared in (False, True):
        parts = [b"x" * 10_000] * 1000
        headers = headers_of(Script()) + ([("content-length", str(10_000_000))] if declared else [])
        taken: list[None] = []
        answer = harness.run(
            harness.exchange(
                "POST", target(rollout), headers=headers, parts=parts, on_receive=partial(taken.append, None)
            )
        )
        assert answer.status == 413
        assert_error_shape(answer, CHAT)
        assert len(taken) <= (1 if declared else 12)
    assert harness.notes.read() == []
    assert not harness.exists(rollout)


@covers(10)
def test_a_body_just_at_the_limit_passes(make: Callable[..., InProcess]) -> None:
    content = ask(CHAT, user="x" * 1000)
    harness = make(max_body_bytes=len(content))
    rollout, script = harness.new_rollout(), Script()
    assert call(harness, rollout, script, content=content).status == 200
    assert_recorded(harness, rollout, script)
    assert call(harness, harness.new_rollout(), Script(), content=content + b" ").status == 413


@covers(14)
def test_a_compressed_body_that_grows_over_the_limit_is_refused(make: Callable[..., InProcess]) -> None:
    import gzip

    harness = make(max_body_bytes=100_000)
    rollout = harness.new_rollout()
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    answer = call(harness, rollout, Script(), content=bomb, headers=[("content-encoding", "gzip")])
    assert answer.status in (413, 415)
    assert harness.notes.read() == []
    assert not harness.exists(rollout)


@covers(7)
def test_the_limit_is_for_captured_calls_only(make: Callable[..., InProcess]) -> None:
    harness = make(max_body_bytes=10)
    script = Script(label="x")
    answer = harness.request("POST", "/tokenize", headers=headers_of(script), body=b"x" * 1000)
    assert answer.status == 200
    assert harness.notes.read("x")[0].body == b"x" * 1000


# ---- the end of an answer


@pytest.mark.parametrize("path", ROUTES)
@covers_row("2xx with ids and log-probs")
def test_an_answer_leaves_after_its_record_is_durable(harness: InProcess, path: str) -> None:
    rollout, script = harness.new_rollout(), Script()
    call(harness, rollout, script, path)
    done = steps(harness)
    assert done.index("put returned") < done.index("body" if "body" in done else "last body")
    assert "settle_call begins" not in done


@pytest.mark.parametrize("how", [{}, {"cut": 9}, {"cut": -1}, {"usage": False}, {"done": False}, {"per_chunk": 3}])
@pytest.mark.parametrize("count", [1, 2])
@covers(11)
def test_from_the_last_finish_reason_on_a_stream_is_held_until_the_record_is_durable(
    harness: InProcess, how: dict[str, Any], count: int
) -> None:
    """While the put is held, the client has every event before the last finish reason, and not one after."""
    assert harness.sink is not None
    rollout = harness.new_rollout()
    script = Script(choices=[choice(1000, 5), choice(1100, 9)], label=rollout, **how)
    body = ask(CHAT, stream=True, n=count)
    plain = plain_answer(harness.store_dir.parent, "POST", CHAT, headers=headers_of(script), body=body)
    so_far: list[bytes] = []

    async def play() -> Exchange:
        assert harness.sink is not None
        harness.sink.gate = asyncio.Event()

        async def note(message: Message) -> None:
            so_far.append(message.get("body", b""))

        client = asyncio.ensure_future(
            harness.exchange("POST", target(rollout), headers=headers_of(script), body=body, on_send=note)
        )
        while ("put begins", None) not in harness.log:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        held = b"".join(so_far)
        assert held.count(b'"finish_reason":"') == count - 1
        assert b"[DONE]" not in held
        assert b'"usage":{' not in held
        if "cut" not in how:
            assert held.count(b"data: ") == _events_before_the_last_finish(plain)
        assert not any(step == "last body" for step in steps(harness))
        harness.sink.gate.set()
        answer: Exchange = await client
        return answer

    answer = harness.run(play())
    assert answer.ended
    assert_recorded(harness, rollout, script, count=count)
    assert_same_view(answer, plain)


def _events_before_the_last_finish(answer: Exchange) -> int:
    return max(place for place, event in enumerate(answer.events) if '"finish_reason":"' in event)


@covers(11)
def test_the_late_ids_of_sglang_are_waited_for_before_anything_of_the_end_leaves(
    make: Callable[..., InProcess],
) -> None:
    harness = make(engine="sglang")
    rollout, script = harness.new_rollout(), Script(engine="sglang")
    call(harness, rollout, script, stream=True)
    before = harness.log[: [name for name, _ in harness.log].index("put returned")]
    sent = b"".join(what.get("body", b"") for name, what in before if name == "sent")
    assert b"w1003 " in sent
    assert b'"finish_reason":"' not in sent
    assert_recorded(harness, rollout, script)


@pytest.mark.parametrize("how", [{}, {"comments": True}])
@covers(11)
def test_start_comments_and_first_events_leave_while_the_engine_works(harness: InProcess, how: dict[str, Any]) -> None:
    rollout = harness.new_rollout()
    script = Script(label=rollout, waits=["3"], choices=[choice(1000, 6)], **how)
    seen: list[Message] = []

    async def play() -> Exchange:
        async def note(message: Message) -> None:
            seen.append(message)

        body = ask(CHAT, stream=True)
        client = asyncio.ensure_future(
            harness.exchange("POST", target(rollout), headers=headers_of(script), body=body, on_send=note)
        )
        while harness.notes.read(rollout)[:1] == [] or harness.notes.read(rollout)[0].events < 3:
            await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0)
        assert seen[0]["type"] == "http.response.start"
        text = b"".join(message.get("body", b"") for message in seen)
        assert text.count(b"data: ") == 3
        assert (text.count(b": keep-alive") >= 3) is bool(how)
        harness.notes.tell(f"{rollout}-3")
        answer: Exchange = await client
        return answer

    assert harness.run(play()).ended
    assert_recorded(harness, rollout, script)


@covers(11)
def test_a_slow_first_byte_delays_the_start_and_nothing_else(harness: InProcess) -> None:
    rollout = harness.new_rollout()
    script = Script(label=rollout, waits=["0"], comments=True)

    async def play() -> Exchange:
        body = ask(CHAT, stream=True)
        client = asyncio.ensure_future(harness.exchange("POST", target(rollout), headers=headers_of(script), body=body))
        while "body" not in steps(harness):  # the comment that keeps the connection alive
            await asyncio.sleep(0.001)
        harness.notes.tell(f"{rollout}-0")
        answer: Exchange = await client
        return answer

    assert harness.run(play()).body.startswith(b": keep-alive")
    assert_recorded(harness, rollout, script)


@covers(15)
def test_a_client_that_does_not_read_stops_the_engine(harness: InProcess) -> None:
    rollout, blocked = harness.new_rollout(), asyncio.Event()
    script = Script(label=rollout, choices=[choice(1000, 500)])

    async def play() -> None:
        release = asyncio.Event()

        async def stuck(message: Message) -> None:
            if message.get("body", b"").count(b"data: ") and not blocked.is_set():
                blocked.set()
                await release.wait()

        client = asyncio.ensure_future(
            harness.exchange(
                "POST", target(rollout), headers=headers_of(script), body=ask(CHAT, stream=True), on_send=stuck
            )
        )
        await blocked.wait()
        for _ in range(500):
            await asyncio.sleep(0)
        assert harness.notes.read(rollout)[0].events <= 5
        release.set()
        await client

    harness.run(play())
    assert_recorded(harness, rollout, script)


# ---- what fails after generation


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@covers_row("put fails after generation", "After generation tokcap never turns an answer into an error.")
def test_a_put_that_fails_costs_the_record_and_not_the_answer(harness: InProcess, path: str, stream: bool) -> None:
    assert harness.sink is not None
    harness.sink.fails["put"] = DurabilityError(5, "Input/output error")
    rollout, script = harness.new_rollout(), Script()
    answer = call(harness, rollout, script, path, stream=stream)
    plain = plain_answer(
        harness.store_dir.parent, "POST", path, headers=headers_of(script), body=ask(path, stream=stream)
    )
    assert answer.ended
    assert_same_view(answer, plain)
    assert harness.settled(rollout) == ["lost"]
    assert harness.calls(rollout)[0].detail


@pytest.mark.parametrize("error", [RuntimeError("a bug"), DurabilityError(5, "Input/output error")])
@covers_row("put fails after generation", "After generation tokcap never turns an answer into an error.")
def test_if_the_loss_can_not_be_written_either_the_open_intent_shows_it(harness: InProcess, error: Exception) -> None:
    assert harness.sink is not None
    for name in ("put", "settle_call", "mark_incomplete", "note_delivery"):
        harness.sink.fails[name] = error
    for stream in (False, True):
        rollout, script = harness.new_rollout(), Script()
        answer = call(harness, rollout, script, stream=stream)
        assert answer.status == 200
        assert answer.ended
        assert harness.outcomes(rollout) == ["open"]


@covers_row("put fails after generation")
def test_a_rollout_that_is_frozen_meanwhile_costs_the_record_and_not_the_answer(harness: InProcess) -> None:
    assert harness.sink is not None
    rollout, store = harness.new_rollout(), harness.sink.store
    script = Script(label=rollout, waits=["answer"])

    async def play() -> Exchange:
        client = asyncio.ensure_future(
            harness.exchange("POST", target(rollout), headers=headers_of(script), body=ask(CHAT))
        )
        while not harness.notes.read(rollout):
            await asyncio.sleep(0.001)
        (await store.freeze(rollout)).close()
        harness.notes.tell(f"{rollout}-answer")
        answer: Exchange = await client
        return answer

    assert harness.run(play()).status == 200
    assert harness.outcomes(rollout) == ["lost"]


@pytest.mark.parametrize("moment", ["early", "late"])
@covers_row("handler raises")
def test_what_a_handler_raises_reaches_the_server(harness: InProcess, moment: str) -> None:
    answer = call(harness, harness.new_rollout(), Script(raises=moment))
    assert isinstance(answer.error, FakeEngineError)
    assert answer.status == 0


@covers_row("handler raises")
def test_what_a_handler_raises_in_mid_stream_reaches_the_server(harness: InProcess) -> None:
    answer = call(harness, harness.new_rollout(), Script(raises_after=2), stream=True)
    assert isinstance(answer.error, FakeEngineError)
    assert len(answer.events) == 2


# ---- clients that go away, message by message


@pytest.mark.parametrize("raises", [False, True])
@covers_row("client disconnects while streaming")
def test_a_server_that_raises_when_a_client_has_gone_is_answered_in_the_same_way(
    harness: InProcess, raises: bool
) -> None:
    harness.send_raises = raises
    rollout = harness.new_rollout()
    script = Script(choices=[choice(1000, 50)])
    call(harness, rollout, script, stream=True, disconnect_after=3)
    assert harness.settled(rollout) == ["aborted"]
    (entry,) = harness.entries(rollout)
    count = len(entry.generation_token_ids)
    assert 2 <= count < 50
    assert entry.generation_token_ids.tolist() == script.choices[0].ids[:count]


@pytest.mark.parametrize("stream", [False, True])
@covers_row("client disconnects while streaming", "client disconnects before the answer of a non-streamed call")
def test_a_server_that_cancels_the_app_leaves_an_aborted_call(harness: InProcess, stream: bool) -> None:
    rollout = harness.new_rollout()
    script = Script(label=rollout, choices=[choice(1000, 6)], waits=["3", "answer"])

    async def play() -> None:
        client = asyncio.ensure_future(
            harness.exchange("POST", target(rollout), headers=headers_of(script), body=ask(CHAT, stream=stream))
        )
        wanted = 3 if stream else 0
        while not (seen := harness.notes.read(rollout)) or seen[0].body is None or seen[0].events < wanted:
            await asyncio.sleep(0.001)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client

    harness.run(play())
    assert harness.settled(rollout) == ["aborted"]
    found = [entry.generation_token_ids.tolist() for entry in harness.entries(rollout)]
    assert found == ([script.choices[0].ids[:2]] if stream else [])
    harness.until(lambda: harness.notes.read(rollout)[0].ended in ("cancelled", "gone"))


@covers_row("client seen gone only after the last body message")
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_at_the_last_message_is_no_disconnect(harness: InProcess, stream: bool) -> None:
    """The server says `http.disconnect` as soon as it has been given the last message, as uvicorn does."""
    rollout, script = harness.new_rollout(), Script(waits=[])
    answer = call(harness, rollout, script, stream=stream)
    assert answer.ended
    harness.until(lambda: harness.calls(rollout)[0].delivered != "unknown")
    assert_recorded(harness, rollout, script)
    assert harness.calls(rollout)[0].delivered == "full"


@covers_row("client disconnects while streaming")
def test_a_client_that_leaves_while_the_end_is_held_still_has_a_record(harness: InProcess) -> None:
    """Everything was sampled; the put was under way when it left."""
    rollout, script = harness.new_rollout(), Script()
    script.label = rollout

    async def play() -> None:
        assert harness.sink is not None
        harness.sink.gate = asyncio.Event()
        begun = ("put begins", None)
        client = asyncio.ensure_future(
            harness.exchange(
                "POST",
                target(rollout),
                headers=headers_of(script),
                body=ask(CHAT, stream=True),
                disconnect_when=lambda: begun in harness.log,
                then=harness.sink.gate.set,
            )
        )
        await client

    harness.run(play())
    assert harness.settled(rollout) == ["recorded"]
    assert_recorded(harness, rollout, script)
    assert harness.calls(rollout)[0].delivered != "full"


@covers_row("client disconnects before the answer of a non-streamed call")
def test_a_client_that_leaves_while_it_sends_its_request_costs_nothing(harness: InProcess) -> None:
    rollout = harness.new_rollout()
    script = Script(label=rollout)

    async def play() -> Exchange:
        arrived = asyncio.Event()
        return await harness.exchange(
            "POST",
            target(rollout),
            headers=headers_of(script),
            parts=[ask(CHAT)[:10], *[b" "] * 10_000],
            on_receive=arrived.set,
            disconnect_when=arrived.is_set,
        )

    harness.run(play())
    assert harness.notes.read(rollout) == []
    assert harness.outcomes(rollout) in ([], ["no_generation"])


# ---- several at once


@covers_row("2xx with ids and log-probs")
def test_many_calls_at_once_each_have_their_own_record(harness: InProcess) -> None:
    rollouts = [harness.new_rollout() for _ in range(4)]

    async def play() -> list[Exchange]:
        tasks = []
        for number in range(40):
            script = Script(choices=[choice(1000 + 10 * number, 3)], label=f"many-{number}")
            body = ask(CHAT, stream=number % 2 == 0)
            tasks.append(harness.exchange("POST", target(rollouts[number % 4]), headers=headers_of(script), body=body))
        return await asyncio.gather(*tasks)

    answers = harness.run(play())
    assert {answer.status for answer in answers} == {200}
    found = set()
    for number, answer in enumerate(answers):
        rollout = rollouts[number % 4]
        (entry,) = [
            each for each in harness.entries(rollout) if each.model_call_id == answer.header("x-tokcap-call-id")
        ]
        assert entry.generation_token_ids.tolist() == list(range(1000 + 10 * number, 1003 + 10 * number))
        found.add(entry.model_call_id)
    assert len(found) == 40
    assert json.loads(harness.notes.read("many-1")[0].body or b"null")["messages"]
