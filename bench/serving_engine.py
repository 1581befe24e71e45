"""The server that is measured: an engine that only hands out bytes, tokcap around it, uvicorn around both.

It runs in a process of its own. Beside the chat route it has `/bench/`, where the client says what comes and asks what
was seen inside: how long intents and puts took, CPU, the longest callback of the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from tokcap import FileStore, TokenEntry

from .serving_traffic import Conversation

__all__ = ("Figures", "Prepare", "serve")


class Prepare(msgspec.Struct, frozen=True):
    """The calls that come next, for `POST /bench/prepare`: their answers are made before any of them is measured."""

    first_prompt: int
    turns: int
    streamed: bool
    generation_s: float
    """How long the engine takes for an answer; 0: it has it at once."""


class Figures(msgspec.Struct):
    """What the server saw between `POST /bench/begin` and `GET /bench/end`."""

    intents: list[float] = []
    """Seconds of each `begin_call` of the store."""
    puts: list[float] = []
    """Seconds of each `put`."""
    cpu_s: float = 0.0
    """Of the whole process, all threads."""
    longest_callback_s: float = 0.0
    """CPU of the longest callback of the event loop: for so long no other call was served."""
    longest_collection_s: float = 0.0
    """CPU of the longest garbage collection, which is part of whatever callback it happens in."""
    peak_bytes: int = 0
    """Most memory that the process has had so far."""


class _Watch:
    """Collects `Figures`."""

    def __init__(self) -> None:
        self.figures = Figures()
        self._cpu_s = 0.0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def begin(self) -> None:
        gc.collect()  # what others left behind is not to be collected in the time of this one
        await asyncio.sleep(0)  # so that this callback is not the longest
        self.figures, self._cpu_s = Figures(), time.process_time()

    async def end(self) -> Figures:
        """Waits for what goes on after an answer was sent: it belongs to its call."""
        await self._idle.wait()
        self.figures.cpu_s = time.process_time() - self._cpu_s
        self.figures.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.figures

    def around(self, app: Any) -> Any:
        """`app`, with its requests counted while they run."""

        async def counted(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            if scope["path"].startswith("/bench/"):
                await app(scope, receive, send)
                return
            self._running += 1
            self._idle.clear()
            try:
                await app(scope, receive, send)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

        return counted

    def time_callbacks(self) -> None:
        """Take the CPU of every callback of every event loop of this process; that costs each of them a microsecond."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            taken = time.thread_time() - begun
            if taken > self.figures.longest_callback_s:
                self.figures.longest_callback_s = taken

        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]
        begun = 0.0

        def collecting(phase: str, _: dict[str, int]) -> None:
            nonlocal begun
            if phase == "start":
                begun = time.thread_time()
            else:
                self.figures.longest_collection_s = max(self.figures.longest_collection_s, time.thread_time() - begun)

        gc.callbacks.append(collecting)


class _TimedStore(FileStore):
    """A store whose intents and puts are timed."""

    watch: _Watch

    async def begin_call(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int = 1,
        *,
        request_digests: Iterable[bytes] = (),
        retry_count: int = 0,
        idempotency_key: str = "",
    ) -> None:
        begun = time.perf_counter()
        await super().begin_call(
            rollout_id,
            model_call_id,
            choices,
            request_digests=request_digests,
            retry_count=retry_count,
            idempotency_key=idempotency_key,
        )
        self.watch.figures.intents.append(time.perf_counter() - begun)

    async def put(self, entry: TokenEntry) -> None:
        begun = time.perf_counter()
        await super().put(entry)
        self.watch.figures.puts.append(time.perf_counter() - begun)


class _Engine:
    """An ASGI application that answers chat completions with what was made ready.

    A chunk of a stream leaves in a turn of the event loop of its own, as it does where chunks come from a queue.
    """

    def __init__(self, watch: _Watch) -> None:
        self.stop: Callable[[], None] = lambda: None
        """Ends the server, for `POST /bench/stop`."""
        self._watch = watch
        self._whole: dict[tuple[int, bool], bytes] = {}
        self._streams: dict[tuple[int, bool], list[bytes]] = {}
        self._generation_s = 0.0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"] if body else message["body"], message["more_body"]
        if scope["path"].startswith("/bench/"):
            await _send_whole(await self._control(scope["path"], body), send)
            return
        # What is asked stands before the messages, whoever asks it.
        head = body[:400]
        turn = next(int(value) for name, value in scope["headers"] if name == b"x-bench-turn")
        key = turn, b'"return_token_ids":true' in head
        if b'"stream":true' in head:
            await self._stream(self._streams[key], send)
            return
        if self._generation_s:
            await asyncio.sleep(self._generation_s)
        await _send_whole(self._whole[key], send)

    async def _stream(self, events: list[bytes], send: Any) -> None:
        pause = self._generation_s / len(events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _control(self, path: str, body: bytes) -> bytes:
        if path == "/bench/prepare":
            self._prepare(msgspec.json.decode(body, type=Prepare))
        elif path == "/bench/begin":
            await self._watch.begin()
        elif path == "/bench/end":
            return msgspec.json.encode(await self._watch.end())
        else:
            self.stop()
        return b"{}"

    def _prepare(self, cell: Prepare) -> None:
        conversation = Conversation(cell.first_prompt, cell.turns)
        self._generation_s = cell.generation_s
        self._whole, self._streams = {}, {}
        for turn in range(cell.turns):
            for flags in (False, True):
                if cell.streamed:
                    self._streams[turn, flags] = conversation.events(turn, flags=flags)
                else:
                    self._whole[turn, flags] = conversation.answer(turn, flags=flags)


async def _send_whole(body: bytes, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def serve(listening: socket.socket, directory: str) -> None:
    """Serve until `POST /bench/stop`, with one worker as uvicorn makes it: asyncio's own loop, httptools."""
    import uvicorn

    from tokcap.asgi import CaptureMiddleware

    async def main() -> None:
        watch = _Watch()
        watch.time_callbacks()
        engine = _Engine(watch)
        async with _TimedStore(directory, require_intent=True) as store:
            store.watch = watch
            app = CaptureMiddleware(engine, sink=store, engine="vllm", engine_version="0.33.0")
            config = uvicorn.Config(
                watch.around(app),
                http="httptools",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=3600,  # connections wait while the other ways are measured
            )
            server = uvicorn.Server(config)

            def stop() -> None:
                server.should_exit = True

            engine.stop = stop
            await server.serve([listening])

    asyncio.run(main())
