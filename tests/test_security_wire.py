"""The proxy between a hostile client and a hostile engine: each gets one reading of what the other sent, and no more.

The long form is `scripts/prove security`. Single requests that are refused: `test_serve.py`; headers of one connection,
answers that break off: `test_proxy.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.proofs import security
from tests.proofs.security_wire import NotStrictError, Strict, strict_answers, through
from tests.proxy_harness import Background, client, in_time, is_closed, read_answer
from tests.serving_harness import ask
from tokcap.asgi import CaptureMiddleware
from tokcap.asgi.interface import Headers
from tokcap.config import close_process_endpoints
from tokcap.errors import InvalidOptionError
from tokcap.serve import app as app_module
from tokcap.serve import connection, headers, proxied, upstream
from tokcap.serve.app import ServedApp
from tokcap.serve.heads import bounded_protocol
from tokcap.serve.options import ServeOptions, options_from_environment
from tokcap.serve.patience import PatientReceive, SlowClientError, patient_protocol
from tokcap.serve.server import server_of

PARSERS = pytest.mark.parametrize("parser", ["h11", "httptools"])
CHAT = "/ng-rollout/r-1/training-token-capture/v1/chat/completions"


@pytest.fixture(autouse=True)
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKCAP_DIR", str(tmp_path / "store"))
    for name in ("TOKCAP_CONFIG", "TOKCAP_ROLLOUT_SECRET", "TOKCAP_ROLLOUT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield
    asyncio.run(close_process_endpoints())


# ---- smuggling


@PARSERS
def test_drawn_requests_that_want_to_be_two_reach_the_engine_as_what_they_were(parser: str, tmp_path: Path) -> None:
    assert security.wire_requests(tmp_path, 7, range(300), parser) == (300, [])


@PARSERS
def test_drawn_answers_that_want_to_be_two_reach_the_client_as_one(parser: str, tmp_path: Path) -> None:
    assert security.wire_answers(tmp_path, 7, range(80), parser) == (80, [])


def keep_all(given: Headers) -> Headers:
    return given


def as_it_came(given: Headers) -> Headers:
    return [(name, value) for name, value in given if name in (b"content-length", b"transfer-encoding")]


@pytest.mark.parametrize(
    ("side", "numbers", "parser", "where", "name", "replacement"),
    [
        ("requests", (952, 1397), "h11", app_module, "framing_problem", lambda given: None),
        ("answers", (386, 572), "httptools", headers, "_end_to_end", keep_all),
        ("answers", range(60), "h11", connection.Connection, "has_unread_bytes", property(lambda self: False)),
    ],
    ids=["unclear ends pass", "headers of one connection pass", "what follows an answer is kept"],
)
def test_a_check_that_is_taken_out_is_missed(
    side: str,
    numbers: tuple[int, ...],
    parser: str,
    where: Any,
    name: str,
    replacement: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In drawn cases that need it."""
    run = security.wire_requests if side == "requests" else security.wire_answers
    assert run(tmp_path, 7, numbers, parser)[1] == []
    monkeypatch.setattr(where, name, replacement)
    if name == "framing_problem":
        monkeypatch.setattr(proxied, "body_framing", as_it_came)
    if name == "has_unread_bytes":  # and the look at a connection before it is used again
        monkeypatch.setattr(upstream.Upstream, "_unused", _unused_unlooked)
    # What has come in with an answer is chance: what is wrong shows in one of some runs.
    assert any(run(tmp_path / str(again), 7, numbers, parser)[1] for again in range(8))


def _unused_unlooked(self: Any) -> Any:
    self._enter_loop()
    return self._idle.pop() if self._idle else None


