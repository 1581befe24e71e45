"""The whole proxy: what it captures, what it asks of an engine to know it, its own routes, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, Notebook
from tests.fake_script import Script, choice
from tests.memory_store import MemoryState, MemoryStore
from tests.proxy_harness import (
    Answer,
    Background,
    Gate,
    Handler,
    RawServer,
    ask,
    client,
    in_time,
    is_closed,
    plain,
    read_answer,
    read_request,
    serving,
)
from tokcap import FileStore
from tokcap.asgi import rollout_token
from tokcap.asgi.interface import Message
from tokcap.capture import CaptureContext, captured_call
from tokcap.config import close_process_endpoints
from tokcap.errors import ConfigError, InvalidOptionError, UpstreamError
from tokcap.serve.address import upstream_address
from tokcap.serve.app import ServedApp, make_app
from tokcap.serve.connection import Connection, Exchange
from tokcap.serve.options import ServeOptions, options_from_environment
from tokcap.serve.proxied import ProxiedApp
from tokcap.serve.upstream import Upstream, detect

PREFIX = "/ng-rollout/r-1/training-token-capture"
CHAT = "/v1/chat/completions"
REQUEST = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
Behind = Callable[[Handler], RawServer]


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture
def behind(background: Background) -> Iterator[Behind]:
    with contextlib.ExitStack() as stack:

        def make(handler: Handler) -> RawServer:
            server = RawServer(background, handler)
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture(autouse=True)
def captures(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the proxies of these tests capture."""
    monkeypatch.setenv("TOKCAP_DIR", str(store_dir))
    monkeypatch.delenv("TOKCAP_CONFIG", raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    yield store_dir
    asyncio.run(close_process_endpoints())


@pytest.fixture
def engine(background: Background, tmp_path: Path) -> Iterator[tuple[Notebook, str]]:
    """A scripted engine that says it is vLLM 0.32.0: what it saw, and its URL."""
    notes = Notebook(tmp_path / "notes")
    with serving(background, FakeEngine(notes)) as port:
        yield notes, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def served(background: Background, url: str, *, implementation: str = "h11", **options: Any) -> Iterator[int]:
    """The whole proxy in front of a URL; gives its port."""
    app = ServedApp(ServeOptions(upstream=url, **options))
    with serving(background, app, implementation=implementation, lifespan="on") as port:
        yield port


def chat(port: int, script: Script, path: str = PREFIX + CHAT, **members: Any) -> Answer:
    name, value = script.header()
    body = json.dumps({**json.loads(REQUEST), **members}).encode()
    return ask(port, path, "POST", {"content-type": "application/json", name: value}, body)


def outcomes(directory: Path, rollout: str = "r-1") -> list[str]:
    with FileStore(directory, read_only=True) as store:
        return [call.outcome for call in store.read_now(rollout).calls]


def refused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def answers_of(pages: dict[str, Any]) -> tuple[list[Any], Handler]:
    """A handler with JSON for some paths (or a status), 404 for all others; and what it heard."""
    heard: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            heard.append(request)
            found = pages.get(request.target.decode(), 404)
            if isinstance(found, int):
                writer.write(plain(b"{}", b"%d Status" % found))
            else:
                writer.write(plain(found if isinstance(found, bytes) else json.dumps(found).encode()))
            await writer.drain()

    return heard, handle


# ---- what becomes of a captured call


def scope_of(path: str = CHAT, **more: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-length", b"2")],
        "client": ("10.0.0.9", 1),
        "scheme": "http",
        **more,
    }


class Played:
    """One request to the inner application, inside a captured call."""

    def __init__(self, *received: dict[str, Any] | Exception) -> None:
        self.sent: list[Message] = []
        self.context: CaptureContext | None = None
        self.stays = asyncio.Event()
        self._received = list(received) or [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        if not self._received:
            await self.stays.wait()
        message = self._received.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def play(self, url: str, **scope: Any) -> None:
        store = MemoryStore(MemoryState())
        upstream = Upstream(upstream_address(url), connect_s=5)
        try:
            async with captured_call(store, "r-1", "c-1") as self.context:
                await ProxiedApp(upstream)(scope_of(**scope), self.receive, self.send)
                self.outcome, self.reason = self.context.outcome, self.context.reason
        finally:
            upstream.close()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status


GONE = {"type": "http.disconnect"}


def test_engine_that_can_not_be_reached_has_sampled_nothing() -> None:
    async def act() -> Played:
        played = Played()
        await played.play(refused_url())
        return played

    played = asyncio.run(act())
    assert (played.status, played.outcome) == (502, "no_generation")
    assert "nothing was sent to the engine" in played.reason


def test_engine_whose_queue_is_full_has_sampled_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        address = server.getsockname()
        # The queue holds one; who comes after it is left to wait.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(address)

        async def act() -> Played:
            played = Played()
            upstream = Upstream(upstream_address(f"http://127.0.0.1:{address[1]}"), connect_s=0.2)
            async with captured_call(MemoryStore(MemoryState()), "r-1") as context:
                await ProxiedApp(upstream)(scope_of(), played.receive, played.send)
                played.outcome, played.reason = context.outcome, context.reason
            return played

        played = asyncio.run(act())
    assert (played.status, played.outcome) == (502, "no_generation")
    assert "did not accept a connection within 0.2 s" in played.reason


def test_client_that_left_before_anything_was_sent_has_made_nothing_sample(behind: Behind) -> None:
    heard, handler = answers_of({})

    async def act() -> Played:
        played = Played(GONE)
        await played.play(behind(handler).url)
        return played

    played = asyncio.run(act())
    assert (played.sent, played.outcome) == ([], "no_generation")
    assert heard == []


@pytest.mark.parametrize("read", [False, True])
def test_engine_that_had_the_request_may_have_sampled(behind: Behind, read: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (read_request(reader) if read else reader.readexactly(1))
        writer.transport.abort()

    async def act() -> Played:
        played = Played()
        await played.play(behind(handle).url)
        return played

    played = asyncio.run(act())
    assert (played.status, played.outcome) == (502, None)
    assert played.context is not None
    assert played.context.outcome == "lost"


@pytest.mark.parametrize("sent", [False, True])
def test_head_that_can_not_be_sent_whole_may_have_reached_the_engine(
    monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    async def fail(*_: Any) -> Any:
        raise UpstreamError("in the middle of it", sent=sent)

    async def act() -> Played:
        played = Played()
        await played.play("http://127.0.0.1:9")
        return played

    monkeypatch.setattr(Upstream, "begin", fail)
    played = asyncio.run(act())
    assert (played.status, played.outcome) == (502, None if sent else "no_generation")


def test_request_for_a_connection_that_is_closed_already_was_not_sent(behind: Behind) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def act() -> UpstreamError:
        connection = await Connection.open(address, None, 10)
        while not connection.closed:
            await asyncio.sleep(0.001)
        exchange = Exchange(connection)
        with pytest.raises(UpstreamError) as caught:
            await exchange.send_head("GET", b"/", [(b"host", b"x")])
        assert exchange.finish() is None
        return caught.value

    address = upstream_address(behind(handle).url)
    assert not asyncio.run(act()).sent


def test_connection_that_the_engine_just_closed_is_not_used_even_if_the_loop_has_not_seen_it(behind: Behind) -> None:
    gate, closed = Gate(), Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.passed()
        writer.close()
        await writer.wait_closed()
        closed.open()

    async def act() -> None:
        connection = await Connection.open(address, None, 10)
        assert connection.usable()
        gate.open()
        closed.wait()  # without giving the loop a chance to read the end
        assert not connection.closed
        in_time(lambda: not connection.usable(), "the end in the kernel")
        connection.abort()

    address = upstream_address(behind(handle).url)
    asyncio.run(act())


def test_answer_that_breaks_off_is_an_error_for_the_server(behind: Behind) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart")

    played_all: list[Played] = []

    async def act() -> None:
        played_all.append(Played())
        await played_all[0].play(behind(handle).url)

    with pytest.raises(UpstreamError, match="the answer broke off") as caught:
        asyncio.run(act())
    assert caught.value.sent
    assert [message["type"] for message in played_all[0].sent] == ["http.response.start", "http.response.body"]
    assert played_all[0].sent[1] == {"type": "http.response.body", "body": b"part", "more_body": True}


def test_error_of_a_middleware_breaks_the_request_off_and_is_raised(behind: Behind) -> None:
    gone = Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.open()

    async def act() -> None:
        first = {"type": "http.request", "body": b"{", "more_body": True}
        await Played(first, RuntimeError("no more of it")).play(behind(handle).url)

    with pytest.raises(RuntimeError, match="no more of it"):
        asyncio.run(act())
    gone.wait()


def test_cancelled_request_is_broken_off(behind: Behind) -> None:
    ready, gone = Gate(), Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        ready.open()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.open()

    async def act() -> CaptureContext | None:
        played = Played()
        task = asyncio.create_task(played.play(behind(handle).url))
        await ready.passed()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return played.context

    context = asyncio.run(act())
    gone.wait()
    assert context is not None
    assert context.outcome == "aborted"


def test_body_without_a_field_that_frames_it_is_framed_by_what_came(behind: Behind) -> None:
    heard, handler = answers_of({CHAT: {}})
    url = behind(handler).url

    async def act() -> None:
        await Played().play(url, headers=[])
        parts = [{"type": "http.request", "body": part, "more_body": part != b""} for part in (b"a", b"b", b"")]
        await Played(*parts).play(url, headers=[])
        await Played({"type": "http.request"}).play(url, headers=[])

    asyncio.run(act())
    assert [each.body for each in heard] == [b"{}", b"ab", b""]
    assert heard[0].values(b"content-length") == [b"2"]
    assert heard[1].values(b"transfer-encoding") == [b"chunked"]
    assert not heard[2].values(b"content-length")


# ---- the whole of it in front of an engine


@pytest.mark.parametrize("stream", [False, True])
def test_call_is_recorded_before_the_client_has_its_answer(
    background: Background, engine: tuple[Notebook, str], captures: Path, stream: bool
) -> None:
    script = Script(choices=[choice(7000, 3)])
    with served(background, engine[1]) as port:
        answer = chat(port, script, stream=stream)
        with FileStore(captures, read_only=True) as store:
            (entry,) = store.read_now("r-1").entries
    assert answer.status == 200
    assert answer.values("x-tokcap-call-id") == [entry.model_call_id]
    assert entry.generation_token_ids.tolist() == [7000, 7001, 7002]
    assert entry.extra["engine"] == {"name": "vllm", "version": "0.32.0"}


def test_call_without_the_prefix_leaves_no_trace(
    background: Background, engine: tuple[Notebook, str], captures: Path
) -> None:
    with served(background, engine[1]) as port:
        assert chat(port, Script(label="plain"), CHAT).status == 200
    (seen,) = engine[0].read("plain")
    assert "return_token_ids" not in seen.json
    with FileStore(captures, read_only=True) as store:
        assert list(store.rollouts()) == []


def test_request_with_the_whole_url_as_its_target_is_captured(
    background: Background, engine: tuple[Notebook, str], captures: Path
) -> None:
    with served(background, engine[1]) as port:
        assert chat(port, Script(), f"http://proxy.test{PREFIX}{CHAT}").status == 200
    assert outcomes(captures) == ["recorded"]


def test_client_that_leaves_a_stream_ends_it_at_the_engine(
    background: Background, engine: tuple[Notebook, str], captures: Path
) -> None:
    script = Script(label="left", choices=[choice(7000, 9)], waits=["3"])
    name, value = script.header()
    body = json.dumps({**json.loads(REQUEST), "stream": True}).encode()
    head = f"POST {PREFIX}{CHAT} HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\ncontent-length: {len(body)}\r\n\r\n"
    with served(background, engine[1]) as port:
        with client(port) as connection:
            connection.sendall(head.encode() + body)
            got = b""
            while b"w7000" not in got:
                got += connection.recv(65536)
        in_time(lambda: engine[0].read("left")[0].ended == "gone", "the end at the engine")
        in_time(lambda: outcomes(captures) == ["aborted"], "the outcome")
    with FileStore(captures, read_only=True) as store:
        (entry,) = store.read_now("r-1").entries
    assert entry.generation_token_ids.tolist()[0] == 7000
    assert len(entry.generation_token_ids) < 9


def test_stream_that_the_engine_breaks_off_is_broken_off_and_aborted(
    background: Background, engine: tuple[Notebook, str], captures: Path
) -> None:
    with served(background, engine[1]) as port:
        answer = chat(port, Script(choices=[choice(7000, 9)], raises_after=4), stream=True)
    assert (answer.status, answer.whole) == (200, False)
    assert outcomes(captures) == ["aborted"]


def test_json_that_the_engine_breaks_off_never_reaches_the_client_as_a_whole_answer(
    background: Background, behind: Behind, captures: Path
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        writer.write(head + b'{"choices": [')

    with served(background, behind(handle).url, engine="vllm") as port:
        answer = ask(port, PREFIX + CHAT, "POST", body=REQUEST)
    assert (answer.status >= 500) or not answer.whole
    assert outcomes(captures) == ["lost"]


def test_call_that_finds_no_engine_is_answered_502_and_has_sampled_nothing(
    background: Background, captures: Path
) -> None:
    with served(background, refused_url(), engine="vllm") as port:
        answer = ask(port, PREFIX + CHAT, "POST", body=REQUEST)
    assert answer.status == 502
    assert outcomes(captures) == ["no_generation"]


def test_redirect_of_the_engine_keeps_the_client_on_the_proxy_and_on_the_prefix(
    background: Background, engine: tuple[Notebook, str], captures: Path
) -> None:
    with served(background, engine[1]) as port:
        answer = chat(port, Script(label="slash"), f"{PREFIX}{CHAT}/?a=1")
    assert answer.status == 307
    assert answer.values("location") == [f"{PREFIX}{CHAT}?a=1"]


def test_key_of_the_engine_is_checked_before_anything_is_written(
    background: Background, tmp_path: Path, captures: Path
) -> None:
    fake = FakeEngine(Notebook(tmp_path / "notes"), api_key="the-key")
    with (
        serving(background, fake) as inner,
        served(background, f"http://127.0.0.1:{inner}", api_keys=("the-key",)) as port,
    ):
        assert ask(port, PREFIX + CHAT, "POST", {"authorization": "Bearer other"}, REQUEST).status == 401
        with FileStore(captures, read_only=True) as store:
            assert list(store.rollouts()) == []
        assert ask(port, PREFIX + CHAT, "POST", {"authorization": "Bearer the-key"}, REQUEST).status == 200
    assert outcomes(captures) == ["recorded"]


# ---- which engine it is


def with_upstream(url: str, act: Callable[[Upstream], Coroutine[Any, Any, Any]]) -> Any:
    async def acted() -> Any:
        upstream = Upstream(upstream_address(url))
        try:
            return await act(upstream)
        finally:
            upstream.close()

    return asyncio.run(acted())


VLLM_MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"/version": {"version": "0.32.0"}, "/v1/models": VLLM_MODELS}, ("vllm", "0.32.0")),
        ({"/version": {"version": "0.32.0"}}, ("vllm", "0.32.0")),
        ({"/version": {"version": "0.32.0"}, "/v1/models": 401}, ("vllm", "0.32.0")),
        ({"/version": {"version": "0.32.0"}, "/v1/models": {"data": []}}, ("vllm", "0.32.0")),
        (
            {"/version": {"version": "1.2.0"}, "/v1/models": {"data": [{"owned_by": "tensorrt_llm"}]}},
            ("trtllm", "1.2.0"),
        ),
        ({"/server_info": {"tokenizer_path": "t", "version": "0.5.23"}}, ("sglang", "0.5.23")),
        ({"/get_server_info": {"internal_states": [], "version": "0.4.10"}}, ("sglang", "0.4.10")),
        ({"/server_info": {"server_args": {}}}, ("sglang", "")),
        (
            {"/server_info": 401, "/get_server_info": 401, "/v1/models": {"data": [{"owned_by": "sglang"}]}},
            ("sglang", ""),
        ),
        ({"/info": {"model_id": "m", "max_total_tokens": 9, "version": "3.3.0"}}, ("tgi", "3.3.0")),
        ({}, ("", "")),
        ({"/version": b"<html>", "/v1/models": b"[]", "/info": b"[1]"}, ("", "")),
        ({"/version": {"version": 3}, "/v1/models": {"data": [3]}}, ("", "")),
        ({"/version": 501}, ("", "")),
    ],
)
def test_engine_tells_its_name_and_version(behind: Behind, pages: dict[str, Any], expected: tuple[str, str]) -> None:
    _, handler = answers_of(pages)
    assert with_upstream(behind(handler).url, detect) == expected


@pytest.mark.parametrize("pages", [{"/version": 503}, {"/server_info": 500}, {"/v1/models": 502}])
def test_engine_that_is_not_ready_is_to_be_asked_again(behind: Behind, pages: dict[str, Any]) -> None:
    _, handler = answers_of(pages)
    url = behind(handler).url
    with pytest.raises(UpstreamError, match="isn't ready") as caught:
        with_upstream(url, detect)
    assert caught.value.sent


def test_engine_that_answers_without_an_end_is_not_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UpstreamError, match="gave no answer within"):
            with_upstream(url, lambda upstream: upstream.get(b"/version", 0.2))


