"""What an attack on the middleware found, each as a test: odd applications, odd servers, odd moments."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import recordings
from tokcap import FileStore, TokenEntry
from tokcap.asgi import CaptureMiddleware
from tokcap.evaluation import summaries

STREAM = recordings.load("stream-0").calls[0]
WHOLE = recordings.load("linear-0").calls[0]
EVENTS = [f"{line}\n\n".encode() for line in STREAM.sse or ()]
PATH = "/ng-rollout/r-1/training-token-capture/v1/chat/completions"
ASK = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
SSE = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]

Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]


class SlowSink:
    """A file store whose puts wait for a gate, and which writes down when they return."""

    def __init__(self, store: FileStore, log: list[str]) -> None:
        self.store, self.log, self.gate = store, log, asyncio.Event()

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await self.store.begin_call(rollout_id, model_call_id, choices, **known)

    async def put(self, entry: TokenEntry) -> None:
        self.log.append("put begins")
        await self.gate.wait()
        await self.store.put(entry)
        self.log.append("put returned")

    async def settle_call(self, *things: Any) -> None:
        await self.store.settle_call(*things)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self.store.mark_incomplete(rollout_id, model_call_id)

    async def close(self) -> None:
        await self.store.close()


async def played(
    app: App,
    body: dict[str, Any],
    *,
    path: str = PATH,
    send: Callable[[Message], Awaitable[None]] | None = None,
    receive: Callable[[], Awaitable[Message]] | None = None,
    around: Any = None,
) -> list[Message]:
    """One request, as a server plays it; the messages that it was given to send."""
    sent: list[Message] = []
    pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def from_client() -> Message:
        while not pending:
            await asyncio.sleep(3600)
        return pending.pop(0)

    async def to_client(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"server")]
    request = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    request |= {} if around is None else {"app": around}
    await app(request, receive or from_client, send or to_client)
    return sent


def engine(*messages: Message) -> App:
    """An application that reads the request and sends these messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


def start(headers: list[tuple[bytes, bytes]], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def block(directory: Path) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, "dir": str(directory)}}


def outcomes(directory: Path) -> list[tuple[str, str]]:
    with FileStore(directory, read_only=True).read_now("r-1") as snapshot:
        return [(call.outcome, call.delivered) for call in snapshot.calls]


def body_of(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent[1:])


def test_a_second_task_that_sends_does_not_release_the_end_before_its_record(store_dir: Path) -> None:
    """As the keep-alive of some frameworks, which calls `send` beside the stream's own task."""
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(SSE))

        async def stream() -> None:
            for event in EVENTS:
                await send(part(event))
            await send(part(b"", False))

        streaming = asyncio.create_task(stream())
        while "put begins" not in log:
            await asyncio.sleep(0)
        ping = asyncio.create_task(send(part(b": ping\n\n")))
        await asyncio.sleep(0.02)
        sink.gate.set()
        await asyncio.gather(ping, streaming)

    async def to_client(message: Message) -> None:
        if b"[DONE]" in message.get("body", b""):
            log.append("the end is sent")

    sink = SlowSink(FileStore(store_dir, require_intent=True), log)
    asyncio.run(played(CaptureMiddleware(app, sink=sink, engine="vllm"), {**ASK, "stream": True}, send=to_client))
    assert log == ["put begins", "put returned", "the end is sent"]


def test_a_receive_that_repeats_the_body_for_ever_does_not_stop_the_server(store_dir: Path) -> None:
    async def again() -> Message:
        return {"type": "http.request", "body": json.dumps(ASK).encode(), "more_body": False}

    app = CaptureMiddleware(engine(start(JSON), part(json.dumps(WHOLE.response).encode(), False)), block(store_dir))
    asyncio.run(asyncio.wait_for(played(app, ASK, receive=again), 30))
    assert outcomes(store_dir) == [("recorded", "full")]


