"""The engine behind the proxy gets what the client sent, and the client what the engine answered."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokcap.serve.upstream
from tests.proxy_harness import (
    Background,
    Gate,
    Handler,
    RawServer,
    ask,
    client,
    in_time,
    is_closed,
    plain,
    proxying,
    read_answer,
    read_request,
)
from tokcap.serve.address import upstream_address

MIB = 2**20


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture(params=["h11", "httptools"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Which parser of requests uvicorn uses."""
    name: str = request.param
    pytest.importorskip(name, reason=f"{name} is not installed, one of the two parsers that uvicorn may use")
    return name


@pytest.fixture
def behind(background: Background) -> Iterator[Callable[[Handler], RawServer]]:
    """Makes the server that stands behind the proxy, of a function that handles its connections."""
    with contextlib.ExitStack() as stack:

        def make(handler: Handler) -> RawServer:
            server = RawServer(background, handler)
            stack.callback(server.close)
            return server

        yield make


Behind = Callable[[Handler], RawServer]


def answering(*answers: bytes) -> tuple[list[Any], Handler]:
    """A handler that gives these answers in turn, the last one again and again; and what it heard."""
    heard: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heard.append(await read_request(reader))
            writer.write(answers[min(len(heard), len(answers)) - 1])
            await writer.drain()

    return heard, handle


# ---- the request


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/a%2Fb/%2e%2e/c",
        "//double//slashes/",
        "/a/../b/./c",
        "/%FF%fe/%zz/100%",
        "/q?a=%20&a=+&b=%FF&c",
        "/q?next=http://x/?y=//z",
        "/q??a=?",
        "/semi;colon=1,2/@:!$&'()*+=~",
        "/trailing/",
        "/",
    ],
)
def test_path_and_query_reach_the_engine_byte_for_byte(
    background: Background, behind: Behind, implementation: str, target: str
) -> None:
    heard, handler = answering(plain())
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        assert ask(port, target).body == b"ok"
    assert [each.target for each in heard] == [target.encode()]