def test_endless_answer_is_not_read_to_its_end(behind: Behind) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    url = behind(handle).url
    with pytest.raises(UpstreamError, match="answers too much"):
        with_upstream(url, lambda upstream: upstream.get(b"/version"))


def test_engine_that_comes_up_later_is_asked_when_it_is_needed(background: Background, behind: Behind) -> None:
    pages: dict[str, Any] = {"/version": 503, CHAT: 400, "/v1/other": {}}
    heard, handler = answers_of(pages)
    with served(background, behind(handler).url) as port:
        assert ask(port, "/v1/other").status == 200  # what isn't captured passes all the same
        refused = ask(port, PREFIX + CHAT, "POST", body=REQUEST)
        assert (refused.status, "isn't ready" in refused.json["error"]["message"]) == (503, True)
        pages["/version"] = {"version": "0.32.0"}
        assert ask(port, PREFIX + CHAT, "POST", body=REQUEST).status == 400
        assert ask(port, PREFIX + CHAT, "POST", body=REQUEST).status == 400
    # Asked at the start, for the call that was refused, and for the one that wasn't.
    assert [each.target for each in heard].count(b"/version") == 3


def test_what_a_proxy_was_told_is_read_when_it_starts_and_not_when_the_engine_is_known(
    background: Background, behind: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of secrets may be a pipe, or be gone by then."""
    secret, file = "a secret of thirty-two bytes, say", tmp_path / "secrets"
    file.write_text(secret)
    file.chmod(0o600)
    monkeypatch.setenv("TOKCAP_ROLLOUT_SECRET_FILE", str(file))
    pages: dict[str, Any] = {"/version": 503, CHAT: 400}
    heard, handler = answers_of(pages)
    path = f"/ng-rollout/r-1~{rollout_token(secret, 'r-1')}/training-token-capture{CHAT}"
    with served(background, behind(handler).url) as port:
        file.unlink()
        pages |= {"/version": 404, "/server_info": {"version": "0.5.15", "server_args": {}}}
        assert ask(port, path, "POST", body=REQUEST).status == 400
        assert ask(port, PREFIX + CHAT, "POST", body=REQUEST).status == 403
        assert ask(port, "/tokcap/health").json["engine"] == "sglang"
    (asked,) = [json.loads(each.body) for each in heard if each.target.decode() == CHAT]
    assert asked["return_meta_info"] is True  # as only this engine is asked


def test_engine_that_is_not_there_yet_is_no_reason_not_to_start(background: Background, captures: Path) -> None:
    with served(background, refused_url()) as port:
        assert ask(port, PREFIX + CHAT, "POST", body=REQUEST).status == 502
        assert ask(port, "/tokcap/health").json["engine"] == "unknown"
    with FileStore(captures, read_only=True) as store:
        assert list(store.rollouts()) == []


def test_calls_that_wait_for_the_engine_to_be_known_share_one_answer(background: Background, behind: Behind) -> None:
    waiting, gate, asked = Gate(), Gate(), [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if request.target == b"/version":
                asked[0] += 1
                if asked[0] > 1:  # the first is asked when the proxy starts
                    waiting.open()
                    await gate.passed()
            writer.write(plain(b"{}", b"503 Not Ready"))

    with served(background, behind(handle).url) as port, contextlib.ExitStack() as stack:
        calls = [stack.enter_context(client(port)) for _ in range(20)]
        for call in calls:
            call.sendall(f"POST {PREFIX}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        waiting.wait()
        ask(port, "/v1/other")  # by now the others have been read, too
        gate.open()
        assert [read_answer(call, "POST").status for call in calls] == [503] * 20
    assert asked[0] < 20


@pytest.mark.parametrize("by", ["option", "configuration"])
def test_engine_that_is_given_is_not_asked(
    background: Background, behind: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    options: dict[str, Any] = {"engine": "sglang", "engine_version": "0.5.23"}
    if by == "configuration":
        block = {"enabled": True, "dir": str(tmp_path / "store")}
        (tmp_path / "run.json").write_text(json.dumps({"token_id_capture": block, "tokcap_serving": options}))
        monkeypatch.delenv("TOKCAP_DIR")
        monkeypatch.setenv("TOKCAP_CONFIG", str(tmp_path / "run.json"))
        options = {}
    heard, handler = answers_of({CHAT: 400})
    with served(background, behind(handler).url, **options) as port:
        ask(port, PREFIX + CHAT, "POST", body=REQUEST)
        assert ask(port, "/tokcap/health").json["engine_version"] == "0.5.23"
    assert [each.target for each in heard] == [CHAT.encode()]


def test_engine_is_asked_with_the_key_that_it_expects(background: Background, behind: Behind) -> None:
    heard, handler = answers_of({"/version": {"version": "0.32.0"}})
    with served(background, behind(handler).url, api_keys=("one", "two")):
        pass
    assert {value for each in heard for value in each.values(b"authorization")} == {b"Bearer one"}


# ---- its own routes


def test_health_tells_whether_the_engine_can_be_reached(background: Background, engine: tuple[Notebook, str]) -> None:
    with served(background, engine[1]) as port:
        up = ask(port, "/tokcap/health")
    with served(background, refused_url(), engine="vllm") as port:
        down = ask(port, "/tokcap/health")
    assert (up.status, down.status) == (200, 200)
    assert up.json.items() >= {"status": "ok", "upstream": "reachable", "engine": "vllm"}.items()
    assert down.json.items() >= {"status": "ok", "upstream": "unreachable", "engine_version": "unknown"}.items()


def test_routes_of_the_engine_stay_reachable(background: Background, engine: tuple[Notebook, str]) -> None:
    with served(background, engine[1]) as port:
        assert ask(port, "/metrics").body == b"# engine metrics\n"
        assert ask(port, "/health").status == 200
        assert ask(port, "/tokcaption").status == 404
        ask(port, "/ng-rollout/r-1/tokcap/health")
    assert [seen.path for seen in engine[0].read()][-4:] == ["/metrics", "/health", "/tokcaption", "/tokcap/health"]


def test_metrics_count_the_calls_of_this_process(background: Background, engine: tuple[Notebook, str]) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed, and counts what is counted")

    def count() -> float:
        answer = ask(port, "/tokcap/metrics")
        assert answer.values("content-type")[0].startswith("text/plain")
        (line,) = [line for line in answer.body.decode().splitlines() if line.startswith(series)]
        return float(line.removeprefix(series))

    series = 'tokcap_calls_total{outcome="recorded"} '
    with served(background, engine[1]) as port:
        before = count()
        chat(port, Script())
        in_time(lambda: count() == before + 1, "the count")
        assert b"r-1" not in ask(port, "/tokcap/metrics").body


def test_openmetrics_are_given_to_who_asks_for_them(background: Background, engine: tuple[Notebook, str]) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed, and writes the text")
    with served(background, engine[1]) as port:
        answer = ask(port, "/tokcap/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.values("content-type")[0].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


def test_own_routes_are_only_read(background: Background, engine: tuple[Notebook, str]) -> None:
    with served(background, engine[1]) as port:
        refused = ask(port, "/tokcap/health", "POST", body=b"{}")
        assert (refused.status, refused.values("allow")) == (405, ["GET, HEAD"])
        assert [ask(port, path).status for path in ("/tokcap", "/tokcap/", "/tokcap/rollouts/r-1")] == [404, 404, 404]
        head = ask(port, "/tokcap/health", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.values("content-length")[0]) > 0
    assert not [seen for seen in engine[0].read() if seen.path.startswith("/tokcap")]


# ---- what is refused


@pytest.mark.parametrize("implementation", ["h11", "httptools"])
@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        b"content-length: 4\r\ncontent-length: 40\r\n\r\nbody",
        b"content-length: 4, 40\r\n\r\nbody",
        b"content-length: +4\r\n\r\nbody",
        b"content-length: -1\r\n\r\nbody",
        b"content-length: 0x4\r\n\r\nbody",
        b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\nx",
        b"transfer-encoding: chunked\r\n\r\n-4\r\nbody\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n0x4\r\nbody\r\n0\r\n\r\n",
        b"x: a\0b\r\n\r\n",
        b"x y: 1\r\n\r\n",
        b"x\r\n\r\n",
    ],
)
def test_request_with_an_unclear_end_reaches_no_engine(
    background: Background, behind: Behind, implementation: str, head: bytes
) -> None:
    pytest.importorskip(implementation, reason=f"{implementation} is not installed, one of two parsers of uvicorn")
    heard, handler = answers_of({"/one": {}, "/smuggled": {}})
    with served(background, behind(handler).url, implementation=implementation, engine="vllm") as port:
        with client(port) as connection:
            connection.sendall(
                b"POST /one HTTP/1.1\r\nhost: x\r\n" + head + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
            )
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                assert read_answer(connection, "POST").status in (400, 501)
            assert is_closed(connection)
        assert ask(port, "/one").status == 200
    assert [each.line for each in heard] == [b"GET /one HTTP/1.1"]


def test_websocket_is_refused_in_plain_http(background: Background, behind: Behind) -> None:
    heard, handler = answers_of({})
    headers = {"connection": "keep-alive, Upgrade", "upgrade": "WebSocket", "sec-websocket-version": "13"}
    with served(background, behind(handler).url, engine="vllm") as port:
        answer = ask(port, "/v1/realtime", headers=headers)
    assert (answer.status, "websocket" in answer.json["error"]["message"]) == (501, True)
    assert heard == []


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}])
def test_websocket_is_refused_where_a_server_speaks_it(extensions: dict[str, Any]) -> None:
    sent: list[Message] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = ServedApp(ServeOptions(upstream="http://127.0.0.1:9", engine="vllm"))
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "extensions": extensions}
    asyncio.run(app(scope, receive, send))
    if extensions:
        assert sent[0].items() >= {"type": "websocket.http.response.start", "status": 501}.items()
    else:
        assert sent == [{"type": "websocket.close", "code": 1008, "reason": "tokcap serve passes no websockets on"}]


def test_connect_is_refused(background: Background, behind: Behind) -> None:
    heard, handler = answers_of({})
    with served(background, behind(handler).url, engine="vllm") as port:
        assert ask(port, "other.test:443", "CONNECT").status in (400, 501)
    assert heard == []


# ---- options


@pytest.mark.parametrize(
    ("url", "shown", "authority"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", b"127.0.0.1:8000"),
        ("http://Engine.test/", "http://engine.test", b"engine.test"),
        ("http://engine.test:80/a/b/", "http://engine.test/a/b", b"engine.test"),
        ("https://engine.test", "https://engine.test", b"engine.test"),
        ("https://engine.test:80", "https://engine.test:80", b"engine.test:80"),
        ("http://[::1]:8000/%2F", "http://[::1]:8000/%2F", b"[::1]:8000"),
    ],
)
def test_address_of_an_engine(url: str, shown: str, authority: bytes) -> None:
    address = upstream_address(url)
    assert (str(address), address.authority) == (shown, authority)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine.test:8000",
        "127.0.0.1:8000",
        "ftp://engine.test",
        "http://",
        "http://:80",
        "http://engine.test:0",
        "http://engine.test:99999",
        "http://engine.test:x",
        "http://engine.test/?a=1",
        "http://engine.test/#a",
        "http://engine.test/a b",
        "http://engine.test/\r\nx: 1",
        "http://engine.test/\u00e9",
        "http://\u00e9ngine.test/",
        "http://user:secret@engine.test",
        "http://[::1",
    ],
)
def test_address_that_can_be_none_is_refused_without_showing_credentials(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="upstream") as caught:
        upstream_address(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("workers", 0),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
        ("graceful_timeout_s", -1.0),
        ("graceful_timeout_s", float("inf")),
        ("log_level", "loud"),
        ("api_keys", ("",)),
        ("api_keys", ("two words",)),
        ("engine_version", "0.32.0"),
    ],
)
def test_option_that_can_not_be_is_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError):
        ServeOptions(upstream="http://127.0.0.1:8000", **{option: value})


def test_options_reach_a_worker_through_the_environment() -> None:
    options = ServeOptions(
        upstream="http://127.0.0.1:8000",
        engine="sglang",
        engine_version="0.5.23",
        api_keys=("one", "two"),
        timeout_s=1.5,
    )
    assert options_from_environment(options.environment()) == options
    bare = ServeOptions(upstream="http://127.0.0.1:8000")
    assert options_from_environment(bare.environment()) == bare


def test_environment_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="TOKCAP_UPSTREAM is not set"):
        options_from_environment({})
    with pytest.raises(InvalidOptionError, match="TOKCAP_TIMEOUT"):
        options_from_environment({"TOKCAP_UPSTREAM": "http://127.0.0.1:8000", "TOKCAP_TIMEOUT": "soon"})


def test_application_is_made_of_the_environment(background: Background, behind: Behind, monkeypatch: Any) -> None:
    heard, handler = answers_of({"/v1/models": {}})
    monkeypatch.setenv("TOKCAP_UPSTREAM", behind(handler).url)
    monkeypatch.setenv("TOKCAP_ENGINE", "vllm")
    with serving(background, make_app(), lifespan="on") as port:
        assert ask(port, "/v1/models").status == 200
    assert len(heard) == 1


def test_proxy_that_would_capture_nothing_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKCAP_DIR")
    with pytest.raises(ConfigError, match="nothing says where to capture"):
        ServedApp(ServeOptions(upstream="http://127.0.0.1:8000"))


def test_directory_that_can_not_be_used_is_said_before_the_first_call(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_dir.chmod(0o777)
    with pytest.raises(PermissionError):
        ServedApp(ServeOptions(upstream="http://127.0.0.1:8000"))


def test_small_pieces_of_a_stream_are_not_gathered_by_the_kernel() -> None:
    """asyncio turns that off only for sockets that say that they speak TCP."""
    from tokcap.serve.options import ServeOptions
    from tokcap.serve.server import listening_socket

    with listening_socket(ServeOptions(upstream="http://127.0.0.1:1", port=0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP
