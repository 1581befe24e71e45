"""How a situation of serving is played: a small client, over ASGI in this process or over a socket.

`Harness` is what situations are written against. `InProcess` holds the middleware and the scripted engine;
`tests.serving_network` talks to whatever serves on a port. Both look at the store only through its public side.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tests.fake_engine import FakeEngine, Message, Notebook
from tokcap import CallRecord, FileStore, TokenEntry
from tokcap.errors import StoreNotFoundError

__all__ = (
    "Exchange",
    "Harness",
    "InProcess",
    "RecordingSink",
    "ask",
    "events_of",
    "harnesses",
    "ordered",
    "plain_answer",
    "same_log_probs",
)

# Before they are imported, so that their assertions tell what they compared.
_WITH_ASSERTIONS = ("steps", "answers", "ends", "asks", "views", "requests", "records")
pytest.register_assert_rewrite(*(f"tests.serving_{name}" for name in _WITH_ASSERTIONS))

PATIENCE_S = 30.0
"""After this long something hangs; generous, because no test is about speed."""

Header = tuple[str, str]


@dataclass
class Exchange:
    """What a client got."""

    status: int = 0
    headers: list[Header] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    """The body as it came: ASGI body messages, or what was read from a socket at a time."""
    ended: bool = False
    """Whether the end of the body was seen."""
    error: BaseException | None = None
    """What the app raised to its server, or what the connection died of."""

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The only value of a header; None if it is absent."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) < 2, f"{name} stands {len(values)} times"
        return values[0] if values else None

    @property
    def events(self) -> list[str]:
        """The data of each event of a stream, `[DONE]` included, without comments."""
        return events_of(self.body)


def events_of(body: bytes) -> list[str]:
    """The data of each whole event in a body."""
    text = body.decode().replace("\r\n", "\n")
    blocks = text.split("\n\n")[:-1]
    return [
        "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines)
        for block in blocks
        if (lines := [line for line in block.split("\n") if line.startswith("data:")])
    ]


def ordered(text: str | bytes) -> Any:
    """A JSON text so that the order of keys and the kind of every number count when two are compared."""
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: ("object", tuple(pairs)),
        parse_float=lambda number: ("float", float(number)),
        parse_int=lambda number: ("int", int(number)),
        parse_constant=lambda name: ("constant", name),
    )


def ask(path: str, **body: Any) -> bytes:
    """The body of a request to one of the engine's routes, as a client writes it."""
    if path.endswith(("/chat/completions", "/messages")):
        start: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    elif path == "/generate":
        start = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
    elif path.endswith("/generate"):
        start = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}}
    elif path.endswith("/responses"):
        start = {"model": "policy", "input": "hello"}
    else:
        start = {"model": "policy", "prompt": "hello"}
    if path.endswith("/messages"):
        start["max_tokens"] = 64
    return json.dumps(start | body).encode()


class Harness(ABC):
    """The client and the looks at what it left behind."""

    kind = ""
    """in process, workers or proxy."""

    def __init__(self, store_dir: Path, notes: Notebook) -> None:
        self.store_dir, self.notes = store_dir, notes

    @abstractmethod
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
        """One request and its answer.

        target: path and query as they stand in the request line. parts: the body in several messages. The client goes
        away after so many whole events, or when something holds; then: done once it has gone, while the server works.
        """

    @staticmethod
    def new_rollout() -> str:
        return f"r-{uuid.uuid4().hex[:12]}"

    def remains(self) -> list[str]:
        """Every rollout of which anything was written."""
        try:
            with FileStore(self.store_dir, read_only=True) as store:
                return [name for name, _ in store.rollouts()]
        except StoreNotFoundError:
            return []

    # ---- what the store shows

    def exists(self, rollout_id: str) -> bool:
        """Whether anything was written for it."""
        try:
            with FileStore(self.store_dir, read_only=True) as store:
                return store.stat_now(rollout_id).state != "absent"
        except StoreNotFoundError:
            return False

    def calls(self, rollout_id: str) -> list[CallRecord]:
        """Its calls, in the order in which they began."""
        try:
            with FileStore(self.store_dir, read_only=True) as store, store.read_now(rollout_id) as snapshot:
                return sorted(snapshot.calls, key=lambda call: call.begun_at or 0.0)
        except StoreNotFoundError:
            return []

    def entries(self, rollout_id: str) -> list[TokenEntry]:
        """Its entries, call by call and choice by choice."""
        order = {call.model_call_id: place for place, call in enumerate(self.calls(rollout_id))}
        with FileStore(self.store_dir, read_only=True) as store, store.read_now(rollout_id) as snapshot:
            entries = list(snapshot.entries)
        return sorted(entries, key=lambda entry: (order[entry.model_call_id], entry.choice_index))

    def outcomes(self, rollout_id: str) -> list[str]:
        return [call.outcome for call in self.calls(rollout_id)]

    def settled(self, rollout_id: str) -> list[str]:
        """The outcomes once no call is open any more: for calls whose client left before their end."""
        self.until(lambda: "open" not in (self.outcomes(rollout_id) or ["open"]))
        return self.outcomes(rollout_id)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that the server does by itself."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"did not happen within {PATIENCE_S:g} s"
            self.pause()

    def pause(self) -> None:
        time.sleep(0.005)


# ---- in this process


class RecordingSink:
    """A file store that writes down, in one list with what is sent, when its operations begin and return.

    fails: an operation -> what it raises. gate: put waits until it is set.
    """

    def __init__(self, store: FileStore, log: list[tuple[str, Any]]) -> None:
        self.store, self.log = store, log
        self.fails: dict[str, BaseException] = {}
        self.gate: asyncio.Event | None = None

    async def _do(self, name: str, operation: Callable[[], Awaitable[None]]) -> None:
        self.log.append((f"{name} begins", None))
        if name == "put" and self.gate is not None:
            await self.gate.wait()
        if name in self.fails:
            raise self.fails[name]
        await operation()
        self.log.append((f"{name} returned", None))

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await self._do("begin_call", lambda: self.store.begin_call(rollout_id, model_call_id, choices, **known))

    async def put(self, entry: TokenEntry) -> None:
        await self._do("put", lambda: self.store.put(entry))

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        await self._do("put", lambda: self.store.put_many(entries))

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: Any, detail: str = "") -> None:
        await self._do("settle_call", lambda: self.store.settle_call(rollout_id, model_call_id, outcome, detail))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._do("mark_incomplete", lambda: self.store.mark_incomplete(rollout_id, model_call_id))

    async def note_delivery(self, rollout_id: str, model_call_id: str, delivered: Any) -> None:
        await self._do("note_delivery", lambda: self.store.note_delivery(rollout_id, model_call_id, delivered))

    async def close(self) -> None:
        await self.store.close()


class InProcess(Harness):
    """The middleware around the scripted engine, called as a server calls it, on one event loop.

    settings: of the middleware. config: its second argument; with one it makes its own sink, else it is given a
    `RecordingSink`. Nobody ever sends it a lifespan event.
    """

    kind = "in process"

    def __init__(
        self,
        directory: Path,
        *,
        config: Any = None,
        own_sink: bool = False,
        api_key: str = "",
        wrap: Callable[[Any], Any] = lambda app: app,
        **settings: Any,
    ) -> None:
        from tokcap.asgi import CaptureMiddleware

        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory / "store", Notebook(directory / "engine"))
        self.log: list[tuple[str, Any]] = []
        """What was sent to the client, and what the sink did, in order."""
        self.runner = asyncio.Runner()
        self.engine = FakeEngine(self.notes, api_key=api_key)
        self.inner = wrap(self.engine)
        self.sink: RecordingSink | None = None
        if config is None and not own_sink:
            store = FileStore(self.store_dir, require_intent=True, sweep_every_s=0)
            self.sink = RecordingSink(store, self.log)
        self.app: Any = CaptureMiddleware(self.inner, config, sink=self.sink, **settings)
        self.root_path = ""
        self.scope: dict[str, Any] = {}
        """What else the server puts into the scope."""
        self.without_raw_path = False
        self.send_raises = False
        """Whether the server raises `OSError` when something is sent to a client that has gone."""

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
        exchange: Exchange = self.run(
            self.exchange(
                method,
                target,
                headers=headers,
                body=body,
                parts=parts,
                disconnect_after=disconnect_after,
                disconnect_when=disconnect_when,
                then=then,
            )
        )
        return exchange

    def run(self, work: Any) -> Any:
        """On the event loop of this harness."""
        return self.runner.run(asyncio.wait_for(work, PATIENCE_S))

    def pause(self) -> None:
        # What the middleware left behind goes on only while the loop runs.
        self.runner.run(asyncio.sleep(0.002))

    async def exchange(
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
        on_send: Callable[[Message], Awaitable[None]] | None = None,
        on_receive: Callable[[], None] | None = None,
    ) -> Exchange:
        """`request` as a coroutine. on_send, on_receive: called at each message."""
        client = _Client(self, [body] if parts is None else list(parts), disconnect_after)
        client.on_send, client.on_receive = on_send, on_receive
        watcher = asyncio.ensure_future(client.watch(disconnect_when, then))
        try:
            await self.app(
                self.scope_of(method, target, headers, body if parts is None else None), client.receive, client.send
            )
        except Exception as error:
            client.exchange.error = error
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        return client.exchange

    def scope_of(self, method: str, target: str, headers: Iterable[Header], body: bytes | None) -> dict[str, Any]:
        path, _, query = target.partition("?")
        raw_path = (quote(self.root_path) + path).encode("latin-1")
        sent = [("host", "testserver"), *headers]
        if body and not any(name.lower() == "content-length" for name, _ in sent):
            sent.append(("content-length", str(len(body))))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": self.root_path + unquote(path),
            "raw_path": raw_path,
            "query_string": query.encode("latin-1"),
            "root_path": self.root_path,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in sent],
            "client": ("127.0.0.1", 40000),
            "server": ("testserver", 80),
            **self.scope,
        }
        if self.without_raw_path:
            del scope["raw_path"]
        return scope

    def close(self) -> None:
        self.runner.close()
        if self.sink is not None:
            self.sink.store.close_now()


