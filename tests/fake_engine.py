"""A scripted inference engine: a pure ASGI app whose behaviour for a request is told by the request (`Script`).

It honours flags as the real engines do, misbehaves in every way that was reported of them, and tells afterwards what it
saw, from any process: in a `Notebook`, and over HTTP with `GET /__seen`. `POST /__tell?name=...` lets go what waits.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from tests import fake_sglang, fake_vllm
from tests.fake_script import HEADER, Script, script_of

__all__ = (
    "API_KEY_VARIABLE",
    "DIRECTORY_VARIABLE",
    "FakeEngine",
    "FakeEngineError",
    "Notebook",
    "Seen",
    "from_environment",
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DIRECTORY_VARIABLE, API_KEY_VARIABLE = "FAKE_ENGINE_DIR", "FAKE_ENGINE_API_KEY"

_LOOK_EVERY_S = 0.002


class FakeEngineError(Exception):
    """Raised by a handler, as a script wants it."""


class Seen(msgspec.Struct):
    """One request as it arrived, and what became of it."""

    key: str
    label: str
    pid: int
    method: str
    path: str
    raw_path: str | None
    root_path: str
    query: str
    headers: list[tuple[str, str]]
    body_base64: str | None = None
    events: int = 0
    """How many events of its stream were handed to the server."""
    disconnected: bool = False
    ended: str = ""
    """answered, cancelled, raised or gone; empty while it is at work."""

    @property
    def body(self) -> bytes | None:
        """What it read; None if it never read it."""
        return None if self.body_base64 is None else base64.b64decode(self.body_base64)

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"null")

    def header(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]


class Notebook:
    """What the engines of one directory saw, and what they are told; the same from every process."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(self, label: str, key: str, /, **what: Any) -> None:
        """A line about request `key`; whole, whichever processes write at the same time."""
        line = json.dumps({"key": key, **what}).encode() + b"\n"
        path = self._directory / f"seen-{quote(label, safe='')}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def read(self, label: str | None = None) -> list[Seen]:
        """The requests of one label in the order of their arrival; without one all, label by label."""
        paths = sorted(self._directory.glob("seen-*.jsonl" if label is None else f"seen-{quote(label, safe='')}.jsonl"))
        found: dict[str, dict[str, Any]] = {}
        for path in paths:
            for line in path.read_text().split("\n")[:-1]:  # what stands behind the last line end is being written
                what = json.loads(line)
                found.setdefault(what["key"], {}).update(what)
        return [msgspec.convert(each, Seen) for each in found.values()]

    def tell(self, name: str) -> None:
        """Go on: what waits under this name, now or later."""
        (self._directory / f"told-{name}").touch()

    def told(self, name: str) -> bool:
        return (self._directory / f"told-{name}").exists()