def test_the_reader_of_these_tests_refuses_what_has_two_readings() -> None:
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert [each.body for each in strict_answers(plain * 2, [b"GET", b"GET"], closed=False)] == [b"ok", b"ok"]
    for data, asked in (
        (plain * 2, [b"GET"]),
        (plain[:-1], [b"GET"]),
        (plain.replace(b"\r\n\r\n", b"\n\r\n"), [b"GET"]),
        (plain.replace(b": 2", b": 2\r\ncontent-length: 2"), [b"GET"]),
        (plain.replace(b": 2", b": 2\r\ntransfer-encoding: chunked"), [b"GET"]),
        (plain.replace(b"content-length: 2", b"transfer-encoding: xchunked"), [b"GET"]),
        (plain.replace(b": 2", b": 2\r\n folded"), [b"GET"]),
        (plain.replace(b": 2", b": 2\r\nx: a\0b"), [b"GET"]),
    ):
        with pytest.raises(NotStrictError):
            strict_answers(data, asked, closed=False)


@PARSERS
def test_whatever_host_a_target_names_the_engine_alone_is_asked(parser: str) -> None:
    """Absolute targets, and hosts that disagree, lead to no other server and to no other path."""

    async def act() -> tuple[list[Strict], int]:
        opened: list[tuple[str, int]] = []
        async with through(parser) as line:
            loop = asyncio.get_running_loop()
            connect = loop.create_connection

            async def noted(protocol: Any, host: str, port: int, **options: Any) -> Any:
                opened.append((host, port))
                return await connect(protocol, host, port, **options)

            setattr(loop, "create_connection", noted)  # noqa: B010 - it has overloads
            for target in (b"http://169.254.169.254/latest", b"https://other.test:1/latest", b"//other.test/latest"):
                for host in (b"other.test", b"169.254.169.254", b"127.0.0.1:1"):
                    await line.exchange(b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (target, host), within_s=60)
            return line.engine.seen, len(set(opened))

    seen, servers = asyncio.run(act())
    assert len(seen) == 9
    assert {each.target for each in seen} == {b"/latest", b"//other.test/latest"}
    assert servers == 1
    assert all(dict(each.headers)[b"host"].startswith(b"127.0.0.1:") for each in seen)


# ---- slow clients


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.9", 9), "sockname": ("127.0.0.1", 80)})
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@PARSERS
@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nx: y", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /"])
def test_a_head_that_never_gets_whole_ends_its_connection(parser: str, sent: bytes) -> None:
    async def act(patience_s: float | None) -> bool:
        base = uvicorn.Config(ok, http=parser, log_config=None, lifespan="off")
        base.load()
        made: Any = patient_protocol(patience_s, base.http_protocol_class)
        state, transport = ServerState(), Transport()
        protocol = made(config=base, server_state=state, app_state={})
        protocol.connection_made(transport)
        if sent:
            protocol.data_received(sent)
        for _ in range(20 if patience_s is None or patience_s > 1 else 20_000):
            await asyncio.sleep(0.003)
            if transport.closed:
                break
            if sent:
                protocol.data_received(b"x")
        closed = transport.closed
        protocol.connection_lost(None)
        return closed

    assert asyncio.run(act(0.02))
    assert not asyncio.run(act(3600))
    assert not asyncio.run(act(None))


@PARSERS
@pytest.mark.parametrize(("piece", "is_cut"), [(2**24, False), (1, True)])
def test_the_rest_of_a_body_that_is_answered_already_may_flow_on(parser: str, piece: int, is_cut: bool) -> None:
    """Clients that send all of it before they read would lose the answer with their connection. A sender of single
    bytes, and one that stops, are shown out. The clock is set forward.
    """

    async def act() -> list[bool]:
        loop, later = asyncio.get_running_loop(), [0.0]
        time = loop.time
        setattr(loop, "time", lambda: time() + later[0])  # noqa: B010 - a method
        base = uvicorn.Config(ok, http=parser, log_config=None, lifespan="off")
        base.load()
        made: Any = patient_protocol(10_000, base.http_protocol_class)
        transport = Transport()
        protocol = made(config=base, server_state=ServerState(), app_state={})

        async def pass_by(seconds: float) -> None:
            later[0] += seconds
            for _ in range(5):
                await asyncio.sleep(0)

        protocol.connection_made(transport)
        protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
        await pass_by(0)
        assert b" 204 " in transport.written
        for _ in range(5):
            protocol.data_received(bytes(piece))
            await pass_by(6_000)
        closed = [transport.closed]
        await pass_by(6_000)
        closed.append(transport.closed)
        protocol.connection_lost(None)
        return closed

    assert asyncio.run(act()) == [is_cut, True]


