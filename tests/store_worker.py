"""Store objects that tests drive: in this process, from threads or an event loop, or in processes that can be killed.

Every object takes operations and gives futures of their results; those of a killed process end as `UNKNOWN`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from tests.state_model import UNKNOWN, Operation, Raised, Seen
from tokcap import FileStore
from tokcap.store.files import Files
from tokcap.store.snapshot import Snapshot

__all__ = ("LocalObject", "RemoteObject", "UnsyncedFiles", "seen")

PATIENCE_S = 60.0


class UnsyncedFiles(Files):
    """Waits for no device: for tests of everything but durability, which then see many more interleavings."""

    def fdatasync(self, fd: int) -> None:
        """As long as a fast device takes, and no more."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


UnsyncedFiles()  # Imports what a store imports on first use: workers are forked from a process that has it.


def seen(snapshot: Snapshot) -> Seen:
    """Everything that a snapshot shows; it is closed afterwards."""
    with snapshot:
        return Seen(
            snapshot.snapshot_id,
            snapshot.version,
            snapshot.incomplete,
            snapshot.finished,
            snapshot.meta,
            tuple(snapshot.entries),
            {
                call.model_call_id: (
                    call.outcome,
                    call.delivered,
                    call.retry_count,
                    call.idempotency_key,
                    tuple(call.request_digests),
                    call.begun_at is not None,
                    call.ended_at is not None,
                )
                for call in snapshot.calls
            },
        )


def perform(store: FileStore, operation: Operation, *, suffix: str = "_now") -> Any:
    """Start an operation through the blocking (`_now`) or the async method of a store."""
    rollout_id, call = operation.rollout_id, operation.call

    def method(name: str) -> Any:
        return getattr(store, name + suffix)

    match operation.name:
        case "put" if len(operation.entries) == 1:
            return method("put")(operation.entries[0])
        case "put":
            return method("put_many")(operation.entries)
        case "begin":
            return method("begin_call")(
                rollout_id,
                call,
                operation.number,
                request_digests=operation.digests,
                retry_count=operation.number - 1,
                idempotency_key=operation.word,
            )
        case "settle" if operation.word == "lost":
            return method("mark_incomplete")(rollout_id, call)
        case "settle":
            return method("settle_call")(rollout_id, call, operation.word)
        case "deliver":
            return method("note_delivery")(rollout_id, call, operation.word)
        case "finish":
            return method("finish")(rollout_id, operation.meta)
        case "retire":
            return method("retire")(rollout_id, snapshot_id=operation.word, version=operation.number)
        case "sweep":
            return method("sweep")(0)
        case name:
            return method(name)(rollout_id)


def attempt(act: Callable[[], Any]) -> object:
    """The result of an operation, its error included."""
    try:
        result = act()
        return seen(result) if isinstance(result, Snapshot) else result
    except Exception as error:
        return Raised(type(error).__name__, str(error))


class LocalObject:
    """A store object of this process; every operation runs in a thread of its own, or on an event loop."""

    def __init__(self, name: str, *, on_loop: bool = False, **options: Any) -> None:
        self.name, self.options = name, options
        self.strict = bool(options.get("require_intent"))
        self._threads = ThreadPoolExecutor(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.store: FileStore | None = None
        if on_loop:
            self._loop = asyncio.new_event_loop()
            self._runner = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._runner.start()

    def open(self, directory: str, *, synced: bool = True) -> None:
        files = None if synced else UnsyncedFiles()
        self.store = FileStore(directory, sweep_every_s=0, files=files, **self.options)

    def close(self) -> None:
        if self.store is not None:
            self.store.close_now()
            self.store = None

    def start(self, operation: Operation) -> Future[object]:
        store, loop = self.store, self._loop
        assert store is not None
        if loop is None:
            return self._threads.submit(attempt, lambda: perform(store, operation))

        async def act() -> object:
            try:
                result = await perform(store, operation, suffix="")
                return seen(result) if isinstance(result, Snapshot) else result
            except Exception as error:
                return Raised(type(error).__name__, str(error))

        return asyncio.run_coroutine_threadsafe(act(), loop)

    def end(self) -> None:
        self.close()
        self._threads.shutdown()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._runner.join()
            self._loop.close()


class RemoteObject:
    """A store object in a process of its own, which takes several operations at once and can be killed."""

    def __init__(self, name: str, *, on_loop: bool = False, **options: Any) -> None:
        self.name, self.options, self.on_loop = name, options, on_loop
        self.strict = bool(options.get("require_intent"))
        self._tags = itertools.count()
        self._waiting: dict[int, Future[object]] = {}
        self._guard = threading.Lock()
        self._directory, self._synced = "", True
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.on_loop, self.options), daemon=True)
        self._process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, args=(self._connection,), daemon=True)
        self._reader.start()

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tag, result = connection.recv()
                with self._guard:
                    future = self._waiting.pop(tag)
                future.set_result(result)
        with self._guard:
            lost, self._waiting = list(self._waiting.values()), {}
        for future in lost:
            future.set_result(UNKNOWN)

    def start(self, operation: object) -> Future[object]:
        future: Future[object] = Future()
        with self._guard:
            tag = next(self._tags)
            self._waiting[tag] = future
        try:
            self._connection.send((tag, operation))
        except OSError:  # killed meanwhile: it never learned of this
            with self._guard:
                unheard = self._waiting.pop(tag, None)
            if unheard is not None:
                unheard.set_result(UNKNOWN)
        return future

    def open(self, directory: str, *, synced: bool = True) -> None:
        self._directory, self._synced = directory, synced
        self._expect_done(("open", directory, synced))

    def close(self) -> None:
        if self._directory:
            self._expect_done(("close",))
            self._directory = ""

    def _expect_done(self, command: tuple[object, ...]) -> None:
        result = self.start(command).result(PATIENCE_S)
        assert result is None, result

    def kill(self) -> None:
        """As by `kill -9`; what was under way ends as `UNKNOWN`."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._reader.join()
        self._connection.close()
        self._process.close()

    def revive(self) -> None:
        """Another process in place of a killed one, on the same directory."""
        self._spawn()
        if self._directory:
            self.open(self._directory, synced=self._synced)

    def end(self) -> None:
        self.kill()


def _serve(connection: Connection, on_loop: bool, options: dict[str, Any]) -> None:
    local = LocalObject("", on_loop=on_loop, **options)
    sending = threading.Lock()

    def answer(tag: int, result: object) -> None:
        with sending, contextlib.suppress(OSError):
            connection.send((tag, result))

    while True:
        try:
            tag, command = connection.recv()
        except EOFError:
            return
        if isinstance(command, Operation):
            local.start(command).add_done_callback(lambda future, tag=tag: answer(tag, future.result()))  # type: ignore[misc]
        elif command[0] == "open":
            answer(tag, attempt(lambda command=command: local.open(command[1], synced=command[2])))  # type: ignore[misc]
        else:
            answer(tag, attempt(local.close))