class FakeEngine:
    """The app.

    notes: where it writes what it sees. api_key: if it is set, paths below `/v1` need it, as vLLM does it.
    """

    def __init__(self, notes: Notebook, *, api_key: str = "") -> None:
        self.notes, self.api_key = notes, api_key
        self.lifespan: list[str] = []
        """The lifespan events that it was sent."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await _echo(receive, send)
        else:
            await _Request(self, scope, receive, send).handle()

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            self.lifespan.append(kind)
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return


def from_environment() -> FakeEngine:
    """An app factory for servers: the directory and the key stand in the environment."""
    return FakeEngine(Notebook(os.environ[DIRECTORY_VARIABLE]), api_key=os.environ.get(API_KEY_VARIABLE, ""))


async def _echo(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message.get("text") or ""})


_GENERATING = {
    "vllm": ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"),
    "sglang": ("/v1/chat/completions", "/generate"),
}
_OWN = ("/v1/own", "/own/v1/chat/completions")
"""Routes of this engine alone, that speak chat."""
_FIXED: dict[tuple[str, str], Any] = {
    ("GET", "/v1/models"): {"object": "list", "data": [{"id": fake_vllm.MODEL, "object": "model"}]},
    ("GET", "/openapi.json"): {"openapi": "3.1.0"},
    ("GET", "/version"): {"version": "0.32.0"},
    ("GET", "/get_server_info"): {"version": "0.5.23"},
    ("POST", "/tokenize"): {"count": 1, "max_model_len": 4096, "tokens": [6004], "token_strs": None},
    ("POST", "/detokenize"): {"prompt": "hi"},
    ("POST", "/v1/messages/count_tokens"): {"input_tokens": 32},
    ("POST", "/v1/chat/completions/render"): {"token_ids": [1, 2, 3]},
    ("POST", "/v1/embeddings"): {"object": "list", "data": [{"index": 0, "embedding": [0.5]}]},
    ("POST", "/v1/new/route"): {"result": "something that no table knows"},
}
_PAGES = {"/health": "", "/ping": "", "/docs": "<html>docs</html>", "/metrics": "# engine metrics\n", "/": "hello"}
_WITHOUT_IDS = {
    "/v1/messages": {
        "id": "msg_native",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "native"}],
        "model": fake_vllm.MODEL,
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 4, "output_tokens": 2},
    },
    "/v1/responses": {
        "id": "resp_native",
        "object": "response",
        "model": fake_vllm.MODEL,
        "status": "completed",
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "native"}]},
        ],
        "usage": {"input_tokens": 4, "output_tokens": 2},
    },
}


class _GoneError(Exception):
    """The client went away, and the engine gives up."""


class _Request:
    """One request."""

    def __init__(self, engine: FakeEngine, scope: Message, receive: Receive, send: Send) -> None:
        self.engine, self.scope, self.notes = engine, scope, engine.notes
        self._receive, self._send = receive, send
        self.key = uuid.uuid4().hex
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        root = scope.get("root_path", "")
        self.path: str = scope["path"]
        self.route = self.path.removeprefix(root) if root else self.path
        self.script = script_of(self.headers) if HEADER in self.headers else Script()
        self.body: bytes | None = None
        self.gone = False

    async def handle(self) -> None:
        if self.route.startswith("/__"):
            await self._tell()
            return
        self._arrived()
        ended = "raised"
        try:
            await self._answer()
            ended = "gone" if self.gone else "answered"
        except _GoneError:
            ended = "gone"
        except asyncio.CancelledError:
            ended = "cancelled"
            raise
        finally:
            self._write(ended=ended)

    def _write(self, **what: Any) -> None:
        self.notes.write(self.script.label, self.key, **what)

    def _arrived(self) -> None:
        scope = self.scope
        raw = scope.get("raw_path")
        self._write(
            label=self.script.label,
            pid=os.getpid(),
            method=scope["method"],
            path=self.path,
            raw_path=None if raw is None else raw.decode("latin-1"),
            root_path=scope.get("root_path", ""),
            query=scope["query_string"].decode("latin-1"),
            headers=[[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        )

    async def _tell(self) -> None:
        if self.route == "/__seen":
            await self._send_json([msgspec.to_builtins(each) for each in self.notes.read()])
        else:
            self.notes.tell(self.scope["query_string"].decode().removeprefix("name="))
            await self._send_json({})

    # ---- what is answered

    def _is_guarded(self) -> bool:
        """As vLLM does it: the key guards `/v1`, and no preflight."""
        return bool(self.engine.api_key) and self.scope["method"] != "OPTIONS" and self.route.startswith("/v1")

    async def _answer(self) -> None:
        script = self.script
        if script.raises == "early":
            raise FakeEngineError("before anything was read")
        if self._is_guarded() and self.headers.get("authorization") != f"Bearer {self.engine.api_key}":
            await self._send_json({"error": "Unauthorized"}, 401)
            return
        if script.reads == "first":
            await self._read()
        if script.redirect:
            await self._send_whole(b"", 307, "", [("location", script.redirect)])
            return
        if self.route != "/" and self.route.endswith("/"):  # as Starlette does it, with an absolute URL
            host = self.headers.get("host", "testserver")
            target = f"{self.scope.get('scheme', 'http')}://{host}{self.path.rstrip('/')}"
            query = self.scope["query_string"].decode("latin-1")
            await self._send_whole(b"", 307, "", [("location", target + (f"?{query}" if query else ""))])
            return
        if script.status:
            await self._send_whole((script.body or "").encode("utf-8", "surrogatepass"), script.status)
            return
        if self.scope["method"] == "POST" and self.route in (*_GENERATING[script.engine], *_WITHOUT_IDS, *_OWN):
            await self._generate()
            return
        await self._fixed()

    async def _fixed(self) -> None:
        method = self.scope["method"]
        found = _FIXED.get(("GET" if method == "HEAD" else method, self.route))
        if found is not None:
            await self._send_json(found)
        elif method in ("GET", "HEAD") and self.route in _PAGES:
            await self._send_whole(_PAGES[self.route].encode(), 200, "text/plain; charset=utf-8")
        elif method == "GET" and self.route == "/download":
            await self._download()
        elif method == "POST" and self.route == "/upload":
            await self._upload()
        elif method == "OPTIONS":
            await self._send_whole(b"", 200, "", [("allow", "GET, POST")])
        else:
            known = {path for _, path in _FIXED} | {
                *_PAGES,
                *_GENERATING["vllm"],
                *_GENERATING["sglang"],
                *_WITHOUT_IDS,
            }
            status, word = (405, "Method Not Allowed") if self.route in known else (404, "Not Found")
            await self._send_json({"detail": word}, status)

    async def _download(self) -> None:
        """So many pieces of 64 KiB; how far it came stands in the notes."""
        pieces = int(self.scope["query_string"].decode().removeprefix("pieces="))
        await self._send({"type": "http.response.start", "status": 200, "headers": []})
        for count in range(pieces):
            await self._send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self._write(events=count + 1)
        await self._send({"type": "http.response.body", "body": b""})

    async def _upload(self) -> None:
        """Read the first piece, stand still until told, then count the rest; how far it came stands in the notes."""
        taken, more = 0, True
        while more:
            message = await self._receive()
            taken += len(message.get("body", b""))
            more = message.get("more_body", False)
            self._write(events=taken)
            await self._wait("upload")
        await self._send_json({"taken": taken})

    async def _generate(self) -> None:
        script = self.script
        if script.raises == "late":
            raise FakeEngineError("it may have sampled")
        try:
            request = json.loads(self.body or b"{}")
            if not isinstance(request, dict):
                raise fake_vllm.RefusalError("the body is no object")
        except ValueError as error:
            await self._send_json(fake_vllm.RefusalError(str(error)).body, 400)
            return
        except fake_vllm.RefusalError as refusal:
            await self._send_json(refusal.body, 400)
            return
        try:
            if request.get("stream") and self.route not in _WITHOUT_IDS:
                await self._stream(self._events(request))
            else:
                await self._work(request)
        except fake_vllm.RefusalError as refusal:
            await self._send_json(refusal.body, 400)

    def _events(self, request: dict[str, Any]) -> Iterator[Any]:
        if self.script.engine == "sglang":
            return fake_sglang.events(self.route, request, self.script, self.headers)
        return fake_vllm.events(self._format, request, self.script)

    @property
    def _format(self) -> str:
        return "/v1/chat/completions" if self.route in _OWN else self.route

    async def _work(self, request: dict[str, Any]) -> None:
        """An answer that is not streamed: cancelled if the client goes away meanwhile, unless the script is deaf."""
        script = self.script
        if self.route in _WITHOUT_IDS:
            made: Any = _WITHOUT_IDS[self.route]
        elif script.engine == "sglang":
            made = fake_sglang.answer(self.route, request, script, self.headers)
        else:
            made = fake_vllm.answer(self._format, request, script)
        try:
            await self._unless_gone(self._wait("answer"))
        except _GoneError:
            # The handler is cancelled, and its answer is an empty one.
            await self._send_whole(script.gone.encode(), 200)
            raise
        if script.body is not None:
            await self._send_whole(script.body.encode("utf-8", "surrogatepass"), 200, script.content_type)
        else:
            await self._send_whole(self._encoded(made), 200)

    def _encoded(self, made: Any) -> bytes:
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        if self.script.literal_nan:
            text = text.replace('"logprob":null', '"logprob":NaN')
        return text.encode("utf-8", "surrogatepass")

    # ---- how it is sent

    async def _send_json(self, content: Any, status: int = 200) -> None:
        await self._send_whole(json.dumps(content, separators=(",", ":")).encode(), status, "application/json")

    async def _send_whole(
        self, body: bytes, status: int, content_type: str | None = None, more: list[tuple[str, str]] | None = None
    ) -> None:
        headers = [*(more or []), *self.script.headers]
        content_type = self.script.content_type if content_type is None else content_type
        if content_type:
            headers.insert(0, ("content-type", content_type))
        if self.script.gzip:
            body = gzip.compress(body, mtime=0)
            headers.append(("content-encoding", "gzip"))
        headers.insert(0, ("content-length", str(len(body))))
        await self._start(status, headers)
        # Without the key `more_body`, as Starlette sends the body of a JSON answer.
        shown = b"" if self.scope["method"] == "HEAD" else body
        size = self.script.cut if self.script.cut > 0 else max(len(shown), 1)
        pieces = [shown[at : at + size] for at in range(0, len(shown), size)] or [b""]
        for piece in pieces[:-1]:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": pieces[-1]})

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _stream(self, made: Iterator[Any]) -> None:
        script = self.script
        headers = [("content-type", "text/event-stream; charset=utf-8"), *script.headers]
        if script.gzip:
            headers.append(("content-encoding", "gzip"))
        await self._start(200, headers)
        try:
            await self._unless_gone(self._send_pieces(made))
        except _GoneError:
            self.gone = True  # the app returns as if nothing were: no last message

    async def _send_pieces(self, made: Iterator[Any]) -> None:
        script = self.script
        packer = zlib.compressobj(wbits=31) if script.gzip else None
        held = b""
        async for piece in self._pieces(made):
            if packer is not None:
                piece = packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)
            if script.cut == 0:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            elif script.cut < 0:
                held += piece
            else:
                held += piece
                while len(held) >= script.cut:
                    part, held = held[: script.cut], held[script.cut :]
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})
        if packer is not None:
            held += packer.flush()
        if held or script.last_more:
            await self._send({"type": "http.response.body", "body": held, "more_body": script.last_more})
        if script.last_more:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        elif not held:
            await self._send({"type": "http.response.body", "body": b""})

    async def _pieces(self, made: Iterator[Any]) -> AsyncIterator[bytes]:
        script, end = self.script, self.script.line_end
        if script.comments:
            yield f": keep-alive{end}{end}".encode()
        for count, event in enumerate(made):
            await self._wait(str(count))
            if count == script.stops_after:
                return
            if count == script.raises_after:
                raise FakeEngineError(f"after {count} events")
            if count == script.error_after:
                error = {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": 500}
                yield f"data: {json.dumps({'error': error})}{end}{end}".encode()
                break
            yield b"data: " + self._encoded(event) + f"{end}{end}".encode()
            self._write(events=count + 1)
            if script.comments:
                yield f": keep-alive{end}{end}".encode()
        await self._wait("end")
        if script.done:
            yield f"data: [DONE]{end}{end}".encode()

    # ---- what comes from outside

    async def _read(self) -> None:
        await self._wait("body")
        taken = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._write(disconnected=True)
                raise _GoneError
            taken.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self.body = b"".join(taken)
        self._write(body_base64=base64.b64encode(self.body).decode())

    async def _wait(self, place: str) -> None:
        if self.script.waits_at(place):
            while not self.notes.told(f"{self.script.label}-{place}"):
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _unless_gone(self, work: Any) -> None:
        """Raise `_GoneError` if the client goes away before the work is done, which is then cancelled."""
        if self.script.deaf:
            await work
            return
        worker, listener = asyncio.ensure_future(work), asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((worker, listener), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            raise
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        if worker.done():
            worker.result()
            return
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        raise _GoneError

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._write(disconnected=True)