@pytest.mark.parametrize("stream", [True, 1, "true", "yes", "on", "1", "TRUE"])
def test_a_token_that_a_stream_swallowed_is_found_however_the_stream_was_asked_for(
    store_dir: Path, stream: Any
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        assert asked["stream_options"] == {"include_usage": True}
        await send(start(SSE))
        for event in [*EVENTS[:3], *EVENTS[4:]]:
            await send(part(event))
        await send(part(b"", False))

    asyncio.run(played(CaptureMiddleware(app, block(store_dir), engine="vllm"), {**ASK, "stream": stream}))
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["lost"]


def test_several_choices_are_counted_from_the_first_call_on(store_dir: Path) -> None:
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(json.loads((await receive())["body"]))
        await send(start(SSE))
        await send(part(b"", False))

    asyncio.run(played(CaptureMiddleware(app, block(store_dir), engine="vllm"), {**ASK, "stream": True, "n": 2}))
    assert asked[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("raises", [True, False])
def test_half_an_answer_never_reaches_the_client_as_a_whole_one(store_dir: Path, raises: bool) -> None:
    whole = json.dumps(WHOLE.response).encode()
    length = [(b"content-length", str(len(whole)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start([*JSON, *length]))
        await send(part(whole[:100]))
        if raises:
            raise ConnectionError("the engine broke off")

    async def run() -> list[Message]:
        sent: list[Message] = []

        async def to_client(message: Message) -> None:
            sent.append(message)

        try:
            await played(CaptureMiddleware(app, block(store_dir), engine="vllm"), ASK, send=to_client)
        except ConnectionError:
            assert raises
        return sent

    sent = asyncio.run(run())
    if raises:
        assert sent == []  # so that the server can say what is wrong
    else:
        assert dict(sent[0]["headers"])[b"content-length"] == str(len(whole)).encode()
        assert [(message["body"], message["more_body"]) for message in sent[1:]] == [(whole[:100], True)]
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["lost"]


def test_the_end_of_a_stream_is_sent_before_the_application_hears_of_it(store_dir: Path) -> None:
    """Frameworks stop a send that waits for a slow reader as soon as they hear of a disconnect."""
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        listening.add_done_callback(lambda _: order.append("heard"))
        await send(start(SSE))
        for event in EVENTS:
            await send(part(event))
        await send(part(b"", False))
        await listening

    async def slow(message: Message) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            await asyncio.sleep(0.02)
            order.append("sent")

    app_around = CaptureMiddleware(app, block(store_dir), engine="vllm")
    asyncio.run(played(app_around, {**ASK, "stream": True}, send=slow))
    assert order == ["sent", "heard"]
    assert outcomes(store_dir) == [("recorded", "full")]


def test_a_client_that_hangs_up_once_it_has_read_the_last_event_got_everything(store_dir: Path) -> None:
    gone = asyncio.Event()
    first = True

    async def receive() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": json.dumps({**ASK, "stream": True}).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def app(scope: Any, inner: Any, send: Any) -> None:
        await inner()
        await send(start(SSE))
        for event in EVENTS:
            await send(part(event))
        gone.set()
        await asyncio.sleep(0.01)
        await send(part(b"", False))

    app_around = CaptureMiddleware(app, block(store_dir), engine="vllm")
    asyncio.run(played(app_around, {**ASK, "stream": True}, receive=receive))
    assert outcomes(store_dir) == [("recorded", "full")]


@pytest.mark.parametrize(("path", "outcome"), [("/my/generate", "lost"), ("/v1/chat/completions", "no_generation")])
def test_what_vllm_notes_of_a_request_proves_nothing_for_routes_that_are_not_its_own(
    store_dir: Path, path: str, outcome: str
) -> None:
    state = SimpleNamespace(vllm_config=SimpleNamespace(model_config=None), engine_client=None)
    app = CaptureMiddleware(
        engine(start(JSON, 500), part(b'{"error":{"message":"x"}}', False)),
        block(store_dir),
        routes={"POST /my/generate": "generating"},
    )
    where = PATH.replace("/v1/chat/completions", path)
    asyncio.run(played(app, ASK, path=where, around=SimpleNamespace(state=state)))
    assert [found for found, _ in outcomes(store_dir)] == [outcome]


@pytest.mark.parametrize(
    ("engine_name", "path", "within"),
    [
        ("sglang", "/generate", "sampling_params"),
        ("vllm", "/inference/v1/generate", "sampling_params"),
        ("tgi", "/generate", "parameters"),
        ("vllm", "/v1/chat/completions", ""),
    ],
)
def test_pinned_parameters_are_where_the_engine_reads_them(
    store_dir: Path, engine_name: str, path: str, within: str
) -> None:
    asked: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.update(json.loads((await receive())["body"]))
        await send(start(JSON, 400))
        await send(part(b"{}", False))

    middleware = CaptureMiddleware(
        app, block(store_dir), engine=engine_name, sampling_overrides={"temperature": 1.0, "top_p": 1.0}
    )
    given = {"text": "x", within: {"top_p": 0.5, "top_k": 3}} if within else {**ASK, "top_p": 0.5}
    asyncio.run(played(middleware, given, path=PATH.replace("/v1/chat/completions", path)))
    found = asked[within] if within else asked
    assert (found["temperature"], found["top_p"]) == (1.0, 1.0)
    assert not within or ("temperature" not in asked and found["top_k"] == 3)


def test_a_sink_that_panics_costs_no_answer(store_dir: Path) -> None:
    class PanicError(BaseException):
        """As extensions in other languages raise it."""

    class Panicking(SlowSink):
        async def put(self, entry: TokenEntry) -> None:
            raise PanicError("index out of range")

    async def run() -> list[Message]:
        sink = Panicking(FileStore(store_dir, require_intent=True), [])
        app = engine(start(JSON), part(json.dumps(WHOLE.response).encode(), False))
        return await played(CaptureMiddleware(app, sink=sink, engine="vllm"), ASK)

    sent = asyncio.run(run())
    assert json.loads(body_of(sent))["choices"][0]["message"] == (WHOLE.response or {})["choices"][0]["message"]
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["lost"]


def test_a_shutdown_waits_for_what_is_written_of_calls_that_are_given_up(store_dir: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await receive()
        await send(start(SSE))
        for event in EVENTS[:4]:
            await send(part(event))
        streaming.set()
        await asyncio.sleep(3600)

    async def run() -> list[str]:
        sink = SlowSink(FileStore(store_dir, require_intent=True), log)
        middleware = CaptureMiddleware(app, sink=sink, engine="vllm")
        call = asyncio.create_task(played(middleware, {**ASK, "stream": True}))
        await streaming.wait()
        call.cancel()

        async def shutdown() -> Message:
            return {"type": "lifespan.shutdown"}

        async def sent(message: Message) -> None:
            log.append(message["type"])

        asyncio.get_running_loop().call_later(0.05, sink.gate.set)
        await middleware({"type": "lifespan"}, shutdown, sent)
        with pytest.raises(asyncio.CancelledError):
            await call
        return log

    log: list[str] = []
    streaming = asyncio.Event()
    assert asyncio.run(run()) == ["put begins", "put returned", "lifespan.shutdown.complete"]


def test_refused_calls_have_a_summary_too(store_dir: Path, tmp_path: Path) -> None:
    config = {**block(store_dir), "model_call_capture_dir": str(tmp_path / "calls"), "observability_enabled": True}
    app = CaptureMiddleware(engine(start(JSON), part(b"{}", False)), config, engine="vllm", max_body_bytes=200)
    large = {**ASK, "padding": "x" * 300}
    for where in (PATH, PATH.replace("/training-token-capture", "")):
        asyncio.run(played(app, large, path=where))
    training, evaluation = sorted(summaries(tmp_path / "calls", "r-1"), key=lambda each: not each.training)
    assert (training.status, training.error_class) == (413, "client_error")
    assert (evaluation.status, evaluation.training) == (200, False)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_leaves_no_reference_cycle_behind(store_dir: Path, stream: bool) -> None:
    """The collector would stop the event loop for all that the calls of a busy server hold."""
    messages = [start(SSE), *map(part, EVENTS), part(b"", False)]
    if not stream:
        messages = [start(JSON), part(json.dumps(WHOLE.response).encode(), False)]

    async def run() -> int:
        app = CaptureMiddleware(engine(*messages), block(store_dir), engine="vllm")
        for _ in range(3):
            await played(app, {**ASK, "stream": stream})
        gc.collect()
        gc.disable()
        gc.freeze()  # what stores of other tests leave when their threads end is not of these calls
        try:
            for _ in range(20):
                await played(app, {**ASK, "stream": stream})
            await asyncio.sleep(0.01)
            return gc.collect()
        finally:
            gc.unfreeze()
            gc.enable()

    assert asyncio.run(run()) < 20 * 5


def test_data_without_content_keeps_a_stream_alive_and_is_no_error(store_dir: Path) -> None:
    messages = [start(SSE), part(b"data: \n\n"), *map(part, EVENTS), part(b"", False)]
    app = CaptureMiddleware(engine(*messages), block(store_dir), engine="vllm")
    sent = asyncio.run(played(app, {**ASK, "stream": True}))
    assert sent[1]["body"] == b"data: \n\n"
    assert outcomes(store_dir) == [("recorded", "full")]


def test_other_lines_of_an_event_and_its_line_ends_stay(store_dir: Path) -> None:
    events = [b"id: %d\r\n" % number + event.replace(b"\n", b"\r\n") for number, event in enumerate(EVENTS)]
    app = CaptureMiddleware(engine(start(SSE), *map(part, events), part(b"", False)), block(store_dir), engine="vllm")
    shown = body_of(asyncio.run(played(app, {**ASK, "stream": True})))
    assert shown.startswith(b"id: 0\r\ndata: {")
    assert b"\n" not in shown.replace(b"\r\n", b"")
    assert outcomes(store_dir) == [("recorded", "full")]


def test_a_process_that_has_nowhere_to_write_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TOKCAP_DIR", "TOKCAP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    app = CaptureMiddleware(engine(start(JSON), part(b"{}", False)))
    assert "set TOKCAP_DIR" in caplog.text
    caplog.clear()
    for _ in range(2):
        asyncio.run(played(app, ASK))
    assert caplog.text.count("nothing is captured") == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"token_id_capture": {"dir": "/var/lib/tokcap"}}, "token_id_capture.enabled is not true"),
        ({"observability_enabled": True}, "needs model_call_capture_dir"),
    ],
)
def test_half_a_configuration_is_told(config: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    CaptureMiddleware(engine(), config)
    assert words in caplog.text


def test_an_engine_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"engine is 'vlm', did you mean vllm\?"):
        CaptureMiddleware(engine(), {}, engine="vlm")
    with pytest.raises(ValueError, match="token_id_capture"):
        CaptureMiddleware(engine(), {}, dir="/var/lib/tokcap")


OWN_WISH = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("own_wish", [True, False])
def test_a_compressed_stream_is_captured_and_passes_unchanged_if_nothing_is_stripped(
    store_dir: Path, own_wish: bool
) -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    encoded = [packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in EVENTS] + [packer.flush()]
    headers = [*SSE, (b"content-encoding", b"gzip")]
    messages = [start(headers), *map(part, encoded), part(b"", False)]
    app = CaptureMiddleware(engine(*messages), block(store_dir), engine="vllm", engine_version="0.32.0")
    body = {**ASK, "stream": True, **(OWN_WISH if own_wish else {})}
    seen = body_of(asyncio.run(played(app, body)))
    assert outcomes(store_dir) == [("recorded", "full")]
    if own_wish:
        assert seen == b"".join(encoded)
    else:
        plain = gzip.decompress(seen)
        assert b"[DONE]" in plain
        assert b'"token_ids":[' not in plain


def test_a_stream_that_is_not_of_its_encoding_passes_as_it_is(store_dir: Path) -> None:
    headers = [*SSE, (b"content-encoding", b"gzip")]
    for own_wish in ({}, OWN_WISH):
        messages = [start(headers), part(b"no gzip "), part(b"at all", False)]
        app = CaptureMiddleware(engine(*messages), block(store_dir), engine="vllm")
        assert body_of(asyncio.run(played(app, {**ASK, "stream": True, **own_wish}))) == b"no gzip at all"
    assert {outcome for outcome, _ in outcomes(store_dir)} == {"aborted"}


@pytest.mark.parametrize("headers", [JSON, SSE, [(b"content-type", b"text/plain")]])
def test_an_application_that_begins_an_answer_and_fails_before_it_read_the_request_generated_nothing(
    store_dir: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(headers))
        raise RuntimeError("before anything was read")

    with pytest.raises(RuntimeError):
        asyncio.run(played(CaptureMiddleware(app, block(store_dir), engine="vllm"), ASK))
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["no_generation"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("gives_up", [True, False])
def test_a_send_that_is_cancelled_while_the_record_is_written_releases_nothing_before_it(
    store_dir: Path, stream: bool, gives_up: bool
) -> None:
    """Some frameworks limit the time of a send, and then raise, or send the same again."""
    log: list[str] = []
    whole = json.dumps(WHOLE.response).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(SSE if stream else JSON))
        for piece in EVENTS if stream else [whole]:
            message = part(piece, stream)
            try:
                await asyncio.wait_for(send(message), 0.02)
            except TimeoutError:
                asyncio.get_running_loop().call_later(0.02, sink.gate.set)
                if gives_up:
                    raise
                await send(message)
        if stream:
            await send(part(b"", False))

    async def to_client(message: Message) -> None:
        if b"[DONE]" in message.get("body", b"") or (not stream and message.get("body")):
            log.append("the end is sent")

    sink = SlowSink(FileStore(store_dir, require_intent=True), log)
    middleware = CaptureMiddleware(app, sink=sink, engine="vllm")
    try:
        asyncio.run(played(middleware, {**ASK, "stream": stream}, send=to_client))
    except TimeoutError:
        assert gives_up
    assert log[:2] == ["put begins", "put returned"]
    assert set(log[2:]) <= {"the end is sent"}
    assert gives_up or "the end is sent" in log
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["recorded"]


@pytest.mark.parametrize(("path", "end"), [("/v1/messages", b"message_stop"), ("/v1/responses", b"completed")])
def test_a_stream_that_breaks_off_does_not_end_as_a_whole_one_in_another_dialect(
    store_dir: Path, path: str, end: bytes
) -> None:
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(SSE))
        for event in EVENTS[:-2]:  # without usage and [DONE]
            await send(part(event))
        raise ConnectionError("the engine broke off")

    async def to_client(message: Message) -> None:
        sent.append(message.get("body", b""))

    asks: dict[str, dict[str, Any]] = {
        "/v1/messages": {**ASK, "max_tokens": 9},
        "/v1/responses": {"model": "smollm2", "input": "hi"},
    }
    middleware = CaptureMiddleware(app, block(store_dir), engine="vllm")
    with pytest.raises(ConnectionError):
        asyncio.run(
            played(
                middleware,
                {**asks[path], "stream": True},
                path=PATH.replace("/v1/chat/completions", path),
                send=to_client,
            )
        )
    assert end not in b"".join(sent)


def test_a_call_that_is_cancelled_again_and_again_has_a_summary_with_its_outcome(
    store_dir: Path, tmp_path: Path
) -> None:
    """As cancel scopes do, which cancel every await until the task has ended."""
    config = {**block(store_dir), "model_call_capture_dir": str(tmp_path / "calls"), "observability_enabled": True}
    streaming = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(SSE))
        for event in EVENTS[:4]:
            await send(part(event))
        streaming.set()
        await asyncio.sleep(3600)

    async def run() -> set[str]:
        task = asyncio.create_task(played(CaptureMiddleware(app, config, engine="vllm"), {**ASK, "stream": True}))
        await streaming.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        return {each.get_coro().__qualname__ for each in asyncio.all_tasks()}  # type: ignore[union-attr]

    left = asyncio.run(run())
    assert not any("_listen" in name for name in left)
    (summary,) = summaries(tmp_path / "calls", "r-1")
    assert summary.outcome == "aborted"
    assert [outcome for outcome, _ in outcomes(store_dir)] == ["aborted"]