def test_path_of_the_upstream_comes_before_that_of_the_request(background: Background, behind: Behind) -> None:
    heard, handler = answering(plain())
    with proxying(background, behind(handler).url + "/engines/one/") as port:
        ask(port, "/v1/models?x=1")
        ask(port, "/")
    assert [each.target for each in heard] == [b"/engines/one/v1/models?x=1", b"/engines/one/"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("body", [b"", b'{"a": 1}'])
def test_every_method_may_have_a_body(
    background: Background, behind: Behind, implementation: str, method: str, body: bytes
) -> None:
    heard, handler = answering(plain(b"done"))
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        answer = ask(port, "/x", method, body=body)
    assert (answer.status, answer.body) == (200, b"done")
    assert heard[0].line.startswith(method.encode() + b" /x ")
    assert heard[0].body == body


def test_options_of_the_server_itself_is_passed_on(background: Background, behind: Behind) -> None:
    heard, handler = answering(plain())
    with proxying(background, behind(handler).url + "/base") as port:
        assert ask(port, "*", "OPTIONS").status == 200
    assert heard[0].target == b"*"


def test_headers_of_one_connection_end_at_the_proxy(
    background: Background, behind: Behind, implementation: str
) -> None:
    heard, handler = answering(
        plain(b"ok", b"200 OK", b"connection: x-answer", b"x-answer: 1", b"keep-alive: timeout=9")
    )
    one_connection = {
        "connection": "keep-alive, X-Secret , close",
        "x-secret": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "trailer": "x-sum",
        "upgrade": "h2c",
        "proxy-authorization": "Basic eA==",
        "proxy-connection": "keep-alive",
        "expect": "100-continue",
    }
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        answer = ask(port, "/", "POST", {**one_connection, "authorization": "Bearer k", "x-kept": "2"}, b"body")
    names = {name for name, _ in heard[0].headers}
    assert names.isdisjoint({name.encode() for name in one_connection})
    assert heard[0].values(b"authorization") == [b"Bearer k"]
    assert heard[0].values(b"x-kept") == [b"2"]
    assert not answer.values("x-answer")
    assert not answer.values("keep-alive")


def test_host_is_that_of_the_engine_and_the_client_is_told_beside_it(background: Background, behind: Behind) -> None:
    heard, handler = answering(plain())
    server = behind(handler)
    with proxying(background, server.url) as port:
        ask(port)
        before = {"x-forwarded-for": "10.0.0.1", "x-forwarded-proto": "https", "x-forwarded-host": "first.test"}
        ask(port, headers=before)
    first, second = heard
    assert first.values(b"host") == [f"127.0.0.1:{server.port}".encode()]
    assert first.values(b"x-forwarded-for") == [b"127.0.0.1"]
    assert first.values(b"x-forwarded-host") == [b"proxy.test"]
    assert first.values(b"x-forwarded-proto") == [b"http"]
    assert second.values(b"x-forwarded-for") == [b"10.0.0.1, 127.0.0.1"]
    assert second.values(b"x-forwarded-host") == [b"first.test"]
    assert second.values(b"x-forwarded-proto") == [b"https"]


def test_repeated_headers_keep_their_number_and_order(
    background: Background, behind: Behind, implementation: str
) -> None:
    cookies = (b"set-cookie: a=1; Path=/", b"x-other: 0", b"set-cookie: b=2", b"set-cookie: a=3")
    heard, handler = answering(plain(b"ok", b"200 OK", *cookies))
    with proxying(background, behind(handler).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-many: 1\r\ncookie: a\r\nX-Many: 2\r\nx-many: 1\r\n\r\n")
        answer = read_answer(connection)
    assert heard[0].values(b"x-many") == [b"1", b"2", b"1"]
    assert answer.values("set-cookie") == ["a=1; Path=/", "b=2", "a=3"]


def test_body_is_passed_on_as_it_comes(background: Background, behind: Behind, implementation: str) -> None:
    got: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while not got or not got[-1].endswith(b"0\r\n\r\n"):
            got.append(await reader.read(65536))
        writer.write(plain())

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        in_time(lambda: b"first" in b"".join(got), "the first part")
        connection.sendall(b"6\r\nsecond\r\n0\r\nx-trailer: 1\r\n\r\n")
        assert read_answer(connection).body == b"ok"
    assert b"".join(got) == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


def test_client_that_expects_a_continue_gets_one(background: Background, behind: Behind, implementation: str) -> None:
    heard, handler = answering(plain())
    with proxying(background, behind(handler).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"body")
        assert read_answer(connection).body == b"ok"
    assert heard[0].body == b"body"


# ---- the answer


@pytest.mark.parametrize("status", [200, 201, 206, 207, 226, 300, 400, 404, 418, 429, 451, 499, 500, 503, 599])
def test_status_and_body_are_passed_on(
    background: Background, behind: Behind, implementation: str, status: int
) -> None:
    _, handler = answering(plain(b"why", b"%d Whatever" % status, b"retry-after: 7", b"server: engine", b"date: then"))
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        answer = ask(port)
    assert (answer.status, answer.body, answer.values("content-length")) == (status, b"why", ["3"])
    assert answer.values("retry-after") == ["7"]
    assert answer.values("server") == ["engine"]
    assert answer.values("date") == ["then"]


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answer_that_has_no_body_ends_with_its_head(
    background: Background, behind: Behind, implementation: str, status: bytes
) -> None:
    head = (
        b"HTTP/1.1 " + status + b"\r\netag: x\r\n" + (b"content-length: 9\r\n" if b"304" in status else b"") + b"\r\n"
    )
    _, handler = answering(head)
    with proxying(background, behind(handler).url, implementation=implementation) as port, client(port) as connection:
        for _ in range(2):  # the second only works if the first ended
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = read_answer(connection)
            assert (answer.status, answer.body, answer.values("etag")) == (int(status[:3]), b"", ["x"])


def test_head_tells_the_length_and_sends_no_body(background: Background, behind: Behind, implementation: str) -> None:
    _, handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n")
    with proxying(background, behind(handler).url, implementation=implementation) as port, client(port) as connection:
        for _ in range(2):
            connection.sendall(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = read_answer(connection, "HEAD")
            assert (answer.status, answer.body, answer.values("content-length")) == (200, b"", ["1234"])


def test_interim_answers_are_passed_over(background: Background, behind: Behind, implementation: str) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    _, handler = answering(interim + plain(b"final"))
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        answer = ask(port)
    assert (answer.status, answer.body) == (200, b"final")


def test_encoded_content_is_passed_on_as_it_is(background: Background, behind: Behind, implementation: str) -> None:
    body = bytes(range(256)) * 5  # of no encoding at all: nobody may look into it
    _, handler = answering(plain(body, b"200 OK", b"content-encoding: gzip"))
    with proxying(background, behind(handler).url, implementation=implementation) as port:
        answer = ask(port, headers={"accept-encoding": "gzip"})
    assert answer.body == body
    assert answer.values("content-encoding") == ["gzip"]


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"HTTP/1.0 200 OK\r\n", b"until the end"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"until the end"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n", b"d\r\nuntil the end\r\n0\r\nx-trailer: 1\r\n\r\n"),
    ],
)
def test_answer_of_unknown_length_is_framed_anew(
    background: Background, behind: Behind, implementation: str, head: bytes, body: bytes
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head + b"\r\n" + body)

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        for _ in range(2):
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = read_answer(connection)
            assert (answer.body, answer.values("transfer-encoding")) == (b"until the end", ["chunked"])


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("http://127.0.0.1:{port}/v1/x?a=%2F#part", "/v1/x?a=%2F#part"),
        ("HTTPS://127.0.0.1:{port}/v1", "/v1"),
        ("//127.0.0.1:{port}/v1", "/v1"),
        ("http://127.0.0.1:{port}", "/"),
        ("http://127.0.0.1:{port}?a=1", "/?a=1"),
        ("http://127.0.0.1:{port}//evil.test/x", "/.//evil.test/x"),
        ("http://127.0.0.1:{port}/\\evil.test/x", "/./\\evil.test/x"),
        ("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1/v1", "http://127.0.0.1/v1"),
        ("http://other.test:{port}/v1", "http://other.test:{port}/v1"),
        ("http://127.0.0.1:{port}.other.test/v1", "http://127.0.0.1:{port}.other.test/v1"),
        ("http://127.0.0.1:{port}@other.test/v1", "http://127.0.0.1:{port}@other.test/v1"),
        ("ftp://127.0.0.1:{port}/v1", "ftp://127.0.0.1:{port}/v1"),
        ("/v1/other", "/v1/other"),
        ("other", "other"),
        ("?a", "?a"),
    ],
)
def test_redirect_to_the_engine_keeps_the_client_on_the_proxy(
    background: Background, behind: Behind, location: str, shown: str
) -> None:
    answers: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answers[0])

    server = behind(handle)
    answers.append(plain(b"", b"307 Temporary Redirect", b"location: " + location.format(port=server.port).encode()))
    with proxying(background, server.url) as port:
        answer = ask(port, "/v1/y", "POST", body=b"{}")
    assert (answer.status, answer.values("location")) == (307, [shown.format(port=server.port)])


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (b"http://engine.test/base/v1", b"/v1"),
        (b"http://ENGINE.test:80/base", b"/"),
        (b"https://engine.test/base?a", b"/?a"),
        (b"/base/v1", b"/v1"),
        (b"/base//v1", b"/.//v1"),
        (b"/basement", b"/basement"),
        (b"/elsewhere", b"/elsewhere"),
        (b"http://engine.test:8080/base/v1", b"http://engine.test:8080/base/v1"),
        (b"http://[broken/base", b"http://[broken/base"),
    ],
)
def test_redirect_below_the_path_of_the_upstream_is_shown_without_it(location: bytes, shown: bytes) -> None:
    assert upstream_address("http://engine.test/base").location(location) == shown


