"""A `Harness` over a socket: whatever serves on a port of this machine."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.fake_engine import Notebook
from tests.serving_harness import PATIENCE_S, Exchange, Harness, Header

__all__ = ("Network",)


class Network(Harness):
    """A server on a port of this machine."""

    def __init__(self, store_dir: Path, notes: Notebook, port: int, kind: str) -> None:
        super().__init__(store_dir, notes)
        self.port, self.kind = port, kind

    @contextlib.contextmanager
    def connection(self, patience_s: float = PATIENCE_S) -> Iterator[http.client.HTTPConnection]:
        """For several requests on one connection."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience_s)) as connection:
            yield connection

    def request(
        self,
        method: str,
        target: str,
        *,
        headers: Iterable[Header] = (),
        body: bytes = b"",
        parts: Sequence[bytes] | None = None,
        disconnect_after: int | None = None,
        disconnect_when: Callable[[], bool] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Exchange:
        with self.connection() as connection:
            self.send(connection, method, target, headers, body, parts)
            exchange = Exchange()
            if disconnect_when is not None:
                self.until(disconnect_when)
            else:
                self.read(connection, exchange, disconnect_after)
        if then is not None:
            if disconnect_when is not None or disconnect_after is not None:
                time.sleep(0.1)  # until the server has been told that the connection is closed
            then()
        return exchange

    def send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Iterable[Header],
        body: bytes,
        parts: Sequence[bytes] | None = None,
    ) -> None:
        """Send a request, and don't wait for its answer."""
        connection.putrequest(method, target, skip_accept_encoding=True)
        names = set()
        for name, value in headers:
            names.add(name.lower())
            connection.putheader(name, value)
        if parts is not None:
            connection.putheader("transfer-encoding", "chunked")
            connection.endheaders()
            for part in parts:
                connection.send(f"{len(part):x}\r\n".encode() + part + b"\r\n" if part else b"")
            connection.send(b"0\r\n\r\n")
            return
        if (body or method == "POST") and "content-length" not in names:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body or None)

    def read(
        self, connection: http.client.HTTPConnection, exchange: Exchange, disconnect_after: int | None = None
    ) -> None:
        """Read the answer into `exchange`, as far as it is wanted."""
        with contextlib.closing(connection.getresponse()) as response:
            exchange.status = response.status
            exchange.headers = [(name.lower(), value) for name, value in response.getheaders()]
            try:
                while piece := response.read1(65536):
                    exchange.chunks.append(piece)
                    if disconnect_after is not None and len(exchange.events) >= disconnect_after:
                        return
                exchange.ended = response.isclosed() or not response.length
            except (http.client.HTTPException, OSError) as error:
                exchange.error = error
