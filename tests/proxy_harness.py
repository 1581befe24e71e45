"""Servers and clients for tests of the proxy: uvicorn and scripted socket servers on one event loop in a thread.

A scripted server says every byte itself, and so can do what no server should. Clients are plain sockets in the test's
own thread: what a test doesn't read stays unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from tokcap.serve.address import upstream_address
from tokcap.serve.proxied import ProxiedApp
from tokcap.serve.upstream import Upstream

__all__ = (
    "PATIENCE_S",
    "Answer",
    "Background",
    "Gate",
    "Handler",
    "Heard",
    "RawServer",
    "ask",
    "client",
    "in_time",
    "is_closed",
    "plain",
    "proxying",
    "read_answer",
    "read_request",
    "serving",
)

PATIENCE_S = 60.0
"""After this long something hangs; generous, because no test is about speed."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def in_time(condition: Callable[[], object], what: str = "what was awaited") -> None:
    """Wait until it holds."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen"
        time.sleep(0.005)


class Gate:
    """Opened by a test, awaited in the loop, and the other way round."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    @property
    def is_open(self) -> bool:
        return self._event.is_set()

    async def passed(self) -> None:
        while not self._event.is_set():
            await asyncio.sleep(0.002)

    def wait(self) -> None:
        assert self._event.wait(PATIENCE_S), "a gate stayed closed"


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.idle: dict[str, list[AsgiServer]] = {}
        """Servers that no test uses, because to start and stop one takes longer than most tests."""
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, action: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(action, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        for server in (each for servers in self.idle.values() for each in servers):
            server.close()
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0.01)  # for transports to close


# ---- what stands behind the proxy


@dataclass
class Heard:
    """One request as its bytes came."""

    head: bytes
    body: bytes = b""

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:]
        pairs = (line.partition(b":") for line in lines if line)
        return [(name.lower(), value.strip()) for name, _, value in pairs]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


async def read_request(reader: asyncio.StreamReader) -> Heard:
    """The next request of a connection. Raises `IncompleteReadError` at its end."""
    heard = Heard(await reader.readuntil(b"\r\n\r\n"))
    length = heard.values(b"content-length")
    if heard.values(b"transfer-encoding"):
        while size := int(await reader.readuntil(b"\r\n"), 16):
            heard.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif length:
        heard.body = await reader.readexactly(int(length[0]))
    return heard


class RawServer:
    """A server whose connections are handled by a function that reads and writes bytes."""

    def __init__(self, background: Background, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self._background, self._handler = background, handler
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server = background.run(
            asyncio.start_server(self._handle, "127.0.0.1", 0, backlog=1024, limit=2**16, ssl=tls)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            await self._handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def close(self) -> None:
        self._background.run(self._close())

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()


def plain(body: bytes = b"ok", status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """A whole answer as bytes."""
    lines = (b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


# ---- servers that speak ASGI


class AsgiServer:
    """uvicorn as `tokcap serve` runs it, with an app that may be exchanged between tests."""

    def __init__(self, background: Background, implementation: str, lifespan: str, app: Any = None) -> None:
        self.app, self.running = app, 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listening.getsockname()[1]
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http=implementation,
            ws="none",
            lifespan=lifespan,  # type: ignore[arg-type]
            server_header=False,
            date_header=False,
            proxy_headers=False,
            log_config=None,
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.run_coroutine_threadsafe(self._server.serve([self._listening]), background.loop)
        in_time(lambda: self._server.started or self._task.done(), "the start of a server")

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running -= 1

    def close(self) -> None:
        """Every connection has to end by itself."""
        self._server.should_exit = True
        self._task.result(PATIENCE_S)
        self._listening.close()


@contextlib.contextmanager
def serving(background: Background, app: Any, *, implementation: str = "h11", lifespan: str = "off") -> Iterator[int]:
    """A server with an app; gives its port. Every request has to end by itself."""
    if lifespan != "off":
        with contextlib.closing(AsgiServer(background, implementation, lifespan, app)) as server:
            yield server.port
        return
    idle = background.idle.setdefault(implementation, [])
    server = idle.pop() if idle else AsgiServer(background, implementation, lifespan)
    server.app = app
    try:
        yield server.port
        in_time(lambda: server.running == 0, "the end of every request")
    finally:
        idle.append(server)


@contextlib.contextmanager
def proxying(
    background: Background, url: str, *, implementation: str = "h11", timeout_s: float | None = None
) -> Iterator[int]:
    """The inner application alone, in front of a URL; gives its port."""
    upstream = Upstream(upstream_address(url), timeout_s=timeout_s)
    with serving(background, ProxiedApp(upstream), implementation=implementation) as port:
        yield port
    background.loop.call_soon_threadsafe(upstream.close)


# ---- clients


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = True
    """Whether it ended as it should."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


@contextlib.contextmanager
def client(port: int) -> Iterator[socket.socket]:
    """A connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        yield connection


def read_answer(connection: socket.socket, method: str = "GET") -> Answer:
    """The next answer on a connection, which has to have been asked for before."""
    with contextlib.closing(http.client.HTTPResponse(connection, method=method)) as response:
        response.begin()
        answer = Answer(response.status, response.getheaders())
        try:
            answer.body = response.read()
        except http.client.IncompleteRead as error:
            answer.body, answer.whole = error.partial, False
        except OSError:
            answer.whole = False
    return answer


def ask(
    port: int, target: str = "/", method: str = "GET", headers: dict[str, str] | None = None, body: bytes = b""
) -> Answer:
    """One request on a connection of its own."""
    given = {"host": "proxy.test", **(headers or {})}
    if body:
        given.setdefault("content-length", str(len(body)))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    with client(port) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        return read_answer(connection, method)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection; waits for it, and reads what comes before."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True