@given(st.text(alphabet="/\\\\.?#%:@abn", max_size=12).map(str.encode))
def test_redirect_to_the_engine_never_leads_to_another_host(rest: bytes) -> None:
    for base in ("", "/a"):
        shown = upstream_address(f"http://engine.test{base}").location(b"http://engine.test/" + rest)
        assert shown.startswith(b"/")
        assert not shown.startswith((b"//", b"/\\"))


def test_events_arrive_one_by_one(background: Background, behind: Behind, implementation: str) -> None:
    gates = [Gate() for _ in range(3)]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, gate in enumerate(gates):
            await gate.passed()
            writer.write(b"9\r\ndata: %d\n\n\r\n" % number)
        writer.write(b"0\r\n\r\n")

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.closing(http.client.HTTPResponse(connection)) as response:
            response.begin()
            for number, gate in enumerate(gates):
                gate.open()
                assert response.read1(65536) == b"data: %d\n\n" % number
            assert response.read1(65536) == b""


# ---- back-pressure


def standstill(count: Callable[[], int]) -> int:
    """What is counted once it has stopped growing."""
    seen: list[int] = []

    def still() -> bool:
        time.sleep(0.02)
        seen.append(count())
        return len(seen) > 25 and len(set(seen[-25:])) == 1

    in_time(still, "a standstill")
    return seen[-1]


def test_client_that_does_not_read_stops_the_engine(
    background: Background, behind: Behind, implementation: str
) -> None:
    size, written = 64 * MIB, [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written[0] < size:
            writer.write(bytes(MIB))
            await writer.drain()
            written[0] += MIB

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert standstill(lambda: written[0]) < 32 * MIB  # all of it in the buffers of the kernel
        answer = read_answer(connection)
    assert (len(answer.body), answer.whole) == (size, True)


def test_engine_that_does_not_read_stops_the_client(
    background: Background, behind: Behind, implementation: str
) -> None:
    size, gate, got = 64 * MIB, Gate(), [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await gate.passed()
        while got[0] < size:
            got[0] += len(await reader.read(MIB))
        writer.write(plain(b"%d" % got[0]))

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        sent, piece = 0, bytes(MIB)
        connection.setblocking(False)

        def send() -> int:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                sent += connection.send(piece[: min(MIB, size - sent)])
            return sent

        assert standstill(send) < 32 * MIB
        gate.open()
        connection.settimeout(60)
        while sent < size:
            sent += connection.send(piece[: min(MIB, size - sent)])
        assert read_answer(connection).body == b"%d" % size


# ---- a client that leaves


def when_client_leaves(when: str, gone: Gate, ready: Gate) -> Handler:
    """Notes that its connection was closed, which it is told of `when`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (reader.readuntil(b"\r\n\r\n") if when == "in the request" else read_request(reader))
        if when == "in the answer":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome")
        ready.open()
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass
        gone.open()

    return handle


@pytest.mark.parametrize("when", ["in the request", "before the answer", "in the answer"])
def test_client_that_leaves_ends_the_request_at_the_engine(
    background: Background, behind: Behind, implementation: str, when: str
) -> None:
    gone, ready = Gate(), Gate()
    server = behind(when_client_leaves(when, gone, ready))
    with proxying(background, server.url, implementation=implementation) as port:
        with client(port) as connection:
            length = 100 if when == "in the request" else 4
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\nbody" % length)
            ready.wait()
            if when == "in the answer":
                assert connection.recv(65536)
            assert not gone.is_open
        gone.wait()
        # And the proxy is as well as before.
        assert server.connections == 1


def test_client_that_leaves_while_it_does_not_read_ends_the_request(background: Background, behind: Behind) -> None:
    gone, written = Gate(), [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"100000\r\n" + bytes(MIB) + b"\r\n")
                await writer.drain()
                written[0] += 1
        except ConnectionError:
            gone.open()

    with proxying(background, behind(handle).url) as port:
        with client(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            standstill(lambda: written[0])
            assert not gone.is_open
        gone.wait()


# ---- an engine that fails


def refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize(("path", "anthropic"), [("/v1/chat/completions", False), ("/v1/messages", True)])
def test_engine_that_can_not_be_reached_is_a_502_in_the_shape_of_the_route(
    background: Background, path: str, anthropic: bool
) -> None:
    with proxying(background, f"http://127.0.0.1:{refused_port()}") as port:
        answer = ask(port, path, "POST", body=b"{}")
    assert answer.status == 502
    assert "can't be reached" in answer.json["error"]["message"]
    assert ("type" in answer.json) is anthropic


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 999 Strange\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2_000_000 + b"\r\n\r\n",
    ],
)
def test_engine_that_gives_no_answer_is_a_502(
    background: Background, behind: Behind, implementation: str, said: bytes
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)

    server = behind(handle)
    with proxying(background, server.url, implementation=implementation) as port:
        answer = ask(port, "/v1/x", "POST", body=b"{}")
    assert (answer.status, answer.whole) == (502, True)
    assert answer.json["error"]["message"].startswith("no answer")
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        b"content-length: 100\r\n\r\npart",
        b"transfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
        b"transfer-encoding: chunked\r\n\r\n4\r\npart\r\nzz\r\n",
        b"transfer-encoding: chunked\r\n\r\n4\r\npart\r\n0\r\n",
    ],
)
def test_answer_that_breaks_off_is_broken_off_for_the_client(
    background: Background, behind: Behind, implementation: str, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + said)

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = read_answer(connection)
        assert (answer.status, answer.body, answer.whole) == (200, b"part", False)
        assert is_closed(connection)


@pytest.mark.parametrize("begun", [False, True])
def test_engine_that_pauses_for_too_long_has_failed(background: Background, behind: Behind, begun: bool) -> None:
    gone = Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if begun:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart")
        await reader.read()
        gone.open()

    with proxying(background, behind(handle).url, timeout_s=0.2) as port:
        answer = ask(port)
        gone.wait()
    if begun:
        assert (answer.body, answer.whole) == (b"part", False)
    else:
        assert answer.status == 502
        assert answer.json["error"]["message"] == "no answer: the engine sent nothing for 0.2 s"


@pytest.mark.parametrize("closes", [False, True])
def test_early_answer_reaches_a_client_that_is_still_sending(
    background: Background, behind: Behind, implementation: str, closes: bool
) -> None:
    refused = plain(b"too large", b"413 Content Too Large", *([b"connection: close"] if closes else []))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refused)
        if not closes:
            await reader.read()  # without an end

    with proxying(background, behind(handle).url, implementation=implementation) as port, client(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + b"x" * 400)
        answer = read_answer(connection)
        assert (answer.status, answer.body) == (413, b"too large")
        # The connection stays usable: what is left of the body is read and dropped.
        connection.sendall(b"x" * 600 + b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\ny")
        assert read_answer(connection).status == 413


# ---- connections to the engine


def test_engine_may_speak_tls(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not installed, and makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=engine -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*make.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, text=True
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    heard, handler = answering(plain(bytes(MIB)))
    with contextlib.closing(RawServer(background, handler, tls)) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with proxying(background, server.url, implementation=implementation) as port:
            assert [len(ask(port, "/", "POST", body=b"{}").body) for _ in range(2)] == [MIB, MIB]
        monkeypatch.delenv("SSL_CERT_FILE")
        with proxying(background, server.url, implementation=implementation) as port:
            refused = ask(port)
    assert (refused.status, "certificate" in refused.json["error"]["message"].lower()) == (502, True)
    assert len(heard) == 2


def test_connection_is_used_again(background: Background, behind: Behind) -> None:
    heard, handler = answering(plain())
    server = behind(handler)
    with proxying(background, server.url) as port:
        for _ in range(5):
            ask(port, "/", "POST", body=b"{}")
    assert len(heard) == 5
    assert server.connections == 1


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_request_that_may_have_reached_the_engine_is_never_sent_again(
    background: Background, behind: Behind, body: bytes
) -> None:
    heard = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await read_request(reader))
        writer.write(plain())
        heard.append(await read_request(reader))  # and closes

    server = behind(handle)
    with proxying(background, server.url) as port:
        method = "POST" if body else "GET"
        assert ask(port, "/", method, body=body).status == 200
        assert ask(port, "/", method, body=body).status == 502
    assert (len(heard), server.connections) == (2, 1)


def test_connection_that_the_engine_closed_meanwhile_is_replaced(background: Background, behind: Behind) -> None:
    closed = Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(plain())
        writer.close()
        await writer.wait_closed()
        closed.open()

    server = behind(handle)
    with proxying(background, server.url) as port:
        for number in range(3):
            assert ask(port, "/", "POST", body=b"{}").status == 200
            closed.wait()
            assert server.connections == number + 1


def test_connection_that_nobody_uses_is_closed(
    background: Background, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokcap.serve.upstream, "_IDLE_S", 0.05)
    closed = Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(plain())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        closed.open()

    with proxying(background, behind(handle).url) as port:
        assert ask(port).status == 200
        closed.wait()  # and the proxy still runs


def test_what_follows_an_answer_is_never_taken_for_the_next_one(background: Background, behind: Behind) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heard = await read_request(reader)
            writer.write(plain(heard.target) + plain(b"smuggled"))

    server = behind(handle)
    with proxying(background, server.url) as port:
        assert [ask(port, f"/{number}").body for number in range(3)] == [b"/0", b"/1", b"/2"]
    assert server.connections == 3


def test_what_comes_unasked_on_an_idle_connection_ends_it(background: Background, behind: Behind) -> None:
    sent, first = Gate(), Gate()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain((await read_request(reader)).target))
        if not first.is_open:
            await first.passed()
            writer.write(plain(b"too late", b"408 Request Timeout"))
            await writer.drain()
            sent.open()
        await reader.read()

    server = behind(handle)
    with proxying(background, server.url) as port:
        assert ask(port, "/1").body == b"/1"
        first.open()
        sent.wait()
        assert ask(port, "/2").body == b"/2"
    assert server.connections == 2


def test_a_thousand_requests_are_open_at_the_same_time(background: Background, behind: Behind) -> None:
    gate, count, waiting = Gate(), 1000, [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = await read_request(reader)
        waiting[0] += 1
        await gate.passed()
        writer.write(plain(heard.target))

    server = behind(handle)
    with proxying(background, server.url) as port, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(client(port)) for _ in range(count)]
        for number, connection in enumerate(connections):
            connection.sendall(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
        in_time(lambda: waiting[0] == count, "a thousand requests")
        gate.open()
        for number, connection in enumerate(connections):
            assert read_answer(connection).body == b"/%d" % number
    assert server.connections == count
