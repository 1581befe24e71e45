"""The engine as the proxy sees it: its connections, without a bound on their number, and which engine it is."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from ..asgi.interface import Headers
from ..errors import UpstreamError
from .address import UpstreamAddress
from .connection import Connection, Exchange

__all__ = ("Upstream", "detect")

_CONNECT_S = 60.0
"""An engine with a full queue of connections is knocked at again after 1, 3, 7, 15 and 31 s by TCP itself."""
_IDLE_S = 2.0
"""For how long a connection without a request is kept. The usual servers close theirs after 5 s; a request that is
sent while they do is lost, and may not be repeated."""
_ASK_S = 10.0
"""For an answer to a question of the proxy itself."""
_LARGEST_ANSWER = 2**20
_LONGEST_VERSION = 100
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
"""What `/v1/models` gives as the owner of a model, and the engine that does."""


class Upstream:
    """The connections to one engine. Belongs to one event loop at a time."""

    def __init__(
        self,
        address: UpstreamAddress,
        *,
        timeout_s: float | None = None,
        connect_s: float = _CONNECT_S,
        api_key: str = "",
    ) -> None:
        """timeout_s: how long an answer may pause; None: for ever. connect_s: how long the engine may take to accept a
        connection. api_key: for what the proxy itself asks.
        """
        self.address = address
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._api_key = api_key
        self._tls: ssl.SSLContext | None = None
        self._idle: deque[Connection] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def begin(self, method: str, target: bytes, headers: Headers) -> Exchange:
        """Send the head of a request, on a connection that is open already or on a new one. Raises `UpstreamError`.

        A connection that the engine has closed meanwhile is not taken. A request is never sent a second time.
        """
        exchange = Exchange(self._unused() or await self._connect(self._connect_s), self._timeout_s)
        try:
            await exchange.send_head(method, target, headers)
        except BaseException:
            exchange.finish()
            raise
        return exchange

    def take_back(self, exchange: Exchange) -> None:
        """The exchange is over. Its connection is kept for another one if that is safe, else closed."""
        connection = exchange.finish()
        if connection is None:
            return
        self._idle.append(connection)
        if self._sweep is None and self._loop is not None:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_old)

    async def get(self, path: bytes, within_s: float = _ASK_S) -> tuple[int, bytes]:
        """Status and body of a GET that the proxy asks for itself, below the base of the address.

        Raises `UpstreamError`, also if the answer takes longer than `within_s` or is larger than 1 MiB.
        """
        headers: Headers = [(b"host", self.address.authority), (b"accept", b"application/json")]
        if self._api_key:
            headers.append((b"authorization", b"Bearer " + self._api_key.encode("utf-8", "replace")))
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(within_s):
                exchange = await self.begin("GET", self.address.target(path, b""), headers)
                await exchange.send_end()
                status, _ = await exchange.head()
                body = bytearray()
                async for piece in exchange.pieces():
                    body += piece
                    if len(body) > _LARGEST_ANSWER:
                        raise UpstreamError(f"{path.decode()} of {self.address} answers too much", sent=True)
                return status, bytes(body)
        except TimeoutError:
            raise UpstreamError(f"{path.decode()} of {self.address} gave no answer within {within_s:g} s") from None
        finally:
            if exchange is not None:
                self.take_back(exchange)

    async def accepts(self, within_s: float = _ASK_S) -> bool:
        """Whether the engine accepts a connection; nothing is asked of it."""
        try:
            (await self._connect(within_s)).abort()
        except UpstreamError:
            return False
        return True

    def close(self) -> None:
        """Close the connections that no request uses."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        while self._idle:
            self._idle.pop().abort()

    def _unused(self) -> Connection | None:
        """An open connection that waits for a request."""
        self._enter_loop()
        while self._idle:
            connection = self._idle.pop()  # the one that was used last: the others may grow old and go
            if time.monotonic() - connection.idle_since < _IDLE_S and connection.usable():
                return connection
            connection.abort()
        return None

    async def _connect(self, within_s: float) -> Connection:
        if self.address.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        return await Connection.open(self.address, self._tls, within_s)

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # connections of a loop that is over can't even be closed
            self._idle.clear()
            self._sweep = None
            self._loop = loop

    def _close_old(self) -> None:
        self._sweep = None
        now = time.monotonic()
        while self._idle and (now - self._idle[0].idle_since >= _IDLE_S or self._idle[0].closed):
            self._idle.popleft().abort()
        if self._idle and self._loop is not None:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_old)


async def detect(client: Upstream) -> tuple[str, str]:
    """Name and version of an engine, as it tells them itself: `("vllm", "0.32.0")`; both empty if it doesn't.

    vLLM and TensorRT-LLM answer `/version`, SGLang `/server_info` (older ones `/get_server_info`), TGI `/info`; the
    first three name themselves as owners of their models, too. Raises `UpstreamError` as long as the engine can't be
    reached, or answers that it isn't ready (5xx): then ask again.
    """
    told = await _asked(client, b"/version")
    if _version(told):
        return await _owner(client) or "vllm", _version(told)
    for path in (b"/server_info", b"/get_server_info"):
        told = await _asked(client, path)
        if not told.keys().isdisjoint(("tokenizer_path", "internal_states", "server_args")):
            return "sglang", _version(told)
    told = await _asked(client, b"/info")
    if "model_id" in told and "max_total_tokens" in told:
        return "tgi", _version(told)
    return await _owner(client), ""


async def _owner(client: Upstream) -> str:
    """The engine that its list of models names; empty if it names none that is known."""
    models = (await _asked(client, b"/v1/models")).get("data")
    model = models[0] if isinstance(models, list) and models else None
    return _OWNERS.get(str(model.get("owned_by")), "") if isinstance(model, dict) else ""


async def _asked(client: Upstream, path: bytes) -> Mapping[str, Any]:
    """The object that an engine answers; empty if it answers anything else."""
    status, body = await client.get(path)
    if status >= 500 and status != 501:
        raise UpstreamError(f"{client.address} isn't ready: {path.decode()} answers {status}", sent=True)
    try:
        answer = msgspec.json.decode(body) if status == 200 else None
    except msgspec.DecodeError:
        answer = None
    return answer if isinstance(answer, dict) else {}


def _version(told: Mapping[str, Any]) -> str:
    version = told.get("version")
    # It is logged and stored: an engine could write whole lines into the log.
    return version if isinstance(version, str) and version.isprintable() and len(version) <= _LONGEST_VERSION else ""