def test_a_body_may_take_as_long_as_its_length_and_only_waiting_for_it_counts() -> None:
    async def act(patience_s: float, *messages: dict[str, Any]) -> int:
        left = list(messages)

        async def receive() -> dict[str, Any]:
            if not left:
                await asyncio.sleep(3600)
            return left.pop(0)

        patient = PatientReceive(receive, patience_s)
        for number in range(len(messages)):
            await patient()
            if number == 0:
                await asyncio.sleep(0.05)  # the engine takes its time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await patient()
        return len(messages)

    more = {"type": "http.request", "body": b"x" * 2**20, "more_body": True}
    last = {"type": "http.request", "body": b"x", "more_body": False}
    assert asyncio.run(act(0.02, {**more, "body": b""}, last)) == 2
    assert asyncio.run(act(0.01, more)) == 1  # a MiB is worth 1,024 seconds
    with pytest.raises(SlowClientError):
        asyncio.run(act(0.01, {**more, "body": b"x"}))
    with pytest.raises(SlowClientError):
        asyncio.run(act(0.01))


@contextlib.contextmanager
def tokcap_serve(background: Background, **options: Any) -> Iterator[int]:
    """As the command runs it, in a thread; gives its port."""
    given = ServeOptions(engine="vllm", engine_version="0.32.0", log_level="critical", **options)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")]
    levels = [each.level for each in loggers]
    with patch("tokcap.serve.server._logging", lambda level: None):  # of the whole process
        server = server_of(given, ServedApp(given), alone=False)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        running = asyncio.run_coroutine_threadsafe(server.serve([listening]), background.loop)
        in_time(lambda: server.started or running.done(), "the start of the server")
        yield listening.getsockname()[1]
        server.should_exit = True
        running.result(60)
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