class _Client:
    """One connection as an ASGI server shows it."""

    def __init__(self, harness: InProcess, parts: list[bytes], disconnect_after: int | None) -> None:
        self.harness, self.parts = harness, parts
        self.disconnect_after = disconnect_after
        self.exchange = Exchange()
        self.over = asyncio.Event()
        """The answer is complete, or the client has gone: `receive` says `http.disconnect` from now on."""
        self.gone = False
        self.on_send: Callable[[Message], Awaitable[None]] | None = None
        self.on_receive: Callable[[], None] | None = None

    async def receive(self) -> Message:
        if self.on_receive is not None:
            self.on_receive()
        await asyncio.sleep(0)
        if not self.gone and self.parts:
            part = self.parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.parts)}
        await self.over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)  # as a server does that waits for its socket
        if self.gone:
            if self.harness.send_raises:
                raise OSError("the client has gone")
            return
        exchange = self.exchange
        self.harness.log.append(("sent", message))
        assert not exchange.ended, f"sent after the end: {message}"
        if message["type"] == "http.response.start":
            assert not exchange.status, "a second start"
            exchange.status = message["status"]
            raw = message.get("headers", [])
            exchange.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
        else:
            assert exchange.status, "a body before the start"
            if message.get("body"):
                exchange.chunks.append(message["body"])
            if not message.get("more_body", False):
                exchange.ended = True
                self.over.set()
        if self.on_send is not None:
            await self.on_send(message)
        if self.disconnect_after is not None and len(exchange.events) >= self.disconnect_after:
            self.leave()

    def leave(self) -> None:
        self.gone = True
        self.over.set()

    async def watch(self, holds: Callable[[], bool] | None, then: Callable[[], None] | None) -> None:
        while holds is not None and not holds():
            await asyncio.sleep(0.002)
        if holds is not None:
            self.leave()
        await self.over.wait()
        for _ in range(20):  # so that whoever listens has heard of it
            await asyncio.sleep(0)
        if then is not None:
            then()


def harnesses(directory: Path) -> Iterator[Callable[..., InProcess]]:
    """For a fixture of a test module: makes harnesses, each in a directory of its own, and closes them."""
    made: list[InProcess] = []

    def make(**settings: Any) -> InProcess:
        made.append(InProcess(directory / str(len(made)), engine=settings.pop("engine", "vllm"), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def plain_answer(
    directory: Path, method: str, target: str, *, headers: Iterable[Header] = (), body: bytes = b"", api_key: str = ""
) -> Exchange:
    """What the engine alone answers to the same request."""
    harness = _Alone(directory, api_key)
    return asyncio.run(asyncio.wait_for(harness.exchange(method, target, headers=headers, body=body), PATIENCE_S))


class _Alone(InProcess):
    def __init__(self, directory: Path, api_key: str) -> None:
        Harness.__init__(self, directory / "store", Notebook(directory / f"alone-{uuid.uuid4().hex}"))
        self.log, self.scope, self.root_path = [], {}, ""
        self.without_raw_path = self.send_raises = False
        self.app = FakeEngine(self.notes, api_key=api_key)


def same_log_probs(entry: TokenEntry, expected: Sequence[float | None]) -> bool:
    """Whether an entry holds exactly these, NaN where one is None."""
    found = [None if math.isnan(value) else value for value in entry.generation_log_probs.tolist()]
    return found == list(expected)