def test_clients_that_trickle_are_shown_out_and_keep_nobody_else_waiting(
    background: Background, tmp_path: Path
) -> None:
    """Half of them over the head of a request, half over its body, captured ones among them."""
    heard: list[bytes] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
            await writer.drain()
        writer.close()

    behind = background.run(asyncio.start_server(engine, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{behind.sockets[0].getsockname()[1]}"
    body = b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n{"
    slow = [b"POST /x HTTP/1.1\r\nhost:", b"P", b"", b"POST " + CHAT.encode() + body, b"POST " + CHAT.encode() + body]
    with tokcap_serve(background, upstream=url, client_timeout_s=1.0) as port, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(client(port)) for _ in range(100)]
        for number, each in enumerate(connections):
            each.sendall(slow[number % len(slow)])
        for _ in range(3):  # others are served meanwhile
            with client(port) as another:
                another.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                assert read_answer(another).body == b"ok"
        for number, each in enumerate(connections):
            if number % len(slow) > 2:
                answer = read_answer(each, "POST")
                assert (answer.status, answer.json["error"]["type"]) == (408, "request_timeout")
                assert answer.values("connection") == ["close"]
            assert is_closed(each)
    behind.close()
    assert {each.partition(b"\r\n")[0] for each in heard} == {b"GET /v1/models HTTP/1.1"}
    assert not list((tmp_path / "store").glob("rollouts/*/*"))


def test_how_long_a_client_may_take_is_an_option() -> None:
    environment = {"TOKCAP_UPSTREAM": "http://127.0.0.1:9"}
    assert options_from_environment(environment).client_timeout_s == 60
    for seconds in (None, 7.5):
        given = ServeOptions(upstream="http://127.0.0.1:9", client_timeout_s=seconds)
        assert options_from_environment(given.environment()).client_timeout_s == seconds
    for text in ("-1", "nan", "soon"):
        with pytest.raises(InvalidOptionError, match=r"client_timeout|TOKCAP_CLIENT_TIMEOUT"):
            options_from_environment({**environment, "TOKCAP_CLIENT_TIMEOUT": text})


# ---- large heads


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@PARSERS
@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (b"GET /", b"x" * 4096),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: ", b"x" * 4096),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 600),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 600),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n" * 600),
        (CHUNKED + b"1;", b"x" * 4096),
    ],
    ids=["target", "field", "fields", "next head", "trailers", "extension of a chunk"],
)
def test_a_head_without_an_end_is_not_kept(parser: str, before: bytes, piece: bytes) -> None:
    async def act() -> int:
        base = uvicorn.Config(reads_all, http=parser, log_config=None, lifespan="off")
        base.load()
        made: Any = bounded_protocol(base.http_protocol_class)
        transport = Transport()
        protocol = made(config=base, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        protocol.data_received(before)
        count = 0
        while not transport.closed and count < 1_000:
            protocol.data_received(piece)
            count += 1
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return count

    assert asyncio.run(act()) <= 20


@PARSERS
def test_a_body_of_any_length_and_any_number_of_requests_are_within_the_bound_of_a_head(parser: str) -> None:
    async def act() -> tuple[bool, int]:
        base = uvicorn.Config(reads_all, http=parser, log_config=None, lifespan="off")
        base.load()
        made: Any = bounded_protocol(base.http_protocol_class)
        transport = Transport()
        protocol = made(config=base, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        get = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 8_000 + b"\r\n\r\n"
        end = b"4000\r\n" + bytes(0x4000) + b"\r\n0\r\n\r\n"
        for pieces in [(get,), (CHUNKED, *[b"1\r\nx\r\n"] * 500, end)] * 30:
            for piece in pieces:
                protocol.data_received(piece)
            for _ in range(20):
                await asyncio.sleep(0)
        closed = transport.closed
        protocol.connection_lost(None)
        return closed, transport.written.count(b" 204 ")

    assert asyncio.run(act()) == (False, 60)


# ---- large bodies


async def played(
    app: Callable[..., Any], pieces: Iterator[bytes], headers_: Headers | None = None, path: str = CHAT
) -> tuple[int, int]:
    """Status of a request, and how many pieces of its body were taken."""
    taken, sent = 0, list[Any]()

    async def receive() -> dict[str, Any]:
        nonlocal taken
        piece = next(pieces, None)
        taken += piece is not None
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers_ or []}
    await app(scope, receive, send)
    return sent[0]["status"], taken


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await ok(scope, receive, send)


def around(tmp_path: Path, **settings: Any) -> CaptureMiddleware:
    block = {"token_id_capture": {"enabled": True, "dir": str(tmp_path / "store")}}
    return CaptureMiddleware(reads_all, block, engine="vllm", **settings)


def test_a_body_above_the_limit_is_refused_before_more_of_it_is_kept(tmp_path: Path) -> None:
    app = around(tmp_path, max_body_bytes=10_000)
    pieces = (b"x" * 1_000 for _ in range(1_000_000))
    assert asyncio.run(played(app, pieces)) == (413, 11)
    assert asyncio.run(played(app, iter([b"x"] * 9), [(b"content-length", b"10001")])) == (413, 0)
    assert asyncio.run(played(app, iter([b"x"] * 9), [(b"content-length", b"9" * 4_000)])) == (413, 0)
    assert not list((tmp_path / "store").glob("rollouts/*/*"))


def test_a_bomb_is_refused_in_the_memory_of_the_limit(tmp_path: Path) -> None:
    app = around(tmp_path, max_body_bytes=1_000_000)
    bomb = gzip.compress(gzip.compress(bytes(5 * 10**7), 9), 9)
    assert len(bomb) < 10_000, len(bomb)
    tracemalloc.start()
    try:
        assert asyncio.run(played(app, iter([bomb]), [(b"content-encoding", b"gzip, gzip")]))[0] == 413
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "status"), [(4, 204), (5, 415), (5_000, 415)])
def test_encodings_inside_each_other_have_a_bound(count: int, status: int, tmp_path: Path) -> None:
    """Each takes as long as the largest body does."""
    body = ask("/v1/chat/completions")
    for _ in range(min(count, 5)):
        body = gzip.compress(body)
    encoding = b", ".join([b"gzip"] * count)
    assert asyncio.run(played(around(tmp_path), iter([body]), [(b"content-encoding", encoding)]))[0] == status
